"""Builds one Exchange from stamped bytes: sans-IO, so that a live relay and a saved file play it alike.

The relay says what it saw and when; here the heads are read, HTTP framing and content-encoding are
undone, events are classified, and the points of the timeline set. Every event has the stamp of the read
that completed it. Bad bytes never raise: what cannot be understood degrades to the timing of reads, and
is counted in `Exchange.unparsed_events`.

Source: design.md sections 2 and 5; shared/dialects/dialects.md sections 1, 5 and 8.
"""

import re
from typing import Any, Final

import msgspec

from llmtap.errors import PeerProtocolError
from llmtap.record.answer import AnswerReader
from llmtap.record.exchange import Exchange, Timeline, Tokens
from llmtap.record.outcome import Outcome, TokenSource
from llmtap.wire.delta import Delta, EventClass, UsageCounts
from llmtap.wire.encoding import Decoder
from llmtap.wire.http1 import (
    ChunkedDecoder,
    Framing,
    header_value,
    parse_request_head,
    parse_response_head,
)

__all__ = ["EVENTS_MAX", "REQUEST_BYTES_MAX", "Observer"]

REQUEST_BYTES_MAX: Final = 8 << 20
"""A longer request body is not kept, and its model is then not known from it."""
EVENTS_MAX: Final = 1 << 18
"""Events logged one by one: 40 bytes each, 10 MB an exchange. Later ones still move the points."""

_ID_BYTES_MAX: Final = 256
"""Of a request id: a UUID has 36, a trace id 32."""

_WORD: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")
_ENDPOINTS: Final = (("/chat/completions", "chat.completions"), ("/completions", "completions"))


class _RequestBody(msgspec.Struct):
    model: Any = None
    stream: Any = None


_decode_request = msgspec.json.Decoder(_RequestBody).decode


class Observer:
    """One exchange in the making. Stamps are ns of the monotonic clock, in the order of the calls.

    Args:
        relay, seq: which exchange this is.
        arrival_ns: the read that held the request's first byte; arrival_wall_ns: the same as a date.
        head: the request head as received.
        clock: how the stamps were taken, `mono` or `kernel`.
    """

    def __init__(
        self, relay: str, seq: int, arrival_ns: int, arrival_wall_ns: int, head: bytes, clock: str = "mono"
    ) -> None:
        self._t = Timeline(arrival_ns)
        self._x = Exchange(relay, seq, arrival_wall_ns, self._t, clock=clock)
        self._method = b""
        # The request's body.
        self._request: list[bytes] = []
        self._request_size = 0
        self._request_chunked = False
        self._request_coding: bytes | None = None
        self._wants_stream = False
        # The response's body, from the wire inwards.
        self._dechunk: ChunkedDecoder | None = None
        self._decoder: Decoder | None = None
        self._answer: AnswerReader | None = None
        self._lost: str | None = None
        self._closed = False
        self._last_read_ns = arrival_ns
        # What the events said.
        self._model: str | None = None
        self._counts: UsageCounts | None = None
        self._counts_total = False
        self._declared = {TokenSource.TOKEN_IDS: 0, TokenSource.LOGPROBS: 0, TokenSource.RUNNING_USAGE: 0}
        self._chunks = 0
        self._error_type: str | None = None
        self._done = False
        self._read_request_head(head)

    # The request.

    def _read_request_head(self, raw: bytes) -> None:
        x = self._x
        try:
            head = parse_request_head(raw)
        except PeerProtocolError:
            return  # the relay refused it as well, and says so at the end
        self._method = head.method
        x.method = head.method.decode("latin-1")
        x.path = _path(head.target)
        bare = x.path.rstrip("/")
        x.endpoint = next((name for suffix, name in _ENDPOINTS if bare.endswith(suffix)), None)
        x.request_id = _text(header_value(head.headers, b"x-request-id"))
        self._request_chunked = head.framing is Framing.CHUNKED
        self._request_coding = header_value(head.headers, b"content-encoding")

    def request_data(self, data: bytes, t_ns: int) -> None:
        """Body bytes of the request, HTTP framing included, read at `t_ns`."""
        self._request_size += len(data)
        if self._request_size > REQUEST_BYTES_MAX:
            self._request.clear()
        else:
            self._request.append(data)

    def request_end(self, t_ns: int) -> None:
        """The request's last byte was read at `t_ns`."""
        self._t.request_end_ns = t_ns
        self._read_request_body()

    def submitted(self, t_ns: int, added_ns: int) -> None:
        """The upstream's socket took the request's last byte at `t_ns`, `added_ns` after its read."""
        self._t.submit_ns = t_ns
        self._x.added.request_ns = added_ns

    def _read_request_body(self) -> None:
        body = b"".join(self._request)
        self._request.clear()
        try:
            if self._request_chunked:
                body = ChunkedDecoder().feed(body)
            body = Decoder(self._request_coding, decoded_bytes_max=REQUEST_BYTES_MAX).feed(body)
        except PeerProtocolError:
            return
        if not body.lstrip().startswith(b"{"):
            return
        try:
            request = _decode_request(body)
        except (ValueError, RecursionError):
            return
        if isinstance(request.model, str):
            self._x.model = request.model
        self._wants_stream = request.stream is True

    # The response.

    def response_head(self, raw_head: bytes, t_ns: int, added_ns: int) -> None:
        """The response's head, complete at `t_ns`; interim (1xx) heads are passed over."""
        x = self._x
        try:
            head = parse_response_head(raw_head, self._method)
        except PeerProtocolError as exc:
            self._t.head_ns = t_ns
            self._lose(exc)
            return
        if 100 <= head.status < 200 and head.status != 101:
            return
        self._t.head_ns = t_ns
        x.status = head.status
        if x.request_id is None:
            x.request_id = _text(header_value(head.headers, b"x-request-id"))
        self._answer = AnswerReader(header_value(head.headers, b"content-type"), x.path.rstrip("/"))
        if head.framing is Framing.CHUNKED:
            self._dechunk = ChunkedDecoder()
        # RFC 9110 5.3: several lines of one field are one list.
        codings = [value for name, value in head.headers if name.lower() == b"content-encoding"]
        try:
            decoder = Decoder(b",".join(codings))
            self._decoder = None if decoder.identity else decoder
        except PeerProtocolError as exc:
            self._lose(exc)

    def response_data(self, data: bytes, t_ns: int, added_ns: int) -> None:
        """Body bytes of the response, HTTP framing included, read at `t_ns`, passed on `added_ns` later."""
        if self._dechunk is not None:
            try:
                data = self._dechunk.feed(data)
            except PeerProtocolError as exc:
                self._lose(exc)
        if not data:
            return  # framing only
        self._count_read(t_ns, added_ns)
        if self._decoder is not None:
            try:
                data = self._decoder.feed(data)
            except PeerProtocolError as exc:
                self._lose(exc)
            if not data:
                return
        answer = self._answer
        if answer is None:
            answer = self._answer = AnswerReader(None, "")
        for delta in answer.feed(data):
            self._add(delta, t_ns)

    def response_end(self, t_ns: int) -> None:
        """The response's last byte was read at `t_ns`, and HTTP calls the response complete."""
        self._t.response_end_ns = t_ns
        self._close(whole=True)

    def upgraded(self, t_ns: int) -> None:
        """The connection is a tunnel from `t_ns` on (the 101 went before, by `response_head`)."""
        if self._t.head_ns is None:
            self._t.head_ns = t_ns
        self._dechunk = self._decoder = self._answer = None

    def tunnel(self, data_up: bytes | None, data_down: bytes | None, t_ns: int, added_ns: int) -> None:
        """Bytes that passed a tunnel, up or down, read at `t_ns`: those from the upstream are timed."""
        if data_down:
            self._count_read(t_ns, added_ns)
            self._add(Delta(EventClass.METADATA, len(data_down)), t_ns)

    def finish(
        self,
        delivered_ns: int | None,
        outcome: str,
        status: int | None,
        error: str | None,
        paused_ns: int,
        lag_ns: int,
        request_bytes: int,
        response_bytes: int,
    ) -> Exchange:
        """The Exchange; call it once, last.

        Args:
            delivered_ns: the client's socket took the last byte.
            outcome: how the relay saw it end, a value of `Outcome`; what the events said refines it.
            status: of the answer, when the relay made it itself.
            error: the relay's sentence about it, if any.
            paused_ns: how long back-pressure held the stream.
            lag_ns: worst time a byte may have waited unread.
            request_bytes, response_bytes: as read, heads included.
        """
        x, t = self._x, self._t
        if self._request:
            self._read_request_body()
        self._close(whole=False)
        t.delivered_ns = delivered_ns
        t.paused_ns = paused_ns
        x.uncertainty_ns = lag_ns
        x.request_bytes = request_bytes
        x.response_bytes = response_bytes
        if status is not None:
            x.status = status
        if x.model is None:
            x.model = self._model
        x.tokens = self._tokens()
        said = Outcome(outcome)
        x.outcome, reason = self._judge(said)
        x.error = (error if x.outcome is said else None) or reason
        return x

    # What was seen.

    def _lose(self, reason: PeerProtocolError) -> None:
        """The body cannot be followed any more: from here on its reads are timed and nothing else."""
        self._lost = str(reason)
        self._dechunk = self._decoder = None
        if self._answer is None:
            self._answer = AnswerReader(None, "")
        self._answer.give_up()

    def _count_read(self, t_ns: int, added_ns: int) -> None:
        """A read with bytes of the body in it."""
        self._x.reads += 1
        self._last_read_ns = t_ns
        if self._t.first_byte_ns is None:
            self._t.first_byte_ns = t_ns
        added = self._x.added
        if added.first_chunk_ns is None or added.chunk_max_ns is None:
            added.first_chunk_ns = added.chunk_max_ns = added_ns
        elif added_ns > added.chunk_max_ns:
            added.chunk_max_ns = added_ns
        if self._x.reads <= EVENTS_MAX:
            added.chunks_ns.append(added_ns)

    def _add(self, delta: Delta, t_ns: int) -> None:
        """An event that the read at `t_ns` completed."""
        t = self._t
        log = t.events
        if len(log.classes) < EVENTS_MAX:
            log.add(t_ns, delta.event_class, delta.size, delta.tokens, delta.blank)
        else:
            self._x.unlogged_events += 1
        if t.first_any_ns is None:
            t.first_any_ns = t_ns
        if delta.output:
            t.last_token_ns = t_ns
            if t.first_token_ns is None:
                t.first_token_ns = t_ns
            if t.first_content_ns is None and delta.content:
                t.first_content_ns = t_ns
            if t.first_reasoning_ns is None and delta.reasoning:
                t.first_reasoning_ns = t_ns
            if delta.text:
                self._chunks += len(delta.choices)
        if delta.tokens > 0:
            self._declared[delta.token_source] += delta.tokens
        if delta.finish_reason is not None:
            self._x.finish_reason = delta.finish_reason  # the last one counts (dialects.md section 1)
        if delta.counts is not None:
            self._counts, self._x.usage = delta.counts, delta.usage
            self._counts_total = not delta.usage_running
        if delta.model is not None and self._model is None:
            self._model = delta.model
        if delta.error_type is not None:
            self._error_type = delta.error_type
        if delta.done:
            self._done = True
        if not delta.parsed and self._is_expected():
            self._x.unparsed_events += 1

    def _is_expected(self) -> bool:
        """Whether this answer ought to be understood: other people's files need not be."""
        streamed = self._answer is not None and self._answer.streamed
        return streamed or self._lost is not None or self._x.endpoint is not None

    def _close(self, *, whole: bool) -> None:
        """The body is over. What its end completes, its last read brought."""
        if self._closed:
            return
        self._closed = True
        answer = self._answer
        if answer is None:
            self._x.stream = self._wants_stream and self._x.status is None
            return
        for delta in answer.close(whole=whole):
            self._add(delta, self._last_read_ns)
        self._x.unparsed_events += answer.skipped
        self._x.stream = answer.streamed
        self._x.dialect = answer.dialect.name

    # What it comes to.

    def _tokens(self) -> Tokens:
        """Counts by the ladder of IETF seed 000, 4.4: the best source that said anything."""
        counts = self._counts or UsageCounts()
        tokens = Tokens(counts.input, None, counts.reasoning, counts.cached)
        if self._counts_total and counts.output is not None:
            tokens.output, tokens.source = counts.output, TokenSource.USAGE
            return tokens
        for source, n in self._declared.items():
            if n:
                tokens.output, tokens.source = n, source
                return tokens
        if self._chunks and self._x.stream:
            tokens.output, tokens.source = self._chunks, TokenSource.CHUNKS
        return tokens

    def _judge(self, said: Outcome) -> tuple[Outcome, str | None]:
        """The relay's outcome in the light of what the events said, and a sentence about it."""
        x = self._x
        if said is Outcome.CLIENT_CANCELLED and (self._done or x.finish_reason is not None):
            # Many clients hang up at the end marker, before the last bytes of the framing: they have it all.
            self._t.response_end_ns = self._t.response_end_ns or self._last_read_ns
            said = Outcome.COMPLETE
        if said is not Outcome.COMPLETE:
            return said, None
        kind = self._error_type
        about = f" ({kind})" if kind is not None and _WORD.fullmatch(kind) else ""
        if x.finish_reason == "content_filter":
            return Outcome.REFUSED, None
        if x.status is not None and x.status >= 400:
            return Outcome.UPSTREAM_ERROR, f"upstream answered {x.status}{about}"
        if kind is not None:
            return Outcome.UPSTREAM_ERROR, f"upstream sent an error in its answer{about}"
        if self._lost is not None:
            return said, f"upstream sent a body that cannot be read: {self._lost}"
        if x.stream and x.dialect is not None and not self._done and x.finish_reason is None:
            return Outcome.TRUNCATED, "upstream ended the stream without a finish reason or an end marker"
        return said, None


def _path(target: bytes) -> str:
    """The path of a request target in origin or absolute form, without the query."""
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):
        _, found, rest = path.partition(b"://")
        if found:
            path = b"/" + rest.partition(b"/")[2]
    return path.decode("latin-1")


def _text(value: bytes | None) -> str | None:
    """A header's value as text, cut to a length that labels can bear."""
    return None if value is None else value[:_ID_BYTES_MAX].decode("latin-1")
