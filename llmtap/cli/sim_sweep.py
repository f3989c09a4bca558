"""Turn the options of `llmtap sim run` into the axes of a sweep, run it, and show progress.

For `cli/sim.py`: `AxesRead` checks and collects the axes, `run_sweep` returns the summaries of all runs. Also
prints the lists of `--readings` and `--presets`. Progress is a bar in a terminal, else a line for each job
that is done. A job is named by its scheduler, its size, what the sweep varies, and what else differs from its
default.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.cli.shared import check_known, print_table
from llmtap.errors import ConfigError
from llmtap.metrics.objectives import Objectives
from llmtap.report.document import Table
from llmtap.report.values import number, setting_text
from llmtap.sim.model_options import (
    ModelOptions,
    Serving,
    explain_model_options,
    explain_serving,
    read_model_options,
    read_serving,
    settled,
)
from llmtap.sim.schedulers.registry import ALL_OPTIONS, CONDITIONS, SCHEDULERS, options_read
from llmtap.sim.sweep.fitting import GridError, fit_batches, fit_capture, length_counted, load_grid
from llmtap.sim.sweep.grid import LOADS, PRESETS, READINGS, SERVING, GridSource, SweepGrid, points, read_at
from llmtap.sim.sweep.runner import Results, SweepRunner
from llmtap.sim.sweep.sweep import CAPACITY_BY, SweepAttempt, SweepJob
from llmtap.units import encode_seconds
from llmtap.workload.registry import workloads

_AT_MOST: Final = {
    "requests": 1_000_000_000,
    "servers": 10_000,
    "scale": 1_000_000_000,
    "rate": 1_000_000_000,  # more than one a nanosecond are all at once
    "seed": (1 << 63) - 1,
}
_LISTING: Final = "llmtap sim run --readings lists readings and options of serving"
_DEFAULT_SCHEDULERS: Final = ("static_fifo", "dynamic_no_bins", "multi_bin_dynamic")


class AxesRead:
    def __init__(self) -> None:
        self.axes: dict[str, tuple[Any, ...]] = {}
        self._options: dict[str, str] = {}

    def schedulers(self, text: str | None) -> None:
        if text is None:
            return
        names = _parts(text)
        for name in names:
            check_known("--scheduler", "scheduler", name, SCHEDULERS)
        if not names:
            raise ConfigError("--scheduler", "expected at least one value")
        self._set("scheduler", names, "--scheduler")

    def load(self, scale: str | None, rate: str | None) -> None:
        """Set the load: a scale or a rate."""
        if scale is not None and rate is not None:
            raise ConfigError("--rate", "cannot be combined with --scale")
        self.numbers("scale", scale, float)
        self.numbers("rate", rate, float)

    def numbers(self, name: str, text: str | None, kind: Callable[[str], int | float]) -> None:
        """Set numbers above 0, separated by commas; a seed may be 0."""
        if text is None:
            return
        option = f"--{name}"
        values = []
        for part in _parts(text):
            try:
                value = kind(part)
            except ValueError:
                expected = "a whole number" if kind is int else "a number"
                raise ConfigError(option, f"expected {expected}, got {part!r}") from None
            least = "at least 0" if name == "seed" else "more than 0"
            if not (value >= 0 if name == "seed" else value > 0):
                raise ConfigError(option, f"expected {least}, got {part}")
            if value > _AT_MOST[name]:
                got = f"{value:,}" if isinstance(value, int) else part
                raise ConfigError(option, f"expected at most {_AT_MOST[name]:,}, got {got}")
            values.append(value)
        if not values:
            raise ConfigError(option, "expected at least one value")
        self._set(name, values, option)

    def text(self, name: str, text: str | None, option: str) -> None:
        """One value of a reading that has an option of its own."""
        if text is None:
            return
        try:
            _check(name, text)
        except ValueError as exc:
            several = f"for several values: --vary {name}={text}" if "," in text else None
            raise ConfigError(option, str(exc).partition(": ")[2] or str(exc), several) from None
        self._set(name, [text], option)

    def settings(self, given: Sequence[str], option: str) -> None:
        """NAME=VALUE: readings or options of serving; for `--vary` with values apart by commas, or by bars
        where values hold commas themselves."""
        elsewhere = {"--reading": (SERVING, "an option of serving", "--serving"),
                     "--serving": (READINGS, "a reading", "--reading")}  # fmt: skip
        for one in given:
            name, found, text = one.partition("=")
            name = name.strip().replace("-", "_")
            several = option == "--vary"
            if not found or not name:
                shape = "NAME=VALUE,VALUE" if several else "NAME=VALUE"
                raise ConfigError(option, f"expected {shape}, got {one!r}", _LISTING)
            others, what, theirs = elsewhere.get(option, ((), "", ""))
            if name in others:
                raise ConfigError(option, f"{name} is {what}", f"{theirs} {name}={text.strip()}")
            values = _parts(text, "|" if "|" in text else ",") if several else [text.strip()]
            if not values:
                raise ConfigError(option, f"{name} has no values")
            for value in values:
                try:
                    _check(name, value, serving=option == "--serving" or (several and name in SERVING))
                except ValueError as exc:
                    raise ConfigError(option, str(exc), _LISTING) from None
            self._set(name, values, option)

    def whole(self, preset: Any, preset_name: str) -> dict[str, tuple[Any, ...]]:
        """All axes, with those of a preset, and defaults, where nothing was given. Each that was given has an
        effect on some run."""
        axes = self.axes
        if preset is not None:
            fixed = {name for variant in preset.variants for name in variant}
            for name, option in self._options.items():
                if name in fixed:
                    raise ConfigError(option, f"the preset {preset_name} varies {name}")
            loaded = any(name in axes for name in LOADS)
            kept = {n: v for n, v in preset.axes.items() if not (loaded and n in LOADS)}
            axes = kept | axes
            if "scheduler" not in fixed:
                axes.setdefault("scheduler", _DEFAULT_SCHEDULERS)
        else:
            axes = {"scheduler": _DEFAULT_SCHEDULERS} | axes
        if "bin_edges" in axes and "bins" in axes:
            raise ConfigError(
                self._options["bin_edges"],
                "cannot give edges if the number of bins is set",
                "for several numbers of bins: --vary bins=4,8",
            )
        self._check_servers(axes)
        self._check_read(axes, preset)
        return axes

    def _check_read(self, axes: dict[str, tuple[Any, ...]], preset: Any) -> None:
        given = self._options.keys() & ALL_OPTIONS
        variants = ({},) if preset is None else preset.variants
        for point in points({n: v for n, v in axes.items() if n in ALL_OPTIONS | {"scheduler"}}, variants):
            given = given - read_at(point)
            if not given:
                return
        name = next(name for name in self._options if name in given)
        used = scheduler_names(axes, preset)
        conditional = [one for one in used if name in SCHEDULERS[one].reads]
        if conditional:
            other = CONDITIONS[name][0] if name in CONDITIONS else "memory_check"
            raise ConfigError(
                self._options[name],
                f"{name} has no effect on {', '.join(conditional)} with {other} as it is", _LISTING,
            )  # fmt: skip
        readers = [one for one, kind in SCHEDULERS.items() if name in kind.reads]
        raise ConfigError(
            self._options[name],
            f"{name} has no effect on {', '.join(used)}",
            f"it has an effect on {', '.join(readers)}",
        )

    def _check_servers(self, axes: dict[str, tuple[Any, ...]]) -> None:
        several = [n for n in axes.get("servers", ()) if n > 1]
        for name in axes.get("scheduler", ()):
            if several and SCHEDULERS[name].iterates:
                raise ConfigError("--servers", f"{name} simulates one GPU, got {several[0]}")

    def _set(self, name: str, values: Sequence[Any], option: str) -> None:
        before = self._options.get(name)
        if before is not None:
            again = "twice" if before == option else f"by {before} as well"
            raise ConfigError(option, f"{name} is set {again}")
        self._options[name] = option
        self.axes[name] = tuple(dict.fromkeys(values))


def preset_named(name: str | None) -> Any:
    """Return the preset; None for None. Raises ConfigError."""
    if name is None:
        return None
    check_known("--preset", "preset", name, PRESETS)
    return PRESETS[name]


def axes_of(axes: Mapping[str, Sequence[Any]], preset: Any) -> dict[str, Sequence[Any]]:
    """Return all values that vary, including those of a preset's variants."""
    variants = () if preset is None else preset.variants
    names = dict.fromkeys(name for variant in variants for name in variant)
    of_variants = {
        name: tuple(dict.fromkeys(variant[name] for variant in variants if name in variant)) for name in names
    }
    return {**of_variants, **axes}


def scheduler_names(axes: Mapping[str, Sequence[Any]], preset: Any) -> list[str]:
    """Return the schedulers that will run."""
    variants = () if preset is None else preset.variants
    named = [variant["scheduler"] for variant in variants if "scheduler" in variant]
    return list(dict.fromkeys([*axes.get("scheduler", ()), *named]))


def objectives_text(slo: str | None, preset: Any) -> str:
    """Return the objectives in canonical form; empty if there are none."""
    if slo is not None and not slo.strip():
        raise ConfigError("--slo", "expected an objective", "such as --slo 'ttft:1s tbc_max:200ms'")
    text = slo if slo is not None else preset.objectives if preset is not None else ""
    return Objectives.parse(text, "--slo").text if text else ""


def capacity_bounds(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_parts(text)))
    for name in names:
        check_known("--capacity-by", "bound", name, CAPACITY_BY)
    if not names:
        raise ConfigError("--capacity-by", "expected at least one value")
    return names


def option_defaults() -> dict[str, dict[str, dict[str, Any]]]:
    """By scheduler: readings and options of serving as summaries have them when nobody sets any."""
    return {
        name: {
            "readings": msgspec.to_builtins(ModelOptions(), enc_hook=encode_seconds),
            "serving": msgspec.to_builtins(settled(Serving(), name), enc_hook=encode_seconds),
        }
        for name in SCHEDULERS
    }


def models_fitted(place: str | None, chunk: int | None, schedulers: Sequence[str]) -> dict[str, Any]:
    """Fields of jobs: models fitted to a grid or a capture, and how well; none where neither is given.

    `chunk`: tokens of an iteration of the server that was captured, where it takes prompts in in pieces.
    """
    if place is None:
        if chunk is not None:
            raise ConfigError("--fit-chunk", "requires a capture as --latency")
        return {}
    is_grid = place.endswith(".csv")
    if is_grid and chunk is not None:
        raise ConfigError("--fit-chunk", f"requires a capture as --latency, and {place} is a grid")
    for name in schedulers:
        if SCHEDULERS[name].iterates is is_grid:
            kind = "whole batches, not of iterations" if is_grid else "iterations"
            serves = "composes iterations" if is_grid else "serves whole batches"
            raise ConfigError("--latency", f"{place} has the durations of {kind}, and {name} {serves}")
    if not is_grid:
        found = fit_capture(place, chunk=chunk)
        r2 = min(found.prefill.r2, found.decode.r2)
        return {"iterations": found.model, "fit": {"capture": place, "r2": r2, **found.to_dict()}}
    try:
        fitted, counted = fit_batches(load_grid(place)), length_counted(place)
    except GridError as exc:
        raise ConfigError("--latency", f"{place}: {exc}") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--latency", f"cannot read {place}: {getattr(exc, 'strerror', exc)}") from None
    part = fitted.part
    told = {"grid": place, "r2": part.r2, "points": part.points, "error_max": part.error_max}
    if counted is not None:
        told["length"] = counted
    return {"model": fitted.model, "fit": told}


def _parts(text: str, mark: str = ",") -> list[str]:
    return [part.strip() for part in text.split(mark) if part.strip()]


def _check(name: str, text: str, *, serving: bool = False) -> None:
    if serving:
        read_serving({name: text})
    else:
        read_model_options({name: text})


_AT_ONCE_RPS: Final = 1e9
"""More than one a nanosecond."""


class SweepLabels:
    def __init__(
        self, axes: Mapping[str, Sequence[Any]], rate_of: Callable[[SweepJob], float | None]
    ) -> None:
        """`rate_of`: at how many requests a second a job's arrive; None where all do at once."""
        self._varied = {name for name, values in axes.items() if len(values) > 1}
        self._rate_of = rate_of if axes.keys() & {"rate", "share"} else None

    def of(self, job: SweepJob) -> str:
        said = [job.scheduler, f"{job.count:,} requests"]
        if self._rate_of is not None:
            rate_rps = self._rate_of(job)
            at_once = rate_rps is None or rate_rps >= _AT_ONCE_RPS
            said.append("all at once" if at_once else f"{number(rate_rps)} req/s")
        elif job.scale != 1 or "scale" in self._varied:
            said.append(f"scale {number(job.scale)}")
        if job.servers != 1 or "servers" in self._varied:
            said.append(f"{job.servers} server{'' if job.servers == 1 else 's'}")
        if job.seed is not None and (job.seed != 42 or "seed" in self._varied):
            said.append(f"seed {job.seed}")
        reads = options_read(job.scheduler, job.readings, job.serving)
        usual = (ModelOptions(), settled(Serving(), job.scheduler))
        for options, default in zip((job.readings, job.serving), usual, strict=True):
            values, unset = (msgspec.to_builtins(one, enc_hook=encode_seconds) for one in (options, default))
            said += [
                setting_text(name, value)
                for name, value in values.items()
                if name in reads and (value != unset[name] or name in self._varied)
            ]
        return ", ".join(said)


class Quiet:
    """Says nothing: for a run that is over soon, and whose output goes to a program."""

    def reading(self, done: int, of: int | None) -> None:
        pass

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        pass

    def under_way(self, job: SweepJob, arrived: int) -> None:
        pass

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        pass


class SweepLines(Quiet):
    def __init__(self, labels: SweepLabels) -> None:
        self._label = labels.of
        self._jobs = self._ended = 0

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        self._jobs, self._ended = len(jobs), 0
        if kept:
            _say(f"{kept:,} done before and taken from the results, {len(jobs):,} left")

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        self._ended += 1
        what = f"{self._label(job)} ({attempt.id})"
        how = f"{attempt.seconds:.2f} s" if attempt.error is None else f"failed: {attempt.error}"
        _say(f"{self._ended:,} of {self._jobs:,}: {what}: {how}")


class _Bar(SweepLines):
    """A bar, which goes by requests and not by jobs: some have a thousand times as many."""

    def __init__(self, labels: SweepLabels, bar: Any) -> None:
        super().__init__(labels)
        self._bar = bar
        self._reading = bar.add_task("reading", total=None)
        self._task: Any = None
        self._done = self._doing = 0

    def reading(self, done: int, of: int | None) -> None:
        self._bar.update(self._reading, completed=done, total=of)

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        self._bar.update(self._reading, visible=False)
        if self._task is not None:
            self._bar.update(self._task, visible=False)
        self._jobs, self._ended, self._done = len(jobs), 0, 0
        total = sum(job.effort for job in jobs)
        self._task = self._bar.add_task(self._title(), total=total, visible=bool(jobs))
        if kept:
            self._bar.console.print(f"{kept:,} done before and taken from the results, {len(jobs):,} left")

    def under_way(self, job: SweepJob, arrived: int) -> None:
        self._doing = job.effort * arrived // job.count
        self._show(job.scheduler)

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        self._ended += 1
        self._done += job.effort
        self._doing = 0
        if attempt.error is not None:
            self._bar.console.print(f"{self._label(job)} failed: {attempt.error}")
        self._show(job.scheduler)

    def _title(self) -> str:
        return f"{self._ended:,} of {self._jobs:,}"

    def _show(self, scheduler: str) -> None:
        self._bar.update(
            self._task, completed=self._done + self._doing, description=f"{self._title()} {scheduler}"
        )


@contextmanager
def watching_sweep(labels: SweepLabels, *, loud: bool) -> Iterator[Quiet]:
    """A bar on a terminal; elsewhere lines, or nothing where it is not to be `loud`."""
    if not sys.stderr.isatty():
        yield SweepLines(labels) if loud else Quiet()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(labels, bar)


def _say(text: str) -> None:
    print(f"llmtap: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the run


def run_sweep(
    trace: str, source_format: str | None, axes: Any, preset: Any, common: dict[str, Any], *,
    results: Path | None, workers: int | None, ray: str | None, loud: bool, sweepers: list[SweepRunner],
) -> tuple[list[dict[str, Any]], list[str], bool]:  # fmt: skip
    """Runs it all; summaries in the order of the grid, notes, and whether some failed. `sweepers` gets who
    does, so that it is known how far that is."""

    def rate_of(job: SweepJob) -> float | None:
        own_rps = source.traces[job.rows].rate_rps
        return None if own_rps is None else own_rps * job.scale

    with ExitStack() as stack:
        audience = stack.enter_context(watching_sweep(SweepLabels(axes_of(axes, preset), rate_of), loud=loud))
        kept = None
        if results is not None:
            kept = Results(results)
            stack.callback(kept.close)
        source = GridSource(trace, source_format=source_format, progress=audience.reading)
        sweeper = SweepRunner(source.traces, audience, results=kept, workers=workers, ray=ray)
        sweepers.append(sweeper)
        planned = SweepGrid(source, common).jobs(axes, preset, sweeper.run)
        if "seed" in axes and all(job.seed is None for job in planned):
            source.remarks.append("seed has no effect: nothing is drawn")
        attempts = sweeper.run(planned)
    told = [attempts[job.id] for job in planned]
    failed = [(job, a.error) for job, a in zip(planned, told, strict=True) if a.error is not None]
    for job, error in failed:
        print(f"llmtap: {job.name} {job.id}: {error}", file=sys.stderr)
    return [one.summary for one in told if one.summary is not None], source.notes, bool(failed)


# ---------------------------------------------------------------- lists


def show_readings() -> None:
    print_table(Table(["reading", "default", "meaning"], [list(row) for row in explain_model_options()]))
    print()
    print_table(Table(["serving", "default", "meaning"], [list(row) for row in explain_serving()]))


def show_presets() -> None:
    rows = []
    for name, preset in PRESETS.items():
        axes = "; ".join(f"{axis} {','.join(map(str, values))}" for axis, values in preset.axes.items())
        rows.append([name, preset.about, preset.source, axes])
    print_table(Table(["preset", "about", "source", "axes"], rows))
    print()
    print_table(Table(["workload", "about"], [list(one) for one in workloads().items()]))
