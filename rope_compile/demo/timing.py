"""How long one rope call takes beside the formula of model files, and that formula compiled."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.demo.decoder import rotate_half

__all__ = ["Timing", "time_rope_calls"]

_ROUNDS = 30
_ROUND_SECONDS = 0.004


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over rounds, and the 20th and 80th percentile."""

    name: str
    tokens: int
    median_us: float
    p20_us: float
    p80_us: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation as model files write it; cos and sin ``[tokens, 1, head_dim]``, gathered."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def time_rope_calls(
    rope: rc.RotaryEmbedding,
    heads: int,
    kv_heads: int,
    token_counts: tuple[int, ...],
    backend: str,
    advance: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time ``rope(positions, q, k)``, the eager formula and the compiled formula.

    The formula gets cos and sin already gathered for its positions, as model files do it once a
    forward; ours looks its rows up in every call. The contenders take turns round by round, so a
    machine that slows down slows all of them. A report: nothing passes or fails by it.
    """
    device = rope.cos_sin_cache.device
    width = rope.config.rotary_dim or rope.config.head_dim
    compiled = torch.compile(formula, backend=backend, dynamic=True)
    timings = []
    for tokens in token_counts:
        generator = torch.Generator().manual_seed(tokens)
        q = torch.randn(tokens, heads, width, generator=generator).to(device)
        k = torch.randn(tokens, kv_heads, width, generator=generator).to(device)
        positions = torch.arange(tokens, device=device) % rope.capacity
        half_cos, half_sin = rope.cos_sin_cache[positions].chunk(2, dim=-1)
        cos = torch.cat((half_cos, half_cos), -1)[:, None]
        sin = torch.cat((half_sin, half_sin), -1)[:, None]
        contenders: dict[str, Callable[[], object]] = {
            "rope_compile": functools.partial(rope, positions, q, k),
            "eager formula": functools.partial(formula, q, k, cos, sin),
            f"formula, {backend}": functools.partial(compiled, q, k, cos, sin),
        }
        timings += _interleaved(contenders, tokens, device)
        advance()
    return timings


@torch.no_grad()
def _interleaved(
    contenders: dict[str, Callable[[], object]], tokens: int, device: torch.device
) -> list[Timing]:
    repeats = {}
    for name, call in contenders.items():
        call()  # compiles, fills caches
        once = max(_seconds(call, 3, device), 1e-7)
        repeats[name] = max(1, int(_ROUND_SECONDS / once))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, call in contenders.items():
            samples[name].append(_seconds(call, repeats[name], device) * 1e6)
    quantiles = {
        name: torch.tensor(values, dtype=torch.float64)
        .quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
        .tolist()
        for name, values in samples.items()
    }
    return [Timing(name, tokens, p50, p20, p80) for name, (p20, p50, p80) in quantiles.items()]


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds a call, over ``repeats`` calls that wait for the device only once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats
