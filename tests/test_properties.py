"""The algebra of the rotation, over the calls that ``test_fuzz.py`` draws.

A property is a function of a call and of a rotation with the arguments of the operator's schema, so
that a wrong rotation can be given to it too. Bit for bit unless a bound is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz import (
    PLAIN,
    RIGHT,
    Arguments,
    Backend,
    Call,
    bits,
    calls,
    inverse_of_everything,
    low_precision_rows,
    rebuilt,
    sign_below_zero,
    twin,
    write_the_rest,
)
from torch import Tensor

import rope_compile as rc
from rope_compile.table import RopeTable

from profiles import examples, one_thread, refutes
from support import generator, oracle_table, pair_channels

Property = Callable[[Call, Backend], None]
NAMES = (
    "q", "k", "positions", "table", "inv_freq", "axes", "style", "offset", "scaling", "inverse",
)  # fmt: skip


def changed(made: Arguments, **others: object) -> tuple[object, ...]:
    """The arguments of the operator, some of them others."""
    given = dict(zip(NAMES, made.operator, strict=True))
    assert set(others) <= set(NAMES)
    return tuple((given | others).values())


def rotated(rotate: Backend, made: Arguments, **others: object) -> Tensor:
    """The rotated q of the functional form."""
    return rotate.functional(*changed(made, **others))[0]


def drawn_like(x: Tensor, seed: int) -> Tensor:
    values = torch.randn(x.shape, generator=generator(seed), dtype=torch.float64)
    return values.to(x.dtype)


def spread(made: Arguments) -> Tensor:
    """Positions with every token dimension of q, behind one row for each axis where there are."""
    call, places = made.call, made.positions.view
    if not call.lanes:
        return places.expand(call.lead)
    count = max(call.lanes) + 1
    if places.dim() < 2:
        return places.expand(count, *call.lead)
    missing = len(call.lead) + 1 - places.dim()
    return places[(slice(None), *[None] * missing)].expand(count, *call.lead)


def channels(call: Call) -> list[Tensor]:
    """``[read x, read y, write x, write y]`` of every lane, in the direction of the call."""
    pairs = pair_channels(call.style, call.half, call.lanes[: call.half])
    found = [torch.tensor(lane, dtype=torch.int64) + call.rotary_offset for lane in pairs]
    return [*found[2:], *found[:2]] if call.inverse else found


def full_width(call: Call) -> bool:
    """Two axes in one pair: no rotation, and no inverse."""
    return len(call.lanes) > call.half


def sizes(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The norm of every pair, float64."""
    return torch.hypot(x[..., first].double(), x[..., second].double())


def assert_same(a: Tensor | None, b: Tensor | None) -> None:
    assert (a is None) == (b is None)
    if a is not None:
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b))


def assert_close(a: Tensor, b: Tensor, bound: Tensor | float) -> None:
    assert a.shape == b.shape
    assert ((a.double() - b.double()).abs() <= bound).all()


# --------------------------------------------------------------------------------- properties


def norms_are_kept(call: Call, rotate: Backend) -> None:
    """|R x| = m |x| to 1e-6, pair by pair."""
    if full_width(call):
        return
    made = call.build()
    read_x, read_y, write_x, write_y = channels(call)
    before = sizes(made.q, read_x, read_y) * call.attention_scaling
    assert_close(sizes(rotated(rotate, made), write_x, write_y), before, before * 1e-6)


def the_inverse_undoes(call: Call, rotate: Backend) -> None:
    """R^-1 R x = m^2 x; other channels come back bit for bit."""
    if full_width(call):
        return
    made = call.build()
    there = rotated(rotate, made)
    back = rotated(rotate, made, q=there, inverse=not call.inverse)
    read_x, read_y, *_ = channels(call)
    for part in (read_x, read_y):
        bound = sizes(made.q, read_x, read_y) * call.attention_scaling**2 * 2e-6
        wanted = made.q[..., part].double() * call.attention_scaling**2
        assert_close(back[..., part], wanted, bound)
    for a, b in zip(made.passed(made.q), made.passed(back), strict=True):
        assert_same(a, b)


def scores_depend_on_the_difference(call: Call, rotate: Backend) -> None:
    """(R(p) x) (R(p + n) y) is the same for every p, to 1e-5 of |x| |y|."""
    if full_width(call):
        return
    made = call.build()
    places, x = made.positions.view, made.q
    y = drawn_like(x, call.seed + 1)

    def scores(shift: int) -> Tensor:
        left = rotated(rotate, made, q=x, positions=places + shift)
        right = rotated(rotate, made, q=y, positions=places + shift + 5)
        return (left * right).sum(-1).double()

    bound = x.norm(dim=-1) * y.norm(dim=-1) * max(1, call.attention_scaling**2) * 1e-5
    for shift in (1, -3000, 10**5):
        assert_close(scores(shift), scores(0), bound)


def angles_add_up(call: Call, rotate: Backend) -> None:
    """R(a) R(b) = m R(a + b) to 2e-6 of the pair, frequencies and phases in float64."""
    if full_width(call) or call.style == "interleaved_to_half":  # twice it moves channels twice
        return
    made = call.build()
    places = made.positions.view
    first, second = 2 * places, -places
    twice = rotated(rotate, made, q=rotated(rotate, made, positions=first), positions=second)
    read_x, read_y, *_ = channels(call)
    m, bound = call.attention_scaling, torch.zeros(made.q.shape, dtype=torch.float64)
    bound[..., read_x] = bound[..., read_y] = sizes(made.q, read_x, read_y) * m**2 * 2e-6
    once = rotated(rotate, made)
    for part in (read_x, read_y):
        assert_close(twice[..., part], once[..., part] * m, bound[..., part])


def other_channels_pass(call: Call, rotate: Backend) -> None:
    """Whatever bits they have: every NaN, both zeros, infinities."""
    made = call.build()
    x = made.q.clone()
    for part in made.passed(x):
        size = (part.numel() * x.element_size(),)
        noise = torch.randint(0, 256, size, generator=generator(call.seed), dtype=torch.uint8)
        part.copy_(noise.view(x.dtype).view(part.shape))
    out = rotated(rotate, made, q=x, k=None)
    for a, b in zip(made.passed(x), made.passed(out), strict=True):
        assert_same(a, b)
    if call.style != "interleaved_to_half":
        written = x.clone()
        rotate.in_place(*changed(made, q=written, k=None))
        assert_same(written, out)


def tokens_do_not_meet(call: Call, rotate: Backend) -> None:
    """Tokens in another order, and tokens alone, give the same bits."""
    made = call.build()
    whole, places = rotated(rotate, made), spread(made)
    for dim, size in enumerate(call.lead):
        order = torch.randperm(size, generator=generator(call.seed))
        at = dim + bool(call.lanes)
        moved = rotated(
            rotate, made, q=made.q.index_select(dim, order), k=None,
            positions=places.index_select(at, order),
        )  # fmt: skip
        assert_same(moved, whole.index_select(dim, order))
        half = size // 2
        part = rotated(
            rotate, made, q=made.q.narrow(dim, half, size - half), k=None,
            positions=places.narrow(at, half, size - half),
        )  # fmt: skip
        assert_same(part, whole.narrow(dim, half, size - half))


def styles_are_permutations(call: Call, rotate: Backend) -> None:
    """Interleaved pairs dealt out as halves rotate as halves do, and one style deals them out."""
    if full_width(call) or call.style == "half_blocks":
        return
    made = call.build()
    width = made.q.shape[-1]
    lanes, start = torch.arange(call.half), call.rotary_offset
    dealt = torch.arange(width)  # where the channel of the half style is in the interleaved one
    dealt[start : start + call.half] = start + 2 * lanes
    dealt[start + call.half : start + 2 * call.half] = start + 2 * lanes + 1
    interleaved = rotated(rotate, made, style="interleaved", k=None)
    as_halves = rotated(rotate, made, q=made.q[..., dealt], style="half", k=None)
    assert_same(interleaved[..., dealt], as_halves)
    moved = rotated(rotate, made, style="interleaved_to_half", k=None, inverse=False)
    forward = rotated(rotate, made, style="interleaved", k=None, inverse=False)
    assert_same(moved, forward[..., dealt])


def it_is_linear(call: Call, rotate: Backend) -> None:
    """R(2^n x) = 2^n R(x) bit for bit; R(x + y) = R(x) + R(y) to the rounding of float64."""
    made = call.build()
    out = rotated(rotate, made)
    for exponent in (-3, 4):
        assert_same(rotated(rotate, made, q=made.q * 2.0**exponent), out * 2.0**exponent)
    if made.q.dtype == torch.float64:
        y = drawn_like(made.q, call.seed + 1)
        size = (made.q.norm(dim=-1, keepdim=True) + y.norm(dim=-1, keepdim=True)) * 2e-15
        both = rotated(rotate, made, q=made.q + y)
        bound = size * max(1.0, call.attention_scaling)
        assert_close(both, out + rotated(rotate, made, q=y), bound)


def the_gradient_is_the_inverse(call: Call, rotate: Backend) -> None:
    """Backward is the same operator with ``inverse`` flipped, and its own backward is forward."""
    made = call.build()
    leaves = [None if x is None else x.clone().requires_grad_() for x in (made.q, made.k)]
    outs = rotate.functional(*changed(made, q=leaves[0], k=leaves[1]))
    there = [i for i, leaf in enumerate(leaves) if leaf is not None]
    cotangents = [drawn_like(outs[i], i).requires_grad_() for i in there]
    grads = torch.autograd.grad(
        [outs[i] for i in there], [leaves[i] for i in there], cotangents, create_graph=True
    )
    pair = [*cotangents, None][:2]
    flipped = changed(made, q=pair[0].detach(), k=None, inverse=not call.inverse)
    assert_same(grads[0].detach(), RIGHT.functional(*flipped)[0])
    if len(there) == 2:
        flipped = changed(made, q=pair[1].detach(), k=None, inverse=not call.inverse)
        assert_same(grads[1].detach(), RIGHT.functional(*flipped)[0])
    again = torch.autograd.grad(grads, cotangents, [drawn_like(g, 7) for g in grads])
    forward = changed(made, q=drawn_like(grads[0], 7), k=None)
    assert_same(again[0], RIGHT.functional(*forward)[0])


def q_alone_is_q_of_the_pair(call: Call, rotate: Backend) -> None:
    made = call.build()
    q_out, k_out = rotate.functional(*made.operator)
    assert_same(rotated(rotate, made, k=None), q_out)
    assert rotate.functional(*changed(made, k=None))[1] is None
    if made.k is not None:
        assert_same(rotated(rotate, made, q=made.k, k=None), k_out)


def in_place_is_functional(call: Call, rotate: Backend) -> None:
    if call.refusal is not None:
        return
    made = call.build()
    outs = rotate.functional(*made.operator)
    rotate.in_place(*made.operator)
    for written, out in zip((made.q, made.k), outs, strict=True):
        assert_same(written, out)


def native_is_plain_torch(call: Call, rotate: Backend) -> None:
    """Inside the table both kernels do the same operations in the same order."""
    made = call.build()
    for a, b in zip(
        rotate.functional(*made.operator), PLAIN.functional(*made.operator), strict=True
    ):
        assert_same(a, b)


def a_row_read_is_the_row_computed(call: Call, rotate: Backend) -> None:
    """cos and sin themselves, out of a unit vector, to 1 float32 ulp of the magnitude."""
    if full_width(call):
        return
    made = call.build()
    x = torch.zeros(made.q.shape, dtype=torch.float64)
    x[..., channels(call)[0]] = 1
    frequencies = made.frequencies
    table = oracle_table(call.rows, frequencies, call.attention_scaling)
    read = rotated(rotate, made, q=x, k=None, table=table, inv_freq=frequencies)
    empty = rotated(rotate, made, q=x, k=None, table=table[:0], inv_freq=frequencies)
    assert_close(read, empty, 2**-23 * max(1.0, call.attention_scaling))


def position_dtypes_agree(call: Call, rotate: Backend) -> None:
    made = call.build()
    limits = torch.iinfo(torch.int32)
    places = made.positions.view.long().clamp(limits.min, limits.max)
    made = call_with_a_full_table(made)
    wide = rotated(rotate, made, positions=places)
    assert_same(rotated(rotate, made, positions=places.int()), wide)


def call_with_a_full_table(made: Arguments) -> Arguments:
    """The same call where the table has no NaN, for positions of the property's own."""
    rows = oracle_table(made.call.rows, made.frequencies, made.call.attention_scaling)
    made.table.view.copy_(rows)
    if made.inv_freq is not None:
        made.inv_freq.view.copy_(made.frequencies)
    return made


def memory_does_not_show(call: Call, rotate: Backend) -> None:
    """Dense copies of every input give the same bits as the views."""
    made = call.build()
    dense = [x.contiguous() if isinstance(x, Tensor) else x for x in made.operator]
    for a, b in zip(rotate.functional(*made.operator), rotate.functional(*dense), strict=True):
        assert_same(a, b)


def text_on_a_multi_axis_map(call: Call, rotate: Backend) -> None:
    """One position a token, or one equal for all axes, is plain RoPE."""
    if not call.lanes or not call.lead or 0 in call.lead or call.style == "half_blocks":
        return
    made = call_with_a_full_table(call.build())
    places = spread(made)[0][(0,) * (len(call.lead) - 1)]
    plain = rotated(rotate, made, positions=places, axes=[])
    assert_same(rotated(rotate, made, positions=places), plain)
    rows = places.expand(max(call.lanes) + 1, *[1] * (len(call.lead) - 1), len(places))
    assert_same(rotated(rotate, made, positions=rows), plain)


def stillness(call: Call, rotate: Backend) -> None:
    """Position 0 and frequency 0 leave x as it is, where the magnitude is 1."""
    made = call_with_a_full_table(call.build())
    still = rotated(rotate, made, positions=torch.zeros_like(made.positions.view))
    read_x, read_y, write_x, write_y = channels(call)
    for read, written in ((read_x, write_x), (read_y, write_y)):
        assert torch.equal(still[..., written], made.q[..., read])
    lanes = made.frequencies == 0
    out = rotated(rotate, made)
    for read, written in ((read_x, write_x), (read_y, write_y)):
        assert torch.equal(out[..., written[lanes]], made.q[..., read[lanes]])


def only(*dtypes: torch.dtype, **fixed: object) -> st.SearchStrategy[Call]:
    """Calls with q and k of these dtypes."""
    return st.sampled_from(dtypes).flatmap(lambda dtype: calls(dtype=dtype, **fixed))


NEARBY = st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=6).map(tuple)
# No rows: a table has numbers for the positions of its call only, and these go elsewhere too.
EXACT = NEARBY.flatmap(
    lambda positions: calls(
        dtype=torch.float64, positions=positions, phase_dtype=torch.float64, rows=0
    )
)
INSIDE = st.lists(st.integers(0, 126), min_size=1, max_size=6).flatmap(
    lambda positions: calls(positions=tuple(positions), rows=127)
)
TWO = (torch.float32, torch.float64)

# Property, and the calls it is for.
PROPERTIES: dict[Property, st.SearchStrategy[Call]] = {
    norms_are_kept: only(*TWO),
    the_inverse_undoes: only(*TWO),
    scores_depend_on_the_difference: EXACT,
    angles_add_up: EXACT,
    other_channels_pass: calls(),
    tokens_do_not_meet: calls(),
    styles_are_permutations: calls(),
    it_is_linear: only(*TWO, torch.bfloat16),
    the_gradient_is_the_inverse: calls(),
    q_alone_is_q_of_the_pair: calls(),
    in_place_is_functional: calls(in_place=True),
    native_is_plain_torch: INSIDE,
    a_row_read_is_the_row_computed: calls(),
    position_dtypes_agree: calls(),
    memory_does_not_show: calls(),
    text_on_a_multi_axis_map: calls(),
    stillness: calls(attention_scaling=1.0),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.__name__)
@examples(80)
@given(data=st.data())
def test_the_rotation_has_the_property(prop: Property, data: st.DataObject) -> None:
    prop(data.draw(PROPERTIES[prop]), RIGHT)


@st.composite
def growing(draw: st.DrawFn) -> tuple[rc.RopeConfig, list[int]]:
    """A config whose rows do not depend on the length, and rows to reserve one after the other."""
    scalings = [
        rc.DefaultScaling(),
        rc.LinearScaling(factor=draw(st.sampled_from([0.5, 2, 4.25]))),
        rc.NtkScaling(factor=8.0, mixed_b=draw(st.none() | st.just(0.625))),
        rc.NtkAlphaScaling(alpha=1000.0),
        rc.YarnScaling(factor=4.0, original_max_position=64),
        rc.DeepseekYarnScaling(factor=40.0, original_max_position=64, mscale_all_dim=0.5),
        rc.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        ),
    ]
    config = rc.RopeConfig(
        head_dim=2 * draw(st.integers(2, 20)),
        max_position=draw(st.integers(1, 300)),
        base=draw(st.sampled_from([100.0, 1e4, 5e5])),
        scaling=draw(st.sampled_from(scalings)),
        phase_dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )
    return config, draw(st.lists(st.integers(0, 700), min_size=1, max_size=4))


def growth_keeps_rows(case: tuple[rc.RopeConfig, list[int]], fresh=RopeTable) -> None:
    """A table that grew equals, bit for bit, one that was built that large, and the oracle."""
    config, steps = case
    grown = RopeTable(config, "cpu")
    for rows in steps:
        before = grown.cos_sin_cache
        grown.reserve(rows)
        assert_same(grown.cos_sin_cache[: len(before)], before)
    assert grown.capacity == -(-max(config.max_position, *steps) // 128) * 128
    assert_same(grown.cos_sin_cache, fresh(config, "cpu", max(steps)).cos_sin_cache)
    wanted = oracle_table(grown.capacity, grown.inv_freq, config.attention_scaling)
    assert_close(grown.cos_sin_cache, wanted, 2**-23 * max(1.0, config.attention_scaling))


@examples(25)
@given(growing())
def test_growth_keeps_rows(case: tuple[rc.RopeConfig, list[int]]) -> None:
    growth_keeps_rows(case)


# -------------------------------------------------------------------------------- wrong twins


def first_position(arguments: list) -> None:
    """Every token rotated by the position of the first one of its row."""
    if arguments[2].dim():
        arguments[2] = arguments[2][..., :1].expand(arguments[2].shape)


def halves_for_everything(arguments: list) -> None:
    arguments[6] = "half"


def low_rows_for_q_alone(arguments: list) -> None:
    if arguments[1] is None:
        low_precision_rows(arguments)


def low_rows_for_strides(arguments: list) -> None:
    if not arguments[0].is_contiguous():
        low_precision_rows(arguments)


def next_int32(arguments: list) -> None:
    if arguments[2].dtype == torch.int32:
        arguments[2] = (arguments[2].long() + 1).clamp(max=2**31 - 1)


def next_on_axes(arguments: list) -> None:
    if arguments[5]:
        arguments[2] = arguments[2] + 1


def saturate(outs, *rest) -> None:
    outs[0].clamp_(-1, 1)


def shrink(outs, *rest) -> None:
    for out in outs:
        if out is not None:
            out *= 1 - 2**-6


def compute_in_float64(*arguments) -> tuple[Tensor, Tensor | None]:
    """One rounding instead of one for each operation: nearer to the oracle, and other bits."""
    q, k, *rest = arguments
    wide = PLAIN.functional(q.double(), None if k is None else k.double(), *rest)
    return tuple(None if y is None else y.to(x.dtype) for x, y in zip((q, k), wide, strict=True))


class ForwardTwice(torch.autograd.Function):
    """A backward pass that forgets to flip ``inverse``."""

    @staticmethod
    def forward(ctx, x, *rest):
        ctx.rest = rest
        return RIGHT.functional(x, None, *rest)[0]

    @staticmethod
    def backward(ctx, grad):
        return ForwardTwice.apply(grad, *ctx.rest), *(None,) * 8


def not_flipped(q: Tensor, k: Tensor | None, *rest: object) -> tuple[Tensor, Tensor | None]:
    return ForwardTwice.apply(q, *rest), None if k is None else ForwardTwice.apply(k, *rest)


WRONG: dict[Property, Backend] = {
    norms_are_kept: rebuilt(low_precision_rows),
    the_inverse_undoes: rebuilt(inverse_of_everything),
    scores_depend_on_the_difference: rebuilt(sign_below_zero),
    angles_add_up: rebuilt(sign_below_zero),
    other_channels_pass: twin(write_the_rest),
    tokens_do_not_meet: rebuilt(first_position),
    styles_are_permutations: rebuilt(halves_for_everything),
    it_is_linear: twin(saturate),
    the_gradient_is_the_inverse: Backend(not_flipped, RIGHT.in_place),
    q_alone_is_q_of_the_pair: rebuilt(low_rows_for_q_alone),
    in_place_is_functional: Backend(RIGHT.functional, twin(shrink).in_place),
    native_is_plain_torch: Backend(compute_in_float64, PLAIN.in_place),
    a_row_read_is_the_row_computed: rebuilt(low_precision_rows),
    position_dtypes_agree: rebuilt(next_int32),
    memory_does_not_show: rebuilt(low_rows_for_strides),
    text_on_a_multi_axis_map: rebuilt(next_on_axes),
    stillness: twin(shrink),
}


def test_every_property_has_a_wrong_twin() -> None:
    assert set(WRONG) == set(PROPERTIES)


@pytest.mark.parametrize("prop", WRONG, ids=lambda prop: prop.__name__)
def test_a_rotation_without_the_property_would_be_found(prop: Property) -> None:
    refutes(lambda call: prop(call, WRONG[prop]), PROPERTIES[prop])


def test_a_growth_that_rescales_would_be_found() -> None:
    """Wrong twin: a table whose frequencies follow its rows."""

    def rescaled(config: rc.RopeConfig, device: str, capacity: int) -> RopeTable:
        factor = max(1.0, capacity / config.max_position)
        wrong = rc.RopeConfig(
            head_dim=config.head_dim, max_position=config.max_position, base=config.base * factor
        )
        return RopeTable(wrong, device, capacity)

    refutes(lambda case: growth_keeps_rows(case, rescaled), growing())
