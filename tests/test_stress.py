"""Long and crowded runs: one registry entry under eight threads, 20,000 calls, 32 speculations.

Memory may not grow: no tensor, at most `BLOCKS` Python memory blocks and `RSS_BYTES` of resident
memory over a whole soak, which is a block in ten calls and 210 bytes a call.
"""

from __future__ import annotations

import gc
import mmap
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_threads import count_fills, together
from torch import Tensor

import rope_compile as rc
from rope_compile import CapturePlan, RopeConfig, RotaryEmbedding, get_rope, prepare_for_capture
from rope_compile.demo.decoder import Decoder, DecoderSpec, FormulaRope, build_target, draft_of
from rope_compile.demo.speculation import Party, greedy, speculate
from rope_compile.factory import registry
from rope_compile.table import RopeTable

from support import generator, randn

# A dead entry is looked up again and again here; that each is announced is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore:get_rope discards a dead entry")

WIDTH = 16


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """An empty registry, and no threads of torch's own below ours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    registry.clear()
    yield
    registry.clear()
    torch.set_num_threads(threads)


def config(rows: int = 256, **fields) -> RopeConfig:
    return RopeConfig(head_dim=WIDTH, max_position=rows, **fields)


# ----------------------------------------------------------------------- eight threads, one entry


class Gate:
    """Many may be inside, or one alone: memory is freed only when no kernel can be reading it."""

    def __init__(self) -> None:
        self._inside, self._changed = 0, threading.Condition()

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._inside, timeout=60)
            yield


class Crowd:
    """What a thread may do to one registry entry, and how often each thing was done."""

    LARGEST = 8192

    def __init__(self) -> None:
        self.gate = Gate()
        self.done: dict[str, int] = {}
        self._count = threading.Lock()
        self.final = RopeTable(config(), "cpu", capacity=self.LARGEST).cos_sin_cache
        fresh = RotaryEmbedding(config(), "cpu")
        # Inside the smallest table and outside the largest: rows between are read or computed, as
        # the moment has it, and may differ in the last bit.
        self.positions = torch.tensor([0, 7, 255, -1, 10**6, 2**31 - 1])
        self.q, self.k = randn(6, 3, WIDTH, seed=1), randn(6, 2, WIDTH, seed=2)
        self.expected = {
            inverse: fresh(self.positions, self.q, self.k, inverse=inverse)
            for inverse in (False, True)
        }

    def count(self, name: str) -> None:
        with self._count:
            self.done[name] = self.done.get(name, 0) + 1

    def call(self, draw: random.Random) -> None:
        """Fetch and rotate until a live table answers; what answers is right to the last bit."""
        inverse, in_place = draw.random() < 0.5, draw.random() < 0.5
        for _ in range(1000):
            q, k = self.q.clone(), self.k.clone()
            try:
                with self.gate.shared():
                    rope = get_rope(config(), "cpu")
                    if in_place:
                        rope.apply_(self.positions, q, k, inverse=inverse)
                    else:
                        q, k = rope(self.positions, q, k, inverse=inverse)
            except ValueError as error:  # killed between the two: refused by name
                if "must be on one device" not in str(error):
                    raise
                self.count("refused")
                continue
            for found, right in zip((q, k), self.expected[inverse], strict=True):
                assert torch.equal(found, right)
            return self.count("call")
        raise AssertionError("no live table in 1000 look-ups")

    def fetch(self, draw: random.Random) -> None:
        with self.gate.shared():
            rope = get_rope(config(), "cpu")
            seen = rope.cos_sin_cache
            assert rope.capacity % 128 == 0
            if seen.device.type == "cpu":
                assert torch.equal(seen, self.final[: seen.shape[0]])

    def grow(self, draw: random.Random) -> None:
        with self.gate.shared():
            get_rope(config(), "cpu").reserve(draw.randrange(self.LARGEST))

    def move_to_meta(self, draw: random.Random) -> None:
        buffers = get_rope(config(), "cpu").table._buffers
        buffers["cos_sin_cache"] = buffers["cos_sin_cache"].to("meta")

    def free(self, draw: random.Random) -> None:
        with self.gate.alone():
            rows = get_rope(config(), "cpu").cos_sin_cache
            if rows.device.type == "cpu":
                rows.untyped_storage().resize_(0)

    def work(self, index: int) -> None:
        draw = random.Random(index)
        names, weights = ["call", "fetch", "grow", "move_to_meta", "free"], [60, 15, 10, 10, 5]
        for name in draw.choices(names, weights, k=250):
            getattr(self, name)(draw)
            if name != "call":
                self.count(name)


def test_eight_threads_over_one_entry() -> None:
    """They grow, call, kill and fetch it; every result is right, and it ends alive."""
    crowd = Crowd()
    together(crowd.work)
    assert sum(n for name, n in crowd.done.items() if name != "refused") == 8 * 250
    assert min(crowd.done[name] for name in ("call", "fetch", "grow", "move_to_meta", "free")) > 50
    crowd.call(random.Random(0))
    crowd.fetch(random.Random(0))
    assert get_rope(config(), "cpu").table.dead() is None


def test_a_wrong_row_under_threads_would_be_found() -> None:
    """Wrong twin: a table with one row of another value."""
    crowd = Crowd()
    get_rope(config(), "cpu").cos_sin_cache[7, 0] += 1e-6
    with pytest.raises(AssertionError):
        together(lambda index: crowd.call(random.Random(index)))


# ------------------------------------------------------------------------------------------- soak

CALLS = 20_000
BLOCKS = 2_000
RSS_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Memory:
    """What this process holds."""

    tensors: int
    blocks: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        gc.collect()
        tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(tensors, sys.getallocatedblocks(), pages * 4096)

    def grown_since(self, before: Memory) -> list[str]:
        """The measures that grew by more than their bound."""
        bounds = {"tensors": 0, "blocks": BLOCKS, "rss_bytes": RSS_BYTES}
        grown = {name: getattr(self, name) - getattr(before, name) for name in bounds}
        return [f"{name} by {by}" for name, by in grown.items() if by > bounds[name]]


def soak(call: Callable[[int], object], calls: int, warm_up: int) -> list[str]:
    """What grew over ``calls`` calls, after ``warm_up`` others."""
    for index in range(warm_up):
        call(index)
    before = Memory.now()
    for index in range(calls):
        call(index)
    return Memory.now().grown_since(before)


def mixed_calls() -> list[Callable[[], object]]:
    plain = get_rope(config(1024), "cpu")
    partial = get_rope(config(rotary_dim=8, rotary_offset=4, style="interleaved"), "cpu")
    axes = get_rope(config(axes=rc.ChunkedAxes((3, 5))), "cpu")
    inside, outside = torch.arange(9) + 100, torch.arange(9) + 10**6
    x = {
        dtype: randn(9, 3, WIDTH, seed=1, dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    }
    k = randn(9, 2, WIDTH, seed=2)
    leaf = x[torch.float32].clone().requires_grad_()
    compiled = torch.compile(plain, fullgraph=True, backend="eager")

    def backward() -> None:
        leaf.grad = None
        plain(inside, leaf, k)[0].sum().backward()

    return [
        lambda: plain(inside, x[torch.float32], k),
        lambda: plain(outside, x[torch.float64], k, inverse=True),
        lambda: plain.apply_(inside, x[torch.float32], k),
        lambda: plain.apply_(inside, x[torch.float32], k, inverse=True),
        lambda: partial(inside, x[torch.bfloat16]),
        lambda: partial.apply_(outside, x[torch.float16]),
        lambda: axes(torch.stack((inside, outside)), x[torch.float16], x[torch.bfloat16]),
        lambda: rc.apply_rope(
            x[torch.float32], None, outside, plain.cos_sin_cache, inv_freq=plain.inv_freq
        ),
        lambda: plain.reserve(1024),
        lambda: get_rope(config(1024), "cpu"),
        lambda: compiled(inside, x[torch.float32], k),
        backward,
    ]


@pytest.mark.usefixtures("fresh_compiler")
def test_memory_stays_constant_over_20000_calls() -> None:
    calls = mixed_calls()
    assert soak(lambda index: calls[index % len(calls)](), CALLS, warm_up=2_400) == []


LOST_BYTES = 256 * 1024


def leak_tensor(kept: list[object]) -> None:
    kept.append(get_rope(config(), "cpu")(torch.arange(2), torch.ones(2, 1, WIDTH)))


def leak_objects(kept: list[object]) -> None:
    kept.append((object(), object(), object()))


def leak_memory(kept: list[object]) -> None:
    """Outside of the heap, whose holes from earlier tests would hide it."""
    lost = mmap.mmap(-1, LOST_BYTES)
    lost.write(b"x" * LOST_BYTES)
    kept.append(lost)


@pytest.mark.parametrize(
    ("leak", "found"),
    [(leak_tensor, "tensors"), (leak_objects, "blocks"), (leak_memory, "rss_bytes")],
)
def test_a_leak_would_be_found(leak: Callable[[list[object]], None], found: str) -> None:
    """Wrong twins: a call that leaks a tensor, Python objects, or memory outside of Python."""
    kept: list[object] = []
    grown = soak(lambda index: leak(kept), 1_000, warm_up=10)
    assert any(entry.startswith(found) for entry in grown), grown


# -------------------------------------------------------------------------------------- speculation

SEQUENCES = 32
STEPS, DRAFT_TOKENS = 5, 2
INPUT_TOKENS = [1200 + 7 * i for i in range(SEQUENCES)]  # to 1417, past 1280 and 1408 rows
NEW_TOKENS = 24
ROWS = max(INPUT_TOKENS) + NEW_TOKENS + STEPS * DRAFT_TOKENS
SPEC = DecoderSpec(
    vocabulary=67, layers=2, hidden=48, heads=2, kv_heads=1, head_dim=WIDTH, intermediate=48
)
TARGET, DRAFT = config(1024), config(512)


class Growth:
    """Allocations of the two tables: by what ``reserve`` says, by address, and by fills."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ropes = {"target": get_rope(TARGET, "cpu"), "draft": get_rope(DRAFT, "cpu")}
        self._first = {name: rope.cos_sin_cache for name, rope in self.ropes.items()}
        self._held = {name: [rows] for name, rows in self._first.items()}
        self._lock = threading.Lock()
        self.said = dict.fromkeys(self.ropes, 0)
        self.fills = count_fills(monkeypatch)

    def reserve(self, rows: int) -> None:
        """What an engine does before a step whose positions end at ``rows``."""
        with self._lock:
            for name, rope in self.ropes.items():
                self.said[name] += rope.reserve(rows)
            self.look()

    def look(self) -> None:
        for name, rope in self.ropes.items():
            if all(rope.cos_sin_cache is not rows for rows in self._held[name]):
                # Held, so that no later table can lie at the same address.
                self._held[name].append(rope.cos_sin_cache)

    @property
    def moved(self) -> dict[str, int]:
        """How many addresses there were after the first."""
        return {name: len({x.data_ptr() for x in rows}) - 1 for name, rows in self._held.items()}


def build(rope: torch.nn.Module, draft_rope: torch.nn.Module) -> tuple[Decoder, Decoder]:
    target = build_target(SPEC, rope, torch.device("cpu"), seed=3)
    return target, draft_of(target, draft_rope)


def decode_all(growth: Growth) -> list[list[int]]:
    """32 speculations at once, each in a thread with caches of its own; all share both models."""
    target, draft = build(growth.ropes["target"], growth.ropes["draft"])

    def decode(tokens: int) -> list[int]:
        prompt = prompt_of(tokens)
        end = [tokens + STEPS * DRAFT_TOKENS]
        growth.reserve(end[0])

        def advance(added: int) -> None:
            end[0] += added
            growth.reserve(end[0])

        parties = [Party(m, m, m.new_cache(ROWS)) for m in (target, draft)]
        result = speculate(
            *parties, prompt, tokens + NEW_TOKENS, steps=STEPS, draft_tokens=DRAFT_TOKENS,
            after_round=advance,
        )  # fmt: skip
        assert result.highest_target_position > TARGET.max_position > DRAFT.max_position
        assert result.rounds >= 3
        return result.tokens

    with ThreadPoolExecutor(SEQUENCES) as pool:
        return list(pool.map(decode, INPUT_TOKENS))


def prompt_of(tokens: int) -> list[int]:
    drawn: list[int] = torch.randint(67, (tokens,), generator=generator(tokens)).tolist()
    return drawn


def test_32_speculations_grow_each_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan: one allocation for each table, none during decoding, and the right tokens."""
    growth = Growth(monkeypatch)
    plan = CapturePlan.for_models(
        max(INPUT_TOKENS) + NEW_TOKENS, DRAFT, speculative_steps=STEPS, draft_tokens=DRAFT_TOKENS
    )
    report = prepare_for_capture(list(growth.ropes.values()), plan)
    growth.look()
    assert report.grew == 2
    decoded = decode_all(growth)
    assert growth.said == {"target": 0, "draft": 0}
    assert growth.moved == {"target": 1, "draft": 1}
    assert growth.fills == [plan.reserve_length] * 2
    formula, _ = build(FormulaRope(TARGET, torch.device("cpu")), torch.nn.Identity())
    for tokens, found in list(zip(INPUT_TOKENS, decoded, strict=True))[:: SEQUENCES // 8]:
        plain = greedy(formula, formula.new_cache(ROWS), prompt_of(tokens), tokens + NEW_TOKENS)
        assert plain.smallest_margin > 1e-4
        assert found == plain.tokens


def test_growth_without_a_plan_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong twin: an engine that reserves what the next step needs moves its tables on and on."""
    growth = Growth(monkeypatch)
    for tokens in INPUT_TOKENS:
        growth.reserve(tokens + STEPS * DRAFT_TOKENS)
    assert growth.said == growth.moved == {"target": 3, "draft": 3}
    assert len(growth.fills) == 6
