"""What several test files share: seeds, layouts, an ulp distance, guard bands, and the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rope_compile

from oracle import assert_near_oracle, oracle_rotate, oracle_rows, oracle_table, pair_channels

__all__ = [
    "EDGE_POSITIONS",
    "LAYOUTS",
    "NoHostReads",
    "assert_guard_intact",
    "assert_near_oracle",
    "edge_positions",
    "generator",
    "guarded",
    "make_layout",
    "oracle_rotate",
    "oracle_rows",
    "oracle_table",
    "pair_channels",
    "randn",
    "run_child",
    "ulp_distance",
]

# Positions to try everywhere, for a table of ``capacity`` rows.
EDGE_POSITIONS = (0, 1, -1, 131071, 2**24 + 1, 2**31 - 1, -(2**31))


def generator(seed: int = 0) -> torch.Generator:
    """A private CPU generator: tests neither read nor move the global one."""
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, drawn in float64 so that every dtype sees the same ones, rounded."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def edge_positions(capacity: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """First and last row, just past the end, and far outside on both sides."""
    return torch.tensor([0, capacity - 1, capacity, 2 * capacity, *EDGE_POSITIONS], dtype=dtype)


class NoHostReads(TorchDispatchMode):
    """Raises where a value would reach the host; works on tensors that are on the CPU."""

    denied = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.denied, f"host read by {func}"
        return func(*args, **(kwargs or {}))


# Name -> maker of a [t, h, d] tensor of that memory layout; ``draw(*shape)`` fills new memory.
LAYOUTS: dict[str, Callable[[Callable[..., Tensor], int, int, int], Tensor]] = {
    "contiguous": lambda draw, t, h, d: draw(t, h, d),
    # x.transpose(1, 2) of [1, heads, tokens, head_dim]: dense, but not in order.
    "permuted": lambda draw, t, h, d: draw(h, t, d).transpose(0, 1),
    "sliced": lambda draw, t, h, d: draw(t, h, d + 7)[..., 3 : d + 3],
    # The q slice of a [t, h + 2 + 2, d] projection that holds k and v too.
    "packed_qkv": lambda draw, t, h, d: draw(t, h + 4, d)[:, :h],
    "strided_last": lambda draw, t, h, d: draw(t, h, 2 * d)[..., ::2],
    "expanded_head": lambda draw, t, h, d: draw(t, 1, d).expand(t, h, d),
    "one_token_one_head": lambda draw, t, h, d: draw(1, 1, d),
    "no_tokens": lambda draw, t, h, d: draw(0, h, d),
}


def make_layout(
    name: str,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Tensor:
    """A ``[tokens, heads, head_dim]`` tensor whose layout really is the named one."""
    x = LAYOUTS[name](partial(randn, seed=seed, dtype=dtype), tokens, heads, head_dim)
    plain = name in ("contiguous", "one_token_one_head", "no_tokens")
    assert x.is_contiguous() == plain, f"{name} {tuple(x.shape)} does not show its layout"
    return x


def guarded(x: Tensor, band: int = 8) -> tuple[Tensor, Tensor]:
    """``(view, buffer)``: x inside a buffer that is NaN for ``band`` elements around every dim.

    A kernel that reads outside the view yields NaN; one that writes there is seen by
    ``assert_guard_intact``.
    """
    buffer = x.new_full([size + 2 * band for size in x.shape], float("nan"))
    view = buffer[tuple(slice(band, band + size) for size in x.shape)]
    return view.copy_(x), buffer


def assert_guard_intact(view: Tensor, buffer: Tensor) -> None:
    """Nothing outside the view was written, and the view itself holds no NaN."""
    assert not view.isnan().any()
    assert int((~buffer.isnan()).sum()) == view.numel(), "the guard band was written"


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Steps between two tensors of one float dtype; signed zeros are equal, NaN is far from all."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]

    def line(x: Tensor) -> Tensor:
        bits = x.contiguous().view(integer).to(torch.int64)
        return torch.where(bits < 0, -(bits & torch.iinfo(integer).max), bits)

    both_nan = a.isnan() & b.isnan()
    one_nan = a.isnan() ^ b.isnan()
    steps = (line(a) - line(b)).abs().masked_fill(both_nan, 0)
    return steps.masked_fill(one_nan, torch.iinfo(torch.int64).max)


def run_child(*arguments: str, timeout_s: float = 600, **environment: str) -> str:
    """Standard output of a fresh Python that imports the same rope_compile as this process.

    Fails with the child's whole output where it ends with another status than 0.
    """
    tests = Path(__file__).parent
    package_parent = str(Path(rope_compile.__file__).parents[1])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    child = subprocess.run(
        [sys.executable, *arguments],
        cwd=tests,  # not the repository root, whose package would shadow an installed one
        env=inherited | {"PYTHONPATH": os.pathsep.join([package_parent, str(tests)])} | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert child.returncode == 0, f"exit {child.returncode}\n{child.stdout}\n{child.stderr}"
    return child.stdout
