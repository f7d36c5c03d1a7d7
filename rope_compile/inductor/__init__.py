"""An Inductor pass that finds hand-written rotary embedding and puts the operator in its place.

>>> import rope_compile as rc
>>> rc.inductor.enable()
>>> compiled = torch.compile(model)  # nothing in the model changes
>>> ...
>>> rc.inductor.report()  # what was replaced at each compilation, and what was not, and why

Models write the rotation in many ways: ``rotate_half``, split halves, even and odd channels,
complex numbers, a rotated part beside a copied one. No list of patterns holds them all, so the pass
reads what a graph *computes*, not how it is written.

NOTE [Value numbers] Every tensor is seen as a row of channels, its last dimension, and every
channel gets a number that stands for the expression it holds. Equal numbers are equal values: the
two halves of ``cat((f, f), -1).cos()`` have the same ones. What only moves channels (slices, cat,
views as pairs, complex views) moves numbers; elementwise functions make new ones. A rotation is
then a row whose channels are ``x[i] * c +- x[j] * s`` with the channels i, j of one tensor in pairs
and the signs of a rotation (RoFormer, arXiv 2104.09864); its gradient is one too, with the signs
swapped.

The table of the operator is built from the cos and sin of the graph itself, one row for each token,
once for all layers that share them, so nothing is assumed about frequencies or positions. What is
not understood is left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch._inductor.config as inductor_config  # the names used below: see `_SLOTS`
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from rope_compile.checks import flag
from rope_compile.inductor.rewrite import Options, Record, replace_rotations

__all__ = ["Record", "disable", "enable", "report"]

_log = logging.getLogger(__name__)


# Where Inductor takes passes over the graph of a model before it is split into forward and
# backward. The first does the work; the second is for graphs that missed it, because somebody's own
# pass took its place. Tests fail when the names move (torch 2.11 to 2.14 have them).
_SLOTS = ("joint_custom_pre_pass", "joint_custom_post_pass")


class _State:
    """The switch behind :func:`enable`."""

    options: Options | None = None
    records: ClassVar[Counter[Record]] = Counter()
    done: ClassVar[weakref.WeakSet[fx.Graph]] = weakref.WeakSet()  # not to be read again


class _RopePass(CustomGraphPass):
    """The pass as Inductor calls it, behind those that stood in its place before."""

    def __init__(self, before: tuple[Any, ...]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.before:
            other(graph)
        if _State.options is None or graph in _State.done:
            return
        _State.done.add(graph)
        for record in replace_rotations(graph, _State.options):
            _State.records[record] += 1
            _log.info("%s", record)

    def uuid(self) -> object | None:
        """Part of the key of compiled code; None, which forbids caching, where another has none."""
        others = []
        for other in self.before:
            if not isinstance(other, CustomGraphPass) or not other.uuid():
                return None
            others.append(other.uuid())
        return (_identity(), repr(_State.options), tuple(others))


@functools.cache
def _identity() -> str:
    """The code that decides what is put into a graph, and the versions it runs with."""
    here = Path(__file__).parent
    others = (here.parent / name for name in ("ops.py", "kernels/triton_rope.py"))
    code = b"".join(path.read_bytes() for path in (*sorted(here.glob("*.py")), *others))
    return f"rope_compile.inductor {torch.__version__} {hashlib.sha256(code).hexdigest()}"


def _passes(slot: str) -> tuple[Any, ...]:
    now = getattr(inductor_config, slot)
    return () if now is None else tuple(now) if isinstance(now, list | tuple) else (now,)


def _install() -> None:
    for slot in _SLOTS:
        passes = _passes(slot)
        if not any(isinstance(x, _RopePass) for x in passes):
            setattr(inductor_config, slot, _RopePass(passes))


def _remove() -> None:
    for slot in _SLOTS:
        passes = _passes(slot)
        if any(isinstance(x, _RopePass) for x in passes):
            left = [y for x in passes for y in (x.before if isinstance(x, _RopePass) else (x,))]
            setattr(inductor_config, slot, left if len(left) > 1 else left[0] if left else None)


def _set(options: Options | None) -> None:
    _State.options = options
    if options is None:
        _remove()
    else:
        _install()


def enable(*, trust_full_width: bool = False) -> contextlib.AbstractContextManager[None]:
    """Have Inductor replace hand-written rotary embedding by the operator, from this call on.

    For every model that ``torch.compile`` hands to Inductor after it, inference and training, in
    this process. Code that is compiled already stays. q and k of one layer become one call. The
    results are those of the operator: float32 arithmetic, rounded once, from the cos and sin of the
    model. float64 is left alone, and so is all that is not known to be a rotation.

    Passes that are set in Inductor's ``joint_custom_pre_pass`` and ``joint_custom_post_pass`` keep
    running, before this one. Compiled code is cached under the identity of this pass and theirs; a
    graph that comes from a cache is not in :func:`report`.

    Use the result as a context manager to restore the previous setting on exit::

        rc.inductor.enable()            # on, until rc.inductor.disable()
        with rc.inductor.enable():      # on inside only
            compiled(x)                 # compiles here

    Args:
        trust_full_width: cos and sin that come into a graph at full width, with both channels of a
            pair, are taken to hold the same value twice. Without it the two halves are read for
            themselves, which takes twice the table, and even and odd channels stay as they are.
            Where a graph computes both from half the frequencies they are known to agree.

    Raises:
        TypeError: ``trust_full_width`` is not a bool.
    """
    before = _State.options
    _set(Options(flag("trust_full_width", trust_full_width)))
    _State.records.clear()

    @contextlib.contextmanager
    def restoring() -> Iterator[None]:
        try:
            yield
        finally:
            _set(before)

    return restoring()


def disable() -> None:
    """Take the pass out again; passes that stood in its place are put back."""
    _set(None)


def report() -> list[Record]:
    """What was replaced since the last :func:`enable`, and what was not and why, with counts."""
    return [replace(record, count=count) for record, count in _State.records.items()]
