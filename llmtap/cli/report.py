"""`llmtap report`: what a capture, a trace or a benchmark is, in numbers."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from llmtap.cli.main import app
from llmtap.cli.outputs import STDOUT, need_outputs, write_output
from llmtap.errors import ConfigError, LlmtapError

__all__ = ["report"]

_FAILED: Final = 1
"""Also where systems had other loads: their figures are no comparison."""

EPILOG = """CAPTURE is a file, a folder, a pattern of files or a URL (s3://bucket/prefix) of captures,
also of one that is running (of a URL only what is uploaded; name the spool's folder beside it for the rest);
or one trace file of another tool, in any format that `llmtap convert --list` shows; or a results folder of
llmtap bench; or what `llmtap replay --json` wrote, which is told as the replay told it, its verdict too.

Examples:

  llmtap report captures/ --by tenant --slo "ttft:500ms tpot:50ms"

  llmtap report s3://bucket/captures --json > summary.json

  llmtap report captures/ --integrity || echo "something is missing"

  llmtap report replayed.json --markdown replayed.md

  llmtap report bench-results/today --html page.html

  llmtap report results/a --compare results/b --compare results/c --html page.html"""


@app.command(short_help="Sum up a capture, or compare two.", epilog=EPILOG)
def report(
    places: Annotated[list[str], typer.Argument(metavar="CAPTURE...", help="What to read.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
    integrity: Annotated[
        bool,
        typer.Option(
            "--integrity", help="List the exchanges that are missing; exit 1 if nobody accounts for some."
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="tenant|model|arm|session", help="The same for each of them; may be repeated."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Objectives to judge by, such as 'ttft:500ms tpot:50ms'.")
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Pass over files that cannot be read, and name them.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Of results of a benchmark or a replay: write their page."),
    ] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="Of these: write them as Markdown.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RESULTS",
            help="Hold these results of a benchmark against the first; may be repeated. Exit 1 where they had"
            " other loads: nothing is tested then.",
        ),
    ] = None,
) -> None:
    """Sum up a capture: latencies, workload, conversations, what is missing; or tell other results again."""
    if compare:
        from llmtap.cli.report_compare import compared

        told_of_all, alike = compared(places, compare, as_json=as_json, html=html, markdown=markdown)
        _show_compared(told_of_all, as_json=as_json)
        if not alike:
            raise typer.Exit(_FAILED)
        return
    if len(places) == 1 and (Path(places[0]) / "bench.json").is_file():
        _show_bench(Path(places[0]), html, markdown, as_json=as_json)
        return
    _refuse_bench(places)
    from llmtap.cli.replay_outputs import Outputs, load_result, verdicts_beside

    result = load_result(places[0]) if len(places) == 1 else None
    if result is not None:
        for option, refused in (
            ("--by", by), ("--slo", slo), ("--integrity", integrity), ("--skip-broken", skip_broken),
        ):  # fmt: skip
            if refused:
                raise ConfigError(option, "is of a capture; the result of a replay is summed up already")
        Outputs(json=STDOUT if as_json else None, html=html, markdown=markdown).tell(result)
        return
    for option, given in (("--html", html), ("--markdown", markdown)):
        if given is not None:
            raise ConfigError(option, "is of a results folder of llmtap bench, or of a replay's --json")
    from llmtap.capture.read.describe import BY, describe
    from llmtap.capture.read.reader import read
    from llmtap.metrics.objectives import Objectives

    for label in by or ():
        if label not in BY:
            raise ConfigError("--by", f"{label!r} is none of {', '.join(BY)}")
    objectives = None if slo is None else Objectives.parse(slo, "--slo")
    options: dict[str, Any] = {"by": by or (), "objectives": objectives}
    if _is_trace(places):
        if integrity:
            raise ConfigError("--integrity", "a trace of another tool has no numbers to tell it by")
        _show(_of_trace(places[0], options), as_json=as_json)
        return
    try:
        capture = read(places, skip_broken=skip_broken)
    except ConfigError:
        raise
    except LlmtapError as exc:  # of a later version
        raise ConfigError("capture", str(exc)) from None
    if integrity:
        checked = capture.integrity()
        _show_integrity(checked.to_dict(), as_json=as_json)
        raise typer.Exit(0 if checked.ok else 1)
    with _progress(len(capture)) as progress:
        told = describe([f.info for f in capture.files], capture.batches(), progress=progress, **options)
    told["capture"] |= {  # type: ignore[operator]
        "files": len(capture.files), "spools": sum(f.spool for f in capture.files),
        "bytes": sum(f.bytes for f in capture.files),
        "broken": [{"file": file, "problem": problem} for file, problem in capture.broken],
    }  # fmt: skip
    told["integrity"] = capture.integrity().to_dict()
    verdicts = dict(verdicts_beside(places))
    if verdicts:
        told["replays"] = verdicts
    _show(told, as_json=as_json)


def _refuse_bench(places: list[str]) -> None:
    """Captures of several systems, or of a benchmark's warm and cold and fast and slow loads, taken for one
    would be figures of nothing."""
    results: list[str] = []
    others: list[str] = []
    for place in places:
        found = [str(folder) for at in _matching(place) for folder in _results_in(at)]
        results += found
        others += [] if found else [place]
    if not results:
        return
    first, *rest = (shlex.quote(one) for one in results)
    if others:
        problem, hint = f"{results[0]} is bench results, and {others[0]} is none", f"llmtap report {first}"
    elif rest:
        problem = "these are bench results"
        hint = f"llmtap report {first}" + "".join(f" --compare {one}" for one in rest)
    else:
        problem, hint = f"{results[0]} is bench results", f"llmtap report {first}"
    raise ConfigError("CAPTURE", problem, hint)


def _matching(place: str) -> list[Path]:
    """What a place names; the whole of a pattern."""
    if "://" in place:
        return []
    path = str(Path(place).expanduser())
    return [Path(found) for found in sorted(glob(path))] if has_magic(path) else [Path(path)]


def _results_in(place: Path) -> list[Path]:
    """Results folders of benchmarks: the place itself, or those that lie in it."""
    if (place / "bench.json").is_file():
        return [place]
    return [asked.parent for asked in sorted(place.glob("*/bench.json"))] if place.is_dir() else []


def _show_compared(told: str | dict[str, Any], *, as_json: bool) -> None:
    if isinstance(told, str):
        print(told)
    elif as_json:
        _print_json(told)
    else:
        from llmtap.report.bench import render_compare

        _print(render_compare(told))


def _show_bench(folder: Path, html: str | None, markdown: str | None, *, as_json: bool) -> None:
    from llmtap.bench.report.report import load_document
    from llmtap.report.bench import render_bench

    outputs = need_outputs(json=STDOUT if as_json else None, html=html, markdown=markdown)
    document = load_document(folder)
    texts = {}
    if html is not None:
        from llmtap.report.bench import bench_html

        texts["--html"] = bench_html(document)
    if markdown is not None:
        from llmtap.bench.report.full import full_markdown

        texts["--markdown"] = full_markdown(document).rstrip("\n")
    for option, place in outputs.items():
        write_output(option, place, texts[option])
    to_stdout = [text for option, text in texts.items() if option not in outputs]
    if to_stdout:
        print(to_stdout[0])
    elif as_json:
        _print_json(document)
    else:
        _print(render_bench(document))


def _is_trace(places: list[str]) -> bool:
    """One file that is neither Parquet nor a spool: `read` finds the words for everything else."""
    if len(places) != 1:
        return False
    try:
        with open(places[0], "rb") as file:
            return file.read(4) not in (b"PAR1", b"LTSP")
    except OSError:
        return False


def _of_trace(path: str, options: dict[str, Any]) -> dict[str, object]:
    import pyarrow as pa

    from llmtap.capture.read.describe import describe
    from llmtap.capture.read.streams import opened
    from llmtap.traces.format import FormatError
    from llmtap.traces.registry import SNIFF_BYTES, detect

    try:
        with opened(path, SNIFF_BYTES, None) as file:
            found = detect(path.removesuffix(".gz").removesuffix(".zst"), file.head)
            assert found.read is not None
            source = found.read(file.stream)
            with _progress(None) as progress:
                told = describe([source.info], source.batches, progress=progress, **options)
    except FormatError as exc:
        raise ConfigError(path, str(exc)) from None
    except (pa.ArrowException, OSError, EOFError) as exc:
        raise ConfigError(path, f"cannot be read: {exc}") from None
    told["capture"] |= {"source": [found.name], "notes": source.notes}  # type: ignore[operator]
    return told


@contextmanager
def _progress(rows: int | None) -> Iterator[Callable[[int], None] | None]:
    """A bar of the rows read, where there is somebody to see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("exchanges", total=rows)
        yield lambda done: bar.update(task, completed=done)


def _show(told: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        _print_json(told)
        return
    from llmtap.report.capture import render_capture

    _print(render_capture(told))
    verdicts: Any = told.get("replays")
    if verdicts:
        from llmtap.report.replay import render_verdicts

        _print(render_verdicts(verdicts))


def _show_integrity(told: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        _print_json(told)
        return
    from llmtap.report.capture import render_integrity

    _print(render_integrity(told))


def _print_json(told: dict[str, object]) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(told)).decode())


def _print(shown: Any) -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
    else:  # for grep: a line is a line
        Console(highlight=False, width=200).print(shown, soft_wrap=True)
