"""The pass that finds hand-written rotary embedding in compiled graphs.

Every form is written here as models write it, compiled with the pass, and compared with float64;
the operators in the final graph are counted. Wrong twins (reflections, other pairings, halves that
differ) look alike and must stay as they are. ``python test_inductor_pass.py`` compiles for fake
CUDA tensors and prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import operator
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph, post_grad

import rope_compile as rc
from rope_compile import inductor
from rope_compile.inductor import Record, _State, rules
from rope_compile.ops import rope_op

from inductor_text import Found, cuda, inductor_code
from joint_graphs import SLOTS, Compiled, count_ops
from support import pair_channels, randn, run_child

pytestmark = pytest.mark.usefixtures("fresh_compiler", "pass_off")

B, S, D = 2, 7, 24  # the head counts are 5 and 3


@pytest.fixture
def pass_off() -> Iterator[None]:
    """No test leaves the pass, or one of its own, behind."""
    yield
    inductor.disable()
    left = [getattr(inductor_config, slot) for slot in SLOTS]
    for slot in SLOTS:
        setattr(inductor_config, slot, None)
    assert left == [None, None]


@pytest.fixture
def no_patterns() -> Iterator[None]:
    """Without Inductor's tables of attention patterns, which take 20 s to trace."""
    with (
        mock.patch.object(joint_graph, "lazy_init"),
        mock.patch.object(post_grad, "lazy_init"),
    ):
        yield


def check_same(function: Callable[..., object], *args: object, count: int = 0) -> Compiled:
    """With the pass on, the function gives what eager mode gives, with that many operators."""
    with inductor.enable():
        compiled = Compiled(function)
        actual = compiled(*args)
    torch.testing.assert_close(actual, function(*args), rtol=2e-6, atol=2e-6)
    assert sum(compiled.counts) == count
    return compiled


def calls_of(compiled: Compiled) -> list[fx.Node]:
    """The operators in its first graph."""
    return compiled.graphs[0].graph.find_nodes(op="call_function", target=rope_op)


# ----------------------------------------------------------------- the forms that models write
#
# Each takes x [..., D] and angles [..., R/2] that broadcast with it.


def full(angles: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat((angles, angles), -1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


def turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_half(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = full(angles, x)
    return x * cos + turned(x) * sin


def split_halves(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().split(x.shape[-1] // 2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


def view_of_halves(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = full(angles, x)
    a, b = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).unbind(-2)
    return x * cos + torch.cat((-b, a), -1) * sin


def fused_multiply_add(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = full(angles, x)
    return torch.addcmul(x * cos, turned(x), sin)


def interleaved(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def every_two(x: Tensor, angles: Tensor) -> Tensor:
    cos = angles.cos().repeat_interleave(2, -1)
    sin = angles.sin().repeat_interleave(2, -1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return (x * cos + torch.stack((-b, a), -1).flatten(-2) * sin).to(x.dtype)


def complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def stacked_cache(x: Tensor, angles: Tensor) -> Tensor:
    cache = torch.stack((angles.cos(), angles.sin()), -1)
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    out = torch.stack(
        (
            pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
            pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
        ),
        -1,
    )
    return out.flatten(-2).type_as(x)


def written_in_place(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos(), angles.sin()
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 1::2] * cos + x[..., ::2] * sin
    return out


def partial_first(x: Tensor, angles: Tensor) -> Tensor:
    width = 2 * angles.shape[-1]
    return torch.cat((rotate_half(x[..., :width], angles), x[..., width:]), -1)


def partial_last(x: Tensor, angles: Tensor) -> Tensor:
    width = 2 * angles.shape[-1]
    return torch.cat((x[..., :-width], interleaved(x[..., -width:], angles)), -1)


def deinterleaved(x: Tensor, angles: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return rotate_half(x.unflatten(-1, (half, 2)).transpose(-1, -2).reshape(*x.shape), angles)


def backwards(x: Tensor, angles: Tensor) -> Tensor:
    """The rotation by minus the angle."""
    cos, sin = full(angles, x)
    return x * cos - turned(x) * sin


# Name -> form, style, and whether it turns back.
FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, bool]] = {
    "rotate_half": (rotate_half, "half", False),
    "split_halves": (split_halves, "half", False),
    "view_of_halves": (view_of_halves, "half", False),
    "fused_multiply_add": (fused_multiply_add, "half", False),
    "interleaved": (interleaved, "interleaved", False),
    "every_two": (every_two, "interleaved", False),
    "complex_numbers": (complex_numbers, "interleaved", False),
    "stacked_cache": (stacked_cache, "interleaved", False),
    "written_in_place": (written_in_place, "interleaved", False),
    "deinterleaved": (deinterleaved, "interleaved_to_half", False),
    "partial_first": (partial_first, "half", False),
    "partial_last": (partial_last, "interleaved", False),
    "backwards": (backwards, "half", True),
}
PARTIAL = {"partial_first": (0, 8), "partial_last": (D - 8, 8)}  # offset, rotary_dim

# Name -> shape of x for a number of heads, and of the angles before the channels.
LAYOUTS: dict[str, tuple[Callable[[int], tuple[int, ...]], tuple[int, ...]]] = {
    "batch_heads_seq": (lambda heads: (B, heads, S, D), (1, 1, S)),
    "batch_seq_heads": (lambda heads: (B, S, heads, D), (S, 1)),
    "seq_batch_heads": (lambda heads: (S, B, heads, D), (S, 1, 1)),
    "tokens_heads": (lambda heads: (S, heads, D), (S, 1)),
    "batch_varying": (lambda heads: (B, heads, S, D), (B, 1, S)),
    "one_token": (lambda heads: (B, heads, 1, D), (B, 1, 1)),
    "no_heads": (lambda heads: (heads, D), ()),
}


def exact(x: Tensor, angles: Tensor, form: str) -> Tensor:
    """The same in float64, from the formula of the rotation and the names of its channels."""
    _, style, back = FORMS[form]
    offset, _ = PARTIAL.get(form, (0, D))
    read_x, read_y, write_x, write_y = torch.tensor(pair_channels(style, angles.shape[-1])) + offset
    cos, sin = angles.double().cos(), angles.double().sin() * (-1 if back else 1)
    x = x.double()
    a, b = x[..., read_x], x[..., read_y]
    out = x.clone()
    out[..., write_x] = a * cos - b * sin
    out[..., write_y] = b * cos + a * sin
    return out


def both(form: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    function = FORMS[form][0]
    return lambda q, k, angles: (function(q, angles), function(k, angles))


def arguments(layout: str, form: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shape, lead = LAYOUTS[layout]
    half = PARTIAL.get(form, (0, D))[1] // 2
    q, k = (randn(*shape(heads), seed=heads, dtype=dtype) for heads in (5, 3))
    return [q, k, 3 * randn(*lead, half)]


def strides(x: Tensor) -> list[int]:
    """Those that matter: one element along a dimension has no stride."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def check_exact(actual: Tensor, plain: Tensor, expected: Tensor) -> None:
    """2e-6 in float32; for 16 bits twice the error of the plain formula and one rounding."""
    assert actual.dtype == plain.dtype
    assert strides(actual) == strides(plain)
    error, size = (actual.double() - expected).abs().max(), expected.abs().max()
    if actual.dtype == torch.float32:
        assert error <= 2e-6 * size
    else:
        error_plain = (plain.double() - expected).abs().max()
        assert error <= 2 * error_plain + torch.finfo(actual.dtype).eps * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, dtype: torch.dtype) -> None:
    """Every form is one operator for q and k, and one for their gradients, right to float64."""
    q, k, angles = arguments("batch_heads_seq", form, dtype)
    if form in ("interleaved", "rotate_half"):  # memory of [batch, seq, heads, head_dim]
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    leaves = [x.requires_grad_() for x in (q, k)]
    with inductor.enable():
        compiled = Compiled(both(form))
        actual = compiled(q, k, angles)
    plain = both(form)(q, k, angles)
    expected = [exact(x, angles, form) for x in (q, k)]
    grads = [randn(*x.shape, seed=9 + i, dtype=dtype) for i, x in enumerate(leaves)]
    for a, b, c in zip(actual, plain, expected, strict=True):
        check_exact(a, b, c)
    for a, b, c in zip(
        torch.autograd.grad(actual, leaves, grads),
        torch.autograd.grad(plain, leaves, grads),
        torch.autograd.grad(expected, leaves, grads),
        strict=True,
    ):
        check_exact(a, a, c.double()) if dtype == torch.float32 else check_exact(a, b, c.double())
    assert compiled.counts == [1, 1]
    _, style, back = FORMS[form]
    found = inductor.report()
    assert [(x.replaced, x.joined, x.style, x.inverse, x.backward) for x in found] == [
        (True, True, style, back, False),
        (True, True, style, not back, True),
    ]
    assert {x.rotary_dim for x in found} == {PARTIAL.get(form, (0, D))[1]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["rotate_half", "complex_numbers", "partial_last"])
def test_layouts(layout: str, form: str) -> None:
    """Wherever the heads stand: the strides are those of the formula, and the numbers right."""
    args = arguments(layout, form)
    with inductor.enable():
        compiled = Compiled(both(form))
        actual = compiled(*args)
    for x, a, b in zip(args, actual, both(form)(*args), strict=False):
        check_exact(a, b, exact(x, args[2], form))
    assert compiled.counts == [1]


def test_wrong_expectation_is_caught() -> None:
    """The comparison is no formality: another direction or style is far away."""
    q, _, angles = arguments("tokens_heads", "rotate_half")
    for wrong in (backwards(q, angles), interleaved(q, angles), rotate_half(q, angles + 1e-3)):
        with pytest.raises(AssertionError):
            check_exact(wrong, wrong, exact(q, angles, "rotate_half"))


# ------------------------------------------------------------------------------------ around models


def test_packed_projection() -> None:
    """Slices of one projection are rotated as they lie; q alone is a call of one."""

    def packed(x: Tensor, weight: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x @ weight).view(B, S, 11, D).split([5, 3, 3], 2)
        return rotate_half(q, angles), rotate_half(k, angles), v

    def q_only(x: Tensor, weight: Tensor, angles: Tensor) -> Tensor:
        return rotate_half((x @ weight).view(B, S, 11, D)[:, :, :5].transpose(1, 2), angles[:, 0])

    args = randn(B, S, 16), randn(16, 11 * D, seed=1) / 4, randn(S, 1, D // 2, seed=2)
    compiled = check_same(packed, *args, count=1)
    check_same(q_only, *args, count=1)
    (call,) = calls_of(compiled)
    for source in call.args[:2]:
        assert set(way_to_projection(source)) <= {
            "aten.permute.default",
            "aten.split_with_sizes.default",
            "aten.view.default",
            str(operator.getitem),
        }


@pytest.mark.parametrize("form", ["rotate_half", "interleaved", "complex_numbers"])
@pytest.mark.parametrize("grad", [False, True])
def test_dynamic_sizes(form: str, grad: bool) -> None:
    """One graph for every batch and token count; the table's rows are counted by the graph."""

    def model(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        return both(form)(q, k, positions[:, None, :, None] * inv_freq)

    with inductor.enable(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = Compiled(model)
        for batch, seq in ((2, 7), (3, 11), (5, 2)):
            q, k = (randn(batch, heads, seq, D, seed=heads) for heads in (5, 3))
            positions = torch.randint(0, 99, (batch, seq))
            for x in (q, k):
                x.requires_grad_(grad)
                for dim in (0, 2):
                    torch._dynamo.mark_dynamic(x, dim)
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(positions, dim)
            inv_freq = 10000.0 ** -torch.linspace(0, 1, D // 2)
            actual = compiled(q, k, positions, inv_freq)
            angles = positions[:, None, :, None] * inv_freq
            expected = [exact(x, angles, form) for x in (q, k)]
            for a, b in zip(actual, expected, strict=True):
                check_exact(a, a, b)
            if grad:
                given = torch.autograd.grad([x.square().sum() for x in actual], [q, k])
                wanted = torch.autograd.grad([x.square().sum() for x in expected], [q, k])
                for a, b in zip(given, wanted, strict=True):
                    check_exact(a, a, b.double())
    assert compiled.counts == ([1, 1] if grad else [1])


def test_unbacked_token_count() -> None:
    """A token count nobody knows may turn out to be 0."""

    def model(x: Tensor, angles: Tensor) -> Tensor:
        return rotate_half(x, angles)

    with inductor.enable():
        compiled = Compiled(model)
        for tokens in (7, 0, 1):
            x, angles = randn(tokens, 5, D), randn(tokens, 1, D // 2)
            for tensor in (x, angles):
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            torch.testing.assert_close(compiled(x, angles), model(x, angles))
    assert compiled.counts == [1]


def test_one_table_for_all_layers() -> None:
    """Layers that share cos and sin share the table, whatever is done to them in each."""

    def model(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = full(angles, q)
        for _ in range(3):
            q, k = (x * cos.unsqueeze(1) + turned(x) * sin.unsqueeze(1) for x in (q, k))
            q, k = q.relu(), k.relu() + q.mean()
        return q, k

    q, k, _ = arguments("batch_heads_seq", "rotate_half")
    calls = calls_of(check_same(model, q, k, randn(B, S, D // 2), count=3))
    assert len({call.args[3] for call in calls}) == 1
    assert len({call.args[2] for call in calls}) == 1
    assert [x.count for x in inductor.report()] == [3]


def test_gathered_cache() -> None:
    """Rows of a table of halves that positions pick, in every layer anew."""

    def model(q: Tensor, k: Tensor, at: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            cos, sin = cache.index_select(0, at).chunk(2, -1)
            cos, sin = (torch.cat((x, x), -1)[:, None] for x in (cos, sin))
            q, k = (x * cos + turned(x) * sin for x in (q, k))
            k = k + q.sum()
        return q, k

    q, k, _ = arguments("tokens_heads", "rotate_half")
    args = q, k, torch.randint(0, 31, (S,)), randn(31, D)
    with inductor.enable():
        compiled = Compiled(model)
        actual = compiled(*args)
    torch.testing.assert_close(actual, model(*args), rtol=1e-5, atol=1e-4)
    calls = calls_of(compiled)
    assert len(calls) == 2
    assert len({call.args[3] for call in calls}) == 1


def test_pairs_that_wait_for_one_another() -> None:
    """A tensor that is made from the other is never rotated in one call with it."""

    def model(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        q1 = rotate_half(q, angles)
        return q1, rotate_half(q1 + 1, angles), rotate_half(k, angles)

    check_same(model, *arguments("tokens_heads", "rotate_half"), count=2)

    def crossed(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        a = rotate_half(q, angles)
        c = rotate_half(a * 2, angles + 1)
        d = rotate_half(q * 3, angles + 1)
        return a, c, d, rotate_half(d * 4, angles)

    # c and d in one call, so a and the last one must not wait for one another.
    check_same(crossed, *arguments("tokens_heads", "rotate_half"), count=3)


def shared_view(k: Tensor) -> Tensor:
    return k.view(k.shape[0], 1, -1, k.shape[-1])


def shared_unsqueezed(k: Tensor) -> Tensor:
    return k.unsqueeze(1)


def shared_transposed(k: Tensor) -> Tensor:
    return k.view(*k.shape[:2], 1, k.shape[-1]).transpose(1, 2)


def shared_doubled(k: Tensor) -> Tensor:
    return (2 * k).unsqueeze(1)


NOPE, ROPE, LATENT = 12, 8, 14


def latent_attention(
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wkv: Tensor,
    angles: Tensor,
    form: Callable[..., Tensor],
    shared: Callable[..., Tensor],
    before: int,
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention: q is copied and rotated channels, one head of k is for all.

    The channels of k lie behind ``before`` others of one projection.
    """
    batch, seq, _ = x.shape
    q = (x @ wq).view(batch, seq, 5, NOPE + ROPE).transpose(1, 2)
    latent, k, _ = (x @ wk).split([before, ROPE, wk.shape[1] - before - ROPE], -1)
    copied = (latent.relu() @ wkv[:before]).view(batch, seq, 5, NOPE).transpose(1, 2)
    q_copied, q = q.split([NOPE, ROPE], -1)
    q, k = form(q, angles), form(shared(k), angles)
    keys = torch.cat((copied, k.expand(-1, 5, -1, -1)), -1)
    scores = torch.cat((q_copied, q), -1) @ keys.transpose(-1, -2)
    return scores.softmax(-1) @ copied, k


def latent_arguments(batch: int = B, seq: int = S) -> list[Tensor]:
    weights = (16, 5 * (NOPE + ROPE)), (16, LATENT + ROPE), (LATENT, 5 * NOPE)
    drawn = [randn(*size, seed=i) / 4 for i, size in enumerate(weights)]
    return [randn(batch, seq, 16, seed=7), *drawn, randn(batch, 1, seq, ROPE // 2, seed=8)]


def way_to_projection(source: fx.Node) -> list[str]:
    way = []
    while source.target is not torch.ops.aten.mm.default:
        way.append(str(source.target))
        source = source.args[0]
    return way


# Form, how k becomes a head, how many channels lie before it, and whether those can be seen with
# it, as many as q copies; else zeros are put there.
LATENT_CASES: list[tuple[str, Callable[[Tensor], Tensor], int, bool]] = [
    ("rotate_half", shared_view, LATENT, True),
    ("interleaved", shared_view, LATENT, True),
    ("deinterleaved", shared_unsqueezed, LATENT, True),
    ("complex_numbers", shared_transposed, NOPE, True),
    ("rotate_half", shared_view, NOPE - 1, False),
    ("deinterleaved", shared_doubled, LATENT, False),
]


@pytest.mark.parametrize(("form", "shared", "before", "seen"), LATENT_CASES)
def test_latent_attention(
    form: str, shared: Callable[[Tensor], Tensor], before: int, seen: bool
) -> None:
    """q with channels before the rotated ones, k without: one call, of views where they allow it.

    The gradients are one call too. Strides of results are those of the model.
    """
    args = latent_arguments()
    more = {"form": FORMS[form][0], "shared": shared, "before": before}
    leaves = [x.requires_grad_() for x in args[:4]]
    with inductor.enable():
        trained = Compiled(functools.partial(latent_attention, **more))
        actual = trained(*args)
        grads = torch.autograd.grad([x.square().sum() for x in actual], leaves)
        found = inductor.report()
        inference = Compiled(functools.partial(latent_attention, **more))
        with torch.no_grad():
            inferred = inference(*args)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    expected = latent_attention(*exact_args, **more)
    assert [strides(x) for x in inferred] == [strides(x) for x in expected]
    wanted = torch.autograd.grad([x.square().sum() for x in expected], exact_args[:4])
    for a, b in zip((*actual, *inferred, *grads), (*expected, *expected, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= 1e-5 * b.abs().max()
    assert trained.counts == [1, 1]
    assert inference.counts == [1]
    shapes = {(B, 5, S, NOPE + ROPE), (B, 1, S, ROPE)}
    assert [(x.joined, set(x.shapes), x.backward) for x in found] == [
        (True, shapes, False),
        (True, shapes, True),
    ]
    (call,) = calls_of(inference)
    for source in call.args[:2]:
        assert source.meta["val"].shape[-1] == NOPE + ROPE
        padded = not seen and source.meta["val"].shape[-2] == 1  # k
        assert ("aten.constant_pad_nd.default" in way_to_projection(source)) == padded


def test_channels_before_k_do_not_matter() -> None:
    """What k is seen with may hold anything; one channel further on would be another result."""

    def model(q: Tensor, wide: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return partial_last(q, angles), interleaved(wide[:, :1, :, D - 8 :], angles)

    q, k, angles = arguments("batch_heads_seq", "partial_last")
    k[..., : D - 8] = float("nan")
    (call,) = calls_of(check_same(model, q, k, angles, count=1))
    assert [x.meta["val"].shape[-1] for x in call.args[:2]] == [D, D]
    assert "constant_pad_nd" not in str(call.graph)
    expected = model(q, k, angles)[1]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(q, k.roll(1, -1), angles)[1], expected)


def test_latent_attention_of_dynamic_sizes() -> None:
    """One graph for every batch and token count, k seen with the channels before it."""

    def model(*args: Tensor) -> tuple[Tensor, Tensor]:
        return latent_attention(*args, form=rotate_half, shared=shared_view, before=LATENT)

    with inductor.enable(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = Compiled(model)
        for batch, seq in ((2, 7), (3, 11), (5, 2)):
            args = latent_arguments(batch, seq)
            for x, dims in ((args[0], (0, 1)), (args[4], (0, 2))):
                torch._dynamo.mark_dynamic(x, dims)
            torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-5, atol=1e-5)
    assert compiled.counts == [1]


def test_offsets_that_differ_stay_apart() -> None:
    """Many heads are not copied to lie like others; those that lie alike find one another."""

    def two_calls(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return partial_last(q, angles), interleaved(k[..., :8], angles)

    q, k, angles = arguments("batch_heads_seq", "partial_last")
    check_same(two_calls, q, k, angles, count=2)
    check_same(two_calls, q, k[:, :1], angles, count=1)

    def indexer(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        """Two pairs with one table: k alone, q behind others, and a pair that lies alike."""
        narrow = interleaved(k[:, :1, :, :8], angles)
        return (
            narrow,
            partial_last(q, angles),
            partial_last(k[:, :1], angles),
            interleaved(q[..., :8], angles),
        )

    compiled = check_same(indexer, q, k, angles, count=2)
    assert {x.shapes for x in inductor.report()} == {
        ((B, 1, S, 8), (B, 5, S, 8)),
        ((B, 5, S, D), (B, 1, S, D)),
    }
    assert {call.args[7] for call in calls_of(compiled)} == {0, D - 8}


def test_intermediate_results_used_elsewhere() -> None:
    """What else reads a part of the formula still gets it."""

    def model(x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        cos, sin = full(angles, x)
        first, second = x * cos, turned(x) * sin
        out = first + second
        whole = torch.cat((out, x[..., :4]), -1)
        return out, whole, second.sum(), out.to(torch.bfloat16), whole.to(torch.bfloat16)

    x, _, angles = arguments("tokens_heads", "rotate_half")
    with inductor.enable():
        compiled = Compiled(model)
        actual = compiled(x, angles)
    torch.testing.assert_close(actual, model(x, angles), rtol=2e-6, atol=2e-6)
    assert compiled.counts == [1]


def test_strides_that_a_user_needs() -> None:
    """A view that only the old strides allow, and a graph output, get them back by a copy."""

    def model(x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        out = rotate_half(x, angles)  # [batch, heads, seq, head_dim], contiguous
        return out, out.view(B * 5, S, D), (out * 2).transpose(1, 2)

    x, _, angles = arguments("batch_heads_seq", "rotate_half")
    compiled = check_same(model, x, angles, count=1)
    for a, b in zip(compiled(x, angles), model(x, angles), strict=True):
        assert a.stride() == b.stride()
    for node in compiled.graphs[0].graph.nodes:  # what the graph says of itself is true
        if node.op == "output":
            outputs = [x.meta["val"].stride() for x in node.args[0]]
    assert outputs == [x.stride() for x in model(x, angles)]


def given(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A layer of a model that is compiled in parts: cos and sin come from outside."""
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def given_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def one(x: Tensor) -> Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    return one(q), one(k)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_width_inputs(layout: str, trusted: bool) -> None:
    """Nothing is assumed about the two halves of what comes into a graph at full width.

    Each channel has its own cos and sin, and the gradient the transpose. Trusted, the halves are
    taken to agree.
    """
    q, k, angles = arguments(layout, "rotate_half")
    q.requires_grad_()
    both = torch.cat((angles, angles if trusted else angles.flip(-1) + 1), -1)
    args = q, k, both.cos(), both.sin()
    with inductor.enable(trust_full_width=trusted):
        compiled = Compiled(given)
        actual = compiled(*args)
        grad = torch.autograd.grad(actual[0].square().sum() + actual[1].sum(), q)
        found = inductor.report()
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in args]
    expected = given(*exact)
    wanted = torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), exact[0])
    for a, b in zip((*actual, *grad), (*expected, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= 1e-5
    assert compiled.counts == [1, 1]
    assert [(x.joined, x.inverse, x.backward) for x in found] == [
        (True, False, False),
        (False, True, True),
    ]
    (call,) = calls_of(compiled)
    rows, width = call.args[3].meta["val"].shape
    assert width == D
    assert list(call.args[5]) == ([] if trusted else [0] * (D // 2) + [1] * (D // 2))
    assert rows == angles[..., 0].numel() * (1 if trusted else 2)


def test_halves_that_differ_are_not_to_be_trusted() -> None:
    """Wrong twin: the first half for both is another result, and the check above sees it."""
    q, k, angles = arguments("tokens_heads", "rotate_half")
    both = torch.cat((angles, angles + 1), -1)
    args = q, k, both.cos(), both.sin()
    check_same(given, *args, count=1)
    torch.compiler.reset()
    with inductor.enable(trust_full_width=True):
        wrong = Compiled(given)(*args)
    assert (wrong[0] - given(*args)[0]).abs().max() > 0.1


def test_even_and_odd_channels_of_inputs_are_refused_with_the_remedy() -> None:
    """The operator has no other cos for the second channel of such a pair."""
    q, k, angles = arguments("batch_heads_seq", "rotate_half")
    both = angles.repeat_interleave(2, -1)
    args = q, k, both.cos(), both.sin()
    check_same(given_pairs, *args)
    found = inductor.report()
    assert [x.replaced for x in found] == [False] * len(found) != []
    assert all("trust_full_width" in x.reason for x in found)
    torch.compiler.reset()
    with inductor.enable(trust_full_width=True):
        compiled = Compiled(given_pairs)
        actual = compiled(*args)
    torch.testing.assert_close(actual, given_pairs(*args), rtol=2e-6, atol=2e-6)
    assert compiled.counts == [1]


def test_full_width_inputs_of_dynamic_sizes() -> None:
    with inductor.enable(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = Compiled(given)
        for seq in (7, 11, 2):
            q, k, both = randn(B, 5, seq, D), randn(B, 3, seq, D, seed=1), randn(B, 1, seq, D)
            args = q, k, both.cos(), both.sin()
            for x in args:
                torch._dynamo.mark_dynamic(x, 2)
            torch.testing.assert_close(compiled(*args), given(*args), rtol=1e-5, atol=1e-5)
    assert compiled.counts == [1]


# -------------------------------------------------------------------------------------- wrong twins


def halves_differ(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    both = torch.cat((angles, angles * 2), -1)
    return x * both.cos() + turned(x) * both.sin()


def reflection(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = full(angles, x)
    return x * cos + torch.cat((b, a), -1) * sin


def mirrored_pairs(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    """Channel i with the i-th from the end."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    b = b.flip(-1)
    return torch.cat((a * cos - b * sin, (b * cos + a * sin).flip(-1)), -1)


def cos_of_another(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    """cos of one pair, sin of the next."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos.roll(1, -1) + a * sin), -1)


def two_tensors(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    cos, sin = full(angles, x)
    return x * cos + turned(y) * sin


def scaled_cos(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    """A factor of its own for every channel."""
    cos, sin = full(angles, x)
    return x * (cos * y[0, 0]) + turned(x) * (sin * y[0, 0])


def table_of_each_head(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    cos, sin = full(angles * torch.arange(5)[:, None], x)
    return x * cos + turned(x) * sin


def swapped(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    """cos and sin exchanged on one side only."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * sin + a * cos), -1)


def squared(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    cos, sin = full(angles, x)
    return x * cos + turned(x * x) * sin


def other_channels_beside(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    """Half of each head rotated, the rest from channels of another place: the inner part only."""
    inner = rotate_half(x[..., :12], angles[..., :6])
    return torch.cat((inner, x[..., 6:18]), -1)


def scaled_after(x: Tensor, y: Tensor, angles: Tensor) -> Tensor:
    """A rotation, then a factor for every channel, which stays."""
    return rotate_half(x, angles) * y[0, 0]


TWINS: dict[Callable[..., Tensor], int] = {
    halves_differ: 0,
    reflection: 0,
    mirrored_pairs: 0,
    cos_of_another: 0,
    two_tensors: 0,
    scaled_cos: 0,
    table_of_each_head: 0,
    swapped: 0,
    squared: 0,
    other_channels_beside: 1,
    scaled_after: 1,
}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_wrong_twins(twin: Callable[..., Tensor]) -> None:
    """What only looks like a rotation stays and gives what it gave, trusted or not."""
    x, angles = randn(S, 5, D), randn(S, 1, D // 2, seed=1)
    check_same(twin, x, randn(S, 5, D, seed=2), angles, count=TWINS[twin])
    torch.compiler.reset()
    with inductor.enable(trust_full_width=True):
        compiled = Compiled(twin)
        compiled(x, randn(S, 5, D, seed=2), angles)
    assert sum(compiled.counts) == TWINS[twin]


def test_float64_is_left_alone() -> None:
    x, angles = randn(S, 5, D, dtype=torch.float64), randn(S, 1, D // 2, dtype=torch.float64)
    check_same(rotate_half, x, angles)
    (found,) = inductor.report()
    assert "float64" in found.reason


def test_refusals_say_why() -> None:
    x, y, angles = randn(S, 5, D), randn(S, 5, D, seed=2), randn(S, 1, D // 2, seed=1)
    for twin, word in ((reflection, "reflection"), (table_of_each_head, "head")):
        with inductor.enable():
            Compiled(twin)(x, y, angles)
        (found,) = inductor.report()
        assert word in found.reason
        assert found.shapes == ((S, 5, D),)
        assert not found.joined


def test_own_operator_is_left_alone() -> None:
    """A model that calls the operator already has nothing to replace."""

    def model(q: Tensor, k: Tensor, cache: Tensor) -> tuple[Tensor, Tensor | None]:
        return rc.apply_rope(q, k, torch.arange(S), cache)

    q, k, _ = arguments("tokens_heads", "rotate_half")
    check_same(model, q, k, randn(S, D), count=1)
    assert inductor.report() == []


# --------------------------------------------------------------------------------------- the switch


class Count(CustomGraphPass):
    """Somebody's own pass: counts its calls and the operators that it sees."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(count_ops(graph))

    def uuid(self) -> object:
        return "count"


def run_inductor() -> None:
    torch.compiler.reset()
    x, angles = randn(S, 5, D), randn(S, 1, D // 2, seed=1)
    actual = torch.compile(rotate_half, fullgraph=True)(x, angles)
    torch.testing.assert_close(actual, rotate_half(x, angles), rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("no_patterns")
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("theirs_first", [True, False])
def test_composes_with_other_passes(slot: str, theirs_first: bool) -> None:
    """A pass set before ours runs before it, one set after takes nothing away, and both stay."""
    theirs = Count()
    with inductor_config.patch(force_disable_caches=True):
        if theirs_first:
            setattr(inductor_config, slot, theirs)
        inductor.enable()
        if not theirs_first:
            setattr(inductor_config, slot, theirs)
        run_inductor()
        assert len(theirs.seen) == 1
        assert [(x.replaced, x.count) for x in inductor.report()] == [(True, 1)]
        inductor.disable()
        assert getattr(inductor_config, slot) is theirs
        run_inductor()
        assert theirs.seen[1:] == [0]
        assert len(inductor.report()) == 1
    setattr(inductor_config, slot, None)


def test_list_of_passes() -> None:
    """Where Inductor takes a list, ours leaves it as it was."""
    first, second = Count(), Count()
    inductor_config.joint_custom_pre_pass = [first, second]
    with inductor.enable():
        Compiled(rotate_half)(randn(S, 5, D), randn(S, 1, D // 2))
        inductor_config.joint_custom_pre_pass = [inductor_config.joint_custom_pre_pass, Count()]
    assert first.seen == second.seen == [0]
    assert [type(x) for x in inductor_config.joint_custom_pre_pass] == [Count] * 3
    inductor_config.joint_custom_pre_pass = None


def test_switch_restores() -> None:
    """As a context manager it restores what was before, options too."""

    def on() -> list[bool]:
        return [getattr(inductor_config, slot) is not None for slot in SLOTS]

    def trusts() -> bool:
        return "True" in str(inductor_config.joint_custom_pre_pass.uuid())

    assert on() == [False, False]
    with inductor.enable():
        assert on() == [True, True]
        assert not trusts()
        with inductor.enable(trust_full_width=True):
            assert trusts()
        assert not trusts()
        with contextlib.suppress(KeyError), inductor.enable():
            inductor.disable()
            raise KeyError
        assert on() == [True, True]
    assert on() == [False, False]


def test_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of cached code holds the source, the versions, the options and the other passes."""

    def key() -> object:
        inductor._identity.cache_clear()
        return inductor_config.joint_custom_pre_pass.uuid()

    inductor.enable()
    keys = [key()]
    assert key() == keys[0]
    inductor.enable(trust_full_width=True)
    keys.append(key())
    monkeypatch.setattr(torch, "__version__", "99.0")
    keys.append(key())
    monkeypatch.undo()
    read: list[str] = []

    def other_code(path: Path) -> bytes:
        read.append(path.name)
        return b"other code"

    monkeypatch.setattr(Path, "read_bytes", other_code)
    keys.append(key())
    monkeypatch.undo()
    own = [path.name for path in Path(inductor.__file__).parent.glob("*.py")]
    assert sorted(read) == sorted([*own, "ops.py", "triton_rope.py"])
    inductor.disable()
    inductor_config.joint_custom_pre_pass = Count()
    inductor.enable()
    keys.append(key())
    assert len(set(map(str, keys))) == len(keys)
    inductor.disable()
    inductor_config.joint_custom_pre_pass = lambda graph: None  # has no identity: no caching at all
    inductor.enable()
    assert key() is None
    inductor.disable()
    inductor_config.joint_custom_pre_pass = None
    inductor._identity.cache_clear()


@pytest.mark.usefixtures("no_patterns")
def test_cached_code_keeps_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code from the cache is what the pass made, and with the pass off it is not used."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def compile_again() -> tuple[str, bool]:
        """What the cache did, and whether the pass ran."""
        counters.clear()
        run_inductor()
        done = [name for name in counters["aot_autograd"] if name.startswith("autograd_cache_")]
        return done[0].removeprefix("autograd_cache_"), bool(inductor.report())

    def calls() -> int:
        return sum("rope_compile.rope.default" in x.read_text() for x in tmp_path.rglob("*.py"))

    caches = functorch_config.patch(enable_autograd_cache=True, enable_remote_autograd_cache=False)
    with caches, inductor_config.patch(fx_graph_cache=True, fx_graph_remote_cache=False):
        with inductor.enable():
            assert compile_again() == ("miss", True)
        assert calls() == 1
        with inductor.enable():
            assert compile_again() == ("hit", False)
        with inductor.enable(trust_full_width=True):
            assert compile_again() == ("miss", True)
        _State.records.clear()
        assert compile_again() == ("miss", False)  # off: other code
        inductor_config.joint_custom_post_pass = lambda graph: None  # has no identity
        with inductor.enable():
            assert compile_again() == ("bypass", True)
        inductor_config.joint_custom_post_pass = None


@pytest.mark.usefixtures("no_patterns")
def test_private_names() -> None:
    """Fails when Inductor renames, or stops to call, what the pass hangs on."""
    for slot in SLOTS:
        assert getattr(inductor_config, slot) is None
        seen = Count()
        with inductor_config.patch({slot: seen, "force_disable_caches": True}):
            run_inductor()
        assert seen.seen == [0]


def test_a_graph_that_cannot_be_read_compiles_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the pass is a warning and a record, and not the end of a user's model."""

    def broken(reader: object, node: fx.Node) -> None:
        raise IndexError("of a rule")

    q, _, angles = arguments("tokens_heads", "rotate_half")
    monkeypatch.setitem(rules._RULES, torch.ops.aten.cat.default, broken)
    check_same(rotate_half, q, angles)
    (record,) = inductor.report()
    assert record.reason == "the graph could not be read, please report it: IndexError: of a rule"
    assert [x.levelname for x in caplog.records if "could not be read" in x.message] == ["WARNING"]


def test_a_number_seen_as_a_row() -> None:
    """What has no dimension has no channels either: such gradients of a scalar occur in models."""

    def model(x: Tensor, angles: Tensor, scale: Tensor) -> Tensor:
        return rotate_half(x, angles) * scale.unsqueeze(-1).expand(D)

    q, _, angles = arguments("tokens_heads", "rotate_half")
    check_same(model, q, angles, torch.tensor(2.0), count=1)


def test_log_and_records(caplog: pytest.LogCaptureFixture) -> None:
    """Every find is a log line at INFO; records are values."""
    caplog.set_level(logging.INFO, logger="rope_compile.inductor")
    with inductor.enable():
        Compiled(rotate_half)(randn(S, 5, D), randn(S, 1, D // 2))
    (record,) = inductor.report()
    assert record == Record(True, ((S, 5, D),), "half", D)
    assert "half" in caplog.text
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.count = 2  # type: ignore[misc]
    inductor.enable()
    assert inductor.report() == []


def test_import_is_lazy() -> None:
    """``import rope_compile`` loads neither this module nor Inductor."""
    run_child(
        "-c",
        "import sys, torch; before = {x for x in sys.modules if x.startswith('torch._inductor')}\n"
        "import rope_compile\n"
        "after = {x for x in sys.modules if x.startswith('torch._inductor')}\n"
        "assert after == before and 'rope_compile.inductor' not in sys.modules",
    )


# Each imports only those before it.
MODULES = [
    *("nodes", "expressions", "reader", "arithmetic", "rules", "rotations"),
    *("writer", "strides", "widening", "rewrite", "__init__"),
]


def upward(name: str, source: str) -> set[str]:
    """The modules of the pass that one imports and must not."""
    found = set(re.findall(r"rope_compile\.inductor(?:\.(\w+))? import", source))
    return found - set(MODULES[: MODULES.index(name)])


def test_imports_inside_run_one_way() -> None:
    files = {path.stem: path for path in Path(inductor.__file__).parent.glob("*.py")}
    assert set(files) == set(MODULES)
    assert not {name for name, path in files.items() if upward(name, path.read_text())}
    assert upward("reader", "from rope_compile.inductor.rules import rule_of") == {"rules"}
    assert upward("reader", "from rope_compile.inductor import enable") == {""}


# ------------------------------------------------------------------------------------- whole models


def tiny_llama(count: int) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=count,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def test_llama() -> None:
    """A model of transformers: one operator a layer, and one in its backward pass."""
    model = tiny_llama(2)
    ids = torch.randint(0, 61, (2, 7))

    def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
        out = model(ids, use_cache=False, labels=ids)
        return out.loss, out.logits

    with inductor.enable():
        compiled = Compiled(loss)
        actual, logits = compiled(ids)
        actual.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected, expected_logits = loss(ids)
    expected.backward()
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-6)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-6)
    assert compiled.counts == [2, 2]
    assert [(x.joined, x.count, x.backward) for x in inductor.report()] == [
        (True, 2, False),
        (True, 2, True),
    ]


@pytest.mark.usefixtures("no_patterns")
def test_llama_through_inductor() -> None:
    """A bfloat16 model through all of Inductor: no further from float64 than without the pass."""
    model = tiny_llama(1).to(torch.bfloat16).eval()
    ids = torch.randint(0, 61, (1, 7))
    with inductor.enable(), torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(model)
        actual = compiled(ids, use_cache=False).logits
        found = inductor.report()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        exact = tiny_llama(1).double().eval()(ids, use_cache=False).logits
    assert [(x.joined, x.count, x.reason) for x in found] == [(True, 1, "")]
    error, error_plain = ((x.double() - exact).abs().max() for x in (actual, expected))
    assert error <= 2 * error_plain


# -------------------------------------------------------------------------------- code for a GPU


def layers(x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Two packed projections and the rotation of their q and k, as transformers writes it."""
    cos, sin = full(positions.unsqueeze(1) * inv_freq, x)
    for _ in range(2):
        q, k, v = (x @ weight).view(-1, 48, 128).split([32, 8, 8], 1)
        q, k = (y * cos.unsqueeze(1) + turned_by_split(y) * sin.unsqueeze(1) for y in (q, k))
        x = x + q.reshape(-1, 4096) + (k + v).sum()
    return x


def turned_by_split(x: Tensor) -> Tensor:
    """``turned`` without Python slices, which fake CUDA tensors lack on a CPU build."""
    a, b = x.split(x.shape[-1] // 2, -1)
    return torch.cat((-b, a), -1)


def latent_layer(
    x: Tensor, wq: Tensor, wk: Tensor, wkv: Tensor, positions: Tensor, inv_freq: Tensor
) -> Tensor:
    """Multi-head latent attention with the widths of DeepSeek-V3 (arXiv 2412.19437), 16 heads."""
    cos, sin = full((positions.unsqueeze(1) * inv_freq).view(1, 1, 77, 32), x)
    q_copied, q = (x @ wq).view(3, 77, 16, 192).transpose(1, 2).split([128, 64], -1)
    latent, k = (x @ wk).split([512, 64], -1)
    copied = (latent.relu() @ wkv).view(3, 77, 16, 128).transpose(1, 2)
    q, k = (y * cos + turned_by_split(y) * sin for y in (q, k.view(3, 1, 77, 64)))
    keys = torch.cat((copied, k.expand(3, 16, 77, 64)), -1)
    return torch.cat((q_copied, q), -1) @ keys.transpose(-1, -2)


def part_of_a_model(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + turned_by_split(q) * sin, k * cos + turned_by_split(k) * sin


def part_arguments() -> tuple[Tensor, ...]:
    return cuda(3, 32, 77, 128), cuda(3, 8, 77, 128), cuda(3, 1, 77, 128), cuda(3, 1, 77, 128)


def latent_layer_arguments() -> tuple[Tensor, ...]:
    weights = cuda(1024, 3072), cuda(1024, 576), cuda(512, 2048)
    return cuda(3, 77, 1024), *weights, cuda(77, dtype=torch.float32), cuda(32, dtype=torch.float32)


def layers_arguments() -> tuple[Tensor, ...]:
    inv_freq = cuda(64, dtype=torch.float32)
    return cuda(77, 4096), cuda(4096, 6144), cuda(77, dtype=torch.float32), inv_freq


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """What Inductor writes, from a process of its own: a CPU build of torch may end it."""
    output = run_child("-W", "ignore", str(Path(__file__)))
    return {name: Found(**values) for name, values in json.loads(output).items()}


def test_one_launch_a_layer_on_a_gpu(found: dict[str, Found]) -> None:
    """One inlined launch for q and k of a layer, views passed as views, one table for all."""
    off, on = found["off"], found["on"]
    assert off.rope == []
    assert len(on.rope) == 2
    assert "torch.ops.rope_compile" not in on.calls
    for launch in on.rope:
        assert launch["q_ptr"] != launch["k_ptr"]
        assert launch["q_ptr"].startswith("reinterpret_tensor(buf")
        assert launch["k_ptr"].endswith("(473088, 6144, 128, 1), 4096)")
    assert len({x["cos_sin_cache_ptr"] for x in on.rope}) == 1
    assert len({x["positions_ptr"] for x in on.rope}) == 1
    made = [name for name in on.launches if "cos" in name]
    assert len(made) == 1  # cos and sin are computed once; the formula does it in every kernel
    assert len([name for name in off.launches if "cos" in name]) >= 2


def test_one_launch_for_latent_attention_on_a_gpu(found: dict[str, Found]) -> None:
    """The one head of k is read where the projection wrote it, with channels that q copies too."""
    (launch,) = found["latent"].rope
    assert "torch.ops.rope_compile" not in found["latent"].calls
    sources = sorted(launch[name].partition(", ")[2] for name in ("q_ptr", "k_ptr"))
    assert sources == [
        "(3, 77, 1, 192), (44352, 576, 44352, 1), 384)",
        "(3, 77, 16, 192), (236544, 3072, 192, 1), 0)",
    ]
    assert all(launch[x].startswith("reinterpret_tensor(buf") for x in ("q_ptr", "k_ptr"))


def test_one_launch_for_a_part_of_a_model_on_a_gpu(found: dict[str, Found]) -> None:
    """cos and sin at full width from outside: q and k in one launch all the same."""
    (launch,) = found["part"].rope
    assert "torch.ops.rope_compile" not in found["part"].calls
    assert launch["q_ptr"] != launch["k_ptr"]


def _print_found() -> None:
    found = {"off": inductor_code(layers, layers_arguments)}
    with inductor.enable():
        found["on"] = inductor_code(layers, layers_arguments)
        found["part"] = inductor_code(part_of_a_model, part_arguments)
        found["latent"] = inductor_code(latent_layer, latent_layer_arguments)
    sys.stdout.write(json.dumps({name: dataclasses.asdict(x) for name, x in found.items()}))


if __name__ == "__main__":
    _print_found()
