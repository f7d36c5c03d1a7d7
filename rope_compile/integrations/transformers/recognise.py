"""Which form an apply function has: found out on random numbers, never by its name.

The function and our drop-in for each form are called alike, with q, k, cos and sin laid out in
every way that transformers lays them out. The form is that with which all results agree, those with
cosines that differ within a pair included.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rope_compile.axes import Style
from rope_compile.integrations.transformers.forms import (
    Form,
    Function,
    Heads,
    Layout,
    Part,
    Roles,
    Tables,
    drop_in,
    roles_of,
)

__all__ = ["recognise"]

_TOLERANCE = 1e-5
# Odd primes beside a power of two: no axis passes for another one, whatever is reshaped.
_BATCH, _HEADS, _KEY_HEADS, _SEQ, _DIM = 3, 5, 11, 7, 16
_STYLES: tuple[Style, ...] = ("half", "interleaved", "interleaved_to_half")


@dataclass(frozen=True)
class _Case:
    """One call: arguments, what the function returned, and how its cosines are drawn."""

    given: dict[str, object]
    expected: tuple[Tensor, ...]
    draw: str


@functools.cache
def recognise(function: Function) -> Form | None:
    """The form of an apply function, or None where it is none of ours.

    ``agree`` is left False: whether the cosines of a pair agree is for the caller to know.
    """
    roles = roles_of(function)
    if roles is None:
        return None
    with torch.no_grad():
        cases = list(_cases(function, roles))
        for form in _candidates(roles, _drops_absent(function, roles)):
            relevant = [c for c in cases if _takes(form, c.draw)]
            if relevant and all(_agrees(function, form, case) for case in relevant):
                return replace(form, agree=False)
    return None


def _takes(form: Form, draw: str) -> bool:
    """Whether the form must be right for cosines drawn in this way."""
    if form.needs_agreement:
        return draw == ("pairs" if form.style == "interleaved" else "halves")
    return True


def _agrees(function: Function, form: Form, case: _Case) -> bool:
    # needs_agreement: the table is read once for each pair, which `draw` makes right.
    ours = drop_in(function, replace(form, agree=form.needs_agreement))
    got = _call(ours, case.given)
    return got is not None and len(got) == len(case.expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and _close(a, b)
        for a, b in zip(got, case.expected, strict=True)
    )  # fmt: skip


def _close(a: Tensor, b: Tensor) -> bool:
    # Of bfloat16 we round once, the function several times.
    tolerance = 0.03 if a.dtype == torch.bfloat16 else _TOLERANCE
    if not b.numel():
        return True
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1))


def _call(function: Function, given: dict[str, object]) -> tuple[Tensor, ...] | None:
    """Results, or None for a call that the function does not take, for whatever reason."""
    try:
        result = function(**given)
    except Exception:
        return None
    results = result if isinstance(result, tuple) else (result,)
    return tuple(x for x in results if isinstance(x, Tensor))


def _candidates(roles: Roles, drops_absent: bool) -> Iterator[Form]:
    """Every form that a function of these parameters may have, the simpler ones first."""
    if roles.names[0] == "self":
        for keeps in (True, False):
            yield Form("half", "full", heads=-2, layout="conformer", keeps_dtype=keeps)
        return
    if roles.others:
        layout: Layout = "memory" if len(roles.others) == 2 else "memory_groups"
        yield Form("interleaved", "full", layout=layout)
        return
    tables: tuple[Tables, ...] = ("complex", "sin_cos")
    if len(roles.tables) == 2:
        tables = ("half", "first_half", "full")
    heads: tuple[Heads, ...] = (-2, 1, "broadcast", "sequence_second")
    if roles.has_unsqueeze:
        heads = ("argument",)
    layouts: tuple[Layout, ...] = ("plain", "patches", "tail") if len(roles.xs) == 2 else ("plain",)
    parts: tuple[Part, ...] = ("first", "last")
    gathers = (False,) if roles.positions is None else (False, True)
    no_yes = (False, True)
    for layout, reverse, style, table, head, part, keeps, gather in itertools.product(
        layouts, no_yes, _STYLES, tables, heads, parts, no_yes, gathers
    ):
        yield Form(
            style, table, heads=head, reverse=reverse, part=part, keeps_dtype=keeps, layout=layout,
            gathers=gather, drops_absent=drops_absent,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ the calls


def _cases(function: Function, roles: Roles) -> Iterator[_Case]:
    """Calls that the function takes; for those that it does not take our answer is free."""
    draws = _Draws()
    for kind in _kinds(roles):
        found = False
        for arguments in _arguments(roles, draws):
            for draw in ("random", "halves", "pairs"):
                given = arguments(draw, kind)
                expected = _call(function, given)
                if expected is None or not _same_shapes(roles, given, expected):
                    break  # nor does it take the others
                found = True
                yield _Case(given, expected, draw)
        if found:
            return


def _kinds(roles: Roles) -> tuple[str, ...]:
    return ("pair",) if len(roles.tables) == 2 else ("complex", "packed")


def _same_shapes(roles: Roles, given: dict[str, object], results: tuple[Tensor, ...]) -> bool:
    """A wrong broadcast shows: the result is larger than what was rotated, or complex."""
    xs = [x for name in roles.xs if isinstance(x := given[name], Tensor)]
    return len(xs) == len(results) and all(
        x.shape == y.shape and y.is_floating_point() for x, y in zip(xs, results, strict=True)
    )


class _Draws:
    """Random tensors, the same in every process."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu").to(dtype)

    def cos(self, *shape: int, draw: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Of full width; a function of half width does not mind what the two halves share."""
        *lead, width = shape
        half = self.tensor(*lead, width // 2, dtype=dtype)
        if draw == "halves":
            return torch.cat((half, half), -1)
        if draw == "pairs":
            return half.repeat_interleave(2, -1)
        return torch.cat((half, self.tensor(*lead, width // 2, dtype=dtype)), -1)


Arguments = Callable[[str, str], dict[str, object]]


def _arguments(roles: Roles, draws: _Draws) -> Iterator[Arguments]:
    """Makers of arguments, each for one way of laying out q, k, cos and sin."""
    if roles.names[0] == "self":
        yield from _conformer_arguments(roles, draws)
    elif roles.others:
        yield from _memory_arguments(roles, draws)
    else:
        yield from _plain_arguments(roles, draws)


# How transformers lays out q (and k and v), cos and sin, in letters; the head dimension of q is h.
_LAYOUTS = (
    ("bhsd", "bs"), ("bhsd", "1s"), ("bhsd", "s"), ("bhsd", "11s"), ("bhsd", "b1s"),
    ("bshd", "bs"), ("bshd", "1s"), ("bshd", "s"), ("bshd", "s1"), ("bshd", "bs1"), ("bshd", "1s1"),
    ("shd", "s"), ("shd", "s1"),
    ("bsd", "bs"), ("bsd", "1s"), ("bsd", "s"),
)  # fmt: skip
# (dtype of q, dtype of cos)
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)


def _plain_arguments(roles: Roles, draws: _Draws) -> Iterator[Arguments]:
    positions: list[Tensor | None] = [None]
    if roles.positions:
        drawn = torch.randint(_SEQ, (_BATCH, _SEQ), generator=draws.generator, device="cpu")
        positions = [drawn, None] if roles.positions in dict(roles.defaults) else [drawn]
    make = functools.partial(functools.partial, _plain, roles, draws)
    for (x, lead), width, position in itertools.product(
        _LAYOUTS, (_DIM, _DIM // 2, _DIM // 4), positions
    ):
        axis = _unsqueezed(roles, x, "bs" if position is not None else lead)
        yield make(x, (lead, width), axis, position)
        if x == "bhsd":
            # Tokens more than rows; q alone with less: few functions take these.
            for tokens in ((_SEQ + 2, _SEQ + 2), (_SEQ - 3, _SEQ)):
                yield make(x, (lead, width), axis, position, tokens=tokens)
        if lead in ("s", "bs"):
            for dtypes in _DTYPES[1:]:
                yield make(x, (lead, width), axis, position, dtypes=dtypes)


def _unsqueezed(roles: Roles, x: str, lead: str) -> int | None:
    """The ``unsqueeze_dim`` that brings cos to q: where its head dimension would be."""
    if not roles.has_unsqueeze or "h" not in x:
        return None
    return max(x.index("h") - (len(x) - 2 - len(lead)), 0)


def _plain(
    roles: Roles,
    draws: _Draws,
    x: str,
    table: tuple[str, int],
    axis: int | None,
    position: Tensor | None,
    draw: str,
    kind: str,
    *,
    tokens: tuple[int, int] = (_SEQ, _SEQ),
    dtypes: tuple[torch.dtype, torch.dtype] = _DTYPES[0],
) -> dict[str, object]:
    given: dict[str, object] = {}
    for name in roles.xs:
        first = name == roles.xs[0]
        sizes = {"h": _HEADS if first else _KEY_HEADS, "s": tokens[0 if first else 1]}
        given[name] = draws.tensor(*_shape(x, sizes), dtype=dtypes[0])
    lead, width = table
    shape = (*_shape(lead, {}), width)
    cos, sin = (draws.cos(*shape, draw=draw, dtype=dtypes[1]) for _ in range(2))
    given |= _as_tables(roles, cos, sin, kind)
    if axis is not None:
        given["unsqueeze_dim"] = axis
    if roles.positions:
        given[roles.positions] = position
    return given


def _shape(letters: str, sizes: dict[str, int]) -> tuple[int, ...]:
    sizes = {"b": _BATCH, "h": _HEADS, "s": _SEQ, "d": _DIM, "1": 1} | sizes
    return tuple(sizes[letter] for letter in letters)


def _as_tables(roles: Roles, cos: Tensor, sin: Tensor, kind: str) -> dict[str, object]:
    if kind == "pair":
        return {"cos": cos, "sin": sin}
    if kind == "complex":
        return {roles.tables[0]: torch.complex(cos.float(), sin.float())}
    half = cos.shape[-1] // 2
    return {roles.tables[0]: torch.cat((sin[..., :half], cos[..., :half]), -1)}


def _memory_arguments(roles: Roles, draws: _Draws) -> Iterator[Arguments]:
    grouped = "cos_k" in roles.others

    def make(
        kept: int, repeats: int, shape: tuple[int, ...], draw: str, kind: str
    ) -> dict[str, object]:
        cos, sin = (draws.cos(*shape, draw=draw) for _ in range(2))
        given: dict[str, object] = {"cos": cos, "sin": sin, "num_k_exclude_rope": kept}
        keys = _SEQ
        if grouped:
            keys += 2  # of each group, without rows
            given |= {"cos_k": sin, "sin_k": cos, "repeat_freqs_k": max(repeats, 1)}
        else:
            given["repeat_freqs_k"] = repeats > 1
        given[roles.xs[0]] = draws.tensor(_BATCH, _HEADS, _SEQ, _DIM)
        given[roles.xs[1]] = draws.tensor(_BATCH, _HEADS, keys * repeats + kept, _DIM)
        return given

    for lead, kept, repeats in itertools.product(((1, 1), (1,)), (0, 3), (0, 1, 4)):
        yield functools.partial(make, kept, repeats, (*lead, _SEQ, _DIM))


def _conformer_arguments(roles: Roles, draws: _Draws) -> Iterator[Arguments]:
    module = types.SimpleNamespace(num_heads=_HEADS, head_size=_DIM)

    def make(dtypes: tuple[torch.dtype, torch.dtype], draw: str, kind: str) -> dict[str, object]:
        packed = draws.cos(2, _SEQ + 2, 1, 1, _DIM, draw=draw, dtype=dtypes[1])
        x = draws.tensor(_BATCH, _SEQ, _HEADS * _DIM, dtype=dtypes[0])
        return {"self": module, roles.xs[0]: x, roles.tables[0]: packed}

    for dtypes in _DTYPES:
        yield functools.partial(make, dtypes)


def _drops_absent(function: Function, roles: Roles) -> bool:
    """What the function returns without k: less than with it, or None in its place."""
    if len(roles.xs) < 2 or roles.others or roles.names[0] == "self":
        return False
    for kind, arguments in itertools.product(_kinds(roles), _plain_arguments(roles, _Draws())):
        try:
            result = function(**arguments("halves", kind) | {roles.xs[-1]: None})
        except Exception:
            continue
        return not isinstance(result, tuple) or len(result) < len(roles.xs)
    return False
