"""The native CPU kernel: equal to the plain-torch path bit for bit, and impossible to fall over.

The cases compare ``rope_compile::rope`` as this process has it with ``rope_torch``, the same
operator in plain torch. Where no native kernel could be had they skip, and say why.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rope_compile.kernels import native
from rope_compile.ops import rope_inplace_op, rope_op

from support import (
    LAYOUTS,
    assert_guard_intact,
    assert_near_oracle,
    edge_positions,
    guarded,
    make_layout,
    oracle_rotate,
    oracle_table,
    randn,
    run_child,
    ulp_distance,
)

torch.ops.rope_compile.rope(torch.zeros(1, 1, 2), None, torch.zeros(1, dtype=torch.long),
                            torch.zeros(1, 2), None, (), "half", 0, 1.0, False)  # fmt: skip
RUNS, WHY = native.status()
needs_native = pytest.mark.skipif(not RUNS, reason=f"no native CPU kernel here: {WHY}")

ROWS = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
rope_torch = torch.ops.rope_compile.rope_torch.default
rope_torch_ = torch.ops.rope_compile.rope_torch_.default


def frequencies(half: int, dtype=torch.float32) -> torch.Tensor:
    return (1e4 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))).to(dtype)


def table_of(half: int, scaling: float = 1.0) -> torch.Tensor:
    return oracle_table(ROWS, frequencies(half), scaling)


def inside(*shape: int) -> torch.Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(3))


def same(got, wanted) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)


# ------------------------------------------------------------------------------ the same bits


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved", "interleaved_to_half"])
def test_every_width_gives_the_bits_of_plain_torch(style: str, dtype) -> None:
    """Whole registers, halves of one, single lanes, and what is left over; partial both ways."""
    for rotary_dim in (2, 6, 8, 16, 20, 34, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512, 576):
        for offset, rest in ((0, 0), (0, 10), (6, 0), (3, 5)):
            width = rotary_dim + offset + rest
            q, k = randn(5, 3, width, seed=1, dtype=dtype), randn(5, 1, width, seed=2, dtype=dtype)
            for inverse in (False, True):
                arguments = (q, k, inside(5), table_of(rotary_dim // 2), None, (), style, offset,
                             1.0, inverse)  # fmt: skip
                same(rope_op(*arguments), rope_torch(*arguments))


@needs_native
@pytest.mark.parametrize("heads", [(1, 1), (64, 1), (7, 1), (48, 4), (3, 0), (9, 17)])
def test_every_head_count_gives_the_bits_of_plain_torch(heads: tuple[int, int]) -> None:
    """k is some heads of a wider tensor, with a token stride of its own."""
    q = randn(5, heads[0], 24, seed=1)
    k = randn(5, heads[1] + 3, 24, seed=2)[:, 2 : 2 + heads[1]]
    for style in ("half", "interleaved"):
        arguments = (q, k, inside(5), table_of(12), None, (), style, 0, 1.0, False)
        same(rope_op(*arguments), rope_torch(*arguments))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bits_of_plain_torch(layout: str, dtype) -> None:
    for style in ("half", "interleaved"):
        q = make_layout(layout, 7, 4, 48, dtype, seed=1)
        k = make_layout(layout, 7, 2, 48, dtype, seed=2)
        rest = (inside(q.shape[0]), table_of(20), None, (), style, 4, 1.0, False)
        same(rope_op(q, k, *rest), rope_torch(q, k, *rest))
        if layout == "expanded_head":
            continue
        # In place through the layout's own strides, nothing outside touched.
        q2, k2 = (make_layout(layout, 7, h, 48, dtype, seed=s) for h, s in ((4, 1), (2, 2)))
        base, guard = q2._base, None if q2._base is None else q2._base.clone()
        rope_inplace_op(q2, k2, *rest)
        same((q2.contiguous(), k2.contiguous()), rope_torch(q, k, *rest))
        if guard is not None:
            guard.as_strided(q2.shape, q2.stride(), q2.storage_offset()).copy_(q2)
            assert torch.equal(base, guard)


@needs_native
@pytest.mark.parametrize(
    ("style", "axes"),
    [
        ("half", (0,) * 8 + (1,) * 12 + (2,) * 12),
        ("half", (0, 1, 2) * 10 + (0, 0)),
        ("interleaved", (0,) * 4 + (1,) * 14 + (2,) * 14),
        ("half_blocks", (0,) * 10 + (1,) * 22),
        ("half", (0,) * 16 + (1,) * 16 + (2,) * 16 + (0,) * 16),  # one axis for each channel
    ],
)
@pytest.mark.parametrize("inverse", [False, True])
def test_every_axis_map_gives_the_bits_of_plain_torch(style, axes, inverse: bool) -> None:
    q, k = randn(2, 5, 3, 80, seed=1), randn(2, 5, 1, 80, seed=2)
    count = max(axes) + 1
    for positions in (inside(count, 2, 5), inside(count, 1, 5), inside(5), inside(1, 2, 5)):
        for kind in (torch.int64, torch.int32):
            rest = (positions.to(kind), table_of(32), None, axes, style, 8, 1.0, inverse)
            same(rope_op(q, k, *rest), rope_torch(q, k, *rest))


@needs_native
def test_positions_and_token_dimensions_of_every_rank() -> None:
    table = table_of(8)
    for shape in ((), (4,), (2, 4), (3, 2, 4), (2, 3, 2, 4), (1, 2, 1, 2, 1, 2, 2)):
        q, k = randn(*shape, 2, 16, seed=1), randn(*shape, 1, 16, seed=2)
        for cut in range(len(shape) + 1):
            positions = inside(*shape[cut:])
            rest = (positions, table, None, (), "half", 0, 1.0, False)
            same(rope_op(q, k, *rest), rope_torch(q, k, *rest))
        if shape:
            expanded = inside(*shape[-1:]).expand(shape)
            rest = (expanded, table, None, (), "half", 0, 1.0, False)
            same(rope_op(q, None, *rest), rope_torch(q, None, *rest))


@needs_native
def test_q_and_k_of_two_dtypes_and_widths() -> None:
    q, k = randn(5, 3, 40, seed=1, dtype=torch.bfloat16), randn(5, 1, 24, seed=2)
    rest = (inside(5), table_of(8), None, (), "half", 2, 1.0, False)
    same(rope_op(q, k, *rest), rope_torch(q, k, *rest))


@needs_native
def test_a_table_of_strided_rows_and_columns() -> None:
    q = randn(5, 3, 16)
    rows = torch.cat([table_of(8), table_of(8)], 1)[:, :16]
    columns = table_of(16)[:, ::2]
    for table in (rows, columns):
        assert not table.is_contiguous()
        for inv_freq in (None, torch.stack([frequencies(8)] * 2, 1)[:, 0]):
            rest = (inside(5), table, inv_freq, (), "half", 0, 1.0, False)
            same(rope_op(q, None, *rest), rope_torch(q, None, *rest))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_nans_and_the_edges_of_rounding(dtype) -> None:
    """Ties, the largest numbers, and NaN that a carry would turn into infinity."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65504.0, 3.3895e38, 1e-40,
         float("inf"), float("-inf"), float("nan"), 2**-24, 65519.0, 65520.0, 1.5],
        dtype=torch.float64,
    )  # fmt: skip
    q = values.to(torch.float32).to(dtype).repeat(2, 2, 2)
    table = torch.cat([torch.tensor([[1.0, 0.999, 0.5, 1 + 2**-9] * 4]), torch.zeros(1, 16)], 1)
    for style in ("half", "interleaved"):
        rest = (torch.zeros(2, dtype=torch.long), table, None, (), style, 0, 1.0, False)
        got, wanted = rope_op(q, None, *rest)[0], rope_torch(q, None, *rest)[0]
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
        assert got.isnan().any()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("phase_dtype", [torch.float32, torch.float64])
def test_outside_the_table_any_position_is_right(dtype, phase_dtype) -> None:
    positions = edge_positions(ROWS)
    inv_freq = frequencies(24, phase_dtype)
    table = oracle_table(ROWS, inv_freq, 1.25)
    q = randn(len(positions), 2, 48, dtype=dtype)
    for inverse in (False, True):
        rest = (positions, table, inv_freq, (), "half", 0, 1.25, inverse)
        got = rope_op(q, None, *rest)[0]
        wanted = rope_torch(q, None, *rest)[0]
        assert ulp_distance(got, wanted).max() <= 1  # cos and sin come from two libraries
        exact, larger = oracle_rotate(
            q, positions, inv_freq, attention_scaling=1.25, inverse=inverse
        )
        assert_near_oracle(got, exact, larger)
    clamped = (positions, table, None, (), "half", 0, 1.0, False)
    same(rope_op(q, None, *clamped), rope_torch(q, None, *clamped))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_above_the_mapping_threshold(dtype) -> None:
    """Such outputs are asked for in huge pages; 34 MB of q, a partial rotation, an odd row."""
    tokens = 34 * 2**20 // (32 * 96 * dtype.itemsize)
    q, k = randn(tokens, 32, 96, seed=1, dtype=dtype), randn(tokens, 2, 96, seed=2, dtype=dtype)
    rest = (inside(tokens), table_of(40), None, (), "half", 8, 1.0, False)
    same(rope_op(q, k, *rest), rope_torch(q, k, *rest))
    moved = (inside(tokens), table_of(40), None, (), "interleaved_to_half", 8, 1.0, False)
    same(rope_op(q, k, *moved), rope_torch(q, k, *moved))
    narrow = q.view(tokens * 32 * 12, 1, 8)[:, :, :7]  # rows of 28 or 14 bytes
    rest = (inside(len(narrow)), table_of(3), None, (), "half", 0, 1.0, False)
    same(rope_op(narrow, None, *rest), rope_torch(narrow, None, *rest))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_outside_the_views_is_read_or_written(dtype) -> None:
    q, buffer = guarded(randn(5, 3, 50, seed=1, dtype=dtype))
    positions, position_buffer = inside(5 + 16), None
    positions[:8] = positions[13:] = 2**62  # read as positions, these rows would be far away
    position_buffer, positions = positions, positions[8:13]
    table, _ = guarded(table_of(17))
    rest = (positions, table, None, (), "half", 9, 1.0, False)
    wanted = rope_torch(q, None, *rest)[0]
    got = rope_op(q, None, *rest)[0]
    assert torch.equal(got, wanted)
    assert not got.isnan().any()
    rope_inplace_op(q, None, *rest)
    assert torch.equal(q, wanted)
    assert_guard_intact(q, buffer)
    assert position_buffer.numel() == 21


@needs_native
def test_one_thread_and_several_give_the_same_bits() -> None:
    q, k = randn(3, 700, 8, 64, seed=1), randn(3, 700, 2, 64, seed=2)
    rest = (inside(3, 700), table_of(32), None, (), "half", 0, 1.0, False)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(rope_op(q, k, *rest))
    finally:
        torch.set_num_threads(threads)
    same(results[0], results[1])
    same(results[0], results[2])


@needs_native
def test_the_bit_comparison_can_fail() -> None:
    """Wrong twin: the neighbouring row, and one bit of one element."""
    q = randn(5, 3, 16)
    rest = (inside(5), table_of(8), None, (), "half", 0, 1.0, False)
    other = (rest[0] + 1, *rest[1:])
    with pytest.raises(AssertionError):
        same(rope_op(q, None, *rest), rope_torch(q, None, *other))
    wanted = rope_torch(q, None, *rest)
    wanted[0].view(torch.int32)[4, 2, 15] ^= 1
    with pytest.raises(AssertionError):
        same(rope_op(q, None, *rest), wanted)


# ---------------------------------------------------------------------------------- refusals


def freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def bad_calls() -> dict[str, tuple]:
    q, k = torch.ones(3, 2, 8), torch.ones(3, 1, 8)
    p, table = torch.arange(3), table_of(4)
    rest = (None, (), "half", 0, 1.0, False)
    return {
        "q dtype": (q.long(), k, p, table, *rest),
        "k dtype": (q, k.bool(), p, table, *rest),
        "positions dtype": (q, k, p.float(), table, *rest),
        "table dtype": (q, k, p, table.double(), *rest),
        "table rank": (q, k, p, table[0], *rest),
        "odd table": (q, k, p, table[:, :7], *rest),
        "wide table": (q, k, p, table_of(5), *rest),
        "no rows": (q, k, p, table[:0], *rest),
        "inv_freq shape": (q, k, p, table, frequencies(5), *rest[1:]),
        "inv_freq dtype": (q, k, p, table, frequencies(4).half(), *rest[1:]),
        "q rank": (q[0, 0], None, p, table, *rest),
        "k rank": (q, k[0], p, table, *rest),
        "k tokens": (q, k[:2], p, table, *rest),
        "positions shape": (q, k, p[:2], table, *rest),
        "positions rank": (q, k, p[None], table, *rest),
        "style": (q, k, p, table, None, (), "neox", 0, 1.0, False),
        "offset": (q, k, p, table, None, (), "half", 1, 1.0, False),
        "negative offset": (q, k, p, table, None, (), "half", -1, 1.0, False),
        "axes count": (q, k, p, table, None, (0, 1), "half", 0, 1.0, False),
        "negative axis": (q, k, p, table, None, (0, 1, -1, 0), "half", 0, 1.0, False),
        "blocks without axes": (q, k, p, table, None, (), "half_blocks", 0, 1.0, False),
        "unsorted blocks": (q, k, p, table, None, (1, 0, 0, 0), "half_blocks", 0, 1.0, False),
        "axes of positions": (q, k, inside(2, 3), table, None, (0, 1, 2, 2), "half", 0, 1.0, False),
        "meta table": (q, k, p, table.to("meta"), *rest),
        "freed q": (freed(q), k, p, table, *rest),
        "freed positions": (q, k, freed(p), table, *rest),
        "freed table": (q, k, p, freed(table), *rest),
        "freed inv_freq": (q, k, p, table, freed(frequencies(4)), *rest[1:]),
    }


@needs_native
@pytest.mark.parametrize("name", bad_calls())
def test_bad_input_gets_the_one_sentence_of_python(name: str) -> None:
    arguments = bad_calls()[name]
    with pytest.raises((ValueError, TypeError)) as wanted:
        rope_torch(*arguments) if name != "meta table" else rope_op(*arguments)
    for operator in (rope_op, rope_inplace_op):
        with pytest.raises(wanted.type, match=re.escape(str(wanted.value))):
            operator(*arguments)


@needs_native
def test_memory_that_cannot_be_written_right_is_refused() -> None:
    rest = (inside(4), table_of(4), None, (), "half", 0, 1.0, False)
    with pytest.raises(ValueError, match="must not overlap itself"):
        rope_inplace_op(torch.ones(4, 1, 8).expand(4, 3, 8), None, *rest)
    buffer = torch.ones(4, 5, 8)
    with pytest.raises(ValueError, match="must not share memory"):
        rope_inplace_op(buffer[:, :3], buffer[:, 2:], *rest)
    flat = torch.ones(400)
    with pytest.raises(ValueError, match="must not overlap itself"):
        rope_inplace_op(flat.as_strided((4, 3, 8), (20, 8, 1)), None, *rest)
    with pytest.raises(ValueError, match="cannot be applied in place"):
        rope_inplace_op(torch.ones(4, 1, 8), None, *rest[:4], "interleaved_to_half", *rest[5:])
    packed = randn(4, 9, 8)
    wanted = rope_torch(packed[:, :6].clone(), packed[:, 6:8].clone(), *rest)
    rope_inplace_op(packed[:, :6], packed[:, 6:8], *rest)
    same((packed[:, :6].contiguous(), packed[:, 6:8].contiguous()), wanted)


# ------------------------------------------------------------------------ in front of autograd


@needs_native
def test_calls_without_gradients_do_not_visit_python(monkeypatch) -> None:
    assert native._State.registered  # tests/conftest.py has it built before this process starts
    for key in ("CPU", "AutogradCPU", "AutogradCUDA"):
        for name in ("rope_compile::rope", "rope_compile::rope_"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    calls = []
    monkeypatch.setattr("rope_compile.ops._records", lambda *a: calls.append(a) or True)
    q = randn(3, 2, 8)
    rest = (inside(3), table_of(4), None, (), "half", 0, 1.0, False)
    rope_op(q, None, *rest)
    with torch.no_grad():
        rope_op(q.clone().requires_grad_(), None, *rest)
    with torch.inference_mode():
        rope_op(q, None, *rest)
    assert not calls
    rope_op(q.clone().requires_grad_(), None, *rest)  # and the twin that does
    assert len(calls) == 1


@needs_native
def test_a_write_in_place_is_seen_by_autograd() -> None:
    q = randn(3, 2, 8)
    w = randn(3, 2, 8, seed=1).requires_grad_()
    product = q * w
    version = q._version
    rope_inplace_op(q, None, inside(3), table_of(4), None, (), "half", 0, 1.0, False)
    assert q._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():  # has no version counter, and needs none
        x = randn(3, 2, 8)
        rope_inplace_op(x, None, inside(3), table_of(4), None, (), "half", 0, 1.0, False)
    assert torch.equal(x, q)


# ------------------------------------------------------------------- building and not building

# One call, then what runs, whether it is right, and the log.
CHILD = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="LOG %(message)s", stream=sys.stdout)
import torch, rope_compile as rc
from rope_compile.kernels import native
rope = rc.get_rope(rc.RopeConfig(head_dim=8, max_position=4))
q = torch.randn(3, 2, 8)
p = torch.tensor([0, 1, 9])
rest = (p, rope.cos_sin_cache, rope.inv_freq, (), "half", 0, 1.0, False)
torch.testing.assert_close(rope(p, q)[0], torch.ops.rope_compile.rope_torch(q, None, *rest)[0])
rope(p, q)
print(*native.status())
"""


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def copying_compiler(folder: Path, library: Path) -> str:
    """A compiler that "links" a library built before, slowly, and counts."""
    return script(
        folder / "copying-c++",
        f'echo x >> {folder}/calls; for last; do [ "$before" = -o ] && out=$last; before=$last; '
        f'done; case " $* " in *" -shared "*) sleep 1; cp {library} "$out";; *) : > "$out";; esac',
    )


def test_without_a_compiler_calls_work_and_one_line_says_so(tmp_path: Path) -> None:
    out = run_child("-c", CHILD, ROPE_COMPILE_CACHE_DIR=str(tmp_path), CXX="no-such-compiler")
    assert out.splitlines()[-1].startswith("False no C++ compiler: no-such-compiler was not found")
    assert out.count("LOG rope_compile: no native CPU kernel") == 1


def test_a_broken_compiler_breaks_no_call_and_is_not_tried_twice(tmp_path: Path) -> None:
    broken = script(
        tmp_path / "c++", f"echo x >> {tmp_path}/calls; echo this is broken >&2; exit 7"
    )
    cache = str(tmp_path / "cache")
    first = run_child("-c", CHILD, ROPE_COMPILE_CACHE_DIR=cache, CXX=broken)
    assert re.search(r"False .*c\+\+ ended with 7, see .*\.log", first)
    second = run_child("-c", CHILD, ROPE_COMPILE_CACHE_DIR=cache, CXX=broken)
    assert re.search(r"False the build failed before, see (.*\.log)", second)
    assert (tmp_path / "calls").read_text() == "x\n"
    log = next(Path(cache).glob("*.log")).read_text()
    assert "this is broken" in log
    with pytest.raises(native.Unavailable, match="ended with 7"):  # as doctor asks
        rebuild(cache, broken, retry=True)
    assert (tmp_path / "calls").read_text() == "x\nx\n"


def rebuild(cache: str, compiler: str, retry: bool) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROPE_COMPILE_CACHE_DIR", cache)
        patch.setenv("CXX", compiler)
        native.library_path.cache_clear()
        try:
            return native.build(retry=retry)
        finally:
            native.library_path.cache_clear()


def test_a_cache_that_cannot_be_written_breaks_no_call(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    out = run_child("-c", CHILD, ROPE_COMPILE_CACHE_DIR=str(file / "cache"), CXX="cc")
    assert re.search(r"False the cache .* cannot be written .*set ROPE_COMPILE_CACHE_DIR", out)


def test_it_can_be_switched_off() -> None:
    out = run_child("-c", CHILD, ROPE_COMPILE_NATIVE="0")
    assert out.splitlines() == ["False ROPE_COMPILE_NATIVE=0 is set"]


@needs_native
def test_a_library_that_is_wrong_or_crashes_is_never_loaded(tmp_path: Path) -> None:
    """Compiled from a source with one sign turned; and one that is no library at all."""
    wrong = tmp_path / "wrong.cpp"
    text = native.SOURCE.read_text()
    turned = text.replace("- high * angle(at.sin_low)", "+ high * angle(at.sin_low)")
    assert turned != text
    wrong.write_text(turned)
    compiler = os.environ.get("CXX", "g++")
    # Without optimisation: only the sign matters.
    swap = f"s#{native.SOURCE}#{wrong}#"
    twin = script(tmp_path / "c++", f'exec {compiler} $(echo "$@" | sed "{swap}") -O0')
    out = run_child("-c", CHILD, ROPE_COMPILE_CACHE_DIR=str(tmp_path / "cache"), CXX=twin)
    assert re.search(r"False .*python\S* ended with 1, see .*\.log", out)
    assert "Tensor-likes are not equal" in next((tmp_path / "cache").glob("*.log")).read_text()
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"no library")
    out = run_child("-c", CHILD, ROPE_COMPILE_CACHE_DIR=str(tmp_path / "cache"),
                    CXX=copying_compiler(tmp_path, garbage))  # fmt: skip
    assert re.search(r"False .*ended with 1, see .*\.log", out)


@needs_native
def test_a_damaged_library_in_the_cache_breaks_no_import(tmp_path: Path) -> None:
    out = run_child("-c", "from rope_compile.kernels import native; print(native.library_path())",
                    ROPE_COMPILE_CACHE_DIR=str(tmp_path))  # fmt: skip
    Path(out.strip()).write_bytes(b"half a file")
    out = run_child("-c", CHILD, ROPE_COMPILE_CACHE_DIR=str(tmp_path))
    assert out.splitlines()[-1].startswith("False ")
    assert "no native CPU kernel" in out


@needs_native
def test_first_use_from_several_processes_builds_once(tmp_path: Path) -> None:
    compiler = copying_compiler(tmp_path, native.library_path())
    environment = os.environ | {
        "ROPE_COMPILE_CACHE_DIR": str(tmp_path / "cache"),
        "CXX": compiler,
        "PYTHONPATH": str(Path(native.__file__).parents[2]),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert all(out.splitlines()[-1].startswith("True ") for out in outputs)
    assert (tmp_path / "calls").read_text() == "x\nx\n"  # one object, one library
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".lock", ".so"]


@needs_native
def test_the_process_that_builds_uses_what_it_has_built(tmp_path: Path) -> None:
    compiler = copying_compiler(tmp_path, native.library_path())
    environment = {"ROPE_COMPILE_CACHE_DIR": str(tmp_path / "cache"), "CXX": compiler}
    first = run_child("-c", CHILD, **environment).splitlines()
    assert "LOG rope_compile: compiling the native CPU kernel, once for this machine" in first
    assert first[-1].startswith("True ")
    assert "built in this process" in first[-1]
    second = run_child("-c", CHILD, **environment).splitlines()
    assert len(second) == 1
    assert second[0] == first[-1].split(",")[0]


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_threads_come_from_the_one_openmp_runtime_of_torch() -> None:
    """A second runtime would bring its own threads and oversubscribe the cores."""
    loaded = "import re, torch; maps = open('/proc/self/maps').read(); print(sorted(set(" + (
        "re.findall(r'\\S*(?:libgomp|libiomp|libomp)\\S*', maps))))"
    )
    alone = run_child("-c", loaded)
    ours = run_child(
        "-c",
        "import torch, rope_compile as rc\n"
        "rope = rc.get_rope(rc.RopeConfig(head_dim=64, max_position=4096))\n"
        "rope(torch.arange(4096), torch.randn(4096, 8, 64))\n" + loaded,
    )
    assert ours == alone
    assert "omp" in ours
