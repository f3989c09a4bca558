"""`llmtap report`: summarise a capture or a trace, or show or compare results of replays and benchmarks.

Captures and traces are summarised by `capture/read/describe.py`; stored results are rendered again. `llmtap
replay` uses `tell_replay` and `write_beside` for its own result.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from llmtap.cli.main import app
from llmtap.cli.shared import (
    FAILED,
    Alpha,
    IdleCost,
    Json,
    Outputs,
    Percentiles,
    ReaderGrace,
    ReaderSpeed,
    SeveralValues,
    Slo,
    VllmGoodput,
    argument,
    flag,
    json_text,
    need_extra,
    option,
    print_json,
    print_rich,
    read_objectives,
    read_percentiles,
    reader_of,
    write_output,
)
from llmtap.errors import ConfigError

RESULT_BYTES_MAX: Final = 256 << 20
"""A result has some MB: a value for each second and series."""
BESIDE: Final = "replay-*.json"
"""Name of a result in a capture's folder, whose own files are `llmtap-*`."""

EPILOG = """CAPTURE is one of:

  a file, folder or URL (s3://bucket/prefix) of captures; a capture may still be running

  one trace file of another tool, in any format listed by `llmtap convert --list`

  a results folder of `llmtap bench`

  a result of `llmtap replay --json`: prints its report again, and whether the result is valid

If a capture at a URL is still running, only its uploaded part is read. To include the rest, name the local
spool folder of the proxy (its key capture.spool) as another CAPTURE.

Examples:

  llmtap report captures/ --by tenant --slo "ttft:500ms tpot:50ms"

  llmtap report s3://bucket/captures --json=summary.json

  llmtap report captures/ --integrity

  llmtap report replayed.json --markdown replayed.md

  llmtap report bench-results/today --html page.html

  llmtap report before.json --compare after.json

  llmtap report results/a --compare results/b --compare results/c --html page.html"""


@app.command(
    short_help="Summarize a capture or results, or compare results.", epilog=EPILOG, cls=SeveralValues
)
def report(
    places: Annotated[
        list[str],
        argument(
            "CAPTURE...", "One or more captures; or one trace, one results folder, or one replay result."
        ),
    ],
    json: Json = None,
    integrity: Annotated[
        bool,
        flag(
            "--integrity",
            "List missing exchanges, with the reason. Exit code 1 if an exchange is missing without a known "
            "reason, an exchange is stored twice, or a file cannot be read.",
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        option("tenant|model|arm|session", "Label by which the report is grouped; may be repeated."),
    ] = None,
    slo: Slo = None,
    goodput: VllmGoodput = None,
    percentiles: Percentiles = None,
    skip_broken: Annotated[
        bool, flag("--skip-broken", "Skip files that cannot be read, and list their names.")
    ] = False,
    html: Annotated[
        str | None, option("FILE", "File for an HTML report of benchmark or replay results.")
    ] = None,
    markdown: Annotated[
        str | None, option("FILE", "File for a Markdown report of benchmark or replay results.")
    ] = None,
    reader_speed: ReaderSpeed = None,
    alpha: Alpha = None,
    idle_cost: IdleCost = None,
    reader_grace: ReaderGrace = None,
    compare: Annotated[
        list[str] | None,
        option(
            "RESULTS",
            "Results of benchmarks or replays to compare with CAPTURE; may be repeated. If the loads differ, "
            "the exit code is 1. Only benchmarks with equal loads get a significance test.",
        ),
    ] = None,
) -> None:
    """Summarize a capture: latencies, workload, conversations, missing exchanges; or print stored results."""
    if compare:
        _compare(places, compare, json, html, markdown)
        return
    if len(places) == 1 and (Path(places[0]) / "bench.json").is_file():
        _show_bench(Path(places[0]), Outputs(json=json, html=html, markdown=markdown))
        return
    _refuse_bench(places)
    result = load_result(places[0]) if len(places) == 1 else None
    if len(places) > 1 and (stored := [place for place in places if load_result(place) is not None]):
        raise ConfigError(
            stored[0],
            "is a stored result, and a report shows one result only",
            f"llmtap report {stored[0]}; a file for --json is --json=FILE",
        )
    if result is not None:
        for option, refused in (
            ("--by", by), ("--slo", slo), ("--goodput", goodput), ("--percentiles", percentiles),
            ("--integrity", integrity), ("--skip-broken", skip_broken),
            ("--reader-speed", reader_speed), ("--alpha", alpha), ("--idle-cost", idle_cost),
            ("--reader-grace", reader_grace),
        ):  # fmt: skip
            if refused:
                raise ConfigError(option, "applies to captures only, not to the result of a replay")
        tell_replay(Outputs(json=json, html=html, markdown=markdown), result)
        return
    for option, given in (("--html", html), ("--markdown", markdown)):
        if given is not None:
            raise ConfigError(option, "applies to results of llmtap bench and llmtap replay only")
    from llmtap.capture.read.describe import BY, describe
    from llmtap.capture.read.reader import read
    from llmtap.metrics.objectives import Objectives
    from llmtap.report.capture import render_capture, render_integrity

    for label in by or ():
        if label not in BY:
            raise ConfigError("--by", f"expected one of {', '.join(BY)}, got {label!r}")
    text = read_objectives(slo, goodput)
    options: dict[str, Any] = {
        "by": by or (), "objectives": None if text is None else Objectives.parse(text),
        "percentiles": read_percentiles(percentiles),
        "reader": reader_of(reader_speed, alpha, idle_cost, reader_grace),
    }  # fmt: skip
    told: dict[str, Any]
    if _is_trace(places):
        if integrity:
            raise ConfigError("--integrity", "applies to captures of llmtap only")
        told = _of_trace(places[0], options)
        print_json(told, json) if json is not None else print_rich(render_capture(told))
        return
    capture = read(places, skip_broken=skip_broken)
    checked = capture.integrity()
    if integrity:
        told = checked.to_dict()
        print_json(told, json) if json is not None else print_rich(render_integrity(told))
        raise typer.Exit(0 if checked.ok else FAILED)
    with _progress(len(capture)) as progress:
        told = describe([f.info for f in capture.files], capture.batches(), progress=progress, **options)
    capture_told: Any = told["capture"]
    capture_told |= {
        "files": len(capture.files), "spools": sum(f.spool for f in capture.files),
        "bytes": sum(f.bytes for f in capture.files),
        "broken": [{"file": file, "problem": problem} for file, problem in capture.broken],
    }  # fmt: skip
    told["integrity"] = checked.to_dict()
    verdicts = dict(verdicts_beside(places))
    if verdicts:
        told["replays"] = verdicts
    if json is not None:
        print_json(told, json)
        return
    print_rich(render_capture(told))
    if verdicts:
        from llmtap.report.replay import render_verdicts

        print_rich(render_verdicts(verdicts))


# ---------------------------------------------------------------- captures and traces


def _is_trace(places: list[str]) -> bool:
    """One file that is neither Parquet nor a spool; `read` reports everything else."""
    if len(places) != 1:
        return False
    try:
        with open(places[0], "rb") as file:
            return file.read(4) not in (b"PAR1", b"LTSP")
    except OSError:
        return False


def _of_trace(path: str, options: dict[str, Any]) -> dict[str, object]:
    from llmtap.capture.read.describe import describe
    from llmtap.traces.registry import open_trace

    with open_trace(path) as trace, _progress(None) as progress:
        source = trace.source
        told = describe([source.info], source.batches, progress=progress, **options)
    told["capture"] |= {"source": [trace.format.name], "notes": source.notes}  # type: ignore[operator]
    return told


@contextmanager
def _progress(rows: int | None) -> Iterator[Callable[[int], None] | None]:
    """A bar of the rows read, in a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("exchanges", total=rows)
        yield lambda done: bar.update(task, completed=done)


# ---------------------------------------------------------------- results of replays


class _Marks(msgspec.Struct):
    """Fields of a replay's result, and of hardly anything else."""

    load: dict[str, msgspec.Raw]
    sender: dict[str, msgspec.Raw]
    plan: dict[str, msgspec.Raw]
    metrics: dict[str, msgspec.Raw]
    verdict: dict[str, msgspec.Raw]


def load_result(place: str | Path) -> dict[str, Any] | None:
    """The result that `llmtap replay --json` wrote there; None where that is something else."""
    path = Path(place)
    try:
        if not path.is_file() or path.stat().st_size > RESULT_BYTES_MAX:
            return None
        with path.open("rb") as file:
            begin = file.read(64)
            if not begin.lstrip().startswith(b"{"):
                return None
            raw = begin + file.read()
        msgspec.json.decode(raw, type=_Marks)
        result: dict[str, Any] = msgspec.json.decode(raw)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    return result


def tell_replay(outputs: Outputs, result: Mapping[str, Any]) -> None:
    """Write and print what is wanted of a replay's result."""
    from llmtap.report.replay import render_replay, replay_html, replay_markdown

    texts = {
        "--json": lambda: json_text(result), "--html": lambda: replay_html(result),
        "--markdown": lambda: replay_markdown(result),
    }  # fmt: skip
    outputs.tell(texts, lambda: print_rich(render_replay(result)))


def write_beside(capture: str, result: Mapping[str, Any]) -> None:
    """Leave the result in the capture's folder, where that is a local one.

    Raises ConfigError where it cannot be written.
    """
    from llmtap.capture.store.parquet import open_place

    folder = open_place(capture).folder
    if folder is not None:
        when = re.sub(r"\W", "", str(result["window"]["start"]))
        write_output("--capture", folder / BESIDE.replace("*", when), json_text(result))


def verdicts_beside(places: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and verdicts of the results that lie in these folders, the oldest first."""
    for place in places:
        for path in sorted(Path(place).glob(BESIDE)) if Path(place).is_dir() else ():
            result = load_result(path)
            if result is not None:
                yield path.name, result["verdict"]


# ---------------------------------------------------------------- results of benchmarks


def _refuse_bench(places: list[str]) -> None:
    """Refuse results folders: the sum of a benchmark's captures, of several loads, means nothing."""
    for place in (Path(found) for pattern in places for found in sorted(glob(pattern))):
        results = [place] if (place / "bench.json").is_file() else []
        results += [found.parent for found in sorted(place.glob("*/bench.json"))]
        if results:
            hint = f"llmtap report {shlex.quote(str(results[0]))}; --compare names other results"
            raise ConfigError("CAPTURE", f"{results[0]} has benchmark results", hint)


def _show_bench(folder: Path, outputs: Outputs) -> None:
    from llmtap.bench.report.report import load_document
    from llmtap.cli.bench import bench_texts
    from llmtap.report.bench import render_bench

    document = load_document(folder)
    outputs.tell(bench_texts(document), lambda: print_rich(render_bench(document)))


def _compare(
    places: Sequence[str], others: Sequence[str], json: str | None, html: str | None, markdown: str | None
) -> None:
    if len(places) != 1:
        raise ConfigError(
            "--compare",
            f"{len(places)} results to compare with",
            "one, then --compare for each of the others; a file for --json is --json=FILE",
        )
    outputs = Outputs(json=json, html=html, markdown=markdown)
    need_extra("--compare", "scipy", "bench")
    results = {place: load_result(place) for place in (places[0], *others)}
    if any(result is not None for result in results.values()):
        _compare_replays([places[0], *others], results, outputs)
        return
    from llmtap.cli.bench import compare_folders

    compare_folders(Path(places[0]), [Path(other) for other in others], outputs)


def _compare_replays(
    places: Sequence[str], results: Mapping[str, dict[str, Any] | None], outputs: Outputs
) -> None:
    from llmtap.load.replay.comparison import (
        compare_replays,
        comparison_document,
        render_replay_comparison,
    )
    from llmtap.report.render import markdown, page_html

    if missing := [place for place, result in results.items() if result is None]:
        if not Path(missing[0]).exists():
            place = "CAPTURE" if missing[0] == places[0] else "--compare"
            raise ConfigError(place, f"there is no file {missing[0]}")
        hint = "results of llmtap replay --json are compared with each other only"
        raise ConfigError("--compare", f"{missing[0]} is not a result of llmtap replay", hint)
    if len(results) < len(places):
        raise ConfigError("--compare", "a result is named twice")
    names = [Path(place).stem for place in places]
    labels = names if len(set(names)) == len(names) else places
    told = compare_replays(
        {label: found for label, place in zip(labels, places, strict=True) if (found := results[place])}
    )
    texts = {
        "--json": lambda: json_text(told),
        "--html": lambda: page_html(comparison_document(told), "replay_page.css"),
        "--markdown": lambda: markdown(comparison_document(told), special="|"),
    }  # fmt: skip
    outputs.tell(texts, lambda: print_rich(render_replay_comparison(told)))
    invalid = any(not result["verdict"]["valid"] for result in told["results"])
    if invalid or any(row["load"] for one in told["comparisons"] for row in one["set_up"]):
        raise typer.Exit(FAILED)
