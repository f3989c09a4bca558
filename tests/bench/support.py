"""A simulated gateway of known behaviour, a session that measures it, and a test run as by the command."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pyarrow as pa

from llmtap.bench.run.measurement import COLUMNS, Measurement
from llmtap.bench.run.session import BenchSession, Folder, Load, SessionWatcher
from llmtap.bench.run.test import BenchTest, TestResult
from llmtap.bench.sut.sut import BenchTarget, Sut, TargetArm
from tests.support.servers.peer import play

SERVE = [sys.executable, "-P", "-m", "llmtap.cli", "sim", "serve", "--listen", "127.0.0.1:0"]
SECONDS_MAX = 280.0


class Silent(SessionWatcher):
    """A watcher that shows nobody anything, and keeps what it was told of steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []
        """Names, and what was said of each."""
        self.remaining: list[str] = []
        """What was said of how much is left."""
        self.estimates_s: list[float] = []
        """Estimated times until the end, one for each load that was sent after the first."""

    def step(self, name: str, message: str, seconds: float | None = None) -> None:
        self.steps.append((name, message))

    def report_remaining(self, text: str) -> None:
        self.remaining.append(text)

    def estimate_remaining(self, seconds: float) -> None:
        self.estimates_s.append(seconds)


@contextmanager
def sim(*args: str) -> Iterator[str]:
    """The URL of a server with these options (`sim("--ttft", "50ms") as url`)."""
    with subprocess.Popen(
        [*SERVE, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, line
            yield line[line.index("http://") :].split("/v1")[0]
        finally:
            process.terminate()


def session_to(
    url: str,
    results: Path,
    name: str = "test",
    *,
    target: Mapping[str, Any] | None = None,
    arms: Mapping[str, TargetArm] | None = None,
    warmup: str = "3",
    seed: int = 42,
    sut: Sut | None = None,
) -> BenchSession:
    """A session of the test `name` with its results in `results/name`; a warm-up of three requests unless
    told. `target` has more fields of the Target, and `session.watcher` is a `Silent`."""
    return BenchSession(
        name=name,
        folder=Folder(results).subfolder(name),
        target=BenchTarget(url=url, server="vllm", metrics="none", **(target or {})),
        watcher=Silent(),
        arms=arms or {},
        warmup=warmup,
        seed=seed,
        sut=sut or Sut(),
    )


def perform(test: BenchTest[Any], session: BenchSession, **params: Any) -> TestResult:
    """The test, checked and run, with these parameters and else its defaults. Within some minutes."""
    given = msgspec.convert(params, test.params)
    if test.check is not None:
        test.check(session, given)

    async def run() -> TestResult:
        return await test.run(session, given)

    result: TestResult = play(run(), limit_s=SECONDS_MAX)
    # All that a report is made of can be written as JSON.
    msgspec.json.encode([result.measurements_to_dict(), result.tables, result.charts])
    return result


def truths(url: str) -> list[dict[str, Any]]:
    """What the server itself says of all requests so far (`sim/server/truth.py`), warm-ups first."""
    result: list[dict[str, Any]] = []
    since = 0
    while True:
        with urlopen(f"{url}/sim/truth?since={since}", timeout=60) as response:
            page = msgspec.json.decode(response.read())
        if not page["truths"]:
            return result
        result += page["truths"]
        since = page["next"]


class Planted(BenchSession):
    """A session whose loads come out as somebody says, and at once."""

    def __init__(self, results: Path, answer: Callable[[str, Load], Measurement], name: str = "test") -> None:
        super().__init__(
            name=name,
            folder=Folder(results).subfolder(name),
            watcher=Silent(),
            target=BenchTarget(url="http://127.0.0.1:9", endpoint="completions"),
        )
        self.answer = answer
        self.loads: list[tuple[str, Load]] = []

    async def measure(self, name: str, load: Load, **how: Any) -> Measurement:
        self.loads.append((name, load))
        result = self.answer(name, load)
        self.steps.append(result)
        return result


def answered(sent_s: float, ttft_s: float, e2e_s: float, **more: Any) -> dict[str, Any]:
    """Return a request by its times in seconds: submission since the load's start, TTFT and E2E."""
    sent_ns, ttft_ns, e2e_ns = (round(seconds * 1e9) for seconds in (sent_s, ttft_s, e2e_s))
    times = {"sent_ns": sent_ns, "end_ns": sent_ns + e2e_ns, "ttft_ns": ttft_ns, "e2e_ns": e2e_ns}
    return {**times, "ttft_any_ns": ttft_ns, **more}


def measured(
    name: str, rows: Sequence[Mapping[str, Any]], *, seconds: float = 10.0, **result: Any
) -> Measurement:
    """A measurement of these requests; columns that a row lacks are unknown, and it is complete."""
    columns = {
        column: pa.array(
            [row.get(column, {"outcome": "complete", "row": i}.get(column)) for i, row in enumerate(rows)],
            kind,
        )
        for column, kind in COLUMNS.items()
    }
    return Measurement(name, "", {"window": {"seconds": seconds}, **result}, pa.table(columns))
