"""What the zoo's models do when they rotate: which functions run, called by whom, on what tables.

``python tests/zoo/survey.py [FAMILY ...] [--json PATH]`` builds each family, runs one forward pass
with every rotary function of its modelling files observed, and prints a table. It also checks that
the rotation matters, that every class able to rotate was reached, and that ``zoo.FORMULAS`` is
what the models really run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import re
import sys
import textwrap
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: tests/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import Tensor, nn

import zoo

__all__ = ["Call", "Row", "faults", "formula_label", "formulas", "observe", "stale", "survey"]

_ROTARY = re.compile(
    r"_?(vision_)?apply_(\w*rotary|multidimensional_rope)\w*|rotate_queries_or_keys"
)
_TABLES = {"cos", "sin", "freqs_cis", "freqs_ci", "pos", "cos_k", "sin_k", "sinusoidal_pos"}
_TABLES |= {"position_ids", "relative_position_embeddings", "pos_ids", "self"}


# Formulas


class _Normal(ast.NodeTransformer):
    """Drops what does not compute: docstrings, annotations, decorators, default values."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        node.args.defaults, node.args.kw_defaults = [], [None] * len(node.args.kwonlyargs)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def _code_names(code: types.CodeType) -> set[str]:
    nested = (_code_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*nested)


def _normal_source(function: Callable[..., Any]) -> str:
    """The function's normalised syntax tree, then those of its modelling file's helpers."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    text = ast.unparse(_Normal().visit(tree))
    for name in sorted(_code_names(function.__code__)):
        helper = function.__globals__.get(name)
        if isinstance(helper, types.FunctionType) and helper.__module__ == function.__module__:
            text += _normal_source(helper)
    return text


def formula_label(function: Callable[..., Any]) -> str:
    """``name/hash``: equal for functions that compute the same from arguments of equal names."""
    digest = hashlib.sha256(_normal_source(function).encode()).hexdigest()
    return f"{function.__name__}/{digest[:6]}"


# Observation


@dataclass(frozen=True)
class Call:
    """One outermost call of a rotary function."""

    formula: str
    caller: str  # class whose method called
    table: str  # how wide cos is against x, and which of its channels agree


@dataclass
class _Observer:
    off: Callable[[str], bool]
    calls: list[Call] = field(default_factory=list)
    depth: int = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        label, signature = formula_label(function), inspect.signature(function)

        def observed(*args: Any, **kwargs: Any) -> Any:
            outermost = self.depth == 0
            self.depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self.depth -= 1
            if not outermost:
                return result
            bound = signature.bind(*args, **kwargs).arguments
            self.calls.append(Call(label, _caller(), _table(bound, result)))
            return _unrotated(bound, result) if self.off(label) else result

        return observed


def _caller() -> str:
    """The class of the nearest ``self`` up the stack that is a module."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return f"{type(owner).__module__.split('.')[-2]}.{type(owner).__name__}"
        frame = frame.f_back
    return "?"


def _unrotated(bound: dict[str, Any], result: Any) -> Any:
    inputs = [x for name, x in bound.items() if name not in _TABLES]
    if isinstance(result, tuple):
        return tuple(inputs[: len(result)])
    return inputs[0]


def _table(bound: dict[str, Any], result: Any) -> str:
    x = result[0] if isinstance(result, tuple) else result
    table = next((bound[n] for n in ("cos", "freqs_cis", "freqs_ci") if n in bound), None)
    if not isinstance(table, Tensor):
        return "computed inside"
    if table.is_complex():
        return f"complex {table.shape[-1]} of {x.shape[-1]}"
    width = table.shape[-1]
    text = f"{width} of {x.shape[-1]}"
    if 2 * width == x.shape[-1]:
        text += " half width or partial"
    if width % 2 == 0:
        halves = torch.equal(table[..., : width // 2], table[..., width // 2 :])
        pairs = torch.equal(table[..., ::2], table[..., 1::2])
        text += " halves equal" if halves else " pairs equal" if pairs else " all differ"
    grad = " learned" if table.requires_grad else ""
    return f"{text}, {table.ndim}-d {str(table.dtype)[6:]}{grad}"


def _modelling_files(model: nn.Module) -> set[types.ModuleType]:
    names = {type(m).__module__ for m in model.modules()}
    return {sys.modules[n] for n in names if n.startswith("transformers.models.")}


def _functions(model: nn.Module) -> Iterator[tuple[object, str, types.FunctionType]]:
    """``(owner, name, function)`` for each rotary function and method of the model's files."""
    for module in _modelling_files(model):
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and _ROTARY.fullmatch(name):
                yield module, name, value
    for cls in {type(m) for m in model.modules()}:
        for name, value in vars(cls).items():
            function = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(function, types.FunctionType) and _ROTARY.fullmatch(name):
                yield cls, name, function


@contextmanager
def observe(
    model: nn.Module, off: Callable[[str], bool] = lambda formula: False
) -> Iterator[list[Call]]:
    """Collects the outermost rotary calls of the ``with`` block, whichever model makes them.

    Formulas for which ``off(label)`` holds return their inputs as they came: no rotation.
    """
    observer = _Observer(off)
    with ExitStack() as stack:
        for owner, name, function in list(_functions(model)):
            old = vars(owner)[name]
            wrapped: Any = observer.wrap(function)
            setattr(
                owner, name, staticmethod(wrapped) if isinstance(old, staticmethod) else wrapped
            )
            stack.callback(setattr, owner, name, old)
        yield observer.calls


def able_classes(model: nn.Module) -> set[str]:
    """Classes among the model's modules with a method that mentions a rotary function."""
    names = {name for _, name, _ in _functions(model)}
    found = set()
    switch = "position_embeddings_type"  # wav2vec2 and its kin rotate for one value of three
    modules = (m for m in model.modules() if getattr(m, switch, "rotary") == "rotary")
    for cls in {type(m) for m in modules}:
        for base in cls.__mro__:
            for method in vars(base).values():
                code = getattr(getattr(method, "__func__", method), "__code__", None)
                if base.__module__.startswith("transformers.models.") and code is not None:
                    code = inspect.unwrap(method).__code__ if callable(method) else code
                    if names & _code_names(code):
                        found.add(f"{cls.__module__.split('.')[-2]}.{cls.__name__}")
    return found


# The table


@dataclass
class Row:
    """What the survey says about one family; ``reason`` where it could not be built or run."""

    family: str
    reason: str | None = None
    seconds: float = 0.0
    parameters: int = 0
    model: str = ""
    calls: dict[str, int] = field(default_factory=dict)  # formula -> count
    callers: dict[str, list[str]] = field(default_factory=dict)  # formula -> classes
    tables: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    effect: float = 0.0  # relative change of the outputs without the formula that matters least
    finite: bool = True


def _effect(case: zoo.Case, rotated: tuple[Tensor, ...], found: set[str]) -> tuple[float, bool]:
    """How much the least of the formulas matters, and whether all outputs were finite."""
    effects, finite = [], all(bool(x.isfinite().all()) for x in rotated)
    for formula in found:
        with torch.no_grad(), observe(case.model, off=formula.__eq__):
            plain = case.output(case())
        finite &= all(bool(x.isfinite().all()) for x in plain)
        changes = zip(rotated, plain, strict=True)
        effects.append(max(float((a - b).norm() / a.norm()) for a, b in changes))
    return min(effects, default=0.0), finite


def survey(family: str) -> Row:
    """Builds, runs and observes one family."""
    start = time.perf_counter()
    try:
        case = zoo.build(family)
        with torch.no_grad(), observe(case.model) as calls:
            rotated = case.output(case())
        seconds = time.perf_counter() - start
        effect, finite = _effect(case, rotated, {call.formula for call in calls})
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        text = " ".join(str(error).split())[:200]
        return Row(family, f"{type(error).__name__}: {text} at {where}")
    callers: dict[str, set[str]] = {}
    for call in calls:
        callers.setdefault(call.formula, set()).add(call.caller)
    reached = set().union(*callers.values())
    return Row(
        family,
        seconds=round(seconds, 3),
        parameters=sum(p.numel() for p in case.model.parameters()),
        model=type(case.model).__name__,
        calls=dict(Counter(call.formula for call in calls)),
        callers={formula: sorted(classes) for formula, classes in callers.items()},
        tables=sorted({f"{call.formula}: {call.table}" for call in calls}),
        unreached=sorted(able_classes(case.model) - reached),
        effect=effect,
        finite=finite,
    )


def faults(row: Row) -> list[str]:
    """What keeps a row from being a fair test of a rotation."""
    if row.reason is not None:
        return [row.reason]
    found = []
    if bool(row.calls) == (row.family in zoo.UNUSED):
        found.append(f"{sum(row.calls.values())} rotary calls")
    if not row.finite:
        found.append("outputs are not finite")
    if (row.effect > 1e-2) == (row.family in zoo.UNUSED or row.family in zoo.UNSEEN):
        found.append(f"without a formula the outputs change by {row.effect:.1e}")
    if row.unreached:
        found.append(f"not reached: {', '.join(row.unreached)}")
    return found


def formulas(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """Formula -> families that ran it: what ``zoo.FORMULAS`` should be."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for formula in row.calls:
            found.setdefault(formula, []).append(row.family)
    return {formula: tuple(sorted(families)) for formula, families in found.items()}


def stale(rows: Iterable[Row]) -> list[str]:
    """Where the tables of ``zoo`` differ from a survey of all families."""
    found = formulas(rows)
    differing = {f for f in found.keys() | zoo.FORMULAS if found.get(f) != zoo.FORMULAS.get(f)}
    missing = {f for f, families in found.items() if not set(families) & set(zoo.FAST)}
    return [
        *(f"FORMULAS[{f!r}] should be {found.get(f)}" for f in sorted(differing)),
        *(f"FAST lacks a family with {f}" for f in sorted(missing)),
    ]


_HEADER = "| family | s | parameters | calls | tables | effect | faults |"


def _line(row: Row) -> str:
    calls = ", ".join(f"{formula} x{count}" for formula, count in row.calls.items())
    tables = "; ".join(text.split(": ")[1] for text in row.tables)
    return (
        f"| {row.family} | {row.seconds:.2f} | {row.parameters} | {calls} | {tables} "
        f"| {row.effect:.2g} | {'; '.join(faults(row))} |"
    )


def main() -> int:
    """The command; 1 where a family has a fault or the zoo's own tables are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="default: all of them")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sys.stdout.write(f"{_HEADER}\n{'|---' * 7}|\n")
    rows = []
    for family in arguments.families or zoo.families():
        rows.append(survey(family))
        sys.stdout.write(_line(rows[-1]) + "\n")
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    old = [] if arguments.families else stale(rows)
    sys.stdout.write("".join(f"{line}\n" for line in old))
    return int(bool(old) or any(faults(row) for row in rows if row.family not in zoo.SKIPPED))


if __name__ == "__main__":
    sys.exit(main())
