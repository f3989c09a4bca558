"""Turn the options of `llmtap sim run` into the axes of a sweep, run it, and show progress.

Used by `cli/sim_run.py` and `api.py`: `AxesReader` checks and collects the axes, `run_sweep` returns the
summaries of all runs. This module also prints the lists of `--readings` and `--presets`. Progress is a bar in
a terminal, else a line for each completed job.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from llmtap.cli.shared import check_known, print_message, print_table, read_objectives
from llmtap.errors import ConfigError
from llmtap.options.fields import options_of
from llmtap.report.document import Table
from llmtap.sim.model_options import ModelOptions, Serving, read_model_options, read_serving
from llmtap.sim.routing import ROUTERS
from llmtap.sim.schedulers.registry import ALL_OPTIONS, SCHEDULERS
from llmtap.sim.sweep.batch_grid import GridError, fit_batches, length_counted, load_grid
from llmtap.sim.sweep.engine_load import KvMemory
from llmtap.sim.sweep.fit_report import capture_report, grid_report
from llmtap.sim.sweep.fitting import fit_capture
from llmtap.sim.sweep.grid import LOADS, PRESETS, READINGS, SERVING, GridSource, Preset, SweepGrid
from llmtap.sim.sweep.runner import Results, SweepRunner
from llmtap.sim.sweep.sweep import JobOptions, SweepAttempt, SweepJob
from llmtap.workload.registry import workload_texts

_MAXIMA: Final = {
    "requests": 1_000_000_000,
    "servers": 10_000,
    "scale": 1_000_000_000,
    "rate": 1_000_000_000,  # One request per ns: with more, all requests would arrive at the same time.
    "seed": (1 << 63) - 1,
}
"""By axis of numbers: the maximum value, above which a number is refused."""
_LIST_HINT: Final = "`llmtap sim run --readings` lists the readings and options of serving"
_DEFAULT_SCHEDULERS: Final = ("static_fifo", "dynamic_no_bins", "multi_bin_dynamic")
_OTHER_OPTION: Final = {
    "--reading": (SERVING, "an option of serving", "--serving"),
    "--serving": (READINGS, "a reading", "--reading"),
}
"""For each of two options that are easily confused: the names of the other one, their description, and its
flag. A name that is given to the wrong option gets an error with this hint."""


class AxesReader:
    """Reader of a sweep's axes: by axis, its values and the option that set them."""

    def __init__(self) -> None:
        self._axes: dict[str, tuple[Any, ...]] = {}
        """By axis: its values."""
        self._options: dict[str, str] = {}
        """By axis: option that set it, for error messages."""

    def set_schedulers(self, text: str | None) -> None:
        if text is not None:
            self._set_axis("scheduler", names_in(text, "--scheduler", "scheduler", SCHEDULERS), "--scheduler")

    def set_routers(self, text: str | None) -> None:
        if text is not None:
            self._set_axis("router", names_in(text, "--router", "router", ROUTERS), "--router")

    def set_numbers(self, name: str, text: str | None, kind: Callable[[str], int | float]) -> None:
        """Set an axis from numbers separated by commas (above 0; seeds: 0 or above). Raises ConfigError."""
        if text is None:
            return
        option = f"--{name}"
        values = []
        for part in _split_list(text):
            try:
                value = kind(part)
            except ValueError:
                expected = "a whole number" if kind is int else "a number"
                raise ConfigError(option, f"expected {expected}, got {part!r}") from None
            least = "at least 0" if name == "seed" else "more than 0"
            if not (value >= 0 if name == "seed" else value > 0):
                raise ConfigError(option, f"expected {least}, got {part}")
            if value > _MAXIMA[name]:
                raise ConfigError(option, f"expected at most {_MAXIMA[name]:,}, got {part}")
            values.append(value)
        if not values:
            raise ConfigError(option, f"expected at least one value, got {text!r}", f"such as {option} 1,2")
        self._set_axis(name, values, option)

    def set_options(self, words: Sequence[str], option: str) -> None:
        """Set options of `ModelOptions` or `Serving` from texts NAME=VALUE. Raises ConfigError.

        `--vary` takes several values, as NAME=VALUE,VALUE or, if values contain commas, NAME=VALUE|VALUE.
        """
        several = option == "--vary"
        other_names, description, other_option = _OTHER_OPTION.get(option, ((), "", ""))
        for word in words:
            name, separator, text = word.partition("=")
            name = name.strip().replace("-", "_")
            if not separator or not name:
                shape = "NAME=VALUE,VALUE" if several else "NAME=VALUE"
                raise ConfigError(option, f"expected {shape}, got {word!r}", _LIST_HINT)
            if name in other_names:
                raise ConfigError(
                    option, f"{name} is {description}", f"use {other_option} {name}={text.strip()}"
                )
            values = _split_list(text, "|" if "|" in text else ",") if several else [text.strip()]
            if not values:
                raise ConfigError(option, f"{name} has no values", f"such as {option} {name}=1,2")
            read = read_serving if option == "--serving" or name in SERVING else read_model_options
            try:
                for value in values:
                    read({name: value})
            except ValueError as exc:
                if option != f"--{name}":
                    raise ConfigError(option, str(exc), _LIST_HINT) from None
                vary = f"for several values: --vary {word}" if "," in text else None
                raise ConfigError(option, str(exc).removeprefix(f"{name}: "), vary) from None
            self._set_axis(name, values, option)

    def all_axes(self, preset: Preset | None, preset_name: str) -> dict[str, tuple[Any, ...]]:
        """Return all axes. Axes that were not given come from the preset, or have their defaults.

        Raises ConfigError for an option that no scheduler reads.
        """
        axes = dict(self._axes)
        variants = () if preset is None else preset.variants
        fixed = {name for variant in variants for name in variant}
        for name, option in self._options.items():
            if name in fixed:
                problem = f"the preset {preset_name} already varies {name}"
                raise ConfigError(option, problem, f"leave out {option}, or --preset")
        if preset is not None:
            loaded = any(name in axes for name in LOADS)
            axes = {n: v for n, v in preset.axes.items() if not (loaded and n in LOADS)} | axes
        if "scheduler" not in fixed:
            axes = {"scheduler": _DEFAULT_SCHEDULERS} | axes
        if "bin_edges" in axes and "bins" in axes:
            raise ConfigError(
                self._options["bin_edges"],
                "bin_edges cannot be combined with bins",
                "for several numbers of bins: --vary bins=4,8",
            )
        used = scheduler_names(axes, preset)
        if "router" in axes:
            servers_max = max(axes.get("servers", (1,)))
            if servers_max == 1:
                raise ConfigError(
                    "--router",
                    "has no effect with one server",
                    "to simulate several servers, use --servers 2",
                )
            if not any(SCHEDULERS[name].iterates for name in used):
                iterating = ", ".join(name for name, kind in SCHEDULERS.items() if kind.iterates)
                raise ConfigError(
                    "--router",
                    f"has no effect on {', '.join(used)}, whose servers have one queue",
                    f"it has an effect on {iterating}",
                )
        for name in self._options.keys() & ALL_OPTIONS:
            readers = [one for one, kind in SCHEDULERS.items() if name in kind.options_read]
            if not set(used) & set(readers):
                raise ConfigError(
                    self._options[name],
                    f"{name} has no effect on {', '.join(used)}",
                    f"it has an effect on {', '.join(readers)}",
                )
        return axes

    def kv_memory(self, axes: dict[str, tuple[Any, ...]], blocks: int) -> KvMemory:
        """Return the KV memory of the captured server, from `--fit-kv-blocks`.

        The axes of the simulated servers get the same memory, unless `axes` has another size.
        """
        sizes = axes.get("block", (str(Serving().block),))
        if len(sizes) > 1:
            raise ConfigError(
                "--fit-kv-blocks",
                f"requires one block size, got {', '.join(sizes)}",
                "such as --serving block=16",
            )
        block_tokens = int(sizes[0])
        axes.setdefault("kv_tokens", (str(blocks * block_tokens),))
        return KvMemory(blocks, block_tokens)

    def _set_axis(self, name: str, values: Sequence[Any], option: str) -> None:
        """Set the values of an axis; refuse a second option for the same axis."""
        before = self._options.get(name)
        if before is not None:
            problem = "twice" if before == option else f"also by {before}"
            raise ConfigError(option, f"{name} is set {problem}", "set each name once")
        self._options[name] = option
        self._axes[name] = tuple(dict.fromkeys(values))


def names_in(text: str, option: str, kind: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the names in a text, separated by commas. Raises ConfigError if a name is not in `known`."""
    names = tuple(dict.fromkeys(_split_list(text)))
    for name in names:
        check_known(option, kind, name, known)
    if not names:
        raise ConfigError(option, f"expected at least one value, got {text!r}", f"known: {', '.join(known)}")
    return names


def preset_named(name: str | None) -> Preset | None:
    """Return the preset of this name; None if `name` is None. Raises ConfigError."""
    if name is None:
        return None
    check_known("--preset", "preset", name, PRESETS)
    return PRESETS[name]


def scheduler_names(axes: Mapping[str, Sequence[Any]], preset: Preset | None) -> list[str]:
    """Return the names of the schedulers that will run."""
    variants = () if preset is None else preset.variants
    named = [variant["scheduler"] for variant in variants if "scheduler" in variant]
    return list(dict.fromkeys([*axes.get("scheduler", ()), *named]))


def objectives_text(slo: str | None, preset: Preset | None, goodput: str | None = None) -> str:
    """Return the objectives of `--slo`, `--goodput` or the preset, in the form of `--slo`; empty if there are
    none. Raises ConfigError."""
    if slo is not None and not slo.strip():
        raise ConfigError("--slo", f"expected an objective, got {slo!r}", "such as --slo ttft:1s")
    if slo is None and goodput is None and preset is not None:
        slo = preset.objectives or None
    return read_objectives(slo, goodput) or ""


def fit_model(
    place: str | None,
    schedulers: Sequence[str],
    *,
    source_format: str | None = None,
    chunk: int | None = None,
    memory: KvMemory | None = None,
) -> JobOptions:
    """Return options of jobs: the latency model fitted to the grid or capture `place`, and the fit's report.

    If `place` is None, the options are the defaults. `chunk`: tokens per iteration of the captured server,
    if it has chunked prefill. `memory`: KV memory of the captured server. Raises ConfigError.
    """
    is_grid = place is not None and place.endswith(".csv") and source_format is None
    options = {"--fit-chunk": chunk, "--fit-kv-blocks": memory, "--latency-from": source_format}
    for option, value in options.items():
        if value is not None and (place is None or is_grid):
            raise ConfigError(option, "has no effect without --latency CAPTURE", f"leave out {option}")
    if place is None:
        return JobOptions()
    for name in schedulers:
        if SCHEDULERS[name].iterates is is_grid:
            kind = "whole batches, not of iterations" if is_grid else "iterations"
            serves = "works in iterations" if is_grid else "works in whole batches"
            raise ConfigError(
                "--latency",
                f"{place} has the durations of {kind}, but the scheduler {name} {serves}",
                "give another --latency, or another --scheduler",
            )
    if not is_grid:
        capture = fit_capture(
            place, source_format=source_format, option="--latency-from", chunk=chunk, memory=memory
        )
        report = capture_report(place, capture, memory_known=memory is not None)
        return JobOptions(iterations=capture.model, fit=report)
    try:
        grid, counted = fit_batches(load_grid(place)), length_counted(place)
    except GridError as exc:
        hint = "give a grid of batches (CSV) with batch_size, max_seq_len and mean_latency_sec, or a capture"
        raise ConfigError("--latency", f"{place}: {exc}", hint) from None
    except (OSError, UnicodeDecodeError) as exc:
        problem = f"cannot read {place}: {getattr(exc, 'strerror', exc)}"
        raise ConfigError("--latency", problem, "check the path and its permissions") from None
    return JobOptions(model=grid.model, fit=grid_report(place, grid, counted))


def _split_list(text: str, mark: str = ",") -> list[str]:
    return [part.strip() for part in text.split(mark) if part.strip()]


class SweepProgress:
    """Progress display. It shows the share of requests, not of jobs, because jobs differ in size."""

    def __init__(self, bar: Any, *, lines: bool) -> None:
        """`bar`: progress bar of the package rich. `lines`: whether to print a line for each ended job."""
        self._bar = bar
        self._prints_lines = lines
        """Whether to print a line for each job."""
        self._task = bar.add_task("reading", total=None)
        self._job_count = self._ended_jobs = self._ended_effort = 0
        """Number of jobs, of ended jobs, and the estimated work of the ended jobs."""

    def on_reading(self, done: int, of: int | None) -> None:
        self._bar.update(self._task, completed=done, total=of)

    def on_planned(self, jobs: Sequence[SweepJob], done_before: int) -> None:
        self._job_count, self._ended_jobs, self._ended_effort = len(jobs), 0, 0
        self._bar.reset(self._task, total=sum(job.effort for job in jobs), description="simulating")
        if done_before:
            self._print(f"{done_before:,} done before and taken from the results, {len(jobs):,} left")

    def on_progress(self, job: SweepJob, arrived: int) -> None:
        self._bar.update(self._task, completed=self._ended_effort + job.effort * arrived // job.count)

    def on_ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        self._ended_jobs += 1
        self._ended_effort += job.effort
        progress = f"{self._ended_jobs:,} of {self._job_count:,}"
        self._bar.update(self._task, completed=self._ended_effort, description=progress)
        outcome = f"{attempt.seconds:.2f} s" if attempt.error is None else f"failed: {attempt.error}"
        self._print(f"{progress}: {job.name} ({attempt.id}): {outcome}")

    def _print(self, text: str) -> None:
        if self._prints_lines:
            print_message(text)


@contextmanager
def _progress_bar(*, loud: bool) -> Iterator[SweepProgress]:
    """Yield a progress display: a bar on a terminal; without a terminal, lines if `loud`, else nothing."""
    from rich.console import Console
    from rich.progress import Progress

    shown = sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        yield SweepProgress(bar, lines=loud and not shown)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Input of `run_sweep`: a trace, the values of the axes, and the options that all jobs share."""

    trace: str
    source_format: str | None
    axes: dict[str, tuple[Any, ...]]
    """By name of an axis: its values."""
    preset: Preset | None
    """Preset from which axes and options come; None: none."""
    common_options: JobOptions


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """Results of `run_sweep`."""

    summaries: list[dict[str, Any]]
    """Summaries of the completed jobs, in the order of the grid."""
    notes: list[str]
    failed: bool
    """Whether a job failed; messages on stderr give the reasons."""


def run_sweep(
    plan: SweepPlan,
    *,
    results: Path | None = None,
    workers: int | None = None,
    ray: str | None = None,
    loud: bool = False,
    on_begin: Callable[[SweepRunner], None] = lambda runner: None,
) -> SweepOutcome:
    """Run all jobs of a sweep, and print the errors of failed jobs.

    Args:
        results: file to which each result is appended, and from which completed jobs are taken.
        workers: number of processes; None: number of CPUs.
        loud: whether to print a line for each completed job if stderr is not a terminal.
        on_begin: function that gets the runner before the jobs run, for example to count its attempts later.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(_progress_bar(loud=loud))
        results_file = None
        if results is not None:
            results_file = Results(results)
            stack.callback(results_file.close)
        source = GridSource(plan.trace, source_format=plan.source_format, progress=listener.on_reading)
        sweeper = SweepRunner(source.traces, listener, results=results_file, workers=workers, ray=ray)
        on_begin(sweeper)
        planned = SweepGrid(source, plan.common_options).jobs(plan.axes, plan.preset, sweeper.run)
        if "seed" in plan.axes and all(job.seed is None for job in planned):
            source.remarks.append("seed has no effect: nothing in this sweep is random")
        attempts = sweeper.run(planned)
    finished = [attempts[job.id] for job in planned]
    failed = [(job, a.error) for job, a in zip(planned, finished, strict=True) if a.error is not None]
    for job, error in failed:
        print_message(f"{job.name} {job.id}: {error}")
    summaries = [one.summary for one in finished if one.summary is not None]
    return SweepOutcome(summaries, source.notes, bool(failed))


def show_readings() -> None:
    """Print the schedulers, and the options of --reading and --serving."""
    for words, iterates in (("iteration-level schedulers", True), ("schedulers of whole batches", False)):
        print(f"{words}: {', '.join(n for n, kind in SCHEDULERS.items() if kind.iterates == iterates)}")
    print()
    kinds: dict[str, type[Struct]] = {"reading": ModelOptions, "serving": Serving}
    for i, (noun, kind) in enumerate(kinds.items()):
        rows = [[o.name, o.default_text or "-", o.meaning_with_choices] for o in options_of(kind)]
        print("\n" * bool(i), end="")
        print_table(Table([noun, "default", "meaning"], rows))


def show_presets() -> None:
    """Print the presets and the workloads."""
    rows = []
    for name, preset in PRESETS.items():
        axes = "; ".join(f"{axis} {','.join(map(str, values))}" for axis, values in preset.axes.items())
        about = f"{preset.description} (TRACE: {preset.trace})" if preset.trace else preset.description
        rows.append([name, about, preset.source, axes])
    print_table(Table(["preset", "about", "source", "axes"], rows))
    print()
    print_table(Table(["workload", "about"], [list(one) for one in workload_texts().items()]))
