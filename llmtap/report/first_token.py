"""Text of the parts of a wait for the first token: bars, table and sentence, from the public JSON.

The JSON is that of `/api/v1/first_token` (`first_token_lines`), or that of a summary of many streams
(`phase_table`, for the report of a capture). The table of the parts is `PHASES` in `metrics/phases.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llmtap.metrics.phases import PHASES
from llmtap.report.document import Table
from llmtap.report.values import at, count_with_noun, figure_text, milliseconds

BAR_CELLS: Final = 32
"""Width of the bars of all parts together, in characters."""
_FULL: Final = "█"
_NARROW: Final = "▏"
"""Bar of a part that is shorter than one character."""
_HOUR_MIN_S: Final = 3_300
"""Shortest window that a sentence calls an hour: twelve slices of 5 min, the newest not complete."""
_Json = Mapping[str, Any]


def first_token_sentence(answer: _Json) -> str:
    """Return the sentence that names the unusual parts of the wait, or the longest part if none is unusual.

    It also has the number of streams with which the wait is compared.
    """
    parts = [part for part in answer["parts"] if part["seconds"] is not None]
    if not parts:
        return "The request was not sent, so there is no wait to divide."
    longest = max(parts, key=lambda part: part["seconds"])
    waited, n = answer["waited"], answer["n"]
    took = f"{milliseconds(longest['seconds'])} of {milliseconds(waited)} ms"
    longest_text = f"The longest part is {longest['title']!r}: {took}."
    model = "the same model" if answer["same_model"] else "the models counted as other"
    span = "in the last hour" if answer["window"] >= _HOUR_MIN_S else "since the start of the meter"
    streams = f"{count_with_noun(n, 'stream')} of {model} {span}"
    if n < answer["n_needed"]:
        return f"{longest_text} What is unusual is not known: {streams}, {answer['n_needed']} are needed."
    unusual = [part for part in parts if part["unusual"]]
    if not unusual:
        return f"No part is unusual beside {streams}. {longest_text}"
    unusual.sort(key=lambda part: part["median"] - part["seconds"])
    named = [
        f"{part['title']!r} took {milliseconds(part['seconds'])} ms, and {milliseconds(part['median'])} ms"
        for part in unusual
    ]
    return f"Unusual: {'; '.join(named)} in the median of {streams}."


def first_token_lines(answer: _Json) -> Iterator[str]:
    """Yield a line with a bar for each part of the wait, then the sentence on unusual parts and its rule."""
    whole = answer["waited"] or 1
    width = max(len(phase.title) for phase in PHASES)
    yield f"{'':{width}} {'ms':>8} {'median':>8} {'p90':>8}"
    for part in answer["parts"]:
        figures = " ".join(f"{milliseconds(part[name]):>8}" for name in ("seconds", "median", "usual"))
        mark = "  UNUSUAL" if part["unusual"] else ""
        yield f"{part['title']:{width}} {figures} {_bar(part, whole):{BAR_CELLS}}{mark}".rstrip()
    yield answer["sentence"]
    yield answer["rule"]


def _bar(part: _Json, whole: float) -> str:
    if not part["seconds"]:
        return ""
    begin = min(BAR_CELLS - 1, int(part["start"] / whole * BAR_CELLS))
    end = min(BAR_CELLS, round((part["start"] + part["seconds"]) / whole * BAR_CELLS))
    return " " * begin + (_FULL * (end - begin) or _NARROW)


def phase_table(summary: _Json) -> Table | None:
    """Return the parts of the waits of many streams (`phases` of a summary), or None without streams."""
    phases = summary.get("phases") or {}
    rows = [
        [phase.title, f"{figures['n']:,}", *(figure_text(figures, name) for name in ("p50", "p90", "p99"))]
        for phase in PHASES
        if (figures := at(phases, phase.name)) and figures["n"]
    ]
    heads = ["wait for the first token, ms", "n", "p50", "p90", "p99"]
    return Table(heads, rows) if rows else None
