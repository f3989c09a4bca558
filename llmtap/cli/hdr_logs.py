"""HdrHistogram logs (`.hlog`) in `llmtap report`: merge, show and compare logs, and write one of a replay.

`metrics/hdr.py` reads and writes the format. A log of another tool does not say what its values mean, so they
are shown by the tags of the log.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from llmtap.capture.read.streams import open_input
from llmtap.cli.shared import Outputs, json_text, print_rich
from llmtap.errors import ConfigError
from llmtap.load.replay.comparison import GAPS, QUANTILES, difference_interval, ordered_values
from llmtap.metrics import hdr
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.intervals import quantile_interval
from llmtap.metrics.statistics import summarise_ns
from llmtap.report.document import Block, Note, ReportDocument, Section, Table
from llmtap.report.render import markdown, page_html, terminal
from llmtap.report.values import FEW, count_with_noun, figures_text, is_marked, milliseconds
from llmtap.traces.format import FormatError

UNITS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000}
"""By unit that the values of a log can have: number of nanoseconds."""
_FIGURES: Final = {
    "mean": "mean",
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "p999": "p99.9",
    "max": "max",
}


class LogFigure(Struct, frozen=True):
    """One percentile in the logs `a` and `b`, in seconds, with the interval of b - a and the counts."""

    tag: str
    """Tag of the histograms in the log; empty without tags."""
    figure: str
    n_a: int
    """Number of values in the log `a`."""
    n_b: int
    a: float
    """Value in the first log, in the unit of the logs."""
    b: float
    """Value in the second log."""
    difference: float
    low: float | None
    """Lower end of the interval of the difference; None: unknown."""
    high: float | None


class LogComparison(Struct, frozen=True):
    """Comparison of the log `b` with the log `a`."""

    a: str
    b: str
    figures: list[LogFigure]


def _read_log(place: str, unit: str) -> dict[str, Histogram]:
    """Return the histograms of a log by tag. `unit`: key of `UNITS`. Raises ConfigError."""
    try:
        with open_input(place, 1, None) as file:
            lines = iter(lambda: file.stream.readline(hdr.LOG_LINE_BYTES_MAX + 1), b"")
            return hdr.read_log((line.decode("utf-8", "replace") for line in lines), UNITS[unit])
    except (FormatError, ValueError) as exc:
        raise ConfigError(place, str(exc), "give a log that a tool with HdrHistogram wrote (.hlog)") from None
    except (OSError, EOFError) as exc:
        problem = f"cannot be read: {getattr(exc, 'strerror', None) or exc}"
        raise ConfigError(place, problem, "check the path and its permissions") from None


def show_logs(places: Sequence[str], outputs: Outputs, unit: str) -> None:
    """Merge logs by tag, and write the requested outputs, or print the percentiles."""
    merged: dict[str, Histogram] = {}
    for place in places:
        for tag, histogram in _read_log(place, unit).items():
            merged.setdefault(tag, Histogram()).merge(histogram)
    figures = {tag: {**summarise_ns(one), "hdr": hdr.encode(one)} for tag, one in merged.items()}
    rows = [[tag or "all", *figures_text(one, _FIGURES)] for tag, one in figures.items()]
    document = _log_document(
        "HdrHistograms",
        f"{count_with_noun(len(places), 'log')}, merged by tag",
        ("ms", "n", *_FIGURES.values()),
        rows,
    )
    _write_outputs(outputs, {"files": list(places), "histograms": figures}, document)


def compare_logs(places: Sequence[str], outputs: Outputs, unit: str) -> None:
    """Compare the first log with each other log by tag, and write or print the differences other - first."""
    (first, base), *others = [(place, _read_log(place, unit)) for place in places]
    comparisons = [LogComparison(first, place, list(_log_figures(base, other))) for place, other in others]
    rows = [
        [f"{one.tag or 'all'} {one.figure}", comparison.b, f"{one.n_a:,}", f"{one.n_b:,}"]
        + [milliseconds(value) for value in (one.a, one.b, one.difference, one.low, one.high)]
        for comparison in comparisons
        for one in comparison.figures
    ]
    heads = ("ms", "log", "n before", "n", "before", "now", "difference", "low", "high")
    document = _log_document(
        "Comparison of HdrHistograms",
        f"differences from {first}; intervals of 95 %, for values that do not depend on each other",
        heads,
        rows,
    )
    _write_outputs(outputs, {"comparisons": comparisons}, document)


def _log_figures(a: Mapping[str, Histogram], b: Mapping[str, Histogram]) -> Iterator[LogFigure]:
    for tag in (tag for tag in a if tag in b):
        ordered = [ordered_values(tag or "the log", list(side[tag].buckets())) for side in (a, b)]
        for figure, share in QUANTILES.items():
            intervals = [quantile_interval(values, share) for values in ordered]
            if intervals[0] is None or intervals[1] is None:
                continue
            low, high = difference_interval(intervals[0], intervals[1]) if tag not in GAPS else (None, None)
            (n_a, n_b), before, after = map(len, ordered), intervals[0].value, intervals[1].value
            yield LogFigure(tag, figure, n_a, n_b, before, after, after - before, low, high)


def write_log(place: Path, result: Mapping[str, Any]) -> None:
    """Write the histograms of a replay's result as a log with a tag for each metric. Raises ConfigError."""
    histograms = result.get("hdr_histograms") or {}
    if not histograms:
        hint = "an old version of llmtap wrote the result: repeat the replay"
        raise ConfigError("--hlog", "the result has no histograms", hint)
    try:
        place.write_text(hdr.log_text(histograms, float(result["window"]["seconds"])), encoding="utf-8")
    except OSError as exc:
        raise ConfigError("--hlog", f"cannot write to {place}: {exc.strerror}", "name another file") from None


def _log_document(title: str, about: str, heads: Sequence[str], rows: list[list[str]]) -> ReportDocument:
    blocks: list[Block] = [Table(tuple(heads), rows, nowrap=True)]
    if is_marked(rows):
        blocks.append(Note(FEW, "yellow"))
    return ReportDocument(title, [Note(about, "bold")], sections=[Section("latencies", title, blocks)])


def _write_outputs(outputs: Outputs, result: Mapping[str, Any], document: ReportDocument) -> None:
    texts = {
        "--json": lambda: json_text(result),
        "--html": lambda: page_html(document, "replay_page.css"),
        "--markdown": lambda: markdown(document, special="|"),
    }
    outputs.write_or_show(
        texts, lambda: print_rich(terminal([*document.summary, *document.sections[0].blocks]))
    )
