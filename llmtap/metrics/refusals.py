"""Refusals, and their comparison with the labels of requests: false positives and false negatives.

A label (`exchange/label.py`) says whether the sender of a request expects an answer or a refusal. A refusal
instead of an answer is a false positive of the guardrail; an answer instead of a refusal is a false negative.
A request that failed, was cancelled or rejected is undecided; no share of errors has it. The counts are in a
Counter by `label_key`, so that summaries and experiments can merge them.
"""

from collections.abc import Mapping
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.label import EXPECTED, SHOULD_ANSWER, SHOULD_REFUSE
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.statistics import Interval, share_range

ANSWERED: Final = "answered"
REFUSED: Final = "refused"
UNDECIDED: Final = "undecided"
ERRORS: Final = {SHOULD_ANSWER: ("false_positives", REFUSED), SHOULD_REFUSE: ("false_negatives", ANSWERED)}
"""For each label: the name of its share of errors, and the result that is an error."""


def is_refused(x: Exchange) -> bool:
    """Return whether the model or a guardrail refused the request."""
    return x.refusal is not None or x.outcome is Outcome.REFUSED


def result_of(x: Exchange) -> str:
    """Return ANSWERED, REFUSED, or UNDECIDED (for a failed, cancelled or rejected request)."""
    if is_refused(x):
        return REFUSED
    return ANSWERED if x.outcome is Outcome.COMPLETE else UNDECIDED


def label_key(x: Exchange) -> str | None:
    """Return the key under which an exchange is counted: label and result, such as `should-refuse answered`.

    For an unknown label, it is the label alone. None without a label.
    """
    return f"{x.label} {result_of(x)}" if x.label in EXPECTED else x.label


def error_share(x: Exchange) -> tuple[str, int] | None:
    """Return the name of the share of errors to which the exchange belongs, and 1 if it is an error, else 0.

    None if the exchange has no known label, or is undecided.
    """
    result = result_of(x)
    if x.label not in ERRORS or result == UNDECIDED:
        return None
    name, error = ERRORS[x.label]
    return name, int(result == error)


def labels_document(
    counts: Mapping[str, int], intervals: Mapping[str, Interval | None] | None = None
) -> dict[str, object] | None:
    """Return public JSON of counts by `label_key`; None if no request had a label.

    For each label, it has the number of requests by result, the share of errors among the requests that were
    answered or refused, and its 95 % interval. `ignored` has the number of requests by unknown label.

    Args:
        intervals: intervals by the name of the share, for requests that are similar within a unit of an
            experiment; None: the requests are independent (Wilson's interval).
    """
    if not any(counts.values()):
        return None
    document: dict[str, object] = {}
    for label, (name, error) in ERRORS.items():
        by_result = {result: counts.get(f"{label} {result}", 0) for result in (ANSWERED, REFUSED, UNDECIDED)}
        decided = by_result[ANSWERED] + by_result[REFUSED]
        share = by_result[error] / decided if decided else None
        if share is None:
            interval = None
        else:
            interval = share_range(share, decided) if intervals is None else intervals[name]
        document[label] = {**by_result, "share": share, "interval": interval}
    ignored = {name: n for name, n in sorted(counts.items()) if n and " " not in name}
    return {**document, "ignored": ignored}
