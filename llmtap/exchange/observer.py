"""Build an Exchange from timestamped bytes (sans-IO), for the meter, the load generator and saved files.

The caller passes request and response, read by read, to an `Observer`, and gets the Exchange from `finish`.
Every event has the stamp of the read that completed it. Bad bytes never raise: if a body cannot be read only
the reads are timed. Long because its methods change the state of one exchange.

Source: docs/dialects.md.
"""

import re
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

from llmtap.errors import PeerProtocolError
from llmtap.exchange.answer import AnswerReader
from llmtap.exchange.bounds import BOUNDS, Budget, Share, bound, bounded
from llmtap.exchange.exchange import BLANK, OUTPUT, CapturedText, Exchange, Timeline
from llmtap.exchange.outcome import UPSTREAM_FAILED, Outcome
from llmtap.exchange.request import Hear, Identify, RequestReader
from llmtap.exchange.verdict import (
    APPLIED_GUARDRAILS,
    TEXT_PATTERNS,
    TOKEN_COUNT,
    WORD_CHARS_MAX,
    Interventions,
    ServerTiming,
    TokenLadder,
    figures_of,
    is_reason,
    judge,
    no_token_reason,
    remove_implausible,
)
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.encoding import Decoder
from llmtap.protocol.http1 import ChunkedDecoder, Framing, header_value, parse_response_head
from llmtap.protocol.repetition import Repetition, TokenRun, make_token_run
from llmtap.protocol.websocket import WebSocketMessage

EVENTS_MAX: Final = 1 << 18
"""Events logged one by one: 40 bytes each, 10 MB an exchange. Later ones still move the points."""
UNSEEN_NS: Final = 11_100_000
"""Part of a stall of a relay's event loop that its probes can miss: every 10 ms, with a grain of 1.1 ms."""
READ_BYTES_MAX: Final = 1 << 16
"""Length of a read that may have left bytes in the socket."""
_TEXT_CHARS_MAX: Final = BOUNDS["said.response_text"].chars
_USAGE_BYTES_MAX: Final = 1 << 16
"""Of an event whose usage object is kept as sent until the end; of a longer one only the figures are kept."""
LINES_PER_BYTE: Final = 2
"""Lines in a decoded body for each coded byte, beyond LINES_FREE. A line takes up to 3 us: without a bound,
1 MB of gzip that holds 250 MB of line feeds would take minutes. Streams of equal events reach 0.6."""
LINES_FREE: Final = 1 << 16
_UNTOLD: Final = array("l", (-1,))
_HEADER_BYTES_MAX: Final = 1_024
_CONTENT: Final = EventClass.CONTENT
_SPOKEN: Final = (EventClass.CONTENT, EventClass.GUARDRAIL, EventClass.ERROR)
"""Classes of an event whose text is content."""
_FLAGS: Final = bytes((OUTPUT, OUTPUT | BLANK)) + bytes(254)


class UnderWay(NamedTuple):
    """An exchange that has not ended, as far as it is known."""

    exchange: Exchange
    """It goes on changing: what is read of it must be read at once."""
    dialect: str | None
    stream: bool
    events: int
    tokens: int
    """By the best that the events tell until now; a chunk counts as one where they tell nothing."""


class Observer:
    """One exchange in the making. Stamps are ns of the monotonic clock, in the order of the calls.

    Args:
        arrival_ns: the read that held the request's first byte; arrival_wall_ns: the same as a date.
        clock: how the stamps were taken, `mono` or `kernel`.
        identify: returns the tenant of a request; without it all are `default`.
        patterns: words of a refusal.
        count_tokens: counts the tokens in a text, for streams that declare none.
        hear: gets the whole request, and may ask for the answer's text (`Exchange.said`).
        bodies: memory limit of all open bodies; None: no limit.
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
        patterns: tuple[re.Pattern[str], ...] = TEXT_PATTERNS,
        count_tokens: Callable[[str], int] | None = None,
        hear: Hear | None = None,
        bodies: Budget | None = None,
        waited: Callable[[int, int], int] | None = None,
    ) -> None:
        """`waited` returns the longest time that a byte of a read may have waited, from the time of the read
        before and its own timestamp."""
        self._t = Timeline(arrival_ns)
        self._x = Exchange(
            bounded("relay", relay), seq, arrival_wall_ns, self._t, clock=bounded("clock", clock)
        )
        self._share = Share(bodies)
        self._request = RequestReader(self._x, head, identify, hear, self._share)
        self._repetition: Repetition | None = None
        self._run: TokenRun | None = None
        self.token_run: TokenRun | None = None
        """`_run` while the next read may be such an event: `FrameBatch` adds events to it, too."""
        # The response's body, from the wire inwards.
        self._dechunk: ChunkedDecoder | None = None
        self._decoder: Decoder | None = None
        self._answer: AnswerReader | None = None
        self._lines_left = LINES_FREE
        self._lost: str | None = None
        self._closed = False
        self._waited = waited
        self._shared_ns = 0
        """Longest time that an output event may have waited for the last byte of its read, which has the
        kernel's stamp."""
        self._emptied_ns: int | None = None
        """Time of the last read that left nothing in the socket: what is read next arrived later."""
        self._crowded = False
        """A read may have left bytes in the socket, which then wait for more than a turn of the loop."""
        self._last_read_ns = arrival_ns
        self._model: str | None = None
        self._tokens = TokenLadder(count_tokens)
        self._interventions = Interventions(patterns)
        self._server = ServerTiming()
        self._error_type: str | None = None
        self._done = False
        self._texts: list[str] | None = None
        self._text_chars = 0

    def request_data(self, data: bytes, t_ns: int) -> None:
        """Take body bytes of the request, with their HTTP framing, read at `t_ns`."""
        self._request.feed(data)

    def request_end(self, t_ns: int) -> None:
        self._t.request_end_ns = t_ns
        self._end_request()

    def submitted(self, t_ns: int, added_ns: int) -> None:
        """The upstream's socket took the request's last byte at `t_ns`, `added_ns` after its read."""
        self._t.submit_ns = t_ns
        self._x.added.request_ns = added_ns

    def response_head(self, raw_head: bytes, t_ns: int, added_ns: int) -> None:
        """The response's head, complete at `t_ns`; interim (1xx) heads are passed over."""
        self._expect_nothing()
        x = self._x
        try:
            head = parse_response_head(raw_head, self._request.method)
        except PeerProtocolError as exc:
            self._t.head_ns = t_ns
            self._lose(exc)
            return
        if 100 <= head.status < 200 and head.status != 101:
            return
        self._t.head_ns = t_ns
        x.status = head.status
        if x.request_id is None:
            request_id = header_value(head.headers, b"x-request-id")
            x.request_id = None if request_id is None else bounded("request_id", request_id.decode("latin-1"))
        applied = header_value(head.headers, APPLIED_GUARDRAILS)
        self._interventions.applied = None if applied is None else applied[:_HEADER_BYTES_MAX]
        self._server.read_head(head.headers)
        content_type = header_value(head.headers, b"content-type")
        if x.call is not None:
            self._answer = AnswerReader(None, "", self._share)
            self._answer.give_up()
            return  # nothing is read of it
        failed = head.status >= 400
        self._answer = AnswerReader(content_type, x.path.rstrip("/"), self._share, failed=failed)
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
        run = self.token_run
        if run is not None:
            if run.add(data, t_ns, added_ns):
                if run.full:
                    self._log_run()
                return
            self._expect_nothing()
        size = len(data)
        if self._dechunk is not None:
            try:
                data = self._dechunk.feed(data)
            except PeerProtocolError as exc:
                self._lose(exc)
        if not data:
            return  # framing only
        self._count_read(t_ns, added_ns)
        if self._decoder is not None:
            self._lines_left += LINES_PER_BYTE * len(data)
            try:
                data = self._decoder.feed(data)
                self._lines_left -= data.count(b"\n") + data.count(b"\r")
                if self._lines_left < 0:
                    raise PeerProtocolError(f"it decodes to more than {LINES_PER_BYTE} lines per byte")
            except PeerProtocolError as exc:
                self._lose(exc)
            if not data:
                return
        answer = self._answer
        if answer is None:
            answer = self._answer = AnswerReader(None, "", self._share)
        self._add_all(answer.feed(data), t_ns)
        if not answer.idle:
            self._token_is_followed(t_ns)
        if size < READ_BYTES_MAX:
            self._emptied_ns = t_ns
        else:
            self._crowded = True
        repetition = answer.repetition
        if repetition is not None and self._decoder is None:
            self._expect(repetition)

    def response_end(self, t_ns: int) -> None:
        self._t.response_end_ns = t_ns
        self._close(whole=True)
        if self._dechunk is not None:
            self._token_is_followed(t_ns)

    def upgraded(self, t_ns: int) -> None:
        """The connection is a tunnel from `t_ns` on (the 101 went before, by `response_head`)."""
        self._expect_nothing()
        if self._t.head_ns is None:
            self._t.head_ns = t_ns
        self._dechunk = self._decoder = None
        self._answer = AnswerReader.of_tunnel(self._x.path.rstrip("/"))

    def begin_response(self, request: bytes, t_ns: int, added_ns: int) -> None:
        """This is one response of a session; `request` is the message that asked for it, read at `t_ns` and
        written `added_ns` later (`exchange/session.py`)."""
        self.request_data(request, t_ns)
        self.request_end(t_ns)
        self.submitted(t_ns + added_ns, added_ns)
        self._x.status = 101
        self._answer = AnswerReader.of_response(self._x.path.rstrip("/"))

    def message(self, message: WebSocketMessage, t_ns: int, added_ns: int) -> None:
        if t_ns > self._last_read_ns:
            self._emptied_ns = self._last_read_ns
        elif self._t.last_token_ns == t_ns:
            self._share_read(t_ns)
        self._count_read(t_ns, added_ns)
        answer = self._answer
        if answer is not None and self._lost is None:
            self._add(answer.read_message(message), t_ns)

    def tunnel(self, data_up: bytes | None, data_down: bytes | None, t_ns: int, added_ns: int) -> None:
        """Take bytes that passed a tunnel. The upstream's are timed as messages of a WebSocket; the responses
        of a session have exchanges of their own (`exchange/session.py`)."""
        if data_down:
            self._count_read(t_ns, added_ns)
            if self._answer is not None:
                self._add_all(self._answer.feed(data_down), t_ns)

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
        """Return the Exchange; call it once, last.

        Args:
            outcome: as the relay saw it, a value of `Outcome`; the events refine it.
            status: that the client got; None: that of the head, if any.
            paused_ns: how long back-pressure held the stream.
            lag_ns: error of a timestamp that belongs to one event; without `waited` the longest time that a
                byte waited unread, as far as the probes of the loop show (`UNSEEN_NS`).
            request_bytes, response_bytes: heads included.
        """
        x, t = self._x, self._t
        self._end_request()
        self._close(whole=False)
        self._share.close()
        t.delivered_ns = delivered_ns
        t.paused_ns = paused_ns
        x.uncertainty_ns = lag_ns
        if x.clock == "kernel":
            wait_ns = self._shared_ns
            if self._waited is None:
                wait_ns = max(0, wait_ns - paused_ns)  # the client's delay has a figure of its own
                if not self._crowded:
                    wait_ns = min(wait_ns, lag_ns + UNSEEN_NS)
            x.uncertainty_ns = max(lag_ns, wait_ns)
        x.request_bytes = request_bytes
        x.response_bytes = response_bytes
        if status is not None:
            x.status = status
        x.response_model = self._model
        if x.model is None:
            x.model = x.response_model
        x.tokens = self._tokens.result(stream=x.stream)
        if self._tokens.counts.refused:
            x.invalid_values = {TOKEN_COUNT: self._tokens.counts.refused}
        if self._texts is not None:
            x.said = CapturedText(response_text="".join(self._texts)[:_TEXT_CHARS_MAX])
            self._texts = None
        if x.usage is not None:
            x.usage = figures_of(x.usage)
        x.server_timing, x.server_gaps_ns = self._server.entries(), self._server.gaps_ns()
        self._interventions.judge(x)
        said = ended = Outcome(outcome)
        failed = self._error_type is not None or (x.status is not None and x.status >= 400)
        if said is Outcome.CLIENT_CANCELLED and (self._done or x.finish_reason is not None or failed):
            # Many clients close the connection at the end marker or at an error, before the last bytes of
            # the framing: the upstream had decided the outcome.
            t.response_end_ns = t.response_end_ns or self._last_read_ns
            ended = Outcome.COMPLETE
        remove_implausible(x)
        x.outcome, reason = judge(x, ended, done=self._done, lost=self._lost, error_type=self._error_type)
        x.error = (error if x.outcome is said else None) or reason
        if x.outcome in UPSTREAM_FAILED and t.first_token_ns is None:
            # Most servers send the error of a stream as JSON in one piece.
            x.stream = x.stream or self._request.wants_stream
        if x.stream and t.first_token_ns is None:
            x.no_token_reason = no_token_reason(x)
        bound(x)
        return x

    def give_up(self, reason: str) -> bool:
        """Stop parsing the response; its reads are still timed. Return False if no parsing goes on."""
        if self._answer is None or self._closed or self._lost is not None:
            return False
        self._expect_nothing()
        self._lose(PeerProtocolError(reason))
        return True

    def abandon(self) -> None:
        """Release memory in place of `finish`: the exchange is not wanted any more."""
        self._share.close()

    @property
    def exchange(self) -> Exchange:
        return self._x

    def under_way(self) -> UnderWay:
        """Return what is known by now; it logs what was set aside, so do not call it for every event."""
        self._log_run()
        answer = self._answer
        if answer is None:
            return UnderWay(self._x, None, self._request.wants_stream, 0, 0)
        return UnderWay(self._x, answer.dialect.name, answer.streamed, self._events_seen, self._tokens.so_far)

    def _end_request(self) -> None:
        self._request.end()
        if self._request.wants_text and self._texts is None:
            self._log_run()
            self._texts = []
            self._set_keeps_texts()

    def _lose(self, reason: PeerProtocolError) -> None:
        self._lost = str(reason)
        self._dechunk = self._decoder = None
        if self._answer is None:
            self._answer = AnswerReader(None, "")
        self._answer.give_up()

    def _count_read(self, t_ns: int, added_ns: int) -> None:
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

    def _add_all(self, deltas: list[Delta], t_ns: int) -> None:
        outputs = 0
        for delta in deltas:
            self._add(delta, t_ns)
            outputs += delta.output
        if outputs > 1:
            self._share_read(t_ns)
        elif outputs and not deltas[-1].output:
            self._token_is_followed(t_ns)

    def _token_is_followed(self, t_ns: int) -> None:
        """Bytes without a whole output event end the read of this time.

        Counted only by a load generator, which probes its loop often. In a relay the bound would be
        UNSEEN_NS for most responses, because the last token often comes with the end of the stream.
        """
        if self._waited is not None and self._t.last_token_ns == t_ns:
            self._share_read(t_ns)

    def _share_read(self, t_ns: int) -> None:
        """Bytes follow an output event in its read. The event arrived after the read before, and waited no
        longer than the loop was away from its sockets."""
        since_ns = self._emptied_ns or self._t.submit_ns or self._t.arrival_ns
        wait_ns = t_ns - since_ns
        if self._waited is not None and not self._crowded:
            wait_ns = min(wait_ns, self._waited(since_ns, t_ns))
        self._shared_ns = max(self._shared_ns, wait_ns)

    def _add(self, delta: Delta, t_ns: int) -> None:
        t = self._t
        log = t.events
        tokens = delta.tokens
        if delta.verdict is not None:
            self._interventions.add(delta.verdict, self._events_seen, self._tokens.so_far)
        if tokens > 0 or self._tokens.tokenizes:
            tokens = self._tokens.add(delta)
        if len(log.classes) < EVENTS_MAX:
            flags = (OUTPUT if delta.output else 0) | (BLANK if delta.blank else 0)
            log.add(t_ns, delta.event_class, delta.size, tokens, flags)
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
                # Of several choices the first one's words are read: mixed up they would be nobody's.
                if delta.event_class in _SPOKEN and delta.choices[0] == 0:
                    if self._interventions.reading:
                        self._interventions.read(delta.text)
                    if self._texts is not None:
                        self._keep_text(delta.text)
            else:
                self._tokens.textless += len(delta.choices)
        elif delta.choices:
            self._tokens.chunks += len(delta.choices)  # a marker: no text, and yet generated
        if delta.finish_reason is not None:
            reason = delta.finish_reason
            self._x.finish_reason = reason if is_reason(reason) else "other"
        if delta.server_times or delta.server_clock_ns >= 0:
            self._server.read_event(self._events_seen - 1, delta)
        if delta.counts is not None:
            self._tokens.count(delta.counts, total=not delta.usage_running)
            self._x.usage = delta.usage
            if delta.usage is not None and delta.size > _USAGE_BYTES_MAX:
                self._x.usage = figures_of(delta.usage)
        if delta.model is not None and self._model is None:
            self._model = bounded("response_model", delta.model)
        if delta.error_type is not None:
            self._error_type = delta.error_type[: WORD_CHARS_MAX + 1]  # a longer one is no word
        if delta.done:
            self._done = True
        if delta.retry:
            self._x.retries += 1
        if not delta.parsed and self._is_expected():
            self._x.unparsed_events += 1

    def _keep_text(self, text: str) -> None:
        assert self._texts is not None
        if self._text_chars < _TEXT_CHARS_MAX:
            self._text_chars += len(text)
            self._texts.append(text)

    def _expect(self, repetition: Repetition) -> None:
        """Let `token_run` collect the next reads: an event came, alone in its read, that may come again with
        another text. No layer below holds pending bytes."""
        chunked = self._dechunk is not None
        if repetition is not self._repetition or self._run is None:
            self._repetition = repetition
            self._run = make_token_run(repetition, chunked=chunked, keeps_texts=False)
            self._set_keeps_texts()
        if self._dechunk is None or self._dechunk.between:
            self.token_run = self._run

    def _expect_nothing(self) -> None:
        self._log_run()
        self.token_run = None

    def _set_keeps_texts(self) -> None:
        """Keep texts in the run only as long as somebody reads them. The run is empty."""
        if self._run is not None and self._repetition is not None:
            read = self._interventions.reading or self._texts is not None
            self._run.keeps_texts = self._tokens.tokenizes or (
                read and _is_first_content(self._repetition.delta)
            )

    def _log_run(self) -> None:
        run, repetition, answer = self._run, self._repetition, self._answer
        if not run or repetition is None or answer is None:
            return
        times, added_ns, sizes, blanks, texts = run.take()
        x, t, added, delta, n = self._x, self._t, self._x.added, repetition.delta, len(times)
        longest_ns = max(added_ns)
        if added.chunk_max_ns is None or longest_ns > added.chunk_max_ns:
            added.chunk_max_ns = longest_ns
        added.chunks_ns.extend(added_ns[: max(0, EVENTS_MAX - x.reads)])
        x.reads += n
        self._last_read_ns = self._emptied_ns = t.last_token_ns = times[-1]
        self._tokens.chunks += n
        answer.passed(sum(sizes))
        flags = blanks.translate(_FLAGS) if delta.event_class is _CONTENT else bytes((OUTPUT,)) * n
        tokens = array("l", map(self._tokens.tokenize, texts)) if self._tokens.tokenizes else _UNTOLD * n
        room = max(0, EVENTS_MAX - len(t.events))
        classes = bytes((delta.event_class,)) * n
        t.events.add_many(times[:room], classes[:room], sizes[:room], tokens[:room], flags[:room])
        x.unlogged_events += max(0, n - room)
        if texts and _is_first_content(delta):
            for text in texts:
                if not self._interventions.reading:
                    break
                self._interventions.read(text)
            if self._texts is not None:
                for text in texts:
                    self._keep_text(text)
        self._set_keeps_texts()

    @property
    def _events_seen(self) -> int:
        return len(self._t.events.classes) + self._x.unlogged_events

    def _is_expected(self) -> bool:
        """Whether this answer ought to be understood: other people's files need not be."""
        streamed = self._answer is not None and self._answer.streamed
        return streamed or self._lost is not None or self._x.endpoint is not None

    def _close(self, *, whole: bool) -> None:
        self._expect_nothing()
        if self._closed:
            return
        self._closed = True
        if self._dechunk is not None and self._dechunk.trailers:
            self._server.read_trailers(self._dechunk.trailers)
        answer = self._answer
        if answer is None:
            self._x.stream = self._request.wants_stream and self._x.status is None
            return
        for delta in answer.close(whole=whole):
            self._add(delta, self._last_read_ns)
        self._x.unparsed_events += answer.skipped
        self._x.stream, self._x.padded = answer.streamed, bool(answer.padded)
        self._x.dialect, self._x.answer_id = answer.dialect.name, answer.dialect.answer_id


def _is_first_content(delta: Delta) -> bool:
    return delta.event_class is _CONTENT and delta.choices[0] == 0
