"""Saved answers: whatever they were saved as, the events are the same and lie where they lie."""

import base64
import gzip
import itertools
import json
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.exchange.saved import CPU_MAX_NS, Saved, SavedError, explain, read_saved
from tests.support.servers.peer import chunked
from tests.support.traffic.corpus import NAMES, Recorded


def event(**delta: Any) -> bytes:
    chunk = {"model": "tiny", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


EVENTS = [
    event(role="assistant", content=""),
    event(content="Well"),
    event(content=", yes"),
    b"data: [DONE]\n\n",
]
BODY = b"".join(EVENTS)
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def http(fields: str, wire: bytes) -> bytes:
    return (HEAD + fields + "\r\n").encode() + wire


def spans(saved: Saved) -> list[bytes]:
    """The bytes of each event."""
    return [saved.body[e.start : e.end] for e in explain(saved).events]


def har(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"log": {"version": "1.2", "entries": entries}}).encode()


def entry(content: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {
        "startedDateTime": "2026-01-02T03:04:05.678Z",
        "time": 640.5,
        "request": {
            "method": "POST",
            "url": "https://gateway.test/v1/chat/completions?beta=1",
            "postData": {"mimeType": "application/json", "text": '{"model": "asked-for", "stream": true}'},
        },
        "response": {
            "status": 200,
            "headers": [
                {"name": "content-type", "value": "text/event-stream"},
                {"name": "content-encoding", "value": "gzip"},
                {"name": "transfer-encoding", "value": "chunked"},
                {"name": ":status", "value": "200"},
            ],
            "content": content,
        },
        "timings": {"blocked": -1, "send": 0.5, "wait": 240, "receive": 400},
        **about,
    }


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (BODY, "event stream"),
        (http("", BODY), "HTTP response"),
        (http("Transfer-Encoding: chunked\r\n", chunked(*EVENTS)), "HTTP response"),
        (http(f"Content-Length: {len(BODY)}\r\n", BODY + b"and more"), "HTTP response"),
        (http("Content-Encoding: gzip\r\n", gzip.compress(BODY, mtime=0)), "HTTP response"),
        (http("Content-Encoding: zstd\r\n", zstandard.compress(BODY)), "HTTP response"),
        (
            http(
                "Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
                chunked(gzip.compress(BODY, mtime=0)),
            ),
            "HTTP response",
        ),
        (b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" + http("", BODY), "HTTP response"),
        (http("", BODY).replace(b"HTTP/1.1 200 OK", b"HTTP/2 200 "), "HTTP response"),
        (har(entry({"text": BODY.decode()})), "HAR entry 0"),
        (har(entry({"text": base64.b64encode(BODY).decode(), "encoding": "base64"})), "HAR entry 0"),
        (json.dumps(entry({"text": BODY.decode()})).encode(), "HAR entry 0"),
    ],
)
def test_however_it_was_saved_the_events_are_the_same(data: bytes, what: str) -> None:
    saved = read_saved(data)
    assert (saved.what, spans(saved)) == (what, EVENTS)
    explained = explain(saved)
    assert [e.delta.text for e in explained.events] == ["", "Well", ", yes", ""]
    assert (explained.exchange.outcome, explained.exchange.stream) == (Outcome.COMPLETE, True)


@pytest.mark.parametrize(
    ("fields", "wire", "note"),
    [
        # As curl -i writes it: decoded, under the head as it came.
        ("Transfer-Encoding: chunked\r\n", BODY, "the head says chunked, but the body is not"),
        ("Content-Encoding: gzip\r\n", BODY, "the head says gzip, but the body was decoded"),
        ("Transfer-Encoding: chunked\r\n", chunked(BODY)[:-9], "was cut off"),
        (f"Content-Length: {len(BODY) + 1}\r\n", BODY, "was cut off"),
    ],
)
def test_a_head_that_does_not_fit_its_body_is_noted(fields: str, wire: bytes, note: str) -> None:
    saved = read_saved(http(fields, wire))
    assert len(saved.notes) == 1
    assert note in saved.notes[0]
    x = explain(saved).exchange
    assert x.outcome is (Outcome.TRUNCATED if "cut off" in note else Outcome.COMPLETE)


def test_a_har_entry_tells_the_request_and_the_totals() -> None:
    saved = read_saved(har(entry({"text": BODY.decode()})))
    assert saved.totals == {"total": 0.6405, "send": 0.0005, "wait": 0.24, "receive": 0.4}
    x = explain(saved).exchange
    assert (x.model, x.path, x.method) == ("asked-for", "/v1/chat/completions", "POST")
    assert (x.endpoint, x.status) == ("chat.completions", 200)
    assert x.to_dict({}, {})["arrival"] == "2026-01-02T03:04:05.678000Z"


def test_one_of_several_entries_is_picked_by_its_number() -> None:
    other = entry({"text": '{"error": {"message": "no", "type": "x"}}', "mimeType": "application/json"})
    other["response"]["headers"] = []
    data = har({"request": {}}, other, entry({"text": BODY.decode()}))
    assert read_saved(data, entry=1).what == "HAR entry 1"
    assert explain(read_saved(data, entry=1)).exchange.outcome is Outcome.UPSTREAM_ERROR
    assert spans(read_saved(data, entry=2)) == EVENTS
    with pytest.raises(SavedError, match="2 responses") as caught:
        read_saved(data)
    assert "2: POST /v1/chat/completions 200 None" in (caught.value.hint or "")
    for wrong in (0, 3):
        with pytest.raises(SavedError, match=f"no entry {wrong}"):
            read_saved(data, entry=wrong)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b"hello there\n", "the content is not an event stream"),
        (b"\x00\x01\x02" * 40, "the content is not an event stream"),
        (gzip.compress(b"data: {}\n\n", mtime=0), "compressed with gzip"),
        ("data: {}\n\n".encode("utf-16"), "UTF-16"),
        (b'{"a": 1', "cannot be parsed to its end"),
        (b'{"a": 1}\nhello\n{"a": 2}\n', "the content is not an event stream"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n", "has no blank line after its head"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\ndata: x\n\n", "malformed response head"),
        (http("Content-Encoding: gzip\r\n", b"\x00\x01garbage"), "not valid gzip"),
        (http("Content-Encoding: rot13\r\n", b"\x00\x01garbage"), "unknown content coding"),
        (har(), "no entry with a response"),
        (har(entry({"text": "???", "encoding": "base64"})), "not valid base64"),
    ],
)
def test_what_cannot_be_explained_is_told_in_a_sentence(data: bytes, problem: str) -> None:
    with pytest.raises(SavedError, match=problem):
        read_saved(data)


@given(st.binary(max_size=400))
def test_any_bytes_are_explained_or_refused(data: bytes) -> None:
    """Invariant: an event lies within the body; what is refused is refused as SavedError."""
    for given_bytes in (data, b"data: " + data, HEAD.encode() + b"\r\n" + data, HEAD.encode() + data):
        try:
            saved = read_saved(given_bytes)
        except SavedError:
            continue
        explained = explain(saved)
        assert isinstance(explained.exchange, Exchange)
        assert all(0 <= e.start <= e.end <= len(saved.body) for e in explained.events)


# Made anew each time: what stands in a place may itself be changed.
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(), st.text(), max_size=2),
)


@given(st.data())
def test_any_har_is_explained_or_refused(data: st.DataObject) -> None:
    """Whatever stands where: a HAR is written by many programs, and some of them by hand."""
    whole = entry({"text": BODY.decode(), "mimeType": "text/event-stream"})
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = whole
        while True:
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(ANYTHING)
            break
    try:
        explain(read_saved(har(whole, {}), entry=0))
    except SavedError as refused:
        assert str(refused)


@pytest.mark.parametrize("name", NAMES)
def test_events_of_a_recording_lie_where_it_says(name: str) -> None:
    recorded = Recorded(name)
    expected = [(e["start"], e["end"]) for e in recorded.expect["events"]]
    for data in (recorded.wire, recorded.decoded):
        explained = explain(read_saved(data, path=recorded.doc["request"]["path"]))
        assert [(e.start, e.end) for e in explained.events] == expected


@pytest.mark.parametrize("status", [0, -1, None, "0"])
def test_a_har_entry_without_an_answer_has_no_status(status: object) -> None:
    def entry(text: str) -> bytes:
        response = {"status": status, "_error": "net::ERR_FAILED", "content": {"text": text}}
        return json.dumps({"request": {"method": "POST", "url": "/v1/x"}, "response": response}).encode()

    with pytest.raises(SavedError, match=r"has no response: status .*, net::ERR_FAILED"):
        read_saved(entry(""))
    x = explain(read_saved(entry("{}"))).exchange
    assert (x.status, x.outcome) == (None, Outcome.TRUNCATED)


def test_the_cpu_time_of_a_saved_answer_is_limited() -> None:
    data = http("Content-Type: text/event-stream\r\n", event(content="a") * 5_000 + b"data: [DONE]\n\n")
    saved = read_saved(data)
    whole = explain(saved)
    assert (len(whole.events), whole.exchange.error) == (5_001, None)
    clock = itertools.count(step=CPU_MAX_NS // 4)
    cut = explain(saved, cpu_ns=lambda: next(clock))
    assert 0 < len(cut.events) < 2_000
    assert cut.exchange.error is not None and "CPU" in cut.exchange.error
