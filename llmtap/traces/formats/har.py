"""The trace format `har`: HTTP Archive 1.2, as browsers and debugging proxies save HTTP. Read only.

Entries that are LLM calls become rows of a capture, with request body, answer, usage and times; other entries
are skipped and counted. The observer reads the answers, as it does for live traffic. `startedDateTime` is the
arrival; the end of `wait` is the first byte, and the end of `receive` is the end of the answer. An entry
without an answer (status 0, or no status), or with a redirection, is a failed request. A request that was
aborted or blocked counts as cancelled by the client. An entry that the browser answered from a cache has no
times of a server, and is skipped. Headers of the request, cookies and queries are not read. Headers of the
answer are read, and X-Request-Id is kept.

Source: HAR 1.2 (W3C draft, "HTTP Archive").
"""

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.capture.store.rows import to_batch
from llmtap.exchange.outcome import EventClass, Outcome
from llmtap.exchange.saved import Explained, SavedError, explain, har_error, read_saved
from llmtap.json_types import JsonObject
from llmtap.traces import bodies
from llmtap.traces.format import ASPECTS, FormatError, TraceFormat, TraceRow
from llmtap.traces.text import start_of

_PLACEHOLDER_TEXT: Final = " "
"""Content for an answer that was saved without content, so that the other fields of the entry can be read.
Browsers save event streams without content."""
_US_PER_S: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _read(file: BinaryIO, notes: list[str]) -> Iterator[TraceRow]:
    skipped = Counter[str]()
    for number, entry in enumerate(bodies.read_elements(file, "log.entries", floats=True)):
        if not isinstance(entry, dict):
            raise FormatError(f"entry {number}: expected a JSON object")
        row = _row_of(entry, skipped)
        if row is not None:
            yield row
    notes += [f"{n:,} entries {what}" for what, n in skipped.items()]


def _row_of(entry: JsonObject, skipped: Counter[str]) -> TraceRow | None:
    """Return the row of an entry. If the entry is no answered LLM call, count it and return None."""
    request, response = entry.get("request"), entry.get("response")
    if not isinstance(request, dict) or not isinstance(response, dict):
        skipped["have no request or no response: left out"] += 1
        return None
    content = response.get("content")
    if not isinstance(content, dict):
        content = response["content"] = {}
    if (unsent := _unsent_reason(entry, response)) is not None:
        skipped[unsent] += 1
        return None
    lacks_content = not content.get("text")
    if lacks_content:
        content["text"] = _PLACEHOLDER_TEXT
        content.pop("encoding", None)
    try:
        saved = read_saved(msgspec.json.encode({**entry, "request": request, "response": response}))
    except (SavedError, RecursionError):
        skipped["cannot be read as HTTP: left out"] += 1
        return None
    explained = explain(saved)
    x = explained.exchange
    if x.method != "POST" or (x.endpoint is None and x.dialect is None):
        skipped["are no LLM calls: left out"] += 1
        return None
    arrival_ns = _arrival_ns(entry.get("startedDateTime"))
    if arrival_ns is None:
        skipped["have no valid startedDateTime: left out"] += 1
        return None
    row = {
        "level": "full",
        "method": x.method,
        "path": x.path,
        **_request_columns(saved.request_body),
        "model": x.model,
    }
    row |= {name: value for name, value in answer_columns(explained).items() if value is not None}
    row |= _timeline_points(saved.totals)
    if any(name not in saved.totals for name in ("send", "wait", "receive")):
        skipped["have negative, missing or impossible times: those are not known"] += 1
    failure = _failure_of(entry, saved.status_known, x.status)
    if failure is not None:
        skipped["have no whole answer: read as failed or cancelled requests"] += 1
        row |= {"outcome": failure[0].value, "error": failure[1][:_ERROR_CHARS_MAX]}
    if not saved.status_known:
        for name in _ANSWER_COLUMNS:
            row.pop(name, None)
    elif lacks_content and failure is not None:
        for name in _CONTENT_COLUMNS[1:]:
            row.pop(name, None)
    elif lacks_content:
        skipped["have no content: times and request are kept, the content of the answer is unknown"] += 1
        # Without content, every answer looks like a broken stream, so remove the outcome. An HTTP error keeps
        # its outcome, because the status shows it.
        is_error = x.status is not None and x.status >= 400
        for name in _CONTENT_COLUMNS if is_error else ("outcome", *_CONTENT_COLUMNS):
            row.pop(name, None)
        row["stream"] = str(content.get("mimeType")).startswith("text/event-stream")
    else:
        row["response_text"] = answer_text(explained)
    return row | {"arrival_ns": arrival_ns, "arrival": arrival_ns // 1_000}


_ABORTED: Final = re.compile(r"ABORT|CANCEL|INTERRUPT|BLOCKED", re.IGNORECASE)
_TIMED_OUT: Final = re.compile(r"TIMED_OUT|TIMEOUT", re.IGNORECASE)
_FROM_CACHE: Final = ("_fromCache", "_fetchedViaServiceWorker", "_servedFromCache")
_ERROR_CHARS_MAX: Final = 200
_CONTENT_COLUMNS: Final = ("error", "no_token_reason", "dialect", "unparsed_events")
"""Columns that depend on the content of an answer."""
_ANSWER_COLUMNS: Final = (*_CONTENT_COLUMNS[1:], "stream", "head_us", "first_byte_us")
"""Columns that are removed from the row of an entry without an answer."""


def _unsent_reason(entry: JsonObject, response: JsonObject) -> str | None:
    """Return a note if the response came from a cache and not from the server; else None."""
    if any(part.get(name) for name in _FROM_CACHE for part in (entry, response)):
        return "were answered by the browser's cache or a service worker: left out"
    if response.get("status") in (304, "304"):
        return "were answered by the browser's cache or a service worker: left out"
    return None


def _failure_of(entry: JsonObject, status_known: bool, status: int | None) -> tuple[Outcome, str] | None:
    """Return the outcome and the error of an entry without a complete answer; None if it is complete."""
    error = har_error(entry)
    if error is not None and _ABORTED.search(error):
        return Outcome.CLIENT_CANCELLED, error
    if error is not None and _TIMED_OUT.search(error):
        return Outcome.UPSTREAM_TIMEOUT, error
    if error is not None:
        return (Outcome.TRUNCATED if status_known else Outcome.UPSTREAM_RESET), error
    if not status_known:
        return Outcome.UPSTREAM_RESET, "no answer"
    if status is not None and 300 <= status < 400:
        return Outcome.UPSTREAM_ERROR, f"status {status}, a redirect"
    return None


def _arrival_ns(date: Any) -> int | None:
    """Return a date (without a zone: UTC) as ns since 1970; None if it is not a date, or before 1970."""
    try:
        moment = datetime.fromisoformat(date)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    ns = (moment - _EPOCH) // timedelta(microseconds=1) * 1_000
    return ns if 0 <= ns < 1 << 63 else None


def _request_columns(body: bytes) -> TraceRow:
    if not body:
        return {}
    try:
        value = bodies.read_object(body, "postData")
        return {"request_body": body.decode(), **bodies.request_columns(value)}
    except (FormatError, UnicodeDecodeError):
        return {}


def _timeline_points(totals: dict[str, float]) -> TraceRow:
    """Return the columns of the timeline. `totals`: known timings of an entry, in seconds.

    The timing `ssl` is not added, because it is part of `connect` (HAR 1.2, "timings").
    """
    before = sum(totals.get(name, 0.0) for name in ("blocked", "dns", "connect", "send"))
    row: TraceRow = {}
    if "send" in totals:
        row["submit_us"] = _seconds_to_us(before)
    if "wait" in totals:
        row["head_us"] = row["first_byte_us"] = _seconds_to_us(before + totals["wait"])
        if "receive" in totals:
            row["response_end_us"] = _seconds_to_us(before + totals["wait"] + totals["receive"])
    return row


def _seconds_to_us(seconds: float) -> int:
    return round(seconds * _US_PER_S)


def answer_columns(explained: Explained) -> TraceRow:
    """Return outcome, kind and counts of a saved response as columns of a capture, without times."""
    (row,) = to_batch([explained.exchange], capture="", level="shape")[0].select(_READ_COLUMNS).to_pylist()
    return dict(row)


_READ_COLUMNS: Final = (
    "response_model",
    "endpoint",
    "dialect",
    "reading",
    "stream",
    "request_id",
    "status",
    "finish_reason",
    "error",
    "retries",
    "no_token_reason",
    "unparsed_events",
    "refusal_kind",
    "refusal_source",
    "refusal_detail",
    "refusal_confidence",
    "guardrail",
    "usage",
    "server_timing",
    "outcome",
    "input_tokens",
    "output_tokens",
    "input_token_source",
    "reasoning_tokens",
    "cached_tokens",
    "token_source",
)


def answer_text(explained: Explained) -> str | None:
    """Return the text of the first choice; None if no event has a text."""
    parts = [
        event.delta.text
        for event in explained.events
        if event.delta.event_class in (EventClass.CONTENT, EventClass.REFUSAL)
        and event.delta.text
        and event.delta.choices[:1] in ((), (0,))
    ]
    return "".join(parts) if parts else None


def _sniff(head: bytes, name: str) -> bool:
    text = start_of(head)
    if not text.startswith(b"{") or b'"log"' not in text:
        return False
    return b'"entries"' in text or (b'"creator"' in text and b'"version"' in text)


FORMAT: Final = TraceFormat(
    name="har",
    title="HTTP Archive 1.2",
    extensions=(".har",),
    aspects=frozenset(ASPECTS)
    - {"tenant", "session and turn", "think time", "prefix blocks", "first token", "times of events"},
    sniff=_sniff,
    info={"level": "full", "arrivals": "wall"},
    rows=_read,
)
