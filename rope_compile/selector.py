"""`RopeSelector`: several rotations of one shape, chosen token by token.

For adapters with frequencies of their own in one batch, and for LongRoPE where every sequence keeps
the factor set of its own length for its whole life.

The chosen cos and sin become a small table with one row for each token, and the operator reads that
one: q and k are read and written once, however many rotations there are to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rope_compile.checks import tensor
from rope_compile.functional import rotate, rotate_
from rope_compile.module import RotaryEmbedding

_ALIKE = ("head_dim", "rotary_dim", "rotary_offset", "style", "lane_axes")
_SELECTOR_DTYPES = (torch.bool, torch.int32, torch.int64)


def of_tokens(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The table of gathered rows ``[*tokens, rotary_dim]``, and positions ``[*tokens]`` to read it.

    Dimensions of size 1 broadcast as positions do, so ``[1, seq, rotary_dim]`` serves every batch.
    """
    *tokens, width = rows.shape
    count = math.prod(tokens)
    table = rows.reshape(count, width)
    positions = torch.arange(count, device=rows.device).reshape(tokens)
    if type(count) is int and count == 0:
        table = table.new_zeros(1, width)  # without tokens too the operator wants a row
    return table, positions


class RopeSelector(nn.Module):
    """Rotates every token with one of several `RotaryEmbedding` modules.

    The modules stay what they are: shared, reserved, moved and rebuilt as everywhere else, and each
    position is right with its own module's frequencies, also past its table. No value is read on
    the host, so the choice may differ from call to call of one captured graph.

    LongRoPE with the factor set of each sequence (constant over a sequence: decide by its final
    length, not by the length so far)::

        short = rc.get_rope(config.with_length(4096))
        long = rc.get_rope(config.with_length(131072))
        rope = rc.RopeSelector([short, long])
        q, k = rope(positions, q, k, selector=(lengths > 4096).long()[sequence_of_token])

    Args:
        ropes: at least one, alike in ``head_dim``, ``rotary_dim``, ``rotary_offset``, ``style`` and
            axes.

    Raises:
        TypeError: not a list of `RotaryEmbedding`. ValueError: an empty list, modules that do not
        fit together, or full-width `XdropeAxes`, whose channels have angles of their own.
    """

    ropes: nn.ModuleList

    def __init__(self, ropes: Sequence[RotaryEmbedding]) -> None:
        super().__init__()
        if not isinstance(ropes, list | tuple | nn.ModuleList):
            raise TypeError(
                f"ropes must be a list of RotaryEmbedding modules, got {type(ropes).__name__}"
            )
        for i, rope in enumerate(ropes):
            if not isinstance(rope, RotaryEmbedding):
                raise TypeError(
                    f"ropes[{i}] must be a RotaryEmbedding such as get_rope gives, got "
                    f"{type(rope).__name__}"
                )
        if not ropes:
            raise ValueError("ropes must have at least one RotaryEmbedding, got none")
        self.ropes = nn.ModuleList(ropes)
        config = ropes[0].config
        for i, rope in enumerate(ropes):
            for name in _ALIKE:
                ours, theirs = getattr(config, name), getattr(rope.config, name)
                if ours != theirs:
                    raise ValueError(
                        f"ropes must have one {name}, got {ours!r} and, in ropes[{i}], {theirs!r}"
                    )
        if len(config.lane_axes) > config.rotary_dim // 2:
            raise ValueError(
                f"ropes must have one angle for each pair, got {config.axes}, which has one for "
                "each channel; keep these apart, with a call for each module"
            )
        self._width = config.rotary_dim
        self._lane_axes = config.lane_axes
        self._style = config.style
        self._rotary_offset = config.rotary_offset

    def forward(
        self,
        positions: Tensor,
        q: Tensor,
        k: Tensor | None = None,
        *,
        selector: Tensor,
        inverse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate q and k; see `RotaryEmbedding.forward`.

        Args:
            positions: ``[tokens]``, ``[seq]`` or ``[batch, seq]`` (``[axes, ...]`` with axes).
            q: ``[..., heads, head_dim]``.
            k: As q with its own head count, or None.
            selector: which module each token is rotated with: bool, int32 or int64, 0 to
                ``len(ropes) - 1``, broadcasting against the token dimensions of positions:
                ``[tokens]``, or ``[batch, 1]`` beside positions ``[seq]``. The nearest module
                serves any other value.
            inverse: Rotate back, see there.

        Returns:
            Fresh contiguous tensors; None for an absent k.

        Raises:
            TypeError, ValueError: as `rope_compile.apply_rope`, or a wrong selector.
        """
        table, at, axes = self._chosen(positions, q, selector)
        return rotate(q, k, at, table, None, axes, self._style, self._rotary_offset, 1.0, inverse)

    def apply_(
        self,
        positions: Tensor,
        q: Tensor,
        k: Tensor | None = None,
        *,
        selector: Tensor,
        inverse: bool = False,
    ) -> None:
        """:meth:`forward` in place: writes q and k; see `rope_compile.apply_rope_`."""
        table, at, axes = self._chosen(positions, q, selector)
        rotate_(q, k, at, table, None, axes, self._style, self._rotary_offset, 1.0, inverse)

    def reserve(self, rows: int) -> bool:
        """Make the capacity of every module at least ``rows``; see `RotaryEmbedding.reserve`."""
        grown = [rope.reserve(rows) for rope in self._modules_in_order()]
        return any(grown)

    def _modules_in_order(self) -> list[RotaryEmbedding]:
        return list(self.ropes)  # type: ignore[arg-type]

    def _chosen(
        self, positions: Tensor, q: Tensor, selector: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[int]]:
        """A table of one row for each token, the positions to read it, and the axes."""
        tensor("q", q)
        tensor("positions", positions)
        first, *others = self._modules_in_order()
        rows = self._rows(first, positions, q)
        _check_selector(selector, rows)
        choice = selector.unsqueeze(-1)
        for number, rope in enumerate(others, start=1):
            rows = torch.where(choice >= number, self._rows(rope, positions, q), rows)
        table, at = of_tokens(rows)
        # Only half_blocks reads its pairs from the axes, of which all take the same row here.
        axes = self._lane_axes if self._style == "half_blocks" else ()
        return table, at.unsqueeze(0) if axes else at, axes

    def _rows(self, rope: RotaryEmbedding, positions: Tensor, q: Tensor) -> Tensor:
        """``[*tokens, rotary_dim]``: cos and sin, from the table or computed, by the operator.

        It rotates (1, 0) of every lane, and ``1 * cos - 0 * sin`` and ``0 * cos + 1 * sin`` are
        cos and sin bit for bit.
        """
        cos_sin_cache, inv_freq = rope._rows_for(q)
        tokens = positions.shape[1:] if self._lane_axes and positions.dim() > 1 else positions.shape
        unit = (torch.arange(self._width, device=q.device) < self._width // 2).to(torch.float32)
        unit = unit.expand(*tokens, 1, self._width)
        rows, _ = rotate(
            unit, None, positions, cos_sin_cache, inv_freq, rope._lane_axes, "half", 0,
            float(rope._attention_scaling), False,
        )  # fmt: skip
        return rows.squeeze(-2)


def _check_selector(selector: Tensor, rows: Tensor) -> None:
    """Refuse what would not choose one module for each token of ``rows [*tokens, rotary_dim]``."""
    tensor("selector", selector)
    if selector.dtype not in _SELECTOR_DTYPES:
        raise TypeError(
            f"selector must be bool, int32 or int64, got {selector.dtype}; it is the number of a "
            "module for each token"
        )
    if selector.device != rows.device:
        raise ValueError(
            f"selector must be on the device of q, {rows.device}, got {selector.device}"
        )
    tokens = rows.shape[:-1]
    for ours, theirs in zip(selector.shape[::-1], tokens[::-1], strict=False):
        # Symbolic sizes are left to torch.where, which states that they are equal.
        if type(ours) is int and type(theirs) is int and ours != theirs and 1 not in (ours, theirs):
            raise ValueError(
                f"selector must broadcast against the tokens of positions, {tuple(tokens)}, got "
                f"{tuple(selector.shape)}"
            )
