"""A replay's result as Markdown: the verdict, the figures, how requests ended, and what was run.

Takes the public JSON (`llmtap replay --json`); parts that are missing are left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmtap.report.baseline import HEADS, baseline_rows, pairs_said
from llmtap.report.capture import harmless
from llmtap.report.figures import MARK
from llmtap.report.replay_figures import FEW, FIGURE_HEADS, Row, experience_rows, latency_rows, outcome_rows
from llmtap.report.replay_terms import RATES, heading_of, plan_rows
from llmtap.report.replay_verdict import UNJUDGED, finding_said, judged

__all__ = ["replay_markdown"]


def replay_markdown(result: Mapping[str, Any]) -> str:
    """All of it, without an end of line at its end."""
    parts = [f"# {_text(heading_of(result))}", *_verdict(result), *_figures(result), *_run(result)]
    return "\n\n".join(parts)


def _verdict(result: Mapping[str, Any]) -> Iterator[str]:
    verdict = result.get("verdict")
    if verdict is None:
        yield UNJUDGED
    else:
        word, more = judged(verdict)
        yield f"**{word}** {more}"
        if verdict.get("findings"):
            yield _list(finding_said(one) for one in verdict["findings"])
    notes = (result.get("plan") or {}).get("notes")
    if notes:
        yield _list(f"Note: {note}" for note in notes)


def _figures(result: Mapping[str, Any]) -> Iterator[str]:
    rows, shares = latency_rows(result), experience_rows(result)
    if rows:
        yield "## Latencies, ms"
        yield _table(FIGURE_HEADS, rows)
    if shares:
        yield "## What readers had of the answers"
        yield _table(FIGURE_HEADS, shares)
    if any(cell.endswith(MARK) for _, cells in (*rows, *shares) for cell in cells):
        yield _text(FEW)
    baseline = result.get("baseline") or {}
    pairs = baseline_rows(baseline)
    if pairs:
        yield "## Then and now, ms"
        yield _table(["", *HEADS], pairs)
        yield _text(" · ".join(pairs_said(baseline)))
    outcomes = result.get("outcomes") or {}
    if outcomes:
        yield "## Outcomes"
        yield _table(["", "requests", "of those that ended"], outcome_rows(outcomes, sum(outcomes.values())))
    errors = result.get("errors") or {}
    if errors:
        yield _list(f"failed {n:,}: {error}" for error, n in errors.items())


def _run(result: Mapping[str, Any]) -> Iterator[str]:
    rows: list[Row] = [(term, [text]) for term, text in plan_rows(result)]
    if rows:
        yield "## What was run"
        yield _table(["", ""], rows)
        yield RATES


def _table(heads: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [list(heads), ["---"] * len(heads), *([head, *cells] for head, cells in rows)]
    return "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_text(item)}" for item in items)


def _text(text: str) -> str:
    """What would end a cell, begin a tag, or make words bold is spelt out."""
    shown = harmless(text).replace("\\", "\\\\")
    for character in "|*_`":
        shown = shown.replace(character, f"\\{character}")
    return shown.replace("<", "&lt;")
