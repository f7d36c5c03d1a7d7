"""``patch`` on tiny models of the transformers families: every formula, text, vision and audio."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

from rope_compile.integrations import transformers as integration

import zoo
from zoo import report

# Rotations that no operator call stands for, and why.
REFUSED = {
    "lightglue": "differ within a pair",  # cos and sin are a learned projection of keypoints
    "vjepa2": "writes the rotation out itself",  # and gives one pair two frequencies
}
# Parts that stay, by name: frequencies that are trained, layers that do not rotate.
LEFT = {
    "mistral_large4": "trained cos and sin",
    "minimax": "take no position embeddings",
    "mllama": "take no position embeddings",
    "zamba2": "take no position embeddings",
}


@functools.cache
def row_of(family: str) -> report.Row:
    return report.check(family)


@pytest.mark.parametrize("family", zoo.FAST)
def test_a_family(family: str):
    """Outputs and gradients as before, none of its own rotations left unnamed, undone exactly."""
    row = row_of(family)
    if family in REFUSED:
        assert REFUSED[family] in row.refused
        return
    assert row.report is not None
    assert row.error <= 1e-4
    assert row.gradient_error <= 1e-4
    assert row.exact
    assert row.operator > 0
    reasons = " ".join(row.report.left.values())
    assert LEFT.get(family, "") in reasons
    if family not in LEFT:
        assert not reasons
        assert not row.left_running


def test_every_formula_is_in_the_fast_slice():
    missing = {
        label: families
        for label, families in zoo.FORMULAS.items()
        if not set(families) & set(zoo.FAST)
    }
    assert not missing


@pytest.mark.parametrize("family", zoo.UNUSED)
def test_a_family_that_never_rotates_is_refused(family: str):
    row = report.check(family)
    assert "no method calls a rotary function" in row.refused
    assert row.own == 0


@pytest.mark.parametrize("family", ["qwen3_vl", "cohere", "gptj", "deepseek_v3", "dinov3_vit"])
def test_one_operator_call_for_each_attention(family: str):
    """For q and k together; GPT-J's own function takes them one by one."""
    row = row_of(family)
    modules = sum(not name.endswith("rotary_emb") for name in row.report.replaced)
    assert row.operator == modules * (2 if family == "gptj" else 1)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2_vl", "llama4", "roformer"])
def test_a_wrong_rotation_fails_the_comparison(family: str, monkeypatch: pytest.MonkeyPatch):
    """The checks of this file see a drop-in that turns the wrong way."""

    def patch_wrongly(case: zoo.Case) -> integration.PatchReport:
        done = integration.patch(case.model)
        reverse_all(monkeypatch)
        return done

    row = report.check(family, patch_wrongly)
    assert row.error > 1e-3
    assert not row.good


def reverse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every operator call of this process rotates by the negative angle."""
    from rope_compile import functional

    operator = functional._rope
    monkeypatch.setattr(
        functional, "_rope", lambda *arguments: operator(*arguments[:-1], not arguments[-1])
    )


def test_what_runs_unreplaced_is_seen(monkeypatch: pytest.MonkeyPatch):
    """A patch that overlooks half of the layers, and says nothing, is not good."""

    def patch_half(case: zoo.Case) -> integration.PatchReport:
        done = integration.patch(case.model)
        integration.unpatch(case.model.get_submodule(done.replaced[0]))
        return done

    row = report.check("gpt_neox", patch_half)
    assert row.error <= 1e-4
    assert row.left_running
    assert not row.good


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma4", "llama4", "glm4v", "dinov3_vit", "gptj"])
def test_results_in_bfloat16_have_the_dtype_of_transformers(family: str):
    case = zoo.build(family, dtype=torch.bfloat16)
    with torch.no_grad():
        before = case.output(case())
        integration.patch(case.model)
        after = case.output(case())
    assert [x.dtype for x in after] == [x.dtype for x in before]
    for x, y in zip(after, before, strict=True):
        assert (x.float() - y.float()).abs().max() <= 0.1 * y.float().abs().max()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", ["glm4", "deepseek_v3", "dinov3_vit", "gpt_oss"])
def test_compiled_without_a_graph_break(family: str):
    case = zoo.build(family)
    case.model.config.use_cache = False
    integration.patch(case.model)
    with torch.no_grad():
        expected = case.output(case())
        compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
        got = case.output(case(compiled))
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
