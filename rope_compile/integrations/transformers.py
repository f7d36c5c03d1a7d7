"""``patch(model)``: a transformers model rotates with ``rope_compile``; ``unpatch`` undoes it.

Llama-type models: one ``rotary_emb`` per decoder that returns full-width cos and sin, attention
modules that unpack them and call ``apply_rotary_pos_emb`` of their own module in half style.
A model is recognised by what its code does, not by its name, and one that does anything else is
refused untouched.

NOTE [How a model is patched]
transformers looks ``apply_rotary_pos_emb`` up in the globals of the modelling file. Replacing it
there would change every model of the process, so nothing in transformers is written to. Per model:

* ``decoder.rotary_emb`` becomes a module that passes the position ids on instead of computing cos
  and sin. It holds the original as a submodule, so ``.to()``, ``deepcopy`` and the like treat the
  original as if it were still in place, and ``unpatch`` puts the same object back.
* each attention instance moves to a subclass of its own class (``module.__class__ = ...``, as
  ``torch.nn.utils.parametrize`` does). The subclass runs the *same* ``forward`` code object with a
  copy of its globals in which ``apply_rotary_pos_emb`` is ours, and holds the rope as a submodule,
  where ``prepare_for_capture`` finds the table.

Only tensors travel between the two, so activation checkpointing, hooks and ``torch.compile`` see
nothing unusual.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

import rope_compile as rc

__all__ = ["PatchReport", "patch", "unpatch"]

_APPLY = "apply_rotary_pos_emb"
_ROPE_CHILD = "rope_compile_rope"
# frequency rules that read the positions of each call: transformers does so in rotary_emb.forward
_PER_CALL_TYPES = ("dynamic", "longrope")
# One patched class for each attention class, so that instances and their copies share a type.
_PATCHED: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(frozen=True)
class PatchReport:
    """What ``patch`` or ``unpatch`` did.

    Attributes:
        replaced: Qualified names of the modules that changed, in module order.
        left: ``{name: reason}`` for modules with rotary code that stayed as they were.
        already: True if the model already was as asked and nothing was done.
        configs: The ``RopeConfig`` of each decoder, by the name of its ``rotary_emb``.
    """

    replaced: tuple[str, ...]
    left: dict[str, str]
    already: bool
    configs: dict[str, rc.RopeConfig]

    def __str__(self) -> str:
        if self.already:
            return "nothing to do: the model already is as asked"
        lines = [f"replaced {len(self.replaced)} modules: {', '.join(self.replaced)}"]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


class PositionsOnly(nn.Module):
    """Stands in for ``rotary_emb``: hands ``position_ids`` through to the attention modules.

    ``forward(x, position_ids) -> (position_ids, None)``; the None makes any code that would use
    the pair as cos and sin fail loudly instead of computing nonsense.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, None]:
        return position_ids, None


class _PatchedAttention:
    """Mixin that marks the subclasses made by ``_patched_class`` and names the class beneath."""

    rope_compile_original_class: type[nn.Module]

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle and deepcopy: the class is made, not importable, so name the one beneath."""
        original = type(self).rope_compile_original_class
        return _empty_patched, (original,), self.__dict__


def _empty_patched(original: type[nn.Module]) -> nn.Module:
    cls = _patched_class(original)
    return cls.__new__(cls)


def patch(model: nn.Module) -> PatchReport:
    """Make every rotary embedding of a Llama-type transformers model run on ``rope_compile``.

    Works in eager mode, under ``torch.compile(fullgraph=True)``, in training, and in ``generate``
    with dynamic and static caches. Call it after loading and before ``torch.compile``, capture and
    ``accelerate`` dispatch. Weights and ``state_dict`` keys do not change. The table is the shared
    one of ``rope_compile.get_rope`` for the model's configuration and device;
    ``rope_compile.prepare_for_capture(model, plan)`` finds it.

    Args:
        model: A transformers model, or any module that contains one.

    Returns:
        What was replaced and what was left, with reasons. Patching twice does nothing the second
        time.

    Raises:
        ValueError: the model has no rotary embedding, or one that this function does not know.
            The model is then untouched.
    """
    if _is_patched(model):
        return PatchReport((), {}, already=True, configs={})
    decoders = list(_decoders(model))
    if not decoders:
        raise ValueError(
            f"model must contain a decoder with a rotary_emb module, got {type(model).__name__} "
            "with none; Llama-type transformers models are supported"
        )
    # Everything is checked before anything is changed.
    plans = [_plan(model, name, decoder) for name, decoder in decoders]
    for plan in plans:
        plan.apply()
    return PatchReport(
        replaced=tuple(name for plan in plans for name in plan.names),
        left={name: reason for plan in plans for name, reason in plan.left.items()},
        already=False,
        configs={plan.names[0]: plan.rope.config for plan in plans},
    )


def unpatch(model: nn.Module) -> PatchReport:
    """Undo ``patch`` exactly: the original modules and classes are back, results bit for bit.

    Code that was compiled or captured while the model was patched keeps what it traced; compile
    again after this. Unpatching a model that is not patched does nothing.
    """
    replaced = []
    for name, module in list(model.named_modules()):
        if isinstance(module, _PatchedAttention):
            delattr(module, _ROPE_CHILD)
            original = module.rope_compile_original_class
            module.__class__ = original  # type: ignore[assignment]
            replaced.append(name)
        rotary = module._modules.get("rotary_emb")
        if isinstance(rotary, PositionsOnly):
            module.rotary_emb = rotary.original
            replaced.append(f"{name}.rotary_emb".lstrip("."))
    return PatchReport(tuple(replaced), {}, already=not replaced, configs={})


@dataclass(frozen=True)
class _Plan:
    decoder: nn.Module
    rope: rc.RotaryEmbedding
    attentions: tuple[nn.Module, ...]
    names: tuple[str, ...]
    left: dict[str, str]

    def apply(self) -> None:
        self.decoder.rotary_emb = PositionsOnly(self.decoder.get_submodule("rotary_emb"))
        for attention in self.attentions:
            attention.__class__ = _patched_class(type(attention))
            setattr(attention, _ROPE_CHILD, self.rope)


def _is_patched(model: nn.Module) -> bool:
    return any(isinstance(m, (_PatchedAttention, PositionsOnly)) for m in model.modules())


def _decoders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own a ``rotary_emb``, with their names."""
    for name, module in model.named_modules():
        if isinstance(module._modules.get("rotary_emb"), nn.Module):
            yield name, module


def _plan(model: nn.Module, name: str, decoder: nn.Module) -> _Plan:
    """Check one decoder and say what to change in it; ValueError names what does not fit."""
    prefix = f"{name}." if name else ""
    rotary = decoder.get_submodule("rotary_emb")
    _check_decoder(decoder)
    rope, partial = _rope_for(rotary)
    attentions: list[nn.Module] = []
    names = [f"{prefix}rotary_emb"]
    for child_name, child in decoder.named_modules():
        if child is decoder or not _mentions(type(child), "position_embeddings"):
            continue
        if not _is_attention(type(child)):
            _check_passes_on(child)
            continue
        if "forward" in vars(child):
            raise ValueError(
                f"model must not have replaced forward methods when it is patched, got one on "
                f"{prefix}{child_name}; call patch before accelerate dispatch and other wrappers"
            )
        attentions.append(child)
        names.append(f"{prefix}{child_name}")
    if not attentions:
        raise _refusal(decoder, f"no attention module that calls {_APPLY} was found in it")
    for cls in {type(attention) for attention in attentions}:
        _check_attention(cls)
        if partial and _slices_inside(_innermost(cls.forward).__globals__[_APPLY]):
            raise _refusal(
                decoder, f"{_APPLY} itself picks the {rope.config.rotary_dim} channels to rotate"
            )
    layers = len(getattr(decoder, "layers", attentions))
    left = {}
    if len(attentions) < layers:
        left[f"{prefix}layers"] = (
            f"{layers - len(attentions)} of {layers} layers take no position embeddings"
        )
    return _Plan(decoder, rope, tuple(attentions), tuple(names), left)


def _refusal(module: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"model must be of Llama type to be patched, got {type(module).__name__}, where {reason}; "
        "the model was left as it was, call rope_compile.get_rope in its code instead"
    )


def _rope_for(rotary: nn.Module) -> tuple[rc.RotaryEmbedding, bool]:
    """The shared rope of a transformers rotary module, compared with that module's own numbers.

    Also whether only a part of the channels is rotated; the rope is as wide as that part.
    """
    config = getattr(rotary, "config", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    rope_type = getattr(rotary, "rope_type", None)
    if config is None or not isinstance(inv_freq, Tensor) or not isinstance(rope_type, str):
        raise _refusal(
            rotary,
            "config, inv_freq and one rope_type are not all there (one rope per layer type?)",
        )
    if any(kind in rope_type for kind in _PER_CALL_TYPES):
        raise _refusal(
            rotary,
            f"rope_type {rope_type!r} computes its frequencies anew from the longest position of "
            "each call, which no table can hold",
        )
    if inv_freq.is_meta:
        raise _refusal(rotary, "inv_freq is on the meta device; load the weights first")
    parameters = list(inspect.signature(rotary.forward).parameters)
    if parameters[:2] != ["x", "position_ids"] or not _accepts_two(rotary.forward):
        raise _refusal(rotary, f"rotary_emb.forward takes ({', '.join(parameters)})")
    rope_config = rc.RopeConfig.from_transformers(config)
    if rope_config is None:
        raise _refusal(rotary, "the configuration says that nothing is rotated")
    partial = rope_config.rotary_dim != rope_config.head_dim
    if partial:
        # The models known here slice these channels out before they call apply_rotary_pos_emb.
        rope_config = replace(rope_config, head_dim=rope_config.rotary_dim, rotary_offset=0)
    rope = rc.get_rope(rope_config, inv_freq.device)
    _check_numbers(rotary, rope)
    return rope, partial


def _accepts_two(forward: Callable[..., object]) -> bool:
    try:
        inspect.signature(forward).bind(None, None)
    except TypeError:
        return False
    return True


@torch.no_grad()
def _check_numbers(rotary: nn.Module, rope: rc.RotaryEmbedding) -> None:
    """cos and sin of the module's own forward at a few positions against our rows.

    Catches what reading code cannot: a translation of the configuration that disagrees.
    """
    inv_freq = rotary.get_buffer("inv_freq")
    positions = torch.arange(16, device=inv_freq.device)
    x = torch.zeros(1, 1, 1, device=inv_freq.device, dtype=torch.float32)
    cos, sin = rotary(x, positions[None])
    half = rope.config.rotary_dim // 2
    if tuple(cos.shape) != (1, 16, 2 * half) or tuple(sin.shape) != (1, 16, 2 * half):
        raise _refusal(rotary, f"cos has shape {tuple(cos.shape)}, not {(1, 16, 2 * half)}")
    rows = rope.cos_sin_cache[:16]
    # A model cast to half precision rounds its own inv_freq too; ours stay exact.
    tolerance = 1e-5 if inv_freq.dtype in (torch.float32, torch.float64) else 0.1
    error = max(
        (part - ours).abs().max().item()
        for full, ours in ((cos[0], rows[:, :half]), (sin[0], rows[:, half:]))
        for part in full.float().split(half, dim=-1)
    )
    if not error <= tolerance:
        raise _refusal(
            rotary, f"cos and sin differ by {error:.1e} from those of {rope.config} in half style"
        )


@torch.no_grad()
def _check_apply(function: Callable[..., tuple[Tensor, Tensor]], owner: type[nn.Module]) -> None:
    """The function must be the half-style rotation, tried on numbers."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 3, 5, 8, generator=generator, device="cpu").unbind()
    angle = torch.randn(1, 5, 4, generator=generator, device="cpu")
    cos, sin = angle.cos(), angle.sin()
    got = function(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for x, y in zip((q, k), got, strict=True):
        low, high = x[..., :4], x[..., 4:]
        expected = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        if y.shape != x.shape or (y - expected).abs().max().item() > 1e-5:
            raise ValueError(
                f"model must rotate in half style to be patched, got {owner.__name__} whose "
                f"{_APPLY} pairs other channels; the model was left as it was"
            )


def _slices_inside(function: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether the function takes q and k wider than cos, and so picks channels by itself."""
    q, cos = torch.zeros(1, 1, 2, 6, device="cpu"), torch.zeros(1, 2, 4, device="cpu")
    try:
        function(q, q, cos, cos)
    except RuntimeError:  # shapes that do not broadcast
        return False
    return True


def _innermost(function: Callable[..., object]) -> types.FunctionType:
    """The plain function beneath decorators that keep ``__wrapped__``."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType):
        raise ValueError(f"model must have Python forward methods to be patched, got {inner!r}")
    return inner


def _names_in(code: types.CodeType) -> set[str]:
    """Every name a code object mentions, nested functions included."""
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def _mentions(cls: type[nn.Module], name: str) -> bool:
    return name in _names_in(_innermost(cls.forward).__code__)


def _is_attention(cls: type[nn.Module]) -> bool:
    return _APPLY in _innermost(cls.forward).__code__.co_names


def _forward_tree(cls: type[nn.Module]) -> ast.FunctionDef:
    """Syntax tree of a class's own forward; raises ValueError where the source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(_innermost(cls.forward)))
    except OSError:
        raise ValueError(
            f"model must come with its source code to be patched, got {cls.__name__} without it"
        ) from None
    (tree,) = ast.parse(source).body
    if not isinstance(tree, ast.FunctionDef):
        raise ValueError(f"{cls.__name__}.forward must be a function, got {ast.dump(tree)[:40]}")
    return tree


def _loads(tree: ast.AST, name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def _check_decoder(decoder: nn.Module) -> None:
    """What ``self.rotary_emb(...)`` returns must go into the layers and nowhere else."""
    tree = _forward_tree(type(decoder))
    targets = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "self.rotary_emb"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "self.rotary_emb"
        for node in ast.walk(tree)
    )
    if calls != 1 or targets != {"position_embeddings"}:
        raise _refusal(decoder, "forward does not assign self.rotary_emb(...) to one name")
    _check_passes_on(decoder)


def _check_passes_on(module: nn.Module) -> None:
    """``position_embeddings`` may only be handed on under its own name."""
    tree = _forward_tree(type(module))
    handed_on = sum(
        isinstance(node, ast.keyword)
        and node.arg == "position_embeddings"
        and isinstance(node.value, ast.Name)
        and node.value.id == "position_embeddings"
        for node in ast.walk(tree)
    )
    by_string = any(
        isinstance(node, ast.Constant) and node.value == "position_embeddings"
        for node in ast.walk(tree)
    )
    if by_string or _loads(tree, "position_embeddings") != handed_on:
        raise _refusal(module, "forward does more with position_embeddings than pass them on")


def _check_attention(cls: type[nn.Module]) -> None:
    """``cos, sin = position_embeddings`` and one ``apply_rotary_pos_emb(q, k, cos, sin)``."""
    function = _innermost(cls.forward)
    tree = _forward_tree(cls)
    unpacked = [
        [ast.unparse(element) for element in node.targets[0].elts]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and ast.unparse(node.value) == "position_embeddings"
    ]
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == _APPLY
    ]
    good = (
        len(unpacked) == 1
        and len(unpacked[0]) == 2
        and _loads(tree, "position_embeddings") == 1
        and len(calls) == 1
        and not calls[0].keywords
        and [ast.unparse(argument) for argument in calls[0].args[2:]] == unpacked[0]
        and all(_loads(tree, name) == 1 for name in unpacked[0])
        and _loads(tree, _APPLY) == 1
    )
    if not good:
        raise ValueError(
            f"model must be of Llama type to be patched, got {cls.__name__}, whose forward is not "
            f"'cos, sin = position_embeddings' and one '{_APPLY}(q, k, cos, sin)'; "
            "the model was left as it was"
        )
    _check_apply(function.__globals__[_APPLY], cls)


def _rotate(
    q: Tensor, k: Tensor, positions: Tensor, rope: rc.RotaryEmbedding
) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb`` once patched: q, k ``[B, H, S, D]``, positions ``[B, S]``."""
    rotated_q, rotated_k = rope(positions, q.transpose(1, 2), k.transpose(1, 2))
    assert rotated_k is not None  # k was given
    return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)


def _with_rope(attention: nn.Module, position_embeddings: object) -> tuple[object, object]:
    positions, _ = cast(tuple[object, None], position_embeddings)
    return positions, attention._modules[_ROPE_CHILD]


def _patched_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of an attention class that rotates with its ``rope_compile_rope`` child."""
    known = _PATCHED.get(original)
    if known is None:
        known = _PATCHED.setdefault(original, _make_patched_class(original))
    return known


def _make_patched_class(original: type[nn.Module]) -> type[nn.Module]:
    forward = _with_globals(original.forward, {_APPLY: _rotate})
    index = list(inspect.signature(original.forward).parameters).index("position_embeddings")

    @functools.wraps(original.forward)
    def patched_forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        # (positions, None) of PositionsOnly becomes the (positions, rope) that _rotate is given.
        if "position_embeddings" in kwargs:
            kwargs["position_embeddings"] = _with_rope(self, kwargs["position_embeddings"])
        else:
            here = index - 1  # args leaves self out
            args = (*args[:here], _with_rope(self, args[here]), *args[here + 1 :])
        return forward(self, *args, **kwargs)

    namespace = {
        "forward": patched_forward,
        "rope_compile_original_class": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    # Same name: accelerate and others look classes up by name.
    return type(original.__name__, (_PatchedAttention, original), namespace)


def _with_globals(
    function: Callable[..., object], names: dict[str, object]
) -> Callable[..., object]:
    """The same function, decorators included, that sees ``names`` in its globals.

    Decorators keep the inner function in a closure cell; each level is rebuilt around a rebuilt
    inner one.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if not isinstance(function, types.FunctionType):
        raise ValueError(f"model must have Python forward methods to be patched, got {function!r}")
    if wrapped is None:
        # Without __name__ Dynamo guards on this dictionary itself; with it, it would look the
        # names up in the imported module and find the function that we replace.
        scope = {k: v for k, v in function.__globals__.items() if k != "__name__"} | names
        closure = function.__closure__
    else:
        scope = function.__globals__
        inner = _with_globals(wrapped, names)
        closure = tuple(
            types.CellType(inner) if cell.cell_contents is wrapped else cell
            for cell in function.__closure__ or ()
        )
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    copy.__dict__.update(function.__dict__)
    if wrapped is not None:
        copy.__dict__["__wrapped__"] = inner
    return copy
