"""HAR 1.2, as browsers and debugging proxies save HTTP: one entry for each request.

Read: entries that are LLM calls, their answers played through the observer. `startedDateTime` is the arrival,
the end of `wait` the first byte, that of `receive` the end; events have times only in `_llmtap.chunks: [[ms,
tokens, bytes], ...]`. Written: entries that any tool opens, and in `_llmtap.row` all that HAR has no field
for. The answer's content is rebuilt from its text.

A HAR holds headers, cookies and queries of people's sessions. None is written, and only the answer's
X-Request-Id is read.

Source: HAR 1.2 (W3C draft, "HTTP Archive").
"""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow.compute as pc

from llmtap import __version__
from llmtap.capture.schema import SCHEMA
from llmtap.exchange.exchange import EVENT_CLASSES
from llmtap.exchange.saved import Explained, SavedError, explain, read_saved
from llmtap.traces.bodies import (
    ENDPOINTS,
    answer_columns,
    asked_columns,
    chat_answer,
    read_elements,
    read_object,
    text_said,
)  # fmt: skip
from llmtap.traces.format import ASPECTS, FormatError, TraceFormat, TraceWriter
from llmtap.traces.text import start_of
from llmtap.user_files import decode_json

__all__ = ["FORMAT"]

_SILENT: Final = " "
"""Content of an entry without one, as browsers save event streams: lets the rest of the entry be read."""
_ORIGIN: Final = "http://llmtap.invalid"
"""HAR needs whole URLs, and a capture does not hold the gateway's (RFC 2606: never a real host)."""
_BODIES: Final = frozenset({"request_body", "response_text"})
_EVENTS: Final = ("event_us", "event_tokens", "event_bytes", "event_class")
_BESIDE: Final = frozenset({*_BODIES, *_EVENTS, "arrival"})
"""Columns that stand elsewhere in the entry than in `_llmtap.row`."""
_ROW_NAMES: Final = tuple(name for name in SCHEMA.names if name not in _BESIDE)
_US_PER_S: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


# ---------------------------------------------------------------- reading


def _read(file: BinaryIO, notes: list[str]) -> Iterator[dict[str, Any]]:
    skipped = Counter[str]()
    for number, entry in enumerate(read_elements(file, ("log", "entries"), floats=True)):
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
    ours = entry.get("_llmtap")
    if isinstance(ours, dict) and isinstance(ours.get("row"), dict):
        return _row_of_ours(entry, ours)
    content = response.get("content")
    if not isinstance(content, dict):
        content = response["content"] = {}
    silent = not content.get("text")
    if silent:
        content["text"] = _SILENT
        content.pop("encoding", None)
    try:
        saved = read_saved(msgspec.json.encode({**entry, "request": request, "response": response}))
    except SavedError:
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
    row |= _event_columns(ours, explained)
    return row | _arrival(arrival_ns)


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
    """Return the columns of a request with a JSON body."""
    if not body:
        return {}
    try:
        asked = read_object(body, "postData")
        return {"request_body": body.decode(), **asked_columns(asked)}
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


def _event_columns(ours: Any, explained: Explained | None) -> dict[str, Any]:
    """Return the events of `_llmtap.chunks`, with classes by the content if it has as many."""
    chunks = ours.get("chunks") if isinstance(ours, dict) else None
    if not isinstance(chunks, list) or not chunks:
        return {}
    for chunk in chunks:
        is_ms = isinstance(chunk, list) and chunk and isinstance(chunk[0], int | float)
        if not is_ms or len(chunk) < 3 or not 0 <= chunk[0] < 1e12:
            raise FormatError("_llmtap.chunks: expected [ms, tokens, bytes], and times that can be")
    row: dict[str, Any] = {
        "event_us": [round(chunk[0] * 1_000) for chunk in chunks],
        "event_tokens": [chunk[1] for chunk in chunks],
        "event_bytes": [chunk[2] for chunk in chunks],
    }
    if all(len(chunk) > 3 for chunk in chunks):
        row["event_class"] = [chunk[3] for chunk in chunks]
    elif explained is not None and len(explained.events) == len(chunks):
        row["event_class"] = [EVENT_CLASSES[e.delta.event_class].name.lower() for e in explained.events]
        first = next((i for i, e in enumerate(explained.events) if e.delta.output), None)
        if first is not None:
            row["first_token_us"] = row["event_us"][first]
    return row


def _row_of_ours(entry: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the row of an entry that llmtap wrote."""
    row = {name: value for name, value in ours["row"].items() if name in _ROW_NAMES}
    row |= _event_columns(ours, None)
    post = entry["request"].get("postData")
    if isinstance(post, dict):
        row["request_body"] = post.get("text")
    content = entry["response"].get("content")
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        row["response_text"] = _said(content["text"])
    arrival_ns = row.get("arrival_ns")
    return row | (_arrival(arrival_ns) if isinstance(arrival_ns, int) else {})


def _arrival(ns: int) -> dict[str, Any]:
    return {"arrival_ns": ns, "arrival": ns // 1_000}


# ---------------------------------------------------------------- writing


def _write(writer: TraceWriter) -> None:
    file = writer.out
    opening = {
        "version": "1.2", "creator": {"name": "llmtap", "version": __version__}, "entries": [],
    }  # fmt: skip
    file.write(b'{"log":' + msgspec.json.encode(opening)[: -len(b"]}")])
    endless = 0
    for batch in writer.with_model(writer.batches):
        dated = batch.filter(pc.is_valid(batch.column("arrival_ns")))
        if dated.num_rows < batch.num_rows:
            writer.drop("no arrival", batch.num_rows - dated.num_rows)
        writer.count(dated)
        for row in dated.to_pylist():
            endless += row["response_end_us"] is None
            file.write(b",\n" if writer.rows else b"\n")
            file.write(msgspec.json.encode(_entry(row)))
            writer.rows += 1
    file.write(b"\n]}}\n")
    if writer.info.arrivals == "trace" and writer.rows:
        writer.notes.append("arrivals count from the trace's own zero: the dates begin in 1970")
    writer.note(endless, "rows do not say when they ended: where HAR wants a time, they have 0")


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    timings = _timings(row)
    body = row["request_body"]
    path = row["path"] or ENDPOINTS.get(row["endpoint"] or "", "/")
    request: dict[str, Any] = {
        "method": row["method"] or "POST", "url": _ORIGIN + path, "httpVersion": "HTTP/1.1", "cookies": [],
        "headers": [{"name": "content-type", "value": "application/json"}], "queryString": [],
        "headersSize": -1, "bodySize": -1 if body is None else len(body.encode()),
    }  # fmt: skip
    if body is not None:
        request["postData"] = {"mimeType": "application/json", "text": body}
    status = row["status"] or 0
    text = row["response_text"]
    content: dict[str, Any] = {"size": 0, "mimeType": "application/json"}
    if text is not None:
        content["text"] = _answer(row)
        content["size"] = len(content["text"].encode())
    return {
        "startedDateTime": _date(row["arrival_ns"]),
        "time": sum(ms for ms in timings.values() if ms >= 0),
        "request": request,
        "response": {
            "status": status, "statusText": _phrase(status), "httpVersion": "HTTP/1.1", "cookies": [],
            "headers": [{"name": "content-type", "value": "application/json"}], "content": content,
            "redirectURL": "", "headersSize": -1, "bodySize": -1,
        },
        "cache": {},
        "timings": timings,
        "_llmtap": _ours(row),
    }  # fmt: skip


def _ours(row: dict[str, Any]) -> dict[str, Any]:
    """Return what HAR has no field for."""
    ours: dict[str, Any] = {
        "row": {name: row[name] for name in _ROW_NAMES if row[name] is not None},
    }
    if row["event_us"] is not None:
        n = len(row["event_us"])
        columns = [row[name] if row[name] is not None else [None] * n for name in _EVENTS[1:]]
        chunks = [[us / 1_000, *rest] for us, *rest in zip(row["event_us"], *columns, strict=True)]
        ours["chunks"] = chunks if row["event_class"] is not None else [chunk[:3] for chunk in chunks]
    return ours


def _timings(row: dict[str, Any]) -> dict[str, float]:
    """Return the timings in ms; -1: not known."""
    submit, first, end = row["submit_us"], row["first_byte_us"], row["response_end_us"]
    sent = max(submit or 0, 0)
    seen = max(sent, first if first is not None else (end if end is not None else sent))
    done = max(seen, end if end is not None else seen)
    return {
        "blocked": -1, "dns": -1, "connect": -1, "ssl": -1,
        "send": sent / 1_000, "wait": (seen - sent) / 1_000, "receive": (done - seen) / 1_000,
    }  # fmt: skip


def _answer(row: dict[str, Any]) -> str:
    """Return the content of the answer in one piece, with the text of the streamed one."""
    usage = None if row["usage"] is None else msgspec.Raw(row["usage"].encode())
    answer = chat_answer(row, row["response_model"] or row["model"] or "", usage)
    return msgspec.json.encode(answer).decode()


def _said(content: str) -> str:
    """Return the text of an answer made by `_answer`."""
    try:
        return decode_json(content, _Answer).choices[0].message.content
    except (ValueError, IndexError) as exc:
        raise FormatError(f"content of an entry with _llmtap.row: {exc}") from None


def _date(ns: int) -> str:
    try:
        moment = datetime.fromtimestamp(ns // 1_000_000_000, UTC)
    except (ValueError, OverflowError, OSError):
        raise FormatError(f"arrival_ns: {ns} is no date") from None
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ns // 1_000 % _US_PER_S:06d}Z"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


# ---------------------------------------------------------------- telling


def _sniff(head: bytes, name: str) -> bool:
    """An object with `log` in it, and in that what a HAR begins with."""
    text = start_of(head)
    if not text.startswith(b"{") or b'"log"' not in text:
        return False
    return b'"entries"' in text or (b'"creator"' in text and b'"version"' in text)


FORMAT: Final = TraceFormat(
    name="har",
    title="HTTP Archive 1.2",
    extensions=(".har",),
    holds=frozenset(ASPECTS),
    needs=frozenset({"arrival"}),
    sniff=_sniff,
    info={"level": "full", "arrivals": "wall"},
    rows=_read,
    writes=_write,
)
