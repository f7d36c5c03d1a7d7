"""The tensors of one cell, and what a right rotation of them is."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.bench import shapes
from rope_compile.bench.shapes import Cell

__all__ = ["Case", "Pair", "Wrong"]

Pair = tuple[Tensor, Tensor]  # q and k
# Tokens that are compared with float64, spread evenly over the case; the rest must be finite.
_CHECKED_TOKENS = 256


class Wrong(Exception):
    """A provider's result is not the rotation; it gets no row."""


class Case:
    """Inputs of one cell on a device: q and k ``[tokens, heads, head_dim]`` and positions.

    Drawn on that device: from the host, those of 32768 tokens take a GPU seconds. ``q`` and ``k``
    are shared by all providers: nobody writes to them.
    """

    def __init__(self, cell: Cell, device: torch.device, seed: int = 0) -> None:
        self.cell = cell
        self.device = device
        self.generator = torch.Generator(device).manual_seed(1000 * cell.tokens + seed)
        self.rope = rc.get_rope(cell.shape.config, device)
        shape = cell.shape
        self.q = self._slices(shape.q_heads, shape.q_row)
        self.k = self._slices(shape.k_heads, shape.k_row)
        self.positions = self._positions()

    def _slices(self, heads: int, row: int) -> Tensor:
        """Normal values: the last ``head_dim`` channels of rows of ``row`` channels."""
        size = (self.cell.tokens, heads, self.cell.shape.head_dim)
        drawn = torch.randn(size, generator=self.generator, device=self.device)
        rows = torch.empty(*size[:2], row or size[2], dtype=self.dtype, device=self.device)
        x = rows[..., -size[2] :]
        return x.copy_(drawn)

    def _positions(self) -> Tensor:
        cell = self.cell
        size = [cell.shape.axis_count, cell.tokens] if cell.shape.axes else [cell.tokens]
        if cell.positions == "random":
            return torch.randint(0, shapes.ROWS, size, generator=self.generator, device=self.device)
        return torch.arange(cell.tokens, device=self.device).expand(size).contiguous()

    @property
    def dtype(self) -> torch.dtype:
        return self.cell.torch_dtype

    def copy(self) -> Pair:
        """q and k in memory of their own and of the same layout, for a provider that writes."""
        shape = self.cell.shape
        result = []
        for x, row in ((self.q, shape.q_row), (self.k, shape.k_row)):
            rows = torch.empty(*x.shape[:2], row or x.shape[2], dtype=x.dtype, device=x.device)
            result.append(rows[..., -x.shape[2] :].copy_(x))
        return result[0], result[1]

    @functools.cached_property
    def contiguous(self) -> Pair:
        """q and k without gaps: themselves where they have none."""
        return self.q.contiguous(), self.k.contiguous()

    def poisoned(self) -> Pair:
        """Contiguous memory for results, every element NaN until somebody writes it."""
        nan = float("nan")
        q, k = (torch.full(x.shape, nan, dtype=x.dtype, device=x.device) for x in (self.q, self.k))
        return q, k

    @functools.cached_property
    def lanes(self) -> Pair:
        """float32 cos and sin ``[tokens, lanes]`` of the positions, read from the table."""
        table = self.rope.cos_sin_cache
        width = table.shape[1] // 2
        if not self.cell.shape.axes:
            cos, sin = table[self.positions].split(width, dim=-1)
            return cos, sin
        axis = torch.tensor(self.cell.shape.config.lane_axes, device=self.device)
        rows = self.positions[axis].t()  # [tokens, lanes]
        lane = torch.arange(width, device=self.device)
        return table[rows, lane], table[rows, lane + width]

    def cos_sin(self, *, full: bool) -> Pair:
        """cos and sin ``[tokens, width]`` as a model hands them to its layers, in its dtype.

        ``full`` repeats them for both channels of a pair, in the order of the style.
        """
        cos, sin = self.lanes
        if full and self.cell.shape.style == "interleaved":
            cos, sin = (x.repeat_interleave(2, dim=-1) for x in (cos, sin))
        elif full:
            cos, sin = (torch.cat((x, x), dim=-1) for x in (cos, sin))
        return cos.to(self.dtype).contiguous(), sin.to(self.dtype).contiguous()

    def check(self, result: Pair, *, rotated: bool, steps: int) -> None:
        """Compare a result with float64, computed from frequencies and not from the table.

        Args:
            result: q and k ``[tokens, heads, head_dim]``.
            rotated: whether it is the rotation, or just a copy.
            steps: roundings of the dtype that the provider's arithmetic may differ by.

        Raises:
            Wrong: it is something else.
        """
        count = self.cell.tokens
        at = torch.arange(0, count, max(1, count // _CHECKED_TOKENS), device=self.device)
        for name, x, y in zip(("q", "k"), (self.q, self.k), result, strict=True):
            if y.shape != x.shape or y.dtype != x.dtype:
                raise Wrong(f"{name} is {tuple(y.shape)} {y.dtype}, not {tuple(x.shape)} {x.dtype}")
            if not bool(y.isfinite().all()):
                raise Wrong(f"{name} has elements that were never written, or are not finite")
            expected, bound = self._expected(x[at], at, steps) if rotated else (x[at].double(), 0)
            excess = ((y[at].double() - expected).abs() - bound).max()
            if excess > 0:
                raise Wrong(f"{name} is {float(excess):.1e} beyond its error bound")

    def _expected(self, x: Tensor, at: Tensor, steps: int) -> Pair:
        """The float64 rotation of some tokens, and the largest allowed error of each element."""
        config = self.cell.shape.config
        positions = self.positions[..., at].double()
        if config.lane_axes:
            positions = positions[torch.tensor(config.lane_axes, device=self.device)].t()
        else:
            positions = positions[:, None]
        # The definition rounds the phase, and nothing else, to float32.
        phase = (positions * config.inv_freq().to(self.device).double()).float().double()
        cos, sin = phase.cos()[:, None], phase.sin()[:, None]
        expected = x.double()
        bound = torch.zeros_like(expected)
        width = 2 * phase.shape[-1]
        pairs = slice(0, width, 2), slice(1, width, 2)
        if config.style == "half":
            pairs = slice(0, width // 2), slice(width // 2, width)
        low, high = (expected[..., lanes].clone() for lanes in pairs)
        expected[..., pairs[0]] = low * cos - high * sin
        expected[..., pairs[1]] = high * cos + low * sin
        larger = torch.maximum(low.abs(), high.abs())
        info = torch.finfo(self.dtype)
        for lanes in pairs:
            bound[..., lanes] = larger * (steps * info.eps + 1e-6) + info.smallest_normal
        return expected, bound
