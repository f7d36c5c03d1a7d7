"""`RopeSelector`: every token gets the bits of the module that it chose, and nothing is read."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import rope_compile as rc
from rope_compile import RopeConfig, RopeSelector, RotaryEmbedding

from support import LAYOUTS, NoHostReads, edge_positions, make_layout, randn

BASES = (10_000.0, 500_000.0, 20_000.0)


def ropes(count: int = 3, **fields: object) -> list[RotaryEmbedding]:
    known = {"head_dim": 16, "max_position": 128} | fields
    return [RotaryEmbedding(RopeConfig(base=base, **known), "cpu") for base in BASES[:count]]


def one_by_one(rope: RopeSelector, positions, q, k, selector, **flags):
    """What each token's own module gives it, token after token."""
    outs = []
    for token, number in enumerate(selector.tolist()):
        member = rope.ropes[min(max(int(number), 0), len(rope.ropes) - 1)]
        part = slice(token, token + 1)
        keys = None if k is None else k[part]
        outs.append(member(positions[..., part], q[part], keys, **flags))
    qs, ks = zip(*outs, strict=True)
    return torch.cat(qs), None if k is None else torch.cat(ks)


CASES = {
    "half": {},
    "interleaved": {"style": "interleaved"},
    "interleaved_to_half": {"style": "interleaved_to_half"},
    "partial last": {"rotary_dim": 8, "rotary_offset": 8},
    "no rotation": {"rotary_dim": 0},
    "float64 phases": {"phase_dtype": torch.float64},
    "axes": {"axes": rc.ChunkedAxes((2, 3, 3))},
    "half_blocks": {"axes": rc.AxialAxes((8, 8)), "style": "half_blocks"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_token_has_the_bits_of_its_own_module(case, inverse, dtype):
    rope = RopeSelector(ropes(**CASES[case]))
    positions = edge_positions(128)
    tokens = len(positions)
    if "axes" in CASES[case]:
        count = rope.ropes[0].config.num_axes
        positions = torch.stack([positions.roll(i) for i in range(count)])
    q, k = randn(tokens, 4, 16, dtype=dtype), randn(tokens, 1, 16, dtype=dtype, seed=1)
    selector = torch.arange(tokens) % 3
    outs = rope(positions, q, k, selector=selector, inverse=inverse)
    alone = one_by_one(rope, positions, q, k, selector, inverse=inverse)
    for out, expected in zip(outs, alone, strict=True):
        assert torch.equal(out, expected)
        assert out.is_contiguous()
    if case not in ("interleaved_to_half",):
        rope.apply_(positions, q, k, selector=selector, inverse=inverse)
        assert torch.equal(q, outs[0])
        assert torch.equal(k, outs[1])


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_any_layout(layout):
    rope = RopeSelector(ropes(2))
    q = make_layout(layout, 5, 4, 16)
    tokens = q.shape[0]
    positions, selector = torch.arange(tokens) * 50, torch.arange(tokens) % 2 == 1
    out, none = rope(positions, q, selector=selector)
    assert none is None
    assert out.shape == q.shape
    if tokens:
        assert torch.equal(out, one_by_one(rope, positions, q, None, selector)[0])


def test_a_number_without_a_module_takes_the_nearest():
    rope, positions, q = RopeSelector(ropes()), torch.arange(5), randn(5, 2, 16)
    wild = torch.tensor([-(2**31), -1, 3, 7, 2**31 - 1], dtype=torch.int32)
    near = torch.tensor([0, 0, 2, 2, 2])
    assert torch.equal(
        rope(positions, q, selector=wild)[0], rope(positions, q, selector=near)[0]
    )  # fmt: skip


def test_one_choice_for_each_sequence_of_a_batch():
    rope = RopeSelector(ropes(2))
    q, k = randn(3, 7, 4, 16), randn(3, 7, 2, 16, seed=1)
    chosen = torch.tensor([[1], [0], [1]])
    outs = rope(torch.arange(7), q, k, selector=chosen)
    for row, number in enumerate(chosen.flatten().tolist()):
        alone = rope.ropes[number](torch.arange(7), q[row], k[row])
        assert all(torch.equal(out[row], x) for out, x in zip(outs, alone, strict=True))


def test_one_graph_for_every_token_count_and_choice():
    rope = RopeSelector(ropes())
    counter = CompileCounter()
    compiled = torch.compile(rope, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (7, 3, 12):
        q, k = randn(tokens, 4, 16), randn(tokens, 2, 16, seed=1)
        positions, selector = torch.arange(tokens) * 40, torch.arange(tokens) % 3
        outs = compiled(positions, q, k, selector=selector)
        expected = rope(positions, q, k, selector=selector)
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert counter.frame_count == 1


def test_inductor_gives_the_same_bits_and_gradients():
    rope = RopeSelector(ropes())
    compiled = torch.compile(rope, fullgraph=True)
    positions, selector = edge_positions(128), torch.arange(11) % 3
    found = []
    for call in (rope, compiled):
        q, k = (randn(11, heads, 16).requires_grad_() for heads in (4, 2))
        outs = call(positions, q, k, selector=selector)
        sum(x.pow(3).sum() for x in outs).backward()
        found.append((*outs, q.grad, k.grad))
    for eager, inductor in zip(*found, strict=True):
        torch.testing.assert_close(inductor, eager, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_gradcheck():
    rope = RopeSelector(ropes(2, head_dim=8))
    q, k = (randn(3, heads, 8, dtype=torch.float64).requires_grad_() for heads in (2, 1))
    selector = torch.tensor([1, 0, 1])

    def call(q, k):
        return rope(torch.tensor([5, 900, -2]), q, k, selector=selector)

    assert torch.autograd.gradcheck(call, (q, k))
    assert torch.autograd.gradgradcheck(call, (q, k))


def test_nothing_is_read_on_the_host():
    rope = RopeSelector(ropes())
    positions, q, selector = torch.arange(5), randn(5, 2, 16), torch.tensor([0, 1, 2, 1, 0])
    with NoHostReads():
        rope(positions, q, selector=selector)
        rope.apply_(positions, q, selector=selector)
    meta = RopeSelector(ropes()).to("meta")
    out, _ = meta(positions.to("meta"), q.to("meta"), selector=selector.to("meta"))
    assert out.shape == q.shape


def test_it_is_reserved_moved_and_copied_like_its_modules():
    members = [rc.get_rope(RopeConfig(head_dim=16, max_position=128, base=b)) for b in BASES]
    rope = RopeSelector(members)
    assert rope.reserve(1000)
    assert not rope.reserve(1000)
    plan = rc.CapturePlan(max_position=2000, margin=0)
    rc.prepare_for_capture(rope, plan)
    assert [member.capacity for member in members] == [plan.reserve_length] * 3
    with rc.capture_guard(rope), pytest.raises(RuntimeError, match="inside capture_guard"):
        rope.reserve(10**6)
    assert rope.state_dict() == {}
    positions, q, selector = torch.arange(3), randn(3, 2, 16), torch.tensor([2, 0, 1])
    expected, _ = rope(positions, q, selector=selector)
    for other in (copy.deepcopy(rope), rope.half()):
        assert torch.equal(other(positions, q, selector=selector)[0], expected)


WRONG_ROPES = [
    (3, TypeError, "ropes must be a list of RotaryEmbedding modules, got int"),
    ([], ValueError, "ropes must have at least one RotaryEmbedding, got none"),
    ([torch.nn.Identity()], TypeError, r"ropes\[0\] must be a RotaryEmbedding such .* Identity"),
    (
        [*ropes(1), *ropes(1, head_dim=32)],
        ValueError,
        r"ropes must have one head_dim, got 16 and, in ropes\[1\], 32",
    ),
    (
        [*ropes(1), *ropes(1, style="interleaved")],
        ValueError,
        r"ropes must have one style, got 'half' and, in ropes\[1\], 'interleaved'",
    ),
    (
        [*ropes(1), *ropes(1, axes=rc.ChunkedAxes((2, 3, 3)))],
        ValueError,
        "ropes must have one lane_axes",
    ),
    (
        ropes(2, axes=rc.XdropeAxes((2, 2, 2, 2), full_width=True)),
        ValueError,
        "ropes must have one angle for each pair, got XdropeAxes.*one for each channel",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "sentence"), WRONG_ROPES)
def test_modules_that_do_not_fit_together_are_refused(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        RopeSelector(wrong)


WRONG_SELECTORS = [
    ([0, 1, 2], TypeError, "selector must be a tensor, got list"),
    (None, TypeError, "selector must be a tensor, got NoneType"),
    (torch.ones(3), TypeError, "selector must be bool, int32 or int64, got torch.float32"),
    (
        torch.ones(4).long(),
        ValueError,
        r"selector must broadcast against the tokens of positions, \(3,\), got \(4,\)",
    ),
    (
        torch.ones(3, device="meta").long(),
        ValueError,
        "selector must be on the device of q, cpu, got meta",
    ),
]


@pytest.mark.parametrize("method", ["forward", "apply_"])
@pytest.mark.parametrize(("wrong", "error", "sentence"), WRONG_SELECTORS)
def test_a_wrong_selector_is_refused(method, wrong, error, sentence):
    rope, q = RopeSelector(ropes()), randn(3, 2, 16)
    before = q.clone()
    with pytest.raises(error, match=sentence):
        getattr(rope, method)(torch.arange(3), q, selector=wrong)
    assert torch.equal(q, before)


def test_a_selector_for_more_tokens_than_q_has_is_refused():
    rope = RopeSelector(ropes())
    with pytest.raises(ValueError, match=r"positions must broadcast to q.shape\[:-2\]"):
        rope(torch.arange(3), randn(3, 2, 16), selector=torch.zeros(2, 3).long())


def test_the_wrong_module_would_be_found():
    """Wrong twin: a choice that is turned round does not pass for the right one."""
    rope, positions, q = RopeSelector(ropes(2)), torch.arange(1, 6), randn(5, 2, 16)
    selector = torch.tensor([0, 1, 0, 1, 1])
    turned = RopeSelector(ropes(2)[::-1])(positions, q, selector=selector)[0]
    assert not torch.equal(turned, one_by_one(rope, positions, q, None, selector)[0])
