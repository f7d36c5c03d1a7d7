"""Fault group D: the contract of a registered operator, with autograd and with Inductor.

The labels are those of test_faults_index.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import pytest
import torch
from test_faults_index import BACKENDS, IN_PLACE, assert_right, rest_of
from torch import Tensor
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.testing._internal.optests import OpCheckError

from rope_compile import RopeConfig, RotaryEmbedding
from rope_compile.kernels import triton_rope
from rope_compile.ops import rope_inplace_op, rope_op

from support import LAYOUTS, make_layout, randn

compiles = pytest.mark.usefixtures("fresh_compiler")
ROPE = RotaryEmbedding(
    RopeConfig(head_dim=8, max_position=128, rotary_dim=4, rotary_offset=2), "cpu"
)
EDGES = torch.tensor([0, 127, 128, -1, 2**31 - 1])
OVERLAPPING = ("expanded_head",)  # refused in place: its heads share memory


def case(layout: str, dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Tensor, ...]:
    """q, k and positions on both sides of the table's end."""
    q, k = (make_layout(layout, 5, heads, 8, dtype, seed=heads) for heads in (3, 2))
    if grad:
        q, k = (x.detach().requires_grad_() for x in (q, k))
    return q, k, EDGES[: q.shape[0]]


def twin(name: str, schema: str, body: Callable, fake: Callable) -> tuple[object, object]:
    """A deliberately wrong operator, and the library that keeps it."""
    library = torch.library.Library(f"rope_fault_{name}", "DEF")
    library.define(f"rope{schema}")
    library.impl("rope", body, "CPU")
    torch.library.register_fake(f"rope_fault_{name}::rope", fake, lib=library)
    return library, getattr(torch.ops, f"rope_fault_{name}").rope.default


# --------------------------------------------------------------------------------------------- D1


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_d1_opcheck_passes_on_every_layout(layout: str, grad: bool) -> None:
    """Fake output strides differ from real ones, pytorch/pytorch #143579: all four utilities."""
    assert set(opcheck(rope_op, (*case(layout, grad=grad), *rest_of(ROPE))).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_d1_outputs_are_contiguous_whatever_comes_in(layout: str, dtype: torch.dtype) -> None:
    """A layout the compiler did not expect, pytorch/pytorch #186850: real and fake agree."""
    arguments = (*case(layout, dtype), *rest_of(ROPE))
    real = rope_op(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        fake = rope_op(*fakes)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.is_contiguous()


@pytest.mark.parametrize("grad", [False, True])
def test_d1_opcheck_passes_on_heads_of_a_packed_view(grad: bool) -> None:
    """Fake output strides differ from real ones, NVIDIA/cuEquivariance #223: a flat projection."""
    packed = randn(5, 192)
    q, k = packed[:, :64].view(5, 2, 32), packed[:, 64:96].view(5, 1, 32)
    assert q.stride() == (192, 32, 1)
    if grad:
        q, k = (x.detach().requires_grad_() for x in (q, k))
    rest = rest_of(RotaryEmbedding(RopeConfig(head_dim=32, max_position=128), "cpu"))
    assert set(opcheck(rope_op, (q, k, EDGES, *rest)).values()) == {"SUCCESS"}
    outs = rope_op(q, k, EDGES, *rest)
    assert [x.stride() for x in outs] == [(64, 32, 1), (32, 32, 1)]


def test_d1_strides_copied_from_the_input_would_be_found() -> None:
    """Wrong twin of NVIDIA/cuEquivariance #223: empty_like keeps a permutation."""
    packed = torch.empty(5, 192)[:, :96].view(5, 3, 32)
    assert packed.stride() == (192, 32, 1)
    assert torch.empty_like(packed).stride() == (96, 32, 1)
    _library, op = twin(
        "strides", "(Tensor q) -> Tensor", lambda q: q.new_empty(q.shape).copy_(q), torch.empty_like
    )
    permuted = make_layout("permuted", 5, 3, 8)
    assert not torch.empty_like(permuted).is_contiguous()
    with pytest.raises(OpCheckError, match="test_faketensor"):
        opcheck(op, (permuted,), test_utils="test_faketensor")


# --------------------------------------------------------------------------------------------- D2


def aliases(outs: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> bool:
    """Whether an output is an input, or shares memory with one, or with another output."""
    made = [x for x in outs if x is not None]
    given = [x for x in inputs if isinstance(x, Tensor)]
    if any(x is y for x in made for y in given) or len({id(x) for x in made}) < len(made):
        return True
    memory = [x.untyped_storage().data_ptr() for x in made if x.numel()]
    taken = {x.untyped_storage().data_ptr() for x in given if x.numel()}
    return bool(taken & set(memory)) or len(set(memory)) < len(memory)


WIDTH_0 = RotaryEmbedding(RopeConfig(head_dim=8, max_position=128, rotary_dim=0), "cpu")
SAME = randn(5, 3, 8)
EXITS = {
    "no tokens": (randn(0, 3, 8), randn(0, 2, 8)),
    "no k": (randn(5, 3, 8), None),
    "no q heads": (randn(5, 0, 8), randn(5, 2, 8)),
    "no k heads": (randn(5, 3, 8), randn(5, 0, 8)),
    "one token": (randn(1, 1, 8), randn(1, 1, 8)),
    "q is k": (SAME, SAME),
    "views of one tensor": tuple(randn(5, 5, 8).split([3, 2], 1)),
}


@pytest.mark.parametrize("rope", [ROPE, WIDTH_0], ids=["width 4", "width 0"])
@pytest.mark.parametrize("exit_", EXITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_d2_no_exit_returns_an_input(backend, exit_: str, rope: RotaryEmbedding) -> None:
    """Output aliases an input on one branch only, vllm-project/vllm PR #44130: on none."""
    q, k = EXITS[exit_]
    positions = EDGES[: q.shape[0]]
    arguments = (q, k, positions, *rest_of(rope))
    outs = backend(*arguments)
    assert not aliases(outs, arguments)
    assert_right(outs, (q, k), positions, rope.config)


def test_d2_an_alias_would_be_found() -> None:
    """Wrong twins of pytorch/pytorch #134278: an input returned, one tensor returned twice."""
    q = randn(5, 3, 8)
    assert aliases((q, None), (q, None))
    assert aliases((q.view(-1), None), (q, None))
    fresh = q.clone()
    assert aliases((fresh, fresh), (q, q))
    assert not aliases((fresh, q.clone()), (q, q))
    assert rope_inplace_op._schema.returns == []

    @torch.library.custom_op("rope_fault_alias::rope", mutates_args=("q",))
    def alias(q: Tensor) -> Tensor:
        return q

    with pytest.raises(RuntimeError, match="alias"):
        alias(q)


# --------------------------------------------------------------------------------------------- D3


def in_place(packed: Tensor, positions: Tensor) -> Tensor:
    q, k, v = packed.split([3, 2, 1], 1)
    ROPE.apply_(positions, q, k)
    return v


def functional(packed: Tensor, positions: Tensor) -> Tensor:
    q, k, _v = packed.split([3, 2, 1], 1)
    return ROPE(positions, q, k)[0]


def made_contiguous(packed: Tensor, positions: Tensor) -> Tensor:
    q, k, _v = packed.split([3, 2, 1], 1)
    return ROPE(positions, q.contiguous(), k.contiguous())[0]


def copies(function: Callable, *arguments: Tensor) -> int:
    """Buffers that Inductor's code allocates or copies beside what the operator returns."""
    torch.compiler.reset()
    # A cached graph writes no code. The rest of the cache knows how to compile for this CPU.
    uncached = inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False)
    with uncached[0], uncached[1], torch.no_grad():
        _, texts = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
    code = "\n".join(texts)
    assert "torch.ops.rope_compile.rope" in code
    body = code[code.index("def call(") : code.index("def benchmark_compiled_module")]
    return sum(body.count(word) for word in ("copy_(", "clone(", "empty_strided_cpu("))


@compiles
def test_d3_slices_of_a_packed_projection_are_not_copied() -> None:
    """Functionalisation clones q and k, pytorch/pytorch #131192: no copy in either form."""
    arguments = randn(5, 6, 8), EDGES
    assert copies(functional, *arguments) == 0
    assert copies(in_place, *arguments) == 0


@compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_d3_slices_rotated_in_place_equal_eager(backend: str) -> None:
    """Slices of one packed tensor, pytorch/pytorch #127660: result and base."""
    packed = randn(5, 6, 8)
    eager, compiled = packed.clone(), packed.clone()
    v_eager = in_place(eager, EDGES)
    v_compiled = torch.compile(in_place, fullgraph=True, backend=backend)(compiled, EDGES)
    assert torch.equal(compiled, eager)
    assert torch.equal(v_compiled, v_eager)
    q, k, v = packed.split([3, 2, 1], 1)
    assert_right(eager.split([3, 2, 1], 1)[:2], (q, k), EDGES, ROPE.config)
    assert torch.equal(v_eager, v)


@compiles
def test_d3_a_copy_would_be_counted() -> None:
    """Wrong twin of vllm-project/vllm PR #8480: slices made contiguous by their author."""
    assert copies(made_contiguous, randn(5, 6, 8), EDGES) == 2


# --------------------------------------------------------------------------------------------- D4


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).t().contiguous().t().view(5, 3, 8)


def padded(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of 27 elements: what padded shapes make of a stride of 24."""
    return torch.nn.functional.pad(x @ weight, (0, 3)).view(5, 27)[:, :24].unflatten(1, (3, 8))


def heads_first(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).view(5, 3, 8).transpose(0, 1).contiguous().transpose(0, 1)


def stride_2(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack((x @ weight, x), -1)[..., 0].view(5, 3, 8)


@compiles
def test_d4_intermediates_of_any_layout_are_right() -> None:
    """Inductor hands over other strides than traced, pytorch/pytorch #130243: read at run time."""
    weight, x = randn(24, 24, seed=3), randn(5, 24)
    producers = (transposed, padded, heads_first, stride_2)

    def block(x, positions):
        made = [producer(x, weight) for producer in producers]
        return made, [ROPE(positions, q)[0] for q in made]

    pairs = torch.compile(block, fullgraph=True)(x, EDGES)
    for q, out, producer in zip(*pairs, producers, strict=True):
        assert_right((out,), (q,), EDGES, ROPE.config)
        torch.testing.assert_close(q, producer(x, weight), rtol=1e-5, atol=1e-5)


@compiles
def test_d4_writes_to_intermediates_of_any_layout_arrive() -> None:
    """A layout change lost a mutated argument's write, pytorch/pytorch PR #133639: in place."""
    weight, x = randn(24, 24, seed=3), randn(5, 24)
    producers = (transposed, padded, heads_first, stride_2)

    def block(x, positions):
        made = [producer(x, weight) for producer in producers]
        before = [q.clone() for q in made]
        for q in made:
            ROPE.apply_(positions, q)
        base = torch.nn.functional.pad(x @ weight, (0, 3), value=777.0)
        view = base[:, :24].unflatten(1, (3, 8))
        before.append(view.clone())
        ROPE.apply_(positions, view)
        return before, [*made, base[:, :24].unflatten(1, (3, 8))], base

    before, after, base = torch.compile(block, fullgraph=True)(x, EDGES)
    for q, out in zip(before, after, strict=True):
        assert not torch.equal(q, out)
        assert_right((out,), (q,), EDGES, ROPE.config)
    assert (base[:, 24:] == 777.0).all()


def test_d4_the_layout_tag_is_chosen() -> None:
    """A fixed-stride tag lost a mutated argument's write, pytorch/pytorch PR #133639: flexible."""
    for op in (rope_op, rope_inplace_op):
        assert torch.Tag.flexible_layout in op.tags
        assert not {torch.Tag.needs_fixed_stride_order, torch.Tag.needs_exact_strides} & set(
            op.tags
        )


def test_d4_strides_assumed_from_the_trace_would_be_found() -> None:
    """Wrong twin of pytorch/pytorch #137979: a kernel that takes its input for contiguous."""
    q = make_layout("permuted", 5, 3, 8)
    assumed = q.as_strided(q.shape, (24, 8, 1))
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(rope_op(assumed, None, EDGES, *rest_of(ROPE)), (q, None), EDGES, ROPE.config)


# --------------------------------------------------------------------------------------------- D5


def written(op, arguments: Sequence[object]) -> list[int]:
    """Indices of the arguments that a call changes."""
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    op(*arguments)
    return [
        i
        for i, (old, new) in enumerate(zip(before, arguments, strict=True))
        if isinstance(old, Tensor) and not torch.equal(old, new)
    ]


def declared(op) -> list[int]:
    """Indices of the arguments that a schema says are written."""
    return [
        i
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in OVERLAPPING])
@pytest.mark.parametrize("form", ["", "_"])
@pytest.mark.parametrize("name", ["rope", "rope_torch"])
def test_d5_what_is_written_is_what_is_declared(name: str, form: str, layout: str) -> None:
    """Writes and schema disagree, sgl-project/sglang PR #19636: every argument, both ways."""
    op = getattr(torch.ops.rope_compile, name + form).default
    arguments = (*case(layout), *rest_of(ROPE))
    assert declared(op) == ([0, 1] if form else [])
    turns = bool(arguments[2].any())  # position 0 turns nothing
    assert written(op, arguments) == (declared(op) if turns else [])
    opcheck(op, (*case(layout), *rest_of(ROPE)), test_utils="test_schema")


@pytest.mark.interpret
def test_d5_the_triton_kernel_writes_what_is_declared() -> None:
    """Writes and schema disagree, sgl-project/sglang PR #19636: the kernel behind the schemas."""
    fresh, same = (param.values[0] for param in (BACKENDS[-1], IN_PLACE[-1]))
    for layout in ("contiguous", "packed_qkv"):
        arguments = (*case(layout), *rest_of(ROPE))
        assert written(fresh, arguments) == declared(rope_op)
        assert written(same, arguments) == declared(rope_inplace_op)


def test_d5_an_undeclared_write_would_be_found() -> None:
    """Wrong twin of pytorch/pytorch #91249: undefined behaviour that both checks see."""
    _library, op = twin(
        "write", "(Tensor q) -> Tensor", lambda q: q.mul_(2).clone(), lambda q: q.clone()
    )
    assert (written(op, (randn(5, 3, 8),)), declared(op)) == ([0], [])
    with pytest.raises(OpCheckError, match="test_schema"):
        opcheck(op, (randn(5, 3, 8),), test_utils="test_schema")


# --------------------------------------------------------------------------------------------- D6


def constants(tokens: int | torch.SymInt, head_dim: int = 64) -> dict[str, object]:
    """What the Triton kernel is compiled for; nothing runs."""
    q = torch.empty(1, tokens, 8, head_dim, device="meta")
    at = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    table, inv_freq = torch.empty(128, 64, device="meta"), torch.empty(32, device="meta")
    _, arguments = triton_rope.launch_arguments(
        [(q, q)], at, table, inv_freq, (), "half", 0, 1.0, False
    )
    return {name: x for name, x in arguments.items() if name.isupper()}


def test_d6_constants_are_plain_and_of_the_model() -> None:
    """A dynamic value reaches a constexpr, pytorch/pytorch #136504: none is of the token count."""
    first = constants(5)
    assert all(type(x) in (int, bool) for x in first.values())
    assert all(constants(n) == first for n in (1, 2, 16, 17, 4096, 100_000))


def test_d6_nothing_is_tuned_at_run_time() -> None:
    """Trial runs of autotuning rotate the data, pytorch/pytorch #120802: there is no tuner."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    kernel = triton_rope.rope_kernel
    assert not isinstance(kernel, Autotuner | Heuristics)
    assert "autotune(" not in inspect.getsource(triton_rope)


@pytest.mark.parametrize("layout", ["contiguous", "packed_qkv", "permuted"])
@pytest.mark.parametrize("op", IN_PLACE)
def test_d6_the_first_call_is_the_second(op, layout: str) -> None:
    """The first result of a tuned in-place kernel is wrong, pytorch/pytorch #136550: not here."""
    results = []
    for _ in range(2):
        q, k, positions = case(layout)
        op(q, k, positions, *rest_of(ROPE))
        results.append((q, k))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert_right(results[0], case(layout)[:2], EDGES, ROPE.config)


def test_d6_a_constant_of_the_token_count_would_be_found() -> None:
    """Wrong twin of pytorch/pytorch #137024: another head size is another binary, and seen."""
    assert constants(5, head_dim=64) != constants(5, head_dim=128)


# --------------------------------------------------------------------------------------------- D7


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast_to", [torch.bfloat16, torch.float16])
def test_d7_autocast_changes_nothing(dtype: torch.dtype, autocast_to: torch.dtype) -> None:
    """No kernel under the autocast key, intel/intel-xpu-backend-for-triton #5366: none."""
    q, k, positions = case("contiguous", dtype)
    expected = ROPE(positions, q, k)
    compiled = torch.compile(ROPE, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", autocast_to):
        eager, traced = ROPE(positions, q, k), compiled(positions, q, k)
        written_q, written_k = q.clone(), k.clone()
        ROPE.apply_(positions, written_q, written_k)
    for outs in (eager, traced, (written_q, written_k)):
        for out, wanted in zip(outs, expected, strict=True):
            assert out.dtype == dtype
            assert torch.equal(out, wanted)


def test_d7_gradients_pass_through_autocast() -> None:
    """No kernel under the autocast key, intel/intel-xpu-backend-for-triton #5366: in training."""
    grads = []
    for enabled in (False, True):
        q, k, positions = case("contiguous", grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            q_out, k_out = ROPE(positions, q, k)
        (q_out.sum() + k_out.square().sum()).backward()
        grads.append((q.grad, k.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_d7_autocast_is_in_force() -> None:
    """The twin of intel/intel-xpu-backend-for-triton #5366: a matmul comes out in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        assert (randn(3, 3) @ randn(3, 3)).dtype == torch.bfloat16


# -------------------------------------------------------------------------------------------- D10


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "packed_qkv"])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_d10_gradients_are_right_in_and_outside_the_table(style: str, layout: str) -> None:
    """No gradient at all, huggingface/candle PR #3612: gradcheck in float64, partial rotary."""
    made = RopeConfig(head_dim=8, max_position=128, rotary_dim=4, rotary_offset=2, style=style)
    rope = RotaryEmbedding(made, "cpu")
    q, k, positions = case(layout, torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda q, k: rope(positions, q, k), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: rope(positions, q, k), (q, k))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_d10_backward_and_forward_cancel(backend, style: str) -> None:
    """A backward that is no inverse rotation, baidu-baige/LoongForge PR #106: x comes back."""
    rope = RotaryEmbedding(RopeConfig(head_dim=8, max_position=128, style=style), "cpu")
    positions, x = torch.arange(128), randn(128, 2, 8, dtype=torch.float64)
    there = backend(x, None, positions, *rest_of(rope))[0]
    back = backend(there, None, positions, *rest_of(rope, inverse=True))[0]
    cos, sin = rope.cos_sin_cache.double().chunk(2, -1)
    norm = cos.square() + sin.square()
    norm = torch.cat((norm, norm), -1) if style == "half" else norm.repeat_interleave(2, -1)
    assert (back - x * norm.unsqueeze(1)).abs().max() <= 1e-12
    assert (norm - 1).abs().max() <= 8.5e-8


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_d10_backward_and_forward_cancel_outside_the_table(backend, style: str) -> None:
    """A backward that is no inverse rotation, baidu-baige/LoongForge PR #106: computed rows too."""
    rope = RotaryEmbedding(RopeConfig(head_dim=8, max_position=128, style=style), "cpu")
    positions = torch.tensor([-(2**31), -7, -1, 128, 5000, 2**20 + 1, 2**31 - 1])
    x = randn(7, 2, 8, dtype=torch.float64)
    there = backend(x, None, positions, *rest_of(rope))[0]
    back = backend(there, None, positions, *rest_of(rope, inverse=True))[0]
    assert (there - x).abs().amax((1, 2)).min() > 0.1
    # What is left is cos ** 2 + sin ** 2 of two rounded numbers; a cross term would be seen.
    assert ((back - x).abs() <= 1.2e-7 * x.abs() + 1e-12).all()


def test_d10_a_view_rotated_in_place_gets_no_wrong_gradient() -> None:
    """Q and K mutated behind autograd's back, unslothai/unsloth #5001: refused; else right."""
    x, positions = randn(5, 24), EDGES
    weight = randn(24, 24, seed=3).requires_grad_()
    view = (x @ weight).view(5, 3, 8)
    with pytest.raises(RuntimeError, match="must not require grad"):
        ROPE.apply_(positions, view)
    (ROPE(positions, view)[0] * randn(5, 3, 8, seed=4)).sum().backward()
    incoming = ROPE(positions, randn(5, 3, 8, seed=4), inverse=True)[0]
    torch.testing.assert_close(weight.grad, x.t() @ incoming.view(5, 24), rtol=1e-5, atol=1e-6)


def test_d10_a_saved_tensor_is_not_used_after_a_write() -> None:
    """Saved tensors corrupted in place, NVIDIA/Megatron-LM PR #5412: autograd complains."""
    weight, q = torch.ones(5, 3, 8, requires_grad=True), randn(5, 3, 8)
    loss = (q * weight).sum()  # saves q for the gradient of weight
    ROPE.apply_(EDGES, q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_d10_an_operator_without_gradient_would_be_found() -> None:
    """Wrong twin of huggingface/candle PR #3612: it raises at backward only, not at forward."""

    @torch.library.custom_op("rope_fault_grad::rope", mutates_args=())
    def without_gradient(q: Tensor) -> Tensor:
        return q.clone()

    out = without_gradient(randn(5, 3, 8).requires_grad_())
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.sum().backward()
    assert rope_op(*case("contiguous", grad=True), *rest_of(ROPE))[0].grad_fn is not None
