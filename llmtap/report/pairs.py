"""Turn the summary of paired exchanges into a report for a terminal, as HTML, and as Markdown.

The report begins with one sentence on the latency that the gateway adds.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from llmtap.metrics.catalogue import Unit
from llmtap.pairing.figures import BoundedValue
from llmtap.pairing.summary import PERCENTILES, ClockSource, FigureSummary, PairSummary
from llmtap.report.document import Block, Note, ReportDocument, Section, Table, chart_figure, term_blocks
from llmtap.report.render import markdown, page_html, terminal
from llmtap.report.values import FEW, MARK, counts_text, is_marked, milliseconds, number

if TYPE_CHECKING:
    from rich.console import RenderableType

_TERMS: Final = "terms"
"""Key of the section with the meanings of the figures."""
_TITLE: Final = "What the gateway does between front and back"
_CLOCKS: Final[Mapping[ClockSource, str]] = {
    "monotonic": "one monotonic clock: front and back ran on one host",
    "traffic": "bounded by the traffic: a request cannot arrive before it was sent, nor a token",
    "wall": "wall clocks of two hosts, which are assumed to differ by at most 1 s",
    "stated": "stated",
}
_ABOUT: Final = (
    "Ranges in brackets cover the choice of the requests (95 %) and the uncertainty of the times. The times"
    " include the network between the gateway and both vantages."
)
_NOT_COMPARABLE: Final = (
    "Prompts and texts could not be compared, because the captures do not have the same capture.pair_key."
    " Only ids in header fields are evidence, and delays of tokens are known only if events have one token."
)


def render_pairs(summary: PairSummary) -> "RenderableType":
    document = _document(summary)
    blocks: list[Block] = list(document.summary)
    for section in document.sections:
        if section.key != _TERMS:  # The meanings of the figures are too long for a terminal.
            blocks += [Note(""), Note(section.heading, "bold"), *section.blocks]
    return terminal(blocks)


def pairs_html(summary: PairSummary) -> str:
    return page_html(_document(summary))


def pairs_markdown(summary: PairSummary) -> str:
    return markdown(_document(summary))


def headline(figures: Mapping[str, FigureSummary]) -> str:
    """Return one sentence on the latency that the gateway adds."""
    parts = []
    if first := figures["ttft"].p50:
        ends = f"{_signed_ms_text(first.low)} to {_signed_ms_text(first.high)}"
        parts.append(f"adds {_ms_text(first.value)} to the first token ({ends})")
    if each := figures["token"].p50:
        text = f"{_ms_text(each.value)} to each token"
        parts.append(text if parts else f"adds {text}")
    back, front = (figures[f"tokens_per_event_{side}"].p50 for side in ("back", "front"))
    if back and front:
        before, after = number(back.value, 2), number(front.value, 2)
        same = f"keeps {before} token{'s' * (before != '1')} per event"
        parts.append(same if before == after else f"changes {before} to {after} tokens per event")
    if not parts:
        return "No pair has a streamed answer, so nothing shows what the gateway adds."
    *others, last = parts
    return f"The gateway {', '.join(others)}, and {last}." if others else f"The gateway {last}."


def _ms_text(seconds: float) -> str:
    return f"{_signed_ms_text(seconds)} ms"


def _signed_ms_text(seconds: float) -> str:
    return f"-{milliseconds(-seconds)}" if seconds < 0 else milliseconds(seconds)


def _document(summary: PairSummary) -> ReportDocument:
    lead = "" if summary.counts.pairs else "No exchange of the front has a pair."
    notes = [Note(lead or headline(summary.figures), "bold")]
    if summary.arms:
        sentences = [f"{arm}: {headline(figures)}" for arm, figures in summary.arms.items()]
        notes = [Note(sentence, "bold") for sentence in sentences]
    if not summary.comparable:
        notes.append(Note(_NOT_COMPARABLE, "yellow"))
    figures = [chart_figure("delays", summary.charts)] if summary.charts else []
    # With several arms, percentiles over all pairs would describe none of the arms.
    of_all = [] if summary.arms else [_figure_table(summary.figures)]
    terms = [[figure.title, figure.definition] for figure in summary.figures.values() if figure.n]
    sections = [
        Section("pairs", "Pairs", term_blocks(list(_pair_rows(summary)))),
        *(
            Section(f"figures-{i}", f"Figures of {arm}", [_figure_table(of_arm)])
            for i, (arm, of_arm) in enumerate(summary.arms.items())
        ),
        Section("figures", "Figures", [*of_all, *figures, Note(_ABOUT)]),
        Section(_TERMS, "What the figures are", [Table(["figure", "meaning"], terms, breaks=True)]),
    ]
    if summary.differences:
        sections.append(Section("text", "Texts that differ", [_difference_table(summary)]))
    if summary.slowest:
        sections.append(Section("slowest", "Most time added to the first token", [_slowest_table(summary)]))
    return ReportDocument(_TITLE, notes, sections=sections)


def _pair_rows(summary: PairSummary) -> Iterator[list[str]]:
    counts, clock = summary.counts, summary.clock
    yield ["exchanges", f"front {counts.front:,}, back {counts.back:,}"]
    yield ["pairs", f"{counts.pairs:,}; by {counts_text(_plain_names(summary.evidence)) or 'nothing'}"]
    yield ["unpaired", f"front {counts.unpaired_front:,}, back {counts.unpaired_back:,}"]
    yield ["ambiguous", f"front {counts.ambiguous_front:,}, back {counts.ambiguous_back:,}"]
    yield ["attempts", counts_text(_plain_names(summary.attempts)) or "none"]
    yield ["texts", counts_text(summary.text) or "none"]
    offset = f"offset {_ms_text(clock.offset)} ± {_ms_text(clock.uncertainty)}, "
    source = _CLOCKS[clock.source]
    yield ["clock", source if clock.source == "monotonic" else offset + source]


def _plain_names(counts: Mapping[str, int]) -> dict[str, int]:
    """Replace underscores in names, for readers."""
    return {name.replace("_", " "): n for name, n in counts.items()}


def _figure_table(figures: Mapping[str, FigureSummary]) -> Table:
    rows = []
    for figure in figures.values():
        if figure.n:
            in_seconds = figure.unit is Unit.SECONDS
            cells = [
                _percentile_cell(figure, name, _signed_ms_text if in_seconds else number)
                for name in PERCENTILES
            ]
            unit = "ms" if in_seconds else figure.unit.value
            rows.append([f"{figure.title}, {unit}", f"{figure.n:,}", *cells])
    footnote = FEW if is_marked(rows) else ""
    return Table(["figure", "n", *PERCENTILES], rows, footnote=footnote, label="Figures of the pairs")


def _percentile_cell(figure: FigureSummary, name: str, show: Callable[[float], str]) -> str:
    percentile: BoundedValue = getattr(figure, name)
    mark = MARK if name in figure.marks else ""
    value, low, high = show(percentile.value), show(percentile.low), show(percentile.high)
    exact = percentile.low == percentile.value == percentile.high
    return f"{value}{mark}" if exact else f"{value} ({low} to {high}){mark}"


def _difference_table(summary: PairSummary) -> Table:
    rows = [
        [
            one.front,
            ", ".join(one.back),
            one.relation.value,
            *(f"{n:,}" for n in (one.equal_chars, one.front_chars, one.back_chars)),
        ]
        for one in summary.differences
    ]
    heads = ["front", "back", "text", "equal characters", "front characters", "back characters"]
    return Table(heads, rows, label="Texts that differ")


def _slowest_table(summary: PairSummary) -> Table:
    rows = [[one.front, ", ".join(one.back), _signed_ms_text(one.ttft)] for one in summary.slowest]
    return Table(["front", "back", "added, ms"], rows, label="Most time added to the first token")
