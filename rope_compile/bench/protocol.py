"""Rounds in which everybody takes part, and ratios that stay inside a round.

A machine that slows down for a while slows whoever runs at that time. So every round times every
contender once, and what is compared are the two times of one round, never two averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Ratio", "Samples", "Spread", "interleave", "order", "ratio", "spread"]

Samples = dict[str, list[float]]  # seconds a call, one for each round

_RESAMPLES = 1000
_CONFIDENCE = 0.95


def order(names: Sequence[str], number: int) -> list[str]:
    """Who runs when in one round: rotated by one each round, backwards in every other one.

    Rotation alone would leave everybody with the same predecessor, whose data is in the caches.
    """
    start = number % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if number % 2 else rotated


def interleave(
    samplers: Mapping[str, Callable[[], float]],
    rounds: int,
    after_round: Callable[[], None] = lambda: None,
) -> Samples:
    """Take one sample of everybody in each round."""
    samples: Samples = {name: [] for name in samplers}
    for number in range(rounds):
        for name in order(list(samplers), number):
            samples[name].append(samplers[name]())
        after_round()
    return samples


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile, and minimum of samples, in the unit of the samples."""

    median: float
    p20: float
    p80: float
    minimum: float


def spread(values: Sequence[float]) -> Spread:
    levels = torch.tensor([0.5, 0.2, 0.8, 0.0], dtype=torch.float64)
    quantiles = torch.tensor(values, dtype=torch.float64).quantile(levels)
    return Spread(*quantiles.tolist())


@dataclass(frozen=True)
class Ratio:
    """Ratios of the rounds: their median, percentiles, and a 95 % interval of the median."""

    median: float
    p20: float
    p80: float
    low: float
    high: float


def ratio(numerator: Sequence[float], denominator: Sequence[float], scale: float = 1.0) -> Ratio:
    """Round by round ``scale * numerator / denominator``; the interval is a seeded bootstrap."""
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(
            "both sides of a ratio must come from the same rounds, got "
            f"{len(numerator)} and {len(denominator)} samples"
        )
    top = torch.tensor(numerator, dtype=torch.float64)
    ratios = scale * top / torch.tensor(denominator, dtype=torch.float64)
    generator = torch.Generator().manual_seed(len(ratios))
    picked = torch.randint(0, len(ratios), (_RESAMPLES, len(ratios)), generator=generator)
    medians = ratios[picked].quantile(0.5, dim=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = medians.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    middle = spread(ratios.tolist())
    return Ratio(middle.median, middle.p20, middle.p80, low, high)
