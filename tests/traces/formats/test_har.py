"""What a capture tells of an exchange survives as HAR; a browser's gives what it knows, nothing secret."""

import base64
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import EVENT_CLASS_NAMES, SCHEMA, CaptureInfo
from llmtap.traces.format import FormatError, TraceWriter, WriteOptions, batch_of
from llmtap.traces.formats.har import FORMAT
from tests.support.traffic.corpus import NAMES, Recorded

read, write = FORMAT.read, FORMAT.write

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
SECRET = "sk-very-secret-0123456789"


def sse(*values: Any) -> str:
    return "".join(f"data: {json.dumps(value)}\n\n" for value in values) + "data: [DONE]\n\n"


def chunk(**choice: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk", "model": "m-1",
        "choices": [{"index": 0, "delta": {}, "finish_reason": None, **choice}],
    }  # fmt: skip


STREAM = sse(
    chunk(delta={"role": "assistant", "content": ""}), chunk(delta={"content": "he"}),
    chunk(delta={"content": "llo"}), chunk(finish_reason="stop"),
    {"model": "m-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
)  # fmt: skip


def entry(**more: Any) -> dict[str, Any]:
    """As a browser saves it, with all that must not be kept."""
    value: dict[str, Any] = {
        "startedDateTime": "2026-01-02T03:04:05.678901+01:00", "time": 60.5,
        "request": {
            "method": "POST", "url": f"https://gw.example/v1/chat/completions?key={SECRET}",
            "httpVersion": "h2", "cookies": [{"name": "sid", "value": SECRET}],
            "headers": [{"name": "Authorization", "value": f"Bearer {SECRET}"},
                        {"name": "Cookie", "value": SECRET}],
            "queryString": [{"name": "key", "value": SECRET}], "headersSize": -1, "bodySize": 99,
            "postData": {"mimeType": "application/json", "text": json.dumps(ASK)},
        },
        "response": {
            "status": 200, "statusText": "", "httpVersion": "h2",
            "cookies": [{"name": "sid", "value": SECRET}],
            "headers": [{"name": "content-type", "value": "text/event-stream"},
                        {"name": "content-encoding", "value": "br"}, {"name": "Set-Cookie", "value": SECRET},
                        {"name": "x-request-id", "value": "req-7"}],
            "content": {"size": len(STREAM), "mimeType": "text/event-stream", "text": STREAM},
            "redirectURL": "", "headersSize": -1, "bodySize": -1,
        },
        "cache": {},
        "timings": {"blocked": 1, "dns": -1, "connect": 4, "ssl": 2, "send": 0.5, "wait": 20, "receive": 35},
    }  # fmt: skip
    return value | more


def har(*entries: Any, **more: Any) -> str:
    return json.dumps(
        {"log": {"version": "1.2", "creator": {"name": "x", "version": "1"}, **more, "entries": entries}}
    )


def rows_of(data: bytes | str) -> tuple[list[dict[str, Any]], list[str]]:
    source = read(io.BytesIO(data.encode() if isinstance(data, str) else data))
    assert (source.info.level, source.info.arrivals) == ("full", "wall")
    return [row for batch in source.batches for row in batch.to_pylist()], source.notes


def written(
    rows: list[dict[str, Any]], info: CaptureInfo | None = None, **options: Any
) -> tuple[Any, TraceWriter, bytes]:
    names = sorted({name for row in rows for name in row})
    out = io.BytesIO()
    batch = batch_of(len(rows), {name: [row.get(name) for row in rows] for name in names})
    told = write(out, info or CaptureInfo(), [batch], WriteOptions(**options))
    return json.loads(out.getvalue()), told, out.getvalue()


def test_an_entry_of_a_browser_is_read_like_live_traffic() -> None:
    (row,), notes = rows_of(har(entry()))
    assert notes == []
    assert row["arrival_ns"] == 1_767_319_445_678_901_000
    assert row["arrival"].isoformat() == "2026-01-02T02:04:05.678901+00:00"
    assert (row["endpoint"], row["dialect"], row["path"]) == (
        "chat.completions", "openai.chat", "/v1/chat/completions",
    )  # fmt: skip
    assert (row["model"], row["response_model"], row["max_tokens"]) == ("m", "m-1", 9)
    assert (row["status"], row["outcome"], row["finish_reason"]) == (200, "complete", "stop")
    assert (row["input_tokens"], row["output_tokens"], row["token_source"]) == (3, 2, "usage")
    assert (row["response_text"], row["stream"], row["request_id"]) == ("hello", True, "req-7")
    assert json.loads(row["request_body"]) == ASK
    # blocked 1 + connect 4, which has ssl in it, + send 0.5; then wait, then receive.
    assert (row["submit_us"], row["first_byte_us"], row["response_end_us"]) == (5_500, 25_500, 60_500)
    assert row["event_us"] is row["first_token_us"] is None, "a stream in a HAR has no times of its own"


def test_no_secret_of_a_session_comes_into_a_row_or_goes_out() -> None:
    rows, _ = rows_of(har(entry()))
    assert SECRET not in json.dumps(rows, default=str)
    _, _, data = written(rows)
    assert SECRET.encode() not in data
    document = json.loads(data)
    for side in ("request", "response"):
        saved = document["log"]["entries"][0][side]
        assert saved["cookies"] == []
        assert [field["name"] for field in saved["headers"]] == ["content-type"]


def test_times_of_events_are_those_of_the_custom_field() -> None:
    n = STREAM.count("data:")
    chunks = [[25.5 + i, 1, 10] for i in range(n)]
    (row,), _ = rows_of(har(entry(_llmtap={"chunks": chunks})))
    assert row["event_us"] == [25_500 + 1_000 * i for i in range(n)]
    assert row["event_class"] == ["role", "content", "content", "metadata", "usage", "done"]
    assert row["first_token_us"] == 26_500
    (row,), _ = rows_of(har(entry(_llmtap={"chunks": chunks[:2]})))
    assert (row["event_us"], row["event_class"]) == ([25_500, 26_500], None)


def test_an_entry_without_content_keeps_times_and_request() -> None:
    bare = entry()
    bare["response"]["content"] = {"size": 0, "mimeType": "text/event-stream"}
    (row,), notes = rows_of(har(bare))
    assert json.loads(row["request_body"]) == ASK
    assert (row["status"], row["response_end_us"], row["stream"]) == (200, 60_500, True)
    assert row["outcome"] is row["response_text"] is row["error"] is None, "nobody knows what it said"
    assert notes[0].startswith("1 entries have no content")


def test_what_is_no_llm_call_is_left_out_and_counted() -> None:
    page = entry(request={"method": "GET", "url": "https://gw.example/"})
    page["response"]["content"] = {"mimeType": "text/html", "text": "<html>"}
    script = entry(request={"method": "POST", "url": "https://gw.example/log"})
    script["response"] = {"status": 204, "content": {"text": "{}", "mimeType": "application/json"}}
    broken = entry()
    broken["response"]["content"] = {"text": "%%%", "encoding": "base64"}
    rows, notes = rows_of(
        har(page, entry(), script, {"request": 3}, broken, entry(startedDateTime="yesterday"))
    )
    assert len(rows) == 1
    assert notes == [
        "2 entries are no LLM calls: left out",
        "1 entries have no request or no response: left out",
        "1 entries cannot be read as HTTP: left out",
        "1 entries have no valid startedDateTime: left out",
    ]


def test_content_may_be_base64_and_requests_without_json_have_no_body() -> None:
    one = entry()
    one["response"]["content"] |= {"text": base64.b64encode(STREAM.encode()).decode(), "encoding": "base64"}
    one["request"]["postData"] = {"mimeType": "multipart/form-data", "text": "--x"}
    (row,), _ = rows_of(har(one))
    assert (row["response_text"], row["request_body"], row["model"]) == ("hello", None, "m-1")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("{}", "no JSON array at log.entries"),
        ('{"log": {"entries": [', "element 0: the file was cut off"),
        ('{"log": {"entries": [3]}}', "entry 0: expected a JSON object"),
        ('{"log": {"entries": [{]}}', "element 0: "),
        (har(entry(_llmtap={"chunks": [["x", 1, 1]]})), "_llmtap.chunks"),
        (har(entry(_llmtap={"chunks": [[1, "x", 1]]})), "event_tokens: a value does not fit"),
        (har(entry(_llmtap={"row": {}})), "content of an entry with _llmtap.row"),
        (
            har(entry(_llmtap={"row": {"arrival_ns": "secret"}}, response={})),
            "arrival_ns: a value does not fit",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(data: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as told:
        rows_of(data)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_answers_give_what_they_said(name: str) -> None:
    recorded = Recorded(name)
    one = entry()
    one["request"]["url"] = f"http://g{recorded.doc['request']['path']}"
    one["response"]["status"] = recorded.doc["response"]["status"]
    one["response"]["headers"] = []
    one["response"]["content"] = {
        "mimeType": dict(recorded.doc["response"]["headers"]).get("content-type", ""),
        "text": base64.b64encode(recorded.decoded).decode(), "encoding": "base64",
    }  # fmt: skip
    (row,), _ = rows_of(har(one))
    said, refused, finish = (recorded.expect[k] for k in ("content_text", "refusal_text", "finish_reason"))
    if isinstance(said, dict):  # of several choices, the first one's text, and the last reason
        said, finish = said["0"], finish["1"]
    assert (row["response_text"] or "") == (said or "") + (refused or "")
    assert row["finish_reason"] == finish


# Round trips.

_COUNT = st.integers(0, 1 << 50)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_N = st.shared(st.integers(0, 4), key="events")
_BY_TYPE = {
    "string": _TEXT, "int64": _COUNT, "int32": st.integers(0, 1 << 31 - 1), "bool": st.booleans(),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "list<item: int64>": st.lists(_COUNT, max_size=3), "list<item: string>": st.lists(_TEXT, max_size=3),
    "list<item: uint8>": st.lists(st.integers(0, 255), max_size=3),
}  # fmt: skip
_NOT_FREE = {
    "arrival",
    "arrival_ns",
    "usage",
    "event_us",
    "event_class",
    "event_bytes",
    "event_tokens",
    "path",
}


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Any row that has an arrival; lists of events have one length."""
    row: dict[str, Any] = {"arrival_ns": draw(st.integers(0, 1 << 60))}
    free = [field for field in SCHEMA if field.name not in _NOT_FREE]
    for field in draw(st.lists(st.sampled_from(free), max_size=12, unique_by=lambda f: f.name)):
        row[field.name] = draw(_BY_TYPE[str(field.type)])
    if draw(st.booleans()):
        n = draw(st.integers(1, 4))
        row["event_us"] = draw(st.lists(_COUNT.map(lambda us: us % (1 << 40)), min_size=n, max_size=n))
        row["event_tokens"] = draw(st.lists(st.none() | st.integers(-1, 99), min_size=n, max_size=n))
        row["event_bytes"] = draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))
        row["event_class"] = draw(st.lists(st.sampled_from(EVENT_CLASS_NAMES), min_size=n, max_size=n))
    if draw(st.booleans()):
        row["usage"] = '{"prompt_tokens":3}'
    return row


@given(st.lists(rows(), min_size=1, max_size=3))
def test_every_row_with_an_arrival_survives(given_rows: list[dict[str, Any]]) -> None:
    document, told, data = written(given_rows)
    assert told.rows == len(given_rows) == len(document["log"]["entries"])
    found, notes = rows_of(data)
    assert notes == []
    for row, back in zip(given_rows, found, strict=True):
        expected = dict.fromkeys(SCHEMA.names) | row
        expected["arrival"] = back["arrival"]
        assert back == expected
        assert back["arrival"].timestamp() == pytest.approx(row["arrival_ns"] / 1e9, abs=1e-5)


REQUIRED = {
    "entry": {"startedDateTime", "time", "request", "response", "cache", "timings"},
    "request": {
        "method", "url", "httpVersion", "cookies", "headers", "queryString", "headersSize", "bodySize",
    },
    "response": {
        "status", "statusText", "httpVersion", "cookies", "headers", "content", "redirectURL", "headersSize",
        "bodySize",
    },
    "timings": {"send", "wait", "receive"},
}  # fmt: skip
"""HAR 1.2: what no object may lack."""


def test_what_is_written_is_har_1_2() -> None:
    row = {
        "arrival_ns": 1_767_323_045_678_901_234, "submit_us": 500, "first_byte_us": 20_500,
        "response_end_us": 60_500, "request_body": json.dumps(ASK), "response_text": "höllo", "status": 200,
        "endpoint": "chat.completions", "usage": '{"prompt_tokens":3,"completion_tokens":2}',
    }  # fmt: skip
    document, told, _ = written([row, {"arrival_ns": 0}])
    assert told.notes == ["1 rows do not say when they ended: where HAR wants a time, they have 0"]
    log = document["log"]
    assert (log["version"], set(log["creator"])) == ("1.2", {"name", "version"})
    first, second = log["entries"]
    for one in (first, second):
        assert REQUIRED["entry"] <= one.keys()
        for part in ("request", "response", "timings"):
            assert REQUIRED[part] <= one[part].keys()
        assert one["time"] == pytest.approx(sum(ms for ms in one["timings"].values() if ms >= 0))
        custom = [name for name in one if name.startswith("_")]
        assert one.keys() - custom == REQUIRED["entry"], "custom fields begin with an underscore"
    assert first["startedDateTime"] == "2026-01-02T03:04:05.678901Z"
    assert first["timings"] == {
        "blocked": -1, "dns": -1, "connect": -1, "ssl": -1, "send": 0.5, "wait": 20, "receive": 40,
    }  # fmt: skip
    assert first["request"]["url"].endswith(".invalid/v1/chat/completions")
    content = first["response"]["content"]
    assert json.loads(content["text"])["choices"][0]["message"]["content"] == "höllo"
    assert content["size"] == len(content["text"].encode())


def test_without_our_field_it_is_read_like_anybody_elses() -> None:
    row = {
        "arrival_ns": 1_767_323_045_678_901_000, "submit_us": 500, "first_byte_us": 20_500,
        "response_end_us": 60_500, "request_body": json.dumps(ASK), "response_text": "hello", "status": 200,
        "endpoint": "chat.completions", "usage": '{"prompt_tokens":3,"completion_tokens":2}',
        "finish_reason": "stop", "response_model": "m-1", "outcome": "complete",
    }  # fmt: skip
    document, _, _ = written([row])
    del document["log"]["entries"][0]["_llmtap"]
    (back,), _ = rows_of(json.dumps(document).encode())
    row["usage"] = back["usage"]
    assert {name: back[name] for name in row} == row
    assert (back["input_tokens"], back["output_tokens"], back["model"]) == (3, 2, "m")


def test_what_has_no_arrival_is_dropped_and_a_traces_zero_is_told() -> None:
    document, told, _ = written([{"id": "a"}, {"arrival_ns": 5}], CaptureInfo(arrivals="trace"), model="x")
    assert told.dropped == {"no arrival": 1}
    assert told.notes[0].startswith("arrivals count from the trace's own zero")
    assert document["log"]["entries"][0]["_llmtap"]["row"]["model"] == "x"
