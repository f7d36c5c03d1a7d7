"""The command line: plan and doctor, help that teaches, one clear sentence for bad input.

``tests/test_demo.py`` has the demo.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rope_compile as rc
from rope_compile import cli
from rope_compile.cli import main

from support import run_child

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
}
SPECULATION = ("--speculative-steps", "5", "--draft-tokens", "8", "--margin", "256")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def succeed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on standard error of a call that ends with 2."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("rope-compile: ")
    return line


def test_plan_from_flags_prints_the_numbers_of_the_library(capsys: pytest.CaptureFixture[str]):
    text = succeed(
        capsys,
        *("plan", "--head-dim", "128", "--max-position", "32768"),
        *("--draft-max-position", "2048", *SPECULATION),
    )
    assert "required  33064 rows = max(32768, 2048) + 5 * 8 + 256" in text
    assert "reserve   33152 rows, a multiple of 128" in text
    assert f"33152 x 128 float32 = {33152 * 128 * 4} bytes" in text


def test_plan_json_is_the_same_numbers(capsys: pytest.CaptureFixture[str], config_file: Path):
    arguments = ("plan", "--config", str(config_file), *SPECULATION, "--json")
    facts = json.loads(succeed(capsys, *arguments))
    assert (facts["required_length"], facts["reserve_length"]) == (33064, 33152)
    (table,) = facts["tables"]
    assert table == {
        "name": "target",
        "max_position": 32768,
        "rows": 33152,
        "rotary_dim": 128,
        "bytes": 33152 * 128 * 4,
    }


def test_plan_bytes_are_those_of_the_real_table(capsys: pytest.CaptureFixture[str]):
    """At an align below 128 too, where the table is rounded up once more."""
    arguments = ("plan", "--head-dim", "80", "--rotary-dim", "32", "--max-position", "100")
    facts = json.loads(succeed(capsys, *arguments, "--margin", "3", "--align", "1", "--json"))
    rope = rc.RotaryEmbedding(rc.RopeConfig(head_dim=80, rotary_dim=32, max_position=100))
    rope.reserve(facts["reserve_length"])
    (table,) = facts["tables"]
    assert facts["reserve_length"] == 103
    assert table["rows"] == rope.capacity
    assert table["bytes"] == rope.cos_sin_cache.numel() * 4


def test_plan_reads_folders_and_a_draft(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
):
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 2048}))
    arguments = ("plan", "--config", str(config_file.parent), "--draft-config", str(draft))
    facts = json.loads(succeed(capsys, *arguments, *SPECULATION, "--json"))
    assert facts["reserve_length"] == 33152
    lengths = [(table["name"], table["max_position"]) for table in facts["tables"]]
    assert lengths == [("target", 32768), ("draft", 2048)]
    assert {table["rows"] for table in facts["tables"]} == {33152}


def test_plan_served_length_wins_over_the_config(
    capsys: pytest.CaptureFixture[str], config_file: Path
):
    arguments = ("plan", "--config", str(config_file), "--max-position", "4096", "--json")
    assert json.loads(succeed(capsys, *arguments))["required_length"] == 4096 + 1024


@pytest.mark.parametrize("draft", [(), ("--draft-max-position", "64")])
def test_code_to_paste_runs(capsys: pytest.CaptureFixture[str], draft: tuple[str, ...]):
    """As it is printed, on models that are there."""
    arguments = ("plan", "--head-dim", "16", "--max-position", "200", *draft, "--json")
    facts = json.loads(succeed(capsys, *arguments))
    ropes = [rc.RotaryEmbedding(rc.RopeConfig(head_dim=16, max_position=n)) for n in (200, 64)]
    exec(facts["code"], {"model": ropes[0], "target": ropes[0], "draft": ropes[1]})
    assert ropes[0].capacity >= facts["required_length"]
    assert (ropes[1].capacity >= facts["required_length"]) == bool(draft)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "a command must be given, bench, demo, doctor or plan"),
        (("dmo",), "unknown command 'dmo', expected bench, demo, doctor or plan; did you mean"),
        (("doktor",), "did you mean doctor?"),
        (("zzz",), "see rope-compile --help"),
        (("plan",), "either --config or --head-dim, got neither"),
        (("plan", "--head-dim", "64", "--config", "x"), "either --config or --head-dim, got both"),
        (("plan", "--head-dim", "64"), "--max-position must be given with --head-dim"),
        (("plan", "--head-dim", "64", "--max-position", "many"), "invalid int value: 'many'"),
        (("plan", "--head-dim", "64", "--max-position", "0"), "max_position"),
        (("plan", "--head-dim", "0", "--max-position", "8"), "head_dim"),
        (("plan", "--head-dim", "64", "--max-position", "8", "--align", "0"), "align"),
        (("plan", "--head-dim", "64", "--max-position", "8", "--margin", "-1"), "margin"),
        (("plan", "--config", "/no/such/config.json"), "/no/such/config.json must be a readable"),
        (("doctor", "--jsn"), "unrecognized arguments: --jsn"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert sentence in refuse(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "must be a JSON file"),
        ("[]", "must hold a JSON object, got list"),
        (
            json.dumps(LLAMA | {"rope_scaling": {"rope_type": "linear", "facter": 2.0}}),
            "facter",
        ),
        (json.dumps(LLAMA | {"rope_scaling": {"rope_type": "lineer", "factor": 2.0}}), "lineer"),
    ],
)
def test_a_bad_config_file_is_named(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert sentence in refuse(capsys, "plan", "--config", str(path))


@pytest.mark.parametrize("command", ["", "bench", "demo", "doctor", "plan"])
def test_help_teaches_by_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]):
    """Every example line of every help text is accepted by the parser."""
    text = succeed(capsys, *command.split(), "--help")
    joined = text.replace("\\\n", " ")
    examples = [
        line.split("  ")[1:] for line in joined.splitlines() if line.startswith("  rope-compile ")
    ]
    assert examples
    for parts in examples:
        # The command ends at the first run of blanks; continuation lines have theirs inside.
        words = " ".join(parts).split(" ") if "\\" in text else parts[0].split()
        words = [word for word in words if word]
        if ">" in words:
            words = words[: words.index(">")]
        assert words[0] == "rope-compile"
        cli._parser().parse_args(words[1:])


def test_version(capsys: pytest.CaptureFixture[str]):
    assert rc.__version__ in succeed(capsys, "--version")


@pytest.mark.usefixtures("fresh_compiler")
def test_doctor_checks_this_machine(capsys: pytest.CaptureFixture[str]):
    facts = json.loads(succeed(capsys, "doctor", "--json"))
    assert facts["ok"]
    assert set(facts["versions"]) >= {"python", "torch", "triton", "rope_compile"}
    assert facts["devices"][0].startswith("cpu")
    assert all(facts["registered"].values())
    assert len(facts["self_check"]) >= 7
    for check in facts["self_check"]:
        assert check["ok"]
        assert check["error"] <= check["bound"]


@pytest.mark.usefixtures("fresh_compiler")
def test_doctor_ends_with_1_where_the_self_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "largest_error", lambda rope: 1e-3)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output
    assert output.splitlines()[-1] == "the self-check FAILED"


@pytest.mark.usefixtures("fresh_compiler")
def test_doctor_ends_with_1_without_a_registration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "_registered", lambda: {"rope_compile::rope CPU": False})
    assert main(["doctor"]) == 1
    assert "missing: rope_compile::rope CPU" in capsys.readouterr().out


def test_installed_as_a_module_too():
    """``python -m rope_compile.cli`` is the same command, and its status is main's."""
    output = run_child("-m", "rope_compile.cli", "plan", "--head-dim", "64", "--max-position", "9")
    assert "reserve" in output
