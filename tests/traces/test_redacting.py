"""No text passes unredacted where rules are given; where none are, what is unredacted is counted."""

import json

import pyarrow as pa
import pytest

from llmtap.errors import ConfigError
from llmtap.traces.format import TraceWritten, batch_of
from llmtap.traces.redacting import Redacted

BODY = json.dumps({"messages": [{"role": "user", "content": "ann@example.com, again ann@example.com"}]})
TOLD = {"request body": 1, "response text": 1}


def passed(rules: tuple[str, ...], **columns: list[object]) -> tuple[list[dict[str, object]], TraceWritten]:
    n = len(next(iter(columns.values())))
    redacted, written = Redacted([batch_of(n, columns)], rules), TraceWritten(told=dict(TOLD))
    rows = pa.Table.from_batches(list(redacted)).select([*columns, "redactions"]).to_pylist()
    redacted.report(written)
    return rows, written


def test_marks_take_the_place_of_what_is_found_and_are_counted() -> None:
    rows, written = passed(
        ("email", "re:gr[ae]y"),
        request_body=[BODY, None, None], response_text=["a gray cat", None, "nothing"],
    )  # fmt: skip
    assert "[email], again [email]" in str(rows[0]["request_body"])
    assert [(row["response_text"], row["redactions"]) for row in rows] == [
        ("a [redacted] cat", 3), (None, None), ("nothing", 0),
    ]  # fmt: skip
    how = "3 marks in 1 rows stand for what --redact found"
    assert written.changed == {"request body": how, "response text": how}
    assert written.notes == []


def test_a_body_that_cannot_be_redacted_is_left_out() -> None:
    rows, written = passed(("email",), request_body=["ann@example.com"])
    assert rows == [{"request_body": None, "redactions": 0}]
    assert written.notes == [
        "--redact found nothing to redact",
        "1 bodies are no JSON that --redact could read, and were left out",
    ]


def test_marks_of_a_capture_are_added_to() -> None:
    rows, _ = passed(("email",), request_body=[BODY], redactions=[4])
    assert rows[0]["redactions"] == 6


def test_without_rules_rows_that_nobody_redacted_are_counted() -> None:
    columns: dict[str, list[object]] = {"request_body": [BODY, BODY, None], "redactions": [None, 0, None]}
    rows, written = passed((), **columns)
    assert [row["request_body"] for row in rows] == [BODY, BODY, None]
    assert written.notes == ["1 rows have text that nobody redacted; --redact email,card,phone,key does"]
    redacted, bare = Redacted([batch_of(1, {"request_body": [BODY]})], ()), TraceWritten()
    list(redacted)
    redacted.report(bare)
    assert bare.notes == [], "the target has no place for text"


@pytest.mark.parametrize("rule", ["emails", "re:(", "anything"])
def test_a_rule_that_is_none_is_told(rule: str) -> None:
    with pytest.raises(ConfigError, match=r"^--redact: "):
        Redacted([], (rule,))
