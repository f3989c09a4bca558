"""Turn the JSON of `compare_replays` into a report for a terminal, as Markdown and as an HTML page.

For `llmtap report --compare`; the JSON comes from `comparison.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import RenderableType

from llmtap.report.document import Note, ReportDocument, Section, Table
from llmtap.report.render import markdown, page_html, terminal
from llmtap.report.values import (
    FEW,
    MARK,
    METRIC_TITLES,
    bursts_said,
    is_marked,
    milliseconds,
    number,
    plain_text,
)

_ABOUT: Final = (
    "Interval: 95 % for each difference by itself; it describes the requests of these two runs. Runs differ"
    " by more: repeat both, in turn. An end without a number: too few samples. TBC, ITL and"
    " rates have no interval. The rates of requests ended and of output are over the whole window, with the"
    " wait for the last answers."
)
_OTHER_LOAD: Final = "The loads differ: differences are those of the load and of the server together."
_OTHER_OPTION: Final = "ITL is of different options, and not compared; TBC is the same quantity in both."
_UNCOMPARED: Final = "TBC, ITL and TPOT are not compared."
_Json = Mapping[str, Any]


def compare_replays_markdown(told: _Json) -> str:
    return markdown(_document(told), special="|")


def compare_replays_html(told: _Json) -> str:
    return page_html(_document(told), "replay_page.css")


def render_replay_comparison(told: _Json) -> RenderableType:
    document = _document(told)
    blocks: list[Note | Table] = [*_verdicts(told)]
    for section in document.sections:
        blocks += [Note(section.heading, "bold"), *(b for b in section.blocks if isinstance(b, Note | Table))]
    return terminal(blocks)


def _document(told: _Json) -> ReportDocument:
    sections = [
        Section(f"against-{i}", f"{one['b']} against {one['a']}", list(_comparison(one)))
        for i, one in enumerate(told["comparisons"])
    ]
    title = f"Replays compared: {', '.join(one['label'] for one in told['results'])}"
    return ReportDocument(title, list(_verdicts(told)), sections=sections)


def _verdicts(told: _Json) -> Iterator[Note]:
    for one in told["results"]:
        valid = one["verdict"]["valid"]
        says = [] if valid else [finding["says"] for finding in one["verdict"]["findings"]][:1]
        state = "partial" if valid and one["verdict"].get("partial") else "valid" if valid else "NOT VALID"
        text = f"{one['label']}: to {one['target'] or '?'}, {one['start'] or 'at an unknown time'}, {state}"
        yield Note(": ".join([text, *says]), "none" if valid else "red")


def _comparison(one: _Json) -> Iterator[Note | Table]:
    set_up = one["set_up"]
    if any(row["load"] for row in set_up):
        yield Note(_OTHER_LOAD, "bold red", lead="warning:")
    if any(row["name"] == "ITL option" for row in set_up):
        yield Note(_OTHER_OPTION, lead="warning:")
    for caution in one.get("cautions") or ():
        says = " ".join(bursts_said(caution["events_per_read"], caution["label"]))
        yield Note(f"caution: {says} {_UNCOMPARED}", "yellow")
    rows = [_row(row) for row in one["figures"]]
    heads = ["", "n", one["a"], "n", one["b"], "difference", "95 % interval", "relative"]
    yield Table(heads, rows, nowrap=True, label="Figures")
    yield Note(_ABOUT)
    if is_marked(rows):
        yield Note(FEW)
    if set_up:
        cells = [[row["name"], plain_text(row["a"]), plain_text(row["b"])] for row in set_up]
        yield Table(["differs in the set-up", one["a"], one["b"]], cells, label="Set-up")
    else:
        yield Note("The set-ups do not differ.")


def _row(row: _Json) -> list[str]:
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
