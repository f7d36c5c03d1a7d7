"""flashinfer's signatures against its formulas, in float64, and against calls that mix them up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rope_compile as rc
from rope_compile.factory import registry
from rope_compile.integrations import flashinfer

from peer_formulas import assert_rotated, plain_rotate
from serving_formulas import assert_calls_rotate, frequencies, packed_qkv, rows, table
from support import randn

# Three sequences, the second one empty, and where each starts: past the table, and below 0.
INDPTR, OFFSETS = [0, 4, 4, 11], [8190, 17, -3]
PLACES = [8190, 8191, 8192, 8193, -3, -2, -1, 0, 1, 2, 3]


def ragged(dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    return torch.tensor(INDPTR, dtype=dtype), torch.tensor(OFFSETS, dtype=dtype)


def llama31(width: int, base: float, scale: float, low: float, high: float, old: int) -> Tensor:
    """The kernel's smoothing, lane by lane."""
    f = frequencies(width, base).double()
    smooth = (f * old / (2 * torch.pi * (high - low)) - low / (high - low)).clamp(0, 1)
    return ((1 - smooth) * f / scale + smooth * f).float()


def plain(
    q: Tensor, rotary_dim: int | None = None, rope_scale: float = 1, rope_theta: float = 1e4
) -> Tensor:
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    return frequencies(width, rope_theta) / rope_scale


def smoothed(
    q: Tensor, rotary_dim: int | None = None, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> Tensor:  # fmt: skip
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    return llama31(
        width, rope_theta, rope_scale, low_freq_factor, high_freq_factor, old_context_len
    )


FUNCTIONS = {
    "plain": (
        flashinfer.apply_rope, flashinfer.apply_rope_inplace,
        flashinfer.apply_rope_pos_ids, flashinfer.apply_rope_pos_ids_inplace, plain,
    ),
    "llama31": (
        flashinfer.apply_llama31_rope, flashinfer.apply_llama31_rope_inplace,
        flashinfer.apply_llama31_rope_pos_ids, flashinfer.apply_llama31_rope_pos_ids_inplace,
        smoothed,
    ),
}  # fmt: skip
LLAMA = {"low_freq_factor": 1.5, "high_freq_factor": 6, "old_context_len": 512}
PARAMETERS = {
    "defaults": {},
    "scaled": {"rope_scale": 2.5, "rope_theta": 700.0},
    "partial": {"rotary_dim": 8},
    "tuned": {"rope_scale": 3, **LLAMA},
}


def assert_same_rotation(
    actual: Tensor, x: Tensor, inv_freq: Tensor, formula: Tensor, interleaved: bool
) -> None:
    """The frequencies are those of the formula, and the rotation is that of the frequencies."""
    torch.testing.assert_close(inv_freq, formula, rtol=1e-6, atol=0)
    cos, sin = rows(torch.tensor(PLACES), inv_freq)
    assert_rotated(actual, x, cos, sin, interleaved=interleaved)


def newest_frequencies(call: Callable[[], object]) -> Tensor:
    """Of the only rope that ``call`` fetches."""
    registry.clear()
    call()
    (module,) = registry.modules()
    return module.inv_freq


@pytest.mark.parametrize(
    ("family", "case"),
    [(f, c) for f in FUNCTIONS for c in PARAMETERS if (f, c) != ("plain", "tuned")],
)
@pytest.mark.parametrize("interleave", [False, True])
def test_ragged_and_given_positions(family: str, case: str, interleave: bool):
    apply, apply_, at, at_, formula = FUNCTIONS[family]
    parameters = PARAMETERS[case]
    expected = formula(randn(1, 16), **parameters)
    indptr, offsets = ragged()
    q, k = randn(11, 5, 16), randn(11, 1, 16, seed=1)
    inv_freq = newest_frequencies(
        lambda: apply(q, k, indptr, offsets, interleave=interleave, **parameters)
    )
    results = [
        apply(q, k, indptr, offsets, interleave=interleave, **parameters),
        at(q, k, torch.tensor(PLACES), interleave=interleave, **parameters),
    ]
    for result in results:
        for y, x in zip(result, (q, k), strict=True):
            assert y is not None
            assert_same_rotation(y, x, inv_freq, expected, interleave)
    for function, where in ((apply_, ragged(torch.int64)), (at_, (torch.tensor(PLACES).int(),))):
        packed = packed_qkv(11, 5, 1, 16)
        before = packed.base.clone()
        given = [t.clone() for t in where]
        assert function(packed.q, packed.k, *where, interleave=interleave, **parameters) is None
        packed.assert_only_rotated(
            before, *rows(torch.tensor(PLACES), inv_freq), interleaved=interleave
        )
        assert all(torch.equal(t, old) for t, old in zip(where, given, strict=True))


def test_arguments_have_flashinfers_order():
    """The tail is rotary_dim, interleave, rope_scale, rope_theta (, low, high, old)."""
    indptr, offsets = ragged()
    q = randn(11, 2, 16)
    by_name = flashinfer.apply_rope(
        q, None, indptr, offsets, rotary_dim=8, interleave=True, rope_scale=2.0, rope_theta=900.0
    )
    by_place = flashinfer.apply_rope(q, None, indptr, offsets, 8, True, 2.0, 900.0)
    assert torch.equal(by_place[0], by_name[0])
    assert by_place[1] is None
    swapped = flashinfer.apply_rope(q, None, indptr, offsets, 8, True, 900.0, 2.0)
    assert not torch.allclose(swapped[0], by_name[0], atol=1e-2)
    tail = (8, True, 2.0, 900.0, 1.5, 6.0, 512)
    long = flashinfer.apply_llama31_rope(q, None, indptr, offsets, *tail)
    f = llama31(8, 900.0, 2.0, 1.5, 6.0, 512)
    torch.testing.assert_close(
        long[0].double(),
        plain_rotate(q, *rows(torch.tensor(PLACES), f), interleaved=True),
        rtol=1e-3,
        atol=1e-3,
    )
    with pytest.raises(TypeError, match="cu_seqlens must be int32 or int64"):
        flashinfer.apply_rope(q, indptr, q, offsets)
    with pytest.raises(ValueError, match="starts must have one entry a sequence"):
        flashinfer.apply_rope(q, None, offsets, indptr)


def test_bfloat16_and_mixed_dtypes():
    q, k = randn(11, 2, 16, dtype=torch.bfloat16), randn(11, 1, 16)
    f = newest_frequencies(lambda: flashinfer.apply_rope_pos_ids(q, k, torch.tensor(PLACES)))
    cos, sin = rows(torch.tensor(PLACES), f)
    for y, x in zip(flashinfer.apply_rope_pos_ids(q, k, torch.tensor(PLACES)), (q, k), strict=True):
        assert_rotated(y, x, cos, sin)


def test_no_tokens_and_a_permuted_layout():
    indptr, offsets = torch.tensor([0, 0]), torch.tensor([5])
    q, _ = flashinfer.apply_rope(randn(0, 2, 16), None, indptr, offsets)
    assert q.shape == (0, 2, 16)
    x = randn(2, 11, 16).transpose(0, 1)
    f = newest_frequencies(lambda: flashinfer.apply_rope(x, None, *ragged()))
    y, _ = flashinfer.apply_rope(x, None, *ragged())
    assert_rotated(y, x, *rows(torch.tensor(PLACES), f))


def test_nothing_is_built_twice():
    registry.clear()
    q = randn(11, 2, 16)
    for theta in (5e5, 500000, 5e5):
        flashinfer.apply_rope(q, None, *ragged(), rope_theta=theta)
    flashinfer.apply_rope(randn(11, 2, 24), None, *ragged(), rotary_dim=16, rope_theta=5e5)
    (module,) = registry.modules()
    assert module.capacity == flashinfer.ROWS
    assert module is rc.get_rope(module.config)
    rc.prepare_for_capture(None, rc.CapturePlan(max_position=20000))
    assert module.capacity >= 20000
    flashinfer.apply_rope(q, None, *ragged(), rope_theta=5e5)
    assert registry.modules() == [module]


# ---- tables


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_that_are_handed_over(neox: bool, dtype: torch.dtype):
    f = frequencies(8, 500.0)
    cache, positions = table(128, f), torch.arange(11) * 11
    cos, sin = rows(positions, f)
    assert_calls_rotate(
        lambda at, q, k: flashinfer.apply_rope_with_cos_sin_cache(at, q, k, 24, cache, neox),
        randn(11, 5, 24, dtype=dtype), positions, cos, sin, interleaved=not neox,
    )  # fmt: skip
    packed = packed_qkv(11, 5, 2, 24, dtype)
    before = packed.base.clone()
    query, key = packed.base[:, :120], packed.base[:, 120:168]
    result = flashinfer.apply_rope_with_cos_sin_cache_inplace(
        positions.int(), query, key, 24, cache, neox
    )
    assert result is None
    packed.assert_only_rotated(before, cos, sin, interleaved=not neox)
    x = randn(3, 48)
    q, _ = flashinfer.apply_rope_with_cos_sin_cache(
        torch.tensor([-1, 128, 2**31 - 1]), x, None, 24, cache
    )
    expected = rows(torch.tensor([0, 127, 127]), f)
    assert_rotated(q.view(3, 2, 24), x.view(3, 2, 24), *expected)


def test_errors_of_tables():
    cache, positions, x = table(128, frequencies(24, 500.0)), torch.arange(11), randn(11, 48)
    for function in (
        flashinfer.apply_rope_with_cos_sin_cache,
        flashinfer.apply_rope_with_cos_sin_cache_inplace,
    ):
        with pytest.raises(TypeError, match=r"cos_sin_cache must be float32, got torch\.bfloat16"):
            function(positions, x, None, 24, cache.bfloat16())
        with pytest.raises(TypeError, match="positions must be an int32 or int64 tensor"):
            function(x, positions, None, 24, cache)
        with pytest.raises(ValueError, match=r"query must be .* got \(11, 48\)"):
            function(positions, x, None, 36, cache)


# ---- compiled


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_calls_are_equal_and_share_the_table(family: str, dynamic: bool | None):
    """One graph for every token count, the table fetched while tracing; also by the defaults of the
    compiled function, which Dynamo turns into symbols."""
    apply, apply_, _, _, _ = FUNCTIONS[family]

    def call(q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor) -> tuple[object, ...]:
        apply_(k, None, indptr, offsets, rope_theta=321.0)
        return *apply(q, None, indptr, offsets, rope_theta=321.0), k

    registry.clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
    for tokens in (11, 13, 17):
        indptr, offsets = torch.tensor([0, 4, tokens]), torch.tensor([8190, -3])
        q = randn(tokens, 3, 16)
        results = [f(q, q.clone(), indptr, offsets) for f in (compiled, call)]
        for actual, expected in zip(*results, strict=True):
            assert (actual is None and expected is None) or torch.equal(actual, expected)
    assert counter.frame_count == (1 if dynamic else 2)
    (module,) = registry.modules()
    assert not torch._is_functional_tensor(module.cos_sin_cache)
    alone = torch.compile(apply, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for theta in (321.0, 654.0, 987.0):
        actual, _ = alone(q, None, indptr, offsets, rope_theta=theta)
        assert torch.equal(actual, apply(q, None, indptr, offsets, rope_theta=theta)[0])


def test_gradients_flow_through_the_functional_forms():
    x, positions = randn(11, 2, 16).requires_grad_(), torch.tensor(PLACES)
    f = newest_frequencies(lambda: flashinfer.apply_rope_pos_ids(x, None, positions))
    q, _ = flashinfer.apply_rope_pos_ids(x, None, positions)
    incoming = randn(11, 2, 16, seed=2)
    (actual,) = torch.autograd.grad(q, x, incoming)
    (expected,) = torch.autograd.grad(plain_rotate(x, *rows(positions, f)), x, incoming.double())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
