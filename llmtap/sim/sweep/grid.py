"""Turn combinations of option values, such as those of a preset, into the jobs (`SweepJob`) of a sweep.

`llmtap sim run` calls `SweepGrid.jobs` with the values of the command line; `runner.py` runs the jobs. An
axis is an option with several values; a point is one combination of values. Points are ordered by size, load,
seed, servers, further options in the given order, and scheduler. Points that differ only in options that
their scheduler does not read are one job. An option on the command line replaces the axis of a preset with
the same name, but not the values that a variant of the preset sets.

The load is set in one of three ways: `scale`, a factor on the rate of arrivals; `rate`, the mean rate; or
`share`, a share of the throughput of a run with the settings `Preset.share_settings`, which is run first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET

from llmtap.errors import ConfigError, LlmtapError
from llmtap.sim.model_options import (
    SEED_MODEL,
    SEEDED,
    IterationModel,
    ModelOptions,
    Serving,
    read_model_options,
    read_serving,
)
from llmtap.sim.routing import DEFAULT_ROUTER
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.sweep.fit_report import GridFitReport
from llmtap.sim.sweep.sweep import JobOptions, SweepAttempt, SweepJob, digest_of
from llmtap.workload.registry import draw_requests, is_workload
from llmtap.workload.trace import Trace, load_trace

BEST: Final = "best"
"""Placeholder for the best value, which runs of another preset find (`Preset.best_preset`)."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named sweep: the values of its axes, and its other options."""

    description: str
    source: str
    """Section of a paper that describes the sweep."""
    axes: Mapping[str, tuple[Any, ...]]
    """By name of an axis: its values."""
    variants: tuple[Mapping[str, Any], ...] = field(default_factory=lambda: ({},))
    """Combinations of fixed values; each point of the axes is run with each of them."""
    best_preset: str = ""
    """Name of the preset whose axes are searched for the values of BEST."""
    share_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run whose throughput is a `share` of 1: all its requests arrive at once."""
    objectives: str = ""
    follow: int | None = None
    """Request whose token times are reported (`ExchangeMeasuring.follow`)."""
    trace: str = ""
    """Default workload or trace."""
    iterations: IterationModel | None = None
    """Latency model, unless the user gives data to fit another model; None: the default model."""
    model_source: str = ""
    """Description of the origin of `iterations`, for reports."""

    def options(self) -> JobOptions:
        """Return job options with the latency model of the preset."""
        if self.iterations is None:
            return JobOptions()
        return JobOptions(iterations=self.iterations, model_source=self.model_source)


ALL_AT_ONCE_RPS: Final = 1e15
"""Rate that is so high that all requests arrive in the same nanosecond."""
LINEAR_ITERATIONS: Final = IterationModel(
    beta_ns=SEED_MODEL.beta_ns, gamma=0.0, prefill_ns=0.0, context_ns=800.0
)
"""Model in which an iteration takes a fixed time (to read the weights), plus a time for each token in KV
memory. So the duration of an iteration grows linearly with the batch."""
_SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
_MULTI_BIN: Final = "multi_bin_dynamic"

PRESETS: Final[dict[str, Preset]] = {
    "grid": Preset(
        "which number of GPUs and bins is enough, by size: 192 runs at one load",
        "multi-bin batching paper, 7.1, step 1",
        {
            "requests": _SIZES,
            "scale": (100.0,),
            "servers": (1, 2, 4, 8, 16, 32, 64, 100),
            "bins": ("1", "2", "4", "8", "16", "32"),
            "scheduler": (_MULTI_BIN,),
        },
    ),
    "methods": Preset(
        "the paper's four methods, by size: one GPU each, and the fewest that are as good as the grid's best",
        "multi-bin batching paper, 7.1, step 2",
        {"requests": _SIZES, "scale": (100.0,)},
        (
            {"scheduler": "static_fifo", "servers": 1},
            {"scheduler": "dynamic_no_bins", "servers": 1},
            {"scheduler": _MULTI_BIN, "servers": 1, "bins": "8"},
            {"scheduler": _MULTI_BIN, "servers": BEST, "bins": BEST},
        ),
        best_preset="grid",
    ),
    "defaults": Preset(
        "the paper's own defaults: 4 GPUs, 4 bins (and 8), at 10 times the rate (and 1 and 100 times)",
        "multi-bin batching paper, 7.2 and 8.1",
        {
            "requests": (1_000,),
            "scale": (1.0, 10.0, 100.0),
            "servers": (4,),
            "bins": ("4", "8"),
            "scheduler": ("static_fifo", "dynamic_no_bins", _MULTI_BIN),
        },
    ),
    "controllers": Preset(
        "a controller of the batch size for each of 4 bins against one for all, with five seeds",
        "multi-bin batching paper, 1.3, H2",
        {
            "requests": (10_000,),
            "scale": (1.0, 10.0),
            "seed": (1, 2, 3, 4, 5),
            "servers": (4,),
            "bins": ("4",),
            "controllers": ("bin", "global"),
            "scheduler": (_MULTI_BIN,),
        },
        trace="bursty",
    ),
    "goodput": Preset(
        "goodput and smooth goodput against the rate, up to twice what the engine can do; of chat, for one",
        "smooth goodput paper, 5.2, figure 5",
        {
            "requests": (2_000,),
            "share": (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
            "scheduler": ("continuous_batching", "chunked_prefill"),
        },
        share_settings={"scheduler": "continuous_batching"},
        objectives="ttft:1s tbc_max:200ms",
    ),
    "chunking": Preset(
        "one request with and without chunked prefill: when its tokens came; of long-chat, for one",
        "smooth goodput paper, 5.3, figures 6 and 7",
        {"requests": (200,), "share": (0.8,), "scheduler": ("continuous_batching", "chunked_prefill")},
        share_settings={"scheduler": "continuous_batching"},
        follow=0,
    ),
    "knee": Preset(
        "mean wait against the utilisation of one server, beside that of an M/M/1 queue",
        "SLO metrics chapter, figure of the M/M/1 knee",
        {
            "requests": (100_000,),
            "share": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95),
            "static_batch": ("1",),
            "length": ("output",),
            "scheduler": ("static_fifo",),
        },
        share_settings={"scheduler": "static_fifo", "static_batch": "1", "length": "output"},
        trace="mm1",
    ),
    "batch-size": Preset(
        "throughput and ITL against the batch size, of a model whose iterations grow linearly with the batch",
        "SLO metrics chapter, figure of the batch size",
        {
            "requests": (256,),
            "rate": (ALL_AT_ONCE_RPS,),
            "seqs_max": ("1", "2", "4", "8", "16", "32", "64", "128", "256"),
            "kv_tokens": ("100000",),
            "scheduler": ("continuous_batching",),
        },
        trace="equal-lengths",
        iterations=LINEAR_ITERATIONS,
        model_source="an illustration: weights are read once, the rest grows with the tokens of the batch",
    ),
}
for _name, _scale in product(("grid", "methods"), (1, 10, 100)):
    _preset = PRESETS[_name]
    PRESETS[f"{_name}-{_scale}x"] = replace(
        _preset,
        description=f"{_name} at {_scale} times the trace's rate",
        axes={**_preset.axes, "scale": (float(_scale),)},
        best_preset=_preset.best_preset and f"grid-{_scale}x",
    )


READINGS: Final = frozenset(field.name for field in msgspec.structs.fields(ModelOptions))
SERVING: Final = frozenset(field.name for field in msgspec.structs.fields(Serving))
LOADS: Final = ("scale", "rate", "share")
_OUTER_AXES: Final = ("requests", *LOADS, "seed", "servers", "router")
"""Axes by which points are ordered first."""
_SYNTHETIC_REQUESTS: Final = 10_000
"""Default number of requests of a synthetic workload."""
_CAPACITY_REQUESTS: Final = 2_000
"""Minimum number of requests of a run whose throughput is share 1. In a shorter run, the throughput is lower,
because the first and last batches are small (chat, 100 requests: 5.2 instead of 11.5 req/s)."""
_LATE_SHARE_TOLERANCE: Final = 0.01
"""Maximum difference between the best point's share of late requests and the smallest share of all points."""
_LAST_ARRIVAL_NS: Final = 1 << 62
"""Latest arrival that is allowed: times have 64 bits, and the run continues after the last arrival."""
_NO_RATE: Final = "all rows arrive at once, so the rate cannot be scaled"

Axes = Mapping[str, Sequence[Any]]
"""Values of each option to combine. `requests`, `seed` and `servers` are int, loads are float; `scheduler`,
`router` and the options of `ModelOptions` and `Serving` are texts."""
_DEFAULT_OPTIONS: Final = JobOptions()
Point = dict[str, Any]
RunJobs = Callable[[Sequence[SweepJob]], Mapping[str, SweepAttempt]]


def points(axes: Axes, variants: Iterable[Mapping[str, Any]] = ({},)) -> Iterator[Point]:
    """Yield all combinations of values, in the order that the module docstring defines."""
    names = [name for name in _OUTER_AXES if name in axes]
    names += [name for name in axes if name not in _OUTER_AXES and name != "scheduler"]
    schedulers = [{"scheduler": one} for one in axes.get("scheduler", ())] or [{}]
    for values in product(*(axes[name] for name in names)):
        for variant in variants:
            for scheduler in schedulers:
                yield dict(zip(names, values, strict=True)) | scheduler | dict(variant)


class GridSource:
    """Trace or synthetic workload of a sweep."""

    def __init__(
        self,
        name: str,
        *,
        source_format: str | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> None:
        """`name`: file or URL for `load_trace`; if there is no such file, name of a synthetic workload."""
        self.name = name
        self.traces: dict[str, Trace] = {}
        """Traces that were loaded or drawn so far, by digest."""
        self.remarks: list[str] = []
        """Sentences for the user on options without an effect."""
        self.is_synthetic = is_workload(name) and (name.endswith(".toml") or not Path(name).exists())
        """Whether the source is a synthetic workload, which depends on the seed."""
        self._format = source_format
        """Format of the trace; None: it is detected."""
        self._progress = progress
        self._digests: dict[tuple[int | None, int], str] = {}
        """Digests of the traces by number of requests and seed."""

    @property
    def notes(self) -> list[str]:
        """Notes on the traces, and remarks, each once."""
        trace_notes = [note for trace in self.traces.values() for note in trace.notes]
        return list(dict.fromkeys(trace_notes + self.remarks))

    def rows(self, count: int | None, seed: int) -> tuple[str, Trace]:
        """Return the digest and the trace of the first `count` rows (None: all rows). Raises ConfigError."""
        key = (count, seed if self.is_synthetic else 0)
        if key not in self._digests:
            if self.is_synthetic:
                if self._format is not None:
                    raise ConfigError(
                        "--from", f"has no effect: {self.name} is a synthetic workload", "omit --from"
                    )
                requests = draw_requests(self.name, count or _SYNTHETIC_REQUESTS, seed, "TRACE")
                trace = Trace(requests, "synthetic")
            else:
                if self.name == "-" and self._digests:
                    raise ConfigError(
                        "--requests",
                        "expected one number for a trace from standard input, which can be read only once",
                        "give a file",
                    )
                try:
                    trace = load_trace(
                        self.name, count=count, source_format=self._format, progress=self._progress
                    )
                except ConfigError as exc:
                    known = self.name == "-" or "://" in self.name or Path(self.name).exists()
                    hint = None if known else "`llmtap sim run --presets` lists the synthetic workloads"
                    raise ConfigError(exc.place, exc.problem, hint or exc.hint) from None
            self._digests[key] = digest_of(trace)
            self.traces.setdefault(self._digests[key], trace)
        digest = self._digests[key]
        return digest, self.traces[digest]


@dataclass(frozen=True, slots=True)
class SweepGrid:
    """Makes the jobs of a sweep on one source."""

    source: GridSource
    common: JobOptions = _DEFAULT_OPTIONS
    """Options of all jobs."""

    def job(self, point: Point, capacity_rps: float | None = None) -> SweepJob:
        """Return the job of a point. `capacity_rps`: rate of a `share` of 1. Raises ConfigError."""
        wanted_count, seed = point.get("requests"), point.get("seed", 42)
        digest, trace = self.source.rows(wanted_count, seed)
        count = wanted_count or len(trace)
        if count > len(trace) and not trace.span_ns:
            raise ConfigError(
                "--requests",
                f"expected at most {len(trace):,} (the rows of {self.source.name}), got {count:,}: the rows"
                " cannot be repeated, since all arrive at once",
                "reduce --requests, or leave it out",
            )
        if self.common.capacity is not None and trace.rate_rps is None:
            raise ConfigError("--capacity", _NO_RATE, "give a trace with arrival times")
        name = point["scheduler"]
        reads = SCHEDULERS[name].options_read
        if "prefix_cache" in reads & point.keys() and not trace.requests.block_tokens:
            reads -= {"prefix_cache"}
            self.source.remarks.append(
                f"prefix_cache has no effect: {self.source.name} has no data on equal beginnings of prompts"
            )
        servers = point.get("servers", 1)
        router = point.get("router", DEFAULT_ROUTER) if SCHEDULERS[name].iterates and servers > 1 else None
        if router == "prefix-aware" and not trace.requests.block_tokens:
            self.source.remarks.append(
                f"the router prefix-aware works as least-loaded: {self.source.name} has no data on equal"
                " beginnings of prompts"
            )
        readings, serving = _options_from_settings({k: v for k, v in point.items() if k in reads})
        fit = self.common.fit
        if (
            isinstance(fit, GridFitReport)
            and fit.length is not UNSET
            and "length" in reads
            and readings.length != fit.length
        ):
            raise ConfigError(
                "--latency",
                f"the lengths in {fit.grid} count {fit.length} tokens, but the simulation counts"
                f" {readings.length} tokens",
                f"use --reading length={fit.length}",
            )
        is_random = self.source.is_synthetic or ("predictor" in reads and readings.predictor in SEEDED)
        return SweepJob(
            trace=self.source.name,
            rows=digest,
            count=count,
            scheduler=name,
            scale=_scale_at(point, trace, count, capacity_rps),
            wanted_load=next((float(point[load]) for load in LOADS if load in point), None),
            servers=servers,
            router=router,
            seed=seed if is_random else None,
            readings=readings,
            serving=serving,
            **vars(self.common),
        )

    def jobs(self, axes: Axes, preset: Preset | None, run: RunJobs) -> list[SweepJob]:
        """Return all jobs, each once, in the order of the points. First `run` the jobs on which they depend.

        Raises ConfigError for an invalid point, and LlmtapError if a job fails on which others depend.
        """
        variants = ({},) if preset is None else preset.variants
        grid = list(points(axes, variants))
        if preset is not None and preset.best_preset:
            grid = self._with_best(grid, PRESETS[preset.best_preset], run)
        capacities: list[float | None] = [None] * len(grid)
        if "share" in axes:
            assert preset is not None, "a load can be a share only in a preset"
            capacities = self._capacities(grid, preset.share_settings, run)
        jobs = [self.job(point, rps) for point, rps in zip(grid, capacities, strict=True)]
        return list({job.id: job for job in jobs}.values())

    def _with_best(self, grid: list[Point], best_preset: Preset, run: RunJobs) -> list[Point]:
        """Replace BEST in the points by the best of the values that `best_preset` has for the same axes.

        In the runs to find the best values, all other values are those of the point.
        """
        open_points = [p for p in grid if BEST in p.values()]
        axes = {name: best_preset.axes[name] for p in open_points for name, v in p.items() if v == BEST}
        points_tried = {
            i: list(points({name: (value,) for name, value in point.items()} | axes))
            for i, point in enumerate(open_points)
        }
        jobs = {i: [self.job(p) for p in group] for i, group in points_tried.items()}
        attempts = run([job for group in jobs.values() for job in group])
        for i, point in enumerate(open_points):
            summaries = [_summary_of(attempts[job.id]) for job in jobs[i]]
            point |= best_of(points_tried[i], summaries)
        return grid

    def _capacities(
        self, grid: list[Point], share_settings: Mapping[str, Any], run: RunJobs
    ) -> list[float | None]:
        """Return for each point the throughput with `share_settings`, if all requests arrive at once."""
        jobs = []
        for point in grid:
            values = {name: point[name] for name in ("requests", "seed", "servers") if name in point}
            if "requests" in point:
                values["requests"] = max(point["requests"], _CAPACITY_REQUESTS)
            job = self.job(values | {"scale": 1.0} | dict(share_settings))
            span_ns = self.source.traces[job.rows].span_ns
            plain = replace(job, measure=False, objectives="", capacity=None, capture=None, follow=None)
            jobs.append(replace(plain, scale=float(max(span_ns, 1))))
        attempts = run(list({job.id: job for job in jobs}.values()))
        return [_summary_of(attempts[job.id])["throughput_rps"] for job in jobs]


def _options_from_settings(settings: Mapping[str, str]) -> tuple[ModelOptions, Serving]:
    try:
        return (
            read_model_options({k: v for k, v in settings.items() if k in READINGS}),
            read_serving({k: v for k, v in settings.items() if k in SERVING}),
        )
    except ValueError as exc:
        raise ConfigError("--reading", str(exc), "`llmtap sim run --readings` shows the options") from None


def best_of(points: Sequence[Point], summaries: Sequence[Mapping[str, Any]]) -> Point:
    """Return the best point. The multi-bin paper (7.1) does not define it.

    It is the point with the fewest servers, and then with the fewest bins, among the points whose share of
    requests outside the request SLA is at most one percentage point above the smallest share.
    """
    late_shares = [summary["request_sla_violation"] for summary in summaries]
    limit = min(late_shares) + _LATE_SHARE_TOLERANCE
    candidates = [p for p, share in zip(points, late_shares, strict=True) if share <= limit]
    return min(candidates, key=lambda p: (p["servers"], int(p["bins"])))


def _summary_of(attempt: SweepAttempt) -> Mapping[str, Any]:
    if attempt.summary is None:
        raise LlmtapError(
            f"job {attempt.id}, on which other jobs of the preset depend, failed: {attempt.error}"
        )
    return attempt.summary


def _scale_at(point: Point, trace: Trace, count: int, capacity_rps: float | None) -> float:
    """Return the factor by which a point speeds up the arrivals of the trace."""
    rate, scale, option = point.get("rate"), float(point.get("scale", 1.0)), "--scale"
    if "share" in point:
        assert capacity_rps is not None
        rate = point["share"] * capacity_rps
    if rate is not None:
        option = "--rate"
        if trace.rate_rps is None:
            raise ConfigError(option, _NO_RATE, f"leave out {option}")
        scale = float(rate / trace.rate_rps)
    if trace.span_ns * -(-count // max(1, len(trace) - 1)) > _LAST_ARRIVAL_NS * scale:
        raise ConfigError(
            option,
            f"the last of {count:,} requests would arrive after more than 146 years, which is the maximum",
            "use a higher rate or fewer requests",
        )
    return scale
