"""Axis maps against golden strings and transformers' rotary modules, and position helpers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rope_compile.axes import (
    AxialAxes,
    BailingAxes,
    ChunkedAxes,
    ErnieAxes,
    GlmAxes,
    InterleavedAxes,
    PanguAxes,
    XdropeAxes,
    centred_positions,
    context_parallel_positions,
    llama4_vision_positions,
    packed_context_parallel_positions,
    positions_from_cu_seqlens,
    qwen_image_positions,
)
from rope_compile.config import RopeConfig
from rope_compile.scaling import LinearScaling, NtkScaling, YarnScaling


def letters(axes, width: int | None = None) -> str:
    width = 2 * sum(axes.lanes_per_axis()) if width is None else width
    return "".join("THWX"[axis] for axis in axes.lane_axes(width))


def make(axes, width: int, style: str = "half", **fields) -> RopeConfig:
    fields = {"head_dim": width, "max_position": 64, "style": style, "axes": axes} | fields
    return RopeConfig(**fields)


def naive_sequence(order: str, sections: dict[str, int]) -> str:
    """GLM's rule written as a walk: a pointer over the axes that skips used-up ones."""
    left, out = dict(sections), ""
    for lane in range(sum(sections.values())):
        step = lane % 3
        while not left[order[step % 3]]:
            step += 1
        left[order[step % 3]] -= 1
        out += order[step % 3]
    return out


# ---- golden values


def test_golden_28_interleaved():
    assert letters(InterleavedAxes((24, 20, 20))) == "THW" * 20 + "TTTT"


def test_golden_29_interleaved_short():
    assert letters(InterleavedAxes((11, 11, 10))) == "THW" * 10 + "TH"


def test_golden_30_glm_round_robin():
    assert letters(GlmAxes((8, 12, 12))) == "THW" * 8 + "HHWHHWWW"
    assert letters(GlmAxes((16, 24, 24))) == "THW" * 16 + "HHWHHWHHWHHWWWWW"
    for sections in ((8, 12, 12), (16, 24, 24), (5, 3, 9), (0, 2, 4)):
        walk = naive_sequence("THW", dict(zip("THW", sections, strict=True)))
        assert letters(GlmAxes(sections)) == walk


def test_golden_31_openpangu():
    assert letters(PanguAxes((8, 12, 12))) == "THWHWTHWHWTHWHWTHWTHWHWTHWHWTHWT"
    assert letters(PanguAxes((16, 16))) == "TH" * 16


def test_golden_32_ernie_and_bailing():
    assert letters(ErnieAxes((22, 22, 20))) == "HW" * 22 + "T" * 20
    assert letters(BailingAxes((20, 22, 22))) == "HW" * 22 + "T" * 20


def test_golden_33_xdrope():
    assert letters(XdropeAxes((16, 16, 16, 16)), 128) == "T" * 32 + "H" * 32 + "W" * 32 + "X" * 32
    legacy = XdropeAxes((16, 16, 16, 16), full_width=False)
    assert letters(legacy, 128) == "T" * 16 + "H" * 16 + "W" * 16 + "X" * 16
    config = make(XdropeAxes((16, 16, 16, 16)), 128)
    assert len(config.lane_axes) == 128
    assert config.num_axes == 4
    assert config.inv_freq().shape == (64,)


def test_golden_chunked():
    assert letters(ChunkedAxes((16, 24, 24))) == "T" * 16 + "H" * 24 + "W" * 24


def test_golden_34_flux():
    config = make(AxialAxes((16, 56, 56)), 128, "interleaved")
    found = config.inv_freq(torch.float64)
    assert config.lane_axes == (0,) * 8 + (1,) * 28 + (2,) * 28
    assert found[7].item() == pytest.approx(3.16227766e-4, rel=1e-8)
    for start in (8, 36):
        assert found[start + 1].item() == pytest.approx(0.719685673, rel=1e-8)
        assert found[start + 27].item() == pytest.approx(1.38949549e-4, rel=1e-8)


def test_golden_35_wan():
    config = make(AxialAxes((44, 42, 42)), 128, "interleaved")
    found = config.inv_freq(torch.float64)
    assert found[21].item() == pytest.approx(1.51991108e-4, rel=1e-8)
    assert found[22 + 1].item() == pytest.approx(0.644946677, rel=1e-8)
    assert found[22 + 20].item() == pytest.approx(1.55051578e-4, rel=1e-8)
    assert found[22:43].equal(found[43:])


def test_golden_36_vision():
    found = make(AxialAxes((40, 40)), 80).inv_freq(torch.float64)
    for start in (0, 20):
        assert found[start + 1].item() == pytest.approx(0.630957344, rel=1e-8)
        assert found[start + 19].item() == pytest.approx(1.58489319e-4, rel=1e-8)


def test_golden_37_centred():
    assert centred_positions(4).tolist() == [-2, -1, 0, 1]
    assert centred_positions(5).tolist() == [-3, -2, -1, 0, 1]
    assert centred_positions(0).tolist() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_golden_38_cu_seqlens(dtype):
    boundaries = torch.tensor([0, 3, 3, 8], dtype=dtype)
    found = positions_from_cu_seqlens(boundaries, 8)
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    starts = torch.tensor([10, 99, 5], dtype=dtype)
    shifted = positions_from_cu_seqlens(boundaries, 8, starts=starts)
    assert shifted.tolist() == [10, 11, 12, 5, 6, 7, 8, 9]
    assert boundaries.tolist() == [0, 3, 3, 8]


def test_golden_39_zigzag():
    found = [context_parallel_positions(8, rank=rank, ranks=2).tolist() for rank in range(2)]
    assert found == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_golden_40_zigzag_packed():
    boundaries = torch.tensor([0, 4, 8], dtype=torch.int32)
    found = [
        [
            part.tolist()
            for part in packed_context_parallel_positions(boundaries, 8, rank=r, ranks=2)
        ]
        for r in range(2)
    ]
    assert found == [[[0, 3, 4, 7], [0, 3, 0, 3]], [[1, 2, 5, 6], [1, 2, 1, 2]]]


# ---- properties


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_packed_zigzag_is_the_dense_one_per_sequence(ranks):
    """Also with empty sequences; all ranks together hold every token once."""
    lengths = [2 * ranks * n for n in (3, 0, 1, 5, 0)]
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    total, seen = int(boundaries[-1]), []
    for rank in range(ranks):
        tokens, positions = packed_context_parallel_positions(
            boundaries, total, rank=rank, ranks=ranks
        )
        expected = [context_parallel_positions(n, rank=rank, ranks=ranks) for n in lengths]
        starts = [s + p for s, p in zip(boundaries[:-1], expected, strict=True)]
        assert positions.equal(torch.cat(expected))
        assert tokens.equal(torch.cat(starts))
        seen += tokens.tolist()
    assert sorted(seen) == list(range(total))


def test_position_helpers_read_nothing_on_the_host():
    """Meta tensors have no values to read."""
    boundaries = torch.tensor([0, 4, 8]).to("meta")
    assert positions_from_cu_seqlens(boundaries, 8).shape == (8,)
    assert positions_from_cu_seqlens(boundaries, 8, starts=boundaries[1:]).shape == (8,)
    tokens, positions = packed_context_parallel_positions(boundaries, 8, rank=0, ranks=2)
    assert tokens.shape == positions.shape == (4,)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_position_helpers_map_over_boundaries():
    """Nor may a mapped tensor be read; each row is what the row alone gives."""
    many = torch.tensor([[0, 4, 8], [0, 8, 8], [0, 0, 8]])
    mapped = torch.vmap(lambda b: positions_from_cu_seqlens(b, 8))(many)
    assert torch.equal(mapped, torch.stack([positions_from_cu_seqlens(b, 8) for b in many]))

    def dealt(boundaries):
        return packed_context_parallel_positions(boundaries, 8, rank=1, ranks=2)[1]

    assert torch.equal(torch.vmap(dealt)(many), torch.stack([dealt(b) for b in many]))


def test_positions_from_cu_seqlens_compiles_to_one_graph():
    explained = torch._dynamo.explain(lambda b: positions_from_cu_seqlens(b, 8))(
        torch.tensor([0, 3, 3, 8])
    )
    assert explained.graph_break_count == 0


def test_padding_after_the_last_sequence_counts_on():
    found = positions_from_cu_seqlens(torch.tensor([0, 2, 4]), 7)
    assert found.tolist() == [0, 1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("axes", "style", "width"),
    [
        (ChunkedAxes([16, 24, 24]), "half", 128),
        (ChunkedAxes((8, 12, 12)), "interleaved", 64),
        (ChunkedAxes((8, 8, 8, 8)), "half", 64),
        (InterleavedAxes((24, 20, 20)), "half", 128),
        (GlmAxes((8, 12, 12)), "interleaved", 64),
        (PanguAxes((8, 12, 12)), "half", 64),
        (ErnieAxes((22, 22, 20)), "interleaved", 128),
        (BailingAxes((20, 22, 22)), "interleaved", 128),
        (XdropeAxes((16, 16, 16, 16)), "half", 128),
        (XdropeAxes((16, 16, 16, 16), full_width=False), "interleaved", 128),
        (AxialAxes((40, 40)), "half_blocks", 80),
        (AxialAxes((40, 40), axis_order=(1, 0)), "half", 80),
        (AxialAxes((32, 32), order="alternating"), "interleaved_to_half", 64),
    ],
)
def test_every_map_places_its_lanes(axes, style, width):
    config = make(axes, width, style)
    lanes = config.lane_axes
    copies = len(lanes) * 2 // width
    wanted = axes.lanes_per_axis()
    assert [lanes.count(axis) // copies for axis in range(axes.num_axes)] == list(wanted)
    assert config.inv_freq().shape == (width // 2,)
    if not isinstance(axes, AxialAxes):  # only axial maps change the frequencies
        assert config.inv_freq().equal(make(None, width).inv_freq())
    assert hash(config) == hash(dataclasses.replace(config))


def test_axial_layouts():
    """Own and global denominators, blocks and turns, W before H."""
    own = make(AxialAxes((8, 8)), 16).inv_freq()
    half = make(None, 8).inv_freq()
    assert own.equal(torch.cat((half, half)))
    alternating = make(AxialAxes((8, 8), order="alternating", axis_order=(1, 0)), 16)
    assert alternating.lane_axes == (1, 0) * 4
    assert alternating.inv_freq().equal(half.repeat_interleave(2))
    full = make(None, 16).inv_freq()
    pixtral = make(AxialAxes((8, 8), frequencies="global"), 16)
    assert pixtral.lane_axes == (0,) * 4 + (1,) * 4
    assert pixtral.inv_freq().equal(torch.cat((full[0::2], full[1::2])))
    turns = make(AxialAxes((8, 8), frequencies="global", order="alternating"), 16)
    assert turns.lane_axes == (0, 1) * 4
    assert turns.inv_freq().equal(full)
    swapped = make(AxialAxes((4, 12), axis_order=(1, 0)), 16)
    assert swapped.lane_axes == (1,) * 6 + (0,) * 2
    narrow, wide = make(None, 4).inv_freq(), make(None, 12).inv_freq()
    assert swapped.inv_freq().equal(torch.cat((wide, narrow)))


def test_axial_with_linear_scaling():
    axes, scaling = AxialAxes((16, 56, 56)), LinearScaling(factor=4)
    scaled = make(axes, 128, scaling=scaling)
    torch.testing.assert_close(scaled.inv_freq() * 4, make(axes, 128).inv_freq(), rtol=0, atol=0)


def test_spellings_of_sections_are_one_config():
    spellings = ([24, 20, 20], (24.0, 20.0, 20.0), torch.tensor([24, 20, 20]))
    assert {make(InterleavedAxes(s), 128) for s in spellings} == {
        make(InterleavedAxes((24, 20, 20)), 128)
    }
    assert ChunkedAxes((24, 20, 20)) != InterleavedAxes((24, 20, 20))
    assert AxialAxes((8, 8)) == AxialAxes([8, 8], axis_order=(0, 1))


# ---- transformers


def rotary(name: str, cls: str, config):
    module = pytest.importorskip(
        f"transformers.models.{name}.modeling_{name}", reason="needs transformers"
    )
    return getattr(module, cls)(config)


def ours(config: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin per lane entry, ``[tokens, R/2]`` (``[tokens, R]`` in full width)."""
    inv_freq = config.inv_freq()
    inv_freq = inv_freq.repeat(len(config.lane_axes) // inv_freq.shape[0])
    phases = positions[list(config.lane_axes)].T.float() * inv_freq
    return phases.cos(), phases.sin()


POSITIONS = torch.tensor([[0, 1, 2, 9, 700], [0, 5, 3, 8, 31], [0, 2, 77, 6, 1], [4, 1, 0, 3, 2]])


@pytest.mark.parametrize(
    ("name", "cls", "config_name", "sections"),
    [
        ("qwen2_vl", "Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", (16, 24, 24)),
        ("qwen2_5_vl", "Qwen2_5_VLRotaryEmbedding", "Qwen2_5_VLTextConfig", (16, 24, 24)),
        ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", (24, 20, 20)),
        ("glm4v", "Glm4vTextRotaryEmbedding", "Glm4vTextConfig", (16, 24, 24)),
        (
            "ernie4_5_vl_moe",
            "Ernie4_5_VLMoeTextRotaryEmbedding",
            "Ernie4_5_VLMoeTextConfig",
            (22, 22, 20),
        ),
        ("hunyuan_vl", "HunYuanVLRotaryEmbedding", "HunYuanVLTextConfig", (16, 16, 16, 16)),
    ],
)
def test_same_angles_as_transformers_text_models(name, cls, config_name, sections):
    """cos and sin per channel, bit for bit, with the style and map that the translation picks."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    theta = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": list(sections)}
    hf_config = getattr(transformers, config_name)(
        hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=theta
    )
    config = RopeConfig.from_transformers(hf_config)
    positions = POSITIONS[: len(sections)]
    expected = rotary(name, cls, hf_config)(torch.zeros(1), positions[:, None])
    for found, other in zip(ours(config, positions), expected, strict=True):
        if found.shape[-1] == 64:
            found = torch.cat((found, found), -1) if config.style == "half" else found
            found = found if config.style == "half" else found.repeat_interleave(2, -1)
        assert found.equal(other[0])


@pytest.mark.parametrize(
    ("name", "cls", "config_name", "axes", "style"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLVisionRotaryEmbedding", "Qwen2_5_VLVisionConfig", {}, "half"),
        ("glm4v", "Glm4vVisionRotaryEmbedding", "Glm4vVisionConfig", {}, "half"),
        (
            "pixtral",
            "PixtralVisionRotaryEmbedding",
            "PixtralVisionConfig",
            {"frequencies": "global"},
            "half",
        ),
        (
            "kimi_k25",
            "Kimi_K25VisionRotaryEmbedding",
            "Kimi_K25VisionConfig",
            {"order": "alternating", "axis_order": (1, 0)},
            "half",
        ),
        (
            "step3p7",
            "Step3p7VisionRotaryEmbedding",
            "Step3p7VisionConfig",
            {"axis_order": (1, 0)},
            "half",
        ),
        ("gemma4", "Gemma4VisionRotaryEmbedding", "Gemma4VisionConfig", {}, "half_blocks"),
    ],
)
def test_same_angles_as_transformers_vision_towers(name, cls, config_name, axes, style):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if not hasattr(transformers, config_name):
        pytest.skip(f"this transformers version has no {config_name}")
    hf_config = getattr(transformers, config_name)()
    heads = getattr(hf_config, "num_attention_heads", None) or hf_config.num_heads
    width = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    base = hf_config.rope_parameters["rope_theta"]
    config = make(AxialAxes((width // 2, width // 2), **axes), width, style, base=base)
    positions = POSITIONS[:2]
    batch_first = name in ("gemma4",)
    module = rotary(name, cls, hf_config)
    given = positions.T[None] if batch_first else positions.T
    expected = module(torch.zeros(1), given)
    for found, other in zip(ours(config, positions), expected, strict=True):
        if style == "half_blocks":
            height, columns = found.chunk(2, -1)
            found = torch.cat((height, height, columns, columns), -1)
        else:
            found = torch.cat((found, found), -1)
        assert found.equal(other.reshape(found.shape))


def test_llama4_vision_positions():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    hf_config = transformers.Llama4VisionConfig(
        image_size=28, patch_size=4, hidden_size=64, num_attention_heads=2
    )
    module = rotary("llama4", "Llama4VisionRotaryEmbedding", hf_config)
    base = hf_config.rope_parameters["rope_theta"]
    config = make(AxialAxes((16, 16)), 32, "interleaved", base=base)
    cos, sin = ours(config, llama4_vision_positions(7))
    assert torch.complex(cos, sin).equal(module.freqs_ci.reshape(50, 16))
    assert cos[-1].eq(1).all()
    assert sin[-1].eq(0).all()


def test_qwen_image_positions():
    found = qwen_image_positions(2, 3, 4, 2)
    assert found.shape == (3, 26)
    assert found[:, :5].tolist() == [[0] * 5, [-2] * 4 + [-1], [-2, -1, 0, 1, -2]]
    assert found[:, 12:14].tolist() == [[1, 1], [-2, -2], [-2, -1]]
    assert found[:, 24:].tolist() == [[2, 3]] * 3  # from max(3 // 2, 4 // 2)
    plain = qwen_image_positions(1, 3, 4, 2, centred=False, first_frame=5)
    assert plain[:, 10:].tolist() == [[5, 5, 4, 5], [2, 2, 4, 5], [2, 3, 4, 5]]


def test_the_map_check_would_notice():
    """The comparison with transformers fails for a wrong map of the right sections."""
    right, wrong = make(ChunkedAxes((16, 24, 24)), 128), make(GlmAxes((16, 24, 24)), 128)
    assert not ours(right, POSITIONS[:3])[0].equal(ours(wrong, POSITIONS[:3])[0])


# ---- errors


@pytest.mark.parametrize(
    ("build", "error", "sentence"),
    [
        (
            lambda: make(ChunkedAxes((16, 24, 23)), 128),
            ValueError,
            r"ChunkedAxes must share out .* = 64 lanes, got \(16, 24, 23\), which sum to 63",
        ),
        (
            lambda: make(InterleavedAxes((4, 14, 14)), 64),
            ValueError,
            r"InterleavedAxes must place \(4, 14, 14\) lanes, got \(11, 11, 10\): this map cannot",
        ),
        (
            lambda: make(ErnieAxes((23, 21, 20)), 128),
            ValueError,
            r"ErnieAxes must place \(20, 23, 21\) lanes, got \(20, 22, 22\)",
        ),
        (
            lambda: make(BailingAxes((20, 21, 23)), 128),
            ValueError,
            r"BailingAxes must place \(20, 21, 23\) lanes, got \(20, 22, 22\)",
        ),
        (
            lambda: make(AxialAxes((16, 56, 54)), 128),
            ValueError,
            r"AxialAxes must share out .* got \(8, 28, 27\), which sum to 63",
        ),
        (
            lambda: make(ChunkedAxes((8, 12, 12)), 64, "half_blocks"),
            ValueError,
            "style 'half_blocks' must be used with AxialAxes in blocks",
        ),
        (
            lambda: make(AxialAxes((8, 8), axis_order=(1, 0)), 16, "half_blocks"),
            ValueError,
            "style 'half_blocks' must be used with AxialAxes in blocks and axis order",
        ),
        (
            lambda: make(AxialAxes((8, 8), order="alternating"), 16, "half_blocks"),
            ValueError,
            "style 'half_blocks' must be used with AxialAxes in blocks",
        ),
        (
            lambda: make(XdropeAxes((16, 16, 16, 16)), 128, "interleaved"),
            ValueError,
            "style must be 'half' for XdropeAxes in full width, got 'interleaved'",
        ),
        (lambda: InterleavedAxes((32, 32)), ValueError, r"must have 3 sections, got \(32, 32\)"),
        (lambda: ChunkedAxes((64,)), ValueError, r"must have 2 or 3 or 4 sections, got \(64,\)"),
        (lambda: XdropeAxes((16, 24, 24)), ValueError, "must have 4 sections"),
        (lambda: PanguAxes((8, 8, 8, 8)), ValueError, "must have 2 or 3 sections"),
        (
            lambda: ChunkedAxes((-8, 12, 12)),
            ValueError,
            r"ChunkedAxes\.sections must not be negative nor all zero",
        ),
        (lambda: ChunkedAxes((0, 0, 0)), ValueError, "must not be negative nor all zero"),
        (
            lambda: ChunkedAxes(64),
            TypeError,
            r"ChunkedAxes\.sections must be a non-empty list of integers, got 64",
        ),
        (lambda: ChunkedAxes((16.5, 24, 23.5)), TypeError, "list of integers"),
        (lambda: ChunkedAxes(("16", 24, 24)), TypeError, "list of integers"),
        (lambda: AxialAxes((15, 57)), ValueError, r"AxialAxes\.dims must be even, got \(15, 57\)"),
        (
            lambda: AxialAxes((16, 56), axis_order=(0, 2)),
            ValueError,
            r"axis_order must name each of the 2 axes once, got \(0, 2\)",
        ),
        (
            lambda: AxialAxes((16, 56), order="alternating"),
            ValueError,
            r"AxialAxes\.dims must be equal for 'alternating' order",
        ),
        (
            lambda: AxialAxes((16, 56), frequencies="global"),
            ValueError,
            "must be equal for 'blocks' order and 'global' frequencies",
        ),
        (
            lambda: AxialAxes((16, 16), order="random"),
            ValueError,
            r"AxialAxes\.order must be one of \['blocks', 'alternating'\], got 'random'",
        ),
        (
            lambda: make(AxialAxes((16, 16)), 32, scaling=NtkScaling(factor=2)),
            ValueError,
            "scaling must be DefaultScaling or LinearScaling with AxialAxes, got NtkScaling",
        ),
        (
            lambda: make(
                AxialAxes((16, 16)), 32, scaling=YarnScaling(factor=2, original_max_position=9)
            ),
            ValueError,
            "with AxialAxes, got YarnScaling",
        ),
        (
            lambda: context_parallel_positions(10, rank=0, ranks=2),
            ValueError,
            "length must be divisible by 2 \\* ranks = 4, got 10; pad the sequence",
        ),
        (
            lambda: context_parallel_positions(8, rank=2, ranks=2),
            ValueError,
            r"rank must be in 0\.\.ranks - 1, got rank 2 of 2 ranks",
        ),
        (
            lambda: packed_context_parallel_positions(torch.tensor([0, 2, 8]), 8, rank=0, ranks=2),
            ValueError,
            r"every sequence length must be divisible by 2 \* ranks = 4, got \[2, 6\]",
        ),
        (
            lambda: packed_context_parallel_positions(torch.tensor([0, 6]), 6, rank=0, ranks=2),
            ValueError,
            "total must be divisible by 2 \\* ranks = 4, got 6",
        ),
        (
            lambda: positions_from_cu_seqlens(torch.tensor([0.0, 4.0]), 4),
            TypeError,
            "cu_seqlens must be int32 or int64, got torch.float32",
        ),
        (
            lambda: positions_from_cu_seqlens(torch.tensor([[0, 4]]), 4),
            ValueError,
            r"cu_seqlens must be \[sequences \+ 1\] with a sequence or more, got \(1, 2\)",
        ),
        (
            lambda: positions_from_cu_seqlens(torch.tensor([0, 4]), 4, starts=torch.tensor([1, 2])),
            ValueError,
            r"starts must have one entry a sequence, \(1,\), got \(2,\)",
        ),
    ],
)
def test_error_sentences(build, error, sentence):
    with pytest.raises(error, match=sentence):
        build()
