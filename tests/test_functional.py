"""The public functions: what they add to the operator, their sentences, and the debug check."""

from __future__ import annotations

import re

import pytest
import torch

import rope_compile as rc
from rope_compile.ops import rope_op

from oracle import assert_near_oracle, oracle_rotate, oracle_table
from support import NoHostReads, randn, run_child

ROWS = 128
INV_FREQ = (1.0 / 1e4 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)).float()
TABLE = oracle_table(ROWS, INV_FREQ)
POSITIONS = torch.tensor([0, 5, ROWS, -3, 2**31 - 1])
Q, K = randn(5, 3, 12, seed=1), randn(5, 1, 12, seed=2)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("inverse", [False, True])
def test_apply_rope_equals_float64_and_its_in_place_twin(style, offset, inverse) -> None:
    options = {"inv_freq": INV_FREQ, "rotary_offset": offset, "style": style, "inverse": inverse}
    outs = rc.apply_rope(Q, K, POSITIONS, TABLE, **options)
    for x, out in zip((Q, K), outs, strict=True):
        expected, larger = oracle_rotate(
            x, POSITIONS, INV_FREQ, style=style, rotary_offset=offset, inverse=inverse
        )
        assert_near_oracle(out, expected, larger)
        copy = x.clone()
        assert rc.apply_rope_(copy, None, POSITIONS, TABLE, **options) is None
        assert torch.equal(copy, out)


def test_k_may_be_absent() -> None:
    q_out, k_out = rc.apply_rope(Q, None, POSITIONS, TABLE, inv_freq=INV_FREQ)
    assert k_out is None
    assert torch.equal(q_out, rc.apply_rope(Q, K, POSITIONS, TABLE, inv_freq=INV_FREQ)[0])


def test_attention_scaling_multiplies_computed_rows_as_the_table_has_it() -> None:
    table = oracle_table(ROWS, INV_FREQ, 1.5)
    out, _ = rc.apply_rope(Q, None, POSITIONS, table, inv_freq=INV_FREQ, attention_scaling=1.5)
    expected, larger = oracle_rotate(Q, POSITIONS, INV_FREQ, attention_scaling=1.5)
    assert_near_oracle(out, expected, 1.5 * larger)


def test_axes_as_a_map_and_as_a_lane_list_agree() -> None:
    positions = torch.randint(-5, 300, (2, 5))
    by_map, _ = rc.apply_rope(
        Q, None, positions, TABLE, inv_freq=INV_FREQ, axes=rc.ChunkedAxes((1, 3))
    )
    by_list, _ = rc.apply_rope(Q, None, positions, TABLE, inv_freq=INV_FREQ, axes=(0, 1, 1, 1))
    assert torch.equal(by_map, by_list)
    expected, larger = oracle_rotate(Q, positions, INV_FREQ, lane_axes=(0, 1, 1, 1))
    assert_near_oracle(by_map, expected, larger)


BAD = {
    "q": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "q none": ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
    "k": ({"k": 3}, TypeError, "k must be a tensor or None, got int"),
    "positions": ({"positions": 7}, TypeError, "positions must be a tensor, got int"),
    "cache": ({"cos_sin_cache": (TABLE, TABLE)}, TypeError, "cos_sin_cache must be a tensor"),
    "inv_freq": ({"inv_freq": 1e4}, TypeError, "inv_freq must be a tensor or None, got float"),
    "rotary_dim": (
        {"rotary_dim": 12}, ValueError,
        "rotary_dim must be the width of cos_sin_cache, 8, got 12; leave it out",
    ),
    "style": ({"style": "neox"}, ValueError, "style must be one of"),
    "rotary_offset": ({"rotary_offset": 5}, ValueError, "rotary_offset + rotary_dim must lie"),
    "axes": ({"axes": (0, 1)}, ValueError, "axes must name one axis for each of 4 lanes"),
    "sections": ({"axes": rc.ChunkedAxes((1, 2))}, ValueError, "must share out rotary_dim / 2 = 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("function", [rc.apply_rope, rc.apply_rope_])
def test_bad_arguments_get_one_sentence_and_change_nothing(name: str, function) -> None:
    change, error, sentence = BAD[name]
    arguments = {
        "q": Q.clone(), "k": K.clone(), "positions": POSITIONS, "cos_sin_cache": TABLE,
        "inv_freq": INV_FREQ,
    } | change  # fmt: skip
    with pytest.raises(error, match=re.escape(sentence)):
        function(**arguments)
    for given, original in ((arguments["q"], Q), (arguments["k"], K)):
        if isinstance(given, torch.Tensor):
            assert torch.equal(given, original)


@pytest.mark.parametrize(("position", "named"), [(ROWS, "128"), (-1, "-1"), (10 * ROWS, "1280")])
def test_debug_names_the_position_the_rows_and_the_remedy(position: int, named: str) -> None:
    positions = torch.tensor([3, position])
    before = rc.apply_rope(Q[:2], None, positions, TABLE, inv_freq=INV_FREQ)[0]
    with rc.debug():
        with pytest.raises(ValueError, match=f"128 rows .* got {named}; call reserve"):
            rc.apply_rope(Q[:2], None, positions, TABLE, inv_freq=INV_FREQ)
        with pytest.raises(ValueError, match="128 rows"):
            rc.apply_rope_(Q[:2].clone(), None, positions, TABLE)
        with rc.debug(False):
            rc.apply_rope(Q[:2], None, positions, TABLE)
        rc.apply_rope(Q[:2], None, torch.tensor([0, ROWS - 1]), TABLE)  # inside: silent
        rc.apply_rope(Q[:0], None, torch.zeros(0, dtype=torch.int64), TABLE)
    after = rc.apply_rope(Q[:2], None, positions, TABLE, inv_freq=INV_FREQ)[0]
    assert torch.equal(before, after)


def test_debug_is_a_switch_too() -> None:
    rc.debug()
    try:
        with pytest.raises(ValueError, match="rows"):
            rc.apply_rope(Q, None, POSITIONS, TABLE)
    finally:
        rc.debug(False)
    rc.apply_rope(Q, None, POSITIONS, TABLE)


@pytest.mark.usefixtures("fresh_compiler")
def test_debug_is_never_active_while_compiling() -> None:
    compiled = torch.compile(
        lambda q: rc.apply_rope(q, None, POSITIONS, TABLE, inv_freq=INV_FREQ)[0], fullgraph=True
    )
    with rc.debug():
        out = compiled(Q)
    assert torch.equal(out, rc.apply_rope(Q, None, POSITIONS, TABLE, inv_freq=INV_FREQ)[0])


def test_debug_follows_the_environment() -> None:
    code = (
        "import torch, rope_compile as rc\n"
        "try:\n"
        "    rc.apply_rope(torch.ones(1, 1, 4), None, torch.tensor([9]), torch.ones(4, 4))\n"
        "except ValueError as error:\n"
        "    print('raised', error)\n"
        "else:\n"
        "    print('silent')\n"
    )
    assert "raised positions must lie inside" in run_child("-c", code, ROPE_COMPILE_DEBUG="1")
    assert run_child("-c", code, ROPE_COMPILE_DEBUG="0").strip() == "silent"


def test_no_host_read_on_any_path() -> None:
    """Under a mode that refuses host reads, inside and outside; the refusal itself works."""
    with NoHostReads():
        rc.apply_rope(Q, K, POSITIONS, TABLE, inv_freq=INV_FREQ)
        rc.apply_rope_(Q.clone(), K.clone(), POSITIONS, TABLE)
        with rc.debug(), pytest.raises(AssertionError, match="host read"):
            rc.apply_rope(Q, None, POSITIONS, TABLE)


def test_fake_tensors_hold_no_values_and_none_is_asked_for() -> None:
    """FakeTensorMode, on the CPU and on a CUDA device that is not there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            q = torch.empty(5, 3, 12, device=device)
            positions = torch.empty(5, dtype=torch.int64, device=device)
            table = torch.empty(ROWS, 8, device=device)
            inv_freq = torch.empty(4, device=device)
            out, _ = rc.apply_rope(q, None, positions, table, inv_freq=inv_freq)
            assert out.shape == (5, 3, 12)
            assert out.device.type == device
            assert rc.apply_rope_(q, None, positions, table, inv_freq=inv_freq) is None


def test_the_operators_are_the_registered_ones() -> None:
    assert torch.ops.rope_compile.rope.default is rope_op
    assert "rope_compile::rope" in str(rope_op._schema)
    schema = str(torch.ops.rope_compile.rope_.default._schema)
    assert "Tensor(a!) q" in schema
    assert schema.endswith("-> ()")


def test_import_registers_on_a_machine_without_triton() -> None:
    """A broken or missing Triton hides nothing but the GPU kernel."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, rope_compile\n"
        "out = torch.ops.rope_compile.rope(torch.ones(1, 1, 4), None, torch.tensor([9]),"
        " torch.ones(4, 4), torch.ones(2), [], 'half', 0, 1.0, False)\n"
        "print(out[0].shape)"
    )
    assert "torch.Size([1, 1, 4])" in run_child("-c", code)
