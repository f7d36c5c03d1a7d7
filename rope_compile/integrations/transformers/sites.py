"""Where a model rotates: the methods of its modules that reach an apply function.

Such a function may be named by a method, by a helper function of the same file, or be a method
itself. Code that rotates and names no such function is found by the helpers it uses
(``rotate_half`` and the like), so that it can be reported.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

import rope_compile as rc
from rope_compile.axes import Style
from rope_compile.integrations.transformers import rewrite
from rope_compile.integrations.transformers.agreement import RotaryModules
from rope_compile.integrations.transformers.forms import Form, Function, drop_in, roles_of
from rope_compile.integrations.transformers.recognise import recognise

__all__ = ["Formulas", "Site", "sites_of"]

_APPLIES = re.compile(r"rotary|rotate|rope")
# Names that match and do not rotate: frequencies, positions, decorators.
_PREPARES = re.compile(r"compute|get_|update|init|param|index|validat|standardi|config")
_WRITTEN_OUT = "writes the rotation out itself, in code that cannot be replaced in part"


@dataclass(frozen=True)
class _Found:
    """The rotary code that the methods of one class reach.

    Attributes:
        functions: Apply functions, by the file that names them and the name they have there.
        written_out: Methods that rotate without one.
        hidden: Functions reached through ``super()`` alone, where no subclass can put another.
    """

    functions: dict[str, Function]
    written_out: tuple[str, ...]
    hidden: tuple[str, ...]


@dataclass(frozen=True)
class Formulas:
    """Recipe of a patched class: apply functions, by key, and the forms of ours in their place."""

    forms: tuple[tuple[str, Form], ...]

    def namespace(self, original: type[nn.Module]) -> dict[str, object]:
        functions = _rotary_code(original).functions
        ours = {functions[key]: drop_in(functions[key], form) for key, form in self.forms}
        namespace: dict[str, object] = {}
        for name, value in _methods(original):
            function = value.__func__ if isinstance(value, staticmethod) else value
            # A method that is an apply function itself, or one that reaches another.
            copy = ours.get(function) or rewrite.with_functions(function, ours)
            if copy is not function:
                namespace[name] = staticmethod(copy) if isinstance(value, staticmethod) else copy
        return namespace


@dataclass(frozen=True)
class Site:
    """One module that rotates, what will replace its functions, and what stays and why."""

    name: str
    module: nn.Module
    recipe: Formulas
    left: dict[str, str]

    def apply(self) -> None:
        self.module.__class__ = rewrite.patched_class(type(self.module), self.recipe)

    @property
    def form(self) -> str:
        return "; ".join(f"{_short(key)}: {form}" for key, form in self.recipe.forms)


def sites_of(model: nn.Module) -> Iterator[Site]:
    """The modules with rotary code, in module order; nothing is changed."""
    found = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, rewrite.Patched | rc.RotaryEmbedding) and _rotates(type(module))
    }
    tables = RotaryModules(model, found.values())
    for name, module in found.items():
        yield _site(name, module, tables)


def _rotates(cls: type[nn.Module]) -> bool:
    found = _rotary_code(cls)
    return bool(found.functions or found.written_out or found.hidden)


def _site(name: str, module: nn.Module, tables: RotaryModules) -> Site:
    found = _rotary_code(type(module))
    left = dict.fromkeys(found.written_out, _WRITTEN_OUT)
    left |= dict.fromkeys(found.hidden, "is called through super(), where nothing can be put")
    forms = []
    for key, function in found.functions.items():
        decided = _decide(name, module, function, tables)
        if isinstance(decided, Form):
            forms.append((key, decided))
        else:
            left[_short(key)] = decided
    return Site(name, module, Formulas(tuple(forms)), left)


def _decide(name: str, module: nn.Module, function: Function, tables: RotaryModules) -> Form | str:
    """The form to use in a module, or why there is none."""
    if "forward" in vars(module):
        return (
            "is called by a forward that was replaced on the instance; call patch before "
            "accelerate dispatch and other wrappers"
        )
    form = recognise(function)
    if form is None:
        return "rotates in a way that no form here has"
    if tables.learned(name):
        return "is given trained cos and sin, and the operator has gradients for q and k alone"
    if form.tables == "full":
        form = replace(form, agree=tables.agree(name, _pairs_of(form)))
    if form.needs_agreement and not form.agree:
        return "may be given cos and sin that differ within a pair of channels"
    return form


def _pairs_of(form: Form) -> Style:
    return "interleaved" if form.style == "interleaved" else "half"


def _short(key: str) -> str:
    return key.rpartition(".")[2]


# By class; functools.cache does not take nn.Module's classes for hashable.
_KNOWN: dict[type[nn.Module], _Found] = {}


def _rotary_code(cls: type[nn.Module]) -> _Found:
    if cls not in _KNOWN:
        _KNOWN[cls] = _find(cls)
    return _KNOWN[cls]


def _find(cls: type[nn.Module]) -> _Found:
    functions: dict[str, Function] = {}
    written_out: list[str] = []
    for name, value in _methods(cls):
        function = value.__func__ if isinstance(value, staticmethod) else value
        if _is_apply(name, function):
            functions[f"{function.__module__}.{name}"] = function
            continue
        reached = dict(_reached(function, set()))
        functions |= {key: f for key, f in reached.items() if roles_of(f) is not None}
        if any(roles_of(f) is None for f in reached.values()):
            written_out.append(name)
    hidden = {
        _short(key)
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and _calls_super(cls, name, value)
        for key, _ in _reached(value, set())
    }
    return _Found(functions, tuple(written_out), tuple(sorted(hidden)))


def _methods(
    cls: type[nn.Module],
) -> Iterator[tuple[str, types.FunctionType | staticmethod[..., object]]]:
    """Methods as the class has them, those of ``nn.Module`` left out."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        if value is inspect.getattr_static(nn.Module, name, None):
            continue
        if isinstance(value, types.FunctionType | staticmethod):
            yield name, value


def _is_apply(name: str, function: Function) -> bool:
    return _rotary_name(name) and roles_of(function) is not None


def _rotary_name(name: str) -> bool:
    return bool(_APPLIES.search(name) and not _PREPARES.search(name))


def _reached(function: Function, seen: set[Function]) -> Iterator[tuple[str, Function]]:
    """Apply functions that a function names, itself or through helpers; else what rotates."""
    plain = rewrite.beneath(function)
    if plain is None or plain in seen:
        return
    seen.add(plain)
    for name, value in rewrite.mentioned(plain).items():
        if not isinstance(value, types.FunctionType | nn.Module):
            continue
        found = f"{plain.__module__}.{name}", value
        if _is_apply(name, value) and recognise(value) is not None:
            yield found
            continue
        inner = list(_reached(value, seen)) if rewrite.is_helper(value, plain) else []
        yield from inner
        if not inner and _rotary_name(name):
            yield found


def _calls_super(cls: type[nn.Module], name: str, value: types.FunctionType) -> bool:
    """Whether ``value`` is overridden in ``cls`` by a method that calls it through ``super()``."""
    top = rewrite.beneath(inspect.getattr_static(cls, name, None))
    return top is not None and top is not value and "super" in rewrite.names_in(top.__code__)
