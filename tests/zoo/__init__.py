"""Tiny runnable models of every transformers family that rotates, for tests that compare them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zoo import configs, inputs

__all__ = ["FAST", "FORMULAS", "SKIPPED", "UNSEEN", "UNUSED", "Case", "build", "families"]

_ROTARY_CODE = re.compile(
    r"def (\w*apply_\w*(rotary|rope)\w*|rotate_(half|every_two|pairwise|queries)\w*)\("
)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Families that cannot be built here: none. Where only a part that does not rotate needs a package
# that may be missing, ``configs`` has something small stand in for it.
SKIPPED: dict[str, str] = {}

# These define a rotary function that no class of theirs calls.
UNUSED = _names("jamba nemotron_asr_streaming nemotron_h parakeet")

# These rotate, and no output shows it.
UNSEEN = {
    "neucodec": "its positions number the heads, so q and k of all tokens turn by the same angle",
    "xcodec2": "its positions number the heads, so q and k of all tokens turn by the same angle",
}

# Formula (function name / digest of its normalised source, see ``zoo.survey``) -> families that
# run it. The survey of all families fails where this is not what it saw.
FORMULAS: dict[str, tuple[str, ...]] = {
    # Halves of the whole head.
    "apply_rotary_pos_emb/671e3b": _names(
        "afmoe apertus apertus1p5 arcee aria axk2 bitnet chameleon cohere_compass cosmos3_edge "
        "csm cwm dbrx deepseek_ocr2 deepseek_v32 dia diffllama doge dory dots1 embedding_gemma2 "
        "emu3 esmc esmfold2 eurobert exaone4 exaone4_5 exaone_moe falcon falcon_h1 flint gemma "
        "gemma2 gemma3 glmasr gpt_neox_japanese gradium_phonon_tts granite granite4_vision "
        "granite_docling granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared "
        "gte higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax "
        "idefics jais2 jetmoe jina_embeddings_v3 kolibri1 kyutai_speech_to_text lara_mini lasr "
        "lfm2 lfm2_moe llama mellum mimi minicpm3 minimax ministral ministral3 mistral "
        "mistral_large4 mixtral mllama molmo2 moshi muse_glimmer muse_spark musicflamingo "
        "neucodec nomic_bert olmoe paddleocr_vl persimmon phi phimoe pixtral pocket_tts "
        "pocket_tts_audio_tokenizer qwen2 qwen2_5_omni qwen2_5_vl qwen2_moe qwen2_vl qwen3 "
        "qwen3_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open stablelm "
        "starcoder2 t5gemma t5gemma2 timesfm2_5 ultrabert unlimited_ocr vaultgemma video_llama_3 "
        "voxtral_realtime xcodec2 zamba2"
    ),
    # The same, cast back to the type of q and of k.
    "apply_rotary_pos_emb/d66301": _names(
        "beam flex_olmo lfm3 lfm3_vl olmo olmo2 olmo3 olmo_hybrid"
    ),
    # The same in float32.
    "apply_rotary_pos_emb/57b4b3": _names(
        "esm evolla modernbert modernbert_decoder pe_audio pe_audio_video pe_video"
    ),
    # The same in float32 for packed tokens.
    "apply_rotary_pos_emb_vision/c4aed5": _names(
        "cohere_compass dots3_note ernie4_5_vl_moe exaone4_5 glm4v glm4v_moe glm5_next glm_ocr "
        "kimi_k25 lfm3_vl mlcd muse_glimmer muse_spark paddleocr_vl qwen2_5_omni qwen2_5_vl "
        "qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp step3p7 "
        "video_llama_3"
    ),
    # The same in float32, with tables that may differ between the halves.
    "apply_rotary_pos_emb/aef72f": _names("hunyuan_vl"),
    # The same for one tensor.
    "apply_rotary_pos_emb/616e59": _names("diffusion_gemma gemma3n gemma4 gemma4_unified"),
    # The same in every slice of the head, one for each axis.
    "apply_multidimensional_rope/67e3aa": _names("diffusion_gemma embedding_gemma2 gemma4"),
    # The same for a q shorter than k.
    "apply_rotary_pos_emb/f6533b": _names("muse_glimmer_assistant"),
    # The same backwards.
    "apply_rotary_pos_emb/e65a75": _names("nanochat"),
    # The same from tables of half the width.
    "apply_rotary_pos_emb/90e4d6": _names("gpt_oss"),
    # The same, prefix tokens left alone.
    "apply_rotary_pos_emb/b09257": _names("dinov3_vit eomt_dinov3 sapiens2"),
    # The same for q, k and v, rows gathered inside.
    "apply_rotary_pos_emb/96ec9a": _names("clvp"),
    # The same on hidden states, before the projections.
    "_apply_rotary_embedding/1a224d": _names("seamless_m4t wav2vec2_bert wav2vec2_conformer"),
    # Halves of the first channels, in six spellings.
    "apply_rotary_pos_emb/8108df": _names(
        "bamba glm4_moe glm4v_moe glm_image gpt_neox laguna mimo_v2_flash minimax_m2 "
        "minimax_m3_vl neomme qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma step3p7 zaya"
    ),
    "apply_rotary_pos_emb/37b646": _names("phi3 phi4_multimodal"),
    "apply_rotary_pos_emb/7dad2a": _names("dots3_note nemotron"),
    "apply_rotary_pos_emb/dd6cb2": _names("glmasr nemotron3_5_transcribe nemotron3_diarization"),
    "apply_rotary_pos_emb/91b139": _names("qwen4_exp"),
    "apply_rotary_pos_emb_vision/bd4089": _names("minimax_m3_vl"),
    # Neighbouring channels are pairs, in float32.
    "apply_rotary_pos_emb/95a01f": _names("cohere cohere2 cohere2_moe efficientloftr lightglue"),
    # The same for packed tokens.
    "apply_rotary_pos_emb_vision/e5a7e0": _names("inkling2"),
    # The same over two axes.
    "apply_rotary_pos_emb_2d/5975f1": _names("sam3 sam3_tracker_video"),
    # The same, the last keys left alone, the table tiled over the keys.
    "apply_rotary_pos_emb_2d/2f54c8": _names("sam2_video sam3_tracker_video"),
    # The same, without.
    "apply_rotary_pos_emb_2d_self_attn/c4aca5": _names("edgetam_video"),
    # The same with a table of its own for the spatial part of k.
    "apply_rotary_pos_emb_2d_cross_attn/2b6ba5": _names("edgetam_video"),
    # Pairs in float32.
    "apply_rotary_pos_emb/58da0d": _names("ernie4_5_vl_moe"),
    # Pairs in float32, from tables whose halves are equal.
    "apply_rotary_pos_emb/340b49": _names("ernie4_5 ernie4_5_moe hy_v4_vl"),
    # The same in the type of q.
    "apply_rotary_pos_emb/c321f4": _names("helium"),
    # The same by matrices.
    "apply_rotary_pos_emb/33ab48": _names("pe_audio pe_audio_video pe_video"),
    # The same for the first channels.
    "apply_rotary_pos_emb/1aa381": _names("glm glm4 moonshine moonshine_streaming"),
    # Pairs in the type of q.
    "apply_rotary_pos_emb/f21ab0": _names("blt"),
    # Pairs of the first channels.
    "apply_rotary_pos_emb/8e2989": _names("glm4v glm_ocr"),
    # Pairs, from tables of half the width.
    "apply_rotary_pos_emb/057745": _names("openai_privacy_filter"),
    # The same for the last channels of one tensor, in float32.
    "apply_rotary_pos_emb/4ef063": _names("deepseek_v4"),
    # The same for one tensor, sin before cos.
    "apply_rotary_pos_emb/dd4be0": _names("codegen gptj"),
    # Pairs, sin and cos in one table.
    "apply_rotary_position_embeddings/453d3e": _names("roformer"),
    # Pairs of the first channels of hidden states, in float64.
    "apply_rotary_time_emb/1dc7ed": _names("musicflamingo"),
    # Pairs whose two channels turn by unequal angles, on three axes.
    "apply_rotary_embeddings/14b998": _names("vjepa2"),
    # Pairs as complex numbers.
    "apply_rotary_emb/21c7d9": _names("deepseek_v2"),
    "apply_rotary_emb/e4af60": _names("llama4"),
    "vision_apply_rotary_emb/81f913": _names("llama4"),
    # Reads pairs, writes halves.
    "apply_rotary_pos_emb_interleave/2e50ea": _names(
        "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa "
        "kimi_k25 longcat_flash mistral4 youtu"
    ),
    # The same where k may be missing.
    "apply_rotary_pos_emb_interleave/1a0cc2": _names("mistral_large4"),
}

# A slice that is quick to build and holds every formula.
FAST = _names(
    "axk2 blt clvp codegen cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v4 dinov3_vit "
    "edgetam_video ernie4_5_moe ernie4_5_vl_moe esm gemma3 gemma4 glm4 glm_ocr gpt_neox gpt_oss "
    "gptj helium hunyuan_vl inkling2 lightglue llama llama4 minimax_m3_vl mistral_large4 mlcd "
    "modernbert moonshine muse_glimmer_assistant musicflamingo nanochat nemotron "
    "nemotron3_diarization neomme olmo3 openai_privacy_filter pe_video phi3 pixtral "
    "qwen2_5_omni qwen2_vl qwen3_5 qwen3_vl qwen4_exp roformer sam3_tracker_video smollm3 "
    "t5gemma vjepa2 wav2vec2_bert zamba2"
)


@lru_cache
def families() -> tuple[str, ...]:
    """Folder names of the installed transformers whose modelling code rotates, sorted."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]) / "models"
    return tuple(
        sorted(
            {
                path.parent.name
                for path in root.glob("*/modeling_*.py")
                if _ROTARY_CODE.search(path.read_text(encoding="utf-8"))
            }
        )
    )


@dataclass(frozen=True)
class Case:
    """A model in eval mode and the calls that together reach all its rotary modules.

    Nearly always one call of the model itself. Some models have no forward method that a test can
    use (a session, a generation loop, hard decisions that hide a small error): their parts are
    called one by one.
    """

    family: str
    model: PreTrainedModel
    calls: tuple[tuple[str, dict[str, Any]], ...]  # attribute ("": the model), arguments

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the first call."""
        return self.calls[0][1]

    def __call__(self, model: nn.Module | None = None) -> Any:
        """What the calls return, of ``model`` (a copy of the case's, say) where it is given."""
        model = self.model if model is None else model
        results = tuple(
            (attrgetter(path)(model) if path else model)(**inputs) for path, inputs in self.calls
        )
        return results[0] if len(results) == 1 else results

    @staticmethod
    def output(result: Any) -> tuple[Tensor, ...]:
        """The floating-point tensors of a result, caches and intermediate states left out."""
        return tuple(_tensors(result))

    @classmethod
    def loss(cls, result: Any) -> Tensor:
        """A scalar in which every output element has its own weight, for gradients."""
        terms = []
        for x in cls.output(result):
            weight = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
            terms.append((x * weight).mean())
        return torch.stack([term.float() for term in terms]).sum()


_NOT_OUTPUTS = {"past_key_values", "cache", "hidden_states", "attentions", "loss"}


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, Mapping):
        return [x for k, v in result.items() if k not in _NOT_OUTPUTS for x in _tensors(v)]
    if isinstance(result, (tuple, list)):
        return [x for v in result for x in _tensors(v)]
    return []


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """The family's tiny model with seeded weights, and inputs for it; nothing global moves.

    Raises:
        LookupError: the family is in ``SKIPPED``, with the reason, or has no model class.
    """
    if family in SKIPPED:
        raise LookupError(f"{family} cannot be built here: {SKIPPED[family]}")
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with configs.stand_ins(family):
                model = configs.model_class(family)(configs.config_of(family))
        finally:
            torch.set_default_dtype(before)
        _draw_weights(model, torch.Generator().manual_seed(seed))
        model.eval()
        return Case(family, model, tuple(inputs.inputs_of(family, model)))


def _draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Weights under which attention, and so a rotation, matters: no layer starts as a no-op.

    Matrices keep the variance of their input, query and key ones nearly double it. Gates
    and scales that start near zero open; other vectors keep their start.
    """
    for name, x in model.named_parameters():
        if not x.is_floating_point() or not x.numel():
            continue
        with torch.no_grad():
            if x.ndim >= 2:
                std = (x.numel() / x.shape[0]) ** -0.5
                if re.search(r"(\bq|_q|query|\bk|_k|key|qkv)[^.]*\.weight$", name):
                    std *= 1.4
                x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64) * std)
            elif re.search(r"gate|scale|gamma|lambda|temp", name) and bool((x.abs() < 0.05).all()):
                x.fill_(1.0)
