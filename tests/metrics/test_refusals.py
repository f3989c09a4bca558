"""Refusals against labels, with Wilson's intervals from the literature's formula worked by hand."""

from typing import Any

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.label import NOT_ACCEPTED, SHOULD_ANSWER, SHOULD_REFUSE, UNKNOWN, label_of
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.refusals import error_share, label_key, labels_document, result_of
from llmtap.metrics.summary import Summary
from tests.support.traffic.streams import streamed


def exchange(label: str | None, outcome: Outcome = Outcome.COMPLETE, *, refusal: bool = False) -> Exchange:
    x = streamed(100, 140, outcome=outcome)
    x.label = label
    x.refusal = {"kind": "model_refusal", "confidence": "low"} if refusal else None
    return x


@pytest.mark.parametrize(
    ("outcome", "refusal", "result"),
    [
        (Outcome.COMPLETE, False, "answered"),
        (Outcome.COMPLETE, True, "refused"),  # a refusal that is found in the text
        (Outcome.REFUSED, False, "refused"),
        (Outcome.CLIENT_CANCELLED, True, "refused"),
        *(
            (outcome, False, "undecided")
            for outcome in Outcome
            if outcome.value not in ("complete", "refused")
        ),
    ],
)
def test_an_exchange_is_answered_refused_or_undecided(outcome: Outcome, refusal: bool, result: str) -> None:
    x = exchange(SHOULD_REFUSE, outcome, refusal=refusal)
    assert result_of(x) == result
    assert label_key(x) == f"should-refuse {result}"
    share = {"answered": ("false_negatives", 1), "refused": ("false_negatives", 0), "undecided": None}[result]
    assert error_share(x) == share
    x.label = SHOULD_ANSWER
    share = {"answered": ("false_positives", 0), "refused": ("false_positives", 1), "undecided": None}[result]
    assert error_share(x) == share
    for label in (None, UNKNOWN, NOT_ACCEPTED):
        x.label = label
        assert (label_key(x), error_share(x)) == (label, None)


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (None, None),
        ("should-refuse", SHOULD_REFUSE),
        ("should-answer", SHOULD_ANSWER),
        ("Should-Refuse", UNKNOWN),
        ("", UNKNOWN),
        ("should-refuse, should-answer", UNKNOWN),
    ],
)
def test_a_value_that_is_not_known_is_not_guessed(value: str | None, label: str | None) -> None:
    assert label_of(value) == label


def test_a_summary_has_the_shares_of_errors_and_merges_them() -> None:
    exchanges = [
        *(exchange(SHOULD_ANSWER) for _ in range(7)),
        *(exchange(SHOULD_ANSWER, Outcome.REFUSED) for _ in range(3)),
        exchange(SHOULD_ANSWER, Outcome.CLIENT_CANCELLED),
        *(exchange(SHOULD_REFUSE, Outcome.REFUSED) for _ in range(5)),
        exchange(UNKNOWN),
        exchange(NOT_ACCEPTED),
        exchange(None),
    ]
    summary, parts = Summary(), Summary()
    for x in exchanges:
        summary.add(x)
        part = Summary()
        part.add(x)
        parts.merge_bytes(part.to_bytes())
    labels: Any = summary.to_dict({}, 1.0)["labels"]
    assert labels == parts.to_dict({}, 1.0)["labels"]
    positives, negatives = labels["should-answer"], labels["should-refuse"]
    assert (positives["answered"], positives["refused"], positives["undecided"]) == (7, 3, 1)
    # Wilson with z = 1.959964: (p + z z / 2n -+ z sqrt(p q / n + z z / 4 n n)) / (1 + z z / n), n = 10.
    assert positives["share"] == pytest.approx(0.3)
    assert positives["interval"] == (pytest.approx(0.10779, abs=1e-5), pytest.approx(0.60323, abs=1e-5))
    assert (negatives["answered"], negatives["refused"], negatives["share"]) == (0, 5, 0)
    # With no event, the upper end is z z / (n + z z).
    assert negatives["interval"] == (0, pytest.approx(3.841459 / 8.841459, abs=1e-6))
    assert labels["ignored"] == {"not-accepted": 1, "unknown": 1}


def test_without_a_label_there_is_nothing_to_compare() -> None:
    assert labels_document({}) is None
    only_undecided: Any = labels_document({"should-refuse undecided": 2})
    assert only_undecided["should-refuse"]["share"] is only_undecided["should-refuse"]["interval"] is None
