"""Configurations a few thousand parameters wide, for every rotary model type of transformers.

One shrinker serves them all: it starts from the configuration class's own defaults, keeps the
structure (layer types, sharing, expert and rope patterns, ratios of heads) and replaces sizes by
name. What it cannot know stands in ``OVERRIDES``, by family.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

__all__ = ["VOCAB", "WIDTH", "config_of", "model_class", "special_ids"]

WIDTH, HEADS, HEAD_DIM, INNER, VOCAB = 64, 4, 16, 64, 160

# Field name (whole) -> size. The first rule that matches wins; fields that are None, a bool or no
# number keep their default.
_RULES: tuple[tuple[str, int], ...] = (
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", HEAD_DIM + 8),
    (r"mamba_d_head|mamba_head_dim", 2 * WIDTH // HEADS),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r"(mamba_)?n_?groups", 1),
    (r"(.*_)?head_dim|head_width|kv_channels|linear_(key|value)_head_dim", HEAD_DIM),
    (r"(q|kv|o)_lora_rank|gated_norm_rank|laurel_rank|embedding_rank|hc_lowrank", 16),
    (r"mm_tokens_per_image|num_position_embeddings|block_size", 16),
    (r"(.*_)?(num_)?(attention_)?heads|n_heads?|num_attention_heads_per_layer", HEADS),
    (r"encoder_num_attention_heads|decoder_num_attention_heads|index(er)?_n_heads", HEADS),
    (r"(.*_)?num_(.*_)?heads|mamba_n_heads|ssm_.*heads|num_heads", HEADS),
    (r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|(.*_)?ffn_hidden_size|mlp_dim|n_inner", INNER),
    (r"share_expert_dim|(.*_)?feed_forward_hidden_size|(.*_)?mlp_hidden_size", INNER),
    (
        r"(.*_)?hidden_size(_global)?|d_model|n_embd|embed_dim|(.*_)?hidden_dim|vision_output_dim",
        WIDTH,
    ),
    (
        r"embedding_size|projection_dim|lru_width|condition_dim|moe_hidden_size|outer_hidden_size",
        WIDTH,
    ),
    (r"projector_(in|out)put_dim|output_dim|output_proj_dims|mm_embed_dim|ple_embed_dim", WIDTH),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"n_group|topk_group|n_shared_experts|(moe_)?num_shared_experts|zero_expert_num", 1),
    (r"(.*_)?vocab_size|vocab_size_per_layer_input|(text|vision|audio)_vocab_size", VOCAB),
    (r"codebook_size|num_embeddings|num_embeds", 32),
    (r"hidden_size_per_layer_input|mamba_d_state|ssm_state_size|latent_dim", 16),
    (r"(.*_)?sliding_window(_size)?|attention_chunk_size|keep_window_size", 8),
    (r"attention_window_size|local_attention(_window_len)?", 8),
    (r"num_mel_bins|input_size|feature_size|mel_dim", 16),
    (r"patch_size", 4),
    (r"image_size|pretrain_image_size", 16),
    (r"upsample_groups", WIDTH),
    (r"num_filters", 8),
    (r"base_channels", 32),
    (r"position_embedding_size", 16),
    (r"num_speakers", 4),
    (r"mamba_chunk_size|chunk_size", 8),
    (r"index_topk", 8),
    (r"num_codebooks|num_quantizers|n_codebooks", 4),
    (r"num_register_tokens", 2),
    (r"query_pre_attn_scalar", HEAD_DIM),
)
_LAYER_COUNTS = r"(.*_)?num_(.*_)?layers|n_layers?|depth|(.*_)?(encoder|decoder)_layers|num_blocks"
_NOT_LAYER_COUNTS = r"num_(mtp|nextn_predict|dense|kv_shared|residual|adapter)_layers|.*_layers_.*"
_TOKEN_IDS = r".*(_token_id|_token_index|_token|(im_start|im_end|im_newline|image_patch)_id)"
_INDEX_LISTS = r".*(indexes|idxs|indices|indexs)|cross_attention_layers|spatial_target_layers"

# Families whose right class the naming rule of ``model_class`` does not find.
MODELS: dict[str, str] = {
    "dinov3_vit": "DINOv3ViTModel",
    "efficientloftr": "EfficientLoFTRModel",
    "eomt_dinov3": "EomtDinov3ForUniversalSegmentation",
    "esmfold2": "EsmFold2Model",
    "gemma3n": "Gemma3nForCausalLM",  # its vision tower needs timm and does not rotate
    "granite4_vision": "Granite4VisionForConditionalGeneration",
    "higgs_audio_v2": "HiggsAudioV2ForConditionalGeneration",
    "hrm_text": "HrmTextForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "kyutai_speech_to_text": "KyutaiSpeechToTextForConditionalGeneration",
    "lasr": "LasrForCTC",
    "lightglue": "LightGlueForKeypointMatching",
    "mlcd": "MLCDVisionModel",
    "nemotron_asr_streaming": "NemotronAsrStreamingForRNNT",
    "parakeet": "ParakeetForCTC",
    "pe_audio": "PeAudioModel",
    "pe_audio_video": "PeAudioVideoModel",
    "pixtral": "PixtralVisionModel",
    "pocket_tts_audio_tokenizer": "PocketTTSAudioTokenizerModel",
}


def _at(path: str, **fields: Any) -> dict[str, Any]:
    """Overrides of the fields of one sub-configuration."""
    return {f"{path}.{name}": value for name, value in fields.items()}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0} | parameters


_SMALL_CODEC = {"encoder_hidden_size": 4, "quantization_dim": WIDTH}
_SMALL_HIERA = _at(
    "vision_config.backbone_config",
    blocks_per_stage=[1, 1, 1, 1],
    embed_dim_per_stage=[16, 16, 32, 32],
    global_attention_blocks=[3],
    hidden_size=16,
    num_attention_heads_per_stage=[1, 1, 2, 2],
) | {"vision_config.backbone_channel_list": [32, 32, 16, 16]}
_SMALL_MEMORY = {
    "mask_downsampler_embed_dim": WIDTH,
    "memory_attention_rope_feat_sizes": [4, 4],
    "memory_fuser_embed_dim": WIDTH,
    "memory_fuser_intermediate_dim": INNER,
}

# Family -> dotted field -> value, over what the shrinker chose. "start" holds arguments of the
# default configuration itself.
OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "audio_config.codebook_dim": WIDTH,
        "audio_config.codebook_size": 10,
        "audio_token_offset": 110,
        "image_token_offset": 100,
        "vision_config.codebook_size": 10,
    },
    "bamba": {"attn_layer_indices": [0, 1], "num_hidden_layers": 3},
    "blt": {"encoder_hash_byte_group_vocab": 32},
    "chameleon": {"vocabulary_map": {"<image>": 159}},
    # Its table is at least 32 wide.
    "clvp": {"speech_config.num_attention_heads": 2, "text_config.num_attention_heads": 2},
    "cohere_compass": {
        "text_config.layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "text_config.num_hidden_layers": 3,
        "text_config.rope_parameters": {
            "full_attention": None,
            "sliding_attention": _rope(mrope_section=[2, 3, 3]),
        },
    },
    "dbrx": _at("attn_config", clip_qkv=8.0, rope_theta=10000.0),
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "vision_config.sam_config.downsample_channels": [32, 64],
        "vision_config.sam_config.image_size": 64,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
        "head_dim": 64,  # an eighth of it rotates
    },
    "diffusion_gemma": _at(
        "text_config",
        global_head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        top_k_experts=2,
    ),
    "dots1": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "dots3_note": _at(
        "text_config",
        head_dim=24,
        swa_head_dim=24,
        swa_kv_lora_rank=16,
        swa_num_attention_heads=HEADS,
        swa_num_key_value_heads=HEADS,
        swa_q_lora_rank=16,
        swa_qk_nope_head_dim=16,
        swa_v_head_dim=16,
    )
    | _at("vision_config", adapter_in_dim=WIDTH, adapter_out_dim=WIDTH)
    | _at(
        "audio_config",
        adapter_input_size=WIDTH,
        adapter_out_dim=WIDTH,
        downsample_hidden_size=16,
        feature_size=16,
    ),
    "edgetam_video": _SMALL_HIERA | _SMALL_MEMORY | {"memory_attention_rope_k_sizes": [2, 2]},
    "efficientloftr": {
        "num_attention_heads": 8,  # its table is a fixed multiple of the head's width
        "out_features": [16, 16, 32, 64],
        "stage_num_blocks": [1, 1, 1, 1],
    },
    "embedding_gemma2": {"start": {"vision_config": {}}, "text_config.global_head_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 159, "<|extra_200|>": 158}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": _rope(mrope_section=[3, 3, 2])},
    "esm": {
        "mask_token_id": 2,
        "pad_token_id": 1,
        "position_embedding_type": "rotary",
        "vocab_size": VOCAB,
    },
    "esmfold2": _at("atom_encoder", num_spatial_rope_pairs_per_axis=1, num_uid_rope_pairs=4)
    | _at(
        "structure_head.diffusion_module.atom_encoder",
        num_spatial_rope_pairs_per_axis=1,
        num_uid_rope_pairs=4,
    )
    | {"single_inputs_size": WIDTH + 67},
    "flint": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_only_layers": [0],
        "num_hidden_layers": 3,
    },
    "gemma3n": {"num_kv_shared_layers": 0},
    "gemma4": {"start": {"vision_config": {}}, "text_config.global_head_dim": 32},
    "gemma4_unified": {"text_config.global_head_dim": 32},
    "glm5_next": {"text_config.index_kpool": 4},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [1],
        "spatial_vision_layer": -1,
    },
    "granite_docling": {"text_config.attention_multiplier": HEAD_DIM**-0.5},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "num_hidden_layers": 3,
        "position_embedding_type": "rope",
    },
    # The four-axis form, whose cos and sin differ between the halves of a head.
    "hunyuan_vl": {
        "text_config.rope_parameters": _rope(
            rope_type="dynamic", alpha=1000.0, factor=1.0, mrope_section=[2, 2, 2, 2]
        ),
        "vision_config.img_max_token_num": 16,
        "vision_config.max_image_size": 16,
    },
    "hy_v4_vl": _at("vision_config", img_max_token_num=16, max_image_size=16),
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_hidden_layers": 4,
    },
    "lightglue": {
        "depth_confidence": -1.0,
        "descriptor_dim": WIDTH,
        "filter_threshold": 0.0,
        "width_confidence": -1.0,
    },
    "llama4": {"vision_config.intermediate_size": 4 * WIDTH},
    "minimax_m3_vl": {
        "text_config.index_block_size": 4,
        "text_config.index_topk_blocks": 2,
        "text_config.layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "text_config.mlp_layer_types": ["dense", "sparse", "sparse"],
        "text_config.num_hidden_layers": 3,
    },
    "mllama": {"text_config.cross_attention_layers": [1], "text_config.num_hidden_layers": 3},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "moshi": {"depth_decoder_config.input_size": WIDTH},
    "muse_glimmer": {"out_hidden_size": 4 * WIDTH},
    "muse_spark": {
        "audio_config.depths": [1] * 4,
        "audio_config.hidden_sizes": [16] * 4,
        "audio_config.num_hidden_layers": 4,
        "out_hidden_size": 4 * WIDTH,
    },
    "musicflamingo": {"audio_config.max_source_positions": 32},
    "nemotron": {"num_key_value_heads": 2},
    "neucodec": _SMALL_CODEC,
    "paddleocr_vl": {"text_config.rope_parameters": _rope(mrope_section=[2, 3, 3])},
    "pe_audio": {"audio_config.dac_config.encoder_hidden_size": 4},
    "pe_audio_video": {
        "audio_config.dac_config.encoder_hidden_size": 4,
        "audio_video_config.audio_config.dac_config.encoder_hidden_size": 4,
    },
    "qwen2_5_omni": _at(
        "token2wav_config.dit_config",
        enc_attention_channels=8,
        enc_channels=[16, 16, 16, 16, 48],
        enc_dim=16,
        enc_emb_dim=16,
        enc_se_channels=8,
        look_ahead_layers=[1],
        look_backward_layers=[0],
    )
    | {"token2wav_config.bigvgan_config.upsample_initial_channel": 64},
    "qwen3_5": {"text_config.head_dim": 32},  # a quarter of it rotates, on three axes
    "qwen3_5_moe": {"text_config.head_dim": 32},
    "qwen3_omni_moe": {
        "code2wav_config.decoder_dim": 32,
        "talker_config.spatial_merge_size": 2,
        "talker_config.text_config.shared_expert_intermediate_size": INNER,
    },
    "qwen4_exp": _at(
        "text_config",
        head_dim=32,
        indexer_budget=8,
        indexer_compress_ratio=4,
        indexer_head_dim=16,
        indexer_kv_heads=1,
        indexer_n_heads=2,
        rope_parameters=_rope(partial_rotary_factor=0.25, mrope_section=[2, 1, 1]),
    ),
    "recurrent_gemma": {"num_hidden_layers": 6},  # two recurrent, one attention, and again
    "sam2_video": _SMALL_HIERA | _SMALL_MEMORY,
    "sam3_tracker_video": _SMALL_MEMORY | {"image_size": 16},
    "sapiens2": {"num_hidden_layers": 2, "num_key_value_heads_per_layer": [4, 2]},
    "seamless_m4t": {
        "lang_embed_dim": 16,
        "position_embeddings_type": "rotary",
        "spkr_embed_dim": 16,
        "unit_embed_dim": 32,
        "upsample_initial_channel": 32,
    },
    "step3p7": {"text_config.sliding_window": 8},
    "vjepa2": {"crop_size": 16, "frames_per_clip": 4},
    "wav2vec2_bert": {"position_embeddings_type": "rotary"},
    "wav2vec2_conformer": {"conv_dim": [16] * 7, "position_embeddings_type": "rotary"},
    "xcodec2": _SMALL_CODEC,
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "use_mem_rope": True,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def _walk(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _walk(value)


def special_ids(config: PreTrainedConfig) -> set[int]:
    """Every token id that some part of ``config`` gives a meaning to."""
    found: set[int] = set()
    for part in _walk(config):
        for name, value in vars(part).items():
            if re.fullmatch(_TOKEN_IDS + "s?", name):
                values = value if isinstance(value, (list, tuple)) else [value]
                found.update(v for v in values if isinstance(v, int))
    return found


def _size(name: str) -> int | None:
    return next((size for rule, size in _RULES if re.fullmatch(rule, name)), None)


class _Shrinker:
    """One configuration, sub-configurations included; equal names of token ids get equal ids."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def shrink(
        self, default: PreTrainedConfig, overrides: Mapping[str, Any], prefix: str = ""
    ) -> PreTrainedConfig:
        # Models of unequal layers refuse to name "the" value of a field otherwise.
        default.allow_global_per_layer_attribute_access = True
        cls = type(default)
        names = {field.name for field in dataclasses.fields(cls)}
        layers = self._layers(default, names)
        kwargs: dict[str, Any] = {}
        for name in names:
            value = getattr(default, name, None)
            if isinstance(value, PreTrainedConfig):
                kwargs[name] = self.shrink(value, overrides, f"{prefix}{name}.")
            else:
                new = self._value(name, value, default, layers)
                if new is not None:
                    kwargs[name] = new
        kwargs["use_cache"] = False
        own = {
            key[len(prefix) :]: value
            for key, value in overrides.items()
            if key.startswith(prefix) and "." not in key[len(prefix) :]
        }
        kwargs.update(own)
        if "mrope_section" in getattr(cls, "ignore_keys_at_rope_validation", ()):
            kwargs.setdefault("rope_parameters", self._mrope(default, kwargs))
        return cls(**kwargs)

    def _value(
        self, name: str, value: Any, default: PreTrainedConfig, layers: list[int] | None
    ) -> Any:
        if name == "head_dim" and default.__dict__.get("qk_rope_head_dim") == value:
            return _size("qk_rope_head_dim" if value else name)
        if isinstance(value, bool) or value is None:
            return None
        if re.fullmatch(_TOKEN_IDS, name) and isinstance(value, int) and value >= 96:
            return self.ids.setdefault(name, VOCAB - 1 - len(self.ids))
        if name.endswith("intermediate_size") and isinstance(value, (list, tuple)):
            per_layer = layers is not None and len(value) == _depth(default)
            return [INNER] * len(layers if per_layer and layers else value)
        if layers is not None and isinstance(value, (list, tuple)) and value:
            if len(value) == _depth(default):
                ranged = list(value) == list(range(len(value)))
                return list(range(len(layers))) if ranged else [value[i] for i in layers]
            if re.fullmatch(_INDEX_LISTS, name):
                return type(value)([len(layers) - 1])
        if not isinstance(value, int) or value <= 0:
            return None
        if re.fullmatch(_LAYER_COUNTS, name) and not re.fullmatch(_NOT_LAYER_COUNTS, name):
            main = name == _depth_name(default)
            return len(layers) if main and layers is not None else min(value, 2)
        if re.fullmatch(r"(.*_)?(num_)?(.*_)?key_value_(attention_)?heads|kv_n_heads", name):
            heads = getattr(default, "num_attention_heads", None)
            return 1 if value == 1 else HEADS if value == heads else HEADS // 2
        return _size(name)

    @staticmethod
    def _layers(default: PreTrainedConfig, names: set[str]) -> list[int] | None:
        """Indices of layers to keep: each kind once, the first that attends (and rotates) twice."""
        depth = _depth(default)
        if depth is None:
            return None
        lists = [
            value
            for name in sorted(names)
            if isinstance(value := getattr(default, name, None), (list, tuple))
            and len(value) == depth
            and list(value) != list(range(depth))
        ]
        kinds = [str([value[i] for value in lists]) for i in range(depth)]
        kept = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
        attending = [
            i for i in kept if "attention" in kinds[i] and "linear" not in kinds[i]
        ] or kept
        first = kinds[attending[0]]
        again = [i for i in range(depth) if kinds[i] == first and i not in kept]
        return sorted(kept + again[:1])

    @staticmethod
    def _mrope(default: PreTrainedConfig, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The default parameters with three sections that fill half of the rotated channels."""
        parameters = dict(getattr(default, "rope_parameters", None) or {})
        head_dim = kwargs.get("qk_rope_head_dim") or kwargs.get("head_dim") or WIDTH // HEADS
        pairs = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0)) // 2
        side = 3 * pairs // 8
        return parameters | {"mrope_section": [pairs - 2 * side, side, side]}


def _depth_name(config: PreTrainedConfig) -> str:
    return config.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def _depth(config: PreTrainedConfig) -> int | None:
    depth = getattr(config, "num_hidden_layers", None)
    return depth if isinstance(depth, int) else None


class _FrameClassifier(nn.Module):
    """In the place of a timm image model, which this zoo does not ask for: a row for each frame."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_labels)

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> _FrameClassifier:
        return cls(config.num_labels)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.head(pixel_values.mean((-2, -1))))


class _NoLoss(nn.Module):
    """In the place of a training loss that needs scipy."""

    def __init__(self, config: PreTrainedConfig, weight_dict: dict[str, float]) -> None:
        super().__init__()
        self.num_labels, self.eos_coef = config.num_labels, config.no_object_weight
        self.register_buffer("empty_weight", torch.ones(self.num_labels + 1))


# Family -> (modelling file, name in it, what stands in while the model is built). Nothing here
# rotates; the real thing needs a package that may be missing.
_STAND_INS: dict[str, tuple[tuple[str, str, type[nn.Module]], ...]] = {
    "eomt_dinov3": (("eomt_dinov3", "EomtDinov3Loss", _NoLoss),),
    "pe_video": (("pe_video", "AutoModelForImageClassification", _FrameClassifier),),
    "pe_audio_video": (("pe_video", "AutoModelForImageClassification", _FrameClassifier),),
}


@contextmanager
def stand_ins(family: str) -> Iterator[None]:
    """While it lasts, the family's model builds without packages that do not matter here."""
    with ExitStack() as stack:
        for file, name, value in _STAND_INS.get(family, ()):
            module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def model_class(family: str) -> type[PreTrainedModel]:
    """The class that holds every rotary module of the family, the one with a head if there is."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family in MODELS:
        return getattr(module, MODELS[family])
    for suffix in ("ForConditionalGeneration", "ForCausalLM", "ForMaskedLM", "Model"):
        found = [name for name in module.__all__ if name.endswith(suffix)]
        # "XTextForCausalLM" or "XVisionModel" is a part; the whole has the shortest name.
        found = [n for n in found if not re.search(r"PreTrained|Text|Vision|Audio|Talker", n)]
        if found:
            return getattr(module, min(found, key=len))
    raise LookupError(f"{family} has no model class this zoo knows; name one in MODELS")


def config_of(family: str) -> PreTrainedConfig:
    """A tiny configuration of the family's ``model_class``."""
    config_class = model_class(family).config_class
    overrides = dict(OVERRIDES.get(family, {}))
    start = overrides.pop("start", {})
    return _Shrinker().shrink(config_class(**start), overrides)
