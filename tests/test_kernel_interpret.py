"""The Triton kernel's numbers, indexing and masks, in the Triton interpreter on the CPU.

Run by tests/test_interpreter_tier.py in a process with TRITON_INTERPRET=1. The interpreter
truncates at a bfloat16 store, so bfloat16 gets one more ulp here; strict rounding needs a GPU.
"""

from __future__ import annotations

import pytest
import torch

from rope_compile import ops

from oracle import assert_near_oracle, oracle_rotate, oracle_table
from support import (
    LAYOUTS,
    assert_guard_intact,
    edge_positions,
    guarded,
    make_layout,
    randn,
    ulp_distance,
)

pytestmark = pytest.mark.interpret

ROWS = 128


def kernel(views, at, *rest) -> None:
    from rope_compile.kernels import triton_rope

    triton_rope.launch(triton_rope.rope_kernel, views, at, *rest)


functional, in_place = ops._make_pair(kernel)


def rest_of(rotary_dim, *, axes=(), style="half", offset=0, scaling=1.0, inverse=False, base=1e4,
            dtype=torch.float32, rows=ROWS):  # fmt: skip
    lanes = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
    inv_freq = (1.0 / base ** (lanes / rotary_dim)).to(dtype)
    table = oracle_table(rows, inv_freq, scaling)
    return (table, inv_freq, list(axes), style, offset, scaling, inverse)


def check(q, k, positions, rest, *, outs=None) -> None:
    """Functional and in-place results against float64."""
    _, inv_freq, axes, style, offset, scaling, inverse = rest
    results = functional(q, k, positions, *rest) if outs is None else outs
    for x, y in zip((q, k), results, strict=True):
        if x is None:
            assert y is None
            continue
        expected, larger = oracle_rotate(
            x, positions, inv_freq, style=style, rotary_offset=offset,
            attention_scaling=scaling, inverse=inverse, lane_axes=tuple(axes),
        )  # fmt: skip
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        if x.dtype == torch.bfloat16:
            assert (
                int(ulp_distance(y, expected.to(torch.bfloat16)).max()) <= 1
                or ((y.double() - expected).abs() <= larger * 2**-7).all()
            )
        else:
            assert_near_oracle(y, expected, larger)
    if outs is None and style != "interleaved_to_half":
        copies = [None if x is None else x.clone() for x in (q, k)]
        in_place(*copies, positions, *rest)
        for a, b in zip(copies, results, strict=True):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("style", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize(
    "rotary_dim", [2, 4, 6, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512, 576]
)
def test_every_width(style: str, rotary_dim: int) -> None:
    """No power of two is assumed; NaN guard columns and rows around the table."""
    rest = rest_of(rotary_dim, style=style)
    table, _ = guarded(rest[0])
    positions = edge_positions(ROWS)
    q = randn(len(positions), 3, rotary_dim, seed=1)
    k = randn(len(positions), 1, rotary_dim, seed=2)
    check(q, k, positions, (table, *rest[1:]))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "offset"),
    [(20, 6, 0), (20, 6, 14), (24, 20, 3), (192, 64, 128), (96, 64, 0), (576, 64, 512)],
)
@pytest.mark.parametrize("inverse", [False, True])
def test_partial_widths_first_and_last(style, head_dim, rotary_dim, offset, inverse) -> None:
    rest = rest_of(rotary_dim, style=style, offset=offset, scaling=1.25, inverse=inverse)
    positions = edge_positions(ROWS)
    q = randn(len(positions), 2, head_dim, seed=1)
    k = randn(len(positions), 1, head_dim, seed=2)
    check(q, k, positions, rest)
    out = functional(q, k, positions, *rest)[0]
    outside = [c for c in range(head_dim) if not offset <= c < offset + rotary_dim]
    assert torch.equal(out[..., outside], q[..., outside])


@pytest.mark.parametrize("head_dims", [(8, 20), (20, 8), (12, 20)])
def test_q_and_k_have_widths_of_their_own(head_dims) -> None:
    """Either may have channels that pass through where the other has none."""
    positions = edge_positions(ROWS)
    q = randn(len(positions), 3, head_dims[0], seed=1)
    k = randn(len(positions), 2, head_dims[1], seed=2)
    check(q, k, positions, rest_of(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_every_dtype(dtype, style: str) -> None:
    positions = edge_positions(ROWS)
    q = randn(len(positions), 3, 16, seed=1, dtype=dtype)
    k = randn(len(positions), 2, 16, seed=2, dtype=torch.float32)
    check(q, k, positions, rest_of(16, style=style))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, style: str) -> None:
    for head_dim, offset in ((8, 0), (16, 3)):
        q = make_layout(layout, 5, 3, head_dim, seed=1)
        k = make_layout(layout, 5, 2, head_dim, seed=2)
        positions = torch.tensor([0, ROWS - 1, ROWS, -1, 2**31 - 1])[: q.shape[0]]
        rest = rest_of(8, style=style, offset=offset)
        outs = functional(q, k, positions, *rest)
        check(q, k, positions, rest, outs=outs)
        assert all(out.is_contiguous() for out in outs)


@pytest.mark.parametrize("heads", [(1, 1), (64, 1), (7, 1), (48, 4), (3, 0), (0, 2), (9, 17)])
def test_every_head_count(heads) -> None:
    positions = torch.tensor([0, 130, -4])
    q, k = randn(3, heads[0], 8, seed=1), randn(3, heads[1], 8, seed=2)
    check(q, k, positions, rest_of(8))
    check(q, None, positions, rest_of(8))


@pytest.mark.parametrize(
    ("programs", "heads", "style"),
    [(1, (9, 17), "half"), (1, (7, 1), "interleaved"), (10, (9, 17), "interleaved")],
)
def test_one_program_walks_several_heads(monkeypatch, programs, heads, style) -> None:
    """As many tokens as a GPU needs for it would take the interpreter too long."""
    from rope_compile.kernels import triton_rope

    monkeypatch.setattr(triton_rope, "RESIDENT_PROGRAMS", programs)
    positions = torch.randint(-20, 300, (40,), generator=torch.Generator().manual_seed(1))
    q, k = randn(40, heads[0], 24, seed=1), randn(40, heads[1], 24, seed=2)
    check(q, k, positions, rest_of(16, style=style, offset=4))


def test_blocks_of_tokens_beyond_one_axis_of_the_grid(monkeypatch) -> None:
    """65535 programs end an axis; here 3, so that the third axis counts on, past the last block."""
    from rope_compile.kernels import triton_rope

    monkeypatch.setattr(triton_rope, "GRID_LIMIT", type(triton_rope.GRID_LIMIT)(3))
    positions = torch.randint(-20, 300, (2, 130), generator=torch.Generator().manual_seed(1))
    q, k = guarded(randn(2, 130, 2, 8, seed=1))[0], randn(2, 130, 1, 8, seed=2)
    check(q, k, positions, rest_of(8))


@pytest.mark.parametrize("lead", [(1,), (3,), (17,), (130,), (2, 9), (70, 1), (2, 3, 5), (0,)])
def test_every_token_count_and_rank(lead) -> None:
    """One block and several, a batch of single tokens, more than two token dimensions, none."""
    q, k = randn(*lead, 3, 8, seed=1), randn(*lead, 1, 8, seed=2)
    for shape in (lead, lead[-1:]):
        positions = torch.randint(-20, 300, shape, generator=torch.Generator().manual_seed(1))
        outs = functional(q, k, positions, *rest_of(8))
        check(q, k, positions.expand(lead), rest_of(8), outs=outs)


def test_zero_tokens_launch_nothing() -> None:
    """A grid of zero programs leaves a sticky error on a GPU; the interpreter would hide it."""
    launches = []
    functional, in_place = ops._make_pair(lambda *arguments: launches.append(arguments))
    for q, k in (
        (randn(0, 3, 8), randn(0, 1, 8)),
        (randn(5, 0, 8), None),
        (randn(2, 0, 3, 8), None),
    ):
        functional(q, k, torch.zeros(q.shape[:-2], dtype=torch.int64), *rest_of(8))
        in_place(q, k, torch.zeros(q.shape[:-2], dtype=torch.int64), *rest_of(8))
    assert launches == []
    functional(randn(1, 1, 8), None, torch.zeros(1, dtype=torch.int64), *rest_of(8))
    assert len(launches) == 1


@pytest.mark.parametrize("style", ["half", "interleaved", "half_blocks"])
@pytest.mark.parametrize("axes", [(0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 2, 0, 0), (0,) * 8])
def test_multi_axis(style: str, axes) -> None:
    if style == "half_blocks" and list(axes) != sorted(axes):
        axes = tuple(sorted(axes))
    rest = rest_of(16, axes=axes, style=style)
    positions = torch.randint(0, ROWS, (max(axes) + 1, 2, 5))
    positions[-1, 0] += 1000
    positions[0, 1, 0] = -7
    check(randn(2, 5, 3, 20, seed=1), randn(2, 5, 1, 20, seed=2), positions, rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_lanes_and_axes_unpack_right(dtype: torch.dtype) -> None:
    """64 lanes over 16 axes, 4 or 8 lanes a word: every bit of it is used, the sign too."""
    axes = tuple((7 * i + i // 5) % 16 for i in range(64))
    positions = torch.randint(-9, 300, (16, 4))
    check(randn(4, 2, 128, dtype=dtype), None, positions, rest_of(128, axes=axes))


def test_text_positions_on_a_multi_axis_config_equal_plain() -> None:
    q = randn(5, 2, 16)
    positions = torch.arange(5) * 60 - 20
    plain = functional(q, None, positions, *rest_of(16))[0]
    for axes in ((0, 1, 2) * 2 + (0, 0), (0,) * 8 + (1,) * 8):
        assert torch.equal(functional(q, None, positions, *rest_of(16, axes=axes))[0], plain)


def test_full_width_axes() -> None:
    axes = (0, 0, 1, 1, 2, 2, 3, 3)
    positions = torch.tensor([[0, 5, 200], [1, 6, -3], [2, 7, 9], [3, 8, 500]])
    for inverse in (False, True):
        check(randn(3, 2, 8), None, positions, rest_of(8, axes=axes, inverse=inverse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computed_rows_match_float64_at_any_distance(dtype) -> None:
    """Both phase rules, up to the ends of int64: the in-kernel cosine against numpy's."""
    positions = torch.cat(
        [edge_positions(ROWS), torch.tensor([2**40 + 1, -(2**40), 2**53, 2**62, -(2**63) + 1])]
    )
    q = randn(len(positions), 2, 64, dtype=torch.float64)
    check(q, None, positions, rest_of(64, dtype=dtype, rows=0, base=5e5))


def test_row_read_and_row_computed_agree_to_one_ulp() -> None:
    rest = rest_of(64, scaling=1.1386)
    x = torch.zeros(ROWS, 1, 64)
    x[..., :32] = 1.0  # rotates to (cos, sin)
    read = functional(x, None, torch.arange(ROWS), *rest)[0]
    computed = functional(x, None, torch.arange(ROWS), rest[0][:0], *rest[1:])[0]
    assert (read - computed).abs().max() <= 2.0**-23


def test_without_frequencies_the_nearest_row_is_taken() -> None:
    table, _, *more = rest_of(8)
    table, _ = guarded(table)
    positions = torch.tensor([3, 7, 2**31 - 1, -5, ROWS])
    q = randn(5, 3, 8)
    out = functional(q, None, positions, table, None, *more)[0]
    nearest = torch.tensor([3, 7, ROWS - 1, 0, ROWS - 1])
    assert torch.equal(out, functional(q, None, nearest, table, None, *more)[0])
    assert not out.isnan().any()


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_nothing_outside_q_and_k_is_written(style: str) -> None:
    positions = edge_positions(ROWS)
    q, q_buffer = guarded(randn(len(positions), 3, 8))
    k, k_buffer = guarded(randn(len(positions), 1, 8))
    rest = rest_of(6, style=style, offset=1)
    expected = functional(q, k, positions, *rest)
    in_place(q, k, positions, *rest)
    assert_guard_intact(q, q_buffer)
    assert_guard_intact(k, k_buffer)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_positions_int32_and_strided() -> None:
    rest = rest_of(8)
    q = randn(6, 2, 8)
    wide = torch.randint(-9, 300, (6, 5))
    expected = functional(q, None, wide[:, 2].contiguous(), *rest)[0]
    assert torch.equal(functional(q, None, wide[:, 2], *rest)[0], expected)
    assert torch.equal(functional(q, None, wide[:, 2].int(), *rest)[0], expected)


def test_strides_beyond_int32_are_reached() -> None:
    """The last token lies past 2^31 elements: an int32 offset would wrap.

    (Memory is not touched.)
    """
    far = 2**31 + 16
    storage = torch.empty(far + 8, dtype=torch.float16)
    q = storage.as_strided((2, 1, 8), (far, 8, 1))
    q.copy_(randn(2, 1, 8, dtype=torch.float16))
    check(q, None, torch.tensor([5, 300]), rest_of(8), outs=functional(
        q, None, torch.tensor([5, 300]), *rest_of(8)))  # fmt: skip


def test_equals_the_reference_to_two_ulp() -> None:
    """One definition of the maths: kernel and reference differ by fused rounding only."""
    positions = torch.randint(-100, 300, (64,))
    q, k = randn(64, 4, 64, seed=1), randn(64, 2, 64, seed=2)
    rest = rest_of(64)
    for ours, reference in zip(
        functional(q, k, positions, *rest), ops.rope_op(q, k, positions, *rest), strict=True
    ):
        assert (ours - reference).abs().max() <= 4 * 2.0**-23 * q.abs().max()


def test_a_wrong_kernel_fails_the_check() -> None:
    """The check sees a swapped sign, a swapped pairing and an untouched tensor."""
    q = randn(5, 3, 8)
    positions = torch.arange(5)
    rest = rest_of(8)
    for wrong in (
        functional(q, None, positions, *rest[:-1], True)[0],
        functional(q, None, positions, *rest[:3], "interleaved", *rest[4:])[0],
        q.clone(),
    ):
        with pytest.raises(AssertionError):
            check(q, None, positions, rest, outs=(wrong, None))
