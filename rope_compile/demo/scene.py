"""What a demo run needs to know about its models, and the embedded pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import rope_compile as rc
from rope_compile.demo.decoder import DecoderSpec, FormulaRope, build_target, draft_of, with_rope
from rope_compile.demo.promises import Promise
from rope_compile.demo.speculation import CachedModel

__all__ = ["Missing", "Options", "Scene", "make_rope", "other_ropes", "tiny_scene"]


class Missing(RuntimeError):
    """Something to install first.

    Attributes:
        remedy: The command that installs it.
        exit_code: What the command line ends with.
    """

    def __init__(self, sentence: str, remedy: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.remedy = remedy
        self.exit_code = exit_code


@dataclass(frozen=True)
class Options:
    """What the command line decides.

    Attributes:
        model: ``"tiny"`` (embedded, random weights) or ``"smollm2"``.
        steps: Draft steps in a round.
        draft_tokens: Tokens proposed in each step.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        backend: ``"auto"`` (Inductor, or ``aot_eager`` where Inductor cannot build code or would
            take too long), ``"inductor"`` or ``"aot_eager"``.
    """

    model: str = "tiny"
    steps: int = 2
    draft_tokens: int = 3
    device: str = "auto"
    backend: str = "auto"

    @property
    def proposals(self) -> int:
        """Tokens proposed in a round."""
        return self.steps * self.draft_tokens


@dataclass(frozen=True)
class Scene:
    """Two models and the numbers around them.

    Attributes:
        title: What is decoded, in words.
        target, draft: ``forward(tokens [T], positions [T], cache) -> logits [T, vocabulary]``.
        target_rope, draft_rope: The ropes that the two models call, straight from ``get_rope``.
        unreserved: The same two models with tables of their original rows, never reserved.
        reference: The target without rope_compile: the tokens to be met come from it.
        prompt: Token ids to begin with.
        length: Tokens to end with, the prompt included; beyond both tables' original rows.
        heads, kv_heads: Of the target, for timing.
        extra_promises: Measured while the scene was built.
        slow_to_compile: Inductor needs minutes for it on a CPU; there ``auto`` means ``aot_eager``.
        describe: Words for a list of tokens, or None where tokens mean nothing.
    """

    title: str
    target: CachedModel
    draft: CachedModel
    target_rope: rc.RotaryEmbedding
    draft_rope: rc.RotaryEmbedding
    unreserved: tuple[CachedModel, CachedModel]
    unreserved_ropes: tuple[rc.RotaryEmbedding, rc.RotaryEmbedding]
    reference: CachedModel
    prompt: list[int]
    length: int
    heads: int
    kv_heads: int
    extra_promises: list[Promise] = field(default_factory=list)
    slow_to_compile: bool = False
    describe: Callable[[list[int]], str] | None = None


# Rows of the two tables before the hook, and how far beyond the longer one decoding goes.
TARGET_ROWS = 512
DRAFT_ROWS = 256
BEYOND = 40
PROMPT_TOKENS = 200
_SEED = 2


def make_rope(config: rc.RopeConfig, device: torch.device) -> rc.RotaryEmbedding:
    """The rope of the demo's models. One function, so that a test can put a broken one in."""
    return rc.get_rope(config, device)


def tiny_scene(options: Options, device: torch.device) -> Scene:
    """The embedded decoder, its random weights drawn from one seed; the draft has a layer less."""
    spec = DecoderSpec()
    target_config = rc.RopeConfig(head_dim=spec.head_dim, max_position=TARGET_ROWS)
    draft_config = rc.RopeConfig(head_dim=spec.head_dim, max_position=DRAFT_ROWS)
    target_rope = make_rope(target_config, device)
    draft_rope = make_rope(draft_config, device)
    target = build_target(spec, target_rope, device, _SEED)
    draft = draft_of(target, draft_rope)
    # Not from get_rope: these are not to grow with the others.
    alone = (
        rc.RotaryEmbedding(target_config, device),
        rc.RotaryEmbedding(draft_config, device),
    )
    generator = torch.Generator().manual_seed(_SEED)
    prompt = torch.randint(spec.vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
    return Scene(
        title=(
            f"embedded decoder, {spec.layers} layers, {spec.heads} heads, "
            f"head_dim {spec.head_dim}; its draft has {spec.layers - 1} layers"
        ),
        target=target,
        draft=draft,
        target_rope=target_rope,
        draft_rope=draft_rope,
        unreserved=(with_rope(target, alone[0]), with_rope(draft, alone[1])),
        unreserved_ropes=alone,
        reference=with_rope(target, FormulaRope(target_config, device)),
        prompt=prompt,
        length=TARGET_ROWS + BEYOND,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
    )


def other_ropes(device: torch.device) -> list[rc.RotaryEmbedding]:
    """Ropes unlike the models': other style, partial width, other scaling."""
    llama3 = rc.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    return [
        make_rope(config, device)
        for config in (
            rc.RopeConfig(head_dim=64, max_position=300, style="interleaved"),
            rc.RopeConfig(head_dim=80, rotary_dim=32, rotary_offset=48, max_position=128),
            rc.RopeConfig(head_dim=128, max_position=640, base=500000.0, scaling=llama3),
        )
    ]
