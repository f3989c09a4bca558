"""`llmtap sim run`: simulate schedulers in virtual time.

`sim_sweep.py` converts the options, runs the sweep (`sim/sweep`) and shows its progress.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Meta, Struct

from llmtap.cli.flags import command
from llmtap.cli.options import Goodput, Json, ReaderOptions, Require
from llmtap.cli.shared import (
    Outputs,
    SeveralValues,
    Stopped,
    check_capture_place,
    exit_codes,
    json_text,
    print_line,
    print_message,
    print_rich,
    print_table,
    stoppable,
)
from llmtap.errors import ConfigError, ExitCode
from llmtap.load.options import SourceFormat
from llmtap.options.fields import flags_given, opt

if TYPE_CHECKING:
    from llmtap.report.sweep_figures import SweepFigure
    from llmtap.sim.sweep.runner import SweepRunner

from llmtap.cli.sim import sim

_RUN_EPILOG = """TRACE is a file in any format of `llmtap convert --list`, a capture, or a synthetic workload
(--presets lists them). A latency model of a GPU calculates how long each batch takes. Default: the model of
the multi-bin batching paper. With --latency, the model is fitted to your data.

Iteration-level schedulers, such as continuous_batching, form a new batch for each token. The schedulers of
the multi-bin batching paper serve whole batches. The paper leaves several details open, and the ranking of
schedulers depends on them; --readings lists the details and their values.

Every combination of the given values is run. The runs are distributed over processes, or over a Ray cluster.

Examples:

  llmtap sim run trace.csv --scheduler static_fifo,dynamic_no_bins,multi_bin_dynamic --scale 100

  llmtap sim run trace.csv --scale 1,10,100 --servers 1,2,4 --vary bins=1,2,4,8 --results runs.jsonl

  llmtap sim run bursty --preset defaults

  llmtap sim run trace.csv --preset grid --requests 10000 --html grid.html

  llmtap sim run chat --scheduler continuous_batching,chunked_prefill --rate 1,2,4 --slo "ttft:1s"

  llmtap sim run trace.csv --preset methods --results runs.jsonl --ray local

"""


class _TraceOptions(Struct, frozen=True, kw_only=True):
    """Options for the trace, or for a list to print instead of a simulation."""

    trace: Annotated[str, opt("Trace, capture or workload to simulate.", "TRACE", argument=True)] = ""
    source_format: SourceFormat = None
    readings: Annotated[bool, opt("List the schedulers and the options of --reading and --serving.")] = False
    presets: Annotated[bool, opt("List the presets and workloads.")] = False


class _AxisOptions(Struct, frozen=True, kw_only=True):
    """Options for the values of the axes of the sweep."""

    scheduler: Annotated[
        str | None,
        opt(
            "Schedulers; --readings lists them (default: static_fifo, dynamic_no_bins and "
            "multi_bin_dynamic, the three of the multi-bin batching paper).",
            "NAME,...",
        ),
    ] = None
    scale: Annotated[str | None, opt("Factors that multiply the arrival rate; default 1.", "X,...")] = None
    rate: Annotated[
        str | None,
        opt(
            "Mean arrival rates in requests/s to scale the trace to, as an alternative to --scale.", "RPS,..."
        ),
    ] = None
    requests: Annotated[
        str | None,
        opt("Numbers of requests: the first N rows of the trace, repeated if it is shorter.", "N,..."),
    ] = None
    servers: Annotated[
        str | None, opt("Numbers of simulated servers with one GPU each; default 1.", "N,...")
    ] = None
    router: Annotated[
        str | None,
        opt(
            "Routers in front of several servers of an iteration-level scheduler. round-robin: in turn. "
            "least-loaded: to the server with the fewest open requests. prefix-aware: to the server that got "
            "the longest beginning of the prompt before, unless it has 32 open requests more than another. "
            "Default: round-robin.",
            "NAME,...",
        ),
    ] = None
    bins: Annotated[
        str | None,
        opt(
            "Number of output-length bins, for example 4, or the lower edge of each bin in tokens, for "
            "example 0,64,256; default 8.",
            "K|EDGE,...",
        ),
    ] = None
    eps: Annotated[
        str | None,
        opt(
            "Tolerance around the SLA per token; default 5ms. While the time per token is within it, a "
            "scheduler that adapts the batch size keeps the size. --reading token_sla sets the SLA."
        ),
    ] = None
    predictor: Annotated[
        str | None,
        opt(
            "Predictor of output lengths. perfect: the true length. prompt: 1.5 x (prompt tokens)^0.7. "
            "noisy: as prompt, with about 10 % random noise. shuffled: the true lengths in random order. "
            "Default: perfect.",
            "perfect|prompt|noisy|shuffled",
        ),
    ] = None
    reading: Annotated[
        list[str] | None,
        opt(
            "Interpretation of a detail that the multi-bin batching paper leaves open; --readings lists the "
            "details and their values. May be repeated.",
            "NAME=VALUE",
        ),
    ] = None
    serving: Annotated[
        list[str] | None,
        opt(
            "Option of the iteration-level schedulers; --readings lists these options. May be repeated.",
            "NAME=VALUE",
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        opt(
            "Several values of one setting: bins, or an option of --reading or --serving. The separator is a "
            "comma, or | if a value contains a comma. May be repeated.",
            "NAME=V,V,...",
        ),
    ] = None
    preset: Annotated[
        str | None,
        opt(
            "Predefined sweep, for example defaults: the multi-bin batching paper's own run, with 4 GPUs, 4 "
            "bins and 10 times the rate among others. --presets lists them. An option on the command line "
            "replaces the preset's values of that option.",
            "NAME",
        ),
    ] = None
    seed: Annotated[str | None, opt("Random seeds of predictors and workloads; default 42.", "N,...")] = None


class _FitOptions(Struct, frozen=True, kw_only=True):
    """Options for the data to which the latency model is fitted."""

    latency: Annotated[
        str | None,
        opt(
            "Data to fit the latency model to: CSV with batch_size, "
            "max_seq_len and mean_latency_sec, or a capture.",
            "CSV|CAPTURE",
        ),
    ] = None
    fit_chunk: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        opt(
            "Chunk size of chunked prefill on the server where the CAPTURE of --latency was recorded.",
            "TOKENS",
        ),
    ] = None
    fit_kv_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        opt(
            "Number of KV cache blocks of the server where the CAPTURE of --latency was recorded (vLLM: "
            "num_gpu_blocks), each of --serving block tokens. The fit then knows which requests waited for "
            "memory, and the simulation has the same memory unless --serving kv_tokens sets another.",
            "N",
        ),
    ] = None
    latency_from: Annotated[
        str | None,
        opt(
            "Format of the CAPTURE of --latency, from `llmtap convert --list` (default: detected from its "
            "content).",
            "NAME",
        ),
    ] = None


class _CapacityOptions(Struct, frozen=True, kw_only=True):
    """Options for the limits that a run must meet, and for the search of the highest request rate."""

    capacity: Annotated[
        float | None,
        opt(
            "Search for the highest request rate at which at most SHARE of the requests exceed a limit (see "
            "--capacity-by), for example 0.01.",
            "SHARE",
        ),
    ] = None
    capacity_by: Annotated[
        str | None,
        opt(
            "Limits that --capacity uses: request (--reading request_sla, default 20s), token (--reading "
            "token_sla, default 10ms) or slo (those of --slo). Each limit gets its own "
            "search. Default: request.",
            "LIMIT,...",
        ),
    ] = None
    slo: Annotated[
        str | None,
        opt(
            "Limits that a request must meet to count as goodput, for example 'ttft:1s tbc_max:200ms'. "
            "Other names: ttft_any, ttfb, tpot, e2e, user_idle, tbc_p99, jitter.",
            "BOUNDS",
        ),
    ] = None
    goodput: Goodput = None
    require: Require = None


class _RunOptions(Struct, frozen=True, kw_only=True):
    """Options for the processes that run the jobs, and for the results."""

    capture: Annotated[str | None, opt("Folder for a capture of each run's exchanges.", "DIR")] = None
    results: Annotated[
        Path | None, opt("File to append each result to; runs that it already contains are skipped.", "FILE")
    ] = None
    jobs: Annotated[
        Annotated[int, Meta(ge=1)] | None, opt("Number of processes (default: number of CPUs).", "N")
    ] = None
    ray: Annotated[
        str | None,
        opt(
            "Ray cluster that runs the simulations: auto (a cluster that already runs on this host), "
            "HOST:6379, ray://HOST:10001, or local (a new cluster on this host).",
            "ADDRESS",
        ),
    ] = None
    table: Annotated[
        Path | None, opt("Table with one row per run; the file name ends in .csv or .parquet.", "FILE")
    ] = None
    json: Json = None
    html: Annotated[str | None, opt("File for an HTML report with curves; - is stdout.", "FILE")] = None


@command(
    sim,
    cls=SeveralValues,
    short_help="Simulate a trace with several schedulers in virtual time.",
    epilog=_RUN_EPILOG + exit_codes(),
)
def run(
    work: _TraceOptions,
    axes: _AxisOptions,
    fit: _FitOptions,
    goals: _CapacityOptions,
    runs: _RunOptions,
    reader: ReaderOptions,
) -> None:
    """Simulate a trace with several schedulers in virtual time, and compare them."""
    from llmtap.cli.sim_sweep import show_presets, show_readings

    if work.readings or work.presets:
        (show_readings if work.readings else show_presets)()
        return
    from llmtap.cli.sim_sweep import (
        AxesReader,
        SweepPlan,
        fit_model,
        names_in,
        objectives_text,
        preset_named,
        run_sweep,
        scheduler_names,
    )
    from llmtap.gates.requirements import Requirements, exit_code
    from llmtap.report.sweep import run_labels
    from llmtap.report.sweep_figures import figure_of
    from llmtap.sim.sweep.sweep import CAPACITY_BY, SUFFIXES, write_runs

    named = preset_named(axes.preset)
    trace = work.trace or (named.trace if named is not None else "")
    if not trace:
        raise ConfigError("TRACE", "is missing", "`llmtap sim run --help` shows the arguments")
    sweep_axes = AxesReader()
    sweep_axes.set_schedulers(axes.scheduler)
    sweep_axes.set_routers(axes.router)
    if axes.scale is not None and axes.rate is not None:
        raise ConfigError("--rate", "cannot be combined with --scale", "use only one of them")
    for name, text in (("scale", axes.scale), ("rate", axes.rate)):
        sweep_axes.set_numbers(name, text, float)
    for name, text in (("requests", axes.requests), ("servers", axes.servers), ("seed", axes.seed)):
        sweep_axes.set_numbers(name, text, int)
    if goals.capacity is not None and not 0 <= goals.capacity < 1:
        problem = f"expected a share from 0 to below 1, got {goals.capacity:g}"
        raise ConfigError("--capacity", problem, "such as --capacity 0.01")
    if goals.capacity is None and goals.capacity_by is not None:
        raise ConfigError("--capacity-by", "requires --capacity", "such as --capacity 0.01")
    bounds = names_in(goals.capacity_by or "request", "--capacity-by", "bound", CAPACITY_BY)
    if runs.table is not None and runs.table.suffix not in SUFFIXES:
        raise ConfigError(
            "--table", f"{runs.table} ends neither in .csv nor in .parquet", "such as sweep.csv"
        )
    sweep_axes.set_options(axes.reading or [], "--reading")
    edges_or_bins = "bin_edges" if axes.bins and "," in axes.bins else "bins"
    for name, text, flag_name in (
        (edges_or_bins, axes.bins, "--bins"),
        ("eps", axes.eps, "--eps"),
        ("predictor", axes.predictor, "--predictor"),
    ):
        if text is not None:
            sweep_axes.set_options([f"{name}={text}"], flag_name)
    sweep_axes.set_options(axes.serving or [], "--serving")
    sweep_axes.set_options(axes.vary or [], "--vary")
    whole = sweep_axes.all_axes(named, axes.preset or "")
    memory = None if fit.fit_kv_blocks is None else sweep_axes.kv_memory(whole, fit.fit_kv_blocks)
    fitted = fit_model(
        fit.latency,
        scheduler_names(whole, named),
        source_format=fit.latency_from,
        chunk=fit.fit_chunk,
        memory=memory,
    )
    common = replace(
        named.options() if named is not None and fitted.fit is None else fitted,
        objectives=objectives_text(goals.slo, named, goals.goodput),
        capacity=goals.capacity,
        capacity_by=bounds,
        capture=runs.capture,
        follow=None if named is None else named.follow,
        reader=reader.benefit(),
        # Options of the reader request smooth goodput. It needs token times, so measure them in every run.
        measure=True if flags_given(reader) else None,
    )
    requirements = Requirements.parse(goals.require)
    requirements.check_objectives(common.objectives)
    if runs.ray is not None and runs.ray != "local" and runs.jobs is not None:
        raise ConfigError(
            "--jobs",
            f"cannot be combined with --ray {runs.ray}: the cluster has its own number of CPUs",
            "leave out --jobs",
        )
    if goals.capacity is not None and "slo" in bounds and not common.objectives:
        raise ConfigError("--capacity-by", "the value slo needs objectives", "such as --slo ttft:1s")
    outputs = Outputs(json=runs.json, html=runs.html)
    if runs.capture is not None:
        if runs.ray in (None, "local"):
            check_capture_place(runs.capture)
        elif "://" not in runs.capture and not Path(runs.capture).is_absolute():
            raise ConfigError(
                "--capture",
                f"{runs.capture} is a different folder on each node of --ray",
                "give a URL, or the absolute path of a folder that all nodes share",
            )
    sla = (
        named is not None
        or goals.capacity is not None
        or bool(whole.keys() & {"request_sla", "token_sla", "eps"})
    )
    swept = any(len(values) > 1 for name, values in whole.items() if name != "scheduler")
    loud = swept or named is not None or runs.results is not None
    sweepers: list[SweepRunner] = []
    try:
        with stoppable():
            outcome = run_sweep(
                SweepPlan(trace, work.source_format, whole, named, common),
                results=runs.results,
                workers=runs.jobs,
                ray=runs.ray,
                loud=loud,
                on_begin=sweepers.append,
            )
            results = outcome.summaries
            labels = run_labels(results) if results else ()
            rows = [
                row
                for label, one in zip(labels, results, strict=True)
                for row in requirements.add_to(one, label)
            ]
            if not results:  # Do not write the HTML page: it needs at least one result.
                outputs.files.pop("--html", None)
                outputs.stdout_option = None if outputs.stdout_option == "--html" else outputs.stdout_option
            if runs.table is not None:
                write_runs(runs.table, results)
            figure = figure_of(axes.preset, results)
            texts = {
                "--json": lambda: json_text(results),
                "--html": lambda: _page_html(results, sla=sla, figure=figure),
            }
            outputs.write_or_show(
                texts, lambda: _show_results(results, outcome.notes, sla=sla, figure=figure)
            )
    except Stopped as exc:
        done = sum(len(sweeper.attempts) for sweeper in sweepers)
        stored_text = f"are in {runs.results}: the same command continues from there"
        where = (
            "are complete, and none is kept without --results FILE" if runs.results is None else stored_text
        )
        print_message(f"stopped; {done:,} runs {where}")
        raise typer.Exit(exc.code) from None
    code = (
        ExitCode.of_run(failed=outcome.failed)
        or exit_code(None, rows)
        or ExitCode.of_run(not_valid=fitted.fit is not None and not fitted.fit.valid)
    )
    if code:
        raise typer.Exit(code)


def _page_html(runs: Sequence[Mapping[str, Any]], *, sla: bool, figure: "SweepFigure | None") -> str:
    from llmtap.report.sweep_page import sweep_html

    return sweep_html(runs, sla=sla, figure=figure)


def _show_results(
    runs: Sequence[Mapping[str, Any]], notes: Sequence[str], *, sla: bool, figure: "SweepFigure | None"
) -> None:
    from llmtap.report.gates import requirement_rows, requirements_blocks
    from llmtap.report.render import terminal
    from llmtap.report.sweep import sweep_lines, sweep_table

    if figure is not None:
        print_table(figure.table(runs))
        print_line("")
    if runs:
        print_table(sweep_table(runs, sla=sla))
        for line in sweep_lines(runs, sla=sla):
            print_line(line)
    for note in notes:
        print_line(f"note: {note}")
    if rows := [row for one in runs for row in requirement_rows(one)]:
        print_rich(terminal(requirements_blocks(rows)))
