"""Fault group F: meta construction, materialisation, and casts of the frequencies.

The labels are those of test_faults_index.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from test_faults_index import assert_right
from torch import Tensor, nn

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, get_rope
from rope_compile.factory import registry

from support import oracle_rows, randn

SCALINGS: dict[str, dict[str, object]] = {
    "default": {},
    "yarn": {"scaling": rc.YarnScaling(factor=4.0, original_max_position=64)},
    "llama3": {
        "scaling": rc.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        )
    },
    "dynamic": {
        "scaling": rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64)
    },
    "float64 phases": {"phase_dtype": torch.float64},
}
AT = torch.tensor([0, 1, 127, 128, 5000, -7])


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


def config(**fields: object) -> RopeConfig:
    return RopeConfig(**{"head_dim": 16, "max_position": 128, **fields})


def assert_serves(rope: RotaryEmbedding, dtype: torch.dtype = torch.float32) -> None:
    q, k = randn(6, 2, 16, seed=1, dtype=dtype), randn(6, 1, 16, seed=2, dtype=dtype)
    assert_right(rope(AT, q, k), (q, k), AT, rope.config)


def bits(rope: RotaryEmbedding) -> list[bytes]:
    return [x.numpy().tobytes() for x in (rope.cos_sin_cache, rope.inv_freq)]


class Model(nn.Module):
    """A model with parameters; its rotary modules shared or of its own."""

    def __init__(self, made: RopeConfig, shared: bool, device: str | None = None) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, device=device)
        self.rope = get_rope(made, device) if shared else RotaryEmbedding(made, device)


class Naive(nn.Module):
    """The reported cause: a buffer that only ``__init__`` fills."""

    def __init__(self, made: RopeConfig) -> None:
        super().__init__()
        lanes = torch.arange(0, made.rotary_dim, 2)
        self.register_buffer("inv_freq", 1.0 / made.base ** (lanes / made.rotary_dim), False)


@pytest.fixture
def _uninitialised_is_nan() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


# --------------------------------------------------------------------------------------------- F1

MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "to_empty by layer": lambda model: (
        [part.to_empty(device="cpu", recurse=False) for part in model.modules()],
        model,
    )[1],
}


@pytest.mark.usefixtures("_uninitialised_is_nan")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", SCALINGS)
def test_f1_materialised_modules_equal_built_ones(name: str, move: str, shared: bool) -> None:
    """inv_freq is uninitialised after meta, huggingface/transformers #45902: recomputed."""
    made = config(**SCALINGS[name])
    with torch.device("meta"):
        model = Model(made, shared)
    assert model.rope.cos_sin_cache.is_meta
    MOVES[move](model)
    assert model.proj.weight.isnan().all()  # so a forgotten buffer would be NaN too
    assert bits(model.rope) == bits(RotaryEmbedding(made, "cpu"))
    assert_serves(model.rope)
    if name == "default":
        assert model.rope.inv_freq[0] == 1.0


@pytest.mark.usefixtures("_uninitialised_is_nan")
def test_f1_a_buffer_filled_by_init_alone_would_be_found() -> None:
    """Wrong twin of huggingface/transformers #34234: the naive module keeps what memory held."""
    with torch.device("meta"):
        naive = Naive(config())
    naive.to_empty(device="cpu")
    assert naive.inv_freq.isnan().all()


@pytest.mark.parametrize("shared", [False, True])
def test_f1_checkpoints_hold_no_keys_and_ignore_old_ones(shared: bool) -> None:
    """Strict loading with and without the key, karpathy/llama2.c #266: both ways work."""
    model = Model(config(), shared, "cpu")
    saved = model.state_dict()
    assert set(saved) == {"proj.weight", "proj.bias"}
    before = bits(model.rope)
    stray = ("inv_freq", "cos_cached", "sin_cached", "cos_sin_cache", "freqs_cis")
    for keys in ((), stray):
        given = saved | {f"rope.{key}": torch.full((3,), torch.nan) for key in keys}
        result = model.load_state_dict(given, strict=True)
        assert not result.missing_keys
        assert not result.unexpected_keys
    assert bits(model.rope) == before
    with pytest.raises(RuntimeError, match=r"rope\.other"):
        model.load_state_dict(saved | {"rope.other": torch.ones(1)}, strict=True)


# --------------------------------------------------------------------------------------------- F2

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to": lambda model: model.to(torch.bfloat16),
    "to device and dtype": lambda model: model.to("cpu", torch.float16),
    "type": lambda model: model.type(torch.bfloat16),
    "apply": lambda model: model._apply(lambda x: x.half()),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["default", "yarn", "float64 phases"])
def test_f2_a_blanket_cast_reaches_no_frequency(name: str, cast: str, shared: bool) -> None:
    """A cast in one rank and not in another, NovaSky-AI/SkyRL PR #1725: all hold the same bytes."""
    ranks = [Model(config(**SCALINGS[name]), shared, "cpu") for _ in range(2)]
    kinds = [x.dtype for x in ranks[0].rope.buffers()]
    before = bits(ranks[0].rope)
    CASTS[cast](ranks[0])
    assert ranks[0].proj.weight.dtype != torch.float32
    for rank in ranks:
        assert [x.dtype for x in rank.rope.buffers()] == kinds
        assert bits(rank.rope) == before
    assert ranks[0].rope.cos_sin_cache.dtype == torch.float32
    assert_serves(ranks[0].rope, torch.bfloat16)


@pytest.mark.parametrize("cast", CASTS)
def test_f2_a_cast_buffer_would_be_found(cast: str) -> None:
    """Wrong twin of facebookresearch/fairseq2 PR #480: an ordinary buffer follows the cast."""
    naive = Naive(config())
    CASTS[cast](naive)
    assert naive.inv_freq.dtype != torch.float32


# --------------------------------------------------------------------------------------------- F3

WIDE = {"head_dim": 128}


def exact_rows(positions: Tensor, base: float = 1e4, width: int = 128) -> Tensor:
    """cos half, then sin half, of float64 frequencies and phases."""
    lanes = torch.arange(0, width, 2, dtype=torch.float64)
    phase = positions.double().unsqueeze(1) * base ** (-lanes / width)
    return torch.cat((phase.cos(), phase.sin()), -1)


def measured(rope: RotaryEmbedding, positions: Tensor) -> Tensor:
    """cos and sin as the operator sees them, read or computed: it turns (1, 0) into them."""
    half = rope.config.rotary_dim // 2
    unit = torch.zeros(len(positions), 1, 2 * half, dtype=torch.float64)
    unit[..., :half] = 1.0
    return rope(positions, unit)[0].squeeze(1)


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("reserved", [False, True])
def test_f3_rows_grown_after_a_cast_are_exact(reserved: bool, base: float) -> None:
    """Frequencies rounded, then the cache regrown from them, huggingface/transformers #29496."""
    made = config(**WIDE, base=base)
    rope = Model(made, False, "cpu").to(torch.bfloat16).rope
    if reserved:
        rope.reserve(4096)
    near = torch.arange(0, 4096, 3)
    far = torch.cat((torch.arange(126976, 131072, 29), torch.tensor([131071])))
    for positions, limit in ((near, 2.8e-4), (far, 9.3e-3)):
        found = measured(rope, positions)
        same_phase = torch.from_numpy(
            np.concatenate(oracle_rows(positions, made.inv_freq(), round_row=False), axis=-1)
        )
        assert (found - same_phase).abs().max() <= 1.2e-7
        assert (found - exact_rows(positions, base)).abs().max() <= limit


def test_f3_rounded_frequencies_would_be_found() -> None:
    """Wrong twin of EleutherAI/gpt-neox #1003: what bfloat16 and float16 frequencies cost."""
    inv_freq = config(**WIDE).inv_freq()
    rounded = inv_freq.bfloat16().float()
    assert (inv_freq - rounded).abs().max() == pytest.approx(1.22e-3, abs=5e-6)
    for position, error in ((511, 0.47), (4095, 1.68)):
        lost = (position * rounded.double()).cos() - (position * inv_freq.double()).cos()
        assert lost.abs().max() == pytest.approx(error, abs=0.005)
    exact = 1e4 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    places = torch.arange(2048).double().unsqueeze(1)
    phase = places.half() * exact.half()
    assert (places * exact)[1857, 1].item() == pytest.approx(1044.27, abs=0.005)
    assert phase[1857, 1] == 1045
    lost = (phase.double().cos() - (places * exact).cos()).abs().max()
    assert lost.item() == pytest.approx(0.7819, abs=5e-5)
    wrong = RotaryEmbedding(config(**WIDE), "cpu")
    wrong.inv_freq.copy_(rounded)
    positions = torch.arange(128, 4096)
    assert (measured(wrong, positions) - exact_rows(positions)).abs().max() > 0.47
