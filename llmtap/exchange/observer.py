"""Build an Exchange from timestamped bytes (sans-IO), for the meter, the load generator and saved files.

The caller passes request and response, read by read, to an `Observer`, and gets the Exchange from `finish`.
Every event has the timestamp of the read that completed it. Invalid bytes never raise: if a body cannot be
parsed, only the reads are timed. The module is long because its methods change the state of one exchange.

Source: docs/dialects.md.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from sys import getsizeof
from typing import Final, NamedTuple

from msgspec.structs import replace

from llmtap.errors import PeerProtocolError
from llmtap.exchange.answer import AnswerReader
from llmtap.exchange.bounds import BOUNDS, Budget, Share, bound, bounded, memory_bytes
from llmtap.exchange.exchange import A2A, BLANK, OUTPUT, CapturedText, Exchange, Timeline
from llmtap.exchange.interventions import APPLIED_GUARDRAILS, BUILT_IN_SIGNS, Interventions, RefusalSigns
from llmtap.exchange.outcome import UPSTREAM_FAILED, Outcome, Reading, ReadingLimit
from llmtap.exchange.request import Identify, OnRequest, RequestReader
from llmtap.exchange.strings import WORD_CHARS_MAX
from llmtap.exchange.verdict import (
    TOKEN_COUNT,
    ServerTiming,
    TokenLadder,
    figures_of,
    judge,
    no_token_reason,
    remove_implausible,
)
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.registry import BUILT_IN, Dialects
from llmtap.protocol.encoding import Decoder
from llmtap.protocol.http1 import ChunkedDecoder, Framing, Headers, header_value, parse_response_head
from llmtap.protocol.repetition import RUN_BLOCKS, RUN_BYTES, Repetition, TokenRun, make_token_run
from llmtap.protocol.websocket import WebSocketMessage, negotiates_deflate

EVENTS_MAX: Final = 1 << 18
"""Maximum number of events in the log of an exchange: 40 bytes each, 10 MB. Later events still change the
points of the timeline."""
STALL_MISSED_NS: Final = 11_100_000
"""Longest part of a stall of a relay's event loop that its probes can miss: a probe comes every 10 ms, and
its resolution is 1.1 ms."""
READ_BYTES_MAX: Final = 1 << 16
"""Maximum length of a read: a read of this length has possibly left bytes in the socket."""
_TEXT_CHARS_MAX: Final = BOUNDS["text.response_text"].chars
HOLDS_MAX: Final = 10_000
"""Maximum number of pauses by the client that are stored for an exchange: 160 KB. With more pauses, the
figures that need them are unknown."""
_USAGE_BYTES_MAX: Final = 1 << 10
"""Maximum size of an event whose usage object is kept until the end; of larger events, only the counts are
kept."""
_LOGGED_BYTES: Final = 34
"""Memory of an event in the log, with its delay."""
_CHARS_BYTES: Final = 8
"""Further memory of an event in the log while the text of the answer is kept."""
_LOGGED_FREE: Final = 1 << 10
"""Number of events that are added to the log before their memory is counted."""
_TEXT_BYTES: Final = 8
"""Memory of the list element of a kept text."""
SLICE_BYTES: Final = 16 << 10
"""Maximum number of bytes that are parsed in one step, which takes up to 5 ms."""
_NO_ROOM: Final = "open exchanges take too much memory"
LINES_PER_BYTE: Final = 2
"""Maximum number of lines in a decoded body for each coded byte, beyond LINES_FREE. A line takes up to 3 us:
without a limit, 1 MB of gzip with 250 MB of line feeds would take minutes. Streams of equal events reach
0.6."""
LINES_FREE: Final = 1 << 16
_UNDECLARED: Final = array("l", (-1,))
_HEADER_BYTES_MAX: Final = 1_024
RESPONSE_IDS: Final = frozenset((b"x-request-id", b"request-id", b"apim-request-id", b"x-amzn-requestid"))
"""Fields with the id of a response: of OpenAI and most gateways, Anthropic, Azure, Bedrock."""
_CONTENT: Final = EventClass.CONTENT
_CONTENT_CLASSES: Final = (EventClass.CONTENT, EventClass.GUARDRAIL, EventClass.ERROR)
"""Classes of an event whose text is content."""
_FLAGS: Final = bytes((OUTPUT, OUTPUT | BLANK)) + bytes(254)


class RunningState(NamedTuple):
    """Present state of a running exchange."""

    exchange: Exchange
    """The exchange itself, which changes until its end: read it at once."""
    dialect: str | None
    stream: bool
    events: int
    """Number of events of the answer so far."""
    tokens: int
    """Number of tokens by the best source so far. Without a source, each chunk counts as a token."""
    understood: bool
    """Whether a dialect reads all data of the answer so far. If not, the number of tokens is unknown."""
    last_read_ns: int
    """Time of the last read of the answer, else of the arrival."""


class Observer:
    """Builder of one exchange. Timestamps are ns of the monotonic clock, in the order of the calls.

    Args:
        arrival_ns: time of the read with the request's first byte; `arrival_wall_ns`: the same by the wall
            clock.
        clock: source of the timestamps, `mono` or `kernel`.
        identify: returns the tenant of a request; without it all are `default`.
        refusal_signs: signs of refusals beside those that the dialects read.
        count_tokens: counts the tokens in a text, for streams that declare none.
        on_request: called with the complete request; returns whether the answer's text is captured, too
            (`Exchange.text`).
        bodies: memory limit of all open exchanges; None: no limit.
        dialects: dialects that the answer can have.
    """

    def __init__(
        self,
        relay: str,
        seq: int,
        arrival_ns: int,
        arrival_wall_ns: int,
        head: bytes,
        clock: str = "mono",
        identify: Identify | None = None,
        refusal_signs: RefusalSigns = BUILT_IN_SIGNS,
        count_tokens: Callable[[str], int] | None = None,
        on_request: OnRequest | None = None,
        bodies: Budget | None = None,
        longest_wait: Callable[[int, int], int] | None = None,
        dialects: Dialects = BUILT_IN,
    ) -> None:
        """`longest_wait(before_ns, t_ns)` returns the longest time that a byte of the read at `t_ns` can have
        been unread in the socket, if the previous read was at `before_ns`."""
        self._t = Timeline(arrival_ns)
        self._x = Exchange(
            bounded("relay", relay),
            seq,
            arrival_wall_ns,
            self._t,
            reading=Reading.NONE,
            clock=bounded("clock", clock),
        )
        self._bodies = bodies
        """Memory limit for the bodies of all exchanges."""
        self._share = Share(bodies)
        """Memory of the request, of a JSON body, of `_taken_bytes` and of `_run_bytes`."""
        self._kept_bytes = 0
        """Memory of an unfinished event, windows of decoders, the event log, and texts."""
        self._taken_bytes = 0
        """The part of `_kept_bytes` that was taken from `_share`."""
        self._run_bytes = 0
        """Memory of `_run`, taken from `_share`."""
        self._dialects = dialects
        self._request = RequestReader(self._x, head, identify, on_request, self._share)
        self._repetition: Repetition | None = None
        """Fixed bytes around the text of repeated events; None: no repetition was found."""
        self._run: TokenRun | None = None
        """Repeated events that are logged together; None: none."""
        self.token_run: TokenRun | None = None
        """`_run` while the next read is possibly a repeated event: `FrameBatch` adds events to it, too."""
        self.deflates = False
        """Whether the tunnel can carry compressed messages: both sides named permessage-deflate."""
        # Parsers of the response's body, in the order in which bytes pass through them.
        self._dechunk: ChunkedDecoder | None = None
        """Decoder of a chunked body; None: the body is not chunked."""
        self._decoder: Decoder | None = None
        """Decoder of a compressed body; None: the body is not compressed."""
        self._answer: AnswerReader | None = None
        self._lines_left = LINES_FREE
        """Lines that may still be parsed; spent by lines, increased by bytes, to limit CPU time."""
        self._loss_reason: str | None = None
        """Why later bytes of the answer are not parsed; None: all are parsed."""
        self._has_lost_holds = False
        """Whether there were more pauses by a slow client than the timeline keeps."""
        self._is_closed = False
        self._longest_wait = longest_wait
        """Returns the longest time that bytes waited unread between two times; None: unknown."""
        self._shared_ns = 0
        """Upper bound, over all reads, of the time between the arrival of an output event and its timestamp.
        The events of a read share one timestamp, that of the read's last byte."""
        self._first_shared_ns = 0
        """Value of `_shared_ns` at the read with the first token."""
        self._at_once = False
        """Whether all bytes of the present read arrived in one TCP segment: its timestamp is then exact for
        each event in it."""
        self._emptied_ns: int | None = None
        """Time of the last read that emptied the socket: later bytes arrived after it."""
        self._may_have_waited = False
        """Whether a read has possibly left bytes in the socket, which then waited for more than one round of
        the event loop."""
        self._last_read_ns = arrival_ns
        """Time of the latest read of the answer."""
        self._model: str | None = None
        self._tokens = TokenLadder(count_tokens)
        self._interventions = Interventions(refusal_signs)
        """Refusals and guardrail interventions of the answer."""
        self._server = ServerTiming()
        self._error_type: str | None = None
        """Type of an error that an event reports."""
        self._has_end_marker = False
        """Whether the answer has had its end marker."""
        self._is_end_certain = False
        """Whether a complete answer of this dialect always has an end marker."""
        self._texts: list[str] | None = None
        """Parts of the answer's text; None: the recorder does not need it."""
        self._texts_taken = 0
        """Number of texts whose memory was taken."""
        self._text_chars = self._usage_bytes = 0
        """`_text_chars`: length of `_texts`. `_usage_bytes`: memory of the latest usage, which another one
        replaces."""
        self._texts_bytes = 0
        """Memory of the texts and of the usage object."""
        self._text_chars_max = _TEXT_CHARS_MAX
        self._events_max = EVENTS_MAX

    def request_data(self, data: bytes, t_ns: int) -> None:
        """Take body bytes of the request, with their HTTP framing, read at `t_ns`."""
        self._request.feed(data)

    def request_end(self, t_ns: int) -> None:
        """Record that the request is complete: its last byte was read at `t_ns`."""
        self._t.request_end_ns = t_ns
        self._end_request()

    def on_submit(self, t_ns: int, added_ns: int) -> None:
        """Record that the upstream's socket took the request's last byte: at `t_ns`, `added_ns` after the
        read of this byte."""
        self._t.submit_ns = t_ns
        self._x.added.request_ns = added_ns

    def on_hold(self, begin_ns: int, end_ns: int) -> None:
        """Record a pause: the client took no bytes, so that the relay did not read from the upstream."""
        holds = self._t.holds
        if len(holds) < 2 * HOLDS_MAX:
            holds.extend((begin_ns, end_ns))
        else:
            self._has_lost_holds = True

    def response_head(self, raw_head: bytes, t_ns: int, added_ns: int) -> None:
        """Take the response's head, complete at `t_ns`; interim (1xx) heads are ignored."""
        self._expect_no_repetition()
        x = self._x
        try:
            head = parse_response_head(raw_head, self._request.method)
        except PeerProtocolError as exc:
            self._t.head_ns = t_ns
            self._stop_parsing(exc)
            return
        if 100 <= head.status < 200 and head.status != 101:
            return
        self._t.head_ns = t_ns
        x.status = head.status
        if head.status == 101 and self._request.offers_deflate:
            self.deflates = negotiates_deflate(_values(head.headers, b"sec-websocket-extensions"))
        response_id = next((value for name, value in head.headers if name.lower() in RESPONSE_IDS), None)
        if response_id is not None:
            x.upstream_request_id = bounded("upstream_request_id", response_id.decode("latin-1"))
            if x.request_id is None:
                x.request_id = bounded("request_id", response_id.decode("latin-1"))
        applied = header_value(head.headers, APPLIED_GUARDRAILS)
        self._interventions.applied_guardrails = None if applied is None else applied[:_HEADER_BYTES_MAX]
        self._server.read_head(head.headers)
        content_type = header_value(head.headers, b"content-type")
        if content_type is not None:
            media_type = content_type.partition(b";")[0].strip().lower().decode("latin-1")
            x.content_type = bounded("content_type", media_type) or None
        if x.call is not None:
            self._answer = AnswerReader(None, "", self._share)
            self._answer.give_up()
            return  # answers of MCP servers are not parsed
        failed = head.status >= 400
        self._answer = AnswerReader(
            content_type, self._request.path, self._share, failed=failed, dialects=self._dialects
        )
        if head.framing is Framing.CHUNKED:
            self._dechunk = ChunkedDecoder()
        # RFC 9110 5.3: several lines of a field are one list.
        codings = _values(head.headers, b"content-encoding")
        if codings:
            try:
                decoder = Decoder(b",".join(codings))
                self._decoder = None if decoder.identity else decoder
            except PeerProtocolError as exc:
                self._stop_parsing(exc)

    def response_data(self, data: bytes, t_ns: int, added_ns: int, *, at_once: bool = False) -> None:
        """Take body bytes of the response with their framing, read at `t_ns`, written `added_ns` later.

        `at_once`: all bytes arrived at `t_ns`, in one TCP segment; False if that is unknown."""
        for _ in self.response_slices(data, t_ns, added_ns, at_once=at_once):
            pass

    def response_slices(
        self, data: bytes, t_ns: int, added_ns: int, *, at_once: bool = False
    ) -> Iterable[None]:
        """Take the bytes as `response_data` does, but in slices: each step of the returned iterator processes
        one slice. Return an empty tuple if nothing is left to process. The caller must exhaust the iterator
        before any other call except `give_up`."""
        self._at_once = at_once
        run = self.token_run
        if run is not None:
            if run.add(data, t_ns, added_ns):
                if run.full:
                    self._log_run()
                return ()
            self._expect_no_repetition()
        size = len(data)
        if self._dechunk is not None:
            try:
                data = self._dechunk.feed(data)
            except PeerProtocolError as exc:
                self._stop_parsing(exc)
        if not data:
            # The read contained only framing, such as the size of a chunk.
            return ()
        self._count_read(t_ns, added_ns)
        answer = self._answer
        if answer is None:
            answer = self._answer = AnswerReader(None, "", self._share)
        if self._decoder is not None or len(data) > SLICE_BYTES:
            return self._read_slices(answer, data, size, t_ns)
        deltas = answer.feed(data, t_ns)
        if len(deltas) == 1 and not answer.late:  # fast path of most reads of a token stream
            self._add(deltas[0], t_ns)
        else:
            self._add_late(answer)
            self._add_all(deltas, t_ns)
        if (
            answer.kept_bytes + self._texts_bytes != self._kept_bytes
            or len(self._t.events.classes) >= _LOGGED_FREE
        ):
            self._count_memory(answer)
        self._end_read(answer, size, t_ns)
        return ()

    def _read_slices(self, answer: AnswerReader, data: bytes, size: int, t_ns: int) -> Iterator[None]:
        """Read a piece of the body slice by slice, and yield between slices, so that other work can run."""
        decoder = self._decoder
        if decoder is None:
            slices: Iterable[bytes] = (data[i : i + SLICE_BYTES] for i in range(0, len(data), SLICE_BYTES))
        else:
            slices = decoder.pieces(data)
            self._lines_left += LINES_PER_BYTE * len(data)
        outputs, fed_bytes, last = 0, 0, None
        try:
            for piece in slices:
                if fed_bytes:
                    yield
                    if self._loss_reason is not None:
                        break
                elif not piece:
                    yield
                    continue
                if decoder is not None:
                    self._lines_left -= piece.count(b"\n") + piece.count(b"\r")
                    if self._lines_left < 0:
                        raise PeerProtocolError(
                            f"the body decodes to more than {LINES_PER_BYTE} lines per byte received,"
                            " so llmtap does not measure the answer, to limit its own CPU time"
                        )
                fed_bytes += len(piece)
                deltas = self._feed(answer, piece, t_ns)
                if deltas:
                    outputs += sum(delta.output for delta in deltas)
                    last = deltas[-1]
        except PeerProtocolError as exc:
            self._stop_parsing(exc)
        if self._loss_reason is not None:
            rest = data[fed_bytes:] if decoder is None else data
            if rest:
                self._feed(answer, rest, t_ns)
        elif not fed_bytes:
            return
        elif outputs > 1:
            self._mark_shared_read(t_ns)
        elif outputs and last is not None and not last.output:
            self._mark_followed_token(t_ns)
        self._end_read(answer, size, t_ns)

    def _feed(self, answer: AnswerReader, payload: bytes, t_ns: int) -> list[Delta]:
        """Parse a piece of the body, and add the events found in it."""
        deltas = answer.feed(payload, t_ns)
        self._add_late(answer)
        self._add_all(deltas, t_ns)
        self._count_memory(answer)
        return deltas

    def _end_read(self, answer: AnswerReader, size: int, t_ns: int) -> None:
        """Finish the work after the events of a read."""
        if not answer.idle:
            self._mark_followed_token(t_ns)
        elif (repetition := answer.repetition_finder.repetition) is not None and self._decoder is None:
            self._expect_repetition(repetition)
        if size < READ_BYTES_MAX:
            self._emptied_ns = t_ns
        else:
            self._may_have_waited = True

    def _count_memory(self, answer: AnswerReader) -> None:
        """Count the memory of the response against the limit of all open exchanges."""
        kept_bytes = answer.kept_bytes + self._texts_bytes
        logged = len(self._t.events.classes)
        if logged >= _LOGGED_FREE:
            event_bytes = _LOGGED_BYTES if self._texts is None else _LOGGED_BYTES + _CHARS_BYTES
            kept_bytes += (logged - logged % _LOGGED_FREE) * event_bytes
        if self._decoder is not None:
            kept_bytes += self._decoder.kept_bytes
        if kept_bytes == self._kept_bytes:
            return
        if self._share.change(kept_bytes - self._taken_bytes):
            self._kept_bytes = self._taken_bytes = kept_bytes
            self._texts_taken = len(self._texts or ())
        else:
            self._keep_less(answer, kept_bytes)

    def _keep_less(self, answer: AnswerReader, kept_bytes: int) -> None:
        """Skip the unfinished event, and log no later events and texts, because `kept_bytes` is above the
        limit."""
        kept_bytes -= answer.kept_bytes + self._texts_bytes
        answer.drop_part()
        self._drop_texts()
        kept_bytes += answer.kept_bytes + self._texts_bytes
        self._events_max = min(self._events_max, len(self._t.events.classes))
        self._text_chars_max = min(self._text_chars_max, self._text_chars)
        window_bytes = 0 if self._decoder is None else self._decoder.kept_bytes
        # From now on, the memory of this exchange can grow only by the events of one slice, or by the
        # decoder's window. If there is still no room and the window is large, drop the decoder: the rest of
        # the response is not parsed.
        if self._share.change(kept_bytes - self._taken_bytes):
            self._taken_bytes = kept_bytes
        elif window_bytes > SLICE_BYTES:
            self._stop_parsing(PeerProtocolError(_NO_ROOM))
            return
        self._kept_bytes = kept_bytes

    def _drop_texts(self) -> None:
        """Release the texts whose memory was not taken from `_share`."""
        if self._texts is not None:
            for text in self._texts[self._texts_taken :]:
                self._text_chars -= len(text)
                self._texts_bytes -= getsizeof(text) + _TEXT_BYTES
            del self._texts[self._texts_taken :]

    def response_end(self, t_ns: int) -> None:
        """Record that the response is complete: its last byte was read at `t_ns`."""
        self._t.response_end_ns = t_ns
        self._close(whole=True)
        if self._dechunk is not None:
            self._mark_followed_token(t_ns)

    def on_upgrade(self, t_ns: int) -> None:
        """Note that the connection is a tunnel from `t_ns` on, after the head with status 101."""
        self._expect_no_repetition()
        if self._t.head_ns is None:
            self._t.head_ns = t_ns
        self._dechunk = self._decoder = None
        self._answer = AnswerReader.of_tunnel(self._request.path, self._dialects, deflates=self.deflates)

    def begin_response(self, request: bytes, t_ns: int, added_ns: int) -> None:
        """Begin one response of a session (`exchange/session.py`); `request`: the client's message that
        caused it, read at `t_ns` and written `added_ns` later."""
        self.request_data(request, t_ns)
        self.request_end(t_ns)
        self.on_submit(t_ns + added_ns, added_ns)
        self._x.status = 101
        self._answer = AnswerReader.of_response(self._request.path, self._dialects)

    def message(self, message: WebSocketMessage, t_ns: int, added_ns: int) -> None:
        """Take a message of the upstream, read at `t_ns` and written `added_ns` later."""
        if t_ns > self._last_read_ns:
            self._emptied_ns = self._last_read_ns
        elif self._t.last_token_ns == t_ns:
            self._mark_shared_read(t_ns)
        self._count_read(t_ns, added_ns)
        answer = self._answer
        if answer is not None and self._loss_reason is None:
            deltas = answer.read_message(message, t_ns)
            self._add_late(answer)
            for delta in deltas:
                self._add(delta, t_ns)
            self._count_memory(answer)

    def tunnel(
        self,
        data_up: bytes | None,
        data_down: bytes | None,
        t_ns: int,
        added_ns: int,
        *,
        continues: bool = False,
    ) -> None:
        """Take bytes of a tunnel. Bytes of the upstream are timed as WebSocket messages; responses of a
        session have exchanges of their own (`exchange/session.py`). `continues`: the bytes belong to the same
        read as those of the previous call."""
        if data_down:
            if not continues:
                self._count_read(t_ns, added_ns)
            answer = self._answer
            if answer is not None:
                self._feed(answer, data_down, t_ns)
                if answer.broken is not None and self._loss_reason is None:
                    self._loss_reason = answer.broken

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
        stall_ns: int | None = None,
    ) -> Exchange:
        """Complete the Exchange and return it. Call this method once, after all others.

        Args:
            outcome: outcome by the relay, a value of `Outcome`; the events refine it.
            status: status sent to the client; None: that of the head, if any.
            paused_ns: time that back-pressure of the client held the stream.
            lag_ns: error of the timestamp of a read that holds one event.
            request_bytes, response_bytes: sizes including the heads.
            stall_ns: without `longest_wait`, the longest time that a byte waited unread, as far as the
                probes of the loop show (`STALL_MISSED_NS`); None: `lag_ns`.
        """
        x, t = self._x, self._t
        self._end_request()
        self._close(whole=False)
        self.abandon()
        t.delivered_ns = delivered_ns
        t.paused_ns = paused_ns
        x.uncertainty_ns = x.ttft_uncertainty_ns = lag_ns
        if x.clock == "kernel":
            wait_ns = self._shared_ns
            if self._longest_wait is None:
                # Subtract the time in which back-pressure of the client held the stream (in `paused_ns`).
                wait_ns = max(0, wait_ns - paused_ns)
                if not self._may_have_waited:
                    wait_ns = min(wait_ns, (lag_ns if stall_ns is None else stall_ns) + STALL_MISSED_NS)
            x.uncertainty_ns = max(lag_ns, wait_ns)
            x.ttft_uncertainty_ns = max(lag_ns, self._first_shared_ns)
        early_ns = None if self._answer is None else self._answer.dialect.early_ns
        if early_ns is not None and t.first_token_ns is not None:
            # Events before the first token possibly had output, which was not read as such.
            unread_ns = t.first_token_ns - early_ns
            x.uncertainty_ns = max(x.uncertainty_ns, unread_ns)
            x.ttft_uncertainty_ns = max(x.ttft_uncertainty_ns, unread_ns)
        x.request_bytes = request_bytes
        x.response_bytes = response_bytes
        if status is not None:
            x.status = status
        x.response_model = self._model
        x.service_tier = (self._answer and self._answer.tier) or x.service_tier_requested
        if x.model is None:
            x.model = x.response_model
        x.tokens = self._tokens.result(stream=x.stream)
        if self._tokens.counts.refused:
            x.invalid_values = {TOKEN_COUNT: self._tokens.counts.refused}
        if self._texts is not None:
            x.text = CapturedText(response_text="".join(self._texts)[:_TEXT_CHARS_MAX])
            self._texts = None
        if x.usage is not None:
            x.usage = figures_of(x.usage)
        x.server_timing, x.server_gaps_ns = self._server.entries(), self._server.gaps_ns()
        self._interventions.judge(x)
        tokens = x.tokens
        if tokens.output == 0 and not tokens.reasoning and self._tokens.has_output and x.refusal is None:
            # The answer has output, so the usage of 0 tokens is wrong. (A guardrail's text has 0 tokens.)
            x.tokens = self._tokens.result(stream=x.stream, without_usage=True)
            x.invalid_values = {TOKEN_COUNT: self._tokens.counts.refused + 1}
        reported = ended = Outcome(outcome)
        failed = self._error_type is not None or (x.status is not None and x.status >= 400)
        if reported is Outcome.CLIENT_CANCELLED and (
            self._has_end_marker or x.finish_reason is not None or failed
        ):
            # Many clients close the connection after the end marker or an error, before the last bytes of
            # the framing. The answer was complete then, so this is not a cancellation.
            t.response_end_ns = t.response_end_ns or self._last_read_ns
            ended = Outcome.COMPLETE
        remove_implausible(x)
        cut_off = self._is_end_certain and not self._has_end_marker and x.finish_reason is None
        x.outcome, reason = judge(
            x, ended, cut_off=cut_off, lost=self._loss_reason, error_type=self._error_type
        )
        x.error = (error if x.outcome is reported else None) or reason
        if x.outcome in UPSTREAM_FAILED and t.first_token_ns is None:
            # Most servers answer the failed request for a stream with JSON: count it as a stream, too.
            x.stream = x.stream or self._request.wants_stream
        if x.stream and t.first_token_ns is None:
            x.no_token_reason = no_token_reason(x)
        if x.unlogged_events:
            x.reading_limits += (ReadingLimit.LOGGED_EVENTS,)
        if self._has_lost_holds:
            x.reading_limits += (ReadingLimit.HOLDS,)
        bound(x)
        return x

    def give_up(self, reason: str) -> bool:
        """Stop parsing the response; its reads are still timed. Return False if it was not being parsed."""
        if self._answer is None or self._is_closed or self._loss_reason is not None:
            return False
        self._expect_no_repetition()
        self._stop_parsing(PeerProtocolError(reason))
        return True

    def abandon(self) -> None:
        """Release the memory, instead of `finish`: the exchange is discarded."""
        self._share.close()

    def make_share(self) -> Share:
        """Return a share of the memory limit for other data of this exchange."""
        return Share(self._bodies)

    @property
    def exchange(self) -> Exchange:
        """The exchange, which changes until `finish`."""
        return self._x

    def running_state(self) -> RunningState:
        """Return the present state. Do not call it for every event: it first adds collected events to the
        log."""
        self._log_run()
        answer = self._answer
        if answer is None:
            return RunningState(self._x, None, self._request.wants_stream, 0, 0, True, self._last_read_ns)
        return RunningState(
            self._x,
            answer.dialect.name,
            answer.streamed,
            self._event_count,
            self._tokens.so_far,
            self._is_understood(answer),
            self._last_read_ns,
        )

    def _is_understood(self, answer: AnswerReader) -> bool:
        """Return whether a dialect can read the answer, as far as it is known."""
        dialect = answer.dialect
        if self._loss_reason is not None:
            return False
        # Until the dialect is chosen, `dialect` keeps all events from the first one with data.
        has_data = dialect.kept_bytes > 0 or self._x.unparsed_events > 0
        return dialect.reading is not Reading.NONE or not has_data

    def _end_request(self) -> None:
        """End the request; from now on, keep the answer's texts if it needs a tokenizer."""
        self._request.end()
        if self._request.wants_text and self._texts is None:
            self._log_run()
            self._texts = []
            self._t.events.chars.extend([0] * len(self._t.events))
            self._set_keeps_texts()

    def _stop_parsing(self, reason: PeerProtocolError) -> None:
        """Parse no more of the response; its reads are still timed."""
        self._loss_reason = str(reason)
        self._dechunk = self._decoder = None
        if self._answer is None:
            self._answer = AnswerReader(None, "")
        self._answer.give_up()

    def _count_read(self, t_ns: int, added_ns: int) -> None:
        """Count a read of the answer, and the latency added to it."""
        x = self._x
        x.reads += 1
        self._last_read_ns = t_ns
        added = x.added
        if added.chunk_max_ns is None:
            self._t.first_byte_ns = t_ns
            added.first_chunk_ns = added.chunk_max_ns = added_ns
        elif added_ns > added.chunk_max_ns:
            added.chunk_max_ns = added_ns
        if x.reads <= EVENTS_MAX:
            added.chunks_ns.append(added_ns)

    def _add_all(self, deltas: list[Delta], t_ns: int, since_ns: int | None = None) -> None:
        """Add the events of the read at `t_ns`. `since_ns`: earliest time when the bytes of the read can have
        arrived; None: the time when the socket was last emptied."""
        outputs = 0
        for delta in deltas:
            self._add(delta, t_ns)
            outputs += delta.output
        if outputs > 1:
            self._mark_shared_read(t_ns, since_ns)
        elif outputs and not deltas[-1].output:
            self._mark_followed_token(t_ns)

    def _add_late(self, answer: AnswerReader) -> None:
        """Add events of earlier reads, which waited until the dialect was known."""
        if not answer.late:
            return
        since_ns = self._t.submit_ns or self._t.arrival_ns
        for t_ns, group in groupby(answer.take_late(), key=itemgetter(0)):
            self._add_all([delta for _, delta in group], t_ns, since_ns)
            since_ns = t_ns

    def _mark_followed_token(self, t_ns: int) -> None:
        """Mark the last token's time as possibly late: other bytes follow the token in its read, at `t_ns`.

        Only for the load generator, which probes its event loop often and so knows how late a read can be.
        In a relay, the uncertainty of most responses would become STALL_MISSED_NS, because the last token
        often comes with the end of the stream.
        """
        if self._longest_wait is not None and self._t.last_token_ns == t_ns:
            self._mark_shared_read(t_ns)

    def _mark_shared_read(self, t_ns: int, since_ns: int | None = None) -> None:
        """Record that bytes follow an output event in its read, so that its timestamp is possibly late. The
        event arrived after the previous read, and waited only while the loop left its sockets unread."""
        if since_ns is None:
            if self._at_once:
                return
            since_ns = self._emptied_ns or self._t.submit_ns or self._t.arrival_ns
        wait_ns = t_ns - since_ns
        if self._longest_wait is not None and not self._may_have_waited:
            wait_ns = min(wait_ns, self._longest_wait(since_ns, t_ns))
        self._shared_ns = max(self._shared_ns, wait_ns)
        if t_ns in (self._t.first_token_ns, self._t.first_content_ns):
            self._first_shared_ns = max(self._first_shared_ns, wait_ns)

    def _add(self, delta: Delta, t_ns: int) -> None:
        """Log an event and count its tokens. `t_ns`: time of the read that ended it."""
        t = self._t
        log = t.events
        tokens = delta.tokens
        if delta.verdict is not None:
            self._interventions.add(delta.verdict, self._event_count, self._tokens.so_far)
        if tokens > 0 or self._tokens.tokenizes:
            tokens = self._tokens.add(delta)
        if len(log.classes) < self._events_max:
            flags = (OUTPUT if delta.output else 0) | (BLANK if delta.blank else 0)
            log.add(t_ns, delta.event_class, delta.size, tokens, flags)
            if self._texts is not None:
                log.chars.append(len(delta.text) if _has_first_text(delta) else 0)
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
            if t.first_tool_call_ns is None and delta.tool_call:
                t.first_tool_call_ns = t_ns
            if t.first_refusal_ns is None and delta.refusal:
                t.first_refusal_ns = t_ns
            if delta.text:
                self._tokens.chunks += len(delta.choices)
                # Use the text of the first choice only: texts of several choices are interleaved.
                reading = self._interventions.needs_text
                if (reading or self._texts is not None) and _has_first_text(delta):
                    if reading:
                        self._interventions.read(delta.text)
                    if self._texts is not None:
                        self._keep_text(delta.text)
            else:
                self._tokens.textless += len(delta.choices)
        elif delta.choices:
            # An event with only a generated marker (such as `<think>`) and no text counts as a chunk, because
            # the model generated it.
            self._tokens.chunks += len(delta.choices)
        if delta.finish_reason is not None:
            self._x.finish_reason = bounded("finish_reason", delta.finish_reason)
        if delta.server_times or delta.server_clock_ns >= 0:
            self._server.read_event(self._event_count - 1, delta)
        if delta.counts is not None:
            self._tokens.count(delta.counts, total=not delta.usage_running)
            self._x.usage = delta.usage
            self._texts_bytes -= self._usage_bytes
            self._usage_bytes = 0
            if delta.usage is not None and delta.size > _USAGE_BYTES_MAX:
                self._x.usage = figures_of(delta.usage)
                self._usage_bytes = memory_bytes(self._x.usage)
                self._texts_bytes += self._usage_bytes
        if delta.model is not None and self._model is None:
            self._model = bounded("response_model", delta.model)
        if delta.error_type is not None:
            # Keep one character too many, so that is_word() rejects a longer text.
            self._error_type = delta.error_type[: WORD_CHARS_MAX + 1]
            names = (delta.error_type, delta.error_type_beside_code)
            self._interventions.add_error(names, self._event_count, self._tokens.so_far)
        if delta.done:
            self._has_end_marker = True
        if delta.retry:
            self._x.retries += 1
        if not delta.parsed and self._is_expected():
            self._x.unparsed_events += 1

    def _keep_text(self, text: str) -> None:
        """Store a part of the answer's text, for the recorder or a tokenizer."""
        assert self._texts is not None
        if self._text_chars < self._text_chars_max:
            self._text_chars += len(text)
            self._texts_bytes += getsizeof(text) + _TEXT_BYTES
            self._texts.append(text)

    def _expect_repetition(self, repetition: Repetition) -> None:
        """Let `token_run` collect the next reads: the last read held exactly one event, which can come again
        with another text. No layer below the events holds pending bytes."""
        if repetition.offsets and self._tokens.tokenizes:
            return  # The text of an event without new tokens in its usage is tokenized.
        if repetition is not self._repetition:
            self._repetition = repetition
            self._run = self._make_run(repetition)
            self._set_keeps_texts()
        if self._dechunk is None or self._dechunk.is_between_chunks:
            self.token_run = self._run

    def _make_run(self, repetition: Repetition) -> TokenRun | None:
        """Return an empty run; None if there is no memory for it: then each event is parsed."""
        self._share.give(self._run_bytes)
        run_bytes = RUN_BYTES + RUN_BLOCKS * repetition.delta.size
        self._run_bytes = run_bytes if self._share.take(run_bytes) else 0
        if not self._run_bytes:
            return None
        return make_token_run(repetition, chunked=self._dechunk is not None, keeps_texts=False)

    def _expect_no_repetition(self) -> None:
        """Log the counted repetitions, and let no event be counted as a repetition."""
        self._log_run()
        self.token_run = None

    def _set_keeps_texts(self) -> None:
        """Set whether the run keeps the texts of events. Call it only while the run is empty."""
        if self._run is not None and self._repetition is not None:
            read = self._interventions.needs_text or self._texts is not None
            self._run.keeps_texts = self._tokens.tokenizes or (
                read and _is_first_content(self._repetition.delta)
            )

    def _log_run(self) -> None:
        """Add the collected repetitions to the log, and empty the run."""
        run, repetition, answer = self._run, self._repetition, self._answer
        if not run or repetition is None or answer is None:
            return
        times, added_ns, sizes, blanks, texts, counts = run.take()
        x, t, added, delta, n = self._x, self._t, self._x.added, repetition.delta, len(times)
        longest_ns = max(added_ns)
        if added.chunk_max_ns is None or longest_ns > added.chunk_max_ns:
            added.chunk_max_ns = longest_ns
        added.chunks_ns.extend(added_ns[: max(0, EVENTS_MAX - x.reads)])
        x.reads += n
        self._last_read_ns = self._emptied_ns = t.last_token_ns = times[-1]
        self._tokens.chunks += n
        answer.advance_offset(sum(sizes))
        flags = blanks.translate(_FLAGS) if delta.event_class is _CONTENT else bytes((OUTPUT,)) * n
        if counts:
            tokens = self._count_running(answer, repetition, counts)
        elif self._tokens.tokenizes:
            tokens = array("l", map(self._tokens.tokenize, texts))
        else:
            tokens = _UNDECLARED * n
        room = max(0, self._events_max - len(t.events))
        classes = bytes((delta.event_class,)) * n
        t.events.add_many(times[:room], classes[:room], sizes[:room], tokens[:room], flags[:room])
        if self._texts is not None:
            chars = map(len, texts) if _is_first_content(delta) else [0] * n
            t.events.chars.extend(array("l", chars)[:room])
        x.unlogged_events += max(0, n - room)
        if texts and _is_first_content(delta):
            if self._interventions.needs_text:
                self._interventions.read_all(texts)
            if self._texts is not None:
                self._keep_text("".join(texts))
        self._count_memory(answer)
        self._set_keeps_texts()

    def _count_running(
        self, answer: AnswerReader, repetition: Repetition, counts: "array[int]"
    ) -> "array[int]":
        """Add the running usage of collected events; return the tokens of each event, -1 if it adds none."""
        total, (choice,), last = (
            answer.dialect.running_total,
            repetition.delta.choices,
            repetition.delta.counts,
        )
        assert total is not None and last is not None
        tokens = array("l", (self._tokens.add_declared(total.growth(choice, n)) for n in counts))
        self._tokens.count(replace(last, output=counts[-1]), total=False)
        self._x.usage = repetition.usage_at(counts[-1])
        return tokens

    @property
    def _event_count(self) -> int:
        return len(self._t.events.classes) + self._x.unlogged_events

    def _is_expected(self) -> bool:
        """Whether to report an unparsed answer. False for imported files, which can be incomplete."""
        streamed = self._answer is not None and self._answer.streamed
        return streamed or self._loss_reason is not None or self._x.endpoint is not None

    def _close(self, *, whole: bool) -> None:
        """Read the rest of the answer. `whole`: the answer is complete."""
        self._expect_no_repetition()
        if self._is_closed:
            return
        self._is_closed = True
        if self._dechunk is not None and self._dechunk.trailers:
            self._server.read_trailers(self._dechunk.trailers)
        answer = self._answer
        if answer is None:
            self._x.stream = self._request.wants_stream and self._x.status is None
            return
        deltas = answer.close(whole=whole, t_ns=self._last_read_ns)
        self._add_late(answer)
        for delta in deltas:
            self._add(delta, self._last_read_ns)
        self._x.unparsed_events += answer.skipped
        self._x.stream, self._x.padded = answer.streamed, bool(answer.padded)
        dialect = answer.dialect
        self._x.dialect, self._x.answer_id = dialect.name, dialect.answer_id
        if dialect.name == A2A and self._x.endpoint is None:
            # A2A 0.3 has no header of its own, and agents choose their paths, so only the answer shows the
            # endpoint.
            self._x.endpoint = A2A
        # A body that could not be parsed to its end may contain unknown events.
        self._x.reading = dialect.reading if self._loss_reason is None else Reading.NONE
        self._x.reading_limits = dialect.limits
        # If most events were not understood, one of them was possibly the end.
        self._is_end_certain = dialect.end_certain and 2 * self._x.unparsed_events <= self._event_count


def _values(headers: Headers, name: bytes) -> list[bytes]:
    """Return the values of all lines of a field."""
    return [value for one, value in headers if one.lower() == name]


def _has_first_text(delta: Delta) -> bool:
    """Whether the event adds text to the content of the first choice."""
    return (
        delta.output and bool(delta.text) and delta.event_class in _CONTENT_CLASSES and delta.choices[0] == 0
    )


def _is_first_content(delta: Delta) -> bool:
    return delta.event_class is _CONTENT and delta.choices[0] == 0
