"""``python -m bench.kernel_audit``: its quick set is clean, each gate refuses a wrong kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import kernel_audit
from bench.kernel_audit import BLOCKS, FULL_WIDTH, Q_AND_K, TARGETS, Launch, audit

ROOT = Path(kernel_audit.__file__).parents[1]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Path]:
    """One run as CI makes it, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("audit")
    command = ["-m", "bench.kernel_audit", "--quick", "--json", "--write", str(folder)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    return done, folder


def test_quick_set_is_clean_on_every_target(quick):
    done, _ = quick
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["target"] for row in rows} == set(TARGETS)
    assert [row for row in rows if row["faults"]] == []
    exempt = [row for row in rows if not row["wide"]]
    assert {row["note"].split(":")[0] for row in exempt} == {"unaligned", "two angles a lane"}
    assert len(exempt) == 2 * len(TARGETS)


def test_json_is_complete_and_alone_on_stdout(quick):
    """One row for each variant on each target, with every number; progress goes to stderr."""
    done, _ = quick
    report = json.loads(done.stdout)
    wanted = {(t, str(launch)) for t in TARGETS for launch in kernel_audit.quick_variants()}
    assert {(row["target"], row["variant"]) for row in report["rows"]} == wanted
    assert len(report["rows"]) == len(wanted)
    fields = {"spill_bytes", "registers", "shared_bytes", "stack_bytes", "bytes_per_token"}
    assert all(isinstance(row[field], int) for row in report["rows"] for field in fields)
    assert report["failed"] == 0
    assert set(report["versions"]) == {"torch", "triton", "ptxas"}
    assert f"{len(wanted)}/{len(wanted)} variants compiled" in done.stderr


def test_both_files_are_written(quick):
    done, folder = quick
    assert json.loads((folder / "kernel_audit.json").read_text()) == json.loads(done.stdout)
    text = (folder / "kernel_audit.md").read_text()
    assert all(f"## {target}\n" in text for target in TARGETS)
    assert "every gate holds" in text
    # As many cells in each line of a table as its heading has.
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(kernel_audit.COLUMNS) + 3}


# What is wrong with a kernel, and the gate that must see it. Each is compiled for real.
TWINS = {
    "24 registers": (Launch(), {"maxnreg": 24}, "spills"),
    # Aligned memory whose strides are not declared divisible.
    "undeclared divisibility": (Launch(), {"ALIGN": 1}, "moves q or k"),
    # The out-of-table test over more lanes than a warp has.
    "test across warps": (Launch(), {"TOKENS_POW2": 256}, "shared memory"),
    # Four times the vector that LANES_OF_FULL_WIDTH_VECTOR allows.
    "full width, 16 lanes a thread": (
        Launch(lane_axes=FULL_WIDTH),
        {"VECTOR": 16, "VECTORS": 64, "TOKENS": 8, "TOKENS_POW2": 8},
        "registers",
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_each_gate_refuses_a_wrong_kernel(name: str):
    launch, changed, gate = TWINS[name]
    assert kernel_audit.faults(audit(launch, "sm_90"), launch, "sm_90") == ()
    faults = kernel_audit.faults(audit(launch, "sm_90", **changed), launch, "sm_90")
    assert any(gate in fault for fault in faults), faults


def test_narrow_accesses_are_seen_on_amd_too():
    """Four warps of 64 give a thread half a vector; undeclared divisibility a single element."""
    launch = Launch()
    right = audit(launch, "gfx942")
    assert right.widths(*Q_AND_K) == {16}
    # Each pointer was found: none of them is counted under another one's name.
    tensors = {name.split()[0] for name in right.accesses}
    assert tensors == {*Q_AND_K, "positions_ptr", "cos_sin_cache_ptr", "inv_freq_ptr"}
    for changed, width in (({"num_warps": 4}, 8), ({"ALIGN": 1}, 2)):
        found = audit(launch, "gfx942", **changed)
        assert kernel_audit.faults(found, launch, "gfx942")
        assert min(kernel_audit.x_widths(found)) == width


def test_a_fault_is_printed_and_fails_the_run(monkeypatch, capsys, tmp_path: Path):
    wrong = partial(kernel_audit.compile_launch, ALIGN=1)
    monkeypatch.setattr(kernel_audit, "compile_launch", wrong)
    monkeypatch.setattr(kernel_audit, "quick_variants", lambda: [Launch(head_dim=160)])
    options = ["--quick", "--targets", "sm_80", "--jobs", "1"]
    assert kernel_audit.main([*options, "--write", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILS: " in printed
    assert "moves q or k in accesses of [2, 16] bytes, not 16" in printed
    assert "1 of 1 variants fail a gate" in printed
    assert "FAILS" in (tmp_path / "kernel_audit.md").read_text()
    assert kernel_audit.main([*options, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert not row["wide"]
    assert row["narrowest_bytes"] == 2


def test_table_names_every_column(capsys, monkeypatch):
    launches = [Launch(), Launch(layout="odd_pointer", in_place=True)]
    monkeypatch.setattr(kernel_audit, "quick_variants", lambda: launches)
    assert kernel_audit.main(["--quick", "--targets", "sm_90", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (heading,) = [line for line in lines if line.startswith("sm_90 ")]
    assert heading.split()[1:] == kernel_audit.COLUMNS
    (plain,) = [line for line in lines if line.startswith("bfloat16 half 128 out of place ")]
    assert plain.split()[6:8] == ["0", "yes"]
    (odd,) = [line for line in lines if "odd_pointer" in line]
    assert "2 bytes" in odd
    assert odd.endswith("unaligned: gated on spills alone")
    assert lines[-1] == "every gate holds"


def test_an_unknown_target_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        kernel_audit.main(["--targets", "sm_90,sm_1"])
    assert stopped.value.code == 2
    assert "got sm_1" in capsys.readouterr().err


# Bytes a token of known models, worked out by hand: in place and out of place.
MODELS = {
    "Llama-3-8B": ({}, 21000, 21000),
    "Phi-2": ({"heads": (32, 32), "head_dim": 80, "rotary_dim": 32}, 8328, 20616),
    "Phi-4-mini": ({"heads": (24, 8), "rotary_dim": 96}, 12680, 16776),
    "GPT-J": ({"heads": (16, 16), "head_dim": 256, "rotary_dim": 64}, 8456, 33032),
    # Positions on three axes.
    "Qwen2-VL": ({"heads": (28, 4), "lane_axes": BLOCKS}, 16920, 16920),
}


@pytest.mark.parametrize("model", MODELS)
def test_least_bytes_are_those_of_the_tensors(model: str):
    fields, in_place, out_of_place = MODELS[model]
    for wanted, form in ((in_place, True), (out_of_place, False)):
        moved, least = kernel_audit.bytes_per_token(Launch(**fields, in_place=form))
        assert least == wanted
        assert least < moved < 1.35 * least


def test_every_variant_is_there():
    """The matrix that is promised: dtypes, styles, widths, forms, axes, layouts; none twice."""
    full = kernel_audit.variants()
    assert len(full) == len(set(full)) == len({str(launch) for launch in full})
    assert {launch.dtype for launch in full} == {
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    }
    assert {launch.width for launch in full} >= {32, 64, 80, 96, 128, 192, 256}
    styles = {"half", "interleaved", "interleaved_to_half", "half_blocks"}
    for form in ("in_place", "inverse", "computes_rows"):
        both = {(launch.style, getattr(launch, form)) for launch in full}
        assert both >= {
            (style, value)
            for style in styles
            for value in (True, False)
            if not (form == "in_place" and value and style == "interleaved_to_half")
        }
    assert {launch.layout for launch in full} >= {"packed_qkv", "odd_stride", "odd_pointer"}
    assert set(kernel_audit.quick_variants()) <= set(full)
