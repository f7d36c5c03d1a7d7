"""AITER's signatures against its formulas, in float64, and against the calls that mix them up."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.integrations import aiter, sglang

from peer_formulas import assert_gradients, assert_rotated, plain_rotate
from serving_formulas import frequencies, packed_qkv, rows
from support import randn

S, B, H, D = 7, 2, 5, 24
PLACES = [0, 5, 127, 128, 1000, 131071, 2**31 - 1, -1, -777, 64, 3]


class Case(NamedTuple):
    rotate_style: int
    reuse: bool
    nope_first: bool
    width: int

    @property
    def first(self) -> int:
        return D - self.width if self.nope_first else 0

    @property
    def flags(self) -> tuple[int, bool, bool]:
        """In AITER's order."""
        return self.rotate_style, self.reuse, self.nope_first

    def spread(self, lanes: Tensor) -> Tensor:
        """``[rows, 1, 1, width]`` as this case hands it over."""
        if not self.reuse:
            pairs = [lanes, lanes]
            lanes = (
                torch.stack(pairs, -1).flatten(-2) if self.rotate_style else torch.cat(pairs, -1)
            )
        return lanes[:, None, None]

    def assert_rotated(self, actual: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        assert_rotated(actual, x, cos, sin, interleaved=self.rotate_style == 1, first=self.first)


CASES = [
    Case(0, True, False, 24),
    Case(1, True, False, 24),
    Case(0, False, False, 8),
    Case(1, False, True, 8),
    Case(0, True, True, 10),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def angles_of(case: Case, length: int = S, dtype: torch.dtype = torch.float32) -> Tensor:
    return (randn(length, case.width // 2, seed=5) * 3).to(dtype)


def of_angles(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin ``[rows, 1, 1, lanes]``, rounded to float32 as tables are."""
    cos, sin = angles.float().double().cos(), angles.float().double().sin()
    return cos.float()[:, None, None], sin.float()[:, None, None]


# ---- functions


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_for_each_place_in_the_sequence(case: Case, dtype: torch.dtype):
    angles = angles_of(case)
    freqs, (cos, sin) = case.spread(angles), of_angles(angles)
    x, y = randn(S, B, H, D, dtype=dtype), randn(S, B, 2, D, seed=1, dtype=dtype)
    given = x.clone()
    out = aiter.rope_fwd(x, freqs, *case.flags)
    case.assert_rotated(out, x, cos, sin)
    case.assert_rotated(aiter.rope_bwd(x, freqs, *case.flags), x, cos, -sin)
    out_x, out_y = aiter.rope_2c_fwd(x, y, freqs, *case.flags)
    assert torch.equal(out_x, out)
    case.assert_rotated(out_y, y, cos, sin)
    back_x, back_y = aiter.rope_2c_bwd(x, y, freqs, *case.flags)
    case.assert_rotated(back_x, x, cos, -sin)
    case.assert_rotated(back_y, y, cos, -sin)
    assert torch.equal(x, given)
    in_place, other = x.clone(), y.clone()
    assert aiter.rope_fwd_inplace(in_place, freqs, *case.flags) is None
    assert torch.equal(in_place, out)
    in_place = x.clone()
    assert aiter.rope_2c_fwd_inplace(in_place, other, freqs, *case.flags) is None
    assert torch.equal(in_place, out)
    assert torch.equal(other, out_y)


@cases
def test_cosines_and_sines_for_each_place_in_the_sequence(case: Case):
    cos, sin = of_angles(angles_of(case, 40))
    wide = case.spread(cos[:, 0, 0]), case.spread(sin[:, 0, 0])  # more rows than tokens
    x, y = randn(S, B, H, D), randn(S, B, 2, D, seed=1)
    here = cos[:S], sin[:S]
    out = aiter.rope_cached_fwd(x, *wide, *case.flags)
    case.assert_rotated(out, x, *here)
    case.assert_rotated(aiter.rope_cached_bwd(x, *wide, *case.flags), x, here[0], -here[1])
    out_x, out_y = aiter.rope_cached_2c_fwd(x, y, *wide, *case.flags)
    assert torch.equal(out_x, out)
    case.assert_rotated(out_y, y, *here)
    back_x, back_y = aiter.rope_cached_2c_bwd(x, y, *wide, *case.flags)
    case.assert_rotated(back_x, x, here[0], -here[1])
    case.assert_rotated(back_y, y, here[0], -here[1])
    in_place, other = x.clone(), y.clone()
    aiter.rope_cached_fwd_inplace(in_place, *wide, *case.flags)
    assert torch.equal(in_place, out)
    in_place = x.clone()
    aiter.rope_cached_2c_fwd_inplace(in_place, other, *wide, *case.flags)
    assert torch.equal(in_place, out)
    assert torch.equal(other, out_y)


@cases
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cosines_and_sines_at_positions(case: Case, offset: bool, dtype: torch.dtype):
    cos, sin = of_angles(angles_of(case, 40))
    wide = case.spread(cos[:, 0, 0]), case.spread(sin[:, 0, 0])
    positions = torch.arange(S * B, dtype=dtype).view(S, B) * 3 - 2  # outside on both sides
    offsets = torch.arange(S * B, dtype=dtype).view(S, B) % 3
    where = (positions, offsets) if offset else (positions,)
    given = [t.clone() for t in where]
    at = sum(where).clamp(0, 39)
    here = cos[at, 0], sin[at, 0]
    x, y = randn(S, B, H, D), randn(S, B, 2, D, seed=1)
    name = "rope_cached_positions_offsets" if offset else "rope_cached_positions"
    out = getattr(aiter, f"{name}_fwd")(x, *wide, *where, *case.flags)
    case.assert_rotated(out, x, *here)
    out_x, out_y = getattr(aiter, f"{name}_2c_fwd")(x, y, *wide, *where, *case.flags)
    assert torch.equal(out_x, out)
    case.assert_rotated(out_y, y, *here)
    in_place, other = x.clone(), y.clone()
    assert getattr(aiter, f"{name}_fwd_inplace")(in_place, *wide, *where, *case.flags) is None
    assert torch.equal(in_place, out)
    in_place = x.clone()
    getattr(aiter, f"{name}_2c_fwd_inplace")(in_place, other, *wide, *where, *case.flags)
    assert torch.equal(in_place, out)
    assert torch.equal(other, out_y)
    assert all(torch.equal(t, old) for t, old in zip(where, given, strict=True))


@cases
def test_packed_sequences(case: Case):
    angles = angles_of(case)
    freqs, (cos, sin) = case.spread(angles), of_angles(angles)
    cu_seqlens = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    at = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 6])
    here = cos[at, 0], sin[at, 0]
    x = randn(10, H, D)
    out = aiter.rope_thd_fwd(x, cu_seqlens, freqs, *case.flags)
    case.assert_rotated(out, x, *here)
    case.assert_rotated(aiter.rope_thd_bwd(x, cu_seqlens, freqs, *case.flags), x, here[0], -here[1])
    in_place = x.clone()
    assert aiter.rope_thd_fwd_inplace(in_place, cu_seqlens, freqs, *case.flags) is None
    assert torch.equal(in_place, out)


def test_transposed_outputs_lie_batch_first():
    case = CASES[4]
    angles = angles_of(case)
    freqs, cached = case.spread(angles), [case.spread(half[:, 0, 0]) for half in of_angles(angles)]
    positions = torch.arange(S * B).view(S, B) % S
    x, y = randn(S, B, H, D), randn(S, B, 2, D)
    for function, arguments in (
        (aiter.rope_fwd, (x, freqs)),
        (aiter.rope_bwd, (x, freqs)),
        (aiter.rope_2c_fwd, (x, y, freqs)),
        (aiter.rope_2c_bwd, (x, y, freqs)),
        (aiter.rope_cached_fwd, (x, *cached)),
        (aiter.rope_cached_bwd, (x, *cached)),
        (aiter.rope_cached_2c_fwd, (x, y, *cached)),
        (aiter.rope_cached_2c_bwd, (x, y, *cached)),
        (aiter.rope_cached_positions_fwd, (x, *cached, positions)),
        (aiter.rope_cached_positions_offsets_2c_fwd, (x, y, *cached, positions, positions)),
    ):
        plain = function(*arguments, *case.flags)
        turned = function(*arguments, *case.flags, transpose_output=True)
        if isinstance(plain, Tensor):
            plain, turned = (plain,), (turned,)
        for a, b in zip(turned, plain, strict=True):
            assert torch.equal(a, b)
            assert a.transpose(0, 1).is_contiguous()
            assert not a.is_contiguous()


def test_strided_inputs_and_slices_in_place():
    case = CASES[3]
    angles = angles_of(case, 11)
    freqs, (cos, sin) = case.spread(angles), of_angles(angles)
    x = randn(B, 11, H, D).transpose(0, 1)
    case.assert_rotated(aiter.rope_fwd(x, freqs, *case.flags), x, cos, sin)
    packed = packed_qkv(11, H, 2, D)
    before = packed.base.clone()
    aiter.rope_2c_fwd_inplace(packed.q[:, None], packed.k[:, None], freqs, *case.flags)
    packed.assert_only_rotated(before, cos[:, 0], sin[:, 0], interleaved=True, first=case.first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_angles_of_other_dtypes(dtype: torch.dtype):
    case = CASES[0]
    angles = angles_of(case, dtype=dtype)
    x = randn(S, B, H, D)
    exact = (angles.double().cos().float(), angles.double().sin().float())
    out = aiter.rope_fwd(x, case.spread(angles), *case.flags)
    # The cosine of a float32 angle, to within its last bit.
    torch.testing.assert_close(
        out.double(), plain_rotate(x, *(half[:, None, None] for half in exact)), rtol=0, atol=1e-6
    )


def test_no_tokens():
    case = CASES[0]
    freqs = case.spread(angles_of(case))
    assert aiter.rope_fwd(randn(0, B, H, D), freqs, *case.flags).shape == (0, B, H, D)
    empty = torch.zeros(0, B, dtype=torch.int64)
    out = aiter.rope_cached_positions_fwd(randn(0, B, H, D), freqs, freqs, empty, *case.flags)
    assert out.shape == (0, B, H, D)


@cases
def test_forward_functions_have_gradients_and_the_backward_ones_are_them(case: Case):
    angles = angles_of(case)
    freqs, (cos, sin) = case.spread(angles), of_angles(angles)
    x, y = randn(S, B, H, D), randn(S, B, 2, D, seed=1)
    interleaved = case.rotate_style == 1

    def plain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pair = (
            plain_rotate(t, cos, sin, interleaved=interleaved, first=case.first).float()
            for t in (x, y)
        )
        a, b = pair
        return a, b

    assert_gradients(lambda x, y: aiter.rope_2c_fwd(x, y, freqs, *case.flags), plain, x, y)
    leaf, incoming = x.clone().requires_grad_(), randn(S, B, H, D, seed=8)
    (expected,) = torch.autograd.grad(aiter.rope_fwd(leaf, freqs, *case.flags), leaf, incoming)
    assert torch.equal(aiter.rope_bwd(incoming, freqs, *case.flags), expected)


def test_arguments_in_another_order_are_errors_or_other_numbers():
    case = CASES[2]
    angles = angles_of(case)
    freqs, (cos, sin) = case.spread(angles), of_angles(angles)
    wide = case.spread(cos[:, 0, 0]), case.spread(sin[:, 0, 0])
    x, positions = randn(S, B, H, D), torch.arange(S * B).view(S, B) % S
    out = aiter.rope_cached_fwd(x, *wide, *case.flags)
    assert not torch.allclose(aiter.rope_cached_fwd(x, *wide[::-1], *case.flags), out, atol=1e-2)
    other = aiter.rope_fwd(x, freqs, 1, False, False)
    assert not torch.allclose(other, aiter.rope_fwd(x, freqs, 0, False, False), atol=1e-2)
    with pytest.raises(ValueError, match=r"rotate_style must be 0 \(GPT-NeoX\) or 1 \(GPT-J\)"):
        aiter.rope_fwd(x, freqs, 2, True, False)
    with pytest.raises(TypeError, match="positions must be an int32 or int64 tensor"):
        aiter.rope_cached_positions_fwd(x, positions, *wide, *case.flags)  # SGLang's order
    with pytest.raises(TypeError, match="offsets must be an int32 or int64 tensor"):
        aiter.rope_cached_positions_offsets_fwd(x, *wide, positions, cos, *case.flags)
    with pytest.raises(ValueError, match="freqs must have a row for each of 7 tokens, got 3 rows"):
        aiter.rope_fwd(x, freqs[:3], *case.flags)
    with pytest.raises(ValueError, match="must have one head_dim with nope_first, got 24 and 12"):
        aiter.rope_2c_fwd(x, x[..., :12], freqs, 0, False, True)


# ---- modules


def make(**overrides: object) -> aiter.RotaryEmbedding:
    arguments = {"head_size": D, "rotary_dim": D, "max_position": 128, "base": 10000}
    return aiter.get_rope(**(arguments | overrides))  # type: ignore[arg-type]


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("nope_first", [False, True])
@pytest.mark.parametrize("flat", [True, False])
def test_modules_rotate_any_position(neox: bool, nope_first: bool, flat: bool):
    module = make(rotary_dim=8, is_neox_style=neox)
    positions = torch.tensor(PLACES, dtype=torch.int32)
    x = randn(11, 3, D)
    query = x.flatten(1) if flat else x
    given = query.clone()
    offsets = torch.arange(11)
    q, k = module(positions, query, query, offsets, is_nope_first=nope_first)
    cos, sin = rows(torch.tensor(PLACES) + offsets, frequencies(8, 10000))
    for y in (q, k):
        assert y.shape == query.shape
        first = 16 if nope_first else 0
        assert_rotated(y.view(11, 3, D), x, cos, sin, interleaved=not neox, first=first)
    assert torch.equal(query, given)
    alone = module(positions, query, offsets=offsets, is_nope_first=nope_first)
    assert isinstance(alone, Tensor), "no tuple without a key, as AITER returns it"
    assert torch.equal(alone, q)
    for variant in (module.forward_native, module.forward_hip, module.forward_triton):
        assert torch.equal(variant(positions, query, None, offsets, nope_first), q)


# (in turn, sections, the axis of each lane)
AXES = [
    (False, [4, 2, 6], [0] * 4 + [1] * 2 + [2] * 6),
    (False, [2, 1, 1], [0, 0, 1, 2]),
    (True, [8, 2, 2], [0, 1, 2, 0, 1, 2] + [0] * 6),
    (True, [2, 1, 1], [0, 1, 2, 0]),
]


@pytest.mark.parametrize(("in_turn", "sections", "lanes"), AXES)
@pytest.mark.parametrize("nope_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_of_three_axes(
    in_turn: bool, sections: list[int], lanes: list[int], nope_first: bool, dtype: torch.dtype
):
    width = 2 * len(lanes)
    scaling = {"rope_type": "default", "mrope_section": sections}
    scaling |= {"mrope_interleaved": True} if in_turn else {}
    module = make(rotary_dim=width, rope_scaling=scaling)
    places = torch.tensor(PLACES)
    positions = torch.stack((places, places // 3, places * 0 + 90))
    cos, sin = rows(positions, frequencies(width, 10000), lane_axes=tuple(lanes))
    x, y = randn(11, 3, D, dtype=torch.bfloat16), randn(11, 2, D, seed=1, dtype=torch.bfloat16)
    q, k = module(positions.to(dtype), x.flatten(1), y, is_nope_first=nope_first)
    first = D - width if nope_first else 0
    assert_rotated(q.view(x.shape), x, cos, sin, first=first)
    assert_rotated(k, y, cos, sin, first=first)
    # Text: one position for all axes.
    text = module(places.to(dtype), x, is_nope_first=nope_first)
    plain = make(rotary_dim=width)(places, x, is_nope_first=nope_first)
    assert torch.equal(text, plain)
    assert not torch.allclose(text.float(), q.view(x.shape).float(), atol=1e-2)


def test_the_factory_shares_and_translates_as_sglangs():
    scaling = {"rope_type": "dynamic", "factor": 2}
    module = make(rope_scaling=scaling)
    assert make(rope_scaling={"factor": 2.0, "rope_type": "dynamic"}) is module
    assert module.rope is sglang.get_rope(D, D, 128, 10000, rope_scaling=scaling).rope
    assert module.rope is rc.get_rope(module.rope.config)
    assert module.cos_sin_cache.shape == (256, D)
    assert make(partial_rotary_factor=0.5).rotary_dim == D // 2
    direct = aiter.RotaryEmbedding(D, D, 128, 10000, True, torch.bfloat16)
    assert direct.rope is make().rope
    with pytest.raises(ValueError, match="unknown keys"):
        make(rope_scaling={"rope_type": "default", "facter": 2})
    with pytest.raises(NotImplementedError, match="dual chunk attention"):
        make(dual_chunk_attention_config={})


def test_a_dead_table_is_replaced():
    module = make(base=777)
    module.cos_sin_cache.untyped_storage().resize_(0)
    with pytest.warns(UserWarning, match="discards a dead entry"):
        assert make(base=777) is not module


def test_the_tables_of_a_module_serve_the_functions():
    module = make()
    assert module.cos_cache.shape == module.sin_cache.shape == (128, 1, 1, D // 2)
    assert (
        module.cos_cache.untyped_storage()._cdata == module.cos_sin_cache.untyped_storage()._cdata
    )
    x, positions = randn(1, 11, 3, D), torch.arange(11)[None] * 11
    out = aiter.rope_cached_positions_fwd(
        x, module.cos_cache, module.sin_cache, positions, 0, True, False
    )
    assert torch.equal(out[0], module(positions[0], x[0], x[0])[0])


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_calls_are_equal_bit_for_bit():
    module, case = make(rotary_dim=8), CASES[3]
    angles = angles_of(case)
    freqs = case.spread(angles)
    positions = torch.arange(S * B).view(S, B)

    def call(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        flat = module(positions.flatten(), x.flatten(0, 1), x.flatten(0, 1), None, True)
        aiter.rope_cached_positions_offsets_2c_fwd_inplace(
            x, y, freqs, freqs, positions, positions, *case.flags
        )
        packed = aiter.rope_thd_fwd(y[:, 0], torch.tensor([0, 3, S]), freqs, *case.flags)
        return *flat, x, y, packed, aiter.rope_fwd(x, freqs, *case.flags, transpose_output=True)

    x, y = randn(S, B, H, D), randn(S, B, 2, D)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        compiled(x.clone(), y.clone()), call(x.clone(), y.clone()), strict=True
    ):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
