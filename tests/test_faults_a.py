"""Fault group A: positions past the end of the table, before its start, and in stale slots.

The labels are those of test_faults_index.py. What must hold everywhere: any integer is right.
"""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from test_faults_index import BACKENDS, TRITON, assert_right, rest_of
from torch import Tensor

import rope_compile as rc
from rope_compile import CapturePlan, RopeConfig, RotaryEmbedding
from rope_compile.integrations._tables import from_halves
from rope_compile.ops import rope_op

from support import guarded, randn

STYLES = ("half", "interleaved")
PLAN = CapturePlan(
    max_position=32768, draft_max_position=2048, speculative_steps=5, draft_tokens=8, margin=256
)
SCALINGS = {
    "default": rc.DefaultScaling(),
    "linear": rc.LinearScaling(factor=4.0),
    "ntk": rc.NtkScaling(factor=4.0),
    "yarn": rc.YarnScaling(factor=4.0, original_max_position=64),
    "llama3": rc.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    ),
    "dynamic": rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64),
    "longrope": rc.LongRopeScaling(
        short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_max_position=64, factor=4.0,
        policy="static",
    ),
}  # fmt: skip


def config(rows: int = 128, **fields: object) -> RopeConfig:
    return RopeConfig(head_dim=8, max_position=rows, **fields)


def run(backend, rope: RotaryEmbedding, positions: Tensor, q: Tensor, k: Tensor | None = None):
    """The module's rotation in one of the backends, checked against float64."""
    outs = backend(q, k, positions, *rest_of(rope))
    assert_right(outs, (q, k), positions, rope.config)
    return outs


# --------------------------------------------------------------------------------------------- A1


def test_a1_the_plan_covers_what_drafting_reaches() -> None:
    """Draft positions overrun the table, sgl-project/sglang PR #10788: the lengths."""
    assert (PLAN.required_length, PLAN.reserve_length) == (33064, 33152)
    for steps, tokens, longest, margin in itertools.product(
        range(1, 9), range(1, 65), (2048, 4096, 32768), (0, 256)
    ):
        speculation = {"speculative_steps": steps, "draft_tokens": tokens, "margin": margin}
        plan = CapturePlan(max_position=longest, draft_max_position=2048, **speculation)
        assert longest - 1 + steps * tokens < plan.required_length <= plan.reserve_length
        turned = CapturePlan(max_position=2048, draft_max_position=longest, **speculation)
        assert turned.required_length == plan.required_length


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a1_positions_around_the_last_reserved_row_are_right(backend, style: str) -> None:
    """Draft positions overrun the table, sgl-project/sglang PR #10788: right there too."""
    rope = RotaryEmbedding(config(2048, style=style), "cpu")
    rc.prepare_for_capture(rope, PLAN)
    rows = rope.capacity
    assert rows == 33152
    positions = torch.tensor([rows - 1, rows, rows + 1, 10 * rows])
    run(backend, rope, positions, randn(4, 3, 8, seed=1), randn(4, 1, 8, seed=2))


def test_a1_the_debug_check_names_the_first_position_outside() -> None:
    """Draft positions overrun the table, sgl-project/sglang PR #10788: opt-in, it raises."""
    rope = RotaryEmbedding(config(), "cpu")
    q = randn(2, 3, 8)
    with rc.debug():
        rope(torch.tensor([0, 127]), q)
        with pytest.raises(ValueError, match=r"table of 128 rows .* got 128; call reserve"):
            rope(torch.tensor([0, 128]), q)


def test_a1_a_plan_that_forgets_the_draft_would_be_found() -> None:
    """Wrong twin of sgl-project/sglang PR #10788: rows for the model's own length alone."""
    reached = 32768 - 1 + 5 * 8
    assert CapturePlan(max_position=32768, margin=0).required_length <= reached


# --------------------------------------------------------------------------------------------- A2


def test_a2_a_plan_is_a_function_of_static_numbers() -> None:
    """Reserve read from a number that varies at run time, sgl-project/sglang PR #11871."""
    tempting = {"size": 1000, "context_len": 2000, "max_total_num_tokens": 3000}
    asked: set[str] = set()

    class Pool(types.SimpleNamespace):
        def __getattribute__(self, name: str) -> object:
            asked.add(name)
            return super().__getattribute__(name)

    pool = Pool(max_position_embeddings=4096, **tempting)

    def plan(target: object, draft: object) -> int:
        made = CapturePlan.for_models(target, draft, speculative_steps=5, draft_tokens=8)
        return made.reserve_length

    draft = {"max_position_embeddings": 2048}
    first = plan(pool, draft)
    pool.size = pool.context_len = pool.max_total_num_tokens = 99999
    assert plan(pool, draft) == plan(draft, pool) == first == 5248
    assert "max_position_embeddings" in asked
    assert not asked & {*tempting, "__dict__"}


def test_a2_order_of_target_and_draft_does_not_show() -> None:
    """Two runners with tables of two sizes at capture, sgl-project/sglang PR #11871."""
    sizes = []
    for turned in (False, True):
        models = [RotaryEmbedding(config(n, base=n), "cpu") for n in (8192, 2048)]
        models = models[::-1] if turned else models
        for model in models:
            rc.prepare_for_capture(
                model, CapturePlan.for_models(*models, speculative_steps=2, draft_tokens=3)
            )
        sizes.append({model.capacity for model in models})
    assert sizes == [{9344}, {9344}]  # 8192 + 6 + 1024, to a multiple of 128


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in CapturePlan.__dataclass_fields__
        for value in (-1, None, *((0,) if name in ("max_position", "align") else ()))
    ],
)
def test_a2_bad_lengths_are_named(name: str, value: object) -> None:
    """A reserve from a number that is not there yet, sgl-project/sglang PR #11871."""
    with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
        CapturePlan(**{"max_position": 8, name: value})


def test_a2_zero_is_a_length_where_it_means_none() -> None:
    """No draft and no margin are configurations too, sgl-project/sglang PR #11871."""
    optional = ("draft_max_position", "speculative_steps", "draft_tokens", "margin")
    plan = CapturePlan(max_position=1, **dict.fromkeys(optional, 0))
    assert (plan.required_length, plan.reserve_length) == (1, 128)


# --------------------------------------------------------------------------------------------- A3


def both_lengths(style: str) -> tuple[RotaryEmbedding, RotaryEmbedding, Tensor, Tensor]:
    """A target's and its draft's module, positions past the draft's rows, and q."""
    target, draft = (RotaryEmbedding(config(n, style=style), "cpu") for n in (8192, 2048))
    return target, draft, torch.arange(4096), randn(4096, 1, 8)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a3_a_draft_of_2048_rows_is_right_to_4095(backend, style: str) -> None:
    """Draft context shorter than the target's, vllm-project/vllm #57941: NaN behind the table."""
    target, draft, positions, q = both_lengths(style)
    if backend is TRITON:  # a minute for all of them
        some = torch.cat((positions[2040:2056], positions[7::61]))
        positions, q = some, q[: len(some)]
    table, _buffer = guarded(draft.cos_sin_cache)
    out = backend(q, None, positions, table, *rest_of(draft)[1:])
    assert_right(out, (q, None), positions, draft.config)
    long = backend(q, None, positions, *rest_of(target))
    torch.testing.assert_close(out[0], long[0], rtol=0, atol=3e-7 * float(q.abs().max()))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("style", STYLES)
def test_a3_eager_and_compiled_agree_past_the_rows(style: str) -> None:
    """The compiled path asserts where eager reads on silently, vllm-project/vllm #48894."""
    _, draft, positions, q = both_lengths(style)
    compiled = torch.compile(draft, fullgraph=True, backend="aot_eager")(positions, q)[0]
    native = run(rope_op, draft, positions, q)[0]
    plain = run(torch.ops.rope_compile.rope_torch.default, draft, positions, q)[0]
    assert torch.equal(compiled, native)
    assert torch.equal(native, plain)


def test_a3_a_read_past_the_rows_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm #57941: a kernel without a bounds test meets the guard."""
    _, draft, positions, q = both_lengths("half")
    table, buffer = guarded(draft.cos_sin_cache)
    unbounded = buffer[8 : 8 + 2056, 8:16]  # eight rows too many
    out = rope_op(q[:2056], None, positions[:2056], unbounded, *rest_of(draft)[1:])
    assert out[0][:2048].isfinite().all()
    with pytest.raises(AssertionError):
        assert_right(out, (q[:2056], None), positions[:2056], draft.config)
    assert table.data_ptr() == unbounded.data_ptr()


# --------------------------------------------------------------------------------------------- A4

STALE = (3, 7, 2**31 - 1, -5, 128)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a4_live_rows_do_not_feel_the_padding(backend, style: str, dtype: torch.dtype) -> None:
    """Stale positions in padded slots, sgl-project/sglang PR #10892: any integer in any slot."""
    rope = RotaryEmbedding(config(style=style), "cpu")
    positions = torch.tensor(STALE, dtype=dtype)
    q, k = randn(5, 3, 8, seed=1), randn(5, 1, 8, seed=2)
    whole = run(backend, rope, positions, q, k)
    live = run(backend, rope, positions[:2], q[:2], k[:2])
    for padded, alone in zip(whole, live, strict=True):
        assert torch.equal(padded[:2], alone)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a4_without_frequencies_stale_rows_clamp(backend, style: str) -> None:
    """Stale positions in padded slots, sgl-project/sglang PR #10892: with a table alone."""
    rope = RotaryEmbedding(config(style=style), "cpu")
    table, _buffer = guarded(rope.cos_sin_cache)
    rest = (table, None, *rest_of(rope)[2:])
    positions, q = torch.tensor(STALE), randn(5, 3, 8)
    out = backend(q, None, positions, *rest)[0]
    assert_right((out[:2],), (q[:2],), positions[:2], rope.config)
    assert_right((out,), (q,), torch.tensor([3, 7, 127, 0, 127]), rope.config)
    with rc.debug(), pytest.raises(ValueError, match="table of 128 rows"):
        rc.apply_rope(q, None, positions, table, style=style)


@pytest.mark.usefixtures("fresh_compiler")
def test_a4_a_static_buffer_is_right_with_a_poisoned_tail() -> None:
    """A smaller batch than the captured one, sgl-project/sglang PR #10892: compiled code."""
    rope = RotaryEmbedding(config(), "cpu")
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    slots, q = torch.zeros(8, dtype=torch.int64), randn(8, 2, 8)
    for live, poison in ((8, 0), (5, 2**40), (3, -(2**31)), (1, 2**62)):
        slots.fill_(poison)
        slots[:live] = torch.arange(live) + 125
        out = compiled(slots, q)[0][:live]
        assert_right((out,), (q[:live],), slots[:live], rope.config)


# --------------------------------------------------------------------------------------------- A6


def model(**fields: object) -> dict[str, object]:
    """A config.json whose heads are narrow, so that its table is small."""
    return {
        "model_type": "llama", "head_dim": 8, "max_position_embeddings": 131072,
        "rope_theta": 5e5, **fields,
    }  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_a6_llama3_rows_are_the_served_length() -> None:
    """Table sized by the pretraining length, gty111/gLLM PR #269; rows enter no frequency."""
    translated = RopeConfig.from_transformers(model(rope_scaling=LLAMA3))
    rope = RotaryEmbedding(translated, "cpu")
    assert rope.capacity == 131072
    short = RopeConfig.from_transformers(model(rope_scaling=LLAMA3), max_position=4096)
    assert RotaryEmbedding(short, "cpu").capacity == 4096
    assert torch.equal(rope.inv_freq, short.inv_freq())
    before = rope.inv_freq.clone()
    rope.reserve(132000)
    assert torch.equal(rope.inv_freq, before)


@pytest.mark.parametrize("factor", [4.0, 40.0])
@pytest.mark.parametrize("kind", ["yarn", "deepseek_yarn", "linear", "dynamic", "ntk"])
def test_a6_factor_multiplies_no_rows(kind: str, factor: float) -> None:
    """Rows multiplied by factor once more, vllm-project/vllm PR #56446."""
    rope = {"rope_type": kind, "factor": factor}
    if "yarn" in kind:
        rope["original_max_position_embeddings"] = 4096
    translated = RopeConfig.from_transformers(model(rope_scaling=rope))
    assert RotaryEmbedding(translated, "cpu").cos_sin_cache.shape == (131072, 8)
    assert CapturePlan.for_models(translated).required_length == 131072 + 1024


LONG = {
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("named", "alias"),
    [
        ({"rope_type": "longrope", **LONG}, {"rope_type": "su", **LONG}),
        ({"rope_type": "longrope", **LONG}, {"type": "su", **LONG}),
        (LLAMA3, {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}),
    ],
)
def test_a6_an_alias_is_the_same_rotation(named, alias) -> None:
    """A comparison of type names misses an alias, vllm-project/vllm PR #56446."""
    first, second = (RopeConfig.from_transformers(model(rope_scaling=x)) for x in (named, alias))
    assert first == second
    assert first.max_position == 131072


def test_a6_both_names_of_yarn_have_one_table_size() -> None:
    """Rows by the type's name, vllm-project/vllm PR #56446: deepseek_yarn differs in m alone."""
    rope = {"factor": 40.0, "original_max_position_embeddings": 4096}
    yarn, deepseek = (
        RopeConfig.from_transformers(model(rope_scaling=rope | {"rope_type": kind}))
        for kind in ("yarn", "deepseek_yarn")
    )
    assert yarn.max_position == deepseek.max_position == 131072
    assert torch.equal(yarn.inv_freq(), deepseek.inv_freq())


# --------------------------------------------------------------------------------------------- A7


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a7_a_decode_step_over_the_end_is_right(backend, style: str) -> None:
    """Bound checked against the chunk, not its last position, karpathy/nanochat PR #520."""
    rope = RotaryEmbedding(config(4096, style=style), "cpu")
    before = rope.cos_sin_cache.data_ptr(), rope.cos_sin_cache._version
    q, k = randn(1, 1, 8, seed=1), randn(1, 1, 8, seed=2)
    for position in (4095, 4096, 4097, 40959):
        run(backend, rope, torch.tensor([position]), q, k)
    assert (rope.cos_sin_cache.data_ptr(), rope.cos_sin_cache._version) == before
    assert rope.capacity == 4096


@pytest.mark.parametrize("name", SCALINGS)
def test_a7_growth_in_small_steps_keeps_every_row(name: str) -> None:
    """A short cos/sin pair used again for a longer one, unslothai/unsloth #3036."""
    rope = RotaryEmbedding(config(8, scaling=SCALINGS[name]), "cpu")
    address, rows = rope.cos_sin_cache.data_ptr(), rope.cos_sin_cache.clone()
    for asked in (8, 16, 24, 128):
        assert rope.reserve(asked) is False
        assert (rope.capacity, rope.cos_sin_cache.data_ptr()) == (128, address)
    for asked, capacity in ((129, 256), (300, 384)):
        assert rope.reserve(asked) is True
        assert rope.capacity == capacity
        assert torch.equal(rope.cos_sin_cache[: len(rows)], rows)
        rows = rope.cos_sin_cache.clone()
    positions, q = torch.arange(380, 388), randn(8, 2, 8)
    run(rope_op, rope, positions, q)


def test_a7_a_table_reused_too_short_would_be_found() -> None:
    """Wrong twin of unslothai/unsloth #3036: the last row serves what follows it."""
    rope = RotaryEmbedding(config(), "cpu")
    positions, q = torch.tensor([127, 128]), randn(2, 3, 8)
    clamped = rope_op(q, None, positions, rope.cos_sin_cache, None, *rest_of(rope)[2:])
    assert_right((clamped[0][:1],), (q[:1],), positions[:1], rope.config)
    with pytest.raises(AssertionError):
        assert_right(clamped, (q, None), positions, rope.config)


# --------------------------------------------------------------------------------------------- A8

X = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
MINUS_ONE = {
    "half": [3.06471526, 2.03989933, 0.77943593, 3.97980033],
    "interleaved": [2.22324428, 0.23913363, 3.03984933, 3.96980050],
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a8_a_negative_position_turns_backwards(backend, style: str) -> None:
    """-1 wraps to the last row, vllm-project/vllm PR #43869; golden values of head size 4."""
    rope = RotaryEmbedding(RopeConfig(head_dim=4, max_position=128, style=style), "cpu")
    out = backend(X, None, torch.tensor([-1]), *rest_of(rope))[0]
    torch.testing.assert_close(out.flatten(), torch.tensor(MINUS_ONE[style]), rtol=0, atol=5e-7 * 4)
    q, positions = randn(3, 2, 4), torch.tensor([-1, 0, 5])
    outs = run(backend, rope, positions, q)
    assert torch.equal(outs[0][1], q[1])


def test_a8_indexing_alone_would_take_the_last_row() -> None:
    """Wrong twin of vllm-project/vllm PR #43869: Python's -1, and index_select's."""
    rope = RotaryEmbedding(RopeConfig(head_dim=4, max_position=128), "cpu")
    table, minus_one = rope.cos_sin_cache, torch.tensor([-1])
    assert torch.equal(table[minus_one][0], table[127])
    with pytest.raises(IndexError):
        table.index_select(0, minus_one)
    wrapped = rope_op(X, None, torch.tensor([127]), *rest_of(rope))
    with pytest.raises(AssertionError):
        assert_right(wrapped, (X, None), minus_one, rope.config)


def test_a8_one_row_count_governs_cos_and_sin() -> None:
    """Only one of two tables was checked, microsoft/onnxruntime PR #28277: here there is one."""
    rope = RotaryEmbedding(config(), "cpu")
    q, at, table = randn(2, 2, 8), torch.tensor([0, 1]), rope.cos_sin_cache
    with pytest.raises(
        ValueError, match=r"cos_sin_cache must be \[rows, rotary_dim\] with an even"
    ):
        rc.apply_rope(q, None, at, table[:, :7])
    with pytest.raises(ValueError, match=r"inv_freq must be \[rotary_dim / 2\] = \(3,\)"):
        rc.apply_rope(q, None, at, table[:, :6], inv_freq=rope.inv_freq)
    with pytest.raises(ValueError, match="rotary_offset"):
        rc.apply_rope(q[..., :6], None, at, table)
    with pytest.raises(ValueError, match="cos and sin must agree in shape"):
        from_halves(table[:, :4], table[:127, 4:])


@pytest.mark.interpret
def test_a8_rows_beside_a_negative_one_are_untouched_by_it() -> None:
    """Padding tokens with a negative index, flashinfer-ai/flashinfer PR #2792: NaN before row 0."""
    rope = RotaryEmbedding(config(), "cpu")
    table, _buffer = guarded(rope.cos_sin_cache)
    positions, q = torch.tensor([-1, -(2**31), 5, -(2**40)]), randn(4, 2, 8)
    outs = TRITON(q, None, positions, table, *rest_of(rope)[1:])
    assert_right(outs, (q, None), positions, rope.config)
