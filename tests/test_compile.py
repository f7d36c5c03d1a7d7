"""torch.compile, export and autocast around the operator: one graph, no break, bit-identical."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from rope_compile import apply_rope, apply_rope_
from rope_compile.ops import rope_op

from oracle import oracle_table
from support import randn

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS = 128
INV_FREQ = (1.0 / 1e4 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)).float()
TABLE = oracle_table(ROWS, INV_FREQ)


def rotate(q, k, positions):
    # A literal: with dynamic=True Dynamo makes a symbol of a float that comes from a default.
    return apply_rope(q, k, positions, TABLE, inv_freq=INV_FREQ, attention_scaling=1.0)


def make(tokens: int):
    """Primes apart, so that no two dimensions share a symbol; positions leave the table."""
    positions = torch.arange(tokens) * 37 - 11
    return randn(tokens, 3, 16, seed=1), randn(tokens, 2, 16, seed=2), positions


def graphs_for(function, sizes, mark=None, **options) -> list[int]:
    """Compile once, serve every size bit-identically; cumulative graph count after each."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    counts = []
    for size in sizes:
        arguments = make(size)
        if mark is not None:
            for argument in arguments:
                mark(argument, 0)
        for out, expected in zip(compiled(*arguments), function(*arguments), strict=True):
            assert torch.equal(out, expected)
        counts.append(counter.frame_count)
    return counts


def test_mark_unbacked_gives_one_graph_for_every_token_count() -> None:
    mark = torch._dynamo.decorators.mark_unbacked
    assert graphs_for(rotate, (7, 13, 29, 1, 2, 0, 131), mark) == [1] * 7


def test_mark_dynamic_gives_one_graph_and_one_each_for_1_and_0() -> None:
    assert graphs_for(rotate, (7, 13, 29, 1, 0), torch._dynamo.mark_dynamic) == [1, 1, 1, 2, 3]
    assert graphs_for(rotate, (5, 7, 16, 1, 0, 33), dynamic=True)[-1] == 3


def test_automatic_dynamic_takes_one_step() -> None:
    assert graphs_for(rotate, (4, 8, 16, 32, 5)) == [1, 2, 2, 2, 2]


def test_a_shape_read_in_python_recompiles() -> None:
    """Wrong twin: a branch on the token count is seen by the counter."""

    def branching(q, k, positions):
        return rotate(q, k, positions) if q.shape[0] < 10 else rotate(q * 1, k, positions)

    assert graphs_for(branching, (7, 13), torch._dynamo.mark_dynamic) != [1, 1]


def test_the_graph_holds_the_operator_itself() -> None:
    found = []

    def backend(graph, _inputs):
        found.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
        return graph

    torch.compile(rotate, fullgraph=True, backend=backend)(*make(5))
    assert found.count(rope_op) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_equals_eager_bit_for_bit(dtype) -> None:
    q, k, positions = make(77)
    q, k = q.to(dtype), k.to(dtype)
    for out, expected in zip(
        torch.compile(rotate, fullgraph=True)(q, k, positions), rotate(q, k, positions), strict=True
    ):
        assert out.dtype == dtype
        assert torch.equal(out, expected)


def test_inductor_hands_over_other_layouts() -> None:
    """Transposed and padded intermediates: the kernel reads strides at run time."""
    weight = randn(48, 48, seed=3)

    def block(x, positions):
        qkv = (x @ weight).t().contiguous().t().view(-1, 3, 16)
        q, k, v = qkv.split([1, 1, 1], 1)
        q, k = rotate(q, k, positions)
        return q.relu(), k, v

    x, positions = randn(7, 48), torch.arange(7) * 50
    for out, expected in zip(
        torch.compile(block, fullgraph=True)(x, positions), block(x, positions), strict=True
    ):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_training_step_under_compile() -> None:
    """Gradients equal eager's bit for bit, k absent or not."""
    q, k, positions = make(11)
    for given in ((q, k), (q, None)):
        grads = []
        for function in (rotate, torch.compile(rotate, fullgraph=True)):
            leaves = [x.clone().requires_grad_() for x in given if x is not None]
            outs = function(leaves[0], leaves[1] if len(leaves) > 1 else None, positions)
            sum((out * out.detach().cos()).sum() for out in outs if out is not None).backward()
            grads.append([leaf.grad for leaf in leaves])
        for eager, compiled in zip(*grads, strict=True):
            assert torch.equal(eager, compiled)


def test_in_place_on_packed_qkv_under_compile() -> None:
    def in_place(packed, positions):
        q, k, _v = packed.split([3, 2, 1], 1)
        apply_rope_(q, k, positions, TABLE, inv_freq=INV_FREQ)
        return packed.sum()

    packed, positions = randn(7, 6, 16), torch.arange(7) * 60
    eager, compiled = packed.clone(), packed.clone()
    in_place(eager, positions)
    torch.compile(in_place, fullgraph=True)(compiled, positions)
    assert torch.equal(eager, compiled)
    assert torch.equal(eager[:, 5:], packed[:, 5:])
    assert not torch.equal(eager[:, :5], packed[:, :5])


def test_functional_form_mutates_no_placeholder() -> None:
    """Mutated inputs make Inductor drop CUDA graphs."""
    graphs = []

    def compiler(graph, _inputs):
        graphs.append(graph)
        return graph

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler)
    with torch.no_grad():
        torch.compile(rotate, fullgraph=True, backend=backend)(*make(5))
    (graph,) = graphs
    names = [str(n.target) for n in graph.graph.nodes]
    assert not [name for name in names if "copy_" in name or "clone" in name]
    assert len([name for name in names if "rope_compile.rope" in name]) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_tokens(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", TABLE)
            self.register_buffer("inv_freq", INV_FREQ)

        def forward(self, q, k, positions):
            return apply_rope(q, k, positions, self.table, inv_freq=self.inv_freq)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(
        Layer(), make(5), dynamic_shapes=({0: tokens},) * 3, strict=strict
    )
    assert any(node.target is rope_op for node in exported.graph.nodes)
    for size in (2, 3, 17, 4096):
        for out, expected in zip(exported.module()(*make(size)), rotate(*make(size)), strict=True):
            assert torch.equal(out, expected)


def test_autocast_and_inference_mode_change_nothing_under_compile() -> None:
    arguments = make(9)
    expected = rotate(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = torch.compile(rotate, fullgraph=True)(*arguments)
    with torch.inference_mode():
        inference = torch.compile(rotate, fullgraph=True)(*arguments)
    for outs in (autocast, inference):
        for out, wanted in zip(outs, expected, strict=True):
            assert out.dtype == torch.float32
            assert torch.equal(out, wanted)


def test_bad_input_is_named_while_compiling_too() -> None:
    q, k, positions = make(5)
    with pytest.raises(Exception, match="positions must be int32 or int64"):
        torch.compile(rotate, fullgraph=True)(q, k, positions.float())
    with pytest.raises(Exception, match="must be on one device"):
        torch.compile(lambda q: apply_rope(q, None, positions, TABLE.to("meta")), fullgraph=True)(q)
