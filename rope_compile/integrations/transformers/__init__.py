"""``patch(model)``: a transformers model rotates with ``rope_compile``; ``unpatch`` undoes it.

Two ways, found out for each part of the model from what its code does, never from its name:

1. Llama-type decoders with static frequencies: positions travel to the attention modules, which
   read the shared table of ``rope_compile.get_rope``; cos and sin are never made.
2. Everything else: the model's own rotary modules go on making cos and sin (scaling by the length
   of the call, position axes, a base per layer type are theirs), and the apply functions are
   replaced by one operator call for q and k.

For code of one's own there are transformers' functions by their names, in ``functions``.

What fits neither is left as it is, and named in the report. ``NOTE [How a module is patched]`` in
``rewrite`` says why no other model of the process is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

import rope_compile as rc
from rope_compile.integrations.transformers import positions, rewrite
from rope_compile.integrations.transformers.functions import (
    apply_rotary,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    apply_rotary_pos_emb_vision,
    rope_init,
)
from rope_compile.integrations.transformers.hub import kernel_mapping
from rope_compile.integrations.transformers.sites import Site, sites_of

__all__ = [
    "PatchReport",
    "apply_rotary",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_interleave",
    "apply_rotary_pos_emb_vision",
    "kernel_mapping",
    "patch",
    "rope_init",
    "unpatch",
]

_SHARED_TABLE = "positions, shared table"


@dataclass(frozen=True)
class PatchReport:
    """What ``patch`` or ``unpatch`` did.

    Attributes:
        replaced: Qualified names of the modules that changed.
        left: ``{name: reason}`` for rotary code that stayed as it was; a name is that of a module,
            and after a colon that of a function where other functions of the module were replaced.
        already: True if the model already was as asked and nothing was done.
        configs: The ``RopeConfig`` of each decoder that reads the shared table, by the name of its
            ``rotary_emb``.
        forms: How each module of ``replaced`` rotates now.
    """

    replaced: tuple[str, ...]
    left: dict[str, str]
    already: bool
    configs: dict[str, rc.RopeConfig]
    forms: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.already:
            return "nothing to do: the model already is as asked"
        lines = [f"replaced {len(self.replaced)} modules: {', '.join(self.replaced)}"]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def patch(model: nn.Module) -> PatchReport:
    """Make the rotary embeddings of a transformers model run on ``rope_compile``.

    Every model type: text, vision and audio towers, encoders, hybrids. Works in eager mode, under
    ``torch.compile``, in training, and in ``generate`` with dynamic and static caches. Call it
    after loading and before ``torch.compile``, capture and ``accelerate`` dispatch. Weights and
    ``state_dict`` keys do not change.

    The table of Llama-type decoders is the shared one of ``rope_compile.get_rope`` for the model's
    configuration and device; ``rope_compile.prepare_for_capture(model, plan)`` finds it.

    Where cos and sin are trained parameters, the calls in which they require grad run the model's
    own function: the operator has gradients for q and k alone.

    Args:
        model: A transformers model, or any module that contains one.

    Returns:
        What was replaced and what was left, with reasons. Patching twice does nothing the second
        time.

    Raises:
        ValueError: nothing could be replaced. The model is then untouched.
    """
    # Everything is decided before anything is changed.
    decoders = list(positions.decoders_of(model))
    claimed = {module for decoder in decoders for module in decoder.attentions.values()}
    others = [site for site in sites_of(model) if site.module not in claimed]
    report = _report(decoders, others)
    if not report.replaced:
        if any(isinstance(module, rewrite.Patched) for module in model.modules()):
            return PatchReport((), report.left, already=True, configs={})
        raise ValueError(_nothing(model, report.left))
    for decoder in decoders:
        decoder.apply()
    for site in others:
        if site.recipe.forms:
            site.apply()
    return report


def unpatch(model: nn.Module) -> PatchReport:
    """Undo ``patch`` exactly: the original modules and classes are back, results bit for bit.

    Code that was compiled or captured while the model was patched keeps what it traced; compile
    again after this. Unpatching a model that is not patched does nothing.
    """
    replaced = []
    for name, module in list(model.named_modules()):
        if isinstance(module, rewrite.Patched):
            module.__class__ = module.rope_compile_original_class  # type: ignore[assignment]
            replaced.append(name)
        if positions.restore(module):
            replaced.append(_join(name, "rotary_emb"))
    return PatchReport(tuple(replaced), {}, already=not replaced, configs={})


def _report(decoders: list[positions.Decoder], others: list[Site]) -> PatchReport:
    forms: dict[str, str] = {}
    left: dict[str, str] = {}
    for decoder in decoders:
        forms[_join(decoder.name, "rotary_emb")] = _SHARED_TABLE
        forms |= dict.fromkeys(decoder.attentions, _SHARED_TABLE)
        left |= decoder.left
    for site in others:
        if site.recipe.forms:
            forms[site.name] = site.form
            left |= {f"{site.name}:{function}": why for function, why in site.left.items()}
        elif site.left:
            left[site.name] = "; ".join(f"{function} {why}" for function, why in site.left.items())
    return PatchReport(
        replaced=tuple(forms),
        left=left,
        already=False,
        configs={_join(d.name, "rotary_emb"): d.rope.config for d in decoders},
        forms=forms,
    )


def _nothing(model: nn.Module, left: dict[str, str]) -> str:
    name = type(model).__name__
    if not left:
        return (
            f"model must contain rotary embeddings to be patched, got {name}, where no method "
            "calls a rotary function"
        )
    where, why = next(iter(left.items()))
    return (
        f"model must contain rotary code that can be replaced, got {name}, where in {where} "
        f"{why}; call rope_compile.get_rope in its code instead"
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
