"""The trace format `har`: HTTP Archive 1.2, as browsers and debugging proxies save HTTP. Read only.

Entries that are LLM calls become rows of a capture, with request body, answer, usage and times; other entries
are skipped and counted. The answers are read by the observer, as those of live traffic are. `startedDateTime`
is the arrival, the end of `wait` the first byte, that of `receive` the end. Headers of the request, cookies
and queries are not read; headers of the answer are, and X-Request-Id is kept.

Source: HAR 1.2 (W3C draft, "HTTP Archive").
"""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.capture.store.rows import to_batch
from llmtap.exchange.outcome import EventClass
from llmtap.exchange.saved import Explained, SavedError, explain, read_saved
from llmtap.traces import bodies
from llmtap.traces.format import ASPECTS, FormatError, TraceFormat
from llmtap.traces.text import start_of

_SILENT: Final = " "
"""Content of an entry without one, as browsers save event streams: lets the rest of the entry be read."""
_US_PER_S: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _read(file: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    skipped = Counter[str]()
    for number, entry in enumerate(bodies.read_elements(file, "log.entries", floats=True)):
        if not isinstance(entry, dict):
            raise FormatError(f"entry {number}: expected a JSON object")
        row = _row_of(entry, skipped)
        if row is not None:
            yield row
    notes += [f"{n:,} entries {what}" for what, n in skipped.items()]


def _row_of(entry: dict[str, Any], skipped: Counter[str]) -> dict[str, Any] | None:
    """Return the row of an entry; None, and count it, if it is no LLM call."""
    request, response = entry.get("request"), entry.get("response")
    if not isinstance(request, dict) or not isinstance(response, dict):
        skipped["have no request or no response: left out"] += 1
        return None
    content = response.get("content")
    if not isinstance(content, dict):
        content = response["content"] = {}
    silent = not content.get("text")
    if silent:
        content["text"] = _SILENT
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
        **_asked(saved.request_body),
        "model": x.model,
    }
    row |= {name: value for name, value in answer_columns(explained).items() if value is not None}
    row |= _points(saved.totals)
    if silent:
        skipped["have no content: times and request are kept, what the answer said is not known"] += 1
        # Without its content it looks like a broken stream, which is not known.
        for name in ("outcome", "error", "no_token_reason", "dialect", "unparsed_events"):
            row.pop(name, None)
        row["stream"] = str(content.get("mimeType")).startswith("text/event-stream")
    else:
        row["response_text"] = text_said(explained)
    return row | {"arrival_ns": arrival_ns, "arrival": arrival_ns // 1_000}


def _arrival_ns(date: Any) -> int | None:
    """Return a date as ns; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(date)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1_000


def _asked(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        asked = bodies.read_object(body, "postData")
        return {"request_body": body.decode(), **bodies.asked_columns(asked)}
    except (FormatError, UnicodeDecodeError):
        return {}


def _points(totals: dict[str, float]) -> dict[str, Any]:
    """Return the timeline by the timings that are not -1; `ssl` is part of `connect` (HAR 1.2, "timings")."""
    before = sum(totals.get(name, 0.0) for name in ("blocked", "dns", "connect", "send"))
    row: dict[str, Any] = {}
    if "send" in totals:
        row["submit_us"] = _us(before)
    if "wait" in totals:
        row["head_us"] = row["first_byte_us"] = _us(before + totals["wait"])
        if "receive" in totals:
            row["response_end_us"] = _us(before + totals["wait"] + totals["receive"])
    return row


def _us(seconds: float) -> int:
    return round(min(seconds, 1e9) * _US_PER_S)


def answer_columns(explained: Explained) -> dict[str, Any]:
    """Return end, kind and counts of a saved answer, which has no times, in the columns of a capture."""
    (row,) = to_batch([explained.exchange], capture="", level="shape")[0].select(_ANSWER).to_pylist()
    return dict(row)


_ANSWER: Final = (
    "response_model", "endpoint", "dialect", "stream", "request_id", "status", "finish_reason", "error",
    "retries", "no_token_reason", "unparsed_events", "refusal_kind", "refusal_source", "refusal_detail",
    "refusal_confidence", "guardrail", "usage", "server_timing", "outcome", "input_tokens", "output_tokens",
    "input_token_source", "reasoning_tokens", "cached_tokens", "token_source",
)  # fmt: skip


def text_said(explained: Explained) -> str | None:
    """Return the text of the first choice; None if no event was recognised to have any."""
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
    holds=frozenset(ASPECTS)
    - {"tenant", "session and turn", "think time", "prefix blocks", "first token", "times of events"},
    sniff=_sniff,
    info={"level": "full", "arrivals": "wall"},
    rows=_read,
)
