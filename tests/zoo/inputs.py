"""Keyword arguments of a forward call that reaches every rotary module of a tiny model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from zoo.configs import WIDTH, special_ids

__all__ = ["inputs_of"]

BATCH, LENGTH, OFFSET = 2, 13, 3

Inputs = dict[str, Any]
Calls = list[tuple[str, Inputs]]
Maker = Callable[[PreTrainedModel], "Inputs | Calls"]
_MAKERS: dict[str, Maker] = {}


def _makes(*families: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        for family in families:
            assert family not in _MAKERS, family
            _MAKERS[family] = maker
        return maker

    return register


def ordinary_ids(model: PreTrainedModel, *shape: int) -> Tensor:
    """Random token ids, none of them special."""
    ids = torch.tensor(sorted(set(range(3, 90)) - special_ids(model.config)))
    return ids[torch.randint(len(ids), shape)]


def positions(length: int = LENGTH, axes: int | None = None) -> Tensor:
    """``[BATCH, length]`` or ``[axes, BATCH, length]``: no two rows or axes alike, none arange."""
    rows = torch.arange(length) + OFFSET * torch.arange(1, BATCH + 1)[:, None]
    if axes is None:
        return rows
    steps = torch.arange(axes)[:, None, None]
    return rows + steps * (1 + torch.arange(length) % 3)


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the forward method names this argument."""
    return name in inspect.signature(model.forward).parameters


def _text(model: PreTrainedModel) -> Inputs:
    inputs: Inputs = {"input_ids": ordinary_ids(model, BATCH, LENGTH)}
    if accepts(model, "position_ids"):
        inputs["position_ids"] = positions()
    return inputs


# Images as packed patches, their grids apart (Qwen-VL and its many relatives).

GRIDS = ((1, 4, 4), (1, 4, 6))


def patches(width: int | Sequence[int], grids: Sequence[Sequence[int]] = GRIDS) -> Tensor:
    """One row for each patch of every image."""
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, *([width] if isinstance(width, int) else width))


def with_media(
    model: PreTrainedModel, token_id: int, counts: Sequence[int], axes: int | None = None
) -> Inputs:
    """Text in which row ``i`` holds ``counts[i]`` placeholders after three ordinary tokens."""
    length = max(LENGTH, max(counts) + 6)
    ids = ordinary_ids(model, BATCH, length)
    for row, count in zip(ids, counts, strict=True):
        row[3 : 3 + count] = token_id
    inputs: Inputs = {"input_ids": ids}
    if accepts(model, "position_ids"):
        inputs["position_ids"] = positions(length, axes)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if accepts(model, name):
            inputs[name] = (ids == token_id).long()
    return inputs


def feature_counts(features: Any) -> list[int]:
    """Number of embeddings for each image or clip of what ``get_*_features`` returned."""
    pooled = getattr(features, "pooler_output", features)
    return [x.numel() // x.shape[-1] for x in pooled]


def _rope_axes(config: PreTrainedConfig) -> int | None:
    sections = (getattr(config.get_text_config(), "rope_parameters", None) or {}).get(
        "mrope_section"
    )
    return len(sections) if sections else None


def _image_id(config: PreTrainedConfig) -> int:
    for name in ("image_token_id", "image_token_index"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    raise LookupError(f"{type(config).__name__} names no image token")


def _grid_images(model: PreTrainedModel, width: int | Sequence[int], **media: Any) -> Inputs:
    media = {
        "pixel_values": patches(width),
        "image_grid_thw": torch.tensor(GRIDS),
    } | media
    with torch.no_grad():
        counts = feature_counts(model.get_image_features(**_cast(media, model)))
    config = model.config
    return media | with_media(model, _image_id(config), counts, _rope_axes(config))


def _flat_patch(vision: PreTrainedConfig) -> int:
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    frames = getattr(vision, "temporal_patch_size", 1)
    return channels * frames * vision.patch_size**2


@_makes(
    "cohere_compass", "exaone4_5", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "hy_v4_vl",
    "hunyuan_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "lfm3_vl", "cosmos3_edge",
)  # fmt: skip
def _packed_patches(model: PreTrainedModel) -> Inputs:
    return _grid_images(model, _flat_patch(model.config.vision_config))


@_makes("minimax_m3_vl")
def _minimax_vl(model: PreTrainedModel) -> Inputs:
    inputs = _packed_patches(model)
    # Its block-sparse layers number the blocks of keys by position: positions start at 0.
    del inputs["position_ids"]
    return inputs


@_makes("ernie4_5_vl_moe")
def _ernie_vl(model: PreTrainedModel) -> Inputs:
    inputs = _packed_patches(model)
    # Experts of text and of images are apart; this says which token goes where.
    return inputs | {"moe_mm_token_type_ids": inputs["mm_token_type_ids"]}


@_makes("paddleocr_vl", "kimi_k25")
def _square_patches(model: PreTrainedModel) -> Inputs:
    size = model.config.vision_config.patch_size
    return _grid_images(model, (3, size, size))


@_makes("muse_glimmer", "muse_spark")
def _muse(model: PreTrainedModel) -> Inputs:
    vision = model.config.vision_config
    return _grid_images(model, vision.patch_temporal * 3 * vision.patch_size**2)


@_makes("inkling2")
def _inkling(model: PreTrainedModel) -> Inputs:
    vision = model.config.vision_config
    size = vision.patch_size * vision.spatial_merge_size
    grids = torch.tensor(((1, 2, 2), (1, 2, 3)))  # counted in tokens of the language model
    media = {"pixel_values": torch.rand(10, size, size, 3), "image_grid_thw": grids}
    return media | with_media(model, _image_id(model.config), [4, 6])


@_makes("video_llama_3")
def _video_llama(model: PreTrainedModel) -> Inputs:
    width = _flat_patch(model.config.vision_config)
    return _grid_images(model, width, image_merge_sizes=torch.tensor((2, 2)))


# Other encodings of images


def _squares(model: PreTrainedModel) -> Tensor:
    size = getattr(getattr(model.config, "vision_config", model.config), "image_size", None) or 16
    return torch.randn(BATCH, 3, size, size)


@_makes("dinov3_vit", "sapiens2", "mlcd", "eomt_dinov3")
def _image_encoder(model: PreTrainedModel) -> Inputs:
    return {"pixel_values": _squares(model)}


def _with_images(model: PreTrainedModel, **media: Any) -> Inputs:
    """One image for each row of text, as many placeholders as it has features."""
    with torch.no_grad():
        counts = feature_counts(model.get_image_features(**_cast(media, model)))
    return media | with_media(model, _image_id(model.config), counts)


@_makes("llama4")
def _llama4(model: PreTrainedModel) -> Calls:
    """Its two halves: the whole asks its language model for a field that is not there."""
    return [
        ("language_model", _text(model)),
        ("vision_model", {"pixel_values": _squares(model)}),
    ]


@_makes("step3p7", "deepseek_ocr2")
def _global_views(model: PreTrainedModel) -> Inputs:
    return _with_images(model, pixel_values=_squares(model))


@_makes("mistral_large4")
def _mistral_images(model: PreTrainedModel) -> Inputs:
    sizes = torch.tensor([[16, 24], [8, 16]])
    return _with_images(model, pixel_values=torch.randn(2, 3, 16, 24), image_sizes=sizes)


@_makes("efficientloftr")
def _image_pair(model: PreTrainedModel) -> Inputs:
    # Bright: the convolutions shrink their input, and equal tokens would not feel a rotation.
    return {"pixel_values": torch.rand(1, 2, 3, 128, 128) * 1e4}


@_makes("pixtral")
def _pixtral(model: PreTrainedModel) -> Inputs:
    return {
        "pixel_values": torch.randn(2, 3, 16, 24),
        "image_sizes": torch.tensor([[16, 24], [8, 16]]),
    }


@_makes("vjepa2")
def _video_encoder(model: PreTrainedModel) -> Inputs:
    return {"pixel_values_videos": torch.randn(BATCH, 4, 3, 16, 16)}


@_makes("diffusion_gemma")
def _diffusion_gemma(model: PreTrainedModel) -> Inputs:
    return _gemma4(model) | {
        "decoder_input_ids": ordinary_ids(model, BATCH, 5),
        "decoder_position_ids": positions(5) + LENGTH,
    }


@_makes("gemma4", "embedding_gemma2")
def _gemma4(model: PreTrainedModel) -> Inputs:
    vision = model.config.vision_config
    y, x = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    where = torch.stack((x, y), -1).view(1, 36, 2).repeat(BATCH, 1, 1)
    media = {
        "pixel_values": torch.rand(BATCH, 36, 3 * vision.patch_size**2),
        "image_position_ids": where,
    }
    count = 36 // vision.pooling_kernel_size**2
    return media | with_media(model, model.config.image_token_id, [count] * BATCH)


# Encoder and decoder


@_makes("dia")
def _dia(model: PreTrainedModel) -> Inputs:
    channels = model.config.decoder_config.num_channels
    return _text(model) | {
        "decoder_input_ids": ordinary_ids(model, BATCH, LENGTH, channels),
        "decoder_position_ids": positions(),
    }


@_makes("t5gemma", "t5gemma2")
def _sequence_to_sequence(model: PreTrainedModel) -> Inputs:
    inputs = _text(model) | {"decoder_input_ids": ordinary_ids(model, BATCH, LENGTH - 2)}
    if accepts(model, "decoder_position_ids"):
        inputs["decoder_position_ids"] = positions(LENGTH - 2)
    return inputs


# Sound


@_makes("wav2vec2_conformer")
def _waveform(model: PreTrainedModel) -> Inputs:
    return {"input_values": torch.randn(BATCH, 4000)}


@_makes("wav2vec2_bert")
def _spectrogram(model: PreTrainedModel) -> Inputs:
    return {"input_features": torch.randn(BATCH, LENGTH, model.config.feature_projection_input_dim)}


@_makes("lasr", "parakeet", "nemotron3_diarization")
def _mel_encoder(model: PreTrainedModel) -> Inputs:
    config = model.config
    encoder = getattr(config, "encoder_config", None) or getattr(config, "audio_config", config)
    return {"input_features": torch.randn(BATCH, 96, encoder.num_mel_bins)}


@_makes("moonshine", "moonshine_streaming")
def _speech_to_text(model: PreTrainedModel) -> Inputs:
    return {
        "input_values": torch.randn(BATCH, 5120),
        "decoder_input_ids": ordinary_ids(model, BATCH, LENGTH),
        "decoder_position_ids": positions(),
    }


@_makes("mimi")
def _codec(model: PreTrainedModel, prefix: str = "") -> Calls:
    """Its transformers apart: between them a nearest-neighbour search hides small errors."""
    parts = ("encoder_transformer", "decoder_transformer")
    return [(prefix + part, _hidden(WIDTH)) for part in parts]


def _hidden(width: int) -> Inputs:
    return {"hidden_states": torch.randn(BATCH, LENGTH, width), "position_ids": positions()}


def _depth(model: PreTrainedModel, state: str) -> Inputs:
    """Codebooks of one frame, decoded one after the other from the state of the frame."""
    return {
        "input_ids": ordinary_ids(model, BATCH, 4) % 32,
        state: torch.randn(BATCH, WIDTH),
    }


@_makes("csm")
def _csm(model: PreTrainedModel) -> Calls:
    codes = torch.randint(3, 30, (BATCH, LENGTH, model.config.num_codebooks))
    return [
        ("", {"input_ids": codes, "position_ids": positions()}),
        ("depth_decoder", _depth(model, "backbone_last_hidden_state")),
        *_codec(model, "codec_model."),
    ]


@_makes("kyutai_speech_to_text")
def _kyutai(model: PreTrainedModel) -> Calls:
    codes = torch.randint(3, 30, (BATCH, LENGTH, model.config.num_codebooks + 1))
    inputs = {"input_ids": codes, "position_ids": positions()}
    return [("", inputs), *_codec(model, "codec_model.")]


@_makes("moshi")
def _moshi(model: PreTrainedModel) -> Calls:
    depth = _depth(model, "last_hidden_state")
    depth["last_hidden_state"] = depth["last_hidden_state"][:, None]
    return [
        ("decoder", _text(model)),
        ("depth_decoder", depth),
        *_codec(model, "audio_encoder."),
    ]


@_makes("pocket_tts_audio_tokenizer")
def _continuous_codec(model: PreTrainedModel) -> Inputs:
    frame = model.config.encoder_config.frame_size
    return {"input_values": torch.randn(BATCH, 1, 8 * frame)}


@_makes("neucodec", "xcodec2")
def _codec_decoder(model: PreTrainedModel) -> Calls:
    """The only part that rotates, behind a rounding of the codes that hides small errors."""
    width = model.config.hidden_size + model.config.semantic_model_config.hidden_size
    return [("acoustic_decoder", {"hidden_states": torch.randn(BATCH, LENGTH, width)})]


@_makes("seamless_m4t")
def _seamless(model: PreTrainedModel) -> Inputs:
    return {
        "input_features": torch.randn(BATCH, 24, model.config.feature_projection_input_dim),
        "decoder_input_ids": ordinary_ids(model, BATCH, LENGTH),
    }


@_makes("voxtral_realtime")
def _voxtral(model: PreTrainedModel) -> Inputs:
    audio = model.config.audio_config
    frames = LENGTH * 2 * model.config.downsample_factor
    features = torch.randn(BATCH, audio.num_mel_bins, frames)
    return _text(model) | {"input_features": features, "num_delay_tokens": 3}


@_makes("pe_audio")
def _audio_and_text(model: PreTrainedModel) -> Inputs:
    return {
        "input_ids": ordinary_ids(model, BATCH, LENGTH),
        "input_values": torch.randn(BATCH, 1, 512),
    }


@_makes("clvp")
def _clvp(model: PreTrainedModel) -> Calls:
    """Part by part: the speech encoder reads the most likely codes, which hides small errors."""
    ids = ordinary_ids(model, BATCH, LENGTH)
    conditioning = {
        "input_features": torch.randn(BATCH, model.config.decoder_config.feature_size, 24),
        "input_ids": ids,
    }
    embeds = {"inputs_embeds": torch.randn(BATCH, LENGTH, WIDTH)}
    backwards = torch.arange(LENGTH).flip(0)[None]  # its table has a row for each token, no more
    return [
        ("conditioning_encoder", conditioning),
        ("speech_decoder_model", embeds),
        ("speech_encoder_model", {"input_ids": ids, "position_ids": backwards}),
        ("text_encoder_model", {"input_ids": ids, "position_ids": backwards}),
    ]


@_makes("lightglue")
def _keypoints(model: PreTrainedModel) -> Calls:
    """Keypoints as a detector would find them: random images have none worth the name."""
    count = model.config.keypoint_detector_config.descriptor_decoder_dim
    matching = {
        "keypoints": torch.rand(1, 2, LENGTH, 2) * 32,
        "descriptors": torch.randn(1, 2, LENGTH, count),
        "height": 32,
        "width": 32,
        "mask": torch.ones(1, 2, LENGTH, dtype=torch.long),
        "output_hidden_states": True,
    }
    return [("_match_image_pair", matching)]


@_makes("sam2_video", "edgetam_video")
def _memory_attention(model: PreTrainedModel) -> Calls:
    """The part that rotates, for one frame and a memory of two others and four pointers."""
    config = model.config
    height, width = config.memory_attention_rope_feat_sizes
    features = torch.Size((height * width, 1, config.memory_attention_hidden_size))
    inputs: Inputs = {"num_object_pointer_tokens": 4}
    spatial = height * width
    if accepts(model.memory_attention, "num_spatial_memory_tokens"):
        # Latents that say where, and in front of them four that say when.
        spatial = math.prod(config.memory_attention_rope_k_sizes) + 4
        inputs["num_spatial_memory_tokens"] = 2
    memory = torch.Size((2 * spatial + 4, 1, config.memory_encoder_output_channels))
    inputs |= {
        "current_vision_features": torch.randn(features),
        "current_vision_position_embeddings": torch.randn(features),
        "memory": torch.randn(memory),
        "memory_posision_embeddings": torch.randn(memory),
    }
    return [("memory_attention", inputs)]


@_makes("sam3_tracker_video")
def _tracker(model: PreTrainedModel) -> Calls:
    return _sam3(model) + _memory_attention(model)


@_makes("sam3")
def _sam3(model: PreTrainedModel) -> Calls:
    return [("vision_encoder", {"pixel_values": torch.randn(BATCH, 3, 16, 16)})]


@_makes("muse_glimmer_assistant")
def _draft_block(model: PreTrainedModel) -> Inputs:
    context = WIDTH * len(model.config.target_layer_ids)
    return {
        "noise_embeds": torch.randn(BATCH, 4, WIDTH),
        "context_hidden_states": torch.randn(BATCH, 9, context),
        "position_ids": positions(LENGTH),
    }


@_makes("evolla")
def _evolla(model: PreTrainedModel) -> Inputs:
    protein = ordinary_ids(model, BATCH, LENGTH) % 20 + 4
    return _text(model) | {
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        "protein_input_ids": protein,
        "protein_attention_mask": torch.ones_like(protein),
    }


@_makes("idefics")
def _idefics(model: PreTrainedModel) -> Inputs:
    size = model.config.vision_config.image_size
    return _text(model) | {
        "pixel_values": torch.randn(BATCH, 1, 3, size, size),
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
    }


@_makes("glmasr", "musicflamingo")
def _audio_text(model: PreTrainedModel) -> Inputs:
    mels = model.config.audio_config.num_mel_bins
    media = {
        "input_features": torch.randn(BATCH, mels, 64),
        "input_features_mask": torch.ones(BATCH, 64, dtype=torch.long),
    }
    count = 8 if model.config.model_type == "glmasr" else 16
    return media | with_media(model, model.config.audio_token_id, [count] * BATCH)


@_makes("nemotron3_5_transcribe")
def _transcribe(model: PreTrainedModel) -> Calls:
    features = {
        "input_features": torch.randn(BATCH, 96, 16),
        "input_features_mask": torch.ones(BATCH, 96, dtype=torch.long),
    }
    return [
        ("model.audio_tower", features),
        ("model.word_timestamp_encoder", {"inputs_embeds": torch.randn(BATCH, LENGTH, WIDTH)}),
    ]


@_makes("nemotron_asr_streaming")
def _transducer(model: PreTrainedModel) -> Inputs:
    ids = ordinary_ids(model, BATCH, 5)
    return {"input_features": torch.randn(BATCH, 96, 16), "decoder_input_ids": ids}


@_makes("dots3_note")
def _dots_note(model: PreTrainedModel) -> Calls:
    sound = {
        "input_features": torch.randn(BATCH, model.config.audio_config.feature_size, 96),
        "chunk_sample_lengths": torch.tensor([96 * 160] * BATCH),
    }
    # Only its inner model can encode images alone.
    images = _packed_patches(model.model)
    return [("", images), ("model.audio_tower", sound)]


@_makes("qwen2_5_omni")
def _qwen_omni(model: PreTrainedModel) -> Calls:
    config = model.config.token2wav_config.dit_config
    frames = LENGTH * config.repeats
    wave = {
        "hidden_states": torch.randn(BATCH, frames, config.mel_dim),
        "condition_vector": torch.randn(BATCH, 24, config.mel_dim),
        "speaker_embedding": torch.randn(BATCH, frames, config.enc_emb_dim),
        "quantized_code": torch.randint(0, 30, (BATCH, LENGTH)),
        "time_step": torch.tensor(0.3),
    }
    return [
        ("thinker", _packed_patches(model.thinker)),
        ("talker.model", _embedded(WIDTH, axes=3)),
        ("token2wav.code2wav_dit_model", wave),
    ]


@_makes("qwen3_omni_moe")
def _qwen3_omni(model: PreTrainedModel) -> Calls:
    return [
        ("thinker", _packed_patches(model.thinker)),
        ("talker.model", _embedded(WIDTH, axes=3)),
        ("talker.code_predictor.model", _embedded(WIDTH)),
        ("code2wav.pre_transformer", _embedded(WIDTH)),
    ]


def _embedded(width: int, axes: int | None = None) -> Inputs:
    return {
        "inputs_embeds": torch.randn(BATCH, LENGTH, width),
        "position_ids": positions(axes=axes),
    }


@_makes("pe_video")
def _video_and_text(model: PreTrainedModel) -> Inputs:
    video = torch.randn(BATCH, LENGTH, 3, 8, 8)
    return {"input_ids": ordinary_ids(model, BATCH, LENGTH), "pixel_values_videos": video}


@_makes("pe_audio_video")
def _audio_video_and_text(model: PreTrainedModel) -> Inputs:
    return _video_and_text(model) | {"input_values": torch.randn(BATCH, 1, 512)}


@_makes("esmfold2")
def _atoms(model: PreTrainedModel) -> Calls:
    """The layers that rotate by the atoms' coordinates, and the language model of sequences."""
    calls: Calls = [("esmc", {"input_ids": torch.randint(4, 24, (BATCH, LENGTH))})]
    where, owner = torch.randn(BATCH, LENGTH, 3), torch.arange(LENGTH).expand(BATCH, -1) // 3
    rows = model.input_embedder.atom_encoder.rotary_emb(where, owner, dtype=torch.float32)
    parts = ("input_embedder.atom_encoder", "structure_head.atom_encoder")
    for part in (*parts, "structure_head.atom_decoder"):
        atoms = {
            "hidden_states": torch.randn(BATCH, LENGTH, WIDTH),
            "atom_conditioning": torch.randn(BATCH, LENGTH, WIDTH),
            "attention_mask": None,
            "position_embeddings": rows,
        }
        calls.append((f"{part}.layers.0", atoms))
    return calls


@_makes("timesfm2_5")
def _time_series(model: PreTrainedModel) -> Inputs:
    patch = model.config.patch_length
    return {
        "past_values": torch.randn(BATCH, 12 * patch),
        "past_values_padding": torch.zeros(BATCH, 12 * patch, dtype=torch.long),
    }


def inputs_of(family: str, model: PreTrainedModel) -> Calls:
    """``(attribute, keyword arguments)`` for each call, ``""`` for the model itself.

    Seeded by the global generator; floating-point inputs in the type of the part that is called.
    """
    made = _MAKERS.get(family, _text)(model)
    calls = made if isinstance(made, list) else [("", made)]
    return [(path, _cast(inputs, _part(model, path))) for path, inputs in calls]


def _part(model: PreTrainedModel, path: str) -> nn.Module:
    part = attrgetter(path)(model) if path else model
    return part if isinstance(part, nn.Module) else model


def _cast(inputs: Inputs, part: nn.Module) -> Inputs:
    dtype = next(part.parameters()).dtype

    def cast(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(cast, x))
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return {name: cast(x) for name, x in inputs.items()}
