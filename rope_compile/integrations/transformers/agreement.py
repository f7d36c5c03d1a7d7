"""Whether the two channels of a pair have the same cos and sin: the rotary modules are asked.

An operator that reads one cos for each pair is wrong where they differ (HunYuan-VL gives the two
halves different axes). Nothing in an apply function says so, nor does a tensor's shape. So a copy
of each rotary module is run on small positions that differ in every axis, and the code between it
and the call site must not cut or join what it returns.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from rope_compile.axes import Style

__all__ = ["RotaryModules"]

# Names of cos and sin on their way, and what changes which channels meet in a pair.
_TABLES = re.compile(r"(^|_)(cos|sin)(_|$)|position_emb|rotary_pos|rotary_emb|rope_emb|freqs")
_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "flip", "roll", "chunk", "narrow")
_ROTARY = re.compile(r"Rotary|RoPE|Rope|Sinusoid")
_SEQ, _WIDTH = 6, 16
_TOLERANCE = 1e-6


def is_rotary(module: nn.Module) -> bool:
    """Whether a module by its name computes cos and sin. Attention modules may be called so too."""
    return _ROTARY.search(type(module).__name__) is not None


class RotaryModules:
    """The modules that make cos and sin for a call site, and what is known of their results.

    They are looked for among the children of everything that encloses the site: a decoder owns the
    rotary module that its layers are fed from.
    """

    def __init__(self, model: nn.Module, sites: Iterable[nn.Module]) -> None:
        self.modules = dict(model.named_modules())
        self.sites = set(sites)
        self.results: dict[nn.Module, list[Tensor]] = {}

    def agree(self, name: str, style: Style) -> bool:
        """Every table that can reach the site has pairs of one style; False if it is not known."""
        if any(_changes_tables(type(module)) for module in self._path(name)):
            return False
        tables = [x for module in self._above(name) for x in self._results_of(module)]
        return bool(tables) and all(_pairs_agree(x, style) for x in tables)

    def learned(self, name: str) -> bool:
        """Whether cos and sin come from parameters that are trained."""
        return any(p.requires_grad for module in self._above(name) for p in module.parameters())

    def _path(self, name: str) -> Iterator[nn.Module]:
        """The modules that enclose the site, and itself."""
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            yield self.modules[".".join(parts[:depth])]

    def _above(self, name: str) -> Iterator[nn.Module]:
        for owner in self._path(name):
            for child in owner.children():
                if is_rotary(child) and not self.sites & set(child.modules()):
                    yield child

    def _results_of(self, module: nn.Module) -> list[Tensor]:
        if module not in self.results:
            self.results[module] = list(_results(module))
        return self.results[module]


# By class: reading source is slow.
_CHANGING: dict[type[nn.Module], bool] = {}


def _changes_tables(cls: type[nn.Module]) -> bool:
    """Whether code of a class joins tables or takes some of their channels, or cannot be read."""
    if cls not in _CHANGING:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):
            _CHANGING[cls] = True
        else:
            _CHANGING[cls] = any(map(_changes, ast.walk(tree)))
    return _CHANGING[cls]


def _changes(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return _channels(node.slice) and _names_tables(node.value)
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else ""
        return name in _JOINS and _names_tables(node)
    return False


def _channels(index: ast.expr) -> bool:
    """``[..., x]`` with anything but all of the last dimension."""
    if not isinstance(index, ast.Tuple):
        return False
    first, last = index.elts[0], index.elts[-1]
    whole = isinstance(last, ast.Slice) and last.lower is last.upper is last.step is None
    return isinstance(first, ast.Constant) and first.value is ... and not whole


def _names_tables(node: ast.AST) -> bool:
    return any(
        _TABLES.search(inner.id if isinstance(inner, ast.Name) else inner.attr)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name | ast.Attribute)
    )


def _pairs_agree(x: Tensor, style: Style) -> bool:
    if x.shape[-1] % 2:
        return False
    if style == "interleaved":
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return bool((first - second).abs().max() <= _TOLERANCE)


@torch.no_grad()
def _results(module: nn.Module) -> Iterator[Tensor]:
    """Tables of every call that the module takes; none from one that has no values yet."""
    module = copy.deepcopy(module)  # some remember the last call, or adapt their frequencies to it
    tensors = [*module.buffers(), *module.parameters()]
    if any(x.is_meta for x in tensors):
        return
    device = tensors[0].device if tensors else torch.device("cpu")
    names = [
        p.name for p in inspect.signature(module.forward).parameters.values()
        if p.kind == p.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    options = [_options(name, module, device, generator) for name in names]
    for values in itertools.product(*options):
        try:
            result = module(**dict(zip(names, values, strict=True)))
        except Exception:  # not a call for this module
            continue
        for x in _tensors(result):
            if x.is_floating_point() and x.dim() >= 2 and x.isfinite().all() and _varies(x):
                yield x.float()


def _varies(x: Tensor) -> bool:
    """Not the same in all channels, of which any pairing would say that they agree."""
    return bool((x.amax(-1) - x.amin(-1)).max() > _TOLERANCE) if x.numel() else False


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        yield from _tensors(tuple(result.values()))
    elif isinstance(result, tuple | list):
        for item in result:
            yield from _tensors(item)


def _options(
    name: str, module: nn.Module, device: torch.device, generator: torch.Generator
) -> list[object]:
    """What a parameter of that name may be given."""
    if "layer_type" in name or "attention_type" in name:
        config = getattr(module, "config", None)
        kinds = getattr(module, "layer_types", None) or getattr(config, "layer_types", None) or ()
        return [*dict.fromkeys(kinds)] or [None]
    if "pos" in name or "grid" in name or "coord" in name or "ids" in name:
        shapes = ((1, _SEQ), *((axes, 1, _SEQ) for axes in (2, 3, 4)), (_SEQ, 2), (_SEQ, 3),
                  (1, _SEQ, 2), (1, _SEQ, 3), (1, 2, _SEQ), (2, _SEQ), (_SEQ,))  # fmt: skip
        return [torch.randint(20, s, generator=generator, device="cpu").to(device) for s in shapes]
    if any(word in name for word in ("len", "height", "width", "size", "num", "shape")):
        return [_SEQ]
    shapes = ((1, _SEQ, _WIDTH), (1, 3, _WIDTH, _WIDTH), (1, _SEQ))
    return [torch.rand(s, generator=generator, device="cpu").to(device) for s in shapes]
