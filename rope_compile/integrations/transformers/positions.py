"""Llama-type decoders: the attention modules are given positions and read the shared table.

One ``rotary_emb`` per decoder that returns full-width cos and sin of static frequencies, attention
modules that unpack them and call ``apply_rotary_pos_emb`` of their own module in half style. Then
cos and sin need not be made at all: ``decoder.rotary_emb`` becomes a module that passes the
position ids on, and each attention holds the rope as a submodule, where ``prepare_for_capture``
finds the table. The original module stays inside the new one, so ``.to()``, ``deepcopy`` and the
like treat it as if it were still in place, and ``unpatch`` puts the same object back.

Only tensors travel between the two, so activation checkpointing, hooks and ``torch.compile`` see
nothing unusual.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

import rope_compile as rc
from rope_compile.integrations._rows import both
from rope_compile.integrations.transformers import rewrite
from rope_compile.integrations.transformers.forms import Form
from rope_compile.integrations.transformers.recognise import recognise

__all__ = ["Decoder", "PositionsOnly", "decoders_of", "restore"]

_APPLY = "apply_rotary_pos_emb"
_ROPE_CHILD = "rope_compile_rope"
# frequency rules that read the positions of each call: transformers does so in rotary_emb.forward
_PER_CALL_TYPES = ("dynamic", "longrope")
_PROBED = 16  # positions at which cos and sin are compared


class NotOfLlamaType(Exception):
    """What a decoder does otherwise."""


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


@dataclass(frozen=True)
class Positions:
    """Recipe of an attention class that rotates with its ``rope_compile_rope`` child."""

    def namespace(self, original: type[nn.Module]) -> dict[str, object]:
        function = _innermost(original).__globals__[_APPLY]
        forward = rewrite.with_functions(original.forward, {function: _rotate})
        index = list(inspect.signature(original.forward).parameters).index("position_embeddings")

        @functools.wraps(original.forward)
        def patched_forward(self: nn.Module, *args: object, **kwargs: object) -> object:
            # (positions, None) of PositionsOnly becomes the (positions, rope) of _rotate.
            if "position_embeddings" in kwargs:
                kwargs["position_embeddings"] = _with_rope(self, kwargs["position_embeddings"])
            else:
                here = index - 1  # args leaves self out
                args = (*args[:here], _with_rope(self, args[here]), *args[here + 1 :])
            return forward(self, *args, **kwargs)

        return {"forward": patched_forward}


def _rotate(
    q: Tensor, k: Tensor, positions: Tensor, rope: rc.RotaryEmbedding
) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb`` once patched: q, k ``[B, H, S, D]``, positions ``[B, S]``."""
    rotated_q, rotated_k = both(rope(positions, q.transpose(1, 2), k.transpose(1, 2)))
    return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)


def _with_rope(attention: nn.Module, position_embeddings: object) -> tuple[object, object]:
    positions, _ = cast(tuple[object, None], position_embeddings)
    return positions, attention._modules[_ROPE_CHILD]


@dataclass(frozen=True)
class Decoder:
    """A decoder of Llama type and what changes in it."""

    name: str
    module: nn.Module
    rope: rc.RotaryEmbedding
    attentions: dict[str, nn.Module]
    left: dict[str, str]

    def apply(self) -> None:
        self.module.rotary_emb = PositionsOnly(self.module.get_submodule("rotary_emb"))
        for attention in self.attentions.values():
            attention.__class__ = rewrite.patched_class(type(attention), Positions())
            setattr(attention, _ROPE_CHILD, self.rope)


def restore(module: nn.Module) -> bool:
    """Undo what ``apply`` did to this module itself; whether its ``rotary_emb`` changed back."""
    module._modules.pop(_ROPE_CHILD, None)
    rotary = module._modules.get("rotary_emb")
    if not isinstance(rotary, PositionsOnly):
        return False
    module.rotary_emb = rotary.original
    return True


def decoders_of(model: nn.Module) -> Iterator[Decoder]:
    """The decoders of Llama type in a model; nothing is changed."""
    for name, module in model.named_modules():
        rotary = module._modules.get("rotary_emb")
        if rotary is None or isinstance(rotary, PositionsOnly):
            continue
        try:
            yield _decoder(name, module)
        except NotOfLlamaType:
            continue


def _decoder(name: str, module: nn.Module) -> Decoder:
    prefix = f"{name}." if name else ""
    _check_decoder(module)
    rope, partial = _rope_for(module.get_submodule("rotary_emb"))
    attentions: dict[str, nn.Module] = {}
    for child_name, child in module.named_modules():
        if child is module or not _mentions(type(child), "position_embeddings"):
            continue
        if not _is_attention(type(child)):
            _check_passes_on(child)
            continue
        if "forward" in vars(child) or isinstance(child, rewrite.Patched):
            raise NotOfLlamaType("an attention has another forward than its class")
        attentions[f"{prefix}{child_name}"] = child
    if not attentions:
        raise NotOfLlamaType(f"no attention calls {_APPLY}")
    for cls in {type(attention) for attention in attentions.values()}:
        form = _check_attention(cls)
        if not form.keeps_dtype and not _keeps_dtype(module.get_submodule("rotary_emb")):
            raise NotOfLlamaType("results are wider than q")
        if partial and _slices_inside(cls):
            raise NotOfLlamaType(f"{_APPLY} itself picks the channels to rotate")
    layers = len(getattr(module, "layers", attentions))
    left = {}
    if len(attentions) < layers:
        left[f"{prefix}layers"] = (
            f"{layers - len(attentions)} of {layers} layers take no position embeddings"
        )
    return Decoder(name, module, rope, attentions, left)


def _rope_for(rotary: nn.Module) -> tuple[rc.RotaryEmbedding, bool]:
    """The shared rope of a transformers rotary module, compared with that module's own numbers.

    Also whether only a part of the channels is rotated; the rope is as wide as that part.
    """
    config = getattr(rotary, "config", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    rope_type = getattr(rotary, "rope_type", None)
    if config is None or not isinstance(inv_freq, Tensor) or not isinstance(rope_type, str):
        raise NotOfLlamaType("config, inv_freq and one rope_type are not all there")
    if any(kind in rope_type for kind in _PER_CALL_TYPES) or inv_freq.is_meta:
        raise NotOfLlamaType("its frequencies are not known before a call")
    if any(p.requires_grad for p in rotary.parameters()):
        raise NotOfLlamaType("its frequencies are trained")
    parameters = list(inspect.signature(rotary.forward).parameters)
    if parameters[:2] != ["x", "position_ids"]:
        raise NotOfLlamaType(f"rotary_emb.forward takes ({', '.join(parameters)})")
    try:
        rope_config = rc.RopeConfig.from_transformers(config)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotOfLlamaType(str(error)) from error
    if rope_config is None or rope_config.axes is not None:
        raise NotOfLlamaType("it has no or several position axes")
    partial = rope_config.rotary_dim != rope_config.head_dim
    if partial:
        # The models known here slice these channels out before they call apply_rotary_pos_emb.
        rope_config = replace(rope_config, head_dim=rope_config.rotary_dim, rotary_offset=0)
    rope = rc.get_rope(rope_config, inv_freq.device)
    _check_numbers(rotary, inv_freq, rope)
    return rope, partial


@torch.no_grad()
def _check_numbers(rotary: nn.Module, inv_freq: Tensor, rope: rc.RotaryEmbedding) -> None:
    """cos and sin of the module's own forward at a few positions against our rows.

    Catches what reading code cannot: a translation of the configuration that disagrees.
    """
    positions = torch.arange(_PROBED, device=inv_freq.device)
    x = torch.zeros(1, 1, 1, device=inv_freq.device, dtype=torch.float32)
    try:
        cos, sin = rotary(x, positions[None])
    except Exception as error:  # not a call for this module, in whatever way it says so
        raise NotOfLlamaType("rotary_emb.forward takes more than x and position_ids") from error
    if _takes_axes(rotary, x, positions):
        raise NotOfLlamaType("its positions may have several axes")
    half = rope.config.rotary_dim // 2
    if not cos.shape == sin.shape == (1, _PROBED, 2 * half):
        raise NotOfLlamaType(f"cos has shape {tuple(cos.shape)}")
    rows = rope.cos_sin_cache[:_PROBED]
    # A model cast to half precision rounds its own inv_freq too; ours stay exact.
    tolerance = 1e-5 if inv_freq.dtype in (torch.float32, torch.float64) else 0.1
    worst = max(
        (part - ours).abs().max().item()
        for full, ours in ((cos[0], rows[:, :half]), (sin[0], rows[:, half:]))
        for part in full.float().split(half, dim=-1)
    )
    if not worst <= tolerance:
        raise NotOfLlamaType(f"cos and sin differ by {worst:.1e} from those of the configuration")


@torch.no_grad()
def _keeps_dtype(rotary: nn.Module) -> bool:
    """Whether cos has the dtype of x, so that q times cos has that of q."""
    positions = torch.zeros(1, 1, dtype=torch.int64, device=cast(Tensor, rotary.inv_freq).device)
    x = torch.zeros(1, 1, 1, device=positions.device, dtype=torch.bfloat16)
    return bool(rotary(x, positions)[0].dtype == torch.bfloat16)


def _takes_axes(rotary: nn.Module, x: Tensor, positions: Tensor) -> bool:
    """Whether three rows of positions come out as one of cosines (Qwen-VL and its talkers)."""
    try:
        cos, _ = rotary(x, positions.expand(3, 1, -1))
    except Exception:  # it takes one axis only, and says so in whatever way
        return False
    return bool(cos.dim() == 3 and cos.shape[0] == 1)


def _slices_inside(cls: type[nn.Module]) -> bool:
    """Whether the apply function takes q and k wider than cos, and so picks channels by itself."""
    function = _innermost(cls).__globals__[_APPLY]
    q, cos = torch.zeros(1, 1, 2, 6, device="cpu"), torch.zeros(1, 2, 4, device="cpu")
    try:
        function(q, q, cos, cos)
    except RuntimeError:  # shapes that do not broadcast
        return False
    return True


# --------------------------------------------------------------------------- what forward does


def _innermost(cls: type[nn.Module]) -> types.FunctionType:
    """The forward of a class, beneath its decorators."""
    function = rewrite.beneath(cls.forward)
    if function is None:
        raise NotOfLlamaType(f"{cls.__name__} has no forward in Python")
    return function


def _mentions(cls: type[nn.Module], name: str) -> bool:
    function = rewrite.beneath(cls.forward)
    return function is not None and name in _all_names(function.__code__)


def _all_names(code: types.CodeType) -> set[str]:
    """Every name and string of a code object, nested functions included."""
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _all_names(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def _is_attention(cls: type[nn.Module]) -> bool:
    return _APPLY in _innermost(cls).__code__.co_names


def _forward_tree(cls: type[nn.Module]) -> ast.FunctionDef:
    """Syntax tree of a class's own forward."""
    try:
        source = textwrap.dedent(inspect.getsource(_innermost(cls)))
    except OSError:
        raise NotOfLlamaType(f"the source of {cls.__name__} is not at hand") from None
    (tree,) = ast.parse(source).body
    if not isinstance(tree, ast.FunctionDef):
        raise NotOfLlamaType(f"{cls.__name__}.forward is no function")
    return tree


def _loads(tree: ast.AST, name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def _calls(tree: ast.AST, function: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]


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
    if len(_calls(tree, "self.rotary_emb")) != 1 or targets != {"position_embeddings"}:
        raise NotOfLlamaType("forward does not assign self.rotary_emb(...) to one name")
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
        raise NotOfLlamaType(f"{type(module).__name__} does more with position_embeddings")


def _check_attention(cls: type[nn.Module]) -> Form:
    """``cos, sin = position_embeddings`` and one ``apply_rotary_pos_emb(q, k, cos, sin)``.

    Returns the form of that function.
    """
    tree = _forward_tree(cls)
    unpacked = [
        [ast.unparse(element) for element in node.targets[0].elts]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and ast.unparse(node.value) == "position_embeddings"
    ]
    calls = _calls(tree, _APPLY)
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
    form = recognise(_innermost(cls).__globals__[_APPLY])
    if not good or form is None or not form.is_plain:
        raise NotOfLlamaType(f"{cls.__name__} rotates in another way")
    return form
