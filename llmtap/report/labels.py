"""Show which requests were refused although their label says `should-answer`, and the reverse.

The input is `labels` of the public JSON of a Summary or of an arm (`metrics/refusals.py`); None if no request
had a label.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.report.document import Table
from llmtap.report.values import counts_text

_WRONG: Final = {
    "should-answer": ("refused", "false positives"),
    "should-refuse": ("answered", "false negatives"),
}
"""By label: the result that counts as an error, and the name of such errors."""
LABELS_TITLE: Final = "Refusals against labels"
_Labels = Mapping[str, Any] | None


def label_lines(labels: _Labels) -> Iterator[str]:
    """Yield a line for each label that requests had, and one line for all labels of unknown meaning."""
    if labels is None:
        return
    for label, (error, title) in _WRONG.items():
        counts = labels[label]
        decided = counts["answered"] + counts["refused"]
        undecided = f"; {counts['undecided']:,} neither answered nor refused" if counts["undecided"] else ""
        if decided:
            errors = f"{counts[error]:,} of {decided:,} {error}"
            yield f"{label}: {errors} ({title} {share_text(counts)}){undecided}"
        elif undecided:
            yield f"{label}{undecided.removeprefix(';')}"
    if labels["ignored"]:
        yield f"labels that do not count: {counts_text(labels['ignored'])}"


def labels_table(named: Mapping[str, _Labels], head: str, caption: str = "") -> Table | None:
    """Return a table of results by name (such as an arm) and label; None if no request had a label.

    `named`: labels by name. `head`: title of the column of names.
    """
    rows: list[Sequence[str]] = []
    labelled = {name: labels for name, labels in named.items() if labels is not None}
    for name, labels in labelled.items():
        for label, (_, title) in _WRONG.items():
            counts = labels[label]
            results = [counts[result] for result in ("answered", "refused", "undecided")]
            if any(results):
                rows.append([name, label, *(f"{n:,}" for n in results), title, share_text(counts)])
    if not rows:
        return None
    heads = [head, "label", "answered", "refused", "neither", "errors", "share (95 % interval)"]
    ignored = [
        f"{name}: {counts_text(labels['ignored'])}" for name, labels in labelled.items() if labels["ignored"]
    ]
    footnote = f"Labels that do not count: {'; '.join(ignored)}." if ignored else ""
    return Table(heads, rows, caption, label=LABELS_TITLE, footnote=footnote)


def share_text(counts: Mapping[str, Any]) -> str:
    """Return the share of errors with its interval; a dash if no request was answered or refused."""
    if counts["share"] is None:
        return "-"
    if counts["interval"] is None:
        return f"{counts['share']:.1%}"
    low, high = counts["interval"]
    return f"{counts['share']:.1%}, {low:.1%} to {high:.1%}"
