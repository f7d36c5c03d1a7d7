"""Fault group I: layouts, shapes, indexing in the kernel, devices, and the Triton interpreter.

The labels are those of test_faults_index.py.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from test_faults_index import BACKENDS, IN_PLACE, TRITON, assert_right, rest_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, ops
from rope_compile.ops import rope_inplace_op, rope_op

from support import assert_guard_intact, guarded, randn, ulp_distance

STYLES = ("half", "interleaved")
EDGES = torch.tensor([0, 127, 128, -1, 2**31 - 1])


def rope_of(head_dim: int = 8, **fields: object) -> RotaryEmbedding:
    return RotaryEmbedding(RopeConfig(head_dim=head_dim, max_position=128, **fields), "cpu")


# --------------------------------------------------------------------------------------------- I1

X = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
AT_1 = {
    "half": [-1.98411065, 1.95990067, 2.46237790, 4.01979967],
    "interleaved": [-1.14263966, 1.92207560, 2.95985067, 4.02979950],
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_i1_halves_and_pairs(backend, style: str) -> None:
    """NeoX halves taken for GPT-J pairs, vllm-project/vllm PR #941: golden values of both."""
    rope = rope_of(4, style=style)
    out = backend(X, None, torch.tensor([1]), *rest_of(rope))[0]
    torch.testing.assert_close(out.flatten(), torch.tensor(AT_1[style]), rtol=0, atol=5e-7 * 4)
    first = backend(X, None, torch.tensor([0]), *rest_of(rope))[0]
    assert torch.equal(first, X)  # why the first tokens of a wrong style look right


def test_i1_one_documented_default_and_no_other_name() -> None:
    """A style nobody chose, jzhang38/TinyLlama #24: "half", and an unknown name is refused."""
    assert RopeConfig(head_dim=4, max_position=1).style == "half"
    table = rope_of(4).cos_sin_cache
    assert torch.equal(
        rc.apply_rope(X, None, torch.tensor([1]), table)[0],
        rc.apply_rope(X, None, torch.tensor([1]), table, style="half")[0],
    )
    for wrong in ("neox", "gptj", "", None, True):
        with pytest.raises(ValueError, match="style must be one of"):
            RopeConfig(head_dim=4, max_position=1, style=wrong)


def test_i1_the_other_style_would_be_found() -> None:
    """Wrong twin of xLLM-AI/xllm PR #853: an interleaved model rotated by halves."""
    out = rope_op(X, None, torch.tensor([1]), *rest_of(rope_of(4)))
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (X, None), torch.tensor([1]), rope_of(4, style="interleaved").config)


# --------------------------------------------------------------------------------------------- I2

SENTINEL = 777.0
Views = tuple[Tensor, Tensor, Tensor]


def packed(d: int) -> Views:
    """q and k of a flat projection ``[T, (Hq + 2 Hk) D]``, and its base."""
    base = torch.full((5, 7 * d), SENTINEL)
    q, k, _v = base.split([3 * d, 2 * d, 2 * d], -1)
    return base, q.view(5, 3, d), k.view(5, 2, d)


def behind_nope(d: int) -> Views:
    """The last channels of wider heads: ``[T, H, 2 d][..., d:]``."""
    base = torch.full((5, 5, 2 * d), SENTINEL)
    return base, base[:, :3, d:], base[:, 3:, d:]


def heads_first(d: int) -> Views:
    base = torch.full((6, 5, d), SENTINEL)
    return base, base[:3].transpose(0, 1), base[3:5].transpose(0, 1)


def every_second(d: int) -> Views:
    base = torch.full((5, 6, 2 * d), SENTINEL)
    return base, base[:, :3, ::2], base[:, 3:5, ::2]


def padded_rows(d: int) -> Views:
    base = torch.full((5, 6, d + 3), SENTINEL)
    return base, base[:, :3, 1 : d + 1], base[:, 3:5, 1 : d + 1]


SLICES = (packed, behind_nope, heads_first, every_second, padded_rows)
PARTIAL = {
    "full": {},
    "first": {"rotary_dim": 4},
    "last": {"rotary_dim": 4, "rotary_offset": 4},
    "middle": {"rotary_dim": 2, "rotary_offset": 3},
}


def filled(make: Callable[[int], Views], dtype: torch.dtype = torch.float32) -> Views:
    base, q, k = make(8)
    assert not q.is_contiguous()
    base = base.to(dtype)
    q, k = (base.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (q, k))
    q.copy_(randn(*q.shape, seed=1, dtype=dtype))
    k.copy_(randn(*k.shape, seed=2, dtype=dtype))
    return base, q, k


# Every layout with every part; interpreted, which takes longer, each of both once.
CASES = [(make, part) for make in SLICES for part in PARTIAL]
FEWER = [*((make, "middle") for make in SLICES), *((packed, part) for part in ("full", "last"))]


def crossed(backends: tuple[object, ...]) -> list[object]:
    """Backends, layouts and parts of a head."""
    return [
        pytest.param(*backend.values, make, part, marks=backend.marks,
                     id=f"{backend.id}-{make.__name__}-{part}")
        for backend in backends
        for make, part in (FEWER if backend.id == "triton" else CASES)
    ]  # fmt: skip


@pytest.mark.parametrize(("backend", "make", "part"), crossed(BACKENDS))
def test_i2_slices_equal_contiguous_copies(backend, make, part: str) -> None:
    """Non-contiguous q and k, vllm-project/vllm PR #17091: functional, both styles."""
    base, q, k = filled(make)
    before = base.clone()
    for style in STYLES:
        rope = rope_of(style=style, **PARTIAL[part])
        outs = backend(q, k, EDGES, *rest_of(rope))
        assert_right(outs, (q, k), EDGES, rope.config)
        if backend is not TRITON:
            copies = backend(q.contiguous(), k.contiguous(), EDGES, *rest_of(rope))
            assert all(torch.equal(a, b) for a, b in zip(outs, copies, strict=True))
    assert torch.equal(base, before)


@pytest.mark.parametrize(("op", "make", "part"), crossed(IN_PLACE))
def test_i2_only_the_right_places_of_the_base_change(op, make, part: str) -> None:
    """A reshape copy swallows in-place writes, XPU-Forces/mojo_opset PR #355: the base."""
    for style in STYLES:
        rope = rope_of(style=style, **PARTIAL[part])
        base, q, k = filled(make)
        expected = base.clone()
        given = q.clone(), k.clone()
        for x, out in zip((q, k), rope_op(q, k, EDGES, *rest_of(rope)), strict=True):
            expected.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(out)
        op(q, k, EDGES, *rest_of(rope))
        outside = base == SENTINEL
        assert torch.equal(outside, expected == SENTINEL)
        assert int(outside.sum()) == base.numel() - q.numel() - k.numel()
        assert_right((q, k), given, EDGES, rope.config)
        first = rope.config.rotary_offset
        kept = torch.ones(q.shape[-1], dtype=torch.bool)
        kept[first : first + rope.config.rotary_dim] = False
        for x, old in zip((q, k), given, strict=True):
            assert torch.equal(x[..., kept], old[..., kept])


def test_i2_a_copy_that_swallows_writes_would_be_found() -> None:
    """Wrong twin of ggml-org/llama.cpp PR #14580: a reshape of a slice is another tensor."""
    base, q, _k = filled(heads_first)
    before = base.clone()
    copy = q.reshape(15, 8).view(5, 3, 8)
    rope_inplace_op(copy, None, EDGES, *rest_of(rope_of()))
    assert torch.equal(base, before)
    with pytest.raises(AssertionError):
        assert_right((q,), (before[:3].transpose(0, 1),), EDGES, rope_of().config)


# --------------------------------------------------------------------------------------------- I4

WIDTHS = (2, 4, 6, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512, 576)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_i4_widths_that_are_no_power_of_two(backend, width: int) -> None:
    """sin read from the padded size on, vllm-project/vllm-ascend PR #12963: NaN around."""
    for style, extra in (("half", 0), ("interleaved", 10)):
        rope = rope_of(width + extra, rotary_dim=width, rotary_offset=extra // 2, style=style)
        table, buffer = guarded(rope.cos_sin_cache)
        q, k = randn(5, 2, width + extra, seed=1), randn(5, 1, width + extra, seed=2)
        if backend is TRITON:  # a program for each head, wide ones of a second
            q, k = k, None
        outs = backend(q, k, EDGES, table, *rest_of(rope)[1:])
        assert_right(outs, (q, k), EDGES, rope.config)
        assert_guard_intact(table, buffer)


@pytest.mark.parametrize("width", [6, 80, 96, 192])
def test_i4_the_sine_half_starts_at_half_the_width(width: int) -> None:
    """sin start computed from the padded size, vllm-project/vllm-ascend #12733: 48 for 96."""
    table = rope_of(width).cos_sin_cache
    assert table.shape == (128, width)
    row = torch.cat((table[1:2, : width // 2].acos(), table[1:2, width // 2 :].asin()), 0)
    torch.testing.assert_close(row[0], row[1], rtol=1e-3, atol=1e-3)


def test_i4_an_offset_of_the_padded_size_would_be_found() -> None:
    """Wrong twin of sgl-project/sglang PR #4064: the sine of width 96 read from column 64 on."""
    rope = rope_of(96)
    shifted = torch.cat((rope.cos_sin_cache[:, :48], rope.cos_sin_cache.roll(-16, 1)[:, 48:]), 1)
    q = randn(2, 2, 96)
    out = rope_op(q, None, EDGES[:2], shifted, *rest_of(rope)[1:])
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (q, None), EDGES[:2], rope.config)


# --------------------------------------------------------------------------------------------- I5

AXES = {
    "chunked": rc.ChunkedAxes((1, 1, 2)),
    "interleaved": rc.InterleavedAxes((2, 1, 1)),
}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_i5_a_slice_of_the_persistent_buffer(backend, tokens: int, axes: str) -> None:
    """3N taken for a token count, sgl-project/sgl-kernel-xpu PR #202: ``buf[:, :N]``, 3 x 3 too."""
    rope = rope_of(axes=AXES[axes])
    buffer = torch.full((3, 8192), 2**40)
    positions = buffer[:, :tokens]
    positions.copy_(torch.arange(3 * tokens).view(3, tokens) * 7)
    positions[1:2] += 1000  # outside the table in one plane only
    assert positions.stride() == (8192, 1)
    q, k = randn(tokens, 2, 8, seed=1), randn(tokens, 1, 8, seed=2)
    outs = backend(q, k, positions, *rest_of(rope))
    assert_right(outs, (q, k), positions, rope.config)
    if backend is not TRITON:
        copies = backend(q, k, positions.contiguous(), *rest_of(rope))
        assert all(torch.equal(a, b) for a, b in zip(outs, copies, strict=True))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_i5_equal_planes_are_plain_positions(backend, axes: str) -> None:
    """1-D positions passed for M-RoPE, vllm-project/vllm PR #32143: text has one for every axis."""
    for tokens in (3,) if backend is TRITON else (1, 3, 5):
        q, positions = randn(tokens, 1, 8), torch.arange(tokens) * 61 - 9
        plain = backend(q, None, positions, *rest_of(rope_of()))[0]
        for at in (positions, positions.expand(3, tokens), positions[None]):
            out = backend(q, None, at, *rest_of(rope_of(axes=AXES[axes])))[0]
            assert torch.equal(out, plain)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_i5_axes_share_out_a_part_of_the_head(backend, style: str, axes: str) -> None:
    """Sections off by one, XPU-Forces/mojo_opset PR #253: lanes of rotary_dim, not of the head."""
    rope = rope_of(14, rotary_dim=8, rotary_offset=4, axes=AXES[axes], style=style)
    positions = torch.arange(9).view(3, 3) * 31 - 2
    q, k = randn(3, 2, 14, seed=1), randn(3, 1, 14, seed=2)
    outs = backend(q, k, positions, *rest_of(rope))
    assert_right(outs, (q, k), positions, rope.config)
    for x, out in zip((q, k), outs, strict=True):
        assert torch.equal(out[..., :4], x[..., :4])
        assert torch.equal(out[..., 12:], x[..., 12:])
    swapped = backend(q, k, positions[[0, 2, 1]], *rest_of(rope))
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(swapped, (q, k), positions, rope.config)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_i5_batches_and_strides_of_positions(backend, dtype: torch.dtype) -> None:
    """Non-contiguous positions, vllm-project/vllm-ascend PR #2388: (B, T) equals its flat form."""
    rope, wide = rope_of(), torch.randint(-50, 300, (3, 5, 4), dtype=dtype)
    q = randn(3, 5, 1, 8)
    for positions in (
        wide[..., 1],
        wide[..., 0].t().contiguous().t(),
        wide[:, :1, 2],
        wide[0, :, 3],
    ):
        out = backend(q, None, positions, *rest_of(rope))[0]
        every = positions.expand(3, 5)
        assert_right((out,), (q,), every, rope.config)
        if backend is not TRITON:
            flat = backend(q.view(15, 1, 8), None, every.reshape(15), *rest_of(rope))[0]
            assert torch.equal(out, flat.view_as(q))


def test_i5_sizes_are_checked_against_q_and_the_sections() -> None:
    """Sections off by one, XPU-Forces/mojo_opset PR #253: named, like a count that is not q's."""
    with pytest.raises(ValueError, match=r"ChunkedAxes must share out rotary_dim / 2 = 4 lanes"):
        rope_of(axes=rc.ChunkedAxes((1, 1, 1)))
    q = randn(3, 2, 8)
    with pytest.raises(ValueError, match="positions must broadcast"):
        rope_of()(torch.zeros(3, 3, dtype=torch.int64), q)  # decided by the axes, not the shape
    for shape in ((2, 3), (3, 4), (9,)):
        with pytest.raises(ValueError, match="positions must"):
            rope_of(axes=AXES["chunked"])(torch.zeros(shape, dtype=torch.int64), q)


def test_i5_swapped_planes_would_be_found() -> None:
    """Wrong twin of xLLM-AI/xllm PR #885: height and width in the wrong order."""
    rope = rope_of(axes=AXES["chunked"])
    positions, q = torch.arange(9).view(3, 3) * 7, randn(3, 2, 8)
    out = rope(positions[[0, 2, 1]], q)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (q, None), positions, rope.config)


# --------------------------------------------------------------------------------------------- I6

EMPTY: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "no tokens": ((0, 3, 8), (0, 2, 8)),
    "no k heads": ((5, 3, 8), (5, 0, 8)),
    "no q heads": ((5, 0, 8), (5, 2, 8)),
    "no heads": ((5, 0, 8), (5, 0, 8)),
    "no k": ((5, 3, 8), None),
    "no tokens, no k": ((0, 3, 8), None),
    "no batch": ((0, 5, 3, 8), (0, 5, 2, 8)),
    "no tokens of a batch": ((2, 0, 3, 8), (2, 0, 2, 8)),
}


def of_case(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None, Tensor]:
    q_shape, k_shape = EMPTY[name]
    q = randn(*q_shape, seed=1, dtype=dtype)
    k = None if k_shape is None else randn(*k_shape, seed=2, dtype=dtype)
    return q, k, EDGES[: q_shape[-3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_i6_nothing_has_its_shape_dtype_and_strides(backend, name: str, dtype) -> None:
    """Zero-token calls, mmcdermott/MEDS_EIC_AR #176; zero heads, PaddlePaddle/Paddle PR #78253."""
    q, k, positions = of_case(name, dtype)
    outs = backend(q, k, positions, *rest_of(rope_of()))
    every = positions.expand(q.shape[:-2])
    assert_right(outs, (q, k), every, rope_of().config, truncated=backend is TRITON)
    for out, x in zip(outs, (q, k), strict=True):
        assert (out is None) == (x is None)
        assert out is None or out.stride() == torch.empty(x.shape).stride()


@pytest.mark.parametrize("name", EMPTY)
def test_i6_gradients_and_opcheck_of_nothing(name: str) -> None:
    """Zero tokens, sgl-project/sglang #23609: backward works, and the operator's contract holds."""
    q, k, positions = of_case(name)
    leaves = [x.requires_grad_() for x in (q, k) if x is not None]
    outs = rope_op(q, k, positions, *rest_of(rope_of()))
    sum(out.sum() for out in outs if out is not None).backward()
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
    opcheck(rope_op, (q, k, positions, *rest_of(rope_of())))
    q, k, positions = of_case(name)
    opcheck(rope_inplace_op, (q, k, positions, *rest_of(rope_of())), test_utils="test_schema")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", EMPTY)
def test_i6_nothing_compiles(name: str) -> None:
    """Zero tokens, sgl-project/sglang #23609: compiled calls give the same nothing."""
    q, k, positions = of_case(name)
    rope = rope_of()
    outs = torch.compile(rope, fullgraph=True, backend="aot_eager")(positions, q, k)
    for out, expected in zip(outs, rope(positions, q, k), strict=True):
        assert (out is None) == (expected is None)
        assert out is None or (torch.equal(out, expected) and out.stride() == expected.stride())


def test_i6_nothing_is_not_launched() -> None:
    """A grid of 0 leaves a sticky error, sgl-project/sglang PR #23636: interpreters hide it."""
    launched: list[object] = []
    recorded = ops._make_pair(lambda *arguments: launched.append(arguments))
    for name in ("no tokens", "no heads", "no tokens, no k", "no batch", "no tokens of a batch"):
        for body in recorded:
            body(*of_case(name), *rest_of(rope_of()))
    assert not launched
    recorded[0](*of_case("no k"), *rest_of(rope_of()))  # the twin: a launch would be seen
    assert len(launched) == 1


# --------------------------------------------------------------------------------------------- I9


class Devices:
    """Stands in for the device context, and for the kernel that is launched inside it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime import KernelInterface

        from rope_compile.kernels import triton_rope

        devices = self
        self.current, self.launches = torch.device("cuda", 0), 0
        self.launch = triton_rope.launch

        class Kernel(KernelInterface):
            def __getitem__(self, grid):
                def run(**arguments: object) -> None:
                    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
                    assert {x.device for x in tensors} == {devices.current}, "another device"
                    devices.launches += 1

                return run

        self.kernel = Kernel()
        patch.setattr(torch.cuda, "device", self.inside)

    @contextlib.contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_i9_every_launch_is_inside_the_device_of_q(monkeypatch, in_place: bool, index: int) -> None:
    """Wrong current device, linkedin/Liger-Kernel #1303: entered before each launch, and left."""
    devices = Devices(monkeypatch)
    pair = ops._make_pair(lambda *arguments: devices.launch(devices.kernel, *arguments))
    with FakeTensorMode():
        make = torch.device("cuda", index)
        q, k = (torch.empty(2, 5, heads, 8, device=make) for heads in (3, 1))
        at = torch.zeros(2, 5, dtype=torch.int64, device=make)
        table, inv_freq = torch.empty(128, 8, device=make), torch.empty(4, device=make)
        pair[in_place](q, k, at, table, inv_freq, [], "half", 0, 1.0, False)
    assert devices.launches == 1
    assert devices.current == torch.device("cuda", 0)


def test_i9_a_launch_on_the_current_device_would_be_found(monkeypatch) -> None:
    """Wrong twin of triton-lang/triton #2441: the same launch without the context."""
    devices = Devices(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    pair = ops._make_pair(lambda *arguments: devices.launch(devices.kernel, *arguments))
    with FakeTensorMode():
        q = torch.empty(5, 3, 8, device="cuda:1")
        at = torch.zeros(5, dtype=torch.int64, device="cuda:1")
        table = torch.empty(128, 8, device="cuda:1")
        with pytest.raises(AssertionError, match="another device"):
            pair[0](q, None, at, table, None, [], "half", 0, 1.0, False)


@pytest.mark.parametrize("op", [rope_op, rope_inplace_op])
@pytest.mark.parametrize("which", range(5))
def test_i9_two_devices_in_one_call_are_named(op, which: int) -> None:
    """Tensors of two devices give NaN silently, unslothai/unsloth PR #6912: a sentence instead."""
    with FakeTensorMode():
        shapes = ((5, 3, 8), (5, 1, 8), (5,), (128, 8), (4,))
        devices = ["cuda:0"] * 5
        devices[which] = "cuda:1"
        tensors = [
            torch.empty(shape, device=device, dtype=torch.int64 if len(shape) == 1 and shape[0] == 5
                        else torch.float32)
            for shape, device in zip(shapes, devices, strict=True)
        ]  # fmt: skip
        with pytest.raises(ValueError, match=r"must be on one device") as raised:
            op(*tensors, [], "half", 0, 1.0, False)
    assert "cuda:0" in str(raised.value)
    assert "cuda:1" in str(raised.value)


# -------------------------------------------------------------------------------------------- I10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_i10_every_run_gives_the_same_bits(backend, dtype: torch.dtype) -> None:
    """A racy position read, vllm-project/vllm-ascend #16674: equal, and right."""
    rope = rope_of(16)
    for tokens in (5,) if backend is TRITON else (1, 17, 300):
        positions = torch.randint(-50, 400, (tokens,))
        q, k = (randn(tokens, heads, 16, seed=heads, dtype=dtype) for heads in (2, 1))
        runs = [backend(q, k, positions, *rest_of(rope)) for _ in range(3)]
        assert_right(runs[0], (q, k), positions, rope.config, truncated=backend is TRITON)
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_i10_several_threads_give_the_bits_of_one() -> None:
    """A racy position read, vllm-project/vllm-ascend #16674: 65536 tokens in parallel."""
    rope, positions, q = rope_of(), torch.arange(65536) * 7 - 99, randn(65536, 1, 8)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            runs.append(rope(positions, q)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert_right((runs[0],), (q,), positions, rope.config)


def test_i10_one_wrong_position_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm-ascend #16674: one token reads its neighbour's position."""
    positions, q = torch.arange(300), randn(300, 2, 8)
    raced = positions.clone()
    raced[123] = positions[124]
    right, wrong = (rope_of()(at, q)[0] for at in (positions, raced))
    assert not torch.equal(right, wrong)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right((wrong,), (q,), positions, rope_of().config)


# -------------------------------------------------------------------------------------------- I11


def kernels() -> dict[str, ast.FunctionDef]:
    """Source of every function of the Triton module that is compiled for a device."""
    from rope_compile.kernels import triton_rope

    found = {}
    for name, kernel in vars(triton_rope).items():
        function = getattr(kernel, "fn", None)
        if function is not None and getattr(function, "__module__", "") == triton_rope.__name__:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
            found[name] = node
    return found


def raw_names(node: ast.FunctionDef, loaders: tuple[str, ...]) -> set[str]:
    """Names that hold what a loader gave, as it was stored."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call):
            function = part.value.func
            called = function.id if isinstance(function, ast.Name) else ""
            if called in loaders:
                found |= {n.id for target in part.targets for n in ast.walk(target)
                          if isinstance(n, ast.Name)}  # fmt: skip
    return found


def calculated_with(node: ast.FunctionDef, names: set[str]) -> list[str]:
    """Arithmetic that has one of the names as an operand."""
    return [
        ast.unparse(part)
        for part in ast.walk(node)
        if isinstance(part, ast.BinOp)
        and {x.id for x in (part.left, part.right) if isinstance(x, ast.Name)} & names
    ]


LOADERS = ("load_once", "load_pair", "split_pairs", "side_by_side")


def test_i11_q_and_k_are_upcast_before_any_arithmetic() -> None:
    """bf16 arithmetic on bit patterns, triton-lang/triton #4972: what is loaded is cast first."""
    found = {name: raw_names(node, LOADERS) for name, node in kernels().items()}
    assert {"x_low", "x_high"} <= found["rotate_heads"]
    for name, node in kernels().items():
        assert not calculated_with(node, found[name]), name


def test_i11_every_load_says_what_masked_lanes_hold() -> None:
    """Masked loads without a value, triton-lang/triton #3281: each has ``other``."""
    loads = [
        part
        for node in kernels().values()
        for part in ast.walk(node)
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "tl.load"
    ]
    assert loads
    for load in loads:
        given = {keyword.arg for keyword in load.keywords}
        assert ("other" in given) == ("mask" in given), ast.unparse(load)


def test_i11_arithmetic_on_what_was_loaded_would_be_found() -> None:
    """Wrong twin of triton-lang/triton #11584: a product of two loaded values."""
    (node,) = ast.parse("def f(p):\n    a, b = load_pair(p)\n    return a * 2 + b.to(x)").body
    assert calculated_with(node, raw_names(node, LOADERS)) == ["a * 2"]


@pytest.mark.interpret
def test_i11_the_interpreter_truncates_where_a_gpu_rounds() -> None:
    """Interpreter is not the compiler, triton-lang/triton #5895: why it gets one step more."""
    import triton
    import triton.language as tl

    @triton.jit
    def store(out_ptr, x_ptr, N: tl.constexpr):
        lane = tl.arange(0, N)
        tl.store(out_ptr + lane, tl.load(x_ptr + lane))

    x = torch.tensor([1.005859375, 259.0, 1.0, -1.005859375])
    out = torch.empty(4, dtype=torch.bfloat16)
    store[(1,)](out, x, 4)
    assert out.tolist() == [1.0, 258.0, 1.0, -1.0]
    assert x.bfloat16().tolist() == [1.0078125, 260.0, 1.0, -1.0078125]


@pytest.mark.interpret
@pytest.mark.parametrize("style", STYLES)
def test_i11_interpreted_bfloat16_is_one_step_off_at_most(style: str) -> None:
    """Interpreter is not the compiler, triton-lang/triton #4370: biased low, never wrong."""
    rope = rope_of(16, style=style)
    positions, q = torch.arange(40) * 5, randn(40, 1, 16, dtype=torch.bfloat16)
    out = TRITON(q, None, positions, *rest_of(rope))[0]
    assert_right((out,), (q,), positions, rope.config, truncated=True)
    rounded = rope_op(q, None, positions, *rest_of(rope))[0]
    assert 0.2 < (out != rounded).double().mean() < 0.8
    assert (out.abs() <= rounded.abs()).double().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_i11_cpu_kernels_round_to_nearest(backend, dtype: torch.dtype) -> None:
    """A strict rounding test beside the interpreter, triton-lang/triton #4755: exact."""
    rope = rope_of(16)
    positions, q = torch.arange(300) * 5, randn(300, 2, 16, dtype=dtype)
    out = backend(q, None, positions, *rest_of(rope))[0]
    wide = backend(q.float(), None, positions, *rest_of(rope))[0]
    assert torch.equal(out, wide.to(dtype))
    truncated = (wide.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    assert dtype != torch.bfloat16 or int(ulp_distance(out, truncated).max()) == 1
