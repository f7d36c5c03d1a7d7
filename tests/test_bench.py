"""The benchmark: its protocol on fake clocks, its files, its verdicts, and one tiny run.

Nothing here passes or fails by a real time.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rope_compile import bench, cli
from rope_compile.bench import (
    children,
    counts,
    formulas,
    load,
    matrix,
    plot,
    protocol,
    providers,
    report,
    rows,
    shapes,
    targets,
    timers,
)
from rope_compile.bench.case import Case, Wrong
from rope_compile.bench.peers import peers
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import IN_PLACE, OUT_EXISTING, OUT_FRESH, SHAPES, Cell

from support import randn

CPU = torch.device("cpu")
SMALL = Cell(SHAPES["L8"], "float32", 5, 1)


@pytest.fixture(autouse=True)
def _short_tables(monkeypatch: pytest.MonkeyPatch):
    """Tables of a thousand rows: what is tested does not depend on their length."""
    monkeypatch.setattr(shapes, "ROWS", 1024)


# -------------------------------------------------------------------------------------- protocol


def test_every_round_has_everybody_once_in_changing_order():
    names = ["a", "b", "c"]
    orders = [protocol.order(names, number) for number in range(12)]
    assert all(sorted(taken) == names for taken in orders)
    for place in range(3):  # everybody comes first, second and third equally often
        assert [[taken[place] for taken in orders[:6]].count(name) for name in names] == [2, 2, 2]
    before = {(taken[1], taken[0]) for taken in orders}
    assert {("a", "b"), ("b", "a")} <= before, "nobody always follows the same one"


def test_samples_are_taken_in_that_order():
    log = []

    def sampler(name: str) -> Callable[[], float]:
        return lambda: log.append(name) or float(len(log))

    after = iter(range(100))
    samples = protocol.interleave(
        {name: sampler(name) for name in "ab"}, 3, lambda: log.append(str(next(after)))
    )
    assert log == ["a", "b", "0", "a", "b", "1", "a", "b", "2"]
    assert samples == {"a": [1.0, 4.0, 7.0], "b": [2.0, 5.0, 8.0]}


def test_a_ratio_stays_inside_its_round():
    """A machine that slows down tenfold half-way changes no ratio; two medians would be off."""
    slow = [1.0] * 5 + [10.0] * 6
    ours, theirs = slow, [3 * x for x in reversed(slow)]
    paired = [3 * x for x in slow]
    found = protocol.ratio(paired, ours)
    assert (found.median, found.p20, found.p80, found.low, found.high) == (3, 3, 3, 3, 3)
    assert protocol.ratio(theirs, ours).low < 3 < protocol.ratio(theirs, ours).high


def test_the_interval_is_the_same_every_time_and_narrows_with_rounds():
    few = [1.0 + 0.1 * (i % 5) for i in range(10)]
    many = few * 20
    ones = [1.0] * 200
    first, again = (protocol.ratio(few, ones[:10]) for _ in range(2))
    assert first == again
    assert first.low <= first.median <= first.high
    wide, narrow = first, protocol.ratio(many, ones)
    assert narrow.high - narrow.low < wide.high - wide.low


def test_spread_is_median_percentiles_and_minimum():
    assert protocol.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == protocol.Spread(3.0, 1.8, 4.2, 1.0)


def test_samples_of_different_rounds_are_refused():
    with pytest.raises(ValueError, match="same rounds, got 1 and 2"):
        protocol.ratio([1.0], [1.0, 2.0])


def test_a_short_call_repeats_until_the_sample_is_long_enough():
    now, calls = [0.0], []

    def call() -> None:
        calls.append(1)
        now[0] += 10e-6

    timer = timers.CpuTimer(clock=lambda: now[0], shortest_sample_s=200e-6)
    sample = timer.sampler([timers.Prepared(call)])
    calls.clear()
    assert sample() == pytest.approx(10e-6)
    assert len(calls) == 1 + 20  # one brings the buffers back into the caches


def test_cores_of_other_processes_are_what_is_left_over(monkeypatch: pytest.MonkeyPatch):
    readings = iter([load._Reading(0.0, 100.0, 7.0), load._Reading(2.0, 103.0, 9.0)])
    monkeypatch.setattr(load, "_read", lambda: next(readings))
    assert load.LoadMeter().others() == pytest.approx(0.5)  # 3 s in all, 2 own, in 2 s


def test_too_short_a_time_gives_no_load(monkeypatch: pytest.MonkeyPatch):
    readings = iter([load._Reading(0.0, 100.0, 7.0), load._Reading(0.01, 100.1, 7.0)])
    monkeypatch.setattr(load, "_read", lambda: next(readings))
    assert load.LoadMeter().others() is None


# ---------------------------------------------------------------------------- shapes and contenders


def test_bytes_are_those_of_the_model():
    """L8: q, k read and written, a float32 table row, an int64 position; partial: less in place."""
    assert SHAPES["L8"].bytes(1, 2, IN_PLACE) == 21000
    assert SHAPES["P4"].bytes(1, 2, IN_PLACE) == 12680
    assert SHAPES["P4"].bytes(1, 2, OUT_FRESH) == 16776
    assert SHAPES["QV"].bytes(1, 2, IN_PLACE) == 16912 + 24 - 16
    assert SHAPES["L8"].copy_bytes(1, 2) == 20480


def test_default_matrix_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = shapes.cells("cpu")
    assert {cell.shape.id for cell in found} == {"L8", "DS", "P4", "GJ"}
    assert {cell.threads for cell in found} == {1, 2}
    assert {(c.shape.id, c.dtype) for c in found if c.tokens == 8192 or c.dtype == "float16"} == {
        ("L8", "float32"), ("L8", "bfloat16"), ("L8", "float16"),
    }  # fmt: skip
    assert len({cell.tokens for cell in found if cell.shape.id == "P4"}) == 5
    assert len(shapes.cells("cpu", quick=True)) == 6


@pytest.mark.parametrize("shape", ["L8", "P4", "GJ", "QV", "FX"])
def test_formulas_rotate_like_float64(shape: str):
    """The peers that come with torch alone, and ours, on each kind of shape."""
    case, checked = Case(Cell(SHAPES[shape], "float32", 5, 1), CPU), 0
    for provider in [*providers.ours(), *peers(case.cell, CPU, ("hf_eager",))]:
        result = provider.prepare(case).result
        checked += result is not None
        if result is not None:
            case.check(result(), rotated=provider.rotated, steps=provider.steps)
    assert checked > len(providers.ours())


def test_slices_of_wider_rows_are_rotated_where_they_lie():
    case = Case(Cell(SHAPES["DS"], "bfloat16", 3, 1), CPU)
    assert case.q.stride() == (128 * 192, 192, 1)
    for provider in providers.ours():
        result = provider.prepare(case).result
        assert result is not None
        case.check(result(), rotated=True, steps=1)


@pytest.mark.parametrize("shape", ["L8", "GJ"])
def test_parts_written_apart_join_to_the_rotation(shape: str):
    case = Case(Cell(SHAPES[shape], "float32", 5, 1), CPU)
    cos, sin = (x[:, None] for x in case.cos_sin(full=False))
    half = case.cell.shape.style == "half"
    apart = formulas.half_apart if half else formulas.interleaved_apart
    join = formulas.join_half if half else formulas.stack_pairs
    parts = apart(case.q, case.k, cos, sin)
    case.check((join(*parts[:3]), join(*parts[3:])), rotated=True, steps=4)


@pytest.mark.parametrize(
    ("module", "width"), [("llama.modeling_llama", 16), ("phi3.modeling_phi3", 12)]
)
def test_half_formula_is_transformers_own(module: str, width: int):
    """Bit for bit, on the view that attention makes, also where only part of a head rotates."""
    theirs = importlib.import_module(f"transformers.models.{module}").apply_rotary_pos_emb
    q, k = (randn(1, 7, heads, 16).transpose(1, 2) for heads in (3, 2))
    cos, sin = randn(1, 7, width, seed=1), randn(1, 7, width, seed=2)
    expected = theirs(q, k, cos, sin)
    assert all(
        torch.equal(a, b)
        for a, b in zip(formulas.half(q, k, cos[:, None], sin[:, None]), expected, strict=True)
    )


def test_interleaved_formula_is_gpt_js_own():
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    q, k = (randn(1, 7, heads, 16) for heads in (3, 2))
    cos, sin = randn(1, 7, 8, seed=1), randn(1, 7, 8, seed=2)
    wide = [x.repeat_interleave(2, dim=-1)[:, :, None] for x in (cos, sin)]
    result = formulas.interleaved(q, k, *wide)
    for x, y in zip((q, k), result, strict=True):
        assert torch.equal(y, apply_rotary_pos_emb(x, sin, cos))


@pytest.mark.parametrize("name", ["rotary_embedding_torch", "onnxruntime"])
def test_an_optional_peer_is_right_or_says_what_is_missing(name: str):
    case = Case(Cell(SHAPES["GJ"], "float32", 5, 1), CPU)
    (provider,) = peers(case.cell, CPU, (name,))
    needed = {"onnxruntime": ("onnxruntime", "onnx")}.get(name, (name,))
    if all(importlib.util.find_spec(package) for package in needed):
        result = provider.prepare(case).result
        assert result is not None
        case.check(result(), rotated=True, steps=provider.steps)
    else:
        with pytest.raises(providers.Missing, match="pip install"):
            provider.prepare(case)


# ------------------------------------------------------------------------------- rows of one cell


class FakeTimer:
    """Every sample of the n-th provider that it is asked for takes n microseconds."""

    input_sets = 1
    cache = "warm"

    def __init__(self) -> None:
        self._count = 0

    def sampler(self, prepared: object) -> Callable[[], float]:
        self._count += 1
        seconds = self._count * 1e-6
        return lambda: seconds


FRESH = next(provider for provider in providers.ours() if provider.form == OUT_FRESH)


def broken(case: Case) -> timers.Prepared:
    """Rotates the wrong way: cos and sin of the negative position."""
    backwards = Case(case.cell, CPU)
    backwards.positions = -case.positions
    return FRESH.prepare(backwards)


def unwritten(case: Case) -> timers.Prepared:
    q, k = case.poisoned()
    return timers.Prepared(lambda: None, lambda: (q, k))


def absent(case: Case) -> timers.Prepared:
    raise providers.Missing("nowhere cannot be imported; pip install nowhere")


def raising(case: Case) -> timers.Prepared:
    raise RuntimeError("no such kernel\nand a long trace")


def found_rows(*extra: providers.Provider) -> dict[str, Row]:
    case = Case(SMALL, CPU)
    everybody = [*providers.ours()[:1], *providers.ceilings(SMALL, CPU), *extra]
    return {row.provider: row for row in matrix.cell_rows([case], everybody, FakeTimer(), 3)}


@pytest.mark.parametrize(
    ("prepare", "note"),
    [
        (broken, "wrong: q is "),
        (unwritten, "wrong: q has elements that were never written"),
        (absent, "not run: nowhere cannot be imported; pip install nowhere"),
        (raising, "not run: RuntimeError: no such kernel"),
    ],
)
def test_who_is_wrong_or_missing_gets_a_line_without_a_number(
    prepare: Callable[[Case], timers.Prepared], note: str
):
    found = found_rows(providers.Provider("twin", OUT_FRESH, "peer", prepare))
    assert found["twin"].y_50 is None
    assert found["twin"].note.startswith(note)
    assert found["rope_compile"].y_50 == pytest.approx(1.0)


def test_a_copy_that_does_not_copy_is_refused():
    case = Case(SMALL, CPU)
    with pytest.raises(Wrong, match="beyond its error bound"):
        case.check((case.q + 1e-7, case.k), rotated=False, steps=4)


def test_numbers_of_a_cell_follow_from_its_samples():
    """Ours 1 us, copy 2, clone 3, multiply 4: times, rates, shares and ratios."""
    row = found_rows()["rope_compile"]
    moved, copied = SMALL.bytes(IN_PLACE), SMALL.copy_bytes
    assert (row.y_50, row.rounds, row.metric, row.unit) == (pytest.approx(1.0), 3, "time", "us")
    assert row.gb_per_s == pytest.approx(moved / 1e-6 / 1e9)
    assert row.copy_gb_per_s == pytest.approx(copied / 2e-6 / 1e9)
    assert row.share_of_copy == pytest.approx(2 * moved / copied)
    assert (row.ratio_to, row.ratio) == ("multiply", pytest.approx(4.0))


def test_the_noise_row_is_ours_against_ourselves():
    case = Case(SMALL, CPU)
    found = matrix.cell_rows([case], providers.ours(), FakeTimer(), 3)
    (noise,) = [row for row in found if row.provider == "rope_compile_again"]
    assert (noise.ratio_to, noise.ratio) == ("rope_compile", pytest.approx(1 / 4))


def test_parameters_of_the_process_are_put_back():
    threads = torch.get_num_threads()
    block = matrix.Block([replace(SMALL, threads=threads + 1)])
    (found,) = matrix.run_block(block, CPU, peer_names=(), rounds=1)
    assert found[0].threads == threads + 1
    assert torch.get_num_threads() == threads


# ------------------------------------------------------------------------------------------- files

HEADER = (
    "kernel,provider,mode,metric,unit,x,y_50,y_20,y_80,device,timestamp,version,run_id,shape,"
    "tokens,q_heads,k_heads,head_dim,rotary_dim,style,layout,dtype,form,positions,cache,threads,"
    "bytes,gb_per_s,copy_gb_per_s,share_of_copy,ratio_to,ratio,ratio_low,ratio_high,rounds,torch,"
    "triton,note"
)


def made(run_id: str = "r", **columns: object) -> Row:
    """A row of the cell that the CPU targets speak of."""
    base = replace(
        matrix.describe(Cell(SHAPES["L8"], "float32", 4096, 2)),
        provider="rope_compile",
        device="cpu: made up",
        torch="2.13.0",
        version="0.1.0",
        rounds=30,
    )
    return replace(base, run_id=run_id, **columns)  # type: ignore[arg-type]


def test_the_columns_are_exactly_these():
    assert rows.text([]).strip() == HEADER


def test_rows_are_appended_and_read_back(tmp_path: Path):
    path = tmp_path / "bench.csv"
    first = made("a", y_50=1.5, note='says "no", and more', form=IN_PLACE)
    second = made("b", y_50=None, note="not run: nowhere")
    rows.append(path, [first])
    rows.append(path, [second])
    assert path.read_text().splitlines()[0] == HEADER
    assert sum(line == HEADER for line in path.read_text().splitlines()) == 1
    assert rows.read(path) == [first, second]
    assert rows.last_run(rows.read(path)) == [second]
    assert len(list(csv.reader(io.StringIO(path.read_text())))) == 3


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must have the 38 columns"):
        rows.append(path, [made()])
    assert path.read_text() == "a,b\n1,2\n"


def table_rows() -> list[Row]:
    ours = made(form=IN_PLACE, y_50=5000.0, share_of_copy=1.4, ratio_to="hf_eager", ratio=12.0)
    return [
        ours,
        replace(ours, tokens=512.0, x=512.0, y_50=400.0, share_of_copy=1.2, ratio=11.0),
        made(provider="hf_eager", form=OUT_FRESH, y_50=60000.0, share_of_copy=0.1),
        made(provider="copy", form=OUT_EXISTING, y_50=8000.0, share_of_copy=1.0),
        made(provider="onnxruntime", form=OUT_EXISTING, note="not run: nowhere"),
    ]


def test_markdown_is_the_table_of_the_readme():
    lines = report.as_markdown(table_rows()).splitlines()
    assert lines[0] == "| model | dtype | tokens | in place | formula, eager | copy |"
    assert lines[2] == (
        "| Llama-3-8B, Qwen3-8B | float32 | 4096 | 5.00 ms (12.0x, 140%) | 60.0 ms | 8.00 ms |"
    )
    assert lines[3].endswith("| 512 | 400 us (11.0x, 120%) | - | - |")
    assert "cpu: made up, 2 threads, torch 2.13.0, rope_compile 0.1.0, run r" in lines[5]


def test_text_has_a_line_for_who_did_not_run():
    text = report.as_text(table_rows())
    assert "onnxruntime, not run: nowhere" in text
    assert "G1 to G11" in text


@pytest.mark.parametrize(("cores", "loud"), [(0.1, False), (0.9, True)])
def test_a_run_beside_a_busy_process_is_to_be_discarded(cores: float, loud: bool):
    busy = [replace(row, note=f"others used {cores:.2f} cores") for row in table_rows()]
    for text in (report.as_text(busy), report.as_markdown(busy)):
        assert ("DISCARD THIS RUN" in text) == loud


def test_plot_is_a_picture_with_lines_in_it(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib")
    path, empty = tmp_path / "bench.png", tmp_path / "empty.png"
    plot.draw(table_rows(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    colours = imread(path)[..., :3].reshape(-1, 3)
    ours = torch.tensor([0xC2, 0x41, 0x0C]) / 255
    assert int((abs(torch.tensor(colours) - ours).sum(-1) < 0.05).sum()) > 200
    with pytest.raises(ValueError, match="shares of copy"):
        plot.draw([made(y_50=1.0)], empty)
    assert not empty.exists()


# ----------------------------------------------------------------------------------------- verdicts


def verdict_of(name: str, *found: Row) -> targets.Target:
    return next(target for target in targets.verdicts(found) if target.id == name)


def shares(fp32: float, bf16: float) -> Iterator[Row]:
    for dtype, share in (("float32", fp32), ("bfloat16", bf16)):
        yield made(dtype=dtype, form=IN_PLACE, y_50=1.0, share_of_copy=share)


@pytest.mark.parametrize(
    ("fp32", "bf16", "verdict"),
    [
        (0.75, 0.60, "met"),
        (1.4, 1.2, "met, stretch too"),
        (1.4, 0.59, "MISSED"),
        (0.74, 1.2, "MISSED"),
    ],
)
def test_the_worst_number_of_a_target_decides(fp32: float, bf16: float, verdict: str):
    target = verdict_of("C1", *shares(fp32, bf16))
    assert target.verdict == verdict
    assert (target.must, target.measured) == (">= 0.75 / 0.6", f"{fp32:.3g} / {bf16:.3g}")


def test_a_target_without_rows_is_not_measured():
    assert verdict_of("C1").verdict == "not measured"
    half = verdict_of("C1", *list(shares(1.4, 1.2))[:1])
    assert (half.verdict, half.measured) == ("met, in part", "1.4 / -")
    assert verdict_of("G1", *shares(1.0, 1.0)).measured == "no GPU"


@pytest.mark.parametrize(("ratio", "verdict"), [(0.96, "met"), (0.94, "MISSED")])
def test_everywhere_means_the_worst_cell(ratio: float, verdict: str):
    good = made(form=IN_PLACE, y_50=1.0, ratio_to="hf_compiled", ratio=3.0)
    bad = replace(good, shape="GJ", tokens=32.0, ratio=ratio)
    target = verdict_of("C8", good, bad)
    assert target.verdict == verdict
    assert "(GJ float32 T=32 2 thr in place)" in target.measured


def test_fresh_outputs_of_fresh_pages_are_compared_with_clone():
    row = made(form=OUT_FRESH, y_50=1.0, share_of_copy=0.4, ratio_to="clone", ratio=1.0)
    target = verdict_of("C3", row)
    assert "of clone 1.01 / -" in target.measured
    assert target.verdict == "met, in part"


def test_the_fallback_has_a_target_of_its_own():
    row = made(provider=children.FALLBACK, y_50=1.0, ratio_to="hf_eager", ratio=0.5)
    assert verdict_of("C9", row).verdict == "MISSED"
    assert verdict_of("C9", replace(row, ratio=1.1)).verdict == "met"


@pytest.mark.parametrize(("breaks", "verdict"), [(0.0, "met"), (1.0, "MISSED")])
def test_counts_are_exact(breaks: float, verdict: str):
    row = made(unit="count", form=OUT_FRESH)
    found = [
        replace(row, metric="allocations", y_50=2.0),
        replace(row, metric="graph_breaks", y_50=breaks),
    ]
    assert verdict_of("B2", *found).verdict == verdict


def test_memory_is_a_share_of_the_eager_formulas():
    row = made(metric="peak_memory", unit="byte", y_50=1.0, ratio_to="hf_eager")
    found = [
        replace(row, form=IN_PLACE, ratio=1 / 0.41),
        replace(row, form=OUT_FRESH, ratio=1 / 0.55),
    ]
    assert verdict_of("B4", *found).verdict == "MISSED"


GPU = {"device": "cuda: made up", "dtype": "bfloat16", "threads": None}


@pytest.mark.parametrize(
    ("us", "ratio", "verdict"),
    [(1.4, 0.9, "met, stretch too"), (1.9, 0.8, "met"), (2.1, 0.9, "MISSED"), (1.4, 0.7, "MISSED")],
)
def test_decode_is_judged_by_itself_and_beside_an_empty_node(us: float, ratio: float, verdict: str):
    row = made(**GPU, tokens=8.0, cache="warm", y_50=us, ratio_to="empty_node", ratio=ratio)
    assert verdict_of("G9", row).verdict == verdict
    # Neither more tokens, nor a backward pass, nor another reference speaks of decoding.
    for other in ({"tokens": 129.0}, {"mode": "backward"}, {"ratio_to": "hf_eager"}):
        assert verdict_of("G9", replace(row, **other)).verdict == "not measured"


@pytest.mark.parametrize(
    ("layout", "ratio", "verdict"),
    [("THD", 1.05, "met"), ("THD", 0.9, "MISSED"), ("BHSD", 1.9, "met"), ("BHSD", 1.5, "MISSED")],
)
def test_liger_has_a_limit_for_each_layout(layout: str, ratio: float, verdict: str):
    other = "BHSD" if layout == "THD" else "THD"
    row = made(**GPU, y_50=1.0, ratio_to="liger", layout=layout, ratio=ratio)
    assert verdict_of("G7", row, replace(row, layout=other, ratio=1.9)).verdict == verdict


def test_a_backward_pass_is_no_share_of_copy():
    row = made(**GPU, form=IN_PLACE, cache="cold", bytes=2e8, y_50=1.0, share_of_copy=0.95)
    assert verdict_of("G1", row).measured.startswith("in place 0.95")
    assert verdict_of("G1", replace(row, mode="backward")).verdict == "not measured"


# ------------------------------------------------------------------------------------------- counts


def test_every_allocation_is_seen_and_its_release():
    def call() -> None:
        first = torch.empty(100)
        del first
        torch.empty(7, dtype=torch.int64)

    assert counts.memory_events(call, CPU) == [400, -400, 56, -56]


def test_size_one_forces_a_graph_for_each_of_its_places():
    assert counts.forced_recompiles((1, 2, 3), (1, 7, 8)) == 3
    assert counts.forced_recompiles((2, 3), (1, 7)) == 1
    assert counts.forced_recompiles((2, 3), (7, 8)) == 0


@pytest.mark.usefixtures("fresh_compiler")
def test_a_recompile_would_be_counted(monkeypatch: pytest.MonkeyPatch):
    """The twin specialises on every size, and is charged for it."""

    class Specialising(torch.nn.Module):
        cos_sin_cache = torch.zeros(1)

        def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q * int(q.shape[1])

    def static(x: Tensor, dim: int) -> None:
        torch._dynamo.mark_static(x, dim)

    assert counts._graphs(Specialising(), (2, 3, 4), (2,), static) == 3


# ------------------------------------------------------------------------------- the command itself

TINY = ("bench", "--quick", "--shapes", "L8", "--dtypes", "float32", "--tokens", "1,8")


def test_a_tiny_run_goes_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without what compiles or starts processes; the CSV gives the same table again."""
    path, markdown = tmp_path / "bench.csv", tmp_path / "table.md"
    arguments = ("--rounds", "3", "--threads", "1", "--peers", "hf_eager", "--stages", "matrix")
    status = cli.main([*TINY, *arguments, "--csv", str(path), "--markdown", str(markdown)])
    output = capsys.readouterr()
    assert status == 0
    assert "[1/1] L8 float32, 1 thread\n" in output.err
    assert "hf_eager" in output.out
    assert "C1" in output.out
    found = rows.read(path)
    assert {row.tokens for row in found} == {1.0, 8.0}
    assert {row.form for row in found if row.provider == "rope_compile"} == {IN_PLACE, OUT_FRESH}
    assert all(row.y_50 for row in found)

    assert cli.main(["bench", "--from-csv", str(path), "--markdown", "-"]) == 0
    assert capsys.readouterr().out == markdown.read_text()
    assert cli.main(["bench", "--from-csv", str(path), "--tokens", "8", "--markdown", "-"]) == 0
    assert "| 8 |" in (one := capsys.readouterr().out)
    assert "| 1 |" not in one
    assert cli.main(["bench", "--from-csv", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["rows"]) == len(found)
    assert {target["id"] for target in facts["targets"]} >= {"C1", "B1", "G1"}


@pytest.mark.parametrize(
    ("prepare", "note"), [(broken, "wrong: q is"), (raising, "wrong: RuntimeError: no such kernel")]
)
def test_a_wrong_result_of_ours_ends_with_1(
    prepare: Callable[[Case], timers.Prepared],
    note: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    wrong = providers.Provider("rope_compile", OUT_FRESH, "ours", prepare, steps=1)
    monkeypatch.setattr(providers, "ours", lambda: [wrong])
    arguments = ("--rounds", "1", "--threads", "1", "--peers", "none", "--stages", "matrix")
    assert cli.main([*TINY, *arguments]) == 1
    line = f"rope_compile out_fresh, L8 float32 at 8 tokens: {note}"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--shapes", "L9"), "--shapes must be from L8, L70"),
        (("--dtypes", "fp8"), "--dtypes must be from float32, bfloat16, float16, got fp8"),
        (("--peers", "nobody"), "--peers must be from hf_eager"),
        (("--stages", "all"), "--stages must be from matrix"),
        (("--tokens", "0"), "--tokens must be at least 1, got 0"),
        (("--tokens", "1;2"), "must be whole numbers with commas between them, got '1;2'"),
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("--from-csv", "/no/such.csv"), "/no/such.csv must be a readable file"),
        (("--csv", __file__), "must have the 38 columns of this benchmark"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["bench", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert sentence in line


def test_without_matplotlib_a_plot_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    assert cli.main([*TINY, "--plot", "x.png"]) == 2
    assert "a plot needs matplotlib; pip install matplotlib" in capsys.readouterr().err


def test_help_teaches_by_examples_that_parse(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    examples = [line for line in text.splitlines() if line.startswith("  rope-compile bench ")]
    assert len(examples) >= 5
    for line in examples:
        words = line.strip().split("  ")[0].split()
        words = words[: words.index(">")] if ">" in words else words
        cli._parser().parse_args(words[1:])
    for name in (*bench.STAGES, *SHAPES):
        assert name in text
