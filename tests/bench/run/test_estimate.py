"""Whole benchmarks in virtual time: the announced duration is near the real one after the first test."""

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from llmtap.bench.run import perform
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.perform import Bench
from llmtap.bench.run.session import BenchSession, Folder, Load
from llmtap.bench.sut.sut import load_bench
from llmtap.clock import ManualClock
from llmtap.units import NS_PER_S
from tests.bench.support import Silent, answered, measured
from tests.support.servers.peer import play

EXAMPLE = Path(__file__).parents[3] / "config/bench-sim.toml"
WARMUP_S, PREPARATION_S, REPORT_S = 20.0, 2.0, 6.0


@dataclass(frozen=True)
class Engine:
    """An engine with a batch: all its requests get one token per step."""

    batch_max: int
    step_s: float
    """Duration of a step of one request."""
    step_per_request_s: float = 0.0
    """Further duration of a step for each request of the batch."""
    prefill_steps: int = 4

    def serve(self, load: Load) -> list[Mapping[str, Any]]:
        """Return the answered requests of a load, with the times of this engine."""
        requests = load.plan.requests
        stop_s = float("inf") if load.duration_ns is None else load.duration_ns / NS_PER_S
        planned = deque(
            (row, 0.0 if load.slots is not None else requests.arrival_ns[row] / NS_PER_S)
            for row in range(len(requests))
        )
        clients = load.slots or len(requests)
        now, steps = 0.0, 0.0
        queue: deque[tuple[int, float]] = deque()
        batch: list[tuple[float, int, float, float]] = []
        rows = []
        while planned or queue or batch:
            while planned and clients and max(now, planned[0][1]) <= now and now < stop_s:
                queue.append((planned.popleft()[0], now))
                clients -= 1
            if now >= stop_s:
                planned.clear()
            while queue and len(batch) < self.batch_max:
                row, sent = queue.popleft()
                heapq.heappush(batch, (steps + self.prefill_steps + requests.output[row], row, sent, now))
            step = self.step_s + self.step_per_request_s * len(batch)
            next_end = now + (batch[0][0] - steps) * step if batch else float("inf")
            next_arrival = planned[0][1] if planned and clients else float("inf")
            moment = min(next_end, max(now, next_arrival) if next_arrival > now else next_end)
            if moment == float("inf"):
                break
            steps += (moment - now) / step if batch else 0.0
            now = moment
            while batch and batch[0][0] - steps < 1e-9:
                _, row, sent, started = heapq.heappop(batch)
                clients += load.slots is not None
                ttft = started - sent + self.prefill_steps * step
                tokens = requests.output[row]
                lengths = {"output_tokens": tokens, "input_tokens": requests.input[row]}
                rows.append(answered(sent, ttft, now - sent, row=row, **lengths))
        return sorted(rows, key=lambda row: row["sent_ns"])


class Announcement(NamedTuple):
    test: str
    load: str
    end_s: float
    """Announced end of the benchmark, before this load."""


@dataclass
class VirtualBench:
    """Measures loads at once, moves a clock by their durations, and keeps the announced remaining times."""

    engine: Engine
    clock: ManualClock = field(default_factory=ManualClock)
    announced: list[Announcement] = field(default_factory=list)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(seconds * NS_PER_S))

    @property
    def now_s(self) -> float:
        return self.clock.mono_ns() / NS_PER_S

    async def measure(
        self, session: BenchSession, name: str, load: Load, *, arm: str = "", **options: Any
    ) -> Measurement:
        left_s = session.time_left_s()
        if left_s is not None:
            self.announced.append(Announcement(session.name, name, self.now_s + left_s))
        if arm not in session._warm_arms:
            session._warm_arms.add(arm)
            self.pass_time(WARMUP_S)
            session.pace.add_warmup(WARMUP_S)
            session.expected.warmups = max(0, session.expected.warmups - 1)
        rows = self.engine.serve(load)
        end_s = max((row["end_ns"] for row in rows), default=0) / NS_PER_S
        self.pass_time(PREPARATION_S + end_s)
        stopped = None if load.duration_ns is None else "duration"
        tokens = {"output_per_second": None, "input": 0}
        result = measured(name, rows, seconds=end_s, load={"stopped": stopped}, tokens=tokens)
        return session._add_step(result, PREPARATION_S + end_s)

    def report(self, test: Any, params: Any, session: Any, result: Any, **times: Any) -> dict[str, Any]:
        self.pass_time(REPORT_S)
        return {
            "params": {"workload": getattr(params, "workload", None)},
            "measurements": result.measurements,
        }


class _Document(msgspec.Struct):
    stopped: bool | None = None


def run_virtually(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    *tests: str,
    quick: bool,
    sets: tuple[str, ...],
) -> VirtualBench:
    virtual = VirtualBench(engine)

    async def measure(session: BenchSession, name: str, load: Load, **options: Any) -> Measurement:
        return await virtual.measure(session, name, load, **options)

    async def no_errors(self: Bench, tests: Any) -> dict[str, Any]:
        return {}

    async def no_offset() -> None:
        return None

    monkeypatch.setattr(BenchSession, "measure", measure)
    monkeypatch.setattr(Bench, "_connection_errors", no_errors)
    monkeypatch.setattr(perform, "report_of", virtual.report)
    monkeypatch.setattr(perform, "read_clock_offset", no_offset)
    monkeypatch.setattr(perform, "document_of", lambda *_: _Document())
    file = load_bench(EXAMPLE, target=None, sets=sets, tests=tests)
    bench = Bench(file, Folder(tmp_path / "r"), Silent(), clock=virtual.clock, selftest=False, quick=quick)
    play(bench.run(tests), limit_s=250)
    return virtual


ALL = tuple(perform.ORDER)


@pytest.mark.parametrize(
    ("engine", "tests", "quick", "sets"),
    [
        pytest.param(Engine(10, 0.0083), ALL, True, (), id="all tests, --quick"),
        pytest.param(Engine(64, 0.004, 0.0002), ALL, True, (), id="all tests, --quick, long steps"),
        pytest.param(
            Engine(16, 0.01, 0.001),
            ("throughput", "ttft", "tradeoff", "itl"),
            False,
            ("ttft.requests=1000",),
            id="four tests of the draft's durations",
        ),
        pytest.param(
            Engine(10, 0.0083),
            ("throughput", "capacity", "memory-pressure"),
            False,
            ("capacity.ttft_p99=2s", "throughput.mode=closed", "throughput.ttft_p99=3s"),
            id="searches of closed loops",
        ),
    ],
)
def test_after_the_first_test_the_announced_end_is_within_a_fifth(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    tests: tuple[str, ...],
    quick: bool,
    sets: tuple[str, ...],
) -> None:
    virtual = run_virtually(tmp_path, monkeypatch, engine, *tests, quick=quick, sets=sets)
    later = [one for one in virtual.announced if one.test != tests[0]]
    assert {one.test for one in later} == {*tests[1:]}
    assert [one for one in later if abs(one.end_s / virtual.now_s - 1) > 0.2] == []
    # The last announcement is of the last load and the report.
    assert later[-1].end_s == pytest.approx(virtual.now_s, rel=0.02)


@pytest.mark.parametrize("engine", [Engine(10, 0.0083), Engine(64, 0.004, 0.0002), Engine(32, 0.02)])
@pytest.mark.parametrize(
    ("test", "sets"), [("throughput", ()), ("capacity", ("capacity.ttft_p99=2s", "capacity.per_slot=100"))]
)
def test_a_search_announces_its_end_within_a_fifth_as_soon_as_a_level_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine, test: str, sets: tuple[str, ...]
) -> None:
    virtual = run_virtually(tmp_path, monkeypatch, engine, test, quick=False, sets=sets)
    levels = [float("".join(filter(str.isdecimal, one.load))) for one in virtual.announced]
    highest = levels.index(max(levels))
    assert len(levels) > highest + 2, "the search bisects"
    after_failure = virtual.announced[highest + 1 :]
    assert [one for one in after_failure if abs(one.end_s / virtual.now_s - 1) > 0.2] == []
