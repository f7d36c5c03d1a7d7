"""Fault group G: the precision of phases, tables and the rotation.

The labels are those of test_faults_index.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from test_faults_index import BACKENDS, TRITON, rest_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, table
from rope_compile.ops import rope_op

from support import oracle_rows, pair_channels, randn, ulp_distance

WIDTH = 128


def rope_of(phase_dtype: torch.dtype = torch.float32, rows: int = 4096, **fields: object):
    made = RopeConfig(head_dim=WIDTH, max_position=rows, phase_dtype=phase_dtype, **fields)
    return RotaryEmbedding(made, "cpu")


def exact_rows(positions: Tensor, base: float = 1e4) -> Tensor:
    """cos half, then sin half, of float64 frequencies and phases."""
    lanes = torch.arange(0, WIDTH, 2, dtype=torch.float64)
    phase = positions.double().unsqueeze(1) * base ** (-lanes / WIDTH)
    return torch.cat((phase.cos(), phase.sin()), -1)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


# --------------------------------------------------------------------------------------------- G1

# float32 by base: 2.394e-4 and 2.815e-4 are reached, in transformers' own formula too.
LIMITS = {
    torch.float32: {1e4: 2.4e-4, 5e5: 2.85e-4},
    torch.float64: {1e4: 1e-7, 5e5: 1e-7},
}


@pytest.mark.parametrize("phase_dtype", LIMITS)
@pytest.mark.parametrize("base", [1e4, 5e5])
def test_g1_no_phase_is_16_bit(base: float, phase_dtype: torch.dtype) -> None:
    """Phase computed in 16 bits, sgl-project/sglang-jax #1472: cos and sin of a bf16 module."""
    rope = rope_of(phase_dtype, base=base).to(torch.bfloat16)
    positions = torch.arange(4096)
    rows = rope.cos_sin_cache
    assert apart(rows, exact_rows(positions, base)) <= LIMITS[phase_dtype][base]
    frequencies = rope.config.inv_freq(phase_dtype)
    same_phase = np.concatenate(oracle_rows(positions, frequencies, round_row=False), axis=-1)
    assert apart(rows, torch.from_numpy(same_phase)) <= 1.2e-7


@pytest.mark.parametrize("phase_dtype", LIMITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_g1_computed_phases_are_as_good_as_stored_ones(backend, phase_dtype) -> None:
    """Phase computed in 16 bits, Modalities/modalities PR #462: with bf16 q, outside the table."""
    rope = rope_of(phase_dtype, rows=128)
    positions = torch.arange(0, 4096, 241 if backend is TRITON else 1)
    unit = torch.zeros(len(positions), 1, WIDTH, dtype=torch.float32)
    unit[..., : WIDTH // 2] = 1.0
    other = unit.bfloat16()  # q and k have each their dtype, and one row of cos and sin
    rows, _ = backend(unit, other, positions, *rest_of(rope))
    assert apart(rows.squeeze(1), exact_rows(positions)) <= LIMITS[phase_dtype][1e4]


def test_g1_16_bit_positions_would_be_found() -> None:
    """Wrong twin of nkalyanv99/UNI-D2 PR #6: bf16 holds few of the first 4096 positions."""
    positions = torch.arange(32768)
    assert positions[:4096].bfloat16().unique().numel() == 769
    assert positions.bfloat16().unique().numel() == 1153
    assert torch.tensor(257).bfloat16() == 256
    rounded = positions[:4096].bfloat16()
    assert apart(exact_rows(rounded), exact_rows(positions[:4096])) > 1
    rope, q = rope_of(rows=128), randn(1, 1, WIDTH)
    cache, rounded = rope.cos_sin_cache, rope.inv_freq.bfloat16()
    with pytest.raises(TypeError, match="inv_freq must be float32 or float64"):
        rc.apply_rope(q, None, torch.tensor([5]), cache, inv_freq=rounded)
    with pytest.raises(TypeError, match="positions must be int32 or int64"):
        rope(torch.tensor([5.0]), q)


# --------------------------------------------------------------------------------------------- G3


class NoMatmul(TorchDispatchMode):
    """Refuses every product that TF32 or autocast could take over."""

    DENIED = frozenset(
        ("mm", "bmm", "addmm", "baddbmm", "matmul", "dot", "mv", "addmv", "einsum", "linear")
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.DENIED, f"{name} of positions and frequencies"
        self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are built outside every mode; here the mode that watches stays in force."""
    monkeypatch.setattr(table, "plain_tensors", contextlib.nullcontext)


@pytest.mark.usefixtures("_visible")
@pytest.mark.parametrize("phase_dtype", LIMITS)
def test_g3_no_matmul_makes_an_angle(phase_dtype: torch.dtype) -> None:
    """RoPE corrupted through TF32, huggingface/transformers #48428: elementwise products alone."""
    with NoMatmul() as mode:
        rope = rope_of(phase_dtype, rows=128)
        rope.reserve(300)
        rope.rebuild_()
        plain = torch.ops.rope_compile.rope_torch
        plain(randn(3, 2, WIDTH), None, torch.tensor([0, 300, 2**20]), *rest_of(rope))
    assert {"polar", "mul"} <= mode.seen


@pytest.fixture
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def tf32(x: Tensor) -> Tensor:
    """Rounded to the 10 bits of a TF32 mantissa, ties to even."""
    bits = x.float().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.usefixtures("_tf32")
def test_g3_the_matmul_precision_changes_no_bit() -> None:
    """RoPE corrupted through TF32, huggingface/transformers #48428: precision "high", batch 3."""
    positions = torch.tensor([2049, 4097]).expand(3, 2)
    q = randn(3, 2, 2, WIDTH)
    rough = rope_of(rows=8192), rope_of(rows=8192)(positions, q)[0]
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(rough[0].cos_sin_cache, rope_of(rows=8192).cos_sin_cache)
    assert torch.equal(rough[1], rope_of(rows=8192)(positions, q)[0])
    rows = rough[0].cos_sin_cache[positions[0]]
    assert apart(rows, exact_rows(positions[0])) <= LIMITS[torch.float32][1e4]


@pytest.mark.usefixtures("_visible")
def test_g3_a_matmul_would_be_found() -> None:
    """Wrong twin of huggingface/transformers #48428: what TF32 makes of 2049 and 4097."""
    positions = torch.tensor([2049.0, 4097.0])
    assert tf32(positions).tolist() == [2048, 4096]
    assert apart(exact_rows(tf32(positions)), exact_rows(positions)) > 0.5
    with NoMatmul(), pytest.raises(AssertionError, match="positions and frequencies"):
        positions.unsqueeze(1) @ torch.ones(1, 4)


# --------------------------------------------------------------------------------------------- G4


@pytest.mark.parametrize("scaling", [rc.DefaultScaling(), rc.NtkScaling(factor=4.0)])
def test_g4_the_table_is_float32(scaling) -> None:
    """16-bit cos and sin, Dao-AILab/flash-attention #823: the table, apart from the rotation."""
    rope = rope_of(scaling=scaling).half()
    assert rope.cos_sin_cache.dtype == torch.float32
    same_phase = np.concatenate(
        oracle_rows(torch.arange(4096), rope.config.inv_freq(), round_row=False), axis=-1
    )
    assert apart(rope.cos_sin_cache, torch.from_numpy(same_phase)) <= 1.2e-7
    with pytest.raises(TypeError, match="cos_sin_cache must be float32 whatever the dtype of q"):
        rc.apply_rope(randn(1, 1, WIDTH).half(), None, torch.tensor([1]), rope.cos_sin_cache.half())


def rotated(x: Tensor, rows: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """float64 rotation by given float32 rows, and the larger input of each pair."""
    half = WIDTH // 2
    low, high = (x.double()[..., channels] for channels in pair_channels(style, half)[:2])
    cos, sin = rows.double().unsqueeze(1).chunk(2, -1)
    out, larger = torch.empty_like(x, dtype=torch.float64), torch.empty_like(x, dtype=torch.float64)
    to_low, to_high = pair_channels(style, half)[2:]
    out[..., to_low], out[..., to_high] = low * cos - high * sin, high * cos + low * sin
    larger[..., to_low] = larger[..., to_high] = torch.maximum(low.abs(), high.abs())
    return out, larger


def assert_rounded_once(out: Tensor, x: Tensor, rows: Tensor, style: str) -> None:
    """Within 1 step of the rounded float64 rotation; what cancels, within 1e-6 of its input."""
    expected, larger = rotated(x, rows, style)
    near = ulp_distance(out, expected.to(out.dtype)) <= 1
    assert near.double().mean() >= 0.999
    assert ((out.double() - expected).abs() <= 1e-6 * larger)[~near].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_g4_the_rotation_rounds_once(backend, style: str, dtype: torch.dtype) -> None:
    """16-bit arithmetic in the kernel, NVIDIA/TransformerEngine #1245: by the same float32 rows."""
    rope = rope_of(rows=8192, style=style)
    positions = torch.arange(0, 8192, 509 if backend is TRITON else 1)
    q, k = (randn(len(positions), 1, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    outs = backend(q, k, positions, *rest_of(rope))
    for out, x in zip(outs, (q, k), strict=True):
        assert_rounded_once(out, x, rope.cos_sin_cache[positions], style)


@pytest.mark.parametrize("backend", BACKENDS)
def test_g4_pair_norms_are_kept(backend) -> None:
    """16-bit cos and sin, Dao-AILab/flash-attention #823: a rotation keeps lengths."""
    rope, x = rope_of(rows=512), randn(16, 2, WIDTH)
    out = backend(x, None, torch.arange(0, 1024, 64), *rest_of(rope))[0]
    before, after = (y.double().unflatten(-1, (2, -1)).norm(dim=-2) for y in (x, out))
    assert ((after - before).abs() <= 1e-6 * before).all()


def bf16_table(x: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    rest = (None, [], "half", 0, 1.0, False)
    return rope_op(x, None, positions, rows.bfloat16().float(), *rest)[0]


def bf16_arithmetic(x: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = rows[positions].to(x.dtype).unsqueeze(1).chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@pytest.mark.parametrize("wrong", [bf16_table, bf16_arithmetic])
def test_g4_16_bit_tables_and_arithmetic_would_be_found(wrong: Callable[..., Tensor]) -> None:
    """Wrong twins of vllm-project/vllm #863: each of the two roundings is seen."""
    rope, positions = rope_of(), torch.arange(4096)
    x = randn(4096, 1, WIDTH, dtype=torch.bfloat16)
    out = wrong(x, positions, rope.cos_sin_cache)
    with pytest.raises(AssertionError):
        assert_rounded_once(out, x, rope.cos_sin_cache, "half")
