"""Bodies, answers, prompts and arrays: what comes into columns, what is lost, what does not fit."""

import io
import json
from decimal import Decimal
from typing import Any

import pytest

from llmtap.exchange.saved import explain, read_saved
from llmtap.traces import bodies, format
from llmtap.traces.bodies import compact_json, read_elements, read_object, request_columns
from llmtap.traces.format import FormatError, text_batches
from llmtap.traces.formats.har import answer_columns, answer_text


def test_rows_become_batches_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "ROWS_PER_BATCH", 3)
    monkeypatch.setattr(format, "TEXT_BYTES_PER_BATCH", 100)
    long = ({"seq": 4, "request_body": "x" * 60}, {"response_text": "y" * 60})
    rows = [*({"seq": i} for i in range(4)), *long]
    batches = list(text_batches(rows))
    assert [batch.num_rows for batch in batches] == [3, 3]
    assert [row["seq"] for batch in batches for row in batch.to_pylist()] == [0, 1, 2, 3, 4, None]


@pytest.mark.parametrize("row", [{"seq": "secret"}, {"seq": 1 << 70}, {"blocks": 3}, {"model": 3}])
def test_a_value_that_does_not_fit_is_told_by_column_and_never_shown(row: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=f"^{next(iter(row))}: a value does not fit the type "):
        list(text_batches([row]))


@pytest.mark.parametrize("data", [b"", b"3", b'{"a": 1e999}', b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_told_with_its_place(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^here: "):
        read_object(data, "here")


def test_what_was_asked_for_comes_into_columns() -> None:
    row = request_columns(
        {
            "model": "m",
            "max_tokens": 5,
            "temperature": 1,
            "top_p": 0.5,
            "n": 2,
            "tools": [{}, {}],
            "response_format": {"type": "json_object"},
            "messages": [
                {"role": "user", "content": "é"},
                {"role": "x", "content": [{"text": "ab"}, 3, "c", {"type": "image_url"}]},
            ],
        }
    )
    assert row == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 0.5,
        "n": 2,
        "tools": 2,
        "images": 1,
        "response_format": "json_object",
        "message_roles": ["user", "x"],
        "message_bytes": [2, 3],
        "prompt_bytes": 5,
    }


def test_what_makes_no_sense_is_not_kept() -> None:
    row = request_columns(
        {
            "model": 3,
            "max_tokens": True,
            "temperature": "hot",
            "n": 1 << 40,
            "tools": 1,
            "messages": 5,
            "response_format": "x",
        }
    )
    assert set(row.values()) == {None}
    assert request_columns({"max_tokens": None, "max_completion_tokens": 8})["max_tokens"] == 8


def played(*events: object, path: str = "/v1/chat/completions") -> tuple[dict[str, object], str | None]:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    explained = explain(read_saved((head + body).encode(), path=path))
    return answer_columns(explained), answer_text(explained)


def choice(index: int = 0, finish: str | None = None, **delta: str) -> dict[str, object]:
    return {
        "object": "chat.completion.chunk",
        "model": "m",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
    }


def test_of_several_choices_the_first_ones_text_is_kept() -> None:
    _, text = played(choice(0, content="a"), choice(1, content="b"), choice(0, content="c"))
    assert text == "ac"


def test_a_refusal_is_what_was_said_and_reasoning_is_not() -> None:
    row, text = played(
        choice(reasoning_content="hm"), choice(refusal="I "), choice(refusal="won't", finish="stop")
    )
    assert text == "I won't"
    assert (row["outcome"], row["refusal_kind"]) == ("refused", "model_refusal")


ENTRIES = "log.entries"
CASES: list[tuple[str, bytes, str, list[Any]]] = [
    ("empty with blanks", b" \n[ \r\n\t] \n", "", []),
    ("strings with brackets", rb'["a]b", "{\"x\": [", "\\", "\\\"]"]', "", ["a]b", '{"x": [', "\\", '\\"]']),
    ("strings with commas", b'["a,b","c:d"]', "", ["a,b", "c:d"]),
    (
        "nested",
        b'[{"a": [1, {"b": "]"}], "c": {}}, [], [[]], {}]',
        "",
        [{"a": [1, {"b": "]"}], "c": {}}, [], [[]], {}],
    ),
    (
        "an array in an object",
        b'{"a": [0], "log": {"x": {"entries": [9]}, "entries": [1, {"y": 2}]}} ',
        ENTRIES,
        [1, {"y": 2}],
    ),
    (
        "such a key elsewhere",
        b'{"entries": [5], "b": {"log": {"entries": 6}}, "log": {"entries": [7]}}',
        ENTRIES,
        [7],
    ),
    ("the same key as a word", b'{"a": "log", "log" : 3, "data":[{"log": []}]}', "data", [{"log": []}]),
    ("an escaped key", rb'{"d\u0061ta": [1]}', "data", [1]),
    ("the second of two such objects", b'{"log": {"a": 1}, "log": {"entries": [1]}}', ENTRIES, [1]),
    ("keys inside an array do not count", b'[{"data": [2]}]', "", [{"data": [2]}]),
    ("long strings before it", b'{"x": "' + b'a]\\"' * 500 + b'", "data": [1]}', "data", [1]),
]


def elements(data: bytes, path: str = "") -> list[Any]:
    return list(read_elements(io.BytesIO(data), path))


@pytest.mark.parametrize("read_bytes", [3, 1 << 16])
@pytest.mark.parametrize(("data", "path", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_elements_are_those_at_the_path(
    data: bytes, path: str, expected: list[Any], read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_READ_BYTES", read_bytes)
    assert elements(data, path) == expected


def test_numbers_keep_their_value() -> None:
    data = b'[{"x": 1.10, "y": 123456789012345678901234567890, "z": 1e400}]'
    (element,) = elements(data)
    assert element == {"x": Decimal("1.10"), "y": 123456789012345678901234567890, "z": Decimal("1e400")}
    assert compact_json(element) == '{"x":1.10,"y":123456789012345678901234567890,"z":1E+400}'


@pytest.mark.parametrize(
    ("data", "path", "problem"),
    [
        (b"", "", "there is no JSON array: "),
        (b"{}", "", "there is no JSON array"),
        (b"[1] 2", "", "element 1: parse error: trailing garbage"),
        (b"[1,]", "", "element 1: "),
        (b'[{"a": 1}, {"b', "", "element 1: the file was cut off"),
        (b'["secret", !]', "", "element 1: lexical error: invalid char in json text."),
        (b'["secret \xff"]', "", "element 0: lexical error: invalid bytes in UTF8 string"),
        (b'{"log": {"a": [1]}}', "log.entries", "there is no JSON array at log.entries"),
        (b'{"data": {"x": [1]}}', "data", "there is no JSON array at data"),
        (b"[" * 1_000_000, "", "element 0: must have at most 500 nested levels"),
    ],
)
def test_what_is_no_such_array_is_told(data: bytes, path: str, problem: str) -> None:
    with pytest.raises(FormatError) as failure:
        elements(data, path)
    assert str(failure.value).startswith(problem)
    assert "secret" not in str(failure.value)


def test_an_element_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_BYTES_MAX", 1_000)
    monkeypatch.setattr(bodies, "_READ_BYTES", 100)
    assert len(elements(b'["' + b'x","' * 900 + b'"]')) == 901
    with pytest.raises(FormatError, match="an element of the JSON must have at most"):
        elements(b'["' + b"x" * 2_000)
