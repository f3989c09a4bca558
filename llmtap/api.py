"""The Python API of loads and simulations: `llmtap.replay`, `llmtap.compare` and `llmtap.simulate`.

Each function has the options of a command of `llmtap` and returns a typed result, whose attribute `json` is
the public JSON of the command. `to_pandas()` needs pandas. Errors are ConfigError and LlmtapError of
`llmtap.errors`. The API for captures is `llmtap.read`.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import msgspec

from llmtap.errors import ConfigError
from llmtap.gates.figures import every_figure, samples_of, validity_of
from llmtap.gates.regression import Tolerances, judge_replays, replay_changes
from llmtap.gates.requirements import Requirements
from llmtap.json_types import json_value
from llmtap.report.gates import Change, JudgedChange
from llmtap.units import NS_PER_S, Duration, parse_duration_ns

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from llmtap.exchange.exchange import Exchange
    from llmtap.load.options import LoadPlan
    from llmtap.load.workers.worker_handle import Progress
    from llmtap.load.workers.worker_pool import LoadResult

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FigureValue:
    """A figure of a result, such as `ttft_p99`, and whether it is valid."""

    name: str
    """Name, as in a requirement: `ttft_p99`, `error_rate`."""
    value: float
    """Value: seconds for a duration, 0 to 1 for a share, or a number."""
    n: int | None
    """Number of samples; None if the figure has no samples."""
    better: str
    """Which values are better: `lower` or `higher`."""
    validity: str
    """State of the figure: `valid`, `doubtful` or `not_valid`."""
    reason: str
    """Reason why the figure is doubtful or not valid; empty if it is valid."""


@dataclass(frozen=True, slots=True)
class RequirementState:
    """A requirement of `Result.require`, and whether the result meets it."""

    requirement: str
    value: float | None
    """Value of the figure; None if the result does not have it."""
    state: str
    """Result of the judgement: `met`, `missed` or `not_valid`."""
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """A result with figures: of a replay, or of one simulated run."""

    json: Mapping[str, Any]
    """Public JSON of the result, the same as the output of `--json`."""

    @property
    def figures(self) -> dict[str, FigureValue]:
        """All figures of the result, by name."""
        return {figure.name: figure for figure in _figure_values(self.json)}

    def __getitem__(self, name: str) -> FigureValue:
        return self.figures[name]

    def require(self, *conditions: str) -> list[RequirementState]:
        """Judge the result by requirements such as `"ttft_p99<=500ms error_rate<=1%"`. Raises ConfigError."""
        return [
            RequirementState(row.requirement, row.value, row.state, row.reason)
            for row in Requirements.parse(conditions, "require").judge(self.json)
        ]


@dataclass(frozen=True, slots=True)
class ReplayResult(Result):
    """The result of a replay."""

    requests: "pa.Table"
    """Table with a row for each request and all columns of a capture."""

    @property
    def valid(self) -> bool:
        """Whether the load did not fail and every requested figure is valid."""
        return bool(self.json["verdict"]["valid"])

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        return str(self.json["verdict"]["says"])

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each request."""
        return self.requests.to_pandas()


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The comparison of results with the first of them, as `compare` returns it."""

    json: Mapping[str, Any]
    changes: Sequence[Change]
    """Changes of all figures, from the first result to each other result."""
    judged: Sequence[JudgedChange]
    """Changes of the figures in `fail_if_worse`, with the verdict; empty without this argument."""
    same_load: bool
    """Whether the loads of all results are the same."""

    @property
    def worse(self) -> list[JudgedChange]:
        """The figures that became worse by more than their tolerance."""
        return [change for change in self.judged if change.state == "worse"]

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each change."""
        return _data_frame(self.changes, Change)


@dataclass(frozen=True, slots=True)
class SimulationResults:
    """The results of simulated runs, in the order of the sweep."""

    runs: Sequence[Result]
    notes: Sequence[str]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, i: int) -> Result:
        return self.runs[i]

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each run, and the columns of `llmtap sim run --table`."""
        import pandas as pd

        from llmtap.sim.sweep.sweep import run_columns

        return pd.DataFrame(run_columns([run.json for run in self.runs]))


class ReplayOptions(TypedDict, total=False):
    """Keyword options of `replay`: those of the command `llmtap replay`, with the same defaults.

    Durations are texts such as `"90s"`, or numbers of seconds.
    """

    requests: int | None
    rate: float | None
    speed: float | None
    arrivals: str | None
    closed: int | None
    duration: str | float | None
    endpoint: str
    model: str | None
    server: str
    tokenizer: str | None
    headers: Mapping[str, str] | None
    stream: bool | None
    slo: str | None
    warmup: str
    processes: int
    retries: int
    timeout: str | float
    stop_when: str | None
    capture: str | Path | None
    seed: int


def replay(trace: str | Path, target: str, **options: Unpack[ReplayOptions]) -> ReplayResult:
    """Send the requests of a trace, a capture or a workload to a server, like `llmtap replay`.

    `options`: see `ReplayOptions`. If the calling thread runs an event loop, as in a notebook, the replay
    runs in a separate thread. Raises ConfigError.
    """
    from llmtap.capture.store.rows import to_batch
    from llmtap.load.replay.perform import Replay, add_shape_and_turn
    from llmtap.load.replay.plan import plan_of

    _check_options(options, ReplayOptions, "replay")
    load = _load_plan(str(trace), target, options)
    plan = plan_of(load)
    exchanges: list[Exchange] = []

    def start_recording(outcome: "LoadResult") -> "Callable[[int, Exchange], None]":
        def record(row: int, x: "Exchange") -> None:
            add_shape_and_turn(x, row, plan.requests)
            exchanges.append(x)

        return record

    result = _run_coroutine(Replay(plan, load, _SilentListener(), start_recording=start_recording).run)
    batch, failed = to_batch(exchanges, capture="", level="shape")
    if failed:
        raise failed[0]
    import pyarrow as pa

    return ReplayResult(result, pa.Table.from_batches([batch]))


def _load_plan(source: str, url: str, options: ReplayOptions) -> "LoadPlan":
    """Return the load that `replay` sends. Raises ConfigError, which names the invalid option."""
    from llmtap.load.options import ENDPOINTS, LoadPlan
    from llmtap.load.replay.options import read_headers
    from llmtap.load.stop_conditions import StopConditions, parse_stop_when
    from llmtap.metrics.objectives import Objectives

    fields: dict[str, object] = dict(options)
    endpoint = options.get("endpoint", "chat")
    timeout_ns = _parse_duration("timeout", options.get("timeout", "10m"))
    if endpoint not in ENDPOINTS:
        raise ConfigError("endpoint", f"expected one of chat, completions, responses, got {endpoint!r}")
    headers = options.get("headers") or {}
    duration, stop_when = options.get("duration"), options.get("stop_when")
    slo, capture = options.get("slo"), options.get("capture")
    return LoadPlan.of(
        **fields
        | {
            "source": source,
            "url": url,
            "endpoint": ENDPOINTS[endpoint],
            "headers": read_headers([f"{name}: {value}" for name, value in headers.items()], None, None),
            "temperature": 0.0,
            "timeout": timeout_ns,
            "drain": Duration(timeout_ns + NS_PER_S),
            "duration": None if duration is None else _parse_duration("duration", duration),
            "stop_when": StopConditions() if stop_when is None else parse_stop_when(stop_when),
            "slo": None if slo is None else Objectives.parse(slo, "slo").text,
            "capture": None if capture is None else str(capture),
        }
    )


def _check_options(options: Mapping[str, object], options_type: type, function: str) -> None:
    """Raise TypeError for an option that is not in the TypedDict, like a call with an unknown keyword."""
    for name in options.keys() - options_type.__annotations__.keys():
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}; see help(llmtap.{function})"
        )


def compare(
    *results: "ReplayResult | Mapping[str, Any] | str | Path",
    labels: Sequence[str] | None = None,
    fail_if_worse: str | Iterable[str] | None = None,
) -> ComparisonResult:
    """Compare results of replays with the first of them, like `llmtap report --compare`. Raises ConfigError.

    A result is a ReplayResult, its JSON, or a file that `llmtap replay --json` wrote. `fail_if_worse`: one or
    several tolerances, such as `"ttft_p99:5%"`, or `"all"`. It needs the extra `bench` of the package.
    """
    from llmtap.load.replay.comparison import compare_replays
    from llmtap.load.replay.saved_replay import SavedReplay

    if len(results) < 2:
        raise ConfigError(
            "compare", f"needs at least two results, got {len(results)}", "such as compare(before, after)"
        )
    names = labels or [
        Path(one).stem if isinstance(one, str | Path) else f"result {i}" for i, one in enumerate(results, 1)
    ]
    if len(names) != len(results) or len(set(names)) != len(names):
        raise ConfigError(
            "labels",
            f"expected a different label for each of {len(results)} results, got {list(names)}",
            'such as labels=["before", "after"]',
        )
    named = {label: _json_of(one) for label, one in zip(names, results, strict=True)}
    replays = {
        label: SavedReplay.of(named[label], str(one) if isinstance(one, str | Path) else label)
        for label, one in zip(names, results, strict=True)
    }
    comparison = compare_replays(replays)
    changes = replay_changes(comparison, named)
    judged: list[JudgedChange] = []
    if fail_if_worse is not None:
        texts = [fail_if_worse] if isinstance(fail_if_worse, str) else list(fail_if_worse)
        tolerances = Tolerances.parse(texts, "fail_if_worse")
        judged = judge_replays(tolerances, named, partial(compare_replays, replays))
        comparison = msgspec.structs.replace(comparison, regression=judged)
    return ComparisonResult(json_value(comparison), changes, judged, comparison.same_load)


class SimulationOptions(TypedDict, total=False):
    """Keyword options of `simulate`. If an option has several values, each value is simulated."""

    scale: float | Sequence[float] | None
    rate: float | Sequence[float] | None
    requests: int | Sequence[int] | None
    servers: int | Sequence[int] | None
    seed: int | Sequence[int] | None
    serving: Mapping[str, Any] | None
    """Options of the iteration-level schedulers; `llmtap sim run --readings` lists them."""
    readings: Mapping[str, Any] | None
    """Choices that the paper on multi-bin batching leaves open; `llmtap sim run --readings` lists them."""
    latency: str | Path | None
    slo: str | None
    jobs: int | None
    """Number of processes (default: 1); None: number of CPUs."""


def simulate(
    trace: str | Path,
    scheduler: str | Sequence[str] = "continuous_batching",
    **options: Unpack[SimulationOptions],
) -> SimulationResults:
    """Simulate a trace with one or more schedulers in virtual time, like `llmtap sim run`.

    Every combination of the given values is simulated. With more than one process (`jobs`), call this
    function below `if __name__ == "__main__":`. `options`: see `SimulationOptions`. Raises ConfigError.
    """
    from dataclasses import replace

    from llmtap.cli.sim_sweep import (
        AxesReader,
        SweepPlan,
        fit_model,
        objectives_text,
        run_sweep,
        scheduler_names,
    )
    from llmtap.errors import LlmtapError

    _check_options(options, SimulationOptions, "simulate")
    sweep_axes = AxesReader()
    sweep_axes.set_schedulers(_option_text(scheduler))
    for name, kind in (("scale", float), ("rate", float), ("requests", int), ("servers", int), ("seed", int)):
        values = options.get(name)
        sweep_axes.set_numbers(name, None if values is None else _option_text(values), kind)
    for option, settings in (("--serving", options.get("serving")), ("--reading", options.get("readings"))):
        sweep_axes.set_options([f"{name}={value}" for name, value in (settings or {}).items()], option)
    axes = sweep_axes.all_axes(None, "")
    latency = options.get("latency")
    common = replace(
        fit_model(None if latency is None else str(latency), scheduler_names(axes, None)),
        objectives=objectives_text(options.get("slo"), None),
    )
    outcome = run_sweep(SweepPlan(str(trace), None, axes, None, common), workers=options.get("jobs", 1))
    if outcome.failed:
        raise LlmtapError("at least one simulation failed; the messages on stderr give the reasons")
    return SimulationResults([Result(one) for one in outcome.summaries], outcome.notes)


class _SilentListener:
    """A progress listener that shows nothing."""

    def on_preparing(self, done: int, of: int) -> None: ...

    def on_warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None: ...

    def on_sending(self, progress: "Progress", planned: int | None) -> None: ...

    def on_writing_capture(self, done: int, of: int) -> None: ...

    def on_comparing(self, done: int, of: int | None) -> None: ...


def _run_coroutine(make: Callable[[], Awaitable[_T]]) -> _T:
    """Run a coroutine and return its result; use a separate thread if this one runs an event loop."""

    async def run() -> _T:
        return await make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    results: list[_T] = []
    errors: list[BaseException] = []

    def run_in_thread() -> None:
        try:
            results.append(asyncio.run(run()))
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run_in_thread)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _figure_values(result: Mapping[str, Any]) -> Iterator[FigureValue]:
    for figure in every_figure(result):
        value, validity = figure.value(result), validity_of(figure, result)
        assert value is not None
        yield FigureValue(
            figure.name, value, samples_of(figure, result), figure.better, validity.state, validity.reason
        )


def _parse_duration(name: str, value: str | float) -> Duration:
    try:
        return Duration(parse_duration_ns(value))
    except ValueError as exc:
        raise ConfigError(name, str(exc)) from None


def _json_of(result: "ReplayResult | Mapping[str, Any] | str | Path") -> Mapping[str, Any]:
    if isinstance(result, ReplayResult):
        return result.json
    if isinstance(result, Mapping):
        return result
    from llmtap.cli.results import load_result

    loaded = load_result(result)
    if loaded is None:
        hint = "write one with llmtap replay --json FILE"
        raise ConfigError("compare", f"the file '{result}' is not a result of llmtap replay", hint)
    return loaded


def _option_text(values: Any) -> str:
    """Return one or several values as the text of a command's option: separated by commas."""
    if isinstance(values, str):
        return values
    return ",".join(map(str, values if isinstance(values, Sequence) else [values]))


def _data_frame(rows: Sequence[Any], kind: type[msgspec.Struct]) -> "pd.DataFrame":
    import pandas as pd

    names = kind.__struct_fields__
    return pd.DataFrame([[getattr(row, name) for name in names] for row in rows], columns=names)
