"""The operators' contract: opcheck over layouts, gradients, vmap, mutation, refusal, and values."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError
from torch.library import opcheck
from torch.testing._internal.optests import OpCheckError

from rope_compile.kernels import cpu
from rope_compile.ops import rope_inplace_op, rope_op

from oracle import assert_near_oracle, oracle_rotate, oracle_table
from support import (
    LAYOUTS,
    assert_guard_intact,
    edge_positions,
    guarded,
    make_layout,
    randn,
    ulp_distance,
)

rope_torch = torch.ops.rope_compile.rope_torch.default
ROWS = 128
STYLES = ("half", "interleaved")


def frequencies(rotary_dim: int, base: float = 1e4, dtype=torch.float32) -> torch.Tensor:
    lanes = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
    return (1.0 / base ** (lanes / max(rotary_dim, 1))).to(dtype)


def rest_of(
    rotary_dim: int,
    *,
    axes: tuple[int, ...] = (),
    style: str = "half",
    offset: int = 0,
    scaling: float = 1.0,
    inverse: bool = False,
    dtype=torch.float32,
) -> tuple:
    """The operator's arguments behind positions."""
    inv_freq = frequencies(rotary_dim, dtype=dtype)
    table = oracle_table(ROWS, inv_freq, scaling)
    return (table, inv_freq, list(axes), style, offset, scaling, inverse)


def case(layout: str, style: str, head_dim: int, rotary_dim: int, offset: int, dtype, grad=False):
    q = make_layout(layout, 5, 3, head_dim, dtype, seed=1)
    k = make_layout(layout, 5, 2, head_dim, dtype, seed=2)
    if grad:
        q, k = (x.detach().requires_grad_() for x in (q, k))
    positions = torch.tensor([0, ROWS - 1, ROWS, -1, 2**31 - 1])[: q.shape[0]]
    return (q, k, positions, *rest_of(rotary_dim, style=style, offset=offset))


# ------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_passes_on_every_layout(layout: str, style: str, grad: bool, dtype) -> None:
    """All four utilities, full and partial width, q and k, q alone."""
    for rotary_dim, offset in ((8, 0), (4, 4)):
        arguments = case(layout, style, 8, rotary_dim, offset, dtype, grad)
        # A 16-bit gradient is compared with itself by the same code: exact.
        results = opcheck(rope_op, arguments)
        assert set(results.values()) == {"SUCCESS"}
        assert len(results) == 4
    opcheck(rope_op, (arguments[0], None, *arguments[2:]))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded_head"])
@pytest.mark.parametrize("style", STYLES)
def test_opcheck_passes_in_place(layout: str, style: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        opcheck(rope_inplace_op, case(layout, style, 8, 4, 2, dtype))


# Token dimensions of q, shape of the positions, and what else differs from half style.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, object]]] = {
    "batch": ((2, 5), (2, 5), {}),
    "shared positions": ((2, 5), (5,), {}),
    "axes": ((2, 5), (3, 2, 5), {"axes": (0, 1, 2, 0)}),
    "one position for three axes": ((2, 5), (5,), {"axes": (0, 1, 2, 0)}),
    "full width": ((5,), (2, 5), {"axes": (0,) * 4 + (1,) * 4}),
    "half_blocks": ((5,), (2, 5), {"axes": (0, 0, 1, 1), "style": "half_blocks"}),
    "interleaved_to_half": ((2, 5), (5,), {"style": "interleaved_to_half"}),
    "inverse": ((2, 5), (5,), {"inverse": True}),
}


@pytest.mark.parametrize("heads", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("order", ["in order", "heads first", "sequence first"])
@pytest.mark.parametrize("shape", SHAPES)
def test_opcheck_passes_on_every_shape(shape: str, order: str, dtype, heads: int) -> None:
    """Batches and axes, q and k as transposed views, k of one head or of none."""
    lead, at, changes = SHAPES[shape]
    q, k = (randn(*lead, count, 8, seed=count, dtype=dtype) for count in (3, heads))
    if order == "heads first":
        q, k = (x.transpose(-2, -3).contiguous().transpose(-2, -3) for x in (q, k))
    elif order == "sequence first":
        q, k = (x.transpose(0, -3).contiguous().transpose(0, -3) for x in (q, k))
    positions = torch.arange(math.prod(at)).view(at) * 37 - 11
    found = opcheck(rope_op, (q, k, positions, *rest_of(8, **changes)))
    assert set(found.values()) == {"SUCCESS"}


class TestWrongTwinsFail:
    """Deliberately wrong operators, one per utility: the matrix above can fail."""

    @staticmethod
    def twin(name: str, schema: str, body, fake):
        library = torch.library.Library(f"rope_twin_{name}", "DEF")
        library.define(f"rope{schema}")
        library.impl("rope", body, "CPU")
        torch.library.register_fake(f"rope_twin_{name}::rope", fake, lib=library)
        return library, getattr(torch.ops, f"rope_twin_{name}").rope.default

    def test_undeclared_mutation(self) -> None:
        def body(q):
            return q.mul_(2).clone()

        _library, op = self.twin("mutation", "(Tensor q) -> Tensor", body, lambda q: q.clone())
        with pytest.raises(OpCheckError, match="test_schema"):
            opcheck(op, (randn(5, 3, 8),), test_utils="test_schema")

    def test_stride_copying_fake_is_seen_with_permuted_input_only(self) -> None:
        _library, op = self.twin(
            "strides",
            "(Tensor q) -> Tensor",
            lambda q: q.new_empty(q.shape).copy_(q),
            torch.empty_like,
        )
        opcheck(op, (make_layout("contiguous", 5, 3, 8),), test_utils="test_faketensor")
        with pytest.raises(OpCheckError, match="test_faketensor"):
            opcheck(op, (make_layout("permuted", 5, 3, 8),), test_utils="test_faketensor")

    def test_missing_autograd(self) -> None:
        _library, op = self.twin(
            "autograd", "(Tensor q) -> Tensor", lambda q: q.clone(), lambda q: q.new_empty(q.shape)
        )
        with pytest.raises(OpCheckError, match="test_autograd_registration"):
            opcheck(op, (randn(5, 3, 8).requires_grad_(),), test_utils="test_autograd_registration")

    def test_wrong_gradient_is_seen_by_gradcheck_alone(self) -> None:
        _library, op = self.twin(
            "gradient",
            "(Tensor q) -> Tensor",
            lambda q: q * 3,
            lambda q: q.new_empty(q.shape),
        )
        torch.library.register_autograd(
            "rope_twin_gradient::rope", lambda _ctx, grad: grad * 2, lib=_library
        )
        q = randn(2, 2, 2, dtype=torch.float64).requires_grad_()
        opcheck(op, (q,))
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(op, (q,))


# ----------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("style", ["half", "interleaved", "interleaved_to_half", "half_blocks"])
@pytest.mark.parametrize("inverse", [False, True])
def test_gradients_of_first_and_second_order(style: str, inverse: bool) -> None:
    """gradcheck and gradgradcheck in float64, positions inside and outside the table."""
    axes = (0, 1, 1) if style == "half_blocks" else ()
    rest = rest_of(6, axes=axes, style=style, offset=1, scaling=1.2, inverse=inverse)
    positions = torch.tensor([3, ROWS + 5, -2])
    if axes:
        positions = torch.stack([positions, positions.flip(0)])
    q = randn(3, 2, 8, seed=1, dtype=torch.float64).requires_grad_()
    k = randn(3, 1, 8, seed=2, dtype=torch.float64).requires_grad_()

    def both(q, k):
        return rope_op(q, k, positions, *rest)

    assert torch.autograd.gradcheck(both, (q, k))
    assert torch.autograd.gradgradcheck(both, (q, k))
    assert torch.autograd.gradgradcheck(lambda q: rope_op(q, None, positions, *rest)[0], (q,))


def test_gradient_of_the_full_width_form_is_the_transpose() -> None:
    """Halves of one pair on different axes: no rotation, and still a right gradient."""
    rest = rest_of(8, axes=(0, 0, 1, 1, 2, 2, 3, 3))
    positions = torch.tensor([[1, 200], [2, -3], [5, 6], [7, 130]])
    q = randn(2, 2, 8, dtype=torch.float64).requires_grad_()

    def rotate(q):
        return rope_op(q, None, positions, *rest)[0]

    assert torch.autograd.gradcheck(rotate, (q,))
    assert torch.autograd.gradgradcheck(rotate, (q,))


def test_one_used_output_needs_one_rotation_only() -> None:
    """The unused output's gradient is zero, not missing, and the used one is right."""
    q, k, *more = case("contiguous", "half", 8, 8, 0, torch.float32, grad=True)
    for used, unused, index in ((q, k, 0), (k, q, 1)):
        q.grad = k.grad = None
        weight = randn(*used.shape, seed=5)
        (rope_op(q, k, *more)[index] * weight).sum().backward()
        expected = rope_op(weight, None, *more[:-1], True)[0]
        assert torch.equal(used.grad, expected)
        assert unused.grad is None or not unused.grad.any()


def test_gradients_of_strided_and_expanded_outputs() -> None:
    q, k, *more = case("permuted", "half", 8, 8, 0, torch.float32, grad=True)
    rope_op(q, k, *more)[0].sum().backward()  # the gradient is an expanded scalar
    expected = rope_op(torch.ones(5, 3, 8), None, *more[:-1], True)[0]
    assert torch.equal(q.grad, expected)


@pytest.mark.parametrize("inverse", [False, True])
def test_forward_mode_pushes_tangents_through_the_rotation(inverse: bool) -> None:
    """The operator is linear: a tangent comes out rotated, and no tangent as zero."""
    q, k, dq = (randn(4, h, 8, seed=h, dtype=torch.float64) for h in (2, 1, 3))
    dq = dq[:, :2]
    rest = (torch.tensor([0, 5, ROWS, -3]), *rest_of(8, inverse=inverse))
    wanted = rope_op(dq, None, *rest)[0]
    with forward_ad.dual_level():
        both = rope_op(forward_ad.make_dual(q, dq), k, *rest)
        alone = rope_op(forward_ad.make_dual(q, dq), None, *rest)[0]
        as_k = rope_op(k, forward_ad.make_dual(q, dq), *rest)[1]
        for x in (both[0], alone, as_k):
            assert torch.equal(forward_ad.unpack_dual(x).tangent, wanted)
        assert not forward_ad.unpack_dual(both[1]).tangent.any()
        with pytest.raises(RuntimeError, match="carry tangents"):
            rope_inplace_op(forward_ad.make_dual(q.clone(), dq), None, *rest)
    inputs = tuple(x.requires_grad_() for x in (q, k))
    call = lambda q, k: rope_op(q, k, *rest)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.vjp(f, x)[1](x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.vmap(torch.func.grad(lambda y: f(y).sum()))(x[None]),
    ],
)
def test_derivatives_of_torch_func_are_refused_by_name(transform) -> None:
    """Below an operator they would lose terms without a word (torch 2.11 to 2.14)."""
    rest = (torch.arange(3), *rest_of(8))
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad, vjp and jvp must not reach"):
        transform(lambda x: rope_op(x, None, *rest)[0], randn(3, 2, 8))


def test_torch_func_without_derivatives_works() -> None:
    q, rest = randn(3, 2, 8), (torch.arange(3), *rest_of(8))
    wanted = rope_op(q, None, *rest)[0]
    assert torch.equal(torch.func.functionalize(lambda x: rope_op(x, None, *rest)[0])(q), wanted)
    assert torch.equal(torch.vmap(lambda x: rope_op(x, None, *rest)[0])(q[None])[0], wanted)


def test_backward_saves_neither_q_nor_k() -> None:
    q, k, *more = case("contiguous", "half", 8, 8, 0, torch.float32, grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        rope_op(q, k, *more)
    assert all(x.data_ptr() not in (q.data_ptr(), k.data_ptr()) for x in saved)


# ---------------------------------------------------------------------------------------- vmap


@pytest.mark.parametrize(
    "in_dims", [(0, 0, None), (1, 2, None), (0, 0, 0), (None, 0, 0), (0, None, 0)]
)
def test_vmap_equals_a_loop(in_dims) -> None:
    rest = rest_of(8)
    mapped = 4
    shapes = [(5, 3, 8), (5, 2, 8)]
    q, k = (
        randn(*([*shape[:d], mapped, *shape[d:]] if d is not None else shape), seed=i)
        for i, (shape, d) in enumerate(zip(shapes, in_dims[:2], strict=True))
    )
    positions = torch.tensor([0, 5, -1, 200, 2**31 - 1])
    if in_dims[2] is not None:
        positions = torch.stack([positions + i for i in range(mapped)])

    def rotate(q, k, positions):
        return rope_op(q, k, positions, *rest)

    q_all, k_all = torch.vmap(rotate, in_dims=in_dims)(q, k, positions)
    for i in range(mapped):
        at = [
            x if d is None else x.select(d, i)
            for x, d in zip((q, k, positions), in_dims, strict=True)
        ]
        q_one, k_one = rotate(*at)
        assert torch.equal(q_all[i], q_one)
        assert torch.equal(k_all[i], k_one)


@pytest.mark.parametrize("positions_dim", [None, 0, 1])
def test_vmap_with_axes_and_without_k(positions_dim) -> None:
    rest = rest_of(8, axes=(0, 1, 1, 0))
    q = randn(3, 5, 2, 8)
    positions = torch.randint(-50, 300, (2, 5))
    if positions_dim is not None:
        positions = torch.stack([positions, positions + 1, positions + 2], dim=positions_dim)

    def rotate(q, positions):
        return rope_op(q, None, positions, *rest)[0]

    out = torch.vmap(rotate, in_dims=(0, positions_dim))(q, positions)
    for i in range(3):
        at = positions if positions_dim is None else positions.select(positions_dim, i)
        assert torch.equal(out[i], rotate(q[i], at))


def test_vmap_in_place_equals_the_functional_form() -> None:
    rest = rest_of(8)
    q, k = randn(4, 5, 3, 8, seed=1), randn(4, 5, 1, 8, seed=2)
    positions = torch.arange(5)
    expected = rope_op(q, k, positions, *rest)
    torch.vmap(lambda q, k: rope_inplace_op(q, k, positions, *rest), out_dims=None)(q, k)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


# ----------------------------------------------------------------------- mutation and aliasing


def test_functional_form_changes_and_aliases_nothing() -> None:
    for layout in LAYOUTS:
        arguments = case(layout, "half", 8, 4, 2, torch.float32)
        before = [x.clone() for x in arguments if isinstance(x, torch.Tensor)]
        versions = [x._version for x in arguments if isinstance(x, torch.Tensor)]
        q_out, k_out = rope_op(*arguments)
        after = [x for x in arguments if isinstance(x, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert [x._version for x in after] == versions
        for out in (q_out, k_out):
            assert out.is_contiguous()
            assert out.dtype == torch.float32
            storages = {x.untyped_storage().data_ptr() for x in after if x.numel()}
            assert not out.numel() or out.untyped_storage().data_ptr() not in storages
        assert not q_out.numel() or q_out.data_ptr() != k_out.data_ptr()


def test_early_exits_return_fresh_tensors() -> None:
    """Zero rotary width copies; zero tokens and zero heads keep shapes, dtypes and gradients."""
    q, k = randn(5, 3, 8).requires_grad_(), randn(5, 0, 8).requires_grad_()
    width_0 = (torch.empty(ROWS, 0), torch.empty(0), [], "half", 0, 1.0, False)
    q_out, k_out = rope_op(q, k, torch.arange(5), *width_0)
    assert torch.equal(q_out, q)
    assert q_out.data_ptr() != q.data_ptr()
    assert k_out.shape == (5, 0, 8)
    (q_out.sum() + k_out.sum()).backward()
    assert torch.equal(q.grad, torch.ones_like(q))
    empty = randn(0, 3, 8).requires_grad_()
    out, none = rope_op(empty, None, torch.arange(0), *rest_of(8))
    assert out.shape == (0, 3, 8)
    assert none is None
    out.sum().backward()
    assert empty.grad.shape == (0, 3, 8)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded_head"])
@pytest.mark.parametrize("style", STYLES)
def test_in_place_equals_functional_and_bumps_versions(layout: str, style: str) -> None:
    q, k, *more = case(layout, style, 8, 4, 2, torch.bfloat16)
    expected = rope_op(q, k, *more)
    versions = [x._version for x in more if isinstance(x, torch.Tensor)]
    q_version, k_version = q._version, k._version
    assert rope_inplace_op(q, k, *more) is None
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert q._version > q_version
    assert k._version > k_version
    assert [x._version for x in more if isinstance(x, torch.Tensor)] == versions


def test_in_place_writes_the_packed_base_and_nothing_else() -> None:
    """Slices of packed qkv, partial width: v and the pass-through channels stay bit-equal."""
    packed = randn(7, 3 + 1 + 1, 16)
    before = packed.clone()
    q, k, _v = packed.split([3, 1, 1], 1)
    more = (torch.arange(7), *rest_of(6, offset=4))
    expected = rope_op(q.clone(), k.clone(), *more)
    rope_inplace_op(q, k, *more)
    assert torch.equal(packed[:, :3], expected[0])
    assert torch.equal(packed[:, 3:4], expected[1])
    assert torch.equal(packed[:, 4:], before[:, 4:])
    assert torch.equal(packed[..., :4], before[..., :4])
    assert torch.equal(packed[..., 10:], before[..., 10:])


def test_in_place_makes_autograd_complain_about_a_saved_tensor() -> None:
    """A raw write that autograd does not see returns wrong gradients silently."""
    weight = randn(5, 3, 8).requires_grad_()
    q = randn(5, 3, 8)
    product = weight * q  # saves q for the gradient of weight
    rope_inplace_op(q, None, torch.arange(5), *rest_of(8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_in_place_refuses_what_it_cannot_do_right() -> None:
    more = (torch.arange(5), *rest_of(8))
    grown = randn(5, 3, 8).requires_grad_()
    with pytest.raises(RuntimeError, match="must not require grad"):
        rope_inplace_op(grown, None, *more)
    with pytest.raises(RuntimeError, match="must not require grad"):
        rope_inplace_op((grown * 2).view(5, 3, 8), None, *more)
    with torch.no_grad():
        rope_inplace_op(grown, None, *more)
    with pytest.raises(ValueError, match="q must not overlap itself"):
        rope_inplace_op(make_layout("expanded_head", 5, 3, 8), None, *more)
    q = randn(5, 3, 8)
    with pytest.raises(ValueError, match="q and k must not share memory"):
        rope_inplace_op(q, q[:, :1], *more)
    with pytest.raises(ValueError, match="q and k must not share memory"):
        rope_inplace_op(q[:, :2], q[:, 1:], *more)
    with pytest.raises(ValueError, match="cannot be applied in place"):
        rope_inplace_op(q, None, torch.arange(5), *rest_of(8, style="interleaved_to_half"))


def test_disjoint_slices_of_one_buffer_are_no_overlap() -> None:
    """q and k as neighbours in one storage, row by row and block by block."""
    more = (torch.arange(5), *rest_of(8))
    block = randn(2, 5, 3, 8)
    wide = randn(5, 6 * 8)
    for q, k in (
        (block[0], block[1]),
        (wide[:, :24].view(5, 3, 8), wide[:, 24:].view(5, 3, 8)),
        (wide[:, 24:].view(5, 3, 8), wide[:, :8].view(5, 1, 8)),
    ):
        expected = rope_op(q.clone(), k.clone(), *more)
        rope_inplace_op(q, k, *more)
        assert torch.equal(q, expected[0])
        assert torch.equal(k, expected[1])


# --------------------------------------------------------------------------------------- refusal


@pytest.mark.parametrize("op", [rope_op, rope_inplace_op])
def test_real_tensors_with_a_meta_table_raise(op) -> None:
    """The Meta kernel would leave q unrotated, or return garbage, and nobody would know."""
    q, k, positions, table, *more = case("contiguous", "half", 8, 8, 0, torch.float32)
    with pytest.raises(ValueError, match=re.escape("cos_sin_cache on meta")):
        op(q, k, positions, table.to("meta"), *more)
    with pytest.raises(ValueError, match=re.escape("k on meta")):
        op(q, k.to("meta"), positions, table, *more)


def test_all_meta_gives_meta() -> None:
    arguments = case("permuted", "half", 8, 8, 0, torch.bfloat16)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    q_out, k_out = rope_op(*meta)
    assert (q_out.device.type, q_out.dtype, q_out.shape) == ("meta", torch.bfloat16, (5, 3, 8))
    assert q_out.is_contiguous()
    assert k_out.shape == (5, 2, 8)


Q, K = randn(5, 3, 8), randn(5, 2, 8)
GOOD = (Q, K, torch.arange(5), *rest_of(8))
BAD = {
    "q dtype": (0, Q.int(), TypeError,
        "q must be float16, bfloat16, float32 or float64, got torch.int32"),
    "k dtype": (1, K.int(), TypeError,
        "k must be float16, bfloat16, float32 or float64, got torch.int32"),
    "positions dtype": (2, torch.arange(5.0), TypeError,
        "positions must be int32 or int64, got torch.float32"),
    "positions length": (2, torch.arange(4), ValueError,
        "positions must broadcast to q.shape[:-2] = (5,), got (4,)"),
    "positions rank": (2, torch.ones(5, 3, 2).long(), ValueError, "positions must broadcast"),
    "table dtype": (3, GOOD[3].half(), TypeError, "cos_sin_cache must be float32"),
    "table rank": (3, GOOD[3][0], ValueError, "cos_sin_cache must be [rows, rotary_dim]"),
    "table odd": (3, GOOD[3][:, :7], ValueError,
        "cos_sin_cache must be [rows, rotary_dim] with an even"),
    "table wide": (3, torch.zeros(4, 10), ValueError,
        "rotary_offset + rotary_dim must lie in 0..head_dim of q"),
    "inv_freq dtype": (4, GOOD[4].half(), TypeError, "inv_freq must be float32 or float64"),
    "inv_freq length": (4, GOOD[4][:3], ValueError,
        "inv_freq must be [rotary_dim / 2] = (4,), got (3,)"),
    "axes length": (5, [0, 1], ValueError, "axes must name one axis for each of 4 lanes"),
    "axes negative": (5, [0, -1, 0, 0], ValueError, "axes must name one axis"),
    "axes count": (5, [0, 1, 2, 0], ValueError, "positions must"),
    "style": (6, "neox", ValueError, "style must be one of ('half'"),
    "half_blocks": (6, "half_blocks", ValueError, "needs axes"),
    "offset": (7, 1, ValueError,
        "rotary_offset + rotary_dim must lie in 0..head_dim of q, got 1 + 8 for head_dim 8"),
    "negative offset": (7, -1, ValueError, "rotary_offset + rotary_dim must lie"),
    "k tokens": (1, K[:4], ValueError, "k must have the token dimensions of q, (5,), got (4,)"),
    "k rank": (1, K[None], ValueError, "q and k must be [..., heads, head_dim] of one rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("meta", [False, True])
def test_bad_arguments_raise_one_sentence(name: str, meta: bool) -> None:
    """In the real and in the fake implementation."""
    index, value, error, sentence = BAD[name]
    arguments = [*GOOD]
    arguments[index] = value
    if index == 5 and name == "axes count":
        arguments[2] = torch.zeros(2, 5, dtype=torch.int64)
    if meta:
        arguments = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    for op in (rope_op, rope_inplace_op):
        with pytest.raises(error, match=re.escape(sentence)):
            op(*arguments)


def test_a_table_without_rows_needs_frequencies() -> None:
    """With them every position is computed; without, there is no nearest row to take."""
    table, inv_freq, *more = rest_of(8)
    positions = torch.arange(5)
    expected = rope_op(Q, None, positions, table, inv_freq, *more)[0]
    assert torch.equal(rope_op(Q, None, positions, table[:0], inv_freq, *more)[0], expected)
    with pytest.raises(ValueError, match="at least one row"):
        rope_op(Q, None, positions, table[:0], None, *more)


# ------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("style", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "offset"),
    [(128, 128, 0), (2, 2, 0), (20, 6, 0), (20, 6, 14), (24, 20, 3), (192, 96, 96), (576, 64, 512)],
)
def test_any_position_is_right(style, head_dim, rotary_dim, offset, dtype) -> None:
    """Inside, at the end, past it, negative, near 2^31 and far beyond: against float64."""
    for scaling, inverse in ((1.0, False), (1.1386294361119891, True)):
        rest = rest_of(rotary_dim, style=style, offset=offset, scaling=scaling, inverse=inverse)
        positions = torch.cat([edge_positions(ROWS), torch.tensor([2**40, -(2**62) + 1])])
        q = randn(len(positions), 1, head_dim, seed=3, dtype=dtype)
        k = randn(len(positions), 3, head_dim, seed=4, dtype=dtype)
        results = rope_op(q, k, positions, *rest)
        for x, y in zip((q, k), results, strict=True):
            expected, larger = oracle_rotate(
                x, positions, rest[1], style=style, rotary_offset=offset,
                attention_scaling=scaling, inverse=inverse,
            )  # fmt: skip
            assert y.dtype == dtype
            assert_near_oracle(y, expected, larger)
            outside = [c for c in range(head_dim) if not offset <= c < offset + rotary_dim]
            assert torch.equal(y[..., outside], x[..., outside])


def test_golden_values() -> None:
    """x = [1, 2, 3, 4], base 1e4, position 1 and -1, both styles, and the inverse."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    golden = {
        ("half", 1): [-1.984110649, 1.959900667, 2.462377902, 4.019799668],
        ("half", -1): [3.064715260, 2.039899334, 0.779435937, 3.979800335],
        ("interleaved", 1): [-1.142639664, 1.922075597, 2.959850668, 4.029799502],
        ("interleaved", -1): [2.22324428, 0.23913363, 3.03984933, 3.96980050],
    }
    for (style, position), expected in golden.items():
        for rotate_by, inverse in ((position, False), (-position, True)):
            rest = rest_of(4, style=style, inverse=inverse)
            out = rope_op(x, None, torch.tensor([rotate_by]), *rest)[0]
            torch.testing.assert_close(out.flatten(), torch.tensor(expected), rtol=1e-6, atol=0)


def test_golden_cos_and_sin_far_out() -> None:
    """Exact phases (float64 frequencies), base 1e4 and 5e5, width 128."""
    golden = [
        (1e4, 0, 131071, -0.817983499388, -0.575241683755),
        (1e4, 1, 131071, -0.978270912936, -0.207330704196),
        (1e4, 1, -7, 0.975583275544, 0.219629853341),
        (1e4, 1, 7, 0.975583275544, -0.219629853341),
        (1e4, 0, 2**31 - 1, -0.688836691878, -0.724916555145),
        (5e5, 1, 1048575, 0.703951380639, 0.710248163459),
    ]
    for base, lane, position, cos, sin in golden:
        inv_freq = frequencies(128, base, torch.float64)
        x = torch.zeros(1, 1, 128, dtype=torch.float64)
        x[..., lane] = 1.0  # rotates to (cos, sin)
        out = rope_op(
            x, None, torch.tensor([position]), torch.empty(0, 128), inv_freq, [], "half", 0, 1.0,
            False,
        )[0]  # fmt: skip
        assert abs(out[0, 0, lane].item() - cos) < 1e-7
        assert abs(out[0, 0, lane + 64].item() - sin) < 1e-7


def test_phase_precision_follows_the_dtype_of_the_frequencies() -> None:
    """float64 frequencies: exact phases. float32: one rounding, far beyond 2^24 too."""
    positions = torch.tensor([131071, 2**24 + 1, 2**31 - 1, -(2**31)])
    q = randn(4, 2, 16, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        rest = rest_of(16, dtype=dtype)
        out = rope_op(q, None, positions, *rest)[0]
        expected, larger = oracle_rotate(q, positions, rest[1])
        assert_near_oracle(out, expected, larger)


@pytest.mark.parametrize("style", STYLES)
def test_row_read_and_row_computed_agree(style: str) -> None:
    """A big table and an empty one give the same result to one float32 ulp of 1."""
    table, inv_freq, *more = rest_of(64, style=style)
    x = torch.ones(ROWS, 1, 64)
    positions = torch.arange(ROWS)
    read = rope_op(x, None, positions, table, inv_freq, *more)[0]
    computed = rope_op(x, None, positions, table[:0], inv_freq, *more)[0]
    assert (read - computed).abs().max() <= 2 * 2.0**-23


def test_int32_and_int64_positions_agree_bit_for_bit() -> None:
    positions = edge_positions(ROWS)
    q = randn(len(positions), 3, 16)
    rest = rest_of(16)
    assert torch.equal(
        rope_op(q, None, positions, *rest)[0], rope_op(q, None, positions.int(), *rest)[0]
    )


def test_without_frequencies_the_nearest_row_is_taken() -> None:
    """A stale position in a padded slot stays finite and harms no neighbour."""
    table, _, *more = rest_of(8)
    positions = torch.tensor([3, 7, 2**31 - 1, -5, ROWS])
    out = rope_op(Q, None, positions, table, None, *more)[0]
    nearest = torch.tensor([3, 7, ROWS - 1, 0, ROWS - 1])
    assert torch.equal(out, rope_op(Q, None, nearest, table, None, *more)[0])
    assert torch.equal(out[:2], rope_op(Q[:2], None, positions[:2], table, None, *more)[0])


@pytest.mark.parametrize("style", STYLES)
def test_nothing_outside_the_tensors_is_touched(style: str) -> None:
    """NaN bands around q, k and the table; in place writes nothing outside its views."""
    rest = rest_of(6, style=style, offset=1)
    table, _ = guarded(rest[0])
    positions = edge_positions(ROWS)
    q, q_buffer = guarded(randn(len(positions), 3, 8))
    k, k_buffer = guarded(randn(len(positions), 1, 8))
    for out in rope_op(q, k, positions, table, *rest[1:]):
        assert not out.isnan().any()
    rope_inplace_op(q, k, positions, table, *rest[1:])
    assert_guard_intact(q, q_buffer)
    assert_guard_intact(k, k_buffer)


@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 3, 5), (2, 1, 3, 1)])
def test_any_number_of_token_dimensions(lead) -> None:
    """Leading dimensions are token dimensions; positions broadcast to them from the right."""
    rest = rest_of(8, style="interleaved")
    q, k = randn(*lead, 3, 8, seed=1), randn(*lead, 2, 8, seed=2)
    for rank in range(len(lead) + 1):
        shape = lead[len(lead) - rank :]
        positions = torch.randint(-9, 300, shape)
        flat = positions.expand(lead).reshape(-1)
        q_out, k_out = rope_op(q, k, positions, *rest)
        q_flat, k_flat = rope_op(q.reshape(-1, 3, 8), k.reshape(-1, 2, 8), flat, *rest)
        assert torch.equal(q_out.reshape(-1, 3, 8), q_flat)
        assert torch.equal(k_out.reshape(-1, 2, 8), k_flat)


def test_heads_first_tensors_come_in_as_views() -> None:
    """``[batch, heads, seq, head_dim]`` transposed, and ``[seq, batch, heads, head_dim]``."""
    rest = rest_of(8)
    x = randn(2, 3, 7, 8)
    positions = torch.randint(0, 300, (2, 7))
    expected = rope_op(x.transpose(1, 2).contiguous(), None, positions, *rest)[0]
    assert torch.equal(rope_op(x.transpose(1, 2), None, positions, *rest)[0], expected)
    sbhd = x.permute(2, 0, 1, 3).contiguous()
    assert torch.equal(rope_op(sbhd.transpose(0, 1), None, positions, *rest)[0], expected)
    rope_inplace_op(x.transpose(1, 2), None, positions, *rest)
    assert torch.equal(x.transpose(1, 2), expected)


def in_blocks(monkeypatch: pytest.MonkeyPatch, elements: int, rope_into=cpu.rope_into):
    """Plain torch in blocks of so many elements; the shape ``(batch, seq)`` of each comes here."""
    shapes = []

    def recorded(pairs, *rest) -> None:
        shapes.append(tuple(pairs[0][1].shape[:2]))
        rope_into(pairs, *rest)

    monkeypatch.setattr(cpu, "ELEMENTS_PER_BLOCK", elements)
    monkeypatch.setattr(cpu, "rope_into", recorded)
    return shapes


def one_by_one(operator, q: torch.Tensor, positions: torch.Tensor, rest: tuple) -> torch.Tensor:
    """``[batch, seq, heads, head_dim]`` from a call for every token."""
    rows = zip(q.flatten(0, 1), positions.flatten(), strict=True)
    return torch.cat([operator(x[None], None, p[None], *rest)[0] for x, p in rows]).view_as(q)


# Elements of a block of 32 a token, for 3 sequences of 150: parts of one, two at once, single ones.
BLOCKS = {
    64 * 32: [(1, 64), (1, 64), (1, 22)] * 3,
    310 * 32: [(2, 150), (1, 150)],
    31: [(1, 1)] * 450,
}


@pytest.mark.parametrize("elements", BLOCKS)
def test_blocks_of_tokens_do_not_show(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """More tokens than one cache block, in one and in two dimensions: equal to token by token."""
    rest = rest_of(16)
    positions = torch.randint(-5, 200, (3, 150))
    q = randn(3, 150, 2, 16)
    expected = one_by_one(rope_torch, q, positions, rest)
    assert torch.equal(one_by_one(rope_op, q, positions, rest), expected)
    shapes = in_blocks(monkeypatch, elements)
    assert torch.equal(rope_torch(q, None, positions, *rest)[0], expected)
    assert shapes == BLOCKS[elements]
    turned = rope_torch(q.transpose(0, 1), None, positions.T, *rest)[0]
    assert torch.equal(turned.transpose(0, 1), expected)
    flat = rope_torch(q.flatten(0, 1), None, positions.flatten(), *rest)[0]
    assert torch.equal(flat.view_as(q), expected)


def test_a_block_with_the_positions_of_another_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong twin: every block is rotated by the positions of the first one."""
    first = []

    def forgetful(pairs, positions, *rest) -> None:
        first.append(positions)
        cpu_rope_into(pairs, first[0], *rest)

    cpu_rope_into = cpu.rope_into
    rest, positions, q = rest_of(16), torch.arange(60).view(1, 60), randn(1, 60, 2, 16)
    expected = rope_torch(q, None, positions, *rest)[0]
    in_blocks(monkeypatch, 20 * 32, forgetful)
    found = rope_torch(q, None, positions, *rest)[0]
    assert torch.equal(found[:, :20], expected[:, :20])
    assert not torch.isclose(found[:, 20:], expected[:, 20:]).flatten(2).all(2).any()


def test_q_and_k_may_differ_in_dtype_width_and_strides() -> None:
    rest = rest_of(8)
    positions = torch.arange(5)
    q = randn(5, 3, 8, dtype=torch.bfloat16)
    k = randn(2, 5, 12).transpose(0, 1)
    q_out, k_out = rope_op(q, k, positions, *rest)
    assert (q_out.dtype, k_out.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(q_out, rope_op(q, None, positions, *rest)[0])
    assert torch.equal(k_out, rope_op(k.contiguous(), None, positions, *rest)[0])


@pytest.mark.parametrize("style", ["half", "interleaved", "half_blocks"])
def test_multi_axis_positions(style: str) -> None:
    """Every lane follows its own axis, out-of-table positions in one plane only included."""
    axes = (0, 0, 1, 1, 1, 2, 2, 2)
    rest = rest_of(16, axes=axes, style=style)
    positions = torch.randint(0, ROWS, (3, 2, 5))
    positions[1] += 1000
    positions[2, :, 0] = torch.tensor([-7, 2**31 - 1])
    q = randn(2, 5, 3, 20)
    out = rope_op(q, None, positions, *rest)[0]
    expected, larger = oracle_rotate(q, positions, rest[1], style=style, lane_axes=axes)
    assert_near_oracle(out, expected, larger)
    # A persistent buffer's slice has another stride.
    buffer = torch.zeros(3, 2, 64, dtype=torch.int64)
    buffer[..., :5] = positions
    assert torch.equal(rope_op(q, None, buffer[..., :5], *rest)[0], out)


def test_text_positions_on_a_multi_axis_config() -> None:
    """Rank 1 means the same position on every axis: bit-identical to plain RoPE."""
    plain = rest_of(8)
    rest = rest_of(8, axes=(0, 1, 2, 1))
    positions = torch.arange(5) * 60 - 20
    expected = rope_op(Q, K, positions, *plain)
    for given in (positions, positions[None], positions.expand(3, 5)):
        for out, wanted in zip(rope_op(Q, K, given, *rest), expected, strict=True):
            assert torch.equal(out, wanted)
    with pytest.raises(ValueError, match="positions must have 3 axes"):
        rope_op(Q, K, positions.expand(2, 5), *rest)
    square = torch.arange(9).view(3, 3)  # three tokens, three axes: axes come first, never tokens
    out = rope_op(Q[:3], None, square, *rest)[0]
    expected, larger = oracle_rotate(Q[:3], square, rest[1], lane_axes=(0, 1, 2, 1))
    assert_near_oracle(out, expected, larger)


def test_full_width_axes() -> None:
    """Halves of one pair may follow different axes (HunYuan-VL in transformers)."""
    axes = (0, 0, 1, 1, 2, 2, 3, 3)
    rest = rest_of(8, axes=axes)
    positions = torch.tensor([[0, 5, 200], [1, 6, -3], [2, 7, 9], [3, 8, 500]])
    q = randn(3, 2, 8)
    out = rope_op(q, None, positions, *rest)[0]
    expected, larger = oracle_rotate(q, positions, rest[1], lane_axes=axes)
    assert_near_oracle(out, expected, larger)
    inverse = rope_op(q, None, positions, *rest[:-1], True)[0]
    expected, larger = oracle_rotate(q, positions, rest[1], lane_axes=axes, inverse=True)
    assert_near_oracle(inverse, expected, larger)


# ------------------------------------------------------------------------------------ the algebra


@pytest.mark.parametrize("style", STYLES)
def test_algebra_of_the_rotation(style: str) -> None:
    rest = rest_of(16, style=style)
    positions = torch.randint(0, 1000, (9,))
    x = randn(9, 2, 16, dtype=torch.float64)
    y = rope_op(x, None, positions, *rest)[0]
    assert torch.equal(rope_op(x, None, torch.zeros(9).long(), *rest)[0], x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    back = rope_op(y, None, positions, *rest[:-1], True)[0]
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)
    assert torch.equal(back, rope_op(y, None, -positions, *rest)[0])
    # Scores depend on the distance alone, up to the rounding of phases and rows to float32.
    k = randn(9, 2, 16, seed=8, dtype=torch.float64)
    near = (y * rope_op(k, None, positions + 3, *rest)[0]).sum(-1)
    far = rope_op(x, None, positions + 100, *rest)[0]
    far = (far * rope_op(k, None, positions + 103, *rest)[0]).sum(-1)
    torch.testing.assert_close(near, far, rtol=0, atol=2e-3)
    permutation = torch.randperm(9)
    assert torch.equal(
        rope_op(x[permutation], None, positions[permutation], *rest)[0], y[permutation]
    )


def test_half_and_interleaved_are_permutations_of_each_other() -> None:
    x = randn(5, 2, 16, dtype=torch.bfloat16)
    positions = torch.tensor([1, 50, 200, -4, 2**31 - 1])
    order = torch.arange(16).view(2, 8).T.reshape(-1)  # interleaved channel -> half channel
    half = rope_op(x, None, positions, *rest_of(16))[0]
    interleaved = rope_op(x[..., order], None, positions, *rest_of(16, style="interleaved"))[0]
    assert torch.equal(interleaved, half[..., order])
    mixed = rope_op(x[..., order], None, positions, *rest_of(16, style="interleaved_to_half"))[0]
    assert torch.equal(mixed, half)


def test_16_bit_results_are_the_rounded_float64_rotation() -> None:
    """One rounding: 99.9 % of bfloat16 results within 1 ulp of the same rotation in float64."""
    q = randn(2048, 4, 64, dtype=torch.bfloat16)
    positions = torch.arange(2048)
    rest = rest_of(64)
    out = rope_op(q, None, positions, *rest)[0]
    expected, _ = oracle_rotate(q, positions, rest[1])
    within = ulp_distance(out, expected.to(torch.bfloat16)) <= 1
    assert within.double().mean() >= 0.999


@pytest.mark.parametrize("mode", ["autocast", "default_dtype", "inference_mode"])
def test_ambient_modes_change_nothing(mode: str) -> None:
    arguments = case("contiguous", "half", 8, 8, 0, torch.float32)
    expected = rope_op(*arguments)
    if mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            out = rope_op(*arguments)
    elif mode == "inference_mode":
        with torch.inference_mode():
            out = rope_op(*arguments)
            fresh = arguments[0].clone()
            rope_inplace_op(fresh, None, *arguments[2:])
            assert torch.equal(fresh, expected[0])
    else:
        torch.set_default_dtype(torch.float64)
        try:
            out = rope_op(*arguments)
        finally:
            torch.set_default_dtype(torch.float32)
    for a, b in zip(out, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_non_unit_last_stride_and_strided_table() -> None:
    table, inv_freq, *more = rest_of(8)
    wide = torch.full((ROWS, 32), float("nan"))
    wide[:, 3:19:2] = table
    q = randn(5, 3, 16)[..., ::2]
    positions = torch.tensor([0, 1, 127, 128, -3])
    out = rope_op(q, None, positions, wide[:, 3:19:2], inv_freq, *more)[0]
    assert torch.equal(out, rope_op(q.contiguous(), None, positions, table, inv_freq, *more)[0])


def test_repeated_calls_are_bit_identical() -> None:
    arguments = case("packed_qkv", "half", 8, 8, 0, torch.bfloat16)
    first = rope_op(*arguments)
    for _ in range(20):
        for a, b in zip(rope_op(*arguments), first, strict=True):
            assert torch.equal(a, b)
