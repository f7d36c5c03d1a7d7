"""One instance of a model runs the code of its class with other functions in its globals.

NOTE [How a module is patched]
transformers looks an apply function up in the globals of the modelling file. Replacing it there
would change every model of the process, so nothing in transformers is written to. An instance
moves to a subclass of its own class (``module.__class__ = ...``, as ``torch.nn.utils.parametrize``
does), whose methods run the *same* code objects with a copy of their globals in which the function
is ours; decorators and helper functions in between are copied the same way.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

Function = Callable[..., object]


class Recipe(Protocol):
    """What a patched class does other than the class beneath; hashable and picklable."""

    def namespace(self, original: type[nn.Module]) -> dict[str, object]:
        """The attributes to override."""
        ...


# One patched class for each class and recipe, so that instances and their copies share a type.
_PATCHED: dict[tuple[type[nn.Module], Recipe], type[nn.Module]] = {}


class Patched:
    """Mixin that marks the classes made here and names the class beneath."""

    rope_compile_original_class: type[nn.Module]
    rope_compile_recipe: Recipe

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle and deepcopy: the class is made, not importable, so name what makes it."""
        cls = type(self)
        return _empty, (cls.rope_compile_original_class, cls.rope_compile_recipe), self.__dict__


def _empty(original: type[nn.Module], recipe: Recipe) -> nn.Module:
    cls = patched_class(original, recipe)
    return cls.__new__(cls)


def patched_class(original: type[nn.Module], recipe: Recipe) -> type[nn.Module]:
    """A subclass of ``original`` with the attributes of ``recipe``."""
    known = _PATCHED.get((original, recipe))
    if known is None:
        namespace = recipe.namespace(original) | {
            "rope_compile_original_class": original,
            "rope_compile_recipe": recipe,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        }
        # Same name: accelerate and others look classes up by name.
        made = type(original.__name__, (Patched, original), namespace)
        known = _PATCHED.setdefault((original, recipe), made)
    return known


def beneath(function: object) -> types.FunctionType | None:
    """The plain function under decorators that keep ``__wrapped__``, if there is one."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    return function if isinstance(function, types.FunctionType) else None


def names_in(code: types.CodeType) -> set[str]:
    """Every global or attribute that a code object names, nested functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def mentioned(function: types.FunctionType) -> dict[str, object]:
    """The globals that a function names, as they are now."""
    scope = function.__globals__
    return {name: scope[name] for name in names_in(function.__code__) if name in scope}


def with_functions(function: Function, replacements: Mapping[Function, Function]) -> Function:
    """The same function, decorators and helpers included, that calls ``replacements``.

    Returns ``function`` itself where it does not reach any of them.
    """
    return _Rewriter(replacements).rewritten(function)


class _Rewriter:
    def __init__(self, replacements: Mapping[Function, Function]) -> None:
        self.replacements = replacements
        self.done: dict[Function, Function] = {}

    def rewritten(self, function: Function) -> Function:
        if function not in self.done:
            self.done[function] = function  # of a function that calls itself: the original
            self.done[function] = self._copy(function)
        return self.done[function]

    def _copy(self, function: Function) -> Function:
        if not isinstance(function, types.FunctionType):
            return function
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is None:
            names = self._names(function)
            return with_globals(function, names) if names else function
        inner = self.rewritten(wrapped)
        return function if inner is wrapped else _around(function, wrapped, inner)

    def _names(self, function: types.FunctionType) -> dict[str, object]:
        names: dict[str, object] = {}
        for name, value in mentioned(function).items():
            if isinstance(value, nn.Module | types.FunctionType) and value in self.replacements:
                names[name] = self.replacements[value]
            elif isinstance(value, types.FunctionType) and is_helper(value, function):
                copy = self.rewritten(value)
                if copy is not value:
                    names[name] = copy
        return names


def is_helper(value: object, function: types.FunctionType) -> bool:
    """Whether a global that ``function`` names belongs to the same file."""
    return getattr(value, "__module__", None) == function.__module__


def with_globals(function: types.FunctionType, names: dict[str, object]) -> types.FunctionType:
    """The same code, with ``names`` in a copy of its globals."""
    # Without __name__ Dynamo guards on this dictionary itself; with it, it would look the names up
    # in the imported module and find the function that we replace.
    scope = {k: v for k, v in function.__globals__.items() if k != "__name__"} | names
    return _copied(function, scope, function.__closure__)


def _around(function: types.FunctionType, wrapped: Function, inner: Function) -> Function:
    """A decorator's wrapper, which keeps what it wraps in a closure cell, around ``inner``."""
    cells = tuple(
        types.CellType(inner) if cell.cell_contents is wrapped else cell
        for cell in function.__closure__ or ()
    )
    copy = _copied(function, function.__globals__, cells)
    copy.__dict__["__wrapped__"] = inner
    return copy


def _copied(
    function: types.FunctionType,
    scope: dict[str, object],
    closure: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy
