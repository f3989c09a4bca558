"""Build an Exchange from a saved answer, with every event and its place in the body (`llmtap inspect`).

`read_saved` accepts an HTTP response (as `curl -i` writes it), a HAR file or entry, and a bare event stream,
NDJSON or JSON. `explain` returns the exchange and its events, with all timestamps 0. `traces/formats/har.py`
and the server detection of `llmtap bench` use these two functions, too.

Source: RFC 9112, HAR 1.2, docs/dialects.md.
"""

import base64
import binascii
import codecs
import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from llmtap.errors import LlmtapError, PeerProtocolError
from llmtap.exchange.answer import AnswerReader, is_named_line
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome
from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.chooser import DialectChooser
from llmtap.protocol.dialects.registry import BUILT_IN, Dialects
from llmtap.protocol.encoding import Decoder
from llmtap.protocol.http1 import ChunkedDecoder, Framing, ResponseHead, header_value, parse_response_head
from llmtap.protocol.sse import MessageStreamParser, SseEvent, SseParser, is_message_stream

_ENTRIES_LISTED: Final = 20
_HAR_TIMES: Final = ("blocked", "dns", "connect", "ssl", "send", "wait", "receive")
_HAR_TIME_MAX_MS: Final = 7 * 86_400_000
_SSE_LINE: Final = re.compile(rb"(?:^|[\r\n])(?:data|event|id|retry|error)?:")
_STATUS_LINE: Final = re.compile(rb"HTTP/[0-9.]+ ([0-9]{3})([^\r\n]*)\r?\n")
_REMOVED_BY_WRITERS: Final = frozenset({b"content-encoding", b"transfer-encoding", b"content-length"})


class SavedError(LlmtapError):
    """The file has no answer that can be read. `hint`: how to get a file that can be read."""

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem)
        self.hint = hint


@dataclass(slots=True)
class Saved:
    """A saved answer, with its request if the file has it, else with a generated request."""

    what: str
    """Kind of the file: `HTTP response`, `HAR entry 3`, `event stream`, `NDJSON`, `JSON`."""
    head: bytes
    """Head of the answer; for a bare body, a generated one with its content type."""
    wire: bytes
    """Bytes after the head, as in the file."""
    body: bytes
    """Bytes of `wire` without framing and content-encoding."""
    request_head: bytes
    request_body: bytes = b""
    whole: bool = True
    """Whether the answer is complete by its framing."""
    status_known: bool = True
    """Whether `head` has the status of the server, and not a generated one."""
    arrival_wall_ns: int | None = None
    totals: dict[str, float] = field(default_factory=dict)
    """Times of a HAR entry in seconds: `total`, `send`, `wait`, `receive`, ..."""
    notes: list[str] = field(default_factory=list)
    """Problems of the file that a user should know, for example that its body was cut off."""

    @property
    def path(self) -> str:
        return self.request_head.split(b" ", 2)[1].decode("latin-1")


@dataclass(slots=True)
class SavedEvent:
    """One event: bytes `start` to `end` of the decoded body, and its Delta."""

    start: int
    end: int
    delta: Delta
    """What the event adds to the answer: text, tokens, usage and so on."""


@dataclass(slots=True)
class Explained:
    """A parsed answer: its exchange and all its events."""

    exchange: Exchange
    events: list[SavedEvent]
    has_times: bool = False
    """Whether the exchange was measured from packets, so that it has times."""


class _RecordingObserver(Observer):
    """Observer that also keeps all Deltas."""

    def __init__(self, saved: Saved, dialects: Dialects) -> None:
        wall_ns = saved.arrival_wall_ns or 0
        super().__init__("saved", 1, 0, wall_ns, saved.request_head, dialects=dialects)
        self.deltas: list[Delta] = []

    def _add(self, delta: Delta, t_ns: int) -> None:
        self.deltas.append(delta)
        super()._add(delta, t_ns)


CPU_MAX_NS: Final = 10_000_000_000
"""Limit of CPU time for parsing a saved answer. When it is reached, the rest of the answer is not parsed."""
_TOO_COSTLY: Final = "its parsing took too much CPU time"


def explain(saved: Saved, dialects: Dialects = BUILT_IN, cpu_ns: Callable[[], int] = lambda: 0) -> Explained:
    """Return the exchange and its events. `cpu_ns` reads the CPU time that CPU_MAX_NS limits."""
    until_ns = cpu_ns() + CPU_MAX_NS
    observer = _RecordingObserver(saved, dialects)
    if saved.request_body:
        observer.request_data(saved.request_body, 0)
    observer.request_end(0)
    observer.on_submit(0, 0)
    observer.response_head(saved.head, 0, 0)
    for _ in observer.response_slices(saved.wire, 0, 0) if saved.wire else ():
        if cpu_ns() > until_ns:
            observer.give_up(_TOO_COSTLY)
    if saved.whole:
        observer.response_end(0)
    outcome = Outcome.COMPLETE if saved.whole else Outcome.TRUNCATED
    x = observer.finish(None, outcome.value, None, None, 0, 0, len(saved.request_body), len(saved.wire))
    if not saved.status_known:
        x.status = None
    spans = _event_spans(saved.body, [delta.size for delta in observer.deltas])
    events = [SavedEvent(*span, delta) for span, delta in zip(spans, observer.deltas, strict=True)]
    return Explained(x, events)


class _EventRecorder(DialectChooser):
    """Recorder of the events of an answer, used in place of a dialect."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        super().__init__("")
        self.open = False
        """Always False, so the reader does not search for a dialect."""
        self.events: list[SseEvent] = []

    def read_event(self, event: SseEvent) -> Delta:
        """Keep the event; return a Delta without content."""
        self.events.append(event)
        return Delta(EventClass.METADATA)

    def read_body(self, body: bytes) -> Delta:
        """Keep the body as one event."""
        return self.read_event(SseEvent(0, len(body), body))


class SavedEvents(NamedTuple):
    """Events of a saved answer, as a dialect gets them. A JSON body is one event."""

    framing: str
    """`sse`, `ndjson`, `json-array`, `eventstream`, `json`, or `opaque`."""
    events: list[SseEvent]
    """Events as a dialect gets them."""


def events_of(saved: Saved) -> SavedEvents:
    """Cut the body of a saved answer into its events."""
    recorder = _EventRecorder()
    fields = parse_response_head(saved.head, b"POST").headers
    reader = AnswerReader(header_value(fields, b"content-type"), saved.path)
    reader.dialect = recorder
    if saved.body:
        reader.feed(saved.body)
    reader.close(whole=saved.whole)
    return SavedEvents(reader.framing, recorder.events)


def read_saved(data: bytes, *, path: str = "/", request_body: bytes = b"", entry: int | None = None) -> Saved:
    """Parse a saved answer. `path` and `request_body` are used if the file has no request; `entry`: index of
    a HAR entry, from 0. Raises SavedError."""
    data_with_bom, data = data, data.removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        raise SavedError("the file is empty", "save a response with `curl -si --raw`")
    if data.startswith(b"HTTP/"):
        saved = _read_http(data, _request_head("POST", path, len(request_body)))
        saved.request_body = request_body
        return saved
    har = _read_json(data)
    if isinstance(har, dict):
        log = har.get("log")
        if isinstance(log, dict) and isinstance(log.get("entries"), list):
            return _read_entry(*_pick_entry(log["entries"], entry))
        if isinstance(har.get("request"), dict) and isinstance(har.get("response"), dict):
            return _read_entry(har, 0)
    if entry is not None:
        raise SavedError("the file is not a HAR file, so it has no entries", "leave out --entry")
    kind, content_type = _kind_of(data)
    if content_type == b"text/event-stream":
        data = data_with_bom  # so that positions of events count from the start of the file
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n\r\n" % content_type
    return Saved(
        kind,
        head,
        data,
        data,
        _request_head("POST", path, len(request_body)),
        request_body,
        status_known=False,
    )


def _request_head(method: str, target: str, length: int) -> bytes:
    target = target if target.startswith("/") else "/" + target
    head = f"{method} {target} HTTP/1.1\r\nhost: saved\r\ncontent-length: {length}\r\n\r\n"
    return head.encode("ascii", "replace")


_AGAIN: Final = "save it again with `curl -si --raw`"
_EXPORT: Final = "export the HAR file again, or save the response with `curl -si --raw`"
_UNREADABLE: Final = (
    (b"\x1f\x8b", "compressed with gzip", "decompress it: `gunzip -c FILE | llmtap inspect -`"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it: `zstd -dc FILE | llmtap inspect -`"),
    (b"\xff\xfe", "UTF-16 text", "convert it to UTF-8: `iconv -f UTF-16 -t UTF-8 FILE`"),
    (b"\xfe\xff", "UTF-16 text", "convert it to UTF-8: `iconv -f UTF-16 -t UTF-8 FILE`"),
)
"""First bytes of files that need a conversion, the name of their format, and a hint how to convert them."""


def _kind_of(body: bytes) -> tuple[str, bytes]:
    """Return the kind of a bare body and its content type. Raises SavedError."""
    if _read_json(body) is not None:
        return "JSON", b"application/json"
    if is_message_stream(body):
        return "AWS event stream", b"application/vnd.amazon.eventstream"
    if _SSE_LINE.search(body):
        return "event stream", b"text/event-stream"
    if is_named_line(body):
        return "lines of the AI SDK 4", b"text/plain"
    lines = [line for line in body.splitlines() if line.strip()]
    if all(_read_json(line) is not None for line in lines[:-1]):
        if len(lines) > 1:
            return "NDJSON", b"application/x-ndjson"
        if body.lstrip().startswith((b"{", b"[")):
            raise SavedError(
                "the JSON document cannot be parsed to its end", "check whether the file is complete"
            )
    for begin, what, hint in _UNREADABLE:
        if body.startswith(begin):
            raise SavedError(f"the file is {what}", hint)
    raise SavedError(
        "the content is not an event stream, NDJSON, JSON, an HTTP response or a HAR file",
        "save a response together with its head: `curl -si --raw`",
    )


def _read_json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None


def _read_http(data: bytes, request_head: bytes) -> Saved:
    notes: list[str] = []
    head, rest, status = _cut_head(data)
    while status[1].startswith(b"1") and status[1] != b"101" and rest.startswith(b"HTTP/"):
        head, rest, status = _cut_head(rest)  # skip an interim response
    if not head.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
        # The answer came over HTTP/2 or 3, whose framing curl does not save: write its head as HTTP/1.1.
        head = b"HTTP/1.1 " + status[1] + (status[2] or b" ") + b"\r\n" + head.split(b"\r\n", 1)[1]
        head = _without_fields(head, {b"transfer-encoding"})
    try:
        parsed = parse_response_head(head, b"POST")
    except PeerProtocolError as exc:
        raise SavedError(f"the HTTP response cannot be read: {exc}", _AGAIN) from None
    payload, whole = _unframe(parsed, rest)
    if payload is None:
        notes.append("the head says chunked, but the body is not: its framing was removed when it was saved")
        head, payload, whole = _without_fields(head, {b"transfer-encoding"}), rest, True
        rest = payload
    codings = b",".join(value for name, value in parsed.headers if name.lower() == b"content-encoding")
    try:
        body = Decoder(codings).feed(payload) if payload else b""
    except PeerProtocolError as exc:
        if not _SSE_LINE.search(payload[:4096]) and _read_json(payload) is None:
            raise SavedError(f"the body of the HTTP response cannot be decoded: {exc}", _AGAIN) from None
        coding = codings.decode("latin-1")
        notes.append(f"the head says {coding}, but the body was decoded when it was saved")
        head, rest, body = _without_fields(head, _REMOVED_BY_WRITERS), payload, payload
    if not whole:
        notes.append("the body is shorter than its framing says: it was cut off")
    return Saved("HTTP response", head, rest, body, request_head, whole=whole, notes=notes)


def _cut_head(data: bytes) -> tuple[bytes, bytes, re.Match[bytes]]:
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        raise SavedError(
            "the HTTP response has no blank line after its head", "check whether the file is complete"
        )
    status = _STATUS_LINE.match(head + end)
    if status is None:
        raise SavedError(
            "the HTTP response has no valid status line", "expected a line such as `HTTP/1.1 200 OK`"
        )
    return head + end, rest, status


def _without_fields(head: bytes, names: Set[bytes]) -> bytes:
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if line.partition(b":")[0].strip().lower() not in names)


def _unframe(head: ResponseHead, wire: bytes) -> tuple[bytes | None, bool]:
    """Return the payload and whether it is complete; None if the body does not have the framing that the head
    declares."""
    if head.framing is Framing.CHUNKED:
        dechunk = ChunkedDecoder()
        try:
            payload = dechunk.feed(wire)
        except PeerProtocolError:
            return None, False
        return payload, dechunk.done
    if head.framing is Framing.LENGTH:
        return wire[: head.length], len(wire) >= head.length
    return wire, True


def _pick_entry(entries: list[Any], entry: int | None) -> tuple[JsonObject, int]:
    usable = {
        i: e for i, e in enumerate(entries) if isinstance(e, dict) and isinstance(e.get("response"), dict)
    }
    if not usable:
        raise SavedError(
            "the HAR file has no entry with a response", "export it again after the response has arrived"
        )
    if entry is None and len(usable) > 1:
        listed = [f"  {i}: {_entry_line(e)}" for i, e in usable.items()][:_ENTRIES_LISTED]
        listed += [f"  and {len(usable) - len(listed)} more"] if len(usable) > len(listed) else []
        raise SavedError(
            f"the HAR file has {len(usable)} responses", "choose one with --entry N\n" + "\n".join(listed)
        )
    entry = next(iter(usable)) if entry is None else entry
    if entry not in usable:
        raise SavedError(
            f"the HAR file has no entry {entry} with a response", f"its entries are 0 to {len(entries) - 1}"
        )
    return usable[entry], entry


def _object_member(value: JsonObject, name: str) -> JsonObject:
    member = value.get(name)
    return member if isinstance(member, dict) else {}


def _path_of(request: JsonObject) -> str:
    try:
        return urlsplit(str(request.get("url") or "/")).path or "/"
    except ValueError:
        return "/"  # urlsplit() refuses a URL with brackets around another text than an IPv6 address


def _entry_line(entry: JsonObject) -> str:
    request, response = _object_member(entry, "request"), entry["response"]
    mime = _object_member(response, "content").get("mimeType")
    return f"{request.get('method')} {_path_of(request)} {response.get('status')} {mime}"


def _read_entry(entry: JsonObject, number: int) -> Saved:
    request, response = _object_member(entry, "request"), entry["response"]
    content = _object_member(response, "content")
    text = content.get("text")
    status, error = har_status(response), har_error(entry)
    if not isinstance(text, str) or not text:
        if status is None:
            raise SavedError(
                f"HAR entry {number} has no response: status {response.get('status')}, {error or 'no error'}",
                "the request failed before the server responded",
            )
        raise SavedError(
            f"HAR entry {number} has no content text",
            "browsers leave out event streams: export with content, or save the response with `curl -i -N`",
        )
    body = text.encode()
    if content.get("encoding") == "base64":
        try:
            body = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise SavedError(f"HAR entry {number}: its content.text is not valid base64", _EXPORT) from None
    sent = str(_object_member(request, "postData").get("text") or "").encode()
    saved = Saved(
        f"HAR entry {number}",
        _har_head(response, content),
        body,
        body,
        _request_head(str(request.get("method") or "POST"), _path_of(request), len(sent)),
        sent,
        whole=status is not None and error is None,
        status_known=status is not None,
        arrival_wall_ns=_wall_ns(entry.get("startedDateTime")),
        totals=_total_times(entry),
    )
    try:
        parse_response_head(saved.head, b"POST")
    except PeerProtocolError as exc:
        raise SavedError(f"HAR entry {number}: {exc}", _EXPORT) from None
    return saved


def har_status(response: JsonObject) -> int | None:
    """Return the status of a HAR response; None if there was no answer (browsers write 0, -1 or nothing)."""
    status = response.get("status")
    if isinstance(status, float | str) and str(status).removesuffix(".0").isdecimal():
        status = int(float(status))
    if isinstance(status, bool) or not isinstance(status, int) or not 200 <= status <= 999:
        return None
    return status


def har_error(entry: JsonObject) -> str | None:
    """Return the browser's error in an entry, such as `net::ERR_ABORTED`; None: no error."""
    errors = (place.get("_error") for place in (_object_member(entry, "response"), entry))
    return next((error for error in errors if isinstance(error, str) and error), None)


def _har_head(response: JsonObject, content: JsonObject) -> bytes:
    """Return the head as HTTP/1.1, without the fields of framing and coding: the program that wrote the HAR
    has removed both from the content (HAR 1.2, "content")."""
    lines = [f"HTTP/1.1 {har_status(response) or 200} saved"]
    names = set()
    headers = response.get("headers")
    for f in headers if isinstance(headers, list) else ():
        name = str(f.get("name") if isinstance(f, dict) else "")
        if name and not name.startswith(":") and name.lower().encode() not in _REMOVED_BY_WRITERS:
            names.add(name.lower())
            lines.append(f"{name}: {f.get('value') or ''}")
    if "content-type" not in names and content.get("mimeType"):
        lines.append(f"content-type: {content['mimeType']}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def _total_times(entry: JsonObject) -> dict[str, float]:
    """Return the times of a HAR entry in seconds; a HAR has milliseconds, and -1 if a phase does not apply.

    A time above `_HAR_TIME_MAX_MS` is left out, because it cannot be the duration of a request.
    """
    timings = _object_member(entry, "timings")
    times = {"total": entry.get("time"), **{name: timings.get(name) for name in _HAR_TIMES}}
    return {
        name: ms / 1e3
        for name, ms in times.items()
        if isinstance(ms, int | float) and not isinstance(ms, bool) and 0 <= ms <= _HAR_TIME_MAX_MS
    }


def _wall_ns(date: object) -> int | None:
    try:
        return round(datetime.fromisoformat(str(date)).timestamp() * 1e9)
    except (ValueError, OverflowError):
        return None


def _event_spans(body: bytes, sizes: list[int]) -> list[tuple[int, int]]:
    """Return start and end of each event in a body; `sizes`: the sizes of the events."""
    parser = MessageStreamParser() if is_message_stream(body) else SseParser()
    blocks = [(event.start, event.end) for event in parser.feed(body) + parser.close()]
    lines, at = [], 0
    for line in body.splitlines(keepends=True):
        if line.strip():
            lines.append((at, at + len(line)))
        at += len(line)
    for spans in (blocks, lines):
        if [end - start for start, end in spans] == sizes:
            return spans
    # The body is JSON, possibly after blank lines that were sent as keep-alives, or has an unknown format:
    # cut it by the sizes alone.
    spans, at = [], 0
    for size in sizes:
        spans.append((at, min(at + size, len(body))))
        at += size
    return spans
