"""`llmtap report`: summarise a capture or a trace, or show or compare results of replays and benchmarks.

Captures and traces are summarised by `capture/read/describe.py`; stored results are rendered again
(`results.py`) or compared (`compare.py`).
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from msgspec import Struct

from llmtap.capture.columns import LABEL_GETTERS
from llmtap.cli.compare import compare
from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import GoalOptions, OutputOptions, ReaderOptions
from llmtap.cli.results import (
    RESULT_PATTERN,
    exit_with,
    experiment_texts,
    load_experiment,
    load_result,
    result_errors,
    show_experiment,
    show_replay,
    stored_verdicts,
)
from llmtap.cli.shared import (
    Outputs,
    SeveralValues,
    figures_place,
    need_extra,
    print_json,
    print_line,
    print_rich,
    read_percentiles,
    write_output,
)
from llmtap.errors import ConfigError, ExitCode
from llmtap.json_types import json_value
from llmtap.load.options import SourceFormat
from llmtap.options.fields import flags_given, opt

if TYPE_CHECKING:
    import pyarrow as pa

    from llmtap.capture.read.reader import Capture
    from llmtap.gates.requirements import Requirements
    from llmtap.meter.recorded_experiment import RecordedExperiment


EPILOG = """CAPTURE is one of:

  a file, folder or URL (s3://bucket/prefix) of captures; a capture may still be running

  one trace file of another tool, in any format listed by `llmtap convert --list`

  a results folder of `llmtap bench`

  a result of `llmtap replay --json`: prints its report again, and whether the result is valid

  HdrHistogram logs of any tool (.hlog): merged by tag

If a capture at a URL is still running, only its uploaded part is read. To include the rest, name the local
spool folder of the proxy (its key capture.spool) as another CAPTURE.

Examples:

  llmtap report captures/ --by tenant --slo "ttft:500ms tpot:50ms"

  llmtap report s3://bucket/captures --json=summary.json

  llmtap report captures/ --by arm --html experiment.html

  llmtap report captures/ --integrity

  llmtap report replayed.json --markdown replayed.md

  llmtap report bench-results/today --html page.html

  llmtap report before.json --compare after.json --fail-if-worse ttft_p99:5%

  llmtap report before.hlog --compare after.hlog --hlog-unit us

  llmtap report results/a --compare results/b --compare results/c --html page.html

  llmtap report front/ back/ --pair --html gateway.html"""


class _ReportCommand(SeveralValues):
    """The command `report`. The first result on the command line is the base of the comparison, even if it is
    a value of `--compare`, as in `--compare A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [value for arg in args for value in (arg, arg.partition("=")[2])]
        rest = super().parse_args(ctx, args)
        places, compare = (list(ctx.params.get(name) or ()) for name in ("places", "compare"))
        if len(places) == 1 and compare:
            ordered = sorted([*places, *compare], key=words.index)
            ctx.params["places"], ctx.params["compare"] = ordered[:1], ordered[1:]
        return rest


class _SourceOptions(Struct, frozen=True, kw_only=True):
    """Options that select the data to report."""

    source_format: SourceFormat = None
    integrity: Annotated[
        bool,
        opt(
            "List missing exchanges, with the reason. Exit code 1 if an exchange is missing without a known "
            "reason, an exchange is stored twice, or a file cannot be read."
        ),
    ] = False
    by: Annotated[
        list[str] | None,
        opt("Label by which the report is grouped; may be repeated.", "|".join(LABEL_GETTERS)),
    ] = None
    pair: Annotated[
        bool,
        opt(
            "Pair the exchanges of two captures, FRONT and BACK, one on each side of a gateway, or of one "
            "capture of both sides, and report what the gateway did. See docs/howto/gateway.md."
        ),
    ] = False
    hlog_unit: Annotated[
        Literal["ns", "us", "ms"] | None,
        opt("Unit of the values in HdrHistogram logs; default: ns.", "ns|us|ms"),
    ] = None
    skip_broken: Annotated[bool, opt("Skip files that cannot be read, and list their names.")] = False


class _ReportOutputs(OutputOptions, frozen=True, kw_only=True):
    """Files of the report."""

    html: Annotated[
        str | None,
        opt(
            "File for an HTML report of benchmark, replay or experiment results, or of a capture with --by "
            "arm.",
            "FILE",
        ),
    ] = None
    markdown: Annotated[str | None, opt("File for a Markdown report; as --html.", "FILE")] = None
    csv: Annotated[
        str | None,
        opt(
            "CSV file. For captures and traces: a row for each request, with every column, and the figures "
            "in NAME.figures.csv next to it. For the result of a replay: a row for each figure.",
            "FILE",
        ),
    ] = None
    hlog: Annotated[
        Path | None,
        opt("HdrHistogram log with the times of a replay's result in ns, a tag for each metric.", "FILE"),
    ] = None


class _ComparisonOptions(Struct, frozen=True, kw_only=True):
    """Options for the comparison of results."""

    compare: Annotated[
        list[str] | None,
        opt(
            "Results of benchmarks or replays to compare with CAPTURE; may be repeated. The first result "
            "on the command line is the base. If the loads differ, the exit code is 4. Only benchmarks with "
            "equal loads get a significance test.",
            "RESULTS",
        ),
    ] = None
    fail_if_worse: Annotated[
        list[str] | None,
        opt(
            "With --compare: exit code 3 if a figure became worse by more than PERCENT, for example "
            "ttft_p99:5%. The interval of the difference decides, not the two values. Without a FIGURE: p50 "
            "and p99 of TTFT, TPOT and E2E, error_rate and attainment, by more than 5 %.",
            "[FIGURE:PERCENT]...",
        ),
    ] = None


@command(
    app, short_help="Summarize a capture or results, or compare results.", epilog=EPILOG, cls=_ReportCommand
)
def report(
    places: Annotated[
        list[str],
        opt(
            "One or more captures; or one trace, one results folder, one replay result, or one experiment "
            "(JSON of the admin port's /api/v1/experiment).",
            "CAPTURE...",
            argument=True,
        ),
    ],
    source: _SourceOptions,
    goals: GoalOptions,
    outputs: _ReportOutputs,
    reader: ReaderOptions,
    comparison: _ComparisonOptions,
) -> None:
    """Summarize a capture: latencies, workload, conversations, missing exchanges; or print stored results."""
    from llmtap.gates.regression import Tolerances
    from llmtap.gates.requirements import Requirements, exit_code

    if source.pair:
        from llmtap.cli.pairs import report_pairs

        others = flags_given(source, goals, reader, comparison)
        for option in (*others, *(["--csv"] if outputs.csv is not None else [])):
            if option not in ("--pair", "--skip-broken"):
                raise ConfigError(option, "cannot be combined with --pair", f"leave out {option}")
        report_pairs(places, outputs.outputs(), skip_broken=source.skip_broken)
        return
    requirements = Requirements.parse(goals.require)
    if outputs.csv is not None and (comparison.compare or (Path(places[0]) / "bench.json").is_file()):
        problem = "applies to captures, traces and results of llmtap replay only"
        raise ConfigError("--csv", problem, "leave out --csv")
    if source.source_format is not None and (comparison.compare or len(places) > 1):
        raise ConfigError("--from", "applies to one trace only", "leave out --from")
    if outputs.hlog is not None and (comparison.compare or load_result(places[0]) is None):
        raise ConfigError("--hlog", "applies to one result of llmtap replay only", "leave out --hlog")
    if _are_logs([*places, *(comparison.compare or ())]):
        _report_logs(places, source, goals, outputs, reader, comparison)
        return
    if source.hlog_unit is not None:
        raise ConfigError("--hlog-unit", "applies to HdrHistogram logs (.hlog) only", "leave out --hlog-unit")
    if comparison.compare:
        if requirements:
            hint = "to check a comparison, use --fail-if-worse"
            raise ConfigError("--require", "cannot be combined with --compare", hint)
        tolerances = None if comparison.fail_if_worse is None else Tolerances.parse(comparison.fail_if_worse)
        compare(places, comparison.compare, outputs.outputs(), tolerances)
        return
    if comparison.fail_if_worse is not None:
        hint = "such as llmtap report BEFORE --compare AFTER"
        raise ConfigError("--fail-if-worse", "has no effect without --compare", hint)
    if len(places) == 1 and (Path(places[0]) / "bench.json").is_file():
        _show_bench(Path(places[0]), outputs.outputs(), requirements)
        return
    _refuse_bench(places)
    result = load_result(places[0]) if len(places) == 1 and source.source_format is None else None
    experiment = load_experiment(places[0]) if len(places) == 1 and source.source_format is None else None
    if len(places) > 1 and (stored := [place for place in places if load_result(place) is not None]):
        hint = f"use `llmtap report {stored[0]}`; to write JSON to a file, use --json=FILE, with the `=`"
        raise ConfigError(stored[0], "is a stored result, which cannot be combined with other files", hint)
    if experiment is not None:
        for option in (*flags_given(source, goals, reader), *(["--csv"] if outputs.csv is not None else [])):
            problem = "applies to captures only, not to the result of an experiment"
            raise ConfigError(option, problem, f"leave out {option}")
        with result_errors(places[0]):
            show_experiment(outputs.outputs(), experiment)
        return
    if result is not None:
        for option in flags_given(source, goals, reader):
            if option not in ("--from", "--require"):
                problem = "applies to captures only, not to the result of a replay"
                raise ConfigError(option, problem, f"leave out {option}")
        files = outputs.outputs(outputs.csv)
        with result_errors(places[0]):
            rows = requirements.add_to(result)
            if outputs.hlog is not None:
                from llmtap.cli.hdr_logs import write_log

                write_log(outputs.hlog, result)
            show_replay(files, result)
        if rows:
            exit_with(exit_code(result["verdict"], rows))
        return
    pages = [
        option
        for option, name in (("--html", outputs.html), ("--markdown", outputs.markdown))
        if name is not None
    ]
    if pages and "arm" not in (source.by or ()):
        raise ConfigError(
            pages[0],
            "applies to results of llmtap bench, llmtap replay and experiments, and to captures with --by "
            "arm",
            f"leave out {pages[0]}, or add --by arm",
        )
    from llmtap.capture.read.describe import describe
    from llmtap.capture.read.reader import read
    from llmtap.metrics.objectives import Objectives
    from llmtap.report.capture import render_capture, render_integrity

    for label in source.by or ():
        if label not in LABEL_GETTERS:
            raise ConfigError("--by", f"expected one of {', '.join(LABEL_GETTERS)}, got {label!r}")
    text = goals.objectives()
    requirements.check_objectives(text)
    if source.integrity and requirements:
        raise ConfigError("--require", "cannot be combined with --integrity", "use only one of them")
    options: dict[str, Any] = {
        "by": source.by or (),
        "objectives": None if text is None else Objectives.parse(text),
        "percentiles": read_percentiles(goals.percentiles) | requirements.percentiles,
        "reader": reader.benefit(),
    }
    summary: dict[str, Any]
    files = Outputs(html=outputs.html, markdown=outputs.markdown)
    if source.source_format is not None or _is_trace(places):
        if source.integrity:
            raise _not_for_trace("--integrity", places[0])
        if pages:
            raise _not_for_trace(pages[0], places[0])
        summary = _summarise_trace(places[0], options, source.source_format)
        rows = requirements.add_to(summary)
        if outputs.csv is not None:
            _write_csv(outputs.csv, _trace_batches(places[0], source.source_format), summary)
        if outputs.json is not None:
            print_json(summary, outputs.json)
        else:
            print_rich(render_capture(summary))
            for note in summary["capture"]["notes"]:
                print_line(f"note: {note}")
        exit_with(exit_code(None, rows))
        return
    capture = read(places, skip_broken=source.skip_broken)
    integrity_check = capture.integrity()
    if source.integrity:
        summary = integrity_check.to_dict()
        print_json(summary, outputs.json) if outputs.json is not None else print_rich(
            render_integrity(summary)
        )
        raise typer.Exit(0 if integrity_check.ok else ExitCode.FAILED)
    recorded_experiment = _recorded_experiment(capture) if "arm" in options["by"] else None
    if pages and recorded_experiment is None:
        raise ConfigError(pages[0], "the capture does not have two arms to compare", f"leave out {pages[0]}")
    on_exchange = None
    if recorded_experiment is not None:
        on_exchange = partial(recorded_experiment.add, reader=options["reader"])
    infos = [f.info for f in capture.files]
    with _progress_bar(len(capture)) as progress:
        summary = describe(infos, capture.batches(), progress=progress, on_exchange=on_exchange, **options)
    experiment_part: Any = None
    if recorded_experiment is not None:
        window: Any = summary["window"]
        experiment_part = summary["experiment"] = recorded_experiment.to_dict(Path(places[0]).name, window)
    capture_part: Any = summary["capture"]
    capture_part |= {
        "files": len(capture.files),
        "spools": sum(f.spool for f in capture.files),
        "bytes": sum(f.size_bytes for f in capture.files),
        "broken": [{"file": file, "problem": problem} for file, problem in capture.broken],
    }
    summary["integrity"] = integrity_check.to_dict()
    verdicts = dict(stored_verdicts(places))
    if verdicts:
        summary["replays"] = verdicts
    rows = requirements.add_to(summary)
    if outputs.csv is not None:
        _write_csv(outputs.csv, capture.batches(), summary)
    if pages:
        with result_errors("--by arm"):
            files.write(experiment_texts(experiment_part))
    if outputs.json is not None:
        print_json(summary, outputs.json)
    elif files.stdout_option is not None:
        print(experiment_texts(experiment_part)[files.stdout_option]())
    else:
        print_rich(render_capture(summary))
        if recorded_experiment is not None:
            from llmtap.report.experiment_page import render_experiment

            print_line("")
            print_rich(render_experiment(experiment_part))
        if verdicts:
            from llmtap.report.replay import render_verdicts

            with result_errors(f"{RESULT_PATTERN} next to the capture"):
                print_rich(render_verdicts(verdicts))
    exit_with(exit_code(None, rows))


def _are_logs(places: Sequence[str]) -> bool:
    """Return whether all places are HdrHistogram logs. Raises ConfigError if only some are."""
    logs = [place for place in places if place.endswith((".hlog", ".hlog.gz", ".hlog.zst"))]
    if logs and len(logs) < len(places):
        other = next(place for place in places if place not in logs)
        problem = f"is not an HdrHistogram log (.hlog), and cannot be combined with {logs[0]}"
        raise ConfigError(other, problem, "give only logs, or only captures")
    return bool(logs)


def _report_logs(
    places: list[str],
    source: _SourceOptions,
    goals: GoalOptions,
    outputs: _ReportOutputs,
    reader: ReaderOptions,
    comparison: _ComparisonOptions,
) -> None:
    """Show or compare HdrHistogram logs. Raises ConfigError for options that do not apply to them."""
    from llmtap.cli.hdr_logs import compare_logs, show_logs

    unit = source.hlog_unit or "ns"
    refused = [option for option in flags_given(source, goals, reader) if option != "--hlog-unit"]
    refused += ["--csv"] * (outputs.csv is not None)
    refused += ["--fail-if-worse"] * (comparison.fail_if_worse is not None)
    if refused:
        raise ConfigError(refused[0], "does not apply to HdrHistogram logs", f"leave out {refused[0]}")
    if not comparison.compare:
        show_logs(places, outputs.outputs(), unit)
        return
    if len(places) != 1:
        hint = "give one log, then --compare LOG for each other log"
        raise ConfigError("--compare", f"expected one log before --compare, got {len(places)}", hint)
    need_extra("--compare", "scipy", "bench")
    compare_logs([places[0], *comparison.compare], outputs.outputs(), unit)


def _not_for_trace(option: str, place: str) -> ConfigError:
    problem = f"applies to captures of llmtap only, and {place} is a trace"
    return ConfigError(option, problem, f"leave out {option}")


# ---------------------------------------------------------------- captures and traces


def _is_trace(places: list[str]) -> bool:
    """Return whether `places` has only one path, of a trace: a file that is neither Parquet nor a spool."""
    if len(places) != 1:
        return False
    path = Path(places[0])
    try:
        if not path.is_file():
            # Accept every pipe: its first bytes could not be read a second time.
            return path.is_fifo() or path.is_char_device()
        with path.open("rb") as file:
            return file.read(4) not in (b"PAR1", b"LTSP")
    except OSError:
        return False


def _summarise_trace(path: str, options: dict[str, Any], source_format: str | None) -> dict[str, Any]:
    """Return the summary of a trace as public JSON. Raises ConfigError."""
    from llmtap.capture.read.describe import describe
    from llmtap.traces.registry import open_trace

    with open_trace(path, source_format=source_format) as trace, _progress_bar(None) as progress:
        source = trace.source
        summary = describe([source.info], source.batches, progress=progress, **options)
    capture_part: Any = summary["capture"]
    capture_part |= {"source": [trace.format.name], "notes": source.notes}
    return summary


def _recorded_experiment(capture: "Capture") -> "RecordedExperiment | None":
    """Return the experiment in a capture; None if the capture does not have two arms to compare."""
    from llmtap.meter.recorded_experiment import COLUMNS, RecordedExperiment

    return RecordedExperiment.from_batches(capture.batches(COLUMNS))


def _trace_batches(path: str, source_format: str | None) -> "Iterator[pa.RecordBatch]":
    from llmtap.traces.registry import open_trace

    with open_trace(path, source_format=source_format) as trace:
        yield from trace.source.batches


def _write_csv(csv: str, batches: "Iterator[pa.RecordBatch]", summary: Mapping[str, Any]) -> None:
    """Write the requests to the file `csv`, and the figures to another (`figures_place`)."""
    from llmtap.capture.csv_file import write_csv
    from llmtap.gates.figures import figures_csv

    figures = figures_place(csv)
    Outputs(csv=csv)  # Check that the file can be written.
    try:
        write_csv(Path(csv), batches)
    except OSError as exc:
        raise ConfigError("--csv", f"cannot write {csv}: {exc.strerror}", "name another file") from None
    write_output("--csv", Path(figures), figures_csv(summary))


@contextmanager
def _progress_bar(rows: int | None) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows the number of rows read, or None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("exchanges", total=rows)
        yield lambda done: bar.update(task, completed=done)


# ---------------------------------------------------------------- results of benchmarks


def _refuse_bench(places: list[str]) -> None:
    """Raise ConfigError for results folders of benchmarks: their captures are of different loads, so one
    summary over all of them would be meaningless."""
    for place in (Path(path) for pattern in places for path in sorted(glob(pattern))):
        results = [place] if (place / "bench.json").is_file() else []
        results += [path.parent for path in sorted(place.glob("*/bench.json"))]
        if results:
            hint = f"use `llmtap report {shlex.quote(str(results[0]))}`, with --compare for the other results"
            raise ConfigError("CAPTURE", f"{results[0]} has benchmark results and is not a capture", hint)


def _show_bench(folder: Path, outputs: Outputs, requirements: "Requirements") -> None:
    from llmtap.bench.report.report import load_document
    from llmtap.cli.bench import bench_texts, judge_loads
    from llmtap.gates.requirements import exit_code
    from llmtap.report.bench import render_bench

    with result_errors(str(folder)):
        document = load_document(folder)
        rows = judge_loads(document, requirements)
        shown = json_value(msgspec.structs.replace(document, requirements=rows or msgspec.UNSET))
        outputs.write_or_show(bench_texts(shown), lambda: print_rich(render_bench(shown)))
    exit_with(exit_code(None, rows))
