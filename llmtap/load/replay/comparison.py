"""Compare results of replays: differences of figures, most with an interval, and how the set-ups differ.

Used by `llmtap report --compare`: takes results of `llmtap replay --json` by label and returns JSON, and
renders this JSON as a document. A difference is b - a. Its interval of 95 % is computed from the intervals of
both figures: order statistics for a quantile, Wilson's score for a share. The interval covers the variation
of the requests within the two runs, not the variation from run to run. Rates, TBC and ITL have no interval. A
replay is compared with its own source in `baseline.py`.

Source: Zou and Donner 2008 (MOVER); for shares Newcombe 1998, method 10.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import hypot
from typing import Any, Final

from rich.console import RenderableType

from llmtap.gates.figures import SCALARS, failed_of
from llmtap.metrics import hdr
from llmtap.metrics.catalogue import Surface, shown_on
from llmtap.metrics.intervals import Interval, quantile_interval, share_interval
from llmtap.metrics.latency import FLATTERED, chunks_at_a_time, come_in_bursts
from llmtap.metrics.statistics import is_enough
from llmtap.report.document import Note, ReportDocument, Section, Table
from llmtap.report.gates import regression_blocks
from llmtap.report.render import terminal
from llmtap.report.values import (
    FEW,
    MARK,
    METRIC_TITLES,
    at,
    burst_sentences,
    is_marked,
    leaves,
    milliseconds,
    number,
    plain_text,
)
from llmtap.units import NS_PER_S

QUANTILES: Final = {"p50": 0.5, "p99": 0.99}
VALUES_MAX: Final = 20_000_000
"""Maximum number of values of a metric in one result: all of them are kept in a list for the intervals."""
GAPS: Final = frozenset({"tbc", "itl"})
"""Metrics with several values for each request. The values of a request depend on each other, so these
metrics have no interval."""
_RATES: Final = {
    "offered_rps": ("requests sent", "req/s"),
    "achieved_rps": ("requests ended", "req/s"),
    "output_tokens_per_second": ("output", "tokens/s"),
    "goodput": ("goodput", "req/s"),
}
"""Title and unit by the name of a figure (`gates/figures.py`)."""


def _reader_of_counts(*paths: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[int, int]]:
    part, whole = paths
    return lambda result: (at(result, *part) or 0, at(result, *whole) or 0)


_SHARES: Final = {
    "complete_share": ("answers complete", _reader_of_counts(("outcomes", "complete"), ("n",))),
    "error_rate": ("requests failed", failed_of),
    "attainment": ("objectives met", _reader_of_counts(("goodput", "met"), ("goodput", "counted"))),
}
"""Title, and the counts of the part and the whole, by the name of a figure."""
_NOT_JUDGED: Final = ("goodput", "not_judged")
_LOAD: Final = (
    "arrivals", "body", "conversations", "data", "requests", "rows", "seed", "trace", "window", "workload",
)  # fmt: skip
"""Parts of a plan that decide which requests are sent and at what times."""
_NOT_LOAD: Final = frozenset({"body.endpoint", "body.model", "body.server", "arrivals.recorded_rps"})
_UNCOMPARED: Final = ("notes", "prompts")
_Json = Mapping[str, Any]


def compare_replays(results: Mapping[str, Mapping[str, Any]], level: float = 0.95) -> dict[str, Any]:
    """Compare results of `llmtap replay --json`, by label, with the first one.

    `level`: confidence level of each interval.

    Public JSON: `results` (`label`, `target`, `start`, `verdict`), `comparisons` (`a`, `b`: labels;
    `figures`: `key` (see `gates/figures.py`), `name`, `option`, `figure`, `unit`, `n_a`, `a`, `n_b`, `b`,
    `few_a`, `few_b`, `difference`, `low`, `high`, `level`, `share`; `cautions`: `label`, `metrics`,
    `events_per_read`; `set_up`: `name`, `a`, `b`, `load`). Times are in seconds. `cautions`: a result of
    which the chunks come in bursts, while those of the other result do not; its `metrics` are misleading and
    have no difference. `option`: option of ITL (IETF 4.6.3); each option has its own rows, and there is no
    difference between two options. `few_a`, `few_b`: the result has too few samples (IETF 5.1.4.3). `a` or
    `b` is null if only the other result has the figure. An end of an interval is null if there are too few
    samples for it. `load`: whether the setting decides which requests are sent, or when.
    """
    (first, base), *others = results.items()
    return {
        "results": [
            {
                "label": label, "target": at(result, "plan", "target"),
                "start": at(result, "window", "start"), "verdict": result["verdict"],
            }
            for label, result in results.items()
        ],
        "comparisons": [
            {
                "a": first, "b": label, "figures": list(_figures(base, other, level, misled=bool(cautions))),
                "cautions": cautions, "set_up": _set_up(base, other),
            }
            for label, other in others
            for cautions in [list(_cautions({first: base, label: other}))]
        ],
    }  # fmt: skip


def difference_interval(a: Interval, b: Interval) -> tuple[float | None, float | None]:
    """Return the ends of the interval of b - a; None for an open end. The samples must be independent."""
    difference = b.value - a.value
    low = difference - hypot(b.value - b.low, a.high - a.value)
    high = difference + hypot(b.high - b.value, a.value - a.low)
    return (
        None if b.open_below or a.open_above else low,
        None if b.open_above or a.open_below else high,
    )


def _cautions(results: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    numbers = [chunks_at_a_time(result.get("chunking") or {}) for result in results.values()]
    for label, n, usual in zip(results, numbers, reversed(numbers), strict=True):
        if come_in_bursts(n, usual):
            yield {"label": label, "metrics": FLATTERED, "events_per_read": n}


def _figures(
    a: Mapping[str, Any], b: Mapping[str, Any], level: float, *, misled: bool
) -> Iterator[dict[str, Any]]:
    """Yield the figures of both results.

    `misled`: in one result the chunks come in bursts, so the metrics of FLATTERED are not compared.
    """
    for metric in (one.name for one in shown_on(Surface.COMPARISON)):
        options = [at(result, "metrics", metric, "option") for result in (a, b)]
        for option in dict.fromkeys(options):
            both = [result if one == option else {} for one, result in zip(options, (a, b), strict=True)]
            values = [_values(result, metric) for result in both]
            counts = [at(result, "metrics", metric, "n") or 0 for result in both]
            for figure, share in QUANTILES.items():
                sides = [at(result, "metrics", metric, figure) for result in both]
                quantile_intervals = [quantile_interval(ordered, share, level) for ordered in values]
                compared = not (misled and metric in FLATTERED) and "+" not in (option or "")
                yield from _row(
                    f"{metric}_{figure}", metric, figure, "s", level, counts, sides, quantile_intervals,
                    option, compared=compared,
                )  # fmt: skip
    for key, (name, counts_of) in _SHARES.items():
        pairs = [counts_of(result) for result in (a, b)]
        intervals = [share_interval(k, n, level) for k, n in pairs]
        shares = [None if one is None else one.value for one in intervals]
        yield from _row(key, name, "share", "share", level, [n for _, n in pairs], shares, intervals)
    not_judged = [at(result, *_NOT_JUDGED) for result in (a, b)]
    if any(not_judged):
        counts = [result["n"] for result in (a, b)]
        yield from _row(
            "not_judged", "not judged", "count", "requests", level, counts, not_judged, [None, None]
        )
    for key, (name, unit) in _RATES.items():
        rates = [SCALARS[key].value(result) for result in (a, b)]
        counts = [result["n"] for result in (a, b)]
        yield from _row(key, name, "rate", unit, level, counts, rates, [None, None])


def _values(result: Mapping[str, Any], metric: str) -> Sequence[float]:
    """Return the values of a metric in seconds, ascending, with an error of 0.1 %; none for `GAPS`."""
    if metric in GAPS:
        return []
    histogram = result.get("hdr_histograms", {}).get(metric)
    if histogram is None:
        return []
    values = list(hdr.values(histogram))
    n = sum(count for _, count in values)
    if n > VALUES_MAX:
        raise ValueError(
            f"the histogram of {metric} has {n:,} values, and at most {VALUES_MAX:,} can be compared"
        )
    return [value_ns / NS_PER_S for value_ns, count in values for _ in range(count)]


def _row(
    key: str, name: str, figure: str, unit: str, level: float, counts: Sequence[int],
    sides: Sequence[float | None], intervals: Sequence[Interval | None], option: str | None = None, *,
    compared: bool = True,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    a, b = sides
    if a is None and b is None:
        return
    few = [
        value is not None and figure in QUANTILES and not is_enough(n, QUANTILES[figure])
        for value, n in zip(sides, counts, strict=True)
    ]
    difference = None if a is None or b is None or not compared else b - a
    ends: tuple[float | None, float | None] = (None, None)
    if difference is not None and intervals[0] is not None and intervals[1] is not None:
        # The interval comes from a histogram, which rounds by 0.1 %: shift it to fit the exact difference.
        moved = difference - (intervals[1].value - intervals[0].value)
        low, high = difference_interval(intervals[0], intervals[1])
        ends = (None if low is None else low + moved, None if high is None else high + moved)
    yield {
        "key": key, "name": name, "option": option, "figure": figure, "unit": unit,
        "n_a": counts[0], "a": a, "n_b": counts[1], "b": b, "few_a": few[0], "few_b": few[1],
        "difference": difference, "low": ends[0], "high": ends[1],
        "level": level, "share": difference / a if a and difference is not None else None,
    }  # fmt: skip


def _set_up(a: _Json, b: _Json) -> list[dict[str, Any]]:
    """Return the settings of plan, sender and server that differ; settings of the load come first."""
    ours, theirs = dict(_settings(a)), dict(_settings(b))
    rows = [
        {"name": name, "a": ours.get(name), "b": theirs.get(name), "load": _is_load(name)}
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    ]
    return sorted(rows, key=lambda row: not row["load"])


def _settings(result: _Json) -> Iterator[tuple[str, Any]]:
    yield from leaves({k: v for k, v in result["plan"].items() if k not in _UNCOMPARED})
    sender = result["sender"]
    yield "sender.llmtap", sender["llmtap"]
    yield "sender.hosts", sorted({clock["host"] for clock in sender["clocks"]})
    yield "sender.processes", len(sender["processes"])
    yield "sender.clock", sender["clock"]
    yield "warm-up.requests", result["warmup"]["requests"]
    yield "objectives", at(result, "goodput", "objectives")
    yield "gpu", at(result, "system", "summary", "gpu", "devices")
    yield "ITL option", result["metrics"]["itl"]["option"]
    yield "stopped", result["load"]["stopped"]


def _is_load(name: str) -> bool:
    return name == "stopped" or (name.partition(".")[0] in _LOAD and name not in _NOT_LOAD)


_ABOUT: Final = (
    "Interval: 95 % for each difference by itself; it describes the requests of these two runs. Runs differ"
    " by more: repeat both, in turn. An end without a number: too few samples. TBC, ITL and"
    " rates have no interval. The rates of requests ended and of output are over the whole window, with the"
    " wait for the last answers."
)
_OTHER_LOAD: Final = "The loads differ: differences are those of the load and of the server together."
_OTHER_OPTION: Final = "ITL is of different options, and not compared; TBC is the same quantity in both."
_IN_BURSTS: Final = "TBC, ITL and TPOT are not compared."


def comparison_document(document: _Json) -> ReportDocument:
    """Return the JSON of `compare_replays` as a report document."""
    sections = [
        Section(f"against-{i}", f"{comparison['b']} against {comparison['a']}", list(_comparison(comparison)))
        for i, comparison in enumerate(document["comparisons"])
    ]
    title = f"Replays compared: {', '.join(comparison['label'] for comparison in document['results'])}"
    summary = [*_verdict_notes(document), *regression_blocks(document.get("regression"))]
    return ReportDocument(title, summary, sections=sections)


def render_replay_comparison(document: _Json) -> RenderableType:
    report = comparison_document(document)
    sections = ((Note(section.heading, "bold"), *section.blocks) for section in report.sections)
    return terminal([*report.summary, *chain.from_iterable(sections)])


def _verdict_notes(document: _Json) -> Iterator[Note]:
    for result in document["results"]:
        valid = result["verdict"]["valid"]
        says = [] if valid else [finding["says"] for finding in result["verdict"]["findings"]][:1]
        state = "partial" if valid and result["verdict"].get("partial") else "valid" if valid else "NOT VALID"
        start = result["start"] or "at an unknown time"
        text = f"{result['label']}: to {result['target'] or '?'}, {start}, {state}"
        yield Note(": ".join([text, *says]), "none" if valid else "red")


def _comparison(comparison: _Json) -> Iterator[Note | Table]:
    set_up = comparison["set_up"]
    if any(row["load"] for row in set_up):
        yield Note(_OTHER_LOAD, "bold red", lead="warning:")
    if any(row["name"] == "ITL option" for row in set_up):
        yield Note(_OTHER_OPTION, lead="warning:")
    for caution in comparison.get("cautions") or ():
        says = " ".join(burst_sentences(caution["events_per_read"], caution["label"]))
        yield Note(f"caution: {says} {_IN_BURSTS}", "yellow")
    rows = [_row_cells(row) for row in comparison["figures"]]
    heads = ["", "n", comparison["a"], "n", comparison["b"], "difference", "95 % interval", "relative"]
    yield Table(heads, rows, nowrap=True, label="Figures")
    yield Note(_ABOUT)
    if is_marked(rows):
        yield Note(FEW)
    if set_up:
        cells = [[row["name"], plain_text(row["a"]), plain_text(row["b"])] for row in set_up]
        yield Table(["differs in the set-up", comparison["a"], comparison["b"]], cells, label="Set-up")
    else:
        yield Note("The set-ups do not differ.")


def _row_cells(row: _Json) -> list[str]:
    unit, ends = row["unit"], (row["low"], row["high"])

    def text(value: float | None) -> str:
        if unit == "s":
            return milliseconds(value)
        return number(None if value is None else value * (100 if unit == "share" else 1))

    def signed(value: float | None) -> str:
        return f"+{text(value)}" if value is not None and value > 0 else text(value)

    shown = {"s": "ms", "share": "%"}.get(unit, unit)
    title = str(METRIC_TITLES.get(row["name"], row["name"]))
    title += f" ({row['option']})" if row["option"] else ""
    figure = f" {row['figure']}" if unit == "s" else ""
    interval = "-" if ends == (None, None) else " to ".join("…" if e is None else signed(e) for e in ends)
    relative = "-" if row["share"] is None or unit == "share" else f"{row['share'] * 100:+.1f} %"
    return [
        f"{title}{figure}, {shown}", f"{row['n_a']:,}", text(row["a"]) + MARK * row["few_a"],
        f"{row['n_b']:,}", text(row["b"]) + MARK * row["few_b"], signed(row["difference"]),
        interval, relative,
    ]  # fmt: skip
