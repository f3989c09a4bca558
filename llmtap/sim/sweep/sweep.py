"""One job of a sweep (`SweepJob`): all options that decide a run, its id, and its execution.

`attempt` runs a job on a trace and returns a `SweepAttempt`: the public JSON of `simulate.py`, or the error.
It also completes the folder of the job's capture. `grid.py` makes the jobs; `runner.py` distributes them over
processes. The id of a job is a hash of its options and of the digest of the trace, so jobs with equal ids
have equal figures. `write_runs` writes results of jobs as a flat table, CSV or Parquet (`llmtap sim run
--table`). The table has the columns of the multi-bin paper: 7.1 (parameters), 9.1 to 9.4 (metrics), 10.4
(files). Further columns have latencies, goodput, and the options that differ between the runs.
"""

import csv
import hashlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llmtap.errors import ConfigError, LlmtapError
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.metrics.objectives import Objectives
from llmtap.report.sweep import settings_of
from llmtap.report.values import TIMES, at
from llmtap.sim.model_options import (
    SEED_ITERATIONS,
    SEED_MODEL,
    IterationModel,
    LatencyModel,
    ModelOptions,
    Serving,
    ServingSetup,
)
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.sweep.fit_report import FitReport
from llmtap.sim.sweep.simulate import ExchangeMeasuring, SimulationResult, capacity_rps, simulate
from llmtap.units import encode_special, to_seconds
from llmtap.version import __version__

if TYPE_CHECKING:
    from llmtap.workload.trace import Trace

_ID_DIGITS: Final = 16
"""Number of hex digits of an id. With 64 bits, the probability that two of a million jobs have the same id is
1 in 40 million."""

CAPACITY_BY: Final[Mapping[str, str]] = {
    "request": "capacity_threshold_lambda",
    "token": "capacity_qps_under_sla",
    "slo": "capacity_qps_under_slo",
}
"""For each limit by which a capacity can be searched (request SLA, token SLA, or the objectives of `--slo`),
the column of the table. The first two column names are from the multi-bin paper."""
_MEASURED_EFFORT: Final = 100
"""Effort to simulate and measure a request, relative to an unmeasured request."""
_SEARCH_RUNS: Final = 15
"""Typical number of runs to search a capacity, for the estimate of a job's duration (`effort`)."""
_DEFAULT_READINGS: Final = ModelOptions()
_DEFAULT_SERVING: Final = Serving()


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options that all jobs of a sweep share: the latency models, and the figures to compute."""

    model: LatencyModel = SEED_MODEL
    iterations: IterationModel = SEED_ITERATIONS
    model_source: str = ""
    """Description of the origin of a model that is neither the default nor fitted."""
    fit: FitReport | None = None
    """Report on the fit of the latency model; None: the model was not fitted."""
    objectives: str = ""
    reader: Benefit = DEFAULT_BENEFIT
    """Reading speed of the assumed user, for smooth goodput."""
    measure: bool | None = None
    """Whether to measure exchanges (`ExchangeMeasuring.enabled`)."""
    follow: int | None = None
    """Request whose token times are reported (`ExchangeMeasuring.follow`)."""
    capacity: float | None = None
    """Maximum share of requests outside their limits at the capacity to search; None: no search."""
    capacity_by: tuple[str, ...] = ("request",)
    """Limits by which a capacity is searched (`CAPACITY_BY`)."""
    capture: str | None = None
    """Folder or URL in which the capture of each job gets a folder; None: no capture."""


@dataclass(frozen=True, kw_only=True)
class SweepJob(JobOptions):
    """One scheduler on one workload, with all options that decide the result."""

    trace: str
    """Name of the trace or workload."""
    rows: str
    """Digest of the trace's rows."""
    count: int
    """Number of requests; if the trace has fewer rows, they are repeated."""
    scale: float
    """Factor on the rate of arrivals in the trace."""
    scheduler: str
    wanted_load: float | None = None
    """Load as set by the user: a scale, a rate, or a share of a capacity."""
    servers: int = 1
    router: str | None = None
    """Name of the router; None: the servers share one queue, or there is only one server."""
    seed: int | None = 42
    readings: ModelOptions = _DEFAULT_READINGS
    """Values of `--reading` options, which decide open points of a paper."""
    serving: Serving = _DEFAULT_SERVING
    version: str = __version__
    """Version of llmtap, a part of the id: another version can compute other figures."""

    @cached_property
    def id(self) -> str:
        """Hash of all fields, equal in all processes."""
        text = msgspec.json.encode(self.to_dict(), order="deterministic")
        return hashlib.sha256(text).hexdigest()[:_ID_DIGITS]

    def to_dict(self) -> dict[str, object]:
        fields: dict[str, object] = msgspec.to_builtins(self, enc_hook=encode_special)
        return fields

    @property
    def effort(self) -> int:
        """Rough duration of the job, as a number of unmeasured requests."""
        is_measured = self.measure or self.objectives or self.capture or SCHEDULERS[self.scheduler].iterates
        runs = _SEARCH_RUNS * len(self.capacity_by) if self.capacity is not None else 1
        return self.count * (_MEASURED_EFFORT if is_measured else 1) * runs

    @property
    def name(self) -> str:
        """Name for folders and logs, which is not unique."""
        servers = f"-{self.servers}-servers" if self.servers > 1 else ""
        return f"{self.scheduler}-{self.count}{servers}"


def digest_of(trace: "Trace") -> str:
    """Return a digest of all data of a trace that affect a run."""
    requests = trace.requests
    digest = hashlib.sha256()
    for column in (requests.arrival_ns, requests.input, requests.output):
        digest.update(column.tobytes())
    rest = (requests.blocks, requests.block_tokens, requests.epoch_ns, trace.has_dates)
    digest.update(msgspec.msgpack.encode(rest))
    return digest.hexdigest()[:_ID_DIGITS]


def run_job(job: SweepJob, trace: "Trace", progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Run a job. Return the JSON of its `SimulationResult`, with fields of the job and its capacity."""
    objectives = Objectives.parse(job.objectives, "--slo") if job.objectives else None
    place = None if job.capture is None else f"{job.capture.rstrip('/')}/{job.name}-{job.id}"
    # A local folder has the suffix `.part` until the capture is complete.
    part = None if place is None else place if "://" in place else f"{place}.part"
    if part != place:
        shutil.rmtree(str(part), ignore_errors=True)

    setup = ServingSetup(job.model, job.readings, job.iterations, job.serving)

    def run_at(
        scale: float, measuring: ExchangeMeasuring, progress: Callable[[int], None] | None = None
    ) -> SimulationResult:
        return simulate(
            job.scheduler,
            trace.requests_at(count=job.count, scale=scale),
            setup,
            servers=job.servers,
            router=job.router,
            seed=job.seed,
            measuring=measuring,
            progress=progress,
        )

    measuring = ExchangeMeasuring(job.measure, objectives, job.reader, job.follow, part)
    result = run_at(job.scale, measuring, progress)
    summary = result.to_dict() | {"trace": job.trace, "scale": job.scale, "asked_load": job.wanted_load}
    summary |= {"fit": msgspec.to_builtins(job.fit), "model_source": job.model_source or None, "job": job.id}
    if place is not None and part is not None:
        summary["capture"] = place
        if part != place:
            # Remove an existing folder. Its name contains the id of the job, so it is from an earlier run of
            # this job, whose result was lost.
            shutil.rmtree(place, ignore_errors=True)
            Path(part).rename(place)
    if job.capacity is not None:
        own_rps = trace.rate_rps
        assert own_rps is not None, "SweepGrid.job must reject a capacity for a trace without a rate"

        def share_outside(limit: str, rps: float) -> float:
            """Return the share of requests outside a limit of CAPACITY_BY at a rate."""
            slo = objectives if limit == "slo" else None
            result = run_at(rps / own_rps, ExchangeMeasuring(limit != "request", slo))
            if limit == "request":
                return result.late_share(result.latencies_ns())
            return (result.missed_share() if limit == "slo" else result.slow_share()) or 0.0

        capacities = {
            limit: capacity_rps(partial(share_outside, limit), job.capacity, own_rps)
            for limit in job.capacity_by
        }
        summary["capacity"] = {
            "allowed": job.capacity,
            "rps": capacities[job.capacity_by[0]],
            "by": capacities,
        }
    return summary


class SweepAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a job: a summary or an error. It is a line of a results file."""

    id: str
    job: dict[str, object] = {}
    """Options of the job."""
    seconds: float = 0.0
    """Real duration of the run."""
    summary: dict[str, Any] | None = None
    """Public JSON of the run (`run_job`)."""
    error: str | None = None
    """Why the job failed; None: it did not."""


def attempt(
    job: SweepJob, trace: "Trace", now_ns: Callable[[], int], progress: Callable[[int], None] | None = None
) -> SweepAttempt:
    """Run a job. An exception becomes the error of the attempt, so that other jobs continue."""
    began_ns = now_ns()
    summary = error = None
    try:
        if job.version != __version__:
            raise ValueError(
                f"the job needs llmtap {job.version}, but this process has {__version__}: install one version"
            )
        summary = run_job(job, trace, progress)
    except (ValueError, LlmtapError) as exc:
        error = str(exc)
    except MemoryError:
        error = "out of memory"
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    return SweepAttempt(job.id, job.to_dict(), to_seconds(now_ns() - began_ns), summary, error)


SUFFIXES: Final = (".csv", ".parquet")
_Run = Mapping[str, Any]
_COLUMNS: Final[Mapping[str, str]] = {
    "scheduler": "scheduler",
    "num_requests": "n",
    "num_gpus": "servers",
    "k_bins": "bins",
    "rps_scaling": "scale",
    "arrival_rate": "load.offered_rps",
    "seed": "seed",
    "d_sla_token": "readings.token_sla",
    "d_sla_request": "readings.request_sla",
    "throughput_requests_per_sec": "throughput_rps",
    "throughput_tokens_per_sec": "throughput_tps",
    "avg_latency": "latency.mean",
    "p50_latency": "latency.p50",
    "p95_latency": "latency.p95",
    "p99_latency": "latency.p99",
    "max_latency": "latency.max",
    "token_sla_violation_pct": "token_sla_violation",
    "request_sla_violation_pct": "request_sla_violation",
    "gpu_utilization": "utilization",
    "avg_batch_size": "batch_mean",
    "avg_queueing_delay": "queueing.mean",
    "avg_longest_output": "longest_output.mean",
    "expected_longest_output": "longest_output.expected",
    "seconds_per_generated_token": "seconds_per_output_token",
    "decode_step_time_ms": "decode_step_mean",
    **{f"decode_tbt_{figure}_ms": f"decode_tbt.{figure}" for figure in ("p50", "p99")},
    **{column: f"capacity.by.{bound}" for bound, column in CAPACITY_BY.items()},
    **{
        f"{metric}_{figure}_ms": f"metrics.{metric}.{figure}"
        for metric in ("ttft", "tpot", "itl", "tbc_max", "user_idle", "user_idle_eq4")
        for figure in ("p50", "p99")
    },
    "itl_option": "metrics.itl.option",
    "goodput_requests_per_sec": "goodput.requests_per_second",
    "goodput_attainment_pct": "goodput.attainment",
    "smooth_goodput_tokens_per_sec": "smooth_goodput.tokens_per_second",
    "caution": "fit.caution",
}
"""For each column, the path of its figure in the result. A result has seconds, and shares from 0 to 1;
values of columns that end in _ms or _pct are converted."""
_SETTINGS_WITH_COLUMN: Final = frozenset(
    {"scheduler", "requests", "servers", "bins", "seed", "load", "token_sla", "request_sla"}
)
"""Settings that need no further column, because `_COLUMNS` has a column for them."""


def _varied_columns(runs: Sequence[_Run]) -> dict[str, list[Any]]:
    """Return a column (times in ms) for each setting that differs between runs and is not in `_COLUMNS`."""
    columns: dict[str, list[Any]] = {}
    settings = [settings_of(run) for run in runs]
    for name in dict.fromkeys(name for one in settings for name in one):
        values: list[Any] = [one.get(name) for one in settings]
        if name in _SETTINGS_WITH_COLUMN or len(set(values)) < 2:
            continue
        if name in TIMES:
            columns[f"{name}_ms"] = [None if value is None else value * 1_000 for value in values]
        else:
            columns[name] = values
    return columns


def _cell_value(run: _Run, name: str, path: tuple[str, ...]) -> Any:
    value = at(run, *path)
    if path[0] == "bins":
        return len(value) if value else None
    if path[0] == "capacity" and path[-1] in (at(run, *path[:-1]) or ()):
        return math.inf if value is None else value  # In a capacity, None means that there is no limit.
    factor = {"ms": 1_000, "pct": 100}.get(name.rpartition("_")[2])
    return value * factor if factor and value is not None else value


def run_columns(runs: Sequence[_Run]) -> dict[str, list[Any]]:
    """Return the columns of a table with a row for each run; None for an unknown figure."""
    paths = {name: tuple(path.split(".")) for name, path in _COLUMNS.items()}
    return {
        name: [_cell_value(run, name, path) for run in runs] for name, path in paths.items()
    } | _varied_columns(runs)


def write_runs(place: Path, runs: Sequence[_Run]) -> None:
    """Write a table with a row for each run. Raises ConfigError naming `--table`.

    An unknown figure is an empty cell (null). A figure that no run has, such as goodput without objectives,
    has no column.
    """
    columns = {
        name: cells for name, cells in run_columns(runs).items() if any(cell is not None for cell in cells)
    } | _varied_columns(runs)
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
        raise ConfigError("--table", f"cannot write {place}: {exc.strerror}", "name another file") from None
