"""A small Llama-like decoder with seeded random weights, and a draft made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rope_compile as rc
from rope_compile.demo.speculation import Cache, CachedModel

__all__ = ["Decoder", "DecoderSpec", "FormulaRope", "build_target", "draft_of", "with_rope"]


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes of a decoder; ``heads`` is a multiple of ``kv_heads``."""

    vocabulary: int = 384
    layers: int = 3
    hidden: int = 192
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 384


class FormulaRope(nn.Module):
    """The formula that every model file writes out, for any position: the demo's yardstick.

    cos and sin come from the configuration's own frequencies at the positions of the call, in
    float64, so it has no table that could end. Same signature as ``rope_compile``'s rope.
    """

    inv_freq: Tensor

    def __init__(self, config: rc.RopeConfig, device: torch.device) -> None:
        super().__init__()
        self.attention_scaling = config.attention_scaling
        self.register_buffer("inv_freq", config.inv_freq().to(device), persistent=False)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # The phase is rounded to float32 once, as rope_compile and the common formula do.
        phase = (positions.double()[..., None] * self.inv_freq.double()).float().double()
        cos, sin = (
            (torch.cat((part, part), -1) * self.attention_scaling)[..., None, :].to(q.dtype)
            for part in (phase.cos(), phase.sin())
        )
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotate_half(x: Tensor) -> Tensor:
    """``(-high, low)``: the other half of a half-style rotation."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), -1)


class Layer(nn.Module):
    """Attention with grouped key heads over a static cache, then a gated feed-forward block."""

    def __init__(self, spec: DecoderSpec, rope: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.rope = rope
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.norm_attention = nn.RMSNorm(spec.hidden, eps=1e-6)
        self.norm_feed = nn.RMSNorm(spec.hidden, eps=1e-6)
        self.qkv = nn.Linear(spec.hidden, q + 2 * kv, bias=False)
        self.out = nn.Linear(q, spec.hidden, bias=False)
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.intermediate, bias=False)
        self.down = nn.Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor
    ) -> Tensor:
        spec = self.spec
        tokens = x.shape[0]
        heads = self.qkv(self.norm_attention(x)).view(tokens, -1, spec.head_dim)
        # Slices of one packed projection, as serving code has them; the rope needs no copies.
        q, k, v = heads.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
        q, k = self.rope(positions, q, k)
        keys.index_copy_(1, positions, k.transpose(0, 1))
        values.index_copy_(1, positions, v.transpose(0, 1))
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], visible, enable_gqa=True
        )
        x = x + self.out(attended[0].transpose(0, 1).reshape(tokens, -1))
        gate, up = self.gate_up(self.norm_feed(x)).chunk(2, dim=-1)
        fed: Tensor = x + self.down(F.silu(gate) * up)
        return fed


class Decoder(CachedModel):
    """``forward(tokens [T], positions [T], cache) -> logits [T, vocabulary]``.

    The cache has a fixed number of rows. A token sees those up to its own position, so taking back
    rejected tokens is only a matter of going on from an earlier position.
    """

    def __init__(self, spec: DecoderSpec, rope: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocabulary, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec, rope) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=1e-6)
        self.head = nn.Linear(spec.hidden, spec.vocabulary, bias=False)

    def new_cache(self, rows: int) -> Cache:
        """Keys and values of each layer in turn, ``[kv_heads, rows, head_dim]``."""
        shape = (self.spec.kv_heads, rows, self.spec.head_dim)
        return [self.head.weight.new_zeros(shape) for _ in range(2 * len(self.layers))]

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        visible = torch.arange(cache[0].shape[1], device=positions.device) <= positions[:, None]
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, cache[2 * index], cache[2 * index + 1], visible)
        logits: Tensor = self.head(self.norm(x))
        return logits


# Late layers change little in trained models, which is why drafts with fewer layers work. The last
# layer of the target is scaled so that a draft without it is right often, but not always.
_LAST_LAYER_GAIN = 0.35


def build_target(spec: DecoderSpec, rope: nn.Module, device: torch.device, seed: int) -> Decoder:
    """A decoder whose weights depend on the seed alone, whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        model = Decoder(spec, rope)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                continue
            drawn = torch.randn(parameter.shape, generator=generator)
            gain = _LAST_LAYER_GAIN if _writes_last(name, spec) else 1.0
            if name.endswith("qkv.weight"):
                # Sharp attention: which rows a token looks at depends on the rotation.
                drawn[: (spec.heads + spec.kv_heads) * spec.head_dim] *= 1.7
            scale = 1.0 if name.startswith("embedding") else gain / math.sqrt(parameter.shape[1])
            parameter.copy_(drawn * scale)
    return model.to(device).requires_grad_(False).eval()


def _writes_last(name: str, spec: DecoderSpec) -> bool:
    prefix = f"layers.{spec.layers - 1}."
    return name in (f"{prefix}out.weight", f"{prefix}down.weight")


def draft_of(target: Decoder, rope: nn.Module) -> Decoder:
    """The target without its last layer, sharing its weights, with a rope of its own."""
    spec = target.spec
    short = DecoderSpec(**{**vars(spec), "layers": spec.layers - 1})
    with torch.device("meta"):
        draft = Decoder(short, nn.Identity())
    draft.load_state_dict(target.state_dict(), strict=False, assign=True)
    for layer in draft.layers:
        layer.rope = rope
    return draft.requires_grad_(False).eval()


def with_rope(model: Decoder, rope: nn.Module) -> Decoder:
    """The same weights behind another rope."""
    with torch.device("meta"):
        other = Decoder(model.spec, nn.Identity())
    other.load_state_dict(model.state_dict(), assign=True)
    for layer in other.layers:
        layer.rope = rope
    return other.requires_grad_(False).eval()
