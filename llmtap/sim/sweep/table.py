"""Write the runs of a sweep as a flat table, CSV or Parquet, with the columns of the multi-bin paper.

For `llmtap sim run --table`: one row for each run, whose figures are read from its public JSON
(`simulate.py`).

Source: multi-bin paper, 7.1 (parameters), 9.1 to 9.4 (metrics), 10.4 (files).
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from llmtap.errors import ConfigError

__all__ = ["SUFFIXES", "write_runs"]

SUFFIXES: Final = (".csv", ".parquet")
_Run = Mapping[str, Any]


def _at(*path: str) -> Callable[[_Run], Any]:
    def value(run: _Run) -> Any:
        found: Any = run
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    return value


def _scaled(factor: float, *path: str) -> Callable[[_Run], Any]:
    of = _at(*path)
    return lambda run: None if (value := of(run)) is None else value * factor


def _capacity(by: str) -> Callable[[_Run], Any]:
    def value(run: _Run) -> Any:
        found = _at("capacity", "by")(run) or {}
        return math.inf if by in found and found[by] is None else found.get(by)

    return value


_COLUMNS: Final[Mapping[str, Callable[[_Run], Any]]] = {
    "scheduler": _at("scheduler"),
    "num_requests": _at("n"),
    "num_gpus": _at("servers"),
    "k_bins": lambda run: len(run["bins"]) if run.get("bins") else None,
    "rps_scaling": _at("scale"),
    "arrival_rate": _at("load", "offered_rps"),
    "seed": _at("seed"),
    "d_sla_token": _at("readings", "token_sla"),
    "d_sla_request": _at("readings", "request_sla"),
    "throughput_requests_per_sec": _at("throughput_rps"),
    "throughput_tokens_per_sec": _at("throughput_tps"),
    "avg_latency": _at("latency", "mean"),
    "p50_latency": _at("latency", "p50"),
    "p95_latency": _at("latency", "p95"),
    "p99_latency": _at("latency", "p99"),
    "max_latency": _at("latency", "max"),
    "token_sla_violation_pct": _scaled(100, "token_sla_violation"),
    "request_sla_violation_pct": _scaled(100, "request_sla_violation"),
    "gpu_utilization": _at("utilization"),
    "avg_batch_size": _at("batch_mean"),
    "avg_queueing_delay": _at("queueing", "mean"),
    "seconds_per_generated_token": _at("seconds_per_output_token"),
    "decode_step_time_ms": _scaled(1_000, "decode_step_mean"),
    "capacity_threshold_lambda": _capacity("request"),
    "capacity_qps_under_sla": _capacity("token"),
}
"""Seconds and shares, but for names that end in _ms and _pct; a capacity without a limit is infinite."""


def write_runs(place: Path, runs: Sequence[_Run]) -> None:
    """Write a row for each run; an unknown figure is an empty cell (null). Raises ConfigError of
    `--table`."""
    columns = {name: [of(run) for run in runs] for name, of in _COLUMNS.items()}
    try:
        if place.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table(columns), place)
            return
        with place.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    except OSError as exc:
        raise ConfigError("--table", f"cannot write {place}: {exc.strerror}") from None
