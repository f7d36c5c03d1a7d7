"""What no other test saw: each of these finds a mutation of bench/mutations.py that survived."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

import pytest
import torch

import rope_compile as rc
from rope_compile import scaling
from rope_compile.kernels import cpu, native
from rope_compile.table import RopeTable

from oracle import assert_near_oracle, oracle_rotate, oracle_table
from support import randn

rope_torch = torch.ops.rope_compile.rope_torch.default
rope_torch_ = torch.ops.rope_compile.rope_torch_.default
ROWS = 32


def frequencies(half: int) -> torch.Tensor:
    return (1e4 ** -(torch.arange(half, dtype=torch.float64) / half)).float()


@pytest.mark.parametrize("position", [ROWS - 1, ROWS, -1])
def test_the_first_row_past_the_table_is_computed(position: int) -> None:
    """In plain torch, which looks at the largest position: alone in a call, it is that one."""
    inv_freq, q = frequencies(8), randn(3, 2, 16)
    positions = torch.full((3,), position)
    rest = (positions, oracle_table(ROWS, inv_freq), inv_freq, (), "half", 0, 1.0, False)
    assert_near_oracle(rope_torch(q, None, *rest)[0], *oracle_rotate(q, positions, inv_freq))


@pytest.mark.parametrize("axes", [(), (0, 1, 2, 1)])
@pytest.mark.parametrize("elements", [1, 40, 200])
def test_blocks_of_one_token_do_not_show(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[int, ...], elements: int
) -> None:
    """In plain torch: one token, a few of a sequence, or a few sequences in a block."""
    inv_freq, q, k = frequencies(4), randn(3, 7, 2, 10, seed=1), randn(3, 7, 1, 12, seed=2)
    positions = torch.randint(-5, 2 * ROWS, (*((3,) if axes else ()), 3, 7))
    rest = (positions, oracle_table(ROWS, inv_freq), inv_freq, axes, "half", 1, 1.0, False)
    whole = rope_torch(q, k, *rest)
    monkeypatch.setattr(cpu, "ELEMENTS_PER_BLOCK", elements)
    for found, expected in zip(rope_torch(q, k, *rest), whole, strict=True):
        assert torch.equal(found, expected)
    rope_torch_(q, k, *rest)
    assert torch.equal(q, whole[0])
    assert torch.equal(k, whole[1])


def test_k_with_odd_strides_beside_an_even_q() -> None:
    """Strides come divided by what divides those of both: none may lose a remainder."""
    triton_rope = pytest.importorskip("rope_compile.kernels.triton_rope", reason="needs Triton")
    q, k = torch.ones(1, 4, 2, 16), torch.ones(1, 4, 1, 19)[..., :16]
    for first, second in ((q, k), (k, q)):
        _, launched = triton_rope.launch_arguments(
            [(torch.empty(0), first), (torch.empty(0), second)], torch.zeros(1, 4).long(),
            torch.ones(4, 16), None, (), "half", 0, 1.0, False,
        )  # fmt: skip
        for name, x in (("q", first), ("k", second)):
            for part, dim in (("batch", 0), ("seq", 1), ("head", 2)):
                assert launched[f"stride_{name}_{part}"] * launched["ALIGN"] == x.stride(dim)


def test_the_library_is_named_by_all_that_its_code_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """A library of another source or of other flags must never be taken for this one."""

    def name() -> str:
        native.library_path.cache_clear()
        return native.library_path().name

    try:
        names = [name(), name()]
        changed = tmp_path / "rope_cpu.cpp"
        changed.write_bytes(native.SOURCE.read_bytes() + b"\n")
        for patch in (
            lambda: monkeypatch.setattr(native, "SOURCE", changed),
            lambda: monkeypatch.setattr(native, "COMPILE_FLAGS", (*native.COMPILE_FLAGS, "-g")),
            lambda: monkeypatch.setattr(native, "_processor", lambda: "another one"),
            lambda: monkeypatch.setattr(torch, "__version__", "0.0"),
            lambda: monkeypatch.setenv("CXX", "another-compiler"),
        ):
            with monkeypatch.context():
                patch()
                names.append(name())
            monkeypatch.undo()
    finally:
        monkeypatch.undo()
        native.library_path.cache_clear()
    assert names[0] == names[1]
    assert len(set(names)) == 6


@pytest.mark.skipif(
    sys.platform != "linux"
    or not native.enabled()
    or shutil.which((shlex.split(os.environ.get("CXX", "g++")) or [""])[0]) is None,
    reason="the native kernel needs Linux and a C++ compiler, and can be switched off",
)
def test_where_there_is_a_compiler_the_native_kernel_runs() -> None:
    """The tests of the native kernel skip without it: one that is wrong would go unnoticed."""
    assert native.load_or_build(), native.status()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_ties_round_to_even(style: str, dtype: torch.dtype, bits: int) -> None:
    """Products that lie halfway between two numbers of the dtype; in registers and lane by lane."""
    half = 21
    cos = 1 + torch.arange(1, 2 * half, 2) * 2.0**-bits  # ties, to be rounded down and up in turn
    table = torch.cat((cos, torch.zeros(half)))[None]
    q = torch.cat((torch.ones(half), -torch.ones(half)))[None, None].to(dtype)
    rounded = cos.to(dtype)
    assert (rounded.double() < cos.double()).tolist() == [True, False] * 10 + [True]
    expected = torch.cat((rounded, -rounded))
    if style == "interleaved":
        q, expected = (x.unflatten(-1, (2, half)).mT.flatten(-2) for x in (q, expected))
    rest = (torch.zeros(1).long(), table, None, (), style, 0, 1.0, False)
    for operator in (torch.ops.rope_compile.rope, rope_torch):
        assert torch.equal(operator(q, None, *rest)[0][0, 0], expected)


def test_yarn_of_a_length_below_one_turn_is_a_step() -> None:
    """Both ends of the ramp are lane 0 then, exactly: without care the angle of lane 0 is NaN."""
    made = scaling.YarnScaling(factor=4.0, original_max_position=6)
    assert scaling.yarn_range(64, 1e4, 6) == (0, 0)
    found = rc.RopeConfig(head_dim=64, max_position=8, scaling=made).inv_freq(torch.float64)
    plain = rc.RopeConfig(head_dim=64, max_position=8).inv_freq(torch.float64)
    assert torch.equal(found, torch.cat((plain[:1], plain[1:] / 4)))


@pytest.mark.parametrize(("length", "span"), [(131072, (22, 35)), (2**60, (63, 63))])
def test_yarn_ranges_end_at_the_last_channel(length: int, span: tuple[int, int]) -> None:
    """Not at the last lane: the formula of the paper's code clamps to R - 1."""
    low, high = scaling.yarn_range(64, 1e4, length)
    assert (min(low, 63), high) == span


def test_debug_restores_what_was() -> None:
    q, far = torch.ones(1, 1, 8), torch.tensor([99])
    table = torch.ones(4, 8)

    def checks() -> bool:
        try:
            rc.apply_rope(q, None, far, table)
        except ValueError:
            return True
        return False

    with rc.debug(False):
        with rc.debug():
            with rc.debug(False):
                assert not checks()
            assert checks()
        assert not checks()


def test_query_windows_are_counted_in_integers() -> None:
    """Just below a window's end, where float32 has no odd numbers left."""
    positions = torch.tensor([2**25 - 2, 2**25 - 1])
    found = scaling.llama4_query_scale(positions, attn_scale=1.0, floor_scale=2**25)
    assert found.tolist() == pytest.approx([1.0, 1.6931472], abs=1e-6)


def test_a_switched_off_key_stays_in_the_callers_dictionary() -> None:
    rope = {"use_fope": False, "rope_theta": 1e4}
    rc.RopeConfig.from_dict(rope, head_dim=8, max_position=8)
    assert rope == {"use_fope": False, "rope_theta": 1e4}


def test_the_longest_of_several_lengths_counts() -> None:
    ropes = [rc.RotaryEmbedding(rc.RopeConfig(head_dim=8, max_position=n), "meta") for n in (9, 99)]
    for order in (ropes, ropes[::-1]):
        assert rc.CapturePlan.for_models(torch.nn.ModuleList(order)).max_position == 99


def test_reserve_reaches_every_device() -> None:
    rope = rc.RotaryEmbedding(rc.RopeConfig(head_dim=8, max_position=128))
    rope.tables["on_meta"] = RopeTable(rope.config, "meta")
    assert rope.reserve(129)
    assert {table.capacity for table in rope.tables.values()} == {256}
