"""`RopeConfig`, and the one translation from other projects' RoPE dictionaries and config objects
to it.

Translation never guesses: an unknown key, a missing required one or two values that disagree are
errors that name the key. The caller's dictionaries are copied, never written to.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from rope_compile.axes import (
    Axes,
    AxialAxes,
    BailingAxes,
    ChunkedAxes,
    ErnieAxes,
    GlmAxes,
    InterleavedAxes,
    PanguAxes,
    Style,
    XdropeAxes,
)
from rope_compile.checks import (
    LARGEST_ROWS,
    at_most,
    channels,
    count,
    dictionary,
    flag,
    integer,
    listed,
    non_negative,
    number,
    positive,
    shown,
)
from rope_compile.scaling import (
    DeepseekYarnScaling,
    DefaultScaling,
    DynamicPolicy,
    DynamicScaling,
    GrowthClass,
    Lanes,
    LinearScaling,
    Llama3Scaling,
    LongRopePolicy,
    LongRopeScaling,
    NtkAlphaScaling,
    NtkScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
    factor_list,
    magnitude,
)

Dialect = Literal["transformers", "sglang", "vllm"]
T = TypeVar("T")
N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """All that decides a rotation; frozen, hashable, validated on construction.

    Args:
        head_dim: channels of a head (D).
        max_position: rows promised at construction, the served length. No formula reads it, except
            that of `LongRopeScaling` and of ``by_length`` `DynamicScaling` without a ``length`` of
            their own.
        rotary_dim: rotated channels (R), even; None means ``head_dim``. 0 rotates nothing.
        rotary_offset: first rotated channel; ``head_dim - rotary_dim`` for models that rotate the
            last channels.
        base: theta.
        style: see `rope_compile.axes.Style`.
        scaling: a class of `rope_compile.scaling`.
        axes: a class of `rope_compile.axes`, or None for one position a token.
        phase_dtype: ``torch.float64`` keeps frequencies and phases in float64.

    Raises:
        ValueError: a number out of range, or fields that do not fit together. TypeError: a field of
        a wrong type.
    """

    head_dim: int
    max_position: int
    # None is accepted, and replaced at construction: readers always see an int.
    rotary_dim: int = None  # type: ignore[assignment]
    rotary_offset: int = 0
    base: float = 10000.0
    style: Style = "half"
    scaling: Scaling = field(default_factory=DefaultScaling)
    axes: Axes | None = None
    phase_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        width: int | None = self.rotary_dim
        checked = {
            "head_dim": channels("head_dim", self.head_dim),
            "max_position": at_most(
                LARGEST_ROWS, "max_position", count("max_position", self.max_position)
            ),
            "rotary_dim": integer("rotary_dim", self.head_dim if width is None else width),
            "rotary_offset": integer("rotary_offset", self.rotary_offset),
            "base": positive("base", self.base),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_fields()
        self.scaling.check(self.rotary_dim, self.head_dim, self.base)
        if self.axes is not None:
            self.axes.check(self.rotary_dim, self.style)
        elif self.style == "half_blocks":
            raise ValueError("style 'half_blocks' must be used with AxialAxes, got axes=None")

    def _check_fields(self) -> None:
        if self.rotary_dim < 0 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and between 0 and head_dim ({self.head_dim}), got "
                f"{self.rotary_dim}"
            )
        if not 0 <= self.rotary_offset <= self.head_dim - self.rotary_dim:
            raise ValueError(
                f"rotary_offset must be between 0 and head_dim - rotary_dim "
                f"({self.head_dim - self.rotary_dim}), got {self.rotary_offset}"
            )
        if self.style not in get_args(Style):
            raise ValueError(
                f"style must be one of {list(get_args(Style))}, got {shown(self.style)}"
            )
        if not isinstance(self.scaling, Scaling):
            raise TypeError(
                f"scaling must be a Scaling such as DefaultScaling(), got {shown(self.scaling)}"
            )
        if not isinstance(self.axes, Axes | None):
            raise TypeError(
                "axes must be an Axes such as ChunkedAxes((16, 24, 24)) or None, got "
                f"{shown(self.axes)}"
            )
        if self.phase_dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"phase_dtype must be torch.float32 or torch.float64, got {self.phase_dtype}"
            )
        if isinstance(self.axes, AxialAxes) and type(self.scaling) not in (
            DefaultScaling,
            LinearScaling,
        ):
            raise ValueError(
                "scaling must be DefaultScaling or LinearScaling with AxialAxes, got "
                f"{type(self.scaling).__name__}: the other formulas are not defined for one axis's "
                "share of the lanes"
            )

    def inv_freq(
        self, dtype: torch.dtype = torch.float32, length: int | Tensor | None = None
    ) -> Tensor:
        """``[rotary_dim / 2]`` frequencies in lane order, on the CPU; default dtype, default
        device, autocast and inference mode do not touch them.

        Args:
            dtype: ``torch.float32`` repeats the float32 operations of transformers;
                ``torch.float64`` evaluates the same formula in float64.
            length: the length for ``by_length`` policies, an int or a 0-d integer tensor (the
                result is then on its device); all others ignore it.

        Raises:
            TypeError, ValueError: another dtype, or a length that is no positive integer.
        """
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        length = _maybe(_length, "length", length)
        if length is None or not self.scaling.by_length:
            length = self.scaling.served_length(self.max_position)

        def frequencies(width: int) -> Tensor:
            return self.scaling.inv_freq(Lanes(width, self.base, dtype), length)

        with torch.inference_mode(False):
            if self.rotary_dim == 0:
                return torch.empty(0, dtype=dtype, device="cpu")
            return (
                frequencies(self.rotary_dim)
                if self.axes is None
                else self.axes.inv_freq(frequencies, self.rotary_dim)
            )

    def with_length(self, length: int) -> RopeConfig:
        """The same config for another length; only for ``by_length`` policies (ValueError
        otherwise)."""
        if not isinstance(self.scaling, DynamicScaling | LongRopeScaling):
            raise ValueError(
                f"scaling must have a by_length policy, got {type(self.scaling).__name__}"
            )
        return dataclasses.replace(self, scaling=dataclasses.replace(self.scaling, length=length))

    @property
    def attention_scaling(self) -> float:
        """``m``, multiplied into cos and sin."""
        return self.scaling.attention_scaling(self.scaling.served_length(self.max_position))

    @property
    def softmax_scale_factor(self) -> float:
        """What an MLA layer multiplies its softmax scale with; not part of cos and sin."""
        return self.scaling.softmax_scale_factor

    @property
    def growth(self) -> GrowthClass:
        """``"U"`` when the frequencies depend on the served length, else ``"S"``."""
        return self.scaling.growth

    @property
    def lane_axes(self) -> tuple[int, ...]:
        """``()`` without axes; else the axis of each lane, or of each channel (low halves, then
        high halves) for full-width `XdropeAxes`."""
        return () if self.axes is None else self.axes.lane_axes(self.rotary_dim)

    @property
    def num_axes(self) -> int:
        """Rows of the positions tensor, 0 without axes."""
        return 0 if self.axes is None else self.axes.num_axes

    @classmethod
    def from_dict(
        cls,
        rope: Mapping[str, object] | None,
        *,
        head_dim: int,
        max_position: int,
        base: object = None,
        rotary_dim: int | None = None,
        rotary_offset: int = 0,
        partial_rotary_factor: object = None,
        model_max_position: int | None = None,
        style: Style = "half",
        axes: Axes | None = None,
        phase_dtype: torch.dtype = torch.float32,
        dialect: Dialect = "transformers",
        name: str = "rope_scaling",
    ) -> RopeConfig:
        """Translate one flat RoPE dictionary (``rope_scaling``, ``rope_parameters``).

        Args:
            rope: the dictionary, or None for plain RoPE; never written to.
            max_position: rows, the served length.
            base: theta beside the dictionary. With one inside, both must agree; with none at all it
                is an error.
            rotary_dim: R, where the caller knows it. ``sglang``: before the argument
                ``partial_rotary_factor``.
            partial_rotary_factor: the factor beside the dictionary; the same one inside counts
                once.
            model_max_position: the model's ``max_position_embeddings`` (M), where formulas need it;
                None means the dictionary's, else ``max_position``.
            dialect: whose meaning ambiguous entries have. ``dynamic`` with a factor: ``by_length``,
                ``static_factor`` (sglang), ``static_max`` (vllm). ``longrope``: ``by_length``
                (``static`` in vllm), and only transformers reads ``factor``, the others always use
                M / original length. ``yarn`` in sglang reads ``mscale`` without ``mscale_all_dim``,
                and no ``attention_factor``.
            name: what errors call the dictionary.

        Raises:
            ValueError: unknown or missing keys, or values that are out of range or disagree.
            TypeError: a value of a wrong type. NotImplementedError: a type that is known and not
            offered yet.
        """
        return _translate(
            rope,
            _Model(
                head_dim=channels("head_dim", head_dim),
                style=style,
                axes=axes,
                rotary_dim=_maybe(integer, "rotary_dim", rotary_dim),
                name=name,
                rotary_offset=rotary_offset,
                max_position_embeddings=_maybe(count, "model_max_position", model_max_position),
            ),
            base=base,
            partial=partial_rotary_factor,
            max_position=max_position,
            phase_dtype=phase_dtype,
            dialect=dialect,
        )

    @classmethod
    def from_transformers(
        cls, hf_config: object, layer_type: str | None = None, *, max_position: int | None = None
    ) -> RopeConfig | None:
        """Translate a transformers config object, or the dictionary in a ``config.json`` (v4 and v5
        spellings).

        The rotation is the one transformers itself applies to this ``model_type``: models that
        rotate interleaved pairs, and multimodal axis maps, are known by name, all other models get
        ``style="half"``. For MLA models ``head_dim`` is ``qk_rope_head_dim``: the tensor that is
        rotated. Multimodal configs are read through their text config.

        Args:
            hf_config: a config object or mapping; never written to.
            layer_type: which entry of per-layer RoPE parameters, such as ``"sliding_attention"``.
            max_position: the served length, rows; None means the model's
                ``max_position_embeddings``.

        Returns:
            The config, or None for a layer type without RoPE (its entry is null).

        Raises:
            ValueError, TypeError, NotImplementedError: as `from_dict`, and for a missing or unknown
            layer type.
        """
        return _from_transformers(hf_config, layer_type, max_position)


def _maybe(rule: Callable[[str, object], T], name: str, value: object) -> T | None:
    """The checked value; None stays None."""
    return None if value is None else rule(name, value)


def _length(name: str, value: object) -> int | Tensor:
    if not isinstance(value, Tensor):
        return count(name, value)
    integral = not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
    if value.dim() or not integral:
        raise TypeError(
            f"{name} must be a positive integer, a 0-d integer tensor or None, got {shown(value)} "
            f"of {value.dtype}"
        )
    return value


# ---- one flat dictionary -> scaling, axes, width


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What is known about a model beside its RoPE dictionary."""

    head_dim: int
    style: Style = "half"
    axes: Axes | None = None
    axes_kind: str | None = None
    default_sections: tuple[int, ...] | None = None
    rotary_dim: int | None = None
    rotary_offset: int = 0
    max_position_embeddings: int | None = None
    other_head_dims: tuple[int, ...] = ()
    name: str = "rope_scaling"


@dataclass(frozen=True, kw_only=True)
class _Context:
    """What the parser of one type may look at."""

    dialect: Dialect
    model_max: int
    partial: float | None


class _Keys:
    """A RoPE dictionary that is consumed key by key; what is left over at the end is an error."""

    def __init__(self, entries: Mapping[str, object], name: str) -> None:
        self.name, self.kind = name, "default"
        self._left = dict(entries)
        self._present = tuple(self._left)
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._left.get(key) is not None

    def maybe(self, key: str, rule: Callable[[str, object], T]) -> T | None:
        """The checked value; None when the key is absent or null."""
        self._known.add(key)
        return _maybe(rule, key, self._left.pop(key, None))

    def take(self, key: str, rule: Callable[[str, object], T]) -> T:
        """The checked value of a required key."""
        value = self.maybe(key, rule)
        if value is None:
            close = difflib.get_close_matches(key, self._left, n=1)
            hint = f"; did you mean {key!r} by {close[0]!r}?" if close else ""
            raise ValueError(
                f"{self.name} must have {key!r} for rope_type {self.kind!r}, got keys "
                f"{sorted(self._present)}{hint}"
            )
        return value

    def ratio(self, original: int, model_max: int) -> float:
        """A required ``factor`` that may be null, meaning M / original length."""
        null = "factor" in self._left and "factor" not in self
        given = (self.maybe if null else self.take)("factor", positive)
        return model_max / original if given is None else given

    def finish(self) -> None:
        if not self._left:
            return
        known = sorted(self._known)
        close = [
            match for key in self._left for match in difflib.get_close_matches(key, known, n=1)
        ]
        hint = f"did you mean {close[0]!r}?" if close else f"known are {known}"
        raise ValueError(
            f"{self.name} has unknown keys {sorted(self._left)} for rope_type {self.kind!r}; {hint}"
        )


def _linear(keys: _Keys, context: _Context) -> Scaling:
    def single(name: str, value: object) -> float:
        if isinstance(value, list | tuple):
            raise NotImplementedError(
                f"{name} must be one number, got {shown(value)}: one table per config for now"
            )
        return positive(name, value)

    return LinearScaling(factor=keys.take("factor", single))


def _dynamic(keys: _Keys, context: _Context) -> Scaling:
    alpha = keys.maybe("alpha", non_negative)
    if alpha:
        # HunYuan checkpoints carry these beside alpha; no implementation reads them.
        for unused in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            keys.maybe(unused, number)
        return NtkAlphaScaling(alpha=alpha)
    policies: dict[str, DynamicPolicy] = {"sglang": "static_factor", "vllm": "static_max"}
    policy = policies.get(context.dialect, "by_length")
    trained = keys.maybe("max_trained_positions", count) if policy == "static_max" else None
    return DynamicScaling(
        factor=keys.take("factor", positive),
        policy=policy,
        max_trained_position=trained,
        original_max_position=context.model_max,
    )


def _ntk(keys: _Keys, context: _Context) -> Scaling:
    return NtkScaling(factor=keys.take("factor", positive), mixed_b=keys.maybe("mixed_b", positive))


_LO = "original_max_position_embeddings"


def _yarn(keys: _Keys, context: _Context) -> Scaling:
    if "short_factor" in keys or "long_factor" in keys:
        return _longrope(keys, context)  # how early Phi-3 checkpoints spell it
    original = keys.take(_LO, count)
    factor = keys.ratio(original, context.model_max)
    # 0 counts as absent for all four, as in transformers.
    beta_fast, beta_slow, mscale, mscale_all_dim = (
        keys.maybe(key, non_negative) or None
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    )
    attention = keys.maybe("attention_factor", positive)
    attn = keys.maybe("attn_factor", positive)
    if attention is not None and attn is not None:
        raise ValueError(
            f"{keys.name} must not have both 'attention_factor' and 'attn_factor', got "
            f"{attention} and {attn}: the first replaces the magnitude, the second multiplies it"
        )
    if context.dialect == "sglang":
        if attention is not None:
            warnings.warn("SGLang's yarn ignores attention_factor, and so does this", stacklevel=5)
        both = mscale is not None and mscale_all_dim is not None
        all_dim = magnitude(factor, mscale_all_dim or 0.0) if both else 1.0
        attention, attn = magnitude(factor, mscale or 1.0) / all_dim * (attn or 1.0), None
    elif keys.maybe("apply_yarn_scaling", flag) is False:
        attention, attn = attention or attn or 1.0, None
    truncate = keys.maybe("truncate", flag)
    extrapolation = keys.maybe("extrapolation_factor", non_negative)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast or 32.0,
        beta_slow=beta_slow or 1.0,
        truncate=truncate is not False,
        attention_factor=attention,
        attn_factor=attn or 1.0,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        extrapolation_factor=1.0 if extrapolation is None else extrapolation,
    )


def _deepseek_yarn(keys: _Keys, context: _Context) -> Scaling:
    attention = keys.maybe("attention_factor", positive)
    if attention not in (None, 1.0):
        raise ValueError(
            f"attention_factor must be 1.0 or absent for rope_type {keys.kind!r}, got {attention}"
        )
    original = keys.take(_LO, count)
    mscale = keys.maybe("mscale", non_negative)
    extrapolation = keys.maybe("extrapolation_factor", non_negative)
    fixed = keys.kind == "deepseek_llama_scaling" or attention == 1.0
    return DeepseekYarnScaling(
        factor=keys.ratio(original, context.model_max),
        original_max_position=original,
        beta_fast=keys.maybe("beta_fast", non_negative) or 32.0,
        beta_slow=keys.maybe("beta_slow", non_negative) or 1.0,
        mscale=1.0 if mscale is None else mscale,
        mscale_all_dim=keys.maybe("mscale_all_dim", non_negative) or 0.0,
        attention_factor=1.0 if fixed else None,
        attn_factor=keys.maybe("attn_factor", positive) or 1.0,
        extrapolation_factor=1.0 if extrapolation is None else extrapolation,
    )


def _mistral_yarn(keys: _Keys, context: _Context) -> Scaling:
    return DeepseekYarnScaling(
        factor=keys.take("factor", positive),
        original_max_position=keys.take(_LO, count),
        beta_fast=keys.take("beta", positive),
        beta_slow=keys.take("alpha", positive),
        mscale_all_dim=1.0,
        softmax_scale=keys.maybe("apply_scale", flag) is not False,
    )


def _telechat_yarn(keys: _Keys, context: _Context) -> Scaling:
    scaling = _yarn(keys, context)
    if not isinstance(scaling, YarnScaling):
        raise ValueError(f"{keys.name} must not have factor lists for rope_type {keys.kind!r}")
    own = magnitude(scaling.factor, 0.7)  # 0.07 ln(s) + 1
    return dataclasses.replace(scaling, attention_factor=own, attn_factor=1.0)


def _llama3(keys: _Keys, context: _Context) -> Scaling:
    return Llama3Scaling(
        factor=keys.take("factor", positive),
        low_freq_factor=keys.take("low_freq_factor", positive),
        high_freq_factor=keys.take("high_freq_factor", positive),
        original_max_position=keys.take(_LO, count),
    )


def _longrope(keys: _Keys, context: _Context) -> Scaling:
    original = keys.take(_LO, count)
    factor, implied = keys.maybe("factor", positive), context.model_max / original
    policy: LongRopePolicy = "static" if context.dialect == "vllm" else "by_length"
    return LongRopeScaling(
        short_factor=keys.take("short_factor", factor_list),
        long_factor=keys.take("long_factor", factor_list),
        original_max_position=original,
        policy=policy,
        factor=factor if factor is not None and context.dialect == "transformers" else implied,
        attention_factor=keys.maybe("attention_factor", positive),
        short_mscale=keys.maybe("short_mscale", positive),
        long_mscale=keys.maybe("long_mscale", positive),
    )


def _proportional(keys: _Keys, context: _Context) -> Scaling:
    partial = 1.0 if context.partial is None else context.partial
    return ProportionalScaling(
        partial_rotary_factor=partial, factor=keys.maybe("factor", positive) or 1.0
    )


def _default(keys: _Keys, context: _Context) -> Scaling:
    return DefaultScaling()


# rope_type -> the parser of its own keys, and the axis map that the type implies
_TYPES: dict[str, tuple[Callable[[_Keys, _Context], Scaling], str | None]] = {
    "default": (_default, None),
    "mrope": (_default, "chunked"),
    "openpangu": (_default, "pangu"),
    "bailing_mrope": (_default, "bailing"),
    "axial": (_default, "axial"),
    "mllama4": (_default, "mllama4"),
    "linear": (_linear, None),
    "dynamic": (_dynamic, None),
    "xdrope": (_dynamic, "xdrope"),
    "ntk": (_ntk, None),
    "yarn": (_yarn, None),
    "deepseek_yarn": (_deepseek_yarn, None),
    "deepseek_llama_scaling": (_deepseek_yarn, None),
    "telechat3-yarn": (_telechat_yarn, None),
    "mistral_yarn": (_mistral_yarn, None),
    "llama3": (_llama3, None),
    "longrope": (_longrope, None),
    "su": (_longrope, None),
    "proportional": (_proportional, None),
}
_READ_ORIGINAL = (_yarn, _deepseek_yarn, _telechat_yarn, _llama3, _longrope)
# Two types that one dictionary may name, and which of them counts.
_SAME_TYPES = {
    frozenset({"su", "longrope"}): "su",
    frozenset({"mrope", "default"}): "mrope",
    frozenset({"xdrope", "dynamic"}): "xdrope",
}
_NOT_YET = (
    "use_fope",
    "fope_init_factor",
    "fope_sep_head",
    "num_inv_freq",
    "dual_chunk_attention_config",
)

_AXES: dict[str, Callable[[tuple[int, ...]], Axes]] = {
    "chunked": ChunkedAxes,
    "interleaved": InterleavedAxes,
    "glm": GlmAxes,
    "pangu": PanguAxes,
    "ernie": ErnieAxes,
    "bailing": BailingAxes,
}
# A true flag asks for one of these maps, the first one unless the type or the model says otherwise.
_FLAGS = {
    "mrope_interleaved_glm": ("glm",),
    "mrope_interleaved": ("interleaved", "glm", "pangu"),
    "interleaved": ("interleaved",),
    "video_rope": ("bailing",),
}


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    return value


def _rope_type(keys: _Keys) -> str:
    spelled = {
        key: value for key in ("rope_type", "type") if (value := keys.maybe(key, _text)) is not None
    }
    kinds = frozenset(spelled.values())
    if len(kinds) > 1:
        if kinds not in _SAME_TYPES:
            raise ValueError(f"{keys.name} must have one type, got {spelled}")
        return _SAME_TYPES[kinds]
    if not kinds:
        # Mistral's params.json names no type; `beta` and `apply_scale` occur nowhere else.
        return "mistral_yarn" if "beta" in keys or "apply_scale" in keys else "default"
    (kind,) = kinds
    if kind not in _TYPES:
        close = difflib.get_close_matches(kind, _TYPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{keys.name} must have a rope_type of {sorted(_TYPES)}, got {kind!r}{hint}"
        )
    return kind


def _sections(name: str, value: object) -> tuple[int, ...]:
    entries = listed(value)
    if not isinstance(entries, list | tuple):
        raise TypeError(f"{name} must be a list of integers, got {shown(value)}")
    return tuple(integer(f"{name}[{axis}]", entry) for axis, entry in enumerate(entries))


def _pick_axes(
    keys: _Keys, implied: str | None, model: _Model, rotary_dim: int, dialect: Dialect
) -> Axes | None:
    sections = keys.maybe("mrope_section", _sections)
    alias = keys.maybe("xdrope_section", _sections)
    if sections is not None and alias is not None and sections != alias:
        raise ValueError(
            f"mrope_section and xdrope_section must be equal, got {sections} and {alias}"
        )
    kind = model.axes_kind or implied or ("xdrope" if alias is not None else None)
    for key, maps in _FLAGS.items():
        if keys.maybe(key, flag):
            kind = kind if kind not in (None, "chunked") or model.axes_kind else maps[0]
            if kind not in maps:
                raise ValueError(
                    f"{keys.name} must not have {key!r} for a model with the {kind!r} axis map"
                )
    sections = sections or alias
    if model.axes is not None:
        if sections is not None:
            raise ValueError(
                f"axes must be None when {keys.name} has 'mrope_section', got {model.axes}"
            )
        return model.axes
    if kind == "mllama4":
        return AxialAxes((rotary_dim // 2, rotary_dim // 2))
    if kind == "axial":
        raise ValueError(
            "axes must be given for rope_type 'axial', got None: the dictionary does not tell the "
            f"layout; pass for example axes=AxialAxes(({rotary_dim // 2}, {rotary_dim // 2}))"
        )
    sections = sections or model.default_sections
    if sections is None:
        if kind is None or (kind == "xdrope" and model.axes_kind):
            return None  # HunYuan-VL without sections is plain RoPE
        raise ValueError(
            f"{keys.name} must have 'mrope_section' for the {kind!r} axis map, got none"
        )
    if kind == "xdrope":
        return XdropeAxes(sections, full_width=dialect == "transformers")
    return _AXES[kind or "chunked"](sections)


def _same(name: str, inside: N | None, beside: N | None, where: str) -> N | None:
    if inside is not None and beside is not None and inside != beside:
        raise ValueError(
            f"{name} must have one value, got {inside:.15g} in {where} and {beside:.15g} beside it"
        )
    return beside if inside is None else inside


def _width(keys: _Keys, model: _Model, partial: float | None) -> int:
    rope_dim = keys.maybe("rope_dim", integer)
    if None not in (rope_dim, model.rotary_dim) and rope_dim != model.rotary_dim:
        raise ValueError(
            f"rotary_dim must have one value, got {model.rotary_dim} and rope_dim {rope_dim}"
        )
    explicit = model.rotary_dim if rope_dim is None else rope_dim
    if partial is not None and partial > 1:
        raise ValueError(f"partial_rotary_factor must be at most 1, got {partial}")
    if explicit is None:
        width = model.head_dim if partial is None else int(model.head_dim * partial)
        if partial is not None and width % 2:
            raise ValueError(
                f"partial_rotary_factor must give an even rotary_dim, got {partial} * head_dim "
                f"{model.head_dim} = {width}"
            )
        return width
    sizes = (model.head_dim, *model.other_head_dims)
    if partial not in (None, 1.0) and all(int(size * partial) != explicit for size in sizes):
        raise ValueError(
            f"partial_rotary_factor must agree with the rotary width {explicit} of head_dim "
            f"{model.head_dim}, got {partial}; it is not applied to an explicit width"
        )
    return explicit


def _translate(
    rope: Mapping[str, object] | None,
    model: _Model,
    *,
    base: object,
    partial: object,
    max_position: int,
    phase_dtype: torch.dtype = torch.float32,
    dialect: Dialect = "transformers",
) -> RopeConfig:
    if dialect not in get_args(Dialect):
        raise ValueError(f"dialect must be one of {list(get_args(Dialect))}, got {shown(dialect)}")
    max_position = count("max_position", max_position)
    entries = dict(dictionary(model.name, rope))
    for key in _NOT_YET:
        if entries.pop(key, None):
            raise NotImplementedError(
                f"{model.name} must not have {key!r}, which is not implemented yet"
            )
    if any(isinstance(value, Mapping) for value in entries.values()):
        raise ValueError(
            f"{model.name} must be flat, got an entry per layer type: {sorted(entries)}; pass one"
        )
    keys = _Keys(entries, model.name)
    keys.kind = kind = _rope_type(keys)
    theta = _same(
        "rope_theta",
        keys.maybe("rope_theta", positive),
        _maybe(positive, "base (rope_theta)", base),
        model.name,
    )
    if theta is None:
        raise ValueError(
            f"{model.name} must have 'rope_theta', or base must be given beside it, got neither"
        )
    beside = _maybe(positive, "partial_rotary_factor", partial)
    if dialect == "sglang" and beside is not None and model.rotary_dim is not None:
        if beside < 1:
            model = dataclasses.replace(model, rotary_dim=int(model.rotary_dim * beside))
        beside = None
    share = _same(
        "partial_rotary_factor", keys.maybe("partial_rotary_factor", positive), beside, model.name
    )
    model_max = _same(
        "max_position_embeddings",
        keys.maybe("max_position_embeddings", count),
        model.max_position_embeddings,
        model.name,
    )
    keys.maybe("llama_4_scaling_beta", number)  # for mistral_query_scale; not part of the rotation
    last = keys.maybe("is_deepseek_v4", flag)
    context = _Context(dialect=dialect, model_max=model_max or max_position, partial=share)
    parser, implied = _TYPES[kind]
    width = model.head_dim if kind == "proportional" else _width(keys, model, share)
    axes = _pick_axes(keys, implied, model, width, dialect)
    scaling = parser(keys, context)
    keys.finish()
    return RopeConfig(
        head_dim=model.head_dim,
        max_position=max_position,
        rotary_dim=width,
        base=theta,
        style=model.style,
        rotary_offset=model.head_dim - width if last else model.rotary_offset,
        scaling=scaling,
        axes=axes,
        phase_dtype=phase_dtype,
    )


# ---- transformers


def _family(names: str) -> Iterable[str]:
    return (full for name in names.split() for full in (name, f"{name}_text"))


# Read off the modeling files of transformers 5.24: which channels `apply_rotary_pos_emb` pairs.
_STYLES: dict[str, Style] = {
    **dict.fromkeys(
        _family(
            "blt blt_local_encoder blt_local_decoder blt_global_transformer blt_patcher codegen "
            "cohere cohere2 cohere2_moe deepseek_v2 deepseek_v4 ernie4_5 ernie4_5_moe "
            "ernie4_5_vl_moe glm glm4 glm4v glm_ocr gptj helium hy_v4_vl llama4 moonshine "
            "moonshine_streaming openai_privacy_filter pe_audio_encoder pe_audio_video_encoder "
            "pe_video_encoder"
        ),
        "interleaved",
    ),
    **dict.fromkeys(
        _family(
            "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite "
            "glm_moe_dsa longcat_flash mistral4 mistral_large4 youtu"
        ),
        "interleaved_to_half",
    ),
}
# The axis map a model's rotary module hard-codes, and its sections without `mrope_section`.
_MAPS: dict[str, tuple[str, tuple[int, ...] | None]] = {
    **dict.fromkeys(
        _family("qwen2_vl qwen2_5_vl qwen2_5_omni paddleocr_vl"), ("chunked", (16, 24, 24))
    ),
    **dict.fromkeys(_family("glm4v glm4v_moe glm_ocr glm_image"), ("chunked", (8, 12, 12))),
    **dict.fromkeys(
        _family("qwen3_vl qwen3_vl_moe qwen3_omni_moe cosmos3_edge cohere_compass"),
        ("interleaved", (24, 20, 20)),
    ),
    **dict.fromkeys(_family("qwen3_5 qwen3_5_moe qwen4_exp"), ("interleaved", (11, 11, 10))),
    **dict.fromkeys(_family("hy_v4_vl"), ("interleaved", (12, 10, 10))),
    **dict.fromkeys(_family("ernie4_5_vl_moe"), ("ernie", (22, 22, 20))),
    **dict.fromkeys(_family("hunyuan_vl"), ("xdrope", None)),
}
# Vision towers: two axes, H and W. Every other one is refused: its default would be 1-D RoPE.
_TOWERS: dict[str, tuple[Callable[[tuple[int, int]], Axes], Style]] = {
    "qwen2_5_vl_vision": (AxialAxes, "half"),
    "glm4v_vision": (AxialAxes, "half"),
    "gemma4_vision": (AxialAxes, "half_blocks"),
    "pixtral": (lambda dims: AxialAxes(dims, frequencies="global"), "half"),
    "kimi_k25_vision": (
        lambda dims: AxialAxes(dims, order="alternating", axis_order=(1, 0)),
        "half",
    ),
    "step3p5_vision": (lambda dims: AxialAxes(dims, axis_order=(1, 0)), "half"),
}
_VISUAL = re.compile(
    r"_vision(?!.*_text$)|^(dinov3|eomt|efficientloftr|sam|edgetam|mlcd|lightglue)"
)
_BACKWARDS = ("nanochat",)
# What a config class assumes when config.json has no partial factor (objects have it filled in).
_PARTIAL = {
    **dict.fromkeys(_family("gpt_neox qwen3_next qwen3_5 qwen3_5_moe stablelm"), 0.25),
    **dict.fromkeys(
        _family("glm glm4 glm4_moe glm4v_moe nemotron persimmon phi recurrent_gemma"), 0.5
    ),
    "moonshine": 0.9,
}
# Models whose code fixes theta, or whose early config.json files have none.
_BASES = {"gptj": 10000.0, "codegen": 10000.0, "llama": 10000.0}
_HEADS_LAST = ("deepseek_v4",)

# v4 configs with two thetas: the second's spelling -> its layer type, the other one, who is scaled
_TWO_THETAS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rope_local_base_freq": ("sliding_attention", "full_attention", ("full_attention",)),
    "local_rope_theta": (
        "sliding_attention",
        "full_attention",
        ("full_attention", "sliding_attention"),
    ),
    "swa_rope_theta": ("sliding_attention", "full_attention", ("full_attention",)),
    "compress_rope_theta": ("compress", "main", ("compress",)),
}
_SHARED = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def entry_of(config: object, name: str) -> object:
    """An entry of a configuration, be it an object or a dictionary; None where there is none."""
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except ValueError:  # transformers refuses to read globally what differs per layer
        return None


class _Source:
    """Reads a config object or dictionary; an attribute that raises or is None counts as absent."""

    def __init__(self, config: object) -> None:
        self.config = config

    def get(self, *names: str) -> object:
        found = (entry_of(self.config, name) for name in names)
        return next((value for value in found if value is not None), None)

    def count(self, *names: str) -> int | None:
        return _maybe(count, names[0], self.get(*names))

    def mapping(self, name: str) -> Mapping[str, object]:
        return dictionary(name, self.get(name))

    def labels(self) -> tuple[str, ...]:
        names = self.get("_rope_type_labels", "layer_types")
        if names is None:
            return ()
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"layer_types must be a list of strings, got {shown(names)}")
        return tuple(dict.fromkeys(names))

    def default_theta(self) -> tuple[object, ...]:
        """Theta of the class: an object cannot tell it from one that was given."""
        if isinstance(self.config, Mapping):
            return ()
        kind = type(self.config)
        return getattr(kind, "default_theta", None), getattr(kind, "rope_theta", None)


def _text_source(hf_config: object, layer_type: str | None) -> _Source:
    own_text = getattr(hf_config, "get_text_config", None)
    source = _Source(own_text() if callable(own_text) else hf_config)
    for nested in ("vlm_config", "thinker_config", "text_config"):
        inner = source.get(nested) if isinstance(source.config, Mapping) else None
        if inner is not None:
            source = _Source(inner)
    try:
        own = source.config.per_layer_config[layer_type]  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return source
    return _Source(own) if own is not None and not isinstance(own, Mapping) else source


def _plain(value: object) -> object:
    """Comparable: arrays and tensors as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return listed(value)


def _flat_rope(source: _Source) -> Mapping[str, object]:
    rope, old = source.mapping("rope_parameters"), source.mapping("rope_scaling")
    if isinstance(source.config, Mapping) and rope and old and _plain(rope) != _plain(old):
        raise ValueError(
            "rope_parameters and rope_scaling must be equal where both are given, got two"
        )
    return rope or old


# The RoPE dictionary of a layer type (None: no RoPE), the theta beside it, and whether the
# dictionary is flat: one for all layer types.
_Layer = tuple[dict[str, object] | None, object, bool]


def _pick_layer(source: _Source, layer_type: str | None) -> _Layer:
    rope, labels = _flat_rope(source), source.labels()
    nested = [
        key
        for key, value in rope.items()
        if isinstance(value, Mapping) or (value is None and key in labels)
    ]
    theta = source.get("rope_theta", "rotary_emb_base", "global_rope_theta")
    second = next((name for name in _TWO_THETAS if source.get(name) is not None), None)
    if nested:
        return _nested_layer(rope, nested, theta, layer_type)
    if second is not None:
        return _one_of_two_thetas(rope, theta, second, source.get(second), layer_type)
    if layer_type is not None and layer_type not in labels:
        raise ValueError(
            f"layer_type must be one of the config's layer types {list(labels)}, got "
            f"{shown(layer_type)}"
        )
    return dict(rope), theta, True


def _nested_layer(
    rope: Mapping[str, object], nested: list[str], theta: object, layer_type: str | None
) -> _Layer:
    """From a dictionary with an entry for each layer type."""
    if layer_type not in nested:
        raise ValueError(f"layer_type must be one of {nested}, got {shown(layer_type)}")
    strangers = sorted(set(rope) - set(nested) - _SHARED)
    if strangers:
        raise ValueError(
            f"rope_parameters has unknown keys {strangers} beside its layer types {nested}"
        )
    entry = rope[layer_type]
    if not isinstance(entry, Mapping):
        return None, None, False
    return dict(entry), None if entry.get("rope_theta") is not None else theta, False


def _one_of_two_thetas(
    rope: Mapping[str, object], theta: object, name: str, second: object, layer_type: str | None
) -> _Layer:
    """From a v4 config with a theta for each of two layer types."""
    own, other, scaled = _TWO_THETAS[name]
    if layer_type not in (own, other):
        raise ValueError(
            f"layer_type must be {other!r} or {own!r} for a config with {name!r}, got "
            f"{shown(layer_type)}"
        )
    entries = dict(rope) if layer_type in scaled else {}
    if layer_type == own:
        entries.pop("rope_theta", None)
    if own == "compress" and entries.get("rope_type", entries.get("type")) == "yarn":
        entries.setdefault("attention_factor", 1.0)
    return entries, second if layer_type == own else theta, True


def _from_transformers(
    hf_config: object, layer_type: str | None, max_position: int | None
) -> RopeConfig | None:
    source = _text_source(hf_config, layer_type)
    kind = str(source.get("model_type") or "")
    if kind in _BACKWARDS:
        raise NotImplementedError(
            f"config must not be of model_type {kind!r}, which rotates by the negative angle: "
            "build a RopeConfig by hand and rotate with inverse=True"
        )
    if _VISUAL.search(kind) and kind not in _TOWERS:
        raise NotImplementedError(
            f"config must not be of model_type {kind!r}, a vision tower whose layout is not known "
            "here: build a RopeConfig with AxialAxes by hand"
        )
    entries, theta, flat = _pick_layer(source, layer_type)
    if entries is None:
        return None
    if entries.get("rope_theta") is not None and theta in source.default_theta():
        theta = None  # a class default beside an explicit value
    if not entries and theta is None:
        theta = _BASES.get(kind)
    original, named = source.get(_LO), entries.get("rope_type", entries.get("type"))
    if flat and original is not None and _TYPES.get(str(named), (None,))[0] in _READ_ORIGINAL:
        entries[_LO] = original  # transformers: the top level wins in flat dictionaries
    model_max = source.count("max_position_embeddings", "n_positions")
    rows = model_max if max_position is None else max_position
    if rows is None:
        raise ValueError(
            "config must have 'max_position_embeddings', or max_position must be given, got neither"
        )
    partial = source.get("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction")
    own = entries.get("partial_rotary_factor") is not None
    if partial is None and not own and isinstance(source.config, Mapping):
        partial = _PARTIAL.get(kind)
    if own and not flat:
        partial = None  # a layer type's own factor; the one beside the dictionary is the fallback
    return _translate(
        entries,
        _model(source, kind, layer_type, model_max),
        base=theta,
        partial=partial,
        max_position=rows,
    )


def _model(source: _Source, kind: str, layer_type: str | None, model_max: int | None) -> _Model:
    head_dim = source.count("head_dim")
    if layer_type == "full_attention":
        head_dim = source.count("global_head_dim") or head_dim
    if head_dim is None:
        hidden = source.count("hidden_size", "n_embd")
        heads = source.count("num_attention_heads", "n_head", "num_heads")
        head_dim = hidden // heads if hidden and heads else None
    latent, rotary_dim = source.count("qk_rope_head_dim"), source.count("rotary_dim")
    others: tuple[int, ...] = ()
    if latent is not None and kind in _HEADS_LAST:
        rotary_dim = latent
    elif latent is not None:
        nope = source.count("qk_nope_head_dim") or 0
        others = (head_dim or latent, nope + latent)
        head_dim = rotary_dim = latent
    if head_dim is None:
        raise ValueError(
            "config must have 'head_dim', or 'hidden_size' and 'num_attention_heads', got neither"
        )
    style = _STYLES.get(kind, "half")
    if style == "interleaved_to_half" and source.get("rope_interleave") is False:
        style = "half"
    axes_kind, sections = _MAPS.get(kind, (None, None))
    axes: Axes | None = None
    if kind in _TOWERS:
        build, style = _TOWERS[kind]
        axes = build((head_dim // 2, head_dim // 2))
    return _Model(
        axes=axes,
        head_dim=head_dim,
        style=style,
        axes_kind=axes_kind,
        default_sections=sections,
        rotary_dim=rotary_dim,
        rotary_offset=head_dim - (rotary_dim or head_dim) if kind in _HEADS_LAST else 0,
        max_position_embeddings=model_max,
        other_head_dims=others,
        name="rope_parameters",
    )
