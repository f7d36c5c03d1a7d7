"""A promise is a named measurement beside the value that it must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import rope_compile as rc
from rope_compile.demo.speculation import Cache, Forward

__all__ = [
    "Compiled",
    "HostReads",
    "Promise",
    "count_host_reads",
    "largest_error",
    "table_state",
]


@dataclass(frozen=True)
class Promise:
    """One line of the demo's table.

    Attributes:
        name: Short identifier, stable across releases; ``--json`` uses it.
        claim: What must hold, in words.
        measured: The measured value.
        expected: The value that it must have, in words.
        ok: Whether it has.
        detail: The first thing that was found, where one was and should not have been.
    """

    name: str
    claim: str
    measured: int | float | str
    expected: str
    ok: bool
    detail: str = ""

    @property
    def shown(self) -> str:
        """The measured value in few characters."""
        return f"{self.measured:.2g}" if isinstance(self.measured, float) else str(self.measured)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class HostReads(TorchDispatchMode):
    """Counts operators that need a tensor's values on the host, or move them there.

    ``tolist`` and ``numpy`` pass below the dispatcher; ``count_host_reads`` finds those with fake
    tensors, which have no values to read.
    """

    _DENIED = frozenset(
        {
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.is_nonzero.default,
            torch.ops.aten._unique2.default,
            torch.ops.aten.repeat_interleave.Tensor,
        }
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in self._DENIED:
            self.found.append(str(func))
        elif func is torch.ops.aten._to_copy.default:
            source, target = (x.device for x in (args[0], result) if isinstance(x, Tensor))
            if source != target:
                self.found.append(f"{func} {source} to {target}")
        return result


def count_host_reads(
    forward: Forward, tokens: Tensor, positions: Tensor, cache: Cache
) -> list[str]:
    """Names of the host reads in a forward: watched while it runs, then run without values.

    It runs twice: on the real inputs with every operator watched, and on fake ones, where reading
    a value raises.
    """
    with HostReads() as watched, torch.no_grad():
        forward(tokens, positions, cache)
    found = list(watched.found)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = mode.from_tensor(tokens), mode.from_tensor(positions)
    fake_cache: Cache = [mode.from_tensor(tensor) for tensor in cache]
    try:
        with mode, torch.no_grad():
            forward(*fakes, fake_cache)
    except Exception as error:  # whatever needs a value names itself in its error
        found.append(f"without values: {type(error).__name__}: {_first_line(error)}")
    return found


@dataclass
class Compiled:
    """A compiled forward that keeps the demo going, and the books, when compilation goes wrong.

    ``fullgraph=True`` turns a graph break into an error, ``recompiles_forbidden`` a recompile.
    Either is written down and the eager forward takes over, so that the other promises are still
    measured.
    """

    module: Forward
    backend: str
    graphs: int = 0
    graph_breaks: list[str] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    _run: Forward = field(init=False)

    def __post_init__(self) -> None:
        compile_graph = torch._dynamo.lookup_backend(self.backend)

        def counting(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
            self.graphs += 1
            compiled: Callable[..., Any] = compile_graph(graph, list(inputs))
            return compiled

        self._run = torch.compile(self.module, backend=counting, fullgraph=True, dynamic=False)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        exceptions = torch._dynamo.exc
        try:
            with torch.no_grad():
                return self._run(tokens, positions, cache)
        except exceptions.RecompileError as error:
            self.recompiles.append(_first_line(error))
        except exceptions.FailOnRecompileLimitHit as error:
            self.recompiles.append(_first_line(error))
        except exceptions.Unsupported as error:
            self.graph_breaks.append(_first_line(error))
        self._run = self.module
        with torch.no_grad():
            return self._run(tokens, positions, cache)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def recompiles_forbidden() -> Iterator[None]:
    """Any recompile inside raises ``torch._dynamo.exc.RecompileError``."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def table_state(ropes: Sequence[rc.RotaryEmbedding]) -> list[tuple[int, int]]:
    """Address and rows of each rope's table."""
    return [(rope.cos_sin_cache.data_ptr(), rope.capacity) for rope in ropes]


# What the demo tries on every table of ``rows`` rows, besides 0: its edges, far outside, negative.
def edge_positions(rows: int) -> list[int]:
    return [0, 1, rows - 1, rows, rows + 1, 3 * rows, 2**24 + 1, 2**31 - 1, -1, -rows, -(2**31)]


# Two products and a sum of float32, each rounded to within half an ulp, on entries of at most 1 and
# a table rounded once: under 4 * 2**-24. One rounding of the phase is part of the definition.
ERROR_BOUND = 2.0**-22


def largest_error(rope: rc.RotaryEmbedding, heads: int = 3) -> float:
    """Largest difference from float64 over ``edge_positions``, for q and k uniform in [-1, 1].

    The oracle follows the definition: the phase is the exact product of the position and the
    float32 frequency, rounded once to float32; everything after that is float64. Half and
    interleaved styles, partial widths; no axes.
    """
    config = rope.config
    device = rope.cos_sin_cache.device
    positions = torch.tensor(edge_positions(rope.capacity), device=device)
    generator = torch.Generator().manual_seed(7)
    shape = (2, len(positions), heads, config.head_dim)
    q, k = (torch.rand(shape, generator=generator) * 2 - 1).to(device).unbind()
    with torch.no_grad():
        rotated = rope(positions, q, k)
    phase = (positions.double()[:, None] * config.inv_freq().to(device).double()).float().double()
    scale = float(torch.tensor(config.attention_scaling, dtype=torch.float32))
    cos, sin = (phase.cos() * scale)[:, None], (phase.sin() * scale)[:, None]
    error = 0.0
    for x, y in zip((q, k), rotated, strict=True):
        expected = x.double()
        width = 2 * phase.shape[1]
        first, second = _pairs(expected, config.rotary_offset, width, config.style)
        a, b = first.clone(), second.clone()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)
        assert y is not None  # k was given
        error = max(error, (y.double() - expected).abs().max().item())
    return error


def _pairs(x: Tensor, offset: int, width: int, style: str) -> tuple[Tensor, Tensor]:
    """Views of the first and the second channel of every pair."""
    rotated = x[..., offset : offset + width]
    if style == "interleaved":
        return rotated[..., 0::2], rotated[..., 1::2]
    return rotated[..., : width // 2], rotated[..., width // 2 :]


class Graphed:
    """A decode step captured once in a CUDA graph and replayed.

    ``forward`` must have run before with inputs of the same shapes. Inputs are copied into the
    graph's own buffers; the cache is used where it lies.
    """

    def __init__(self, forward: Forward, tokens: Tensor, positions: Tensor, cache: Cache) -> None:
        self.cache = cache
        self.tokens = tokens.clone()
        self.positions = positions.clone()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.logits = forward(self.tokens, self.positions, cache)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        if cache is not self.cache:
            raise RuntimeError("cache must be the one that was captured; capture again for another")
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.logits
