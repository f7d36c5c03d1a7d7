"""Several threads at once: one build, no half-filled table, live look-ups, clean guards."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch

import rope_compile as rc
from rope_compile import RopeConfig, capture_guard, get_rope, table
from rope_compile.factory import registry
from rope_compile.table import RopeTable

from support import randn

THREADS = 8


@pytest.fixture(autouse=True)
def _empty_registry():
    registry.clear()
    yield
    registry.clear()


def config(rows: int = 256, **fields) -> RopeConfig:
    return RopeConfig(head_dim=16, max_position=rows, **fields)


def together(work: Callable[[int], object], threads: int = THREADS) -> list[object]:
    """Run ``work(i)`` in threads that start at one moment; raise what any of them raised."""
    barrier = threading.Barrier(threads)
    results: list[object] = [None] * threads
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait(timeout=60)
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def test_an_exception_in_a_thread_reaches_the_test() -> None:
    """The twin of every test below: a failure in a thread is a failure."""

    def work(index: int) -> None:
        assert index != 5, "thread five"

    with pytest.raises(AssertionError, match="thread five"):
        together(work)


def count_fills(monkeypatch: pytest.MonkeyPatch, delay_s: float = 0.0) -> list[int]:
    """Rows of every table that is filled from now on; each fill takes at least ``delay_s``."""
    fills: list[int] = []
    fill = table._fill

    def counting(target, *arguments):
        fills.append(target.shape[0])
        if target.device.type != "meta":
            target.fill_(float("nan"))  # and not rows that memory happens to hold
        time.sleep(delay_s)
        fill(target, *arguments)

    monkeypatch.setattr(table, "_fill", counting)
    return fills


def test_a_concurrent_first_call_builds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fills = count_fills(monkeypatch, delay_s=0.05)
    found = together(lambda _: get_rope(config(4096), "cpu"))
    assert len({id(rope) for rope in found}) == 1
    assert fills == [4096]


def test_a_registry_without_a_lock_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: look up, build, store."""
    fills = count_fills(monkeypatch, delay_s=0.05)
    entries: dict[RopeConfig, rc.RotaryEmbedding] = {}

    def naive(_: int) -> None:
        if config() not in entries:
            entries[config()] = rc.RotaryEmbedding(config(), "cpu")

    together(naive)
    assert len(fills) > 1


def test_a_hit_does_not_wait_for_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    known = get_rope(config(), "cpu")
    filling, finish = threading.Event(), threading.Event()
    fill = table._fill

    def slow(target, *arguments):
        filling.set()
        assert finish.wait(timeout=60)
        fill(target, *arguments)

    monkeypatch.setattr(table, "_fill", slow)
    builder = threading.Thread(target=lambda: get_rope(config(512), "cpu"))
    builder.start()
    assert filling.wait(timeout=60)
    try:
        assert get_rope(config(), "cpu") is known
    finally:
        finish.set()
        builder.join(timeout=60)
    assert get_rope(config(512), "cpu").capacity == 512


def torn(built: RopeTable, final: torch.Tensor) -> bool:
    """Whether a reader would see rows that are not the finished ones."""
    seen = built.cos_sin_cache
    return not torch.equal(seen, final[: seen.shape[0]])


def test_no_reader_sees_a_half_filled_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads grow, four read; every table seen is complete, and one size is left."""
    count_fills(monkeypatch, delay_s=0.001)  # time to be seen half filled
    built = RopeTable(config(128), "cpu")
    final = RopeTable(config(128), "cpu", capacity=8192).cos_sin_cache
    first = built.cos_sin_cache
    growing = threading.Semaphore(0)

    def work(index: int) -> int:
        if index < 4:
            for rows in range(128 * (index + 1), 8193, 4 * 128):
                built.reserve(rows)
            built.reserve(8192)
            growing.release()
            return 0
        reads = 0
        while not (growing.acquire(blocking=False) and reads >= 50):
            assert not torn(built, final)
            assert built.dead() is None
            reads += 1
        return reads

    reads = together(work)
    assert sum(reads) >= 200
    assert built.capacity == 8192
    assert torch.equal(built.cos_sin_cache, final)
    assert torch.equal(first, final[:128])


def test_while_a_table_is_filled_readers_see_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = RopeTable(config(128), "cpu")
    before, fill, seen = built.cos_sin_cache, table._fill, []

    def watched(*arguments: object) -> None:
        seen.append(built.cos_sin_cache is before)
        fill(*arguments)
        seen.append(built.cos_sin_cache is before)

    monkeypatch.setattr(table, "_fill", watched)
    built.reserve(1000)
    assert seen == [True, True]
    assert built.cos_sin_cache is not before


def test_a_table_published_before_it_is_filled_would_be_found() -> None:
    """Wrong twin: assign the new buffer, then fill it."""
    built = RopeTable(config(128), "cpu")
    final = RopeTable(config(128), "cpu", capacity=1024).cos_sin_cache
    built._buffers["cos_sin_cache"] = torch.empty(1024, 16).fill_(7.0)
    assert torn(built, final)


def test_concurrent_growth_reallocates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = RopeTable(config(), "cpu")
    fills = count_fills(monkeypatch, delay_s=0.02)
    grew = together(lambda _: built.reserve(4096))
    assert sorted(grew) == [False] * (THREADS - 1) + [True]
    assert fills == [4096]


def test_concurrent_calls_equal_calls_alone() -> None:
    """Bit for bit, while another thread grows and refills the table."""
    rope = get_rope(config(), "cpu")
    expected = [rope(torch.arange(9) + 40 * i, randn(9, 2, 16, seed=i))[0] for i in range(THREADS)]
    inside = [torch.arange(9) + 40 * i < 256 for i in range(THREADS)]

    def work(index: int) -> None:
        if index == 0:
            for rows in range(256, 4096, 128):
                rope.reserve(rows)
                rope.rebuild_()
            return
        q, positions = randn(9, 2, 16, seed=index), torch.arange(9) + 40 * index
        for _ in range(50):
            out, _ = rope(positions, q)
            # Computed first and read later, a row may differ in the last bit of its cosine.
            assert torch.equal(out[inside[index]], expected[index][inside[index]])
            torch.testing.assert_close(out, expected[index], rtol=0, atol=2e-6)

    together(work)


def test_a_lookup_beside_a_death_is_live() -> None:
    """Whoever looks up while an entry is killed again and again gets a live table."""
    final = RopeTable(config(), "cpu").cos_sin_cache

    def work(index: int) -> None:
        for _ in range(50):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rope = get_rope(config(), "cpu")
            if index == 0:
                rope.table._buffers["cos_sin_cache"] = final.to("meta")
            else:
                seen = rope.cos_sin_cache
                assert seen.device.type == "meta" or torch.equal(seen, final)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together(work)
        assert torch.equal(get_rope(config(), "cpu").cos_sin_cache, final)


def test_a_meta_context_is_of_one_thread() -> None:
    """One thread builds under meta while others build for real: no entry crosses over."""

    def work(index: int) -> str:
        if index % 2:
            return get_rope(config(), "cpu").device.type
        with torch.device("meta"):
            return get_rope(config()).device.type

    for _ in range(10):
        assert together(work) == ["meta", "cpu"] * (THREADS // 2)
    assert get_rope(config()).device.type == "cpu"


@pytest.mark.parametrize("given", [True, False])
def test_guards_of_several_threads(given: bool) -> None:
    """While any thread is inside, nobody grows the table; after the last one, everybody may."""
    rope = get_rope(config(), "cpu")
    barrier = threading.Barrier(THREADS)

    def work(index: int) -> None:
        for _ in range(20):
            with capture_guard(rope if given else None):
                barrier.wait(timeout=60)
                with pytest.raises(RuntimeError, match="inside capture_guard"):
                    rope.reserve(1000)
                barrier.wait(timeout=60)

    together(work)
    assert rope.table._frozen == 0
    assert rope.reserve(1000)


def test_moves_of_a_shared_module_by_several_threads() -> None:
    rope = get_rope(config(), "cpu")
    before = rope.cos_sin_cache

    def work(index: int) -> None:
        for _ in range(20):
            rope.to("meta" if index % 2 else torch.bfloat16)
            assert rope.cos_sin_cache is before

    together(work)
    assert [str(built.device) for built in rope.tables.values()] == ["cpu", "meta"]
