"""``integrations.diffusers``: the forms of ``apply_rotary_emb``, and three models' tables."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from rope_compile.integrations import diffusers as df

from peer_formulas import angles, assert_gradients, assert_rotated, plain_rotate
from support import randn

B, H, S, D = 2, 3, 5, 12


def full(table: tuple[Tensor, Tensor], unbind_dim: int) -> tuple[Tensor, Tensor]:
    cos, sin = table
    if unbind_dim == -1:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


@pytest.mark.parametrize("unbind_dim", [-1, -2])
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [6, 2])
def test_real(unbind_dim, sequence_dim, dtype, half):
    table = angles(S, half)
    x = randn(B, S, H, D, dtype=dtype)
    given = x if sequence_dim == 1 else x.transpose(1, 2)
    out = df.apply_rotary_emb(given, full(table, unbind_dim), True, unbind_dim, sequence_dim)
    out = out if sequence_dim == 1 else out.transpose(1, 2)
    rows = [part.unsqueeze(1) for part in table]
    assert_rotated(out, x, *rows, interleaved=unbind_dim == -1)


def test_the_defaults_are_heads_second_and_interleaved():
    table, x = angles(S, 6), randn(B, S, S, D)
    out = df.apply_rotary_emb(x, full(table, -1))
    assert_rotated(out, x, *table, interleaved=True)
    other = df.apply_rotary_emb(x, full(table, -1), sequence_dim=1)
    assert not torch.allclose(out, other, atol=0.1)
    qwen = df.apply_rotary_emb_qwen(x, full(table, -1))
    torch.testing.assert_close(qwen, out, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, B])
def test_complex(batch):
    table, x = angles(batch, S, 6), randn(B, S, H, D)
    out = df.apply_rotary_emb(x, torch.complex(*table), use_real=False)
    assert_rotated(out, x, *(part.unsqueeze(2) for part in table), interleaved=True)


def test_complex_of_qwen():
    table, x = angles(S, 6), randn(B, S, H, D, dtype=torch.bfloat16)
    out = df.apply_rotary_emb_qwen(x, torch.complex(*table), use_real=False)
    assert_rotated(out, x, *(part.unsqueeze(1) for part in table), interleaved=True)


def test_no_tokens():
    table = angles(0, 6)
    assert df.apply_rotary_emb(randn(B, H, 0, D), full(table, -1)).shape == (B, H, 0, D)


# ------------------------------------------------------------------------------------ tables


def exact_angles(positions: list[list[float]], widths: tuple[int, ...], theta: float) -> np.ndarray:
    """float64 ``[tokens, sum(widths) / 2]``: each axis with denominators of its own."""
    parts = []
    for axis, width in enumerate(widths):
        f = theta ** -(np.arange(0, width, 2) / width)
        parts.append(np.array([row[axis] for row in positions])[:, None] * f)
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["int", "tensor", "array"])
def test_1d_table(kind, dtype):
    pos = {"int": 7, "tensor": torch.arange(7), "array": np.arange(7)}[kind]
    options = {"theta": 500.0, "linear_factor": 2.0, "ntk_factor": 3.0, "freqs_dtype": dtype}
    exact = exact_angles([[p / 2] for p in range(7)], (8,), 1500.0)
    rows = df.get_1d_rotary_pos_embed(8, pos, **options)
    assert isinstance(rows, Tensor)
    assert rows.dtype == (torch.complex64 if dtype == torch.float32 else torch.complex128)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    np.testing.assert_allclose(rows.numpy(), np.exp(1j * exact), rtol=0, atol=tolerance)
    cos, sin = df.get_1d_rotary_pos_embed(8, pos, use_real=True, **options)
    np.testing.assert_allclose(cos.numpy(), np.cos(exact).repeat(2, 1), rtol=0, atol=1e-6)
    cos, sin = df.get_1d_rotary_pos_embed(
        8, pos, use_real=True, repeat_interleave_real=False, **options
    )
    assert cos.dtype == sin.dtype == torch.float32
    np.testing.assert_allclose(sin.numpy(), np.tile(np.sin(exact), 2), rtol=0, atol=1e-6)


def test_1d_table_at_far_positions_needs_float64():
    exact = np.cos(exact_angles([[131071.0]], (8,), 10000.0)).repeat(2, 1)
    pos = torch.tensor([131071.0])
    for dtype, bound in ((torch.float64, 1e-7), (torch.float32, 1e-2)):
        cos, _ = df.get_1d_rotary_pos_embed(8, pos, use_real=True, freqs_dtype=dtype)
        assert np.abs(cos.numpy() - exact).max() < bound
    assert np.abs(cos.numpy() - exact).max() > 1e-6, "float32 angles cannot be seen here"


def test_flux():
    widths, theta = (4, 6, 2), 10000
    ids = torch.tensor([[0, 3, 5], [1, 0, 4000], [7, 63, 2]])
    cos, sin = df.FluxPosEmbed(theta, widths)(ids)
    exact = exact_angles(ids.tolist(), widths, theta)
    assert cos.shape == sin.shape == (3, 12)
    assert cos.dtype == torch.float32
    np.testing.assert_allclose(cos.numpy(), np.cos(exact).repeat(2, 1), rtol=0, atol=1e-7)
    np.testing.assert_allclose(sin.numpy(), np.sin(exact).repeat(2, 1), rtol=0, atol=1e-7)
    x = randn(B, H, 3, 12)
    out = df.apply_rotary_emb(x, (cos, sin))
    expected = torch.from_numpy(np.cos(exact)), torch.from_numpy(np.sin(exact))
    assert_rotated(out, x, *expected, interleaved=True)


@pytest.mark.parametrize("head_dim", [128, 44])
def test_wan(head_dim):
    side = 2 * (head_dim // 6)
    widths = (head_dim - 2 * side, side, side)
    if head_dim == 128:
        assert widths == (44, 42, 42)
    module = df.WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)
    cos, sin = module(torch.empty(B, 4, 2, 6, 4))
    positions = [list(p) for p in itertools.product(range(2), range(3), range(2))]
    exact = exact_angles(positions, widths, 10000.0)
    assert cos.shape == sin.shape == (1, 12, 1, head_dim)
    np.testing.assert_allclose(cos[0, :, 0].numpy(), np.cos(exact).repeat(2, 1), rtol=0, atol=1e-7)
    x = randn(B, 12, H, head_dim, dtype=torch.bfloat16)
    out = df.apply_rotary_emb_wan(x, cos, sin)
    assert_rotated(out, x, cos[..., ::2], sin[..., ::2], interleaved=True)


@pytest.mark.parametrize("centred", [True, False])
def test_qwen_image(centred):
    """Two images, the second from frame 1 on; text after the larger extent, equal on all axes."""
    widths, theta = (4, 6, 2), 10000
    images = [(1, 4, 5), (2, 3, 2)]
    positions = []
    for index, (frames, height, width) in enumerate(images):
        first = [-(height - height // 2), -(width - width // 2)] if centred else [0, 0]
        positions += [
            [index + f, first[0] + h, first[1] + w]
            for f, h, w in itertools.product(range(frames), range(height), range(width))
        ]
    start = 2 if centred else 5
    text = [[start + n] * 3 for n in range(6)]
    module = df.QwenEmbedRope(theta, widths, scale_rope=centred)
    for video in ([images], [images, images]):
        image_rows, text_rows = module(video, torch.device("cpu"), 6)
        for rows, at in ((image_rows, positions), (text_rows, text)):
            assert rows.dtype == torch.complex64
            exact = exact_angles(at, widths, theta)
            np.testing.assert_allclose(rows.numpy(), np.exp(1j * exact), rtol=0, atol=2e-7)
    one, _ = module((1, 4, 5), max_txt_seq_len=torch.tensor(6))
    torch.testing.assert_close(one, image_rows[:20], rtol=0, atol=0)
    (again, _), (once_more, _) = module([(1, 4, 5)], max_txt_seq_len=1), module(images[0], None, 1)
    torch.testing.assert_close(again, once_more, rtol=0, atol=0)


def test_tables_have_no_state_and_survive_meta():
    with torch.device("meta"):
        module = torch.nn.ModuleList(
            [df.FluxPosEmbed(10000, (4, 4)), df.WanRotaryPosEmbed(12, (1, 1, 1), 4)]
        )
    module = module.to_empty(device="cpu").to(torch.bfloat16)
    assert not module.state_dict()
    cos, _ = module[0](torch.tensor([[0, 4000]]))
    exact = exact_angles([[0, 4000]], (4, 4), 10000)
    np.testing.assert_allclose(cos.numpy(), np.cos(exact).repeat(2, 1), rtol=0, atol=1e-7)


def test_gradients():
    table = angles(S, 6)
    rows = [part.unsqueeze(1) for part in table]
    assert_gradients(
        lambda x: df.apply_rotary_emb(x, full(table, -2), True, -2, 1),
        lambda x: plain_rotate(x, *rows),
        randn(B, S, H, D),
    )
    assert_gradients(
        lambda x: df.apply_rotary_emb_qwen(x, torch.complex(*table), use_real=False),
        lambda x: plain_rotate(x, *rows, interleaved=True),
        randn(B, S, H, D),
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    flux, wan = df.FluxPosEmbed(10000, (4, 6, 2)), df.WanRotaryPosEmbed(D, (1, 2, 2), 16)
    qwen = df.QwenEmbedRope(10000, (4, 6, 2), True)

    def model(x: Tensor, ids: Tensor, video: Tensor) -> Tensor:
        x = df.apply_rotary_emb(x, flux(ids), sequence_dim=1)
        x = df.apply_rotary_emb_wan(x, *wan(video))
        rows, _ = qwen((1, 2, 3), max_txt_seq_len=4)
        return df.apply_rotary_emb_qwen(x, rows, use_real=False)

    inputs = randn(B, 6, H, D), torch.arange(18).reshape(6, 3), torch.empty(1, 1, 1, 4, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, t: df.apply_rotary_emb(x, t, sequence_dim=3), ValueError, "1 or 2"),
        (lambda x, t: df.apply_rotary_emb(x, t, True, 0), ValueError, "-1 or -2, got 2 and 0"),
        (lambda x, t: df.apply_rotary_emb(x, t[0]), TypeError, "must be (cos, sin)"),
        (lambda x, t: df.apply_rotary_emb(x, t, False), TypeError, "a complex tensor"),
        (lambda x, t: df.apply_rotary_emb(x, t[0][None], False), TypeError, "must be complex"),
        (lambda x, t: df.get_1d_rotary_pos_embed(5, 3), ValueError, "dim must be even, got 5"),
        (
            lambda x, t: df.FluxPosEmbed(10000, (4, 4))(torch.zeros(3, 3)),
            ValueError,
            "2 axes, got 3",
        ),
        (
            lambda x, t: df.QwenEmbedRope(10000, (4, 4, 4))([(1, 2, 2), (1, 2, 3)], None, 3),
            ValueError,
            "the same for all samples",
        ),
        (lambda x, t: df.QwenEmbedRope(10000, (4, 4, 4))((1, 2, 2)), ValueError, "max_txt_seq_len"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(randn(B, H, S, D), full(angles(S, 6), -1))
