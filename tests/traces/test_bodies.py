import io

import pytest

from llmtap.traces import bodies
from llmtap.traces.bodies import (
    TextRows,
    asked_columns,
    endpoint_of,
    read_lines,
    read_object,
    text_of,
)
from llmtap.traces.format import FormatError


def test_rows_become_batches_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ROWS_PER_BATCH", 3)
    monkeypatch.setattr(bodies, "BATCH_BYTES", 100)
    rows = TextRows()
    batches = [batch for i in range(4) for batch in rows.add(seq=i)]
    batches += [*rows.add(seq=4, request_body="x" * 60), *rows.add(response_text="y" * 60), *rows.rest()]
    assert [batch.num_rows for batch in batches] == [3, 3]
    assert [row["seq"] for batch in batches for row in batch.to_pylist()] == [0, 1, 2, 3, 4, None]
    assert list(rows.rest()) == []


@pytest.mark.parametrize("row", [{"seq": "secret"}, {"seq": 1 << 70}, {"blocks": 3}, {"model": 3}])
def test_a_value_that_does_not_fit_is_told_by_column_and_never_shown(row: dict[str, object]) -> None:
    rows = TextRows()
    list(rows.add(**row))
    with pytest.raises(FormatError, match=": a value does not fit") as told:
        list(rows.rest())
    assert str(told.value).split(":")[0] == next(iter(row))
    assert "secret" not in str(told.value)


def test_lines_are_numbered_as_an_editor_does() -> None:
    data = b"\xef\xbb\xbfa\r\n\n  \n b \nc"
    assert list(read_lines(io.BytesIO(data))) == [(1, b"a"), (4, b"b"), (5, b"c")]


def test_a_line_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LINE_BYTES_MAX", 10)
    with pytest.raises(FormatError, match="line 2 is longer"):
        list(read_lines(io.BytesIO(b"a\n" + b"x" * 50)))


@pytest.mark.parametrize("data", [b"", b"{", b"3", b"[]", b'{"a": 1e999}', b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_told_with_its_place(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^here: "):
        read_object(data, "here")


def test_what_was_asked_for_comes_into_columns() -> None:
    row = asked_columns(
        {
            "model": "m", "max_tokens": 5, "temperature": 1, "top_p": 0.5, "n": 2, "tools": [{}, {}],
            "response_format": {"type": "json_object"},
            "messages": [{"role": "user", "content": "é"},
                         {"role": "x", "content": [{"text": "ab"}, 3, "c", {"type": "image_url"}]}],
        }
    )  # fmt: skip
    assert row == {
        "model": "m", "max_tokens": 5, "temperature": 1.0, "top_p": 0.5, "n": 2, "tools": 2, "images": 1,
        "response_format": "json_object", "message_roles": ["user", "x"], "message_bytes": [2, 3],
        "prompt_bytes": 5,
    }  # fmt: skip


def test_what_makes_no_sense_is_not_kept() -> None:
    row = asked_columns(
        {
            "model": 3, "max_tokens": True, "temperature": "hot", "n": 1 << 40, "tools": 1, "messages": 5,
            "response_format": "x",
        }
    )  # fmt: skip
    assert set(row.values()) == {None}
    assert asked_columns({"max_tokens": None, "max_completion_tokens": 8})["max_tokens"] == 8


def test_the_endpoint_is_told_by_path_or_by_content() -> None:
    assert endpoint_of("/x/v1/chat/completions/", {}) == "chat.completions"
    assert endpoint_of("/v1/completions", {"messages": []}) == "completions"
    assert endpoint_of("/other", {"messages": []}) is None
    assert endpoint_of(None, {"messages": []}) == "chat.completions"
    assert endpoint_of(None, {"prompt": ""}) == "completions"
    assert endpoint_of(None, {}) is None


def test_the_text_of_parts_is_joined() -> None:
    assert text_of(None) == text_of(3) == text_of({}) == ""
    assert text_of(["a", {"text": "b"}, {"text": 3}, {}]) == "ab"
