"""How an apply function rotates, and our function in its place.

transformers writes the rotation out some twenty times: cos and sin at full width, at half width,
complex, packed in one tensor; heads before or after the sequence; a part of the channels; results
in the dtype of q or promoted. `Form` names those differences; :func:`drop_in` gives a function of
the same signature that rotates with one operator call. Which form a function has is found out by
``recognise``, on numbers.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rope_compile.axes import Style
from rope_compile.functional import apply_rope
from rope_compile.integrations import _tables

Function = Callable[..., object]
Tables = Literal["full", "first_half", "half", "complex", "sin_cos"]
Heads = Literal["argument", "broadcast", "sequence_second"] | int
Part = Literal["first", "last"]
Layout = Literal["plain", "patches", "tail", "memory", "memory_groups", "conformer"]

_PACKED = re.compile(r"freq|sinusoid|relative_position_embeddings")
_POSITIONS = ("position_ids", "pos_ids", "positions")
_UNSQUEEZE = "unsqueeze_dim"


@dataclass(frozen=True)
class Form:
    """What tells one apply function from another.

    Attributes:
        style: Which two channels are a pair, as in ``apply_rope``.
        tables: ``full`` cos and sin have a value for each channel; of ``first_half`` the function
            reads the first half alone; ``half`` has one for each pair; ``complex`` is
            ``cos + i sin``; ``sin_cos`` both in one tensor, sin first.
        agree: Both channels of a pair are known to have the same cos and sin (``full`` alone).
        heads: Where the function unsqueezes cos to meet the head dimension of q: a number,
            ``argument`` where the call says it (``unsqueeze_dim``). ``broadcast`` is nowhere: cos
            comes as q needs it. ``sequence_second`` is q ``[batch, seq, heads, head_dim]`` with one
            row for each of seq.
        reverse: The angle is negated.
        part: The rotated channels, where cos is narrower than q: the first or the last ones.
        keeps_dtype: Results have the dtype of their input, else what q and cos promote to.
        layout: ``plain``: a row for each token. ``patches``: the first tokens have no row and stay.
            ``tail``: q has the last rows. ``memory``, ``memory_groups``: keys of a memory bank,
            some of which stay (SAM 2, EdgeTAM). ``conformer``: a method over ``[batch, seq,
            hidden]``.
        gathers: cos and sin are tables, read by a position argument.
        drops_absent: An absent k is left out of the result, else it is None there.
    """

    style: Style
    tables: Tables
    agree: bool = False
    heads: Heads = "broadcast"
    reverse: bool = False
    part: Part = "first"
    keeps_dtype: bool = True
    layout: Layout = "plain"
    gathers: bool = False
    drops_absent: bool = False

    @property
    def is_plain(self) -> bool:
        """Llama's: half style, a cos for each channel, a row for each token."""
        plain = Form("half", "full", heads=self.heads, keeps_dtype=self.keeps_dtype)
        return replace(self, agree=False, part="first") == plain

    @property
    def needs_agreement(self) -> bool:
        """Whether one cos per pair is all that the operator can take here.

        In half style it also takes a cos of its own for each channel.
        """
        return self.tables == "full" and self.style != "half"

    def __str__(self) -> str:
        words = [self.style, f"{self.tables} tables"]
        if self.tables == "full" and not self.agree:
            words.append("each channel its own")
        if self.reverse:
            words.append("reversed")
        if self.part == "last":
            words.append("last channels")
        if self.layout != "plain":
            words.append(self.layout)
        return ", ".join(words)


@dataclass(frozen=True)
class Roles:
    """The parameters of an apply function, by what they hold.

    Attributes:
        names: All of them, in order.
        defaults: Of those that have one.
        xs: Tensors to rotate. tables: ``(cos, sin)`` or one packed parameter.
        positions: Name of the position parameter, or None.
        others: Parameters that none of this explains.
    """

    names: tuple[str, ...]
    defaults: tuple[tuple[str, object], ...]
    xs: tuple[str, ...]
    tables: tuple[str, ...]
    positions: str | None
    others: tuple[str, ...]

    @property
    def has_unsqueeze(self) -> bool:
        return _UNSQUEEZE in self.names

    def bind(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        # inspect.Signature.bind does the same in ten times the time, and not while compiling.
        return dict(self.defaults) | dict(zip(self.names, args, strict=False)) | kwargs


@functools.cache
def roles_of(function: Function) -> Roles | None:
    """None where the parameters are not those of an apply function."""
    # A function that the `kernels` package has made a module of keeps the signature on forward.
    target = function.forward if isinstance(function, torch.nn.Module) else function
    parameters = [
        p for p in inspect.signature(target).parameters.values() if p.kind != p.VAR_KEYWORD
    ]
    names = tuple(p.name for p in parameters)
    if {"cos", "sin"} <= set(names):
        tables: tuple[str, ...] = ("cos", "sin")
    else:
        tables = tuple(name for name in names if _PACKED.search(name))
    if len(tables) not in (1, 2):
        return None
    special = {*tables, *_POSITIONS, _UNSQUEEZE, "self"}
    rest = [p for p in parameters if p.name not in special]
    xs = [p.name for p in rest if p.default is p.empty or p.default is None]
    others = [p.name for p in rest if p.name not in xs]
    if "cos_k" in xs:
        xs = [name for name in xs if name not in ("cos_k", "sin_k")]
        others = ["cos_k", "sin_k", *others]
    if not 1 <= len(xs) <= 3 or any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return None
    return Roles(
        names=names,
        defaults=tuple((p.name, p.default) for p in parameters if p.default is not p.empty),
        xs=tuple(xs),
        tables=tables,
        positions=next((name for name in names if name in _POSITIONS), None),
        others=tuple(others),
    )


def drop_in(function: Function, form: Form) -> Function:
    """A function with the signature of ``function`` that rotates with the operator.

    The operator has gradients for q and k alone. A call whose cos or sin require grad, as trained
    ones do, is one for ``function``.
    """
    roles = roles_of(function)
    assert roles is not None  # it has a form
    implementation = _LAYOUTS.get(form.layout, _rotated)

    @functools.wraps(_named(function))
    def rotated(*args: object, **kwargs: object) -> object:
        given = roles.bind(args, kwargs)
        if torch.is_grad_enabled() and any(
            given[name].requires_grad  # type: ignore[attr-defined]
            for name in roles.tables
        ):
            return function(*args, **kwargs)
        return implementation(roles, form, given)

    del rotated.__wrapped__  # it does not call what it stands for
    return rotated


def _named(function: Function) -> Function:
    return function.forward if isinstance(function, torch.nn.Module) else function


def _rotated(roles: Roles, form: Form, given: dict[str, object]) -> object:
    cos, sin = _cos_sin(roles, form, given)
    xs = _tensors(roles, given)
    head = _head_axis(form, given, cos)
    positions = given[roles.positions] if form.gathers and roles.positions else None
    if form.layout == "tail" and len(xs) == 2 and head != -2:
        rows = xs[0].shape[-2]
        last = rotate(xs[:1], cos[..., -rows:, :], sin[..., -rows:, :], head, form)
        results = last + rotate(xs[1:], cos, sin, head, form)
    else:
        results = rotate(xs, cos, sin, head, form, positions)
    return _as_given(roles, form, given, results)


def _tensors(roles: Roles, given: dict[str, object]) -> list[Tensor]:
    return [x for name in roles.xs if isinstance(x := given[name], Tensor)]


def _as_given(roles: Roles, form: Form, given: dict[str, object], results: list[Tensor]) -> object:
    if len(roles.xs) == 1:
        return results[0]
    if form.drops_absent:
        return results[0] if len(results) == 1 else tuple(results)
    rest = iter(results)
    return tuple(None if given[name] is None else next(rest) for name in roles.xs)


def _cos_sin(roles: Roles, form: Form, given: dict[str, object]) -> tuple[Tensor, Tensor]:
    first, *rest = (given[name] for name in roles.tables)
    assert isinstance(first, Tensor)
    if rest:
        sin = given["sin"]
        assert isinstance(sin, Tensor)
        cos = first
    elif form.tables == "complex":
        cos, sin = first.real, first.imag
    else:
        sin, cos = first.chunk(2, dim=-1)
    if form.heads == "sequence_second":
        cos, sin = cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])
    return cos, sin


def _head_axis(form: Form, given: dict[str, object], cos: Tensor) -> int | None:
    """The head dimension of q, counted from the end; None where every dimension has its rows."""
    axis = given[_UNSQUEEZE] if form.heads == "argument" else form.heads
    if isinstance(axis, int):
        dims = 3 if form.gathers else cos.dim()  # gathered: [batch, seq, rotary_dim]
        return axis if axis < 0 else axis - dims - 1
    if form.heads == "sequence_second":
        return -2
    for missing in (-3, -2):
        if cos.dim() < -missing or _is_one(cos.shape[missing]):
            return missing
    return None


def _is_one(size: int | torch.SymInt) -> bool:
    return type(size) is int and size == 1


def rotate(
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    head: int | None,
    form: Form,
    positions: object = None,
) -> list[Tensor]:
    """Rotate each of ``xs``, of which the first two share one operator call.

    Args:
        head: The head dimension, which cos and sin do not have, or (``broadcast``) have as 1.
        positions: Rows to read for each token; without, one row for each token, in order.
    """
    if form.heads == "broadcast" and head is not None and cos.dim() >= -head:
        cos, sin = cos.squeeze(head), sin.squeeze(head)
    if form.reverse:
        sin = -sin
    if not form.keeps_dtype:
        xs = [x.to(torch.promote_types(x.dtype, cos.dtype)) for x in xs]
    if form.layout == "patches":
        # Tokens without a row get one that leaves them as they are: no split, no copy.
        without = xs[0].shape[-2] - cos.shape[-2]
        cos = functional.pad(cos, (0, 0, without, 0), value=1.0)
        sin = functional.pad(sin, (0, 0, without, 0))
    table, rows, axes = _table(cos, sin, form)
    if isinstance(positions, Tensor):
        rows = positions if axes is None else torch.stack((positions, positions + cos.shape[0]))
    width = table.shape[-1]
    moved = [x.unsqueeze(-2) if head is None else x.movedim(head, -2) for x in xs]
    results: list[Tensor] = []
    while moved:
        # Without a head dimension q and k may have different tokens.
        count = 1 if head is None else 2
        (q, *k), moved = moved[:count], moved[count:]
        offset = q.shape[-1] - width if form.part == "last" else 0
        pair = apply_rope(
            q, k[0] if k else None, rows, table,
            style=form.style, rotary_offset=offset, axes=axes,
        )  # fmt: skip
        results += [x for x in pair if x is not None]
    return [x.squeeze(-2) if head is None else x.movedim(-2, head) for x in results]


def _table(cos: Tensor, sin: Tensor, form: Form) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
    """Table, rows to read, and the axis map where each channel has a cos of its own."""
    if form.tables != "full":
        if form.tables == "first_half":
            half = cos.shape[-1] // 2
            cos, sin = cos[..., :half], sin[..., :half]
        return *_tables.of_tokens(_tables.from_halves(cos, sin)), None
    if form.agree:
        return *_tables.of_tokens(_tables.from_full_width(cos, sin, form.style)), None
    # Two rows for each token, one for the low and one for the high channels of the pairs.
    half = cos.shape[-1] // 2
    low = _tables.from_halves(cos[..., :half], sin[..., :half])
    high = _tables.from_halves(cos[..., half:], sin[..., half:])
    table, rows = _tables.of_tokens(torch.stack((low, high)))
    return table, rows, (0,) * half + (1,) * half


# ------------------------------------------------------------------------ keys of a memory bank


def _memory(roles: Roles, form: Form, given: dict[str, object]) -> object:
    """SAM 2's cross attention: keys repeat the rows of the queries, the last ones have none."""
    q, k = _tensors(roles, given)
    cos, sin = _cos_sin(roles, form, given)
    kept = given["num_k_exclude_rope"]
    assert isinstance(kept, int)
    rotated = k.shape[-2] - kept
    repeats = 1
    if given["repeat_freqs_k"] and rotated != q.shape[-2]:
        repeats = rotated // q.shape[-2]
    rows = torch.arange(cos.shape[-2], device=cos.device).repeat(repeats if rotated else 0)
    q_rotated = rotate([q], cos, sin, _head_axis(form, given, cos), form)
    return q_rotated[0], _rotate_memory(k, cos, sin, rows, kept, form)


def _memory_groups(roles: Roles, form: Form, given: dict[str, object]) -> object:
    """EdgeTAM's: groups of keys, of which the last of each have rows, then keys without any."""
    q, k = _tensors(roles, given)
    cos, sin = _cos_sin(roles, form, given)
    cos_k, sin_k = given["cos_k"], given["sin_k"]
    kept, groups = given["num_k_exclude_rope"], given["repeat_freqs_k"]
    assert isinstance(cos_k, Tensor)
    assert isinstance(sin_k, Tensor)
    assert isinstance(kept, int)
    assert isinstance(groups, int)
    spatial, grouped = cos_k.shape[-2], k.shape[-2] - kept
    (q_rotated,) = rotate([q], cos, sin, _head_axis(form, given, cos), form)
    if grouped == 0:
        return q_rotated, k
    temporal = grouped // groups - spatial
    order = torch.arange(-temporal, spatial, device=cos_k.device)
    rows = torch.where(order < 0, spatial, order).repeat(groups)
    return q_rotated, _rotate_memory(k, cos_k, sin_k, rows, kept, form)


def _rotate_memory(
    k: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, kept: int, form: Form
) -> Tensor:
    """Keys ``[batch, heads, keys, head_dim]`` by rows of one table; ``kept`` more stay."""
    if cos.numel() != cos.shape[-2] * cos.shape[-1]:
        raise ValueError(
            f"cos must be one table for the whole batch, got {tuple(cos.shape)}; unpatch this model"
        )
    # One more row, which leaves a key as it is.
    cos = functional.pad(cos.reshape(cos.shape[-2:]), (0, 0, 0, 1), value=1.0)
    sin = functional.pad(sin.reshape(sin.shape[-2:]), (0, 0, 0, 1))
    rows = functional.pad(rows, (0, kept), value=cos.shape[0] - 1)
    return rotate([k], cos, sin, -3, form, rows)[0]


# ------------------------------------------------------------------------------------ conformers


def _conformer(roles: Roles, form: Form, given: dict[str, object]) -> object:
    """A method that rotates hidden states, seen as heads, before the projections."""
    (x,) = _tensors(roles, given)
    packed, module = given[roles.tables[0]], given["self"]
    assert isinstance(packed, Tensor)
    tokens = x.shape[1]
    cos, sin = packed[0, :tokens, 0], packed[1, :tokens, 0]  # [seq, 1, head_dim]
    heads = x.unflatten(-1, (module.num_heads, module.head_size))  # type: ignore[attr-defined]
    (rotated,) = rotate([heads], cos.squeeze(1), sin.squeeze(1), -2, form)
    return rotated.flatten(-2)


_LAYOUTS: dict[Layout, Callable[[Roles, Form, dict[str, object]], object]] = {
    "memory": _memory,
    "memory_groups": _memory_groups,
    "conformer": _conformer,
}
