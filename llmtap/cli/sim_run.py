"""`llmtap sim run`: a trace through schedulers, in virtual time."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtap.cli.outputs import STDOUT, need_capture, need_outputs, write_output
from llmtap.cli.signals import Stopped, stoppable
from llmtap.cli.sim import sim
from llmtap.cli.sim_axes import (
    AxesRead,
    axes_of,
    models_fitted,
    objectives_text,
    option_defaults,
    preset_named,
    scheduler_names,
)
from llmtap.errors import ConfigError

if TYPE_CHECKING:
    from llmtap.sim.sweep.sweeper import Sweeper

__all__ = ["run"]

EPILOG = """TRACE is anything that `llmtap convert --list` reads, a capture, or a workload that is drawn
(--presets lists them). Figures are those of a model of a GPU, seed 004's unless --latency fits another. The
seed leaves much open, and which scheduler looks best depends on how it is read: --readings lists how.

Options with several values are multiplied out, and the runs are spread over processes, or over Ray:

  llmtap sim run trace.csv --scheduler static_fifo,dynamic_no_bins,multi_bin_dynamic --scale 100

  llmtap sim run trace.csv --scale 1,10,100 --servers 1,2,4 --vary bins=1,2,4,8 --results runs.jsonl

  llmtap sim run trace.csv --preset grid --requests 10000 --html grid.html

  llmtap sim run chat --scheduler continuous_batching,chunked_prefill --rate 1,2,4 --slo "ttft:1s"

  llmtap sim run trace.csv --preset methods --results runs.jsonl --ray local"""


@sim.command(epilog=EPILOG)
def run(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="What to run.")] = "",
    source_format: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Format of TRACE, where its content does not tell."),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Schedulers; default: the three of seed 004.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="X,...", help="Arrivals X times as dense; bursts stay bursts.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RPS,...", help="The same, by the mean rate that comes of it.")
    ] = None,
    requests: Annotated[
        str | None, typer.Option(metavar="N,...", help="The first N rows; a shorter trace is repeated.")
    ] = None,
    servers: Annotated[str | None, typer.Option(metavar="N,...", help="How many GPUs; default 1.")] = None,
    bins: Annotated[
        str | None,
        typer.Option(
            metavar="K|EDGE,...",
            help="How many bins, or the lower edge of each: 4 is a number, 0,64,256 are edges.",
        ),
    ] = None,
    eps: Annotated[str | None, typer.Option(help="Half width of the band around the token SLA.")] = None,
    predictor: Annotated[
        str | None, typer.Option(metavar="perfect|prompt|noisy|shuffled", help="Of output lengths.")
    ] = None,
    reading: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another reading; may be repeated.")
    ] = None,
    serving: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="How schedulers that iterate serve; may be repeated."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V,V,...",
            help="Several values of a reading or of --serving; by | where they hold commas. May be repeated.",
        ),
    ] = None,
    readings: Annotated[
        bool, typer.Option("--readings", help="List readings and options of serving, and what they mean.")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A sweep that has a name; options replace its axes.")
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List presets and workloads.")] = False,
    latency: Annotated[
        str | None,
        typer.Option(
            metavar="CSV|CAPTURE",
            help="Fit the model to a grid of batch_size, max_seq_len, mean_latency_sec, or to a capture.",
        ),
    ] = None,
    fit_chunk: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="The CAPTURE of --latency is of a server that takes prompts in in pieces of so many tokens.",
        ),
    ] = None,
    capacity: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Also search the rate at which this share is outside the SLA."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="BOUNDS", help="Objectives that goodput counts by: 'ttft:1s tbc_max:200ms'."),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="All metrics of live traffic, or only seed 004's; default: where schedulers iterate.",
        ),
    ] = None,
    capture: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write each run's exchanges as a capture in a folder.")
    ] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="N,...", help="Of predictors and workloads; default 42.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep results as they come; what is in it is not run again."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes; default: as many as CPUs.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on a Ray cluster; local starts one here.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the summaries; - is stdout.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with curves; - is stdout.")
    ] = None,
) -> None:
    """Run a trace through schedulers in virtual time, and compare them."""
    if readings or presets:
        (_show_readings if readings else _show_presets)()
        return
    if not trace:
        raise ConfigError("TRACE", "is missing", "llmtap sim run --help")
    given = AxesRead()
    given.schedulers(scheduler)
    given.load(scale, rate)
    for name, text in (("requests", requests), ("servers", servers), ("seed", seed)):
        given.numbers(name, text, int)
    if capacity is not None and not 0 <= capacity < 1:
        raise ConfigError("--capacity", f"expected a share from 0 to below 1, got {capacity:g}")
    given.settings(reading or [], "--reading")
    given.text("bin_edges" if bins and "," in bins else "bins", bins, "--bins")
    given.text("eps", eps, "--eps")
    given.text("predictor", predictor, "--predictor")
    given.settings(serving or [], "--serving")
    given.settings(vary or [], "--vary")
    named = preset_named(preset)
    axes = given.whole(named, preset or "")
    common = models_fitted(latency, fit_chunk, scheduler_names(axes, named)) | {
        "objectives": objectives_text(slo, named), "measure": measure, "capacity": capacity,
        "capture": capture,
    }  # fmt: skip
    if measure is False and (common["objectives"] or capture is not None):
        what = "objectives are" if common["objectives"] else "a capture is"
        raise ConfigError("--no-measure", f"{what} of exchanges, and it makes none")
    if ray is not None and ray != "local" and jobs is not None:
        raise ConfigError("--jobs", f"how many run at a time is up to the cluster at {ray}")
    places = need_outputs(json=json, html=html)
    if capture is not None:
        if ray in (None, "local"):
            need_capture(capture)
        elif "://" not in capture and not Path(capture).is_absolute():
            raise ConfigError(
                "--capture", f"each node of --ray has a folder {capture} of its own",
                "a URL, or an absolute path of a folder that all nodes share",
            )  # fmt: skip
    swept = any(len(values) > 1 for name, values in axes.items() if name != "scheduler")
    loud = swept or named is not None or results is not None
    sweepers: list[Sweeper] = []
    try:
        with stoppable():
            told, notes, failed = _swept(
                trace, source_format, axes, named, common, results=results, workers=jobs, ray=ray, loud=loud,
                sweepers=sweepers,
            )  # fmt: skip
            _write(told, places)
            _show(told, notes, stdout="json" if json == STDOUT else "html" if html == STDOUT else "table")
    except Stopped as exc:
        done = sum(len(sweeper.attempts) for sweeper in sweepers)
        print(f"llmtap: {_stopped(done, results)}", file=sys.stderr)
        raise typer.Exit(exc.code) from None
    if failed:
        raise typer.Exit(1)


def _swept(
    trace: str, source_format: str | None, axes: Any, preset: Any, common: dict[str, Any], *,
    results: Path | None, workers: int | None, ray: str | None, loud: bool, sweepers: "list[Sweeper]",
) -> tuple[list[dict[str, Any]], list[str], bool]:  # fmt: skip
    """Runs it all; summaries in the order of the grid, notes, and whether some failed. `sweepers` gets who
    does, so that it is known how far that is."""
    from llmtap.cli.sim_progress import SweepLabels, watching
    from llmtap.sim.sweep.grid import GridSource, SweepGrid
    from llmtap.sim.sweep.results import Results
    from llmtap.sim.sweep.sweep import SweepJob
    from llmtap.sim.sweep.sweeper import Sweeper

    def rate_of(job: SweepJob) -> float | None:
        own_rps = source.traces[job.rows].rate_rps
        return None if own_rps is None else own_rps * job.scale

    with ExitStack() as stack:
        audience = stack.enter_context(watching(SweepLabels(axes_of(axes, preset), rate_of), loud=loud))
        kept = None
        if results is not None:
            kept = Results(results)
            stack.callback(kept.close)
        source = GridSource(trace, source_format=source_format, progress=audience.reading)
        sweeper = Sweeper(source.traces, audience, results=kept, workers=workers, ray=ray)
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


def _stopped(done: int, results: Path | None) -> str:
    if results is None:
        return f"stopped; {done:,} were done, and nothing is kept without --results FILE"
    return f"stopped; what is done is in {results} ({done:,}): the same command goes on from there"


def _write(told: list[dict[str, Any]], places: dict[str, Path]) -> None:
    for option, place in places.items():
        if option == "--json":
            write_output(option, place, _json(told))
        elif told:
            write_output(option, place, _page(told))


def _json(told: list[dict[str, Any]]) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(told)).decode()


def _page(told: list[dict[str, Any]]) -> str:
    from llmtap.report.sweep_page import sweep_html

    return sweep_html(told, defaults=option_defaults())


def _show(told: list[dict[str, Any]], notes: list[str], *, stdout: str) -> None:
    from llmtap.report.sweep import sweep_lines, sweep_table

    if stdout == "json":
        print(_json(told))
        return
    if told and stdout == "html":
        print(_page(told))
        return
    if told:
        _table(*sweep_table(told))
        for line in sweep_lines(told):
            print(line)
    for note in notes:
        print(f"note: {note}")


def _show_readings() -> None:
    from llmtap.sim.model_options import explain
    from llmtap.sim.serving import explain_serving

    _table(["reading", "default", "meaning"], [list(row) for row in explain()], left=3)
    print()
    _table(["serving", "default", "meaning"], [list(row) for row in explain_serving()], left=3)


def _show_presets() -> None:
    from llmtap.sim.sweep.presets import PRESETS
    from llmtap.workload.registry import workloads

    rows = []
    for name, preset in PRESETS.items():
        axes = "; ".join(f"{axis} {','.join(map(str, values))}" for axis, values in preset.axes.items())
        rows.append([name, preset.about, preset.source, axes])
    _table(["preset", "about", "source", "axes"], rows, left=4)
    print()
    _table(["workload", "about"], [list(one) for one in workloads().items()], left=2)


def _table(columns: list[str], rows: list[list[str]], *, left: int = 1) -> None:
    if not sys.stdout.isatty():
        # For grep and awk: columns by tabs.
        for cells in (columns, *rows):
            print("\t".join(cells))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for part in _parts_that_fit(columns, rows, console.width) if left == 1 else [range(len(columns))]:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for i in part:
            table.add_column(columns[i], justify="left" if i < left else "right", no_wrap=left == 1)
        for cells in rows:
            table.add_row(*(cells[i] for i in part))
        console.print(table)


def _parts_that_fit(columns: list[str], rows: list[list[str]], width: int) -> list[list[int]]:
    """Columns by number, in as many tables as it takes to cut no figure; each begins with the settings."""
    widths = [max(map(len, cells)) + 2 for cells in zip(columns, *rows, strict=True)]
    keys = list(range(columns.index("req/s"))) if "req/s" in columns else [0]
    parts: list[list[int]] = []
    left = 0
    for i in range(len(keys), len(columns)):
        if not parts or widths[i] > left:
            parts.append(keys.copy())
            left = width + 2 - sum(widths[k] for k in keys)
        parts[-1].append(i)
        left -= widths[i]
    return parts
