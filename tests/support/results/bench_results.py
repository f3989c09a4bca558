"""Results folders of benchmarks as `llmtap bench` leaves them, of requests that were made up."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

from llmtap.bench.report.report import SETUP_FILE
from llmtap.bench.run.session import RESULT, Folder
from tests.bench.support import measured
from tests.support.results.compliance_reports import changed, report_of_test

TTFT_S: Final = 0.1
GAP_S: Final = 0.01
TOKENS: Final = 11
_BEGAN: Final = datetime(2026, 1, 2, tzinfo=UTC)
_EVERY: Final = timedelta(minutes=10)


def results_folder(
    place: Path,
    *,
    test: str = "ttft",
    runs: int = 3,
    requests: int = 300,
    slower: float = 1.0,
    gaps_slower: float = 1.0,
    spread: float = 0.01,
    place_in_turn: int = 0,
    systems: int = 2,
    failed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A system's results of one test.

    Args:
        slower, gaps_slower: its TTFT is that many times 100 ms, its gaps are that many times 10 ms.
        spread: what runs differ by, as a standard deviation of both.
        place_in_turn, systems: its runs were the `place_in_turn`-th of every `systems` that were made.
        failed: requests of each load that were not answered whole.
        changes: of each report, as `changed` has them.
    """
    folder = Folder(place)
    folder.write_json(SETUP_FILE, {"command": "llmtap bench", "asked": [test]})
    for run in range(1, runs + 1):
        rng = Random(f"system {place.name}, run {run}")
        weather = 1 + rng.gauss(0, spread)
        report = changed(report_of_test(test), {"seed": 42 + run, "run": run, **(changes or {})})
        held = folder.subfolder(test).run(run)
        began = _BEGAN + _EVERY * ((run - 1) * systems + place_in_turn)
        for i, step in enumerate(report["steps"]):
            start = began + timedelta(seconds=60 * i)
            window = {
                "seconds": 60.0,
                "start": f"{start:%Y-%m-%dT%H:%M:%S}.000Z",
                "end": f"{start + timedelta(seconds=60):%Y-%m-%dT%H:%M:%S}.000Z",
            }
            step["result"]["window"] |= window
            step["result"]["plan"]["seed"] = 42 + run
            rows = [_request(rng, weather * slower, weather * gaps_slower) for _ in range(requests)]
            for row in rows[:failed]:
                row["outcome"] = "truncated"
            at = held.path / "steps" / step["name"]
            at.mkdir(parents=True)
            measured(step["name"], rows).save(at)
        held.write_json(RESULT, report)
    return place


def _request(rng: Random, slower: float, gaps_slower: float) -> dict[str, Any]:
    ttft_ns = round(TTFT_S * slower * rng.lognormvariate(0, 0.2) * 1e9)
    gaps_ns = [round(GAP_S * gaps_slower * rng.lognormvariate(0, 0.1) * 1e9) for _ in range(TOKENS - 1)]
    return {
        "ttft_ns": ttft_ns,
        "tpot_ns": sum(gaps_ns) / len(gaps_ns),
        "e2e_ns": ttft_ns + sum(gaps_ns),
        "output_tokens": TOKENS,
        "gaps_ns": gaps_ns,
    }
