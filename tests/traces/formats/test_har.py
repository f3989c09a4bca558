"""Entries of a HAR that are LLM calls become rows like live traffic, without anything secret."""

import base64
import io
import json
from typing import Any

import pytest

from llmtap.traces.format import FormatError
from llmtap.traces.formats.har import FORMAT
from tests.support.traffic.corpus import NAMES, Recorded

read = FORMAT.read

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
SECRET = "sk-very-secret-0123456789"


def sse(*values: Any) -> str:
    return "".join(f"data: {json.dumps(value)}\n\n" for value in values) + "data: [DONE]\n\n"


def chunk(**choice: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "model": "m-1",
        "choices": [{"index": 0, "delta": {}, "finish_reason": None, **choice}],
    }


STREAM = sse(
    chunk(delta={"role": "assistant", "content": ""}),
    chunk(delta={"content": "he"}),
    chunk(delta={"content": "llo"}),
    chunk(finish_reason="stop"),
    {"model": "m-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
)


def entry(**more: Any) -> dict[str, Any]:
    """As a browser saves it, with all that must not be kept."""
    value: dict[str, Any] = {
        "startedDateTime": "2026-01-02T03:04:05.678901+01:00",
        "time": 60.5,
        "request": {
            "method": "POST",
            "url": f"https://gw.example/v1/chat/completions?key={SECRET}",
            "httpVersion": "h2",
            "cookies": [{"name": "sid", "value": SECRET}],
            "headers": [
                {"name": "Authorization", "value": f"Bearer {SECRET}"},
                {"name": "Cookie", "value": SECRET},
            ],
            "queryString": [{"name": "key", "value": SECRET}],
            "headersSize": -1,
            "bodySize": 99,
            "postData": {"mimeType": "application/json", "text": json.dumps(ASK)},
        },
        "response": {
            "status": 200,
            "statusText": "",
            "httpVersion": "h2",
            "cookies": [{"name": "sid", "value": SECRET}],
            "headers": [
                {"name": "content-type", "value": "text/event-stream"},
                {"name": "content-encoding", "value": "br"},
                {"name": "Set-Cookie", "value": SECRET},
                {"name": "x-request-id", "value": "req-7"},
            ],
            "content": {"size": len(STREAM), "mimeType": "text/event-stream", "text": STREAM},
            "redirectURL": "",
            "headersSize": -1,
            "bodySize": -1,
        },
        "cache": {},
        "timings": {"blocked": 1, "dns": -1, "connect": 4, "ssl": 2, "send": 0.5, "wait": 20, "receive": 35},
    }
    return value | more


def har(*entries: Any, **more: Any) -> str:
    return json.dumps(
        {"log": {"version": "1.2", "creator": {"name": "x", "version": "1"}, **more, "entries": entries}}
    )


def rows_of(data: bytes | str) -> tuple[list[dict[str, Any]], list[str]]:
    source = read(io.BytesIO(data.encode() if isinstance(data, str) else data))
    assert (source.info.level, source.info.arrivals) == ("full", "wall")
    return [row for batch in source.batches for row in batch.to_pylist()], source.notes


def test_an_entry_of_a_browser_is_read_like_live_traffic() -> None:
    (row,), notes = rows_of(har(entry()))
    assert notes == []
    assert row["arrival_ns"] == 1_767_319_445_678_901_000
    assert row["arrival"].isoformat() == "2026-01-02T02:04:05.678901+00:00"
    assert (row["endpoint"], row["dialect"], row["path"]) == (
        "chat.completions",
        "openai.chat",
        "/v1/chat/completions",
    )
    assert (row["model"], row["response_model"], row["max_tokens"]) == ("m", "m-1", 9)
    assert (row["status"], row["outcome"], row["finish_reason"]) == (200, "complete", "stop")
    assert (row["input_tokens"], row["output_tokens"], row["token_source"]) == (3, 2, "usage")
    assert (row["response_text"], row["stream"], row["request_id"]) == ("hello", True, "req-7")
    assert json.loads(row["request_body"]) == ASK
    # blocked 1 + connect 4, which has ssl in it, + send 0.5; then wait, then receive.
    assert (row["submit_us"], row["first_byte_us"], row["response_end_us"]) == (5_500, 25_500, 60_500)
    assert row["event_us"] is row["first_token_us"] is None, "a stream in a HAR has no times of its own"
    assert SECRET not in json.dumps(row, default=str)


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
        har(
            page,
            entry(),
            script,
            {"request": 3},
            broken,
            entry(startedDateTime="yesterday"),
            entry(startedDateTime="1601-01-01T00:00:00Z"),
        )
    )
    assert len(rows) == 1
    assert notes == [
        "2 entries are no LLM calls: left out",
        "1 entries have no request or no response: left out",
        "1 entries cannot be read as HTTP: left out",
        "2 entries have no valid startedDateTime: left out",
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
        ('{"log": {"entries": [', "element 0: the file was cut off"),
        ('{"log": {"entries": [3]}}', "entry 0: expected a JSON object"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(data: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        rows_of(data)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_answers_give_what_they_said(name: str) -> None:
    recorded = Recorded(name)
    one = entry()
    one["request"]["url"] = f"http://g{recorded.doc['request']['path']}"
    one["response"]["status"] = recorded.doc["response"]["status"]
    one["response"]["headers"] = []
    one["response"]["content"] = {
        "mimeType": dict(recorded.doc["response"]["headers"]).get("content-type", ""),
        "text": base64.b64encode(recorded.decoded).decode(),
        "encoding": "base64",
    }
    (row,), _ = rows_of(har(one))
    message, refused, finish = (recorded.expect[k] for k in ("content_text", "refusal_text", "finish_reason"))
    if isinstance(message, dict):  # of several choices, the first one's text, and the last reason
        message, finish = message["0"], finish["1"]
    assert (row["response_text"] or "") == (message or "") + (refused or "")
    assert row["finish_reason"] == finish


def failed(status: Any, error: str | None = None, text: str = "", **more: Any) -> dict[str, Any]:
    one = entry(**more)
    one["response"] |= {"status": status, "headers": [], "content": {"size": 0, "mimeType": "", "text": text}}
    if error is not None:
        one["response"]["_error"] = error
    return one


@pytest.mark.parametrize(
    ("one", "status", "outcome"),
    [
        (failed(0, "net::ERR_CONNECTION_REFUSED"), None, "upstream_reset"),
        (failed(0), None, "upstream_reset"),
        (failed(-1), None, "upstream_reset"),
        (failed(None), None, "upstream_reset"),
        (failed(0, text=STREAM), None, "upstream_reset"),
        (failed(0, "net::ERR_TIMED_OUT"), None, "upstream_timeout"),
        (failed(0, "net::ERR_ABORTED"), None, "client_cancelled"),
        (failed(0, "net::ERR_BLOCKED_BY_CLIENT"), None, "client_cancelled"),
        (failed(200, "net::ERR_ABORTED", STREAM), 200, "client_cancelled"),
        (failed(200, "net::ERR_INCOMPLETE_CHUNKED_ENCODING", STREAM), 200, "truncated"),
        (failed(200, "net::ERR_HTTP2_PROTOCOL_ERROR"), 200, "truncated"),
        (failed(307), 307, "upstream_error"),
        (failed(503), 503, "upstream_error"),
        (failed("200"), 200, None),
    ],
)
def test_an_entry_without_a_whole_answer_is_no_success(
    one: dict[str, Any], status: int | None, outcome: str | None
) -> None:
    (row,), notes = rows_of(har(one))
    assert (row["status"], row["outcome"]) == (status, outcome)
    assert len(notes) == 1
    assert status is not None or (row["first_byte_us"] is None and row["submit_us"] is not None)


@pytest.mark.parametrize("cached", [{"_fromCache": "disk"}, {"_fetchedViaServiceWorker": True}])
def test_an_answer_of_a_cache_has_no_times_of_a_server(cached: dict[str, Any]) -> None:
    rows, notes = rows_of(har(entry(**cached), failed(304), entry()))
    assert len(rows) == 1 and len(notes) == 1 and notes[0].startswith("2 entries")


@pytest.mark.parametrize(
    ("timings", "known"),
    [
        ({"send": 1, "wait": -1, "receive": 35}, ("submit_us",)),
        ({"send": 1, "wait": 20, "receive": -35}, ("submit_us", "first_byte_us")),
        ({"send": 1, "wait": "20", "receive": True}, ("submit_us",)),
        ({"send": 1, "wait": 1e18, "receive": 35}, ("submit_us",)),
        ({}, ()),
    ],
)
def test_a_negative_or_missing_time_is_not_known(timings: dict[str, Any], known: tuple[str, ...]) -> None:
    (row,), notes = rows_of(har(entry(timings=timings)))
    times = ("submit_us", "first_byte_us", "response_end_us")
    assert [name for name in times if row[name] is not None] == list(known)
    assert len(notes) == 1
