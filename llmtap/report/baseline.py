"""What rows were when they were captured, beside what they are now: a table, and curves of both.

Takes `baseline` of the public JSON (`llmtap replay --json`). All figures of a row are of the same pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from llmtap.report.distributions import Curve, Distribution
from llmtap.report.terminal import milliseconds
from llmtap.units import format_share

__all__ = [
    "ABOUT",
    "HEADS",
    "baseline_distributions",
    "baseline_lines",
    "baseline_rows",
    "baseline_table",
    "pairs_said",
]

ABOUT: Final = (
    "Each row that was sent beside what it was when it was captured, seen from where that was done; a"
    " difference is now - then, of one row. Both sides of a line are the same rows: those that ended well on"
    " both. Nothing is tested here: rows of one load are not independent."
)
HEADS: Final = (
    "pairs", "then p50", "now p50", "then p95", "now p95", "difference p5", "p50", "p95", "slower",
)  # fmt: skip
_TITLES: Final = {
    "ttft": "TTFT", "tpot": "TPOT", "tbc_max": "longest pause", "e2e": "E2E",
    "e2e_same_length": "E2E, same length", "elapsed": "elapsed",
}  # fmt: skip
_DRAWN: Final = ("ttft", "tpot", "tbc_max", "e2e", "elapsed")
_DASHES: Final = {"then": "dash", "now": "solid"}


def baseline_rows(baseline: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Title and cells, as HEADS; ms. Figures of no pair are left out, and what would be told twice."""
    pairs, rows = baseline.get("pairs") or {}, []
    for name, title in _TITLES.items():
        pair = pairs.get(name) or {}
        if not pair.get("n") or (name == "e2e_same_length" and pair["n"] == pairs["e2e"]["n"]):
            continue
        sides = [pair[side][figure] for figure in ("p50", "p95") for side in ("then", "now")]
        more = [_signed(pair["difference"][figure]) for figure in ("p5", "p50", "p95")]
        share = format_share(round(pair["slower"] * pair["n"]), pair["n"])
        rows.append((title, [f"{pair['n']:,}", *map(milliseconds, sides), *more, share]))
    return rows


def baseline_table(baseline: Mapping[str, Any]) -> Table:
    """The same for a terminal of 80 columns, without the p95 of both sides."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("then and now, ms", no_wrap=True)
    for head in _narrow(HEADS):
        table.add_column(head.replace("difference", "diff"), justify="right", no_wrap=True)
    for title, cells in baseline_rows(baseline):
        table.add_row(title, *_narrow(cells))
    return table


def baseline_lines(baseline: Mapping[str, Any]) -> Iterator[str]:
    """What the table rests on, and what is to be known of it."""
    yield "baseline   " + " · ".join(pairs_said(baseline))
    for note in baseline.get("notes") or ():
        yield f"note: {note}"


def pairs_said(baseline: Mapping[str, Any]) -> list[str]:
    """How many rows, how sure, how long their answers."""
    requests, ended = baseline.get("requests") or {}, baseline.get("ended_well") or {}
    said = [f"{ended.get('both', 0):,} of {requests.get('compared', 0):,} rows ended well then and now"]
    said += [f"{ended[side]:,} only {side}" for side in ("then", "now") if ended.get(side)]
    lengths = baseline.get("output_tokens") or {}
    if lengths.get("n"):
        said.append(f"{lengths['equal']:,} of {lengths['n']:,} answers as long as they were")
    uncertainty = baseline.get("uncertainty") or {}
    if uncertainty.get("n"):
        sure = (milliseconds(uncertainty[figure]) for figure in ("p50", "max"))
        said.append("uncertainty of a difference p50 {} ms, max {} ms".format(*sure))
    else:
        said.append("uncertainty then not known")
    return said


def baseline_distributions(baseline: Mapping[str, Any]) -> Iterator[Distribution]:
    """Curves of then and now, of each figure that has pairs."""
    quantiles, pairs = baseline.get("quantiles") or {}, baseline.get("pairs") or {}
    shares = quantiles.get("shares") or ()
    for name in _DRAWN:
        n, title = (pairs.get(name) or {}).get("n") or 0, _TITLES[name]
        curves = []
        for colour, (side, dash) in enumerate(_DASHES.items()):
            seconds = (quantiles.get(side) or {}).get(name)
            if n and seconds and len(seconds) == len(shares):
                curves.append(Curve(f"{title} {side}", n, shares, seconds, colour, dash))
        if len(curves) == len(_DASHES):
            about = f"{title} of the same rows, as they were captured and as they were sent again."
            yield Distribution(f"baseline-{name.replace('_', '-')}", f"{title}, then and now", about, curves)


def _narrow(cells: Sequence[str]) -> list[str]:
    return [cell for head, cell in zip(HEADS, cells, strict=True) if head not in ("then p95", "now p95")]


def _signed(seconds: float | None) -> str:
    text = milliseconds(seconds)
    return f"+{text}" if seconds is not None and seconds > 0 else text
