"""RoPE scaling types: one frozen dataclass each, holding every number its formula uses.

A scaling gives the frequencies ``f_i`` of the ``R / 2`` lanes and the factor ``m`` that cos and sin
are multiplied with. The float32 formulas repeat the operations of the functions in
``transformers.modeling_rope_utils`` one for one, because their bits depend on the order
(``1 / b**(2i/R)`` in float32 misses the exact value in the last bit of many lanes). The same code
with ``torch.float64`` is the oracle. Symbols: R rotary width, b base, s factor, M the model's own
maximum, ``f0_i = b ** (-2i/R)``.

Nothing here knows about table rows: growing a table cannot change a frequency.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rope_compile.checks import count, flag, listed, non_negative, positive, shown

GrowthClass = Literal["S", "U"]
DynamicPolicy = Literal["by_length", "static_factor", "static_max"]
LongRopePolicy = Literal["static", "by_length"]


def normalise(
    target: object, rules: Mapping[str, Callable[[str, object], object]], *optional: str
) -> None:
    """Replace fields of a frozen dataclass by their checked values; the optional ones may be
    None."""
    for name, rule in rules.items():
        value = getattr(target, name)
        if value is not None or name not in optional:
            object.__setattr__(target, name, rule(f"{type(target).__name__}.{name}", value))


def _at_most(
    largest: float, rule: Callable[[str, object], float]
) -> Callable[[str, object], float]:
    """A rule for numbers that a formula multiplies by and then subtracts again."""

    def checked(name: str, value: object) -> float:
        result = rule(name, value)
        if result > largest:
            raise ValueError(
                f"{name} must be at most {largest:g}, got {shown(value)}; the formula would lose "
                "all digits"
            )
        return result

    return checked


def choice(target: object, name: str, allowed: Sequence[str]) -> None:
    """Refuse a field whose value is not one of ``allowed``."""
    value = getattr(target, name)
    if value not in allowed:
        owner = type(target).__name__
        raise ValueError(f"{owner}.{name} must be one of {list(allowed)}, got {shown(value)}")


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """``g(s, k)``: 1 for ``s <= 1``, else ``0.1 k ln(s) + 1`` (YaRN paper, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Lanes:
    """The sizes every formula starts from; its tensors are on the CPU, whatever the defaults."""

    rotary_dim: int
    base: float
    dtype: torch.dtype

    def indices(self, start: int, stop: int, step: int = 1) -> Tensor:
        """``arange`` in ``dtype``."""
        return torch.arange(start, stop, step, dtype=torch.int64, device="cpu").to(self.dtype)

    def wavelengths(self, base: float | Tensor | None = None, width: int | None = None) -> Tensor:
        """``base ** (2i / R)`` for the lanes of ``width`` channels, in radians a token."""
        exponents = self.indices(0, self.rotary_dim if width is None else width, 2)
        exponents = exponents / self.rotary_dim
        if isinstance(base, Tensor):
            return base ** exponents.to(base.device)
        return (self.base if base is None else base) ** exponents


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What every scaling type offers."""

    @property
    def growth(self) -> GrowthClass:
        """``"S"``: frequencies are constants. ``"U"``: they depend on the served length."""
        return "S"

    @property
    def by_length(self) -> bool:
        """Whether a call may choose its length; otherwise ``inv_freq`` ignores it."""
        return False

    def served_length(self, max_position: int) -> int:
        """The length the frequencies are for, in a config that promises ``max_position`` rows."""
        return max_position

    @property
    def softmax_scale_factor(self) -> float:
        """What an MLA layer multiplies ``qk_head_dim ** -0.5`` with; never part of cos and sin."""
        return 1.0

    def check(self, rotary_dim: int, head_dim: int, base: float) -> None:
        """Raise ValueError when this type cannot serve these sizes."""

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        """``[rotary_dim / 2]`` frequencies of ``lanes.dtype``, on the CPU.

        Args:
            length: an int or a 0-d integer tensor, which is never read on the host (the result is
                then on its device). Only types of growth class "U" use it.
        """
        return 1.0 / lanes.wavelengths()

    def attention_scaling(self, length: int) -> float:
        """``m``, multiplied into cos and sin."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DefaultScaling(Scaling):
    """``f_i = f0_i`` (RoFormer)."""


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Scaling):
    """Position interpolation: ``f_i = f0_i / s``."""

    factor: float

    def __post_init__(self) -> None:
        normalise(self, {"factor": positive})

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        return 1.0 / lanes.wavelengths() / self.factor


@dataclass(frozen=True, kw_only=True)
class NtkScaling(Scaling):
    """Fixed NTK: ``f_i = f0_i / s ** (((i + 1) / (R/2)) ** mixed_b)``; the last lane is ``f0 / s``.

    With ``mixed_b=None`` (exponent 1) this is vLLM's ``(b * s) ** (-2i/R) / s ** (2/R)``, with a
    number its mixed form ``f0_i / exp(ln(s) / (R/2)**mixed_b * (i+1)**mixed_b)``, powers collected.
    """

    factor: float
    mixed_b: float | None = None

    def __post_init__(self) -> None:
        normalise(self, {"factor": positive, "mixed_b": positive}, "mixed_b")

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        share = lanes.indices(1, lanes.rotary_dim // 2 + 1) / (lanes.rotary_dim // 2)
        if self.mixed_b is not None:
            share = share**self.mixed_b
        return 1.0 / lanes.wavelengths() / self.factor**share


def _check_stretch(scaling: Scaling, rotary_dim: int, base: float, ratio: float) -> None:
    if rotary_dim == 2:
        raise ValueError(
            f"rotary_dim must be at least 4 for {type(scaling).__name__}, got 2: its exponent is "
            "R / (R - 2)"
        )
    # Logarithms: the power itself may overflow.
    exponent = math.log10(base) + math.log10(ratio) * rotary_dim / (rotary_dim - 2)
    if abs(exponent) > 38:
        raise ValueError(
            f"base must stay within float32 when {scaling} stretches it, got {base:g} and a "
            f"stretched base of 1e{exponent:.0f}"
        )


@dataclass(frozen=True, kw_only=True)
class NtkAlphaScaling(Scaling):
    """HunYuan's fixed alpha: base ``b * alpha ** (R / (R - 2))``, whatever the length."""

    alpha: float

    def __post_init__(self) -> None:
        normalise(self, {"alpha": positive})

    def check(self, rotary_dim: int, head_dim: int, base: float) -> None:
        _check_stretch(self, rotary_dim, base, self.alpha)

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        width = lanes.rotary_dim
        return 1.0 / lanes.wavelengths(lanes.base * self.alpha ** (width / (width - 2)))


@dataclass(frozen=True, kw_only=True)
class _ByPolicy(Scaling):
    """A type whose formula names a length; which one, a policy without a default says.

    Args:
        length: for policy ``by_length`` only; None means the config's ``max_position``.
    """

    policy: str
    length: int | None = None

    def __post_init__(self) -> None:
        normalise(self, {"length": count}, "length")
        if self.length is not None and not self.by_length:
            raise ValueError(
                f"length must be None for policy {self.policy!r}, got {self.length}; it belongs to "
                "'by_length'"
            )

    @property
    def by_length(self) -> bool:
        return self.policy == "by_length"

    def served_length(self, max_position: int) -> int:
        return self.length or max_position


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(_ByPolicy):
    """Dynamic NTK: base ``b * (s * n / M - (s - 1)) ** (R / (R - 2))``, ``n`` chosen by a policy.

    * ``by_length`` (transformers): ``n = max(length, M)``, a pure function without memory.
    * ``static_factor`` (SGLang): ``n = s * M``; M cancels, so ``original_max_position`` is dropped.
    * ``static_max`` (vLLM): ``n / M`` is ``M / max_trained_position``. Left at M this is the
      unscaled rotation whatever the factor says; it warns.

    Args:
        original_max_position: M; never a row count.
    """

    factor: float
    policy: DynamicPolicy
    original_max_position: int | None = None
    max_trained_position: int | None = None

    def __post_init__(self) -> None:
        lengths = ("original_max_position", "max_trained_position")
        rules = {"factor": _at_most(1e6, positive), **dict.fromkeys(lengths, count)}
        normalise(self, rules, *lengths)
        choice(self, "policy", get_args(DynamicPolicy))
        super().__post_init__()
        original, trained = self.original_max_position, self.max_trained_position
        if trained is not None and self.policy != "static_max":
            raise ValueError(
                f"max_trained_position must be None for policy {self.policy!r}, got {trained}; it "
                "belongs to 'static_max'"
            )
        if self.policy == "static_factor":
            object.__setattr__(self, "original_max_position", None)
        elif original is None:
            raise ValueError(
                f"original_max_position must be given for policy {self.policy!r}, got None"
            )
        elif self.policy == "static_max":
            self._check_trained(original, trained or original)

    def _check_trained(self, original: int, trained: int) -> None:
        if self.factor * original / trained <= self.factor - 1:
            raise ValueError(
                f"max_trained_position must be less than original_max_position * factor / (factor "
                f"- 1) = {original * self.factor / (self.factor - 1):g}, got {trained}"
            )
        if self.factor != 1 and trained == original:
            warnings.warn(
                f"DynamicScaling(policy='static_max') ignores factor {self.factor:g} because "
                f"max_trained_position equals original_max_position ({original}): this is the "
                "unscaled rotation",
                stacklevel=4,
            )

    @property
    def growth(self) -> GrowthClass:
        return "U" if self.by_length else "S"

    def check(self, rotary_dim: int, head_dim: int, base: float) -> None:
        longest = self._ratio(2**31)  # of any length that is asked for later
        assert not isinstance(longest, Tensor)
        _check_stretch(self, rotary_dim, base, longest - (self.factor - 1))

    def _ratio(self, length: int | Tensor) -> float | Tensor:
        """``s * n / M``."""
        original = self.original_max_position
        if original is None:
            return self.factor * self.factor
        if not self.by_length:
            return self.factor * original / (self.max_trained_position or original)
        if isinstance(length, Tensor):
            return self.factor * length.clamp(min=original).to(torch.float64) / original
        return self.factor * max(length, original) / original

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        exponent = lanes.rotary_dim / (lanes.rotary_dim - 2)
        stretch = self._ratio(length) - (self.factor - 1)
        return 1.0 / lanes.wavelengths(lanes.base * stretch**exponent)


def yarn_range(
    rotary_dim: int,
    base: float,
    original_max_position: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, float]:
    """Lanes between which YaRN blends: extrapolated up to the first, interpolated from the
    second."""

    def lane(rotations: float) -> float:
        turns = original_max_position / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(base))

    low, high = lane(beta_fast), lane(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rotary_dim - 1)


@dataclass(frozen=True, kw_only=True)
class _Yarn(Scaling):
    """What both YaRN types share.

    Args:
        original_max_position: the pretraining length.
        attention_factor: replaces ``m``.
        attn_factor: multiplies ``m``; another parameter than ``attention_factor``.
        extrapolation_factor: weight of the unscaled frequencies (SGLang), 0 to 1000.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    attn_factor: float = 1.0
    extrapolation_factor: float = 1.0

    def __post_init__(self) -> None:
        numbers = ("factor", "beta_fast", "beta_slow", "attention_factor", "attn_factor")
        rules: dict[str, Callable[[str, object], float]] = dict.fromkeys(numbers, positive)
        rules |= {
            "original_max_position": count,
            "extrapolation_factor": _at_most(1e3, non_negative),
        }
        normalise(self, rules, "attention_factor")
        if self.attention_factor is not None and self.attn_factor != 1:
            raise ValueError(
                f"attention_factor and attn_factor must not both be given, got "
                f"{self.attention_factor} and {self.attn_factor}: the first replaces the "
                "magnitude, the second multiplies it"
            )
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast must be at least beta_slow, got {self.beta_fast} and {self.beta_slow}"
            )

    @property
    def _truncate(self) -> bool:
        return True

    def check(self, rotary_dim: int, head_dim: int, base: float) -> None:
        if base <= 1:
            raise ValueError(f"base must be above 1 for {type(self).__name__}, got {base}")

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        low, high = yarn_range(
            lanes.rotary_dim,
            lanes.base,
            self.original_max_position,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self._truncate,
        )
        if low == high:
            high += 0.001  # the singular ramp becomes a step
        wavelengths = lanes.wavelengths()
        ramp = torch.clamp((lanes.indices(0, lanes.rotary_dim // 2) - low) / (high - low), 0, 1)
        kept = 1 - ramp
        if self.extrapolation_factor != 1:
            kept = kept * self.extrapolation_factor
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


@dataclass(frozen=True, kw_only=True)
class YarnScaling(_Yarn):
    """YaRN, with transformers' magnitude.

    ``m`` is ``attention_factor`` if given, else ``g(s, mscale) / g(s, mscale_all_dim)`` if both are
    non-zero, else ``g(s, 1)``; times ``attn_factor``.
    """

    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = ("mscale", "mscale_all_dim")
        normalise(self, {"truncate": flag, **dict.fromkeys(pair, non_negative)}, *pair)

    @property
    def _truncate(self) -> bool:
        return self.truncate

    @property
    def softmax_scale_factor(self) -> float:
        """``g(s, mscale_all_dim) ** 2``, or 1 without ``mscale_all_dim`` (DeepSeek's MLA
        layers)."""
        return magnitude(self.factor, self.mscale_all_dim or 0.0) ** 2

    def attention_scaling(self, length: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        inferred = magnitude(self.factor)
        if self.mscale and self.mscale_all_dim:
            all_dim = magnitude(self.factor, self.mscale_all_dim)
            inferred = magnitude(self.factor, self.mscale) / all_dim
        return inferred * self.attn_factor


@dataclass(frozen=True, kw_only=True)
class DeepseekYarnScaling(_Yarn):
    """DeepSeek's YaRN: always truncated, and 0 is a number in the ``mscale`` pair.

    ``m = g(s, mscale) / g(s, mscale_all_dim) * attn_factor``. ``attention_factor`` may only be 1.0
    (vLLM's ``deepseek_llama_scaling``): ``m`` and the softmax factor are then 1.

    Args:
        softmax_scale: False switches off the softmax factor alone (Mistral's ``apply_scale``).
    """

    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    softmax_scale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = {"mscale": non_negative, "mscale_all_dim": non_negative}
        normalise(self, {**rules, "softmax_scale": flag})
        if self.attention_factor not in (None, 1.0):
            raise ValueError(
                f"DeepseekYarnScaling.attention_factor must be 1.0 or None, got "
                f"{self.attention_factor}"
            )

    @property
    def softmax_scale_factor(self) -> float:
        """``g(s, mscale_all_dim) ** 2``, or 1 where it is switched off."""
        off = self.attention_factor is not None or not self.softmax_scale
        return 1.0 if off else magnitude(self.factor, self.mscale_all_dim) ** 2

    def attention_scaling(self, length: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        all_dim = magnitude(self.factor, self.mscale_all_dim)
        return magnitude(self.factor, self.mscale) / all_dim * self.attn_factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Scaling):
    """Llama 3.1: long wavelengths divided by s, short ones kept, a smooth blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        numbers = ("factor", "low_freq_factor", "high_freq_factor")
        normalise(self, {**dict.fromkeys(numbers, positive), "original_max_position": count})
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be at least low_freq_factor, got {self.high_freq_factor} "
                f"and {self.low_freq_factor}"
            )

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        plain = 1.0 / lanes.wavelengths()
        wavelengths = 2 * math.pi / plain
        long = wavelengths > self.original_max_position / self.low_freq_factor
        short = wavelengths < self.original_max_position / self.high_freq_factor
        result = torch.where(long, plain / self.factor, plain)
        band = self.high_freq_factor - self.low_freq_factor
        if band == 0:
            return result  # a hard switch: the blend would be 0/0
        smooth = (self.original_max_position / wavelengths - self.low_freq_factor) / band
        blended = (1 - smooth) * result / self.factor + smooth * result
        return torch.where(long | short, result, blended)


def factor_list(name: str, value: object) -> tuple[float, ...]:
    """A list, tuple, array or tensor of positive numbers."""
    entries = listed(value)
    if not isinstance(entries, list | tuple):
        raise TypeError(f"{name} must be a list of numbers, got {shown(value)}")
    return tuple(positive(f"{name}[{lane}]", entry) for lane, entry in enumerate(entries))


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(_ByPolicy):
    """LongRoPE (also ``su``): ``f_i = f0_i / ext_i`` with one of two lists of R/2 numbers.

    The long list serves lengths above ``original_max_position``, the short one all others:

    * ``static``: the config's ``max_position`` decides, once; for graphs and chunked prefill.
    * ``by_length``: the length given decides; a pure function without memory.

    ``m`` is ``short_mscale`` or ``long_mscale`` of the selected set; else ``attention_factor``;
    else ``sqrt(1 + ln(s) / ln(original_max_position))``, 1 for ``s <= 1``. A model without
    ``factor`` means M / original_max_position, so one of these numbers is required.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    policy: LongRopePolicy
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None

    def __post_init__(self) -> None:
        if str(self.policy) == "per_sequence":
            raise ValueError(
                "LongRopeScaling.policy must be 'static' or 'by_length', got 'per_sequence'; for a "
                "choice by sequence give RopeSelector a module of each length (config.with_length)"
            )
        choice(self, "policy", get_args(LongRopePolicy))
        super().__post_init__()
        optional = ("factor", "attention_factor", "short_mscale", "long_mscale")
        lists = dict.fromkeys(("short_factor", "long_factor"), factor_list)
        normalise(self, {**lists, "original_max_position": count})
        normalise(self, dict.fromkeys(optional, positive), *optional)
        mscales = (self.short_mscale, self.long_mscale)
        if self.factor is None and self.attention_factor is None and None in mscales:
            raise ValueError(
                "LongRopeScaling must have factor (usually max_position_embeddings / "
                "original_max_position), attention_factor, or both short_mscale and long_mscale, "
                "got none of them"
            )
        if self.original_max_position == 1 and self.attention_factor is None and None in mscales:
            raise ValueError(
                "LongRopeScaling.original_max_position must be at least 2 where the magnitude "
                "follows from its logarithm, got 1"
            )

    @property
    def growth(self) -> GrowthClass:
        return "U"

    def check(self, rotary_dim: int, head_dim: int, base: float) -> None:
        for name, entries in (("short", self.short_factor), ("long", self.long_factor)):
            if len(entries) != rotary_dim // 2:
                raise ValueError(
                    f"{name}_factor must have rotary_dim / 2 = {rotary_dim // 2} entries, got "
                    f"{len(entries)}"
                )

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        lists = (self.short_factor, self.long_factor)
        short, long = (torch.tensor(f, dtype=lanes.dtype, device="cpu") for f in lists)
        wavelengths = lanes.wavelengths()
        if isinstance(length, Tensor):
            short, long, wavelengths = (x.to(length.device) for x in (short, long, wavelengths))
            extension = torch.where(length > self.original_max_position, long, short)
        else:
            extension = long if length > self.original_max_position else short
        return 1.0 / (extension * wavelengths)

    def attention_scaling(self, length: int) -> float:
        own = self.long_mscale if length > self.original_max_position else self.short_mscale
        given = own if own is not None else self.attention_factor
        if given is not None:
            return given
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling(Scaling):
    """The first ``int(partial_rotary_factor * D) // 2`` lanes rotate, the others stand still.

    The denominator is D and ``rotary_dim == head_dim``: half style pairs channel i with i + D/2.
    """

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, {"partial_rotary_factor": non_negative, "factor": positive})
        if self.partial_rotary_factor > 1:
            raise ValueError(
                f"partial_rotary_factor must be at most 1, got {self.partial_rotary_factor}"
            )

    def check(self, rotary_dim: int, head_dim: int, base: float) -> None:
        if rotary_dim != head_dim:
            raise ValueError(
                f"rotary_dim must equal head_dim ({head_dim}) for ProportionalScaling, got "
                f"{rotary_dim}; its partial_rotary_factor stills lanes, it narrows nothing"
            )

    def inv_freq(self, lanes: Lanes, length: int | Tensor) -> Tensor:
        moving = int(self.partial_rotary_factor * lanes.rotary_dim // 2)
        rotated = 1.0 / lanes.wavelengths(width=2 * moving)
        still = torch.zeros(lanes.rotary_dim // 2 - moving, dtype=lanes.dtype, device="cpu")
        return torch.cat((rotated, still)) / self.factor


def llama4_query_scale(
    positions: Tensor, *, attn_scale: float = 0.1, floor_scale: int = 8192
) -> Tensor:
    """Llama-4's temperature of queries without RoPE, ``1 + a ln(1 + floor((p + 1) /
    floor_scale))``.

    Args:
        positions: integers of any shape; a negative one counts as -1, which gives 1.

    Returns:
        float32, the shape of ``positions``.
    """
    return _query_scale(positions.to(torch.int64).clamp(min=-1) + 1, attn_scale, floor_scale)


def mistral_query_scale(positions: Tensor, *, beta: float, original_max_position: int) -> Tensor:
    """Ministral's ``llama_4_scaling_beta``: ``1 + beta ln(1 + floor(p / original_max_position))``.

    Args:
        positions: integers of any shape; a negative one counts as 0, which gives 1.

    Returns:
        float32, the shape of ``positions``.
    """
    return _query_scale(positions.clamp(min=0), beta, original_max_position)


def _query_scale(tokens: Tensor, scale: float, window: int) -> Tensor:
    windows = torch.div(tokens, window, rounding_mode="floor")  # in integers: exact beyond 2**24
    return torch.log1p(windows.to(torch.float32)) * scale + 1.0
