"""The code that Inductor writes around the operator for a GPU, read without one.

What is promised here: one launch for q and k, inlined into the wrapper, with views passed as views
and 16-byte accesses for every token count. Inductor's text changes with each release, so facts are
asserted, and the two graphs that it starts from, which do not change (torch 2.13 and 2.14).

``python test_inductor_cuda_text.py`` compiles the cases and prints what it found as JSON. Gradients
are absent: tracing them for CUDA tensors needs a CUDA device (autograd's engine asks it for its
streams), so ``test_backward_is_the_operator_itself`` looks at the graph of CPU tensors.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import expecttest
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.testing import FileCheck

import rope_compile as rc

from inductor_text import Found, cuda, inductor_code, printed, unbacked
from support import randn, run_child

TOKENS = 77  # a prime, equal to no other size
HEADS = (32, 8)
PACKED = [32, 8, 8]

# --------------------------------------------------------------------------------- what is compiled


def table(width: int = 128) -> tuple[Tensor, Tensor]:
    """4096 rows and their frequencies."""
    return cuda(4096, width, dtype=torch.float32), cuda(width // 2, dtype=torch.float32)


def positions(*lead: int, tokens: int = TOKENS, dtype: torch.dtype = torch.int64) -> Tensor:
    return cuda(*lead, tokens, dtype=dtype)


def q_and_k(width: int = 128) -> tuple[Tensor, Tensor]:
    return cuda(TOKENS, HEADS[0], width), cuda(TOKENS, HEADS[1], width)


def plain() -> tuple[Tensor, ...]:
    return positions(), *table(), *q_and_k()


def projection() -> tuple[Tensor, ...]:
    """What a packed projection needs: x and its weight."""
    return positions(), *table(), cuda(TOKENS, 4096), cuda(4096, 6144)


def marked(make: Callable[[], tuple[Tensor, ...]], *which: int) -> Callable[[], tuple[Tensor, ...]]:
    """The token counts of these arguments vary (``mark_dynamic``)."""

    def make_marked() -> tuple[Tensor, ...]:
        made = make()
        for i in which:
            torch._dynamo.mark_dynamic(made[i], 0)
        return made

    return make_marked


def rotate(at, cache, inv_freq, q, k, **more):
    return rc.apply_rope(q, k, at, cache, inv_freq=inv_freq, **more)


def inverse(*arguments):
    return rotate(*arguments, inverse=True)


def interleaved(*arguments):
    return rotate(*arguments, style="interleaved")


def multi_axis(*arguments):
    return rotate(*arguments, axes=rc.ChunkedAxes((16, 24, 24)))


def q_only(at, cache, inv_freq, q):
    return rotate(at, cache, inv_freq, q, None)[0]


def packed(at, cache, inv_freq, x, weight):
    """A projection, its slices rotated, and work behind it: nothing of it may become a copy."""
    q, k, v = (x @ weight).view(-1, 48, 128).split(PACKED, 1)
    q, k = rotate(at, cache, inv_freq, q, k)
    return q.relu(), k, v


def packed_copied(at, cache, inv_freq, x, weight):
    """Wrong twin: its author made the slice of q contiguous first."""
    q, k, v = (x @ weight).view(-1, 48, 128).split(PACKED, 1)
    q = q.clone(memory_format=torch.contiguous_format)  # .contiguous() needs a real device
    q, k = rotate(at, cache, inv_freq, q, k)
    return q.relu(), k, v


def apart(at, cache, inv_freq, q, k):
    """Wrong twin: a call for each."""
    return q_only(at, cache, inv_freq, q), q_only(at, cache, inv_freq, k)


def twice(at, cache, inv_freq, q, k):
    """Two layers of a model."""
    return rotate(at, cache, inv_freq, *(x.relu() for x in rotate(at, cache, inv_freq, q, k)))


def scaled(at, cache, inv_freq, q):
    """q alone, computed on the way in."""
    return q_only(at, cache, inv_freq, q * 2)


def odd(at, cache, inv_freq, x, start):
    """Wrong twins: heads whose rows, or whose first element, lie between 16-byte boundaries."""
    return q_only(at, cache, inv_freq, x.narrow(1, start, 4096).view(-1, 32, 128))


def flat(at, cache, inv_freq, x, weight):
    """The projection split before its heads are seen, as vLLM and SGLang do it."""
    q, k, v = (x @ weight).split([4096, 1024, 1024], -1)
    q, k = rotate(at, cache, inv_freq, q.view(-1, 32, 128), k.view(-1, 8, 128))
    return q.relu(), k, v


def in_place(at, cache, inv_freq, x, weight):
    """Rotated where the projection wrote it."""
    q, k, v = (x @ weight).view(-1, 48, 128).split(PACKED, 1)
    rc.apply_rope_(q, k, at, cache, inv_freq=inv_freq)
    return q.relu(), k.relu(), v.relu()


def in_place_whole(at, cache, inv_freq, q, k):
    q, k = q * 2, k * 2
    rc.apply_rope_(q, k, at, cache, inv_freq=inv_freq)
    return q, k


def in_place_inputs(at, cache, inv_freq, q, k):
    rc.apply_rope_(q, k, at, cache, inv_freq=inv_freq)
    return q.relu()


def transposed(at, cache, inv_freq, q, k):
    """The layout of transformers, [batch, heads, seq, head_dim], seen through a view."""
    q, k = rotate(at, cache, inv_freq, q.transpose(1, 2), k.transpose(1, 2))
    return q.transpose(1, 2), k.transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What scaled_dot_product_attention becomes on such a device; the choice needs a real one."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def attention(at, cache, inv_freq, x, *weights, rope=True):
    """As models of transformers write it, between projections."""
    batch, seq, _ = x.shape
    q, k, v = ((x @ w).view(batch, seq, -1, 128).transpose(1, 2) for w in weights[:3])
    if rope:
        q, k = transposed(at, cache, inv_freq, q, k)
    return attend(q, k, v).transpose(1, 2).reshape(batch, seq, -1) @ weights[3]


def attention_bare(*arguments):
    return attention(*arguments, rope=False)


def attention_arguments(seq: int | torch.SymInt = TOKENS) -> tuple[Tensor, ...]:
    weights = (cuda(1024, 1024), cuda(1024, 256), cuda(1024, 256), cuda(1024, 1024))
    return positions(tokens=seq), *table(), cuda(3, seq, 1024), *weights


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def layer(at, cache, inv_freq, x, norm_1, norm_2, qkv, out, up, down, rope=True):
    """A decoder layer: RMSNorm, packed projection, rotation, attention, MLP."""
    batch, seq, _ = x.shape
    q, k, v = (norm(x, norm_1) @ qkv).view(batch, seq, 12, 128).split([8, 2, 2], 2)
    if rope:
        q, k = rotate(at, cache, inv_freq, q, k)
    heads = attend(*(x.transpose(1, 2) for x in (q, k, v)))
    x = x + heads.transpose(1, 2).reshape(batch, seq, -1) @ out
    gate, value = (norm(x, norm_2) @ up).chunk(2, -1)
    return x + (F.silu(gate) * value) @ down


def layer_bare(*arguments):
    return layer(*arguments, rope=False)


def layer_arguments() -> tuple[Tensor, ...]:
    norms = cuda(1024), cuda(1024)
    weights = cuda(1024, 1536), cuda(1024, 1024), cuda(1024, 5632), cuda(2816, 1024)
    return positions(), *table(), cuda(3, TOKENS, 1024), *norms, *weights


def unbacked_projection() -> tuple[Tensor, ...]:
    return positions(tokens=unbacked()), *table(), cuda(unbacked(), 4096), cuda(4096, 6144)


# Name -> function, its arguments, dynamic.
CASES: dict[str, tuple[Callable[..., object], Callable[[], tuple[Tensor, ...]], bool | None]] = {
    "plain": (rotate, plain, None),
    "dynamic": (rotate, plain, True),
    "tokens": (rotate, marked(plain, 0, 3, 4), None),
    "partial": (rotate, lambda: (positions(), *table(), *q_and_k(192)), True),
    "inverse": (inverse, plain, None),
    "interleaved": (interleaved, plain, None),
    "int32": (rotate, lambda: (positions(dtype=torch.int32), *table(), *q_and_k()), None),
    "multi_axis": (multi_axis, lambda: (positions(3), *table(), *q_and_k()), None),
    "q_only": (q_only, lambda: plain()[:4], None),
    "transposed": (
        transposed,
        lambda: (positions(), *table(), cuda(3, 32, TOKENS, 128), cuda(3, 8, TOKENS, 128)),
        None,
    ),
    "packed": (packed, projection, None),
    "flat": (flat, projection, None),
    "packed_tokens": (packed, marked(projection, 0, 3), None),
    "packed_unbacked": (packed, unbacked_projection, None),
    "scaled": (scaled, lambda: plain()[:4], None),
    "twice": (twice, plain, None),
    "attention": (attention, attention_arguments, None),
    "attention_bare": (attention_bare, attention_arguments, None),
    "layer": (layer, layer_arguments, None),
    "layer_bare": (layer_bare, layer_arguments, None),
    "in_place": (in_place, projection, None),
    "in_place_whole": (in_place_whole, plain, None),
    "in_place_inputs": (in_place_inputs, plain, None),
    "packed_copied": (packed_copied, projection, None),
    "apart": (apart, plain, None),
    "odd_rows": (partial(odd, start=0), lambda: (*plain()[:3], cuda(TOKENS, 4097)), None),
    "odd_start": (partial(odd, start=1), lambda: (*plain()[:3], cuda(TOKENS, 4104)), None),
}
BARE = ["plain", "dynamic", "tokens", "partial", "inverse", "interleaved", "int32", "multi_axis"]
PACKED_CASES = ["packed", "flat", "packed_tokens", "packed_unbacked"]
FUNCTIONAL = [*BARE, *PACKED_CASES, "q_only", "transposed", "attention", "layer"]
if not torch.backends.cuda.is_built():
    # Writing back to a graph input takes a copy_ between fake CUDA tensors.
    del CASES["in_place_inputs"]


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """Every case, compiled in one child process: a CPU build of torch may end it."""
    output = run_child("-W", "ignore", str(Path(__file__)))
    return {name: Found(**values) for name, values in json.loads(output).items()}


# ------------------------------------------------------------------------------------ what is asked


def check_one_launch(facts: Found) -> None:
    """The kernel is inlined and launched once, and no operator of ours is called."""
    FileCheck().check_count("rope_kernel_0.run(", 1, exactly=True).run(facts.calls)
    FileCheck().check_not("torch.ops.rope_compile").check_not("rope_kernel_1").run(facts.calls)


def check_kernels(facts: Found, *names: str, allocations: int) -> None:
    """Beside ours only these run, each once, and no more memory is taken than that."""
    assert len(facts.others) == len(names), facts.others
    for kernel, name in zip(facts.others, names, strict=True):
        assert name in kernel, facts.others
    assert facts.allocations == allocations


def check_wide(facts: Found) -> None:
    """q, k and the table are known to allow 16-byte accesses, for every token count.

    ``tests/test_ptx.py`` shows that the kernel then makes them: strides are multiples of ALIGN,
    pointers of 16 bytes, and widths are plain numbers.
    """
    for constants, aligned in zip(facts.constants, facts.aligned, strict=True):
        assert (constants["ALIGN"], constants["CACHE_ALIGN"]) == (8, 4)
        assert constants["LANES"] == 64
        pointers = {"q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", "cos_sin_cache_ptr"}
        assert pointers <= {*aligned}


# ------------------------------------------------------------------------------------------- graphs


def test_graph_of_dynamo(found: dict[str, Found]) -> None:
    """One node, the operator itself; of the inputs %3 is inv_freq and %4 the table."""
    expecttest.assert_expected_inline(
        found["packed"].dynamo,
        """\
%5 = matmul(%0, %1)
%6 = view(%5, -1, 48, 128)
%7 = split(%6, [32, 8, 8], 1)
%8 = getitem(%7, 0)
%9 = getitem(%7, 1)
%10 = getitem(%7, 2)
%11 = rope_compile.rope.default(%8, %9, %3, %2, %4, (), half, 0, 1, False)
%12 = getitem(%11, 0)
%13 = getitem(%11, 1)
%14 = relu(%12)
return %14, %13, %10""",
    )


def test_functional_graph(found: dict[str, Found]) -> None:
    """Views of the projection go into the launch, two new tensors come out of it."""
    expecttest.assert_expected_inline(
        found["packed"].aot,
        """\
%5 = aten.mm.default(%0, %1)
%6 = aten.view.default(%5, [-1, 48, 128])
%7 = aten.split_with_sizes.default(%6, [32, 8, 8], 1)
%8 = getitem(%7, 0)
%9 = getitem(%7, 1)
%10 = getitem(%7, 2)
%11 = aten.empty.memory_format([77, 32, 128])
%12 = aten.empty.memory_format([77, 8, 128])
%13 = aten.expand.default(%3, [77])
%14 = aten.unsqueeze.default(%8, 0)
%15 = aten.unsqueeze.default(%9, 0)
%16 = aten.unsqueeze.default(%11, 0)
%17 = aten.unsqueeze.default(%12, 0)
%18 = aten.unsqueeze.default(%13, -2)
%19 = triton_kernel_wrapper_functional(
    q_ptr=%14, k_ptr=%15, q_out_ptr=%16, k_out_ptr=%17,
    positions_ptr=%18, cos_sin_cache_ptr=%2, inv_freq_ptr=%4)
%20 = getitem(%19, q_out_ptr)
%21 = getitem(%19, k_out_ptr)
%22 = aten.squeeze.dim(%20, 0)
%23 = aten.squeeze.dim(%21, 0)
%24 = aten.relu.default(%22)
return %24, %23, %10""",
    )


def test_functional_graph_in_place(found: dict[str, Found]) -> None:
    """A mutation stays one call of the operator, whose views Inductor rebuilds from their base."""
    expecttest.assert_expected_inline(
        found["in_place_whole"].aot,
        """\
%5 = aten.mul.Tensor(%0, 2)
%6 = aten.mul.Tensor(%1, 2)
%7 = auto_functionalized_v2(rope_compile.rope_.default)
%8 = getitem(%7, 1)
%9 = getitem(%7, 2)
return %8, %9""",
    )


@pytest.mark.parametrize("inverse", [False, True])
def test_backward_is_the_operator_itself(inverse: bool) -> None:
    """The gradient's graph: one call with ``inverse`` flipped, and nothing of q or k saved."""
    graphs = []

    def keep(graph, _inputs):
        graphs.append(printed(graph))
        return make_boxed_func(graph)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    rope = rc.get_rope(rc.RopeConfig(head_dim=16, max_position=128), "cpu")
    q, k = randn(5, 3, 16).requires_grad_(), randn(5, 2, 16).requires_grad_()
    compiled = torch.compile(rope, fullgraph=True, backend=backend)
    outs = compiled(torch.arange(5), q, k, inverse=inverse)
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    forward, backward = (graph.splitlines() for graph in graphs)
    call = "%5 = rope_compile.rope.default({}, [], half, 0, 1.0, {})"
    assert forward[0] == call.format("%0, %1, %2, %3, %4", inverse)
    # The inputs are positions, table, frequencies and the two gradients.
    assert backward[0] == call.format("%3, %4, %0, %1, %2", not inverse)
    gets = ["%6 = getitem(%5, 0)", "%7 = getitem(%5, 1)"]
    assert forward[1:] == [*gets, "return %6, %7, %2, %3, %4"]  # saved: neither q nor k
    assert backward[1:] == [*gets, "return %6, %7, None, None, None"]


# ----------------------------------------------------------------------------------- one launch


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_one_launch_serves_q_and_k(found: dict[str, Found], case: str) -> None:
    check_one_launch(found[case])


def test_two_launches_are_seen(found: dict[str, Found]) -> None:
    """Wrong twins: one call for q and one for k, and two layers."""
    for case in ("apart", "twice"):
        with pytest.raises(RuntimeError, match="Expected to"):
            check_one_launch(found[case])


def test_layers_share_one_binary(found: dict[str, Found]) -> None:
    facts = found["twice"]
    assert facts.launches.count("rope_kernel_0") == len(facts.rope) == 2
    assert len(facts.constants) == 1
    assert len(found["apart"].constants) == 2  # other head counts, another binary


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("inverse", "INVERSE", True),
        ("plain", "INVERSE", False),
        ("interleaved", "READ", 1),
        ("multi_axis", "AXIS_COUNT", 3),
        ("q_only", "K_HEADS", 0),
        ("partial", "Q_HEAD_DIM", 192),
    ],
)
def test_launch_is_of_the_kind_asked_for(found: dict[str, Found], case, name, value) -> None:
    assert found[case].constants[0][name] == value


# ---------------------------------------------------------------------------------- no copies


@pytest.mark.parametrize("case", [*BARE, "transposed"])
def test_only_the_results_are_allocated(found: dict[str, Found], case: str) -> None:
    check_kernels(found[case], allocations=2)


def test_q_alone_allocates_one_result(found: dict[str, Found]) -> None:
    check_kernels(found["q_only"], allocations=1)


@pytest.mark.parametrize("case", PACKED_CASES)
def test_packed_qkv_slices_stay_views(found: dict[str, Found], case: str) -> None:
    """q and k enter the kernel as views of the projection's own memory, at their offsets."""
    facts = found[case]
    check_kernels(facts, "relu", "mm", allocations=4)  # the projection, q, k, relu
    seq = facts.rope[0]["seq"]
    (buffer,) = re.findall(r"extern_kernels.mm\(.*out=(\w+)\)", facts.calls)
    strides = f"({6144 * TOKENS}, 6144, 128, 1)" if seq == "77" else f"(6144 * {seq}, 6144, 128, 1)"
    for pointer, heads, offset in (("q_ptr", 32, 0), ("k_ptr", 8, 4096)):
        view = f"reinterpret_tensor({buffer}, (1, {seq}, {heads}, 128), {strides}, {offset})"
        assert facts.rope[0][pointer] == view


def test_a_copy_is_seen(found: dict[str, Found]) -> None:
    """Wrong twin: the slice of q is made contiguous, which Inductor names and allocates."""
    facts = found["packed_copied"]
    with pytest.raises(AssertionError, match="clone"):
        check_kernels(facts, "relu", "mm", allocations=4)
    assert "reinterpret_tensor" not in facts.rope[0]["q_ptr"]


def test_layout_of_transformers_goes_in_as_a_view(found: dict[str, Found]) -> None:
    facts = found["transposed"].rope[0]
    assert facts["q_ptr"].endswith("(3, 77, 32, 128), (315392, 128, 9856, 1), 0)")
    assert facts["k_ptr"].endswith("(3, 77, 8, 128), (78848, 128, 9856, 1), 0)")


@pytest.mark.parametrize("case", ["attention", "layer"])
def test_a_layer_gains_one_kernel_and_nothing_else(found: dict[str, Found], case: str) -> None:
    """Into attention, out of projections: the other kernels are those of the layer without it."""
    assert found[case].others == found[case + "_bare"].others
    assert len(found[case].launches) == len(found[case + "_bare"].launches) + 1
    # q and k, where the layer without it hands views of the projections to attention.
    assert found[case].allocations <= found[case + "_bare"].allocations + 2
    FileCheck().check("rope_kernel_0.run(").check("flash_attention.default(reinterpret").run(
        found[case].calls
    )


# ---------------------------------------------------------------------------- every token count

DYNAMIC = ["dynamic", "tokens", "partial", "packed_tokens", "packed_unbacked"]


@pytest.mark.parametrize("case", DYNAMIC)
def test_token_count_is_a_symbol(found: dict[str, Found], case: str) -> None:
    """One graph for every token count: the launch and its grid compute with the symbol."""
    arguments = found[case].rope[0]
    seq = arguments["seq"]
    assert re.fullmatch(r"[su]\d+", seq)
    assert seq in arguments["grid"]
    assert seq in arguments["heads_per_program"]
    assert not re.search(rf"\b{TOKENS}\b", " ".join(arguments.values()))


@pytest.mark.parametrize("case", DYNAMIC)
def test_token_counts_are_not_guarded(found: dict[str, Found], case: str) -> None:
    """A token count must be k's and the positions' too, and fit 32 bits with its strides."""
    sizes = {found[case].rope[0][name] for name in ("seq", "stride_positions_batch")}
    for guard in found[case].guards:
        if re.fullmatch(r"Eq\(([su]\d+), ([su]\d+)\)", guard):
            continue
        bound = re.fullmatch(r"(?:(\d+)\*)?s\d+ <= 2147483647", guard)
        if bound is None:
            assert not any(re.search(rf"\b{size}\b", guard) for size in sizes), guard
        else:
            assert int(bound[1] or 1) <= 4096  # half a million tokens of any batch at least
    assert (found["packed_unbacked"].guards) == []


@pytest.mark.parametrize("case", [*FUNCTIONAL, "twice"])
def test_compiled_code_keeps_wide_accesses(found: dict[str, Found], case: str) -> None:
    check_wide(found[case])


@pytest.mark.parametrize(("case", "align"), [("odd_rows", 1), ("odd_start", 8)])
def test_lost_alignment_is_seen(found: dict[str, Found], case: str, align: int) -> None:
    """Wrong twins: an odd row is known by its stride, an odd start by its pointer."""
    facts = found[case]
    assert facts.constants[0]["ALIGN"] == align
    assert ("q_ptr" in facts.aligned[0]) == (case == "odd_rows")
    with pytest.raises(AssertionError):
        check_wide(facts)


# ------------------------------------------------------------------------------------- in place

# Kernels that run beside the rotation, and buffers: what the function itself needs.
IN_PLACE = {
    "in_place": (["relu", "relu", "relu", "mm"], 4),
    "in_place_whole": (["mul", "mul"], 2),
    "in_place_inputs": (["relu"], 1),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place_costs_one_call_and_no_copy(found: dict[str, Found], case: str) -> None:
    """Slices of packed qkv are written where they lie; the operator is called, not inlined."""
    if case not in found:
        pytest.skip("writing back to graph inputs needs a torch that is linked with CUDA")
    kernels, buffers = IN_PLACE[case]
    check_kernels(found[case], *kernels, "rope_compile.rope_.default", allocations=buffers)
    assert "rope_kernel" not in found[case].calls


def test_an_absent_k_costs_nothing(found: dict[str, Found]) -> None:
    """q is computed once, for a launch that has no k."""
    check_one_launch(found["scaled"])
    check_kernels(found["scaled"], "mul", allocations=2)


if __name__ == "__main__":
    names = sys.argv[1:] or CASES
    results = {
        name: inductor_code(f, make, dynamic=d) for name in names for f, make, d in [CASES[name]]
    }
    sys.stdout.write(json.dumps({name: dataclasses.asdict(x) for name, x in results.items()}))
