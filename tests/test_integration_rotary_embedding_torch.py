"""``integrations.rotary_embedding_torch``: angles first, any broadcasting; against the package."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from torch import Tensor

from rope_compile.integrations import rotary_embedding_torch as lu

from peer_formulas import assert_gradients, assert_rotated, plain_rotate
from support import NoHostReads, assert_near_oracle, oracle_rotate, randn

B, H, N, D = 2, 3, 5, 12
NOT_INSTALLED = "rotary-embedding-torch is not installed; it is in the bench extra"


def angles_of(*shape: int) -> Tensor:
    """Angles ``[*shape, 2n]``, each twice in a row."""
    return (randn(*shape, seed=7) * 3).repeat_interleave(2, -1)


def rows_of(freqs: Tensor) -> tuple[Tensor, Tensor]:
    half = freqs[..., ::2].double()
    return half.cos(), half.sin()


# (shape of t, shape of the angles, seq_dim): every way that the package's own layouts meet.
LAYOUTS = [
    ((B, H, N, D), (N, 6), -2),
    ((B, H, N, D), (N + 3, 6), -2),  # the last rows are the ones used
    ((B, H, N, D), (N, 2), -2),
    ((B, N, H, D), (N, 1, 6), -3),
    ((B, N, D), (N + 2, 6), -2),
    ((N, D), (N, 6), -2),
    ((B, H, 4, 3, D), (4, 3, 6), -2),  # axial
    ((B, H, 4, 3, D), (4, 1, 2), -2),
    ((B, H, N, D), (B, 1, N, 6), -2),
    ((B, H, N, D), (B, H, N, 6), -2),
    ((B, H, 1, D), (1, 6), -2),
]


@pytest.mark.parametrize(("t_shape", "freqs_shape", "seq_dim"), LAYOUTS)
@pytest.mark.parametrize("start_index", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply(t_shape, freqs_shape, seq_dim, start_index, dtype):
    if start_index + 2 * freqs_shape[-1] > D:
        start_index = 0
    freqs, t = angles_of(*freqs_shape), randn(*t_shape, dtype=dtype)
    out = lu.apply_rotary_emb(freqs, t, start_index, seq_dim=seq_dim)
    used = freqs
    if freqs.dim() == 2 or t.dim() == 3:
        used = freqs[-t.shape[seq_dim] :]
    assert_rotated(out, t, *rows_of(used), interleaved=True, first=start_index)


@pytest.mark.parametrize("scale", [0.5, "tensor"])
def test_scale(scale):
    freqs, t = angles_of(N, 6), randn(B, H, N, D)
    factor = (randn(N, 6, seed=3).abs() + 0.5).repeat_interleave(2, -1)
    scale = factor if scale == "tensor" else scale
    out = lu.apply_rotary_emb(freqs, t, scale=scale)
    lanes = scale[..., ::2].double() if isinstance(scale, Tensor) else scale
    cos, sin = (part * lanes for part in rows_of(freqs))
    assert_rotated(out, t, cos, sin, interleaved=True, scale=4.0)
    assert_gradients(
        lambda t: lu.apply_rotary_emb(freqs, t, scale=scale),
        lambda t: plain_rotate(t, cos, sin, interleaved=True),
        t,
    )


@pytest.mark.parametrize("lanes", [(N, 6), (H, 1, 6), (6,), (N, 1), (1,)], ids=str)
@pytest.mark.parametrize("dim", [None, 0])
def test_a_scale_is_for_the_angles_that_are_used(lanes, dim):
    """Angles for more tokens than t has are cut; the scale, which is not, has to fit then."""
    freqs, t = angles_of(N + 3, 6), randn(B, H, N, D, dtype=torch.bfloat16)
    factor = randn(*lanes, seed=3).abs() + 0.5
    scale = factor.repeat_interleave(2, -1) if lanes[-1:] == (6,) else factor
    out = lu.apply_rotary_emb(freqs, t, scale=scale, freqs_seq_dim=dim)
    cos, sin = (part * factor.double() for part in rows_of(freqs[3:]))
    assert_rotated(out, t, cos, sin, interleaved=True, scale=float(scale.max()))
    other = (part * factor.double() for part in rows_of(freqs[:N]))  # the checker tells which
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_rotated(out, t, *other, interleaved=True, scale=float(scale.max()))
    with pytest.raises((ValueError, RuntimeError)):
        lu.apply_rotary_emb(freqs, t, scale=torch.ones(N + 3, 12))


def test_freqs_seq_dim():
    freqs, t = angles_of(B, 1, N + 2, 6), randn(B, H, N, D)
    out = lu.apply_rotary_emb(freqs, t, freqs_seq_dim=2)
    assert_rotated(out, t, *rows_of(freqs[:, :, 2:]), interleaved=True)


def test_swapped_arguments_fail():
    freqs, t = angles_of(N, 6), randn(B, H, N, D)
    with pytest.raises(ValueError, match="broadcast"):
        lu.apply_rotary_emb(t, freqs)


@pytest.mark.parametrize("offset", [0, 3, 20000])
@pytest.mark.parametrize("seq_first", [False, True])
def test_rotate_queries_or_keys(seq_first, offset):
    module = lu.RotaryEmbedding(8, seq_before_head_dim=seq_first)
    t = randn(B, N, H, D)
    out = module.rotate_queries_or_keys(t if seq_first else t.transpose(1, 2), offset=offset)
    out = out if seq_first else out.transpose(1, 2)
    positions = (torch.arange(N) + offset).expand(B, N)
    expected = oracle_rotate(t, positions, module.rope.inv_freq, style="interleaved")
    assert_near_oracle(out, *expected)
    explicit = module.rotate_queries_or_keys(t, seq_dim=1, offset=offset)
    torch.testing.assert_close(explicit, out, rtol=0, atol=0)
    one = module.rotate_queries_or_keys(t[0, :, 0], seq_dim=-2, offset=offset)
    torch.testing.assert_close(one, out[0, :, 0], rtol=0, atol=0)


SCALES = [0.5, 1, torch.tensor(2.0), randn(N, 1, seed=4), randn(8, seed=5), randn(N, 8, seed=6)]


def of_scale(scale: float | Tensor, seq_first: bool) -> float | Tensor:
    """For ``[..., seq, heads, head_dim]`` a scale for each token has a dimension of heads."""
    along = isinstance(scale, Tensor) and scale.dim() == 2
    return scale.unsqueeze(1) if along and seq_first else scale


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: str(getattr(s, "shape", s)))
@pytest.mark.parametrize("seq_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_queries_or_keys(scale, seq_first, dtype):
    """One rounding, after the scale; channels that are not rotated are not scaled either."""
    module = lu.RotaryEmbedding(8, seq_before_head_dim=seq_first)
    t = randn(B, N, H, D, dtype=dtype)
    given, wanted = (t, -3) if seq_first else (t.transpose(1, 2), -2)
    before, scale = given.clone(), of_scale(scale, seq_first)
    with NoHostReads():
        out = module.rotate_queries_or_keys(given, offset=2, scale=scale)
    assert (out.shape, out.dtype) == (given.shape, dtype)
    assert torch.equal(given, before)
    positions = (torch.arange(N) + 2).expand(B, N)
    expected, larger = oracle_rotate(t, positions, module.rope.inv_freq, style="interleaved")
    factor = torch.ones_like(given, dtype=torch.float64)
    factor[..., :8] *= scale
    if wanted == -2:
        expected, larger = expected.transpose(1, 2), larger.transpose(1, 2)
    assert_near_oracle(out, expected * factor, larger * factor.abs())


def test_a_scale_rounded_twice_would_be_seen():
    """The checker of the test above, on the product of a result in bfloat16."""
    module, t = lu.RotaryEmbedding(8), randn(64, 8, dtype=torch.bfloat16)
    exact, larger = oracle_rotate(
        t.unsqueeze(1), torch.arange(64), module.rope.inv_freq, style="interleaved"
    )
    once = module.rotate_queries_or_keys(t, scale=0.7)
    assert_near_oracle(once, exact[:, 0] * 0.7, larger[:, 0] * 0.7)
    twice = module.rotate_queries_or_keys(t) * 0.7
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_near_oracle(twice, exact[:, 0] * 0.7, larger[:, 0] * 0.7)


def test_queries_with_cached_keys():
    module = lu.RotaryEmbedding(D)
    q, k = randn(B, H, 2, D), randn(B, H, N, D, seed=1)
    q_out, k_out = module.rotate_queries_with_cached_keys(q, k, offset=4)
    whole = module.rotate_queries_or_keys
    torch.testing.assert_close(q_out, whole(q, offset=N - 2 + 4), rtol=0, atol=0)
    torch.testing.assert_close(k_out, whole(k), rtol=0, atol=0)
    with pytest.raises(ValueError, match="q must not be longer than k, got 5 and 2"):
        module.rotate_queries_with_cached_keys(k, q)


def test_the_table_is_shared_and_forward_assigns_nothing():
    module = lu.RotaryEmbedding(D, theta=77)
    before = dict(module.__dict__)
    module.rotate_queries_or_keys(randn(B, H, N, D), offset=10**6)
    assert module.__dict__ == before
    assert not module.state_dict()
    assert module.rope is lu.RotaryEmbedding(D, theta=77.0).rope


def test_signature_equals_the_package(peer):
    """Same names in the same order with the same defaults."""
    for name in ("apply_rotary_emb", "RotaryEmbedding"):
        ours, theirs = (
            {k: p.default for k, p in inspect.signature(getattr(package, name)).parameters.items()}
            for package in (lu, peer)
        )
        assert list(ours.items()) == list(theirs.items())


def test_gradients():
    module = lu.RotaryEmbedding(8)
    cos, sin = module.rope.cos_sin_cache[2 : 2 + N].chunk(2, dim=-1)
    assert_gradients(
        lambda t: module.rotate_queries_or_keys(t, offset=2),
        lambda t: plain_rotate(t, cos, sin, interleaved=True),
        randn(B, H, N, D),
    )
    freqs = angles_of(4, 3, 6)
    assert_gradients(
        lambda t: lu.apply_rotary_emb(freqs, t),
        lambda t: plain_rotate(t, *rows_of(freqs), interleaved=True),
        randn(B, H, 4, 3, D),
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    module, freqs, factor = lu.RotaryEmbedding(8), angles_of(N, 6), randn(N, 1)

    def model(t: Tensor) -> Tensor:
        t = module.rotate_queries_or_keys(t, offset=3, scale=factor)
        return lu.apply_rotary_emb(freqs, t)

    t = randn(B, H, N, D)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(t), model(t), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: lu.apply_rotary_emb(angles_of(N, 6).requires_grad_(), randn(B, H, N, D)),
            ValueError,
            "must not require grad",
        ),
        (lambda: lu.RotaryEmbedding(D, None, "constant"), NotImplementedError, "freqs_for must be"),
        (lambda: lu.RotaryEmbedding(D, torch.ones(6)), NotImplementedError, "custom_freqs must be"),
        (lambda: lu.RotaryEmbedding(D, learned_freq=True), NotImplementedError, "learned_freq"),
        (lambda: lu.RotaryEmbedding(D, use_xpos=True), NotImplementedError, "use_xpos"),
        (
            lambda: lu.RotaryEmbedding(D, freqs_for="pixel").rotate_queries_or_keys(
                randn(B, H, N, D)
            ),
            ValueError,
            "use get_axial_freqs",
        ),
        (
            lambda: lu.RotaryEmbedding(D).rotate_queries_or_keys(randn(B, H, N, D), seq_dim=0),
            ValueError,
            "seq_dim must be -2 or -3 of t, got 0",
        ),
        (
            lambda: lu.RotaryEmbedding(D).get_axial_freqs(2, 3, offsets=(1,)),
            ValueError,
            "offsets must have 2 entries, got 1",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# -------------------------------------------------------------------- against the package itself


@pytest.fixture(scope="module")
def peer():
    return pytest.importorskip("rotary_embedding_torch", reason=NOT_INSTALLED)


@pytest.mark.parametrize(("t_shape", "freqs_shape", "seq_dim"), LAYOUTS)
def test_apply_equals_the_package(peer, t_shape, freqs_shape, seq_dim):
    freqs, t = angles_of(*freqs_shape), randn(*t_shape)
    ours = lu.apply_rotary_emb(freqs, t, seq_dim=seq_dim)
    theirs = peer.apply_rotary_emb(freqs, t, seq_dim=seq_dim)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seq_dim", [-2, -3])
def test_scaled_angles_equal_the_package(peer, seq_dim):
    """Longer angles than scale, and t; a scale for each token."""
    freqs, t = angles_of(N + 3, 6), randn(B, N, N, D)
    scale = (randn(N, 6, seed=3).abs() + 0.5).repeat_interleave(2, -1)
    if seq_dim == -3:
        freqs, scale = freqs.unsqueeze(1), scale.unsqueeze(1)
    ours, theirs = (
        package.apply_rotary_emb(freqs, t, scale=scale, seq_dim=seq_dim, freqs_seq_dim=0)
        for package in (lu, peer)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: str(getattr(s, "shape", s)))
@pytest.mark.parametrize("seq_first", [False, True])
def test_scaled_queries_or_keys_equal_the_package(peer, scale, seq_first):
    ours, theirs = (
        package.RotaryEmbedding(8, seq_before_head_dim=seq_first).rotate_queries_or_keys(
            randn(B, N, N, D), offset=6, scale=of_scale(scale, seq_first)
        )
        for package in (lu, peer)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"theta": 500.0},
        {"interpolate_factor": 2.0},
        {"theta_rescale_factor": 4.0},
        {"interpolate_factor": 4.0, "theta_rescale_factor": 3.0},
        {"seq_before_head_dim": True},
    ],
)
def test_module_equals_the_package(peer, options):
    ours, theirs = lu.RotaryEmbedding(8, **options), peer.RotaryEmbedding(8, **options)
    t = randn(B, N, N, D)
    for offset in (0, 6):
        torch.testing.assert_close(
            ours.rotate_queries_or_keys(t, offset=offset),
            theirs.rotate_queries_or_keys(t, offset=offset),
            rtol=0,
            atol=2e-6,
        )
    q = t[:, :2] if options.get("seq_before_head_dim") else t[:, :, :2]
    for mine, other in zip(
        ours.rotate_queries_with_cached_keys(q, t, offset=1),
        theirs.rotate_queries_with_cached_keys(q, t, offset=1),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)
    positions = torch.tensor([0.0, 1.5, 7.0])
    torch.testing.assert_close(ours(positions), theirs(positions), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["lang", "pixel"])
def test_axial_equals_the_package(peer, kind):
    ours = lu.RotaryEmbedding(4, freqs_for=kind, max_freq=64)
    # Its cache is keyed by the length alone: with it, the first call's offsets stay for all.
    theirs = peer.RotaryEmbedding(4, freqs_for=kind, max_freq=64, cache_if_possible=False)
    for offsets in (None, (1, 2), torch.tensor([0.5, 2.0])):
        mine = ours.get_axial_freqs(4, 3, offsets=offsets)
        other = theirs.get_axial_freqs(4, 3, offsets=offsets)
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    t = randn(B, H, 4, 3, D)
    torch.testing.assert_close(
        lu.apply_rotary_emb(mine, t), peer.apply_rotary_emb(other, t), rtol=0, atol=2e-5
    )


def test_pixel_frequencies():
    freqs = lu.RotaryEmbedding(4, freqs_for="pixel", max_freq=10).get_axial_freqs(3)
    expected = torch.tensor([-1.0, 0.0, 1.0])[:, None] * torch.tensor([1.0, 5.0]) * math.pi
    torch.testing.assert_close(freqs, expected.repeat_interleave(2, -1))
