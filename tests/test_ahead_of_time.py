"""Programs that outlive their process: torch.export, AOTInductor packages, compile caches.

What a program or a cache holds is compared, in a fresh process, with what eager code gives there,
bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rope_compile as rc
from rope_compile import RotaryEmbedding
from rope_compile.ops import rope_inplace_op, rope_op

from support import randn, run_child

WIDTH = 16
SIZES = ((5, 7), (1, 1), (2, 1), (1, 19), (3, 100), (2, 4096))  # batch, tokens
YARN = rc.YarnScaling(factor=4.0, original_max_position=64)
LLAMA3 = rc.Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)


def config(**fields: object) -> rc.RopeConfig:
    return rc.RopeConfig(head_dim=WIDTH, **({"max_position": 128} | fields))


def make(batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and a position for each of their tokens, in and outside the table."""
    positions = torch.arange(batch * tokens).view(batch, tokens) * 37 - 11
    shape = (batch, tokens)
    return randn(*shape, 3, WIDTH, seed=1), randn(*shape, 2, WIDTH, seed=2), positions


class Layer(nn.Module):
    """Every form of the call: q and k, one row of positions for a batch, multi-axis, in place."""

    def __init__(self, base: float = 1e4) -> None:
        super().__init__()
        self.plain = RotaryEmbedding(config(base=base), "cpu")
        self.yarn = RotaryEmbedding(config(scaling=YARN, style="interleaved"), "cpu")
        self.axes = RotaryEmbedding(
            config(rotary_dim=8, rotary_offset=8, axes=rc.ChunkedAxes((2, 1, 1))), "cpu"
        )

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k = self.plain(positions, q, k)
        first, _ = self.yarn(positions[0], q, inverse=True)
        other, _ = self.axes(positions.expand(3, -1, -1), k)
        written = q.clone()
        self.yarn.apply_(positions, written)
        return q, k, first, other, written


def equal(outs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(out, wanted) for out, wanted in zip(outs, expected, strict=True))


# -------------------------------------------------------------------------------------- programs


def export(strict: bool) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=64)
    tokens = torch.export.Dim("tokens", min=1, max=8192)
    dynamic = ({0: batch, 1: tokens},) * 3
    return torch.export.export(Layer(), make(5, 7), dynamic_shapes=dynamic, strict=strict)


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return export(strict=False)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operators(program, strict: bool) -> None:
    """Batch and tokens dynamic; the program equals eager bit for bit at every size."""
    exported = export(strict=True) if strict else program
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(rope_op) == 3
    assert targets.count(rope_inplace_op) == 1
    run, layer = exported.module(), Layer()
    for size in SIZES:
        assert equal(run(*make(*size)), layer(*make(*size)))


def test_a_program_of_one_size_would_be_caught() -> None:
    """Wrong twin: without dynamic shapes the first other size is refused."""
    run = torch.export.export(Layer(), make(5, 7)).module()
    assert equal(run(*make(5, 7)), Layer()(*make(5, 7)))
    with pytest.raises(Exception, match="Guard failed"):
        run(*make(5, 19))


LOAD_PROGRAM = """
import json, sys, torch, rope_compile
run = torch.export.load(sys.argv[1]).module()
cases = torch.load(sys.argv[2])
print(json.dumps([all(map(torch.equal, run(*inputs), outs)) for inputs, outs in cases]))
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Path:
    """Inputs and eager results for a fresh process; the last ones are wrong, those of a twin."""
    path = tmp_path_factory.mktemp("cases") / "cases.pt"
    layer, twin = Layer(), Layer(base=5e5)
    right = [(make(*size), layer(*make(*size))) for size in SIZES]
    torch.save([*right, (make(3, 5), twin(*make(3, 5)))], path)
    return path


RESULTS = [True] * len(SIZES) + [False]


def test_a_saved_program_runs_in_a_fresh_process(program, cases: Path, tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    torch.export.save(program, path)
    output = run_child("-W", "ignore", "-c", LOAD_PROGRAM, str(path), str(cases))
    assert json.loads(output) == RESULTS


# ---------------------------------------------------------------------------------- AOTInductor

RUN_PACKAGE = """
import json, sys, torch

def results():
    run = torch._inductor.aoti_load_package(sys.argv[1])
    return [all(map(torch.equal, run(*inputs), expected)) for inputs, expected in cases]

cases = torch.load(sys.argv[2])
try:
    alone = str(results())
except RuntimeError as error:
    alone = str(error)
import rope_compile.ops
print(json.dumps([alone, results()]))
"""


@pytest.fixture(scope="module")
def package_use(program, cases: Path, tmp_path_factory) -> tuple[str, list[bool]]:
    """A shared library of the program, run in a fresh process: before and after the import."""
    path = str(tmp_path_factory.mktemp("package") / "package.pt2")
    # Headers compiled ahead serve later compilations; here there is one.
    options = {"aot_inductor.precompile_headers": False}
    with torch._inductor.utils.fresh_cache():
        torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs=options
        )
    output = run_child("-W", "ignore", "-c", RUN_PACKAGE, path, str(cases))
    return json.loads(output.splitlines()[-1])


def test_a_package_runs_in_a_fresh_process(package_use) -> None:
    """With nothing but the operators registered; the last case is the twin that must differ."""
    assert package_use[1] == RESULTS


def test_a_package_calls_the_operators(package_use) -> None:
    """Without them it cannot run, so it holds no rotation of its own."""
    assert "rope_compile::rope" in package_use[0]


# --------------------------------------------------------------------------------------- caches

# What is compiled, in this order, with one cache: name -> (fields of the config, options of the
# call). Every one has q, k, positions and a table of the same shapes.
VARIANTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "first": ({}, {}),
    "another base": ({"base": 5e5}, {}),
    "another scaling": ({"scaling": LLAMA3}, {}),
    "another magnitude": ({"scaling": YARN}, {}),
    "another style": ({"style": "interleaved"}, {}),
    "another offset": ({"rotary_offset": 8}, {}),
    "inverse": ({}, {"inverse": True}),
    "multi-axis": ({"axes": rc.ChunkedAxes((2, 1, 1))}, {}),
    "other axes": ({"axes": rc.ChunkedAxes((1, 1, 2))}, {}),
    "exact phases": ({"phase_dtype": torch.float64}, {}),
}
# These differ in their tables alone, which are inputs of the graph: they may share the first one's.
SHARED = {"another base", "another scaling"}


def rotation(name: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    fields, options = VARIANTS[name]
    rope = RotaryEmbedding(config(rotary_dim=8, **fields), "cpu")

    def rotate(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope(positions, q, k, **options)

    return rotate


def arguments(name: str, tokens: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(tokens) * 37 - 11
    if "axes" in VARIANTS[name][0]:
        positions = torch.stack([positions, positions + 5, positions * 3])
    return randn(tokens, 3, WIDTH, seed=1), randn(tokens, 2, WIDTH, seed=2), positions


def gradients(function: Callable, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    q, k = (x.clone().requires_grad_() for x in tensors[:2])
    rotated = function(q, k, tensors[2])
    sum((x * x.detach().cos()).sum() for x in rotated).backward()
    return q.grad, k.grad


def report_cache_use() -> None:
    """Runs in processes of its own: what each variant took from the caches, and if it is right."""
    from torch._dynamo.utils import counters

    report = {}

    def measure(name: str, run: Callable[[], bool]) -> None:
        torch.compiler.reset()
        counters.clear()
        right = run()
        graph, autograd = counters["inductor"], counters["aot_autograd"]
        report[name] = {
            "right": right,
            "graph": (graph["fxgraph_cache_hit"], graph["fxgraph_cache_miss"]),
            "autograd": (autograd["autograd_cache_hit"], autograd["autograd_cache_miss"]),
        }

    def compiled_equals(name: str, eager: str, *lengths: int) -> bool:
        dynamic = True if lengths[1:] else None
        fast = torch.compile(rotation(name), fullgraph=True, dynamic=dynamic)
        return all(
            equal(fast(*arguments(name, n)), rotation(eager)(*arguments(name, n))) for n in lengths
        )

    for name in VARIANTS:
        measure(name, lambda name=name: compiled_equals(name, name, 7))
    measure("every length", lambda: compiled_equals("first", "first", 7, 16, 100))
    measure("a wrong twin", lambda: compiled_equals("first", "another base", 7))

    def training() -> bool:
        rotate, tensors = rotation("first"), arguments("first")
        fast = torch.compile(rotate, fullgraph=True)
        return equal(gradients(fast, tensors), gradients(rotate, tensors))

    measure("training", training)
    print(json.dumps(report))  # noqa: T201


@pytest.fixture(scope="module")
def cache_use(tmp_path_factory) -> list[dict[str, dict[str, object]]]:
    """Reports of a first and of a second process with one cache folder."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    script = "import test_ahead_of_time; test_ahead_of_time.report_cache_use()"
    outputs = [run_child("-W", "ignore", "-c", script, **environment) for _ in range(2)]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_cached_graphs_give_right_results(cache_use) -> None:
    """In both processes, for every variant; and the comparison does see another config's graph."""
    for report in cache_use:
        wrong = [name for name, use in report.items() if not use["right"]]
        assert wrong == ["a wrong twin"]


def test_a_second_process_compiles_nothing(cache_use) -> None:
    """Forward, backward and dynamic graphs come from both caches."""
    second = cache_use[1]
    for name, use in second.items():
        hits, misses = use["autograd"]
        assert (hits, misses) == (1, 0), name
        assert use["graph"][0] >= 1, name
        assert use["graph"][1] == 0, name


def test_a_changed_config_never_takes_the_graph_of_another(cache_use) -> None:
    """In the first process all is compiled anew but what differs in its table alone."""
    first = cache_use[0]
    for name in VARIANTS:
        expected = [1, 0] if name in SHARED else [0, 1]
        assert first[name]["graph"] == expected, name
        assert first[name]["autograd"] == expected, name


@pytest.mark.usefixtures("fresh_compiler")
def test_a_changed_table_changes_the_results_of_a_compiled_graph() -> None:
    """New numbers at the same address and of the same shape are read, as they are in eager code."""
    rope = RotaryEmbedding(config(), "cpu")
    kept = rope.cos_sin_cache.clone()

    def rotate(q, k, positions):
        return rope(positions, q, k)

    @torch.compiler.assume_constant_result
    def copied():
        return kept

    def stale(q, k, positions):
        """Wrong twin: its table is the one of the time when it was traced."""
        return rc.apply_rope(q, k, positions, copied(), inv_freq=rope.inv_freq)

    fast, slow = (torch.compile(f, fullgraph=True) for f in (rotate, stale))
    tensors = arguments("first")
    for factor in (1.0, 0.5, -3.0):
        rope.cos_sin_cache.copy_(kept * factor)
        assert equal(fast(*tensors), rotate(*tensors))
        assert equal(slow(*tensors), rotate(*tensors)) == (factor == 1.0)
    rope.rebuild_()
    assert equal(fast(*tensors), slow(*tensors))
