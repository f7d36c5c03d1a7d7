"""Greedy decoding, plain and speculative, over any model with a static cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = [
    "Cache",
    "CachedModel",
    "Forward",
    "Greedy",
    "Party",
    "Speculation",
    "greedy",
    "speculate",
]

# Keys and values of each layer in turn, every tensor [kv_heads, rows, head_dim]. One tensor for all
# would be copied whole for each layer once a compiler turns writes to its slices into functions.
Cache = list[Tensor]
# (tokens [T], positions [T], cache) -> logits [T, vocabulary]
Forward = Callable[[Tensor, Tensor, Cache], Tensor]


class CachedModel(nn.Module):
    """``model(tokens [T], positions [T], cache) -> logits [T, vocabulary]``."""

    def new_cache(self, rows: int) -> Cache:
        """An empty cache for positions below ``rows``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Greedy:
    """Tokens of plain greedy decoding, prompt included, and how clear each choice was."""

    tokens: list[int]
    smallest_margin: float  # least distance between the best and the second logit


@dataclass(frozen=True)
class Party:
    """One model of a speculation: how to run a prompt, how to run a decode step, and its cache.

    ``decode`` is always called with the same number of tokens: 1 for a draft, the number of
    proposals + 1 for a target.
    """

    prefill: Forward
    decode: Forward
    cache: Cache


@dataclass(frozen=True)
class Speculation:
    """What a speculative run did."""

    tokens: list[int]  # prompt included
    rounds: int
    proposed: int
    accepted: int
    highest_target_position: int
    highest_draft_position: int

    @property
    def acceptance(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


def greedy(
    forward: Forward,
    cache: Cache,
    prompt: list[int],
    length: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Greedy:
    """Decode one token a step until there are ``length`` tokens."""
    device = cache[0].device
    tokens = list(prompt)
    margin = math.inf
    logits = forward(*_inputs(tokens, 0, device), cache)[-1]
    while True:
        best, second = logits.topk(2).values.tolist()
        margin = min(margin, best - second)
        tokens.append(int(logits.argmax()))
        advance(1)
        if len(tokens) >= length:
            return Greedy(tokens, margin)
        logits = forward(*_inputs(tokens[-1:], len(tokens) - 1, device), cache)[-1]


def speculate(
    target: Party,
    draft: Party,
    prompt: list[int],
    length: int,
    *,
    steps: int,
    draft_tokens: int,
    after_round: Callable[[int], None] = lambda count: None,
) -> Speculation:
    """Decode greedily with a draft that proposes ``draft_tokens`` tokens in each of the steps.

    Every round the target checks all proposals in one forward, keeps the longest prefix that it
    would have chosen itself, and adds one token of its own; both models then go on from there, the
    rejected rows of their caches being overwritten. The result is what the target alone decodes.

    Args:
        length: Tokens to end with, the prompt included.
        after_round: Called after each round with the number of tokens that it added.
    """
    device = target.cache[0].device
    tokens = list(prompt)
    proposals = steps * draft_tokens
    rounds = proposed = accepted = highest = 0
    # All but the last token: that one opens the first round.
    target.prefill(*_inputs(tokens[:-1], 0, device), target.cache)
    draft.prefill(*_inputs(tokens[:-1], 0, device), draft.cache)
    while len(tokens) < length:
        start = len(tokens) - 1  # position of the last token, which no cache holds yet
        guesses: list[int] = []
        last = tokens[-1]
        for _ in range(steps):
            for _ in range(draft_tokens):
                last = _draft_step(draft, last, start + len(guesses))
                guesses.append(last)
        # The last guess may be accepted, so its row belongs into the draft's cache as well.
        _draft_step(draft, last, start + proposals)
        logits = target.decode(*_inputs([tokens[-1], *guesses], start, device), target.cache)
        choices: list[int] = logits.argmax(-1).tolist()
        agreed = 0
        while agreed < proposals and guesses[agreed] == choices[agreed]:
            agreed += 1
        tokens += choices[: agreed + 1]
        rounds += 1
        proposed += proposals
        accepted += agreed
        highest = start + proposals
        after_round(agreed + 1)
    return Speculation(tokens[:length], rounds, proposed, accepted, highest, highest)


def _draft_step(draft: Party, token: int, position: int) -> int:
    logits = draft.decode(*_inputs([token], position, draft.cache[0].device), draft.cache)
    return int(logits[-1].argmax())


def _inputs(tokens: list[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.arange(start, start + len(tokens), device=device)
    return torch.tensor(tokens, device=device), positions
