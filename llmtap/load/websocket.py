"""Client of OpenAI's Responses and Realtime APIs over WebSocket, as a target of the load generator.

`prompt_sender.py` calls `WebSocketTarget.send_prompt` with each prompt and gets an Exchange; a
`WebSocketSession` is one connection. This module is long because target and session are one subject. A
request is one `response.create` that contains its whole input and belongs to no conversation, so sessions can
be reused. A session serves one request at a time. T_submit is the time of the last byte of a request (IETF
draft, B.1.1). The time to connect comes before it, so only the latencies that are corrected for lateness
contain it.

Source: developers.openai.com api/docs/guides/websocket-mode, responses/websocket-events and realtime server
events.
"""

import asyncio
import base64
import os
import ssl
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, PeerProtocolError
from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.json_types import JsonObject
from llmtap.load.options import BodyOptions, SendingOptions
from llmtap.load.sending import ANSWER_BYTES_MAX, TOO_LONG, Lateness, protocol_of, token_counter
from llmtap.net.listener import failure_text
from llmtap.net.pool import Attempt, Origin, Pool, parse_origin
from llmtap.net.stream import Stream, keep_stamps_on
from llmtap.protocol.http1 import header_value
from llmtap.protocol.http1_response import next_response_head
from llmtap.protocol.websocket import MessageParser, Opcode, WebSocketMessage, accept_key, frame
from llmtap.units import NS_PER_S
from llmtap.workload.prompts.prompt import Prompt

HEAD_BYTES_MAX: Final = 1 << 18
QUIET_NS: Final = 200_000_000
"""A socket is checked after this time without a byte, because the loop possibly misses a reset."""
NORMAL: Final = (1000).to_bytes(2, "big")
"""Status code of a close frame: normal closure (RFC 6455 7.4.1)."""
_ENDS: Final = frozenset(
    f"response.{how}" for how in ("completed", "incomplete", "failed", "cancelled", "done")
)

_SENDING: Final = SendingOptions()
_BODIES: Final = BodyOptions()

mono_ns = SystemClock.mono_ns


class OpeningFailed(Exception):
    """A session could not be opened."""

    def __init__(self, outcome: Outcome, problem: str, status: int | None = None) -> None:
        super().__init__(problem)
        self.outcome = outcome
        self.status = status


class _Error(msgspec.Struct):
    """Error that a server event reports."""

    type: Any = None
    code: Any = None
    event_id: Any = None
    """Id of the request that the error concerns."""


class _Event(msgspec.Struct):
    """The fields of a server event that show the end of an answer."""

    type: str = ""
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class ResponseWait:
    """One request and the wait for its answer."""

    def __init__(self, observer: Observer, request_id: str) -> None:
        self.observer = observer
        """Parses the messages of the response."""
        self.request_id = request_id
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the answer has ended or failed."""
        self.outcome = Outcome.COMPLETE
        self.error: str | None = None
        self.refused: str | None = None
        """Type of an error that the server sent in place of a response; the session stays open."""
        self.status: int | None = 101
        self.submit_ns: int | None = None
        """Time at which the last byte of the request was sent."""
        self.submit_width_ns = 0
        """Uncertainty of `submit_ns` in ns: the submission was at most this time later."""
        self.is_created = False
        """Whether the server has sent `response.created`."""
        self.response_bytes = 0

    def record_submit(self, t_ns: int, began_ns: int, width_ns: int = 0) -> None:
        """Record that the kernel took the last byte at `t_ns`, or up to `width_ns` later."""
        self.submit_ns, self.submit_width_ns = t_ns, width_ns
        self.observer.on_submit(t_ns, t_ns - began_ns)

    def end(self, t_ns: int) -> None:
        if not self.done.done():
            self.observer.response_end(t_ns)
            self.done.set_result(None)

    def fail(self, outcome: Outcome, error: str) -> None:
        if not self.done.done():
            self.outcome, self.error = outcome, error
            self.done.set_result(None)


class WebSocketSession:
    """One WebSocket connection. Call `open`, then `send` and `listen` for each request, one at a time."""

    def __init__(
        self, pool: Pool, upgrade: bytes, key: bytes, sessions: "set[WebSocketSession]", *, realtime: bool
    ) -> None:
        """`upgrade`: head of the opening request, which contains `key`. `sessions`: set from which a closed
        session removes itself. `realtime`: the Realtime API is used, in which the server sends a greeting and
        a response continues after an error."""
        self._realtime = realtime
        """Whether the server speaks OpenAI's Realtime API."""
        self.upgrade = upgrade
        """Head of the opening request."""
        self._pool = pool
        self._key = key
        """Key of the opening request, from which the server computes its answer."""
        self._sessions = sessions
        """Set of all sessions, from which a closed one removes itself."""
        self._connect_attempt: Attempt | None = None
        self._stream: Stream | None = None
        self._opened_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the session is open or could not be opened."""
        self._head: bytes | None = b""
        """Part of the response head that has arrived; None after the head was parsed."""
        self._parser = MessageParser("the server", masked=False)
        self._fed_bytes = 0
        """Bytes given to the parser. Between messages it equals `_whole_bytes`: bytes of whole messages."""
        self._whole_bytes = 0
        self._answer: ResponseWait | None = None
        """Answer that is awaited; None: the session is idle."""
        self._send_began_ns = 0
        self._submit_ns: int | None = None
        self._break_reason: str | None = None
        """Why the request could not be written; None: it was."""
        self._last_activity_ns = 0
        """Time of the latest read, write or check."""

    @property
    def is_reusable(self) -> bool:
        answer = self._answer
        return (
            self._stream is not None
            and self._opened_future.done()
            and self._fed_bytes == self._whole_bytes
            and (answer is None or (answer.done.done() and answer.outcome is Outcome.COMPLETE))
        )

    @property
    def was_used(self) -> bool:
        return self._send_began_ns > 0

    def is_alive(self) -> bool:
        """Whether the session can be reused: the server has neither closed it nor sent data too early."""
        return self._stream is not None and self._stream.is_alive()

    async def open(self) -> None:
        """Connect, upgrade and wait for the server's greeting. Raises OpeningFailed."""
        self._connect_attempt = self._pool.connect(self)
        if self._stream is not None or self._opened_future.done():
            self._connect_attempt = None
        await self._opened_future

    def send(self, data: bytes) -> None:
        """Write a request at once. The caller must call `listen` before the loop reads the socket."""
        assert self._stream is not None
        self._answer = self._submit_ns = self._break_reason = None
        self._send_began_ns = self._last_activity_ns = mono_ns()
        try:
            if self._stream.write(data):
                self._submit_ns = mono_ns()
        except OSError as exc:
            self._break_reason = f"the request could not be written ({failure_text(exc)})"

    def listen(self, answer: ResponseWait) -> None:
        """Assign all data from now on to `answer`."""
        self._answer = answer
        answer.observer.begin_response(b"", self._send_began_ns, 0)
        if self._submit_ns is not None:
            # Use the time before the write, as over HTTP: a local server can answer during the write.
            answer.record_submit(
                self._send_began_ns, self._send_began_ns, self._submit_ns - self._send_began_ns
            )
        if self._break_reason is not None:
            self._end(Outcome.UPSTREAM_RESET, self._break_reason)

    def cancel_opening(self) -> None:
        self._fail_opening(
            Outcome.CLIENT_CANCELLED, "llmtap ended the run before the whole answer arrived: see --drain"
        )

    def check_connection(self, now_ns: int) -> None:
        """Check, after a quiet time, whether the connection still exists."""
        if self._stream is not None and now_ns - self._last_activity_ns > QUIET_NS:
            self._last_activity_ns = now_ns
            self._stream.look_again()

    def start_close(self) -> None:
        if self._answer is not None:
            self._answer.fail(
                Outcome.CLIENT_CANCELLED, "llmtap ended the run before the whole answer arrived: see --drain"
            )
        self._send_frame(Opcode.CLOSE, NORMAL)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self.drop()

    def drop(self) -> None:
        self._sessions.discard(self)
        if self._connect_attempt is not None:
            self._connect_attempt.cancel()
            self._connect_attempt = None
        stream, self._stream = self._stream, None
        if stream is not None and not stream.closed:
            stream.abort()

    # Methods of the protocol `Waiter`: they report on the connection that is being opened.

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self._connect_attempt = None
        self._stream = stream
        try:
            stream.write(self.upgrade)
        except OSError as exc:
            self._on_lost(exc)

    def on_connect_failed(self, error: OSError) -> None:
        self._connect_attempt = None
        self._fail_opening(Outcome.UPSTREAM_ERROR, f"cannot connect ({failure_text(error)})")

    def _fail_opening(self, outcome: Outcome, problem: str, status: int | None = None) -> None:
        if not self._opened_future.done():
            self._opened_future.set_exception(OpeningFailed(outcome, problem, status))

    # Methods of the protocol `Handler`: they report on the open connection.

    def on_data(self, data: bytes, t_ns: int) -> None:
        """Parse the response head, then messages for the current answer; `t_ns`: arrival of the data."""
        self._last_activity_ns = t_ns
        if self._head is not None:
            data = self._read_head(data)
        if not data:
            return
        answer = self._answer
        if answer is not None and not answer.done.done():
            answer.response_bytes += len(data)
            if answer.response_bytes > ANSWER_BYTES_MAX:
                self._end(Outcome.UPSTREAM_ERROR, TOO_LONG)
                return
        self._fed_bytes += len(data)
        for message in self._parser.feed(data):
            self._whole_bytes += message.size
            self._on_message(message, t_ns)
        if self._parser.broken is not None:
            self._end(Outcome.UPSTREAM_ERROR, f"the server violated RFC 6455: {self._parser.broken}")

    def on_eof(self) -> None:
        self._on_lost(None)

    def on_lost(self, error: OSError | None) -> None:
        self._on_lost(error)

    def on_drained(self) -> None:
        if self._answer is not None and self._answer.submit_ns is None:
            self._answer.record_submit(mono_ns(), self._send_began_ns)

    def _read_head(self, data: bytes) -> bytes:
        """Return the data after the response head; empty until the head is complete."""
        assert self._head is not None
        data = self._head + data
        try:
            next_head = next_response_head(data, b"GET", bytes_max=HEAD_BYTES_MAX, fields_max=HEAD_BYTES_MAX)
        except PeerProtocolError as exc:
            self._head = None
            self._fail_opening(Outcome.UPSTREAM_ERROR, f"the server violated HTTP: {exc}")
            return b""
        self._head = data if next_head is None else None
        if next_head is None:
            return b""
        head, _, end = next_head
        if head.status != 101:
            problem = f"the server refused to open a WebSocket: status {head.status}"
            self._fail_opening(Outcome.UPSTREAM_ERROR, problem, head.status)
            return b""
        # RFC 6455 4.1: a wrong key means that the server did not understand the upgrade.
        if header_value(head.headers, b"sec-websocket-accept") != accept_key(self._key):
            self._fail_opening(
                Outcome.UPSTREAM_ERROR, "the server's Sec-WebSocket-Accept does not match the key sent to it"
            )
            return b""
        if not self._realtime and not self._opened_future.done():
            self._opened_future.set_result(None)
        return data[end:]

    def _on_message(self, message: WebSocketMessage, t_ns: int) -> None:
        payload = message.payload or b""
        match message.opcode:
            case Opcode.PING:
                # RFC 6455 5.5.3: not every ping needs an answer. Send none while data waits to be written, or
                # a server that does not read would make the buffer grow.
                if self._stream is not None and not self._stream.pending:
                    self._send_frame(Opcode.PONG, payload)
            case Opcode.CLOSE:
                # RFC 6455 5.5.1: answer a close frame with the same status code.
                self._send_frame(Opcode.CLOSE, payload[:2])
                self._on_lost(None)
            case Opcode.TEXT:
                if not self._opened_future.done():
                    self._opened_future.set_result(None)  # The first message shows that the session is open.
                elif self._answer is not None and not self._answer.done.done():
                    self._answer.observer.message(message, t_ns, 0)
                    self._read_event(self._answer, payload, t_ns)

    def _send_frame(self, opcode: Opcode, payload: bytes) -> None:
        if self._stream is not None and not self._stream.closed:
            try:
                self._stream.write(frame(payload, opcode, key=os.urandom(4)))
            except OSError:
                pass  # The next read fails as well and reports the error.

    def _read_event(self, answer: ResponseWait, payload: bytes, t_ns: int) -> None:
        try:
            event = _decode_event(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # The observer counts the unparsed message.
        match event.type:
            case "response.created":
                answer.is_created = True
            case kind if kind in _ENDS:
                answer.end(t_ns)
            case "error" if not answer.is_created or not self._realtime:
                error = event.error or _Error()
                if error.event_id in (None, answer.request_id):
                    answer.refused = str(error.code or error.type or "error")[:64]
                    answer.end(t_ns)

    def _on_lost(self, error: OSError | None) -> None:
        how = "closed" if error is None else "reset"
        answer = self._answer
        if answer is not None and answer.response_bytes:
            outcome = Outcome.TRUNCATED if error is None else Outcome.UPSTREAM_RESET
            self._end(outcome, f"the server {how} the connection in the middle of its answer")
        else:
            self._end(Outcome.UPSTREAM_RESET, f"the server {how} the connection without an answer")

    def _end(self, outcome: Outcome, problem: str) -> None:
        self._fail_opening(outcome, problem)
        if self._answer is not None:
            self._answer.fail(outcome, problem)
        self.drop()


_PATH: Final = "/v1/realtime"
SWEEP_S: Final = 0.1
"""Time between two checks of the sessions without traffic."""

_encode = msgspec.json.Encoder().encode


class WebSocketTarget:
    """Sends requests to one server over WebSockets. Create, use and close it within one running loop."""

    def __init__(
        self,
        url: str,
        options: SendingOptions = _SENDING,
        bodies: BodyOptions = _BODIES,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        exact_output: bool = False,
        tls: ssl.SSLContext | None = None,
        name: str = "load",
    ) -> None:
        """`url`: `ws://host:port[/path][?model=NAME]`. If the path ends in `/responses`, the API
        is Responses, else Realtime; without a path, the path of Realtime is used. `headers` are
        sent only with the upgrade. `exact_output`: also send `ignore_eos` and `min_tokens`.
        Raises ConfigError naming `--target`."""
        origin, path, named = parse_websocket_url(url)
        self.model = bodies.model or named
        if origin.tls and tls is None:
            raise ConfigError("--target", "a wss:// target needs a TLS context", "pass one as `tls`")
        kernel = options.clock == "kernel" and not origin.tls
        self.clock = "kernel" if kernel else "mono"
        self._realtime = protocol_of(url) == "realtime"
        """Whether the server speaks OpenAI's Realtime API."""
        query = f"?{urlencode({'model': self.model})}" if self.model and self._realtime else ""
        self._path = (path + query).encode()
        self._authority = origin.authority
        """Host and port of the URL, for the `Host` field."""
        self._headers = list(headers)
        self._exact_output = exact_output
        """Whether to request exactly the planned number of tokens."""
        self._count_tokens = None if bodies.tokenizer is None else token_counter(bodies.tokenizer)
        self._timeout_ns = options.timeout
        self._name = name
        """Name of the sending process, a part of the requests' ids."""
        self._request_count = 0
        loop = asyncio.get_running_loop()
        self.lateness = Lateness(loop, kernel=kernel)
        self._stamp_socket = keep_stamps_on() if kernel else None
        """Socket that keeps the kernel's timestamps switched on; None: they are not used."""
        self._pool = Pool(
            loop,
            origin,
            self.lateness.timebase,
            clock=self.clock,
            idle_max=0,
            idle_ns=0,
            connect_ns=options.connect_timeout,
            tls=tls,
        )
        self._idle_sessions: list[WebSocketSession] = []
        self._sessions: set[WebSocketSession] = set()
        self._open_requests: dict[str, tuple[WebSocketSession, ResponseWait]] = {}
        """By id of a request in flight: its session and its answer."""
        self.connects = 0
        self.reuses = 0
        self._timer = loop.call_later(SWEEP_S, self._sweep)

    async def open(self, sessions: int) -> int:
        fresh = [self._new_session() for _ in range(sessions - len(self._idle_sessions))]
        done = await asyncio.gather(*(one.open() for one in fresh), return_exceptions=True)
        for one, failed in zip(fresh, done, strict=True):
            if failed is None:
                self._idle_sessions.append(one)
            else:
                one.drop()  # Requests will connect again, and report the error.
        return len(self._idle_sessions)

    async def send_prompt(
        self, prompt: Prompt, output_tokens: int, scheduled_ns: int | None, request_id: str
    ) -> Exchange:
        """Send one request and return its Exchange. Raises ConfigError for a prompt of token ids."""
        self._request_count += 1
        message = self._request_message(prompt, output_tokens, request_id)
        data = frame(message, key=os.urandom(4))
        began_ns = mono_ns()
        session = self._take_idle_session()
        fresh = session is None
        if session is None:
            session = self._new_session()
        else:
            self.reuses += session.was_used
            session.send(data)
        observer = Observer(
            self._name,
            self._request_count,
            began_ns,
            self.lateness.timebase.anchor.to_wall_ns(began_ns),
            session.upgrade,
            self.clock,
            count_tokens=self._count_tokens,
            longest_wait=self.lateness.longest_wait,
        )
        observer.request_end(began_ns)
        answer = ResponseWait(observer, request_id)
        self._open_requests[request_id] = (session, answer)
        try:
            async with asyncio.timeout(self._timeout_ns / NS_PER_S):
                if fresh:
                    await session.open()
                    session.send(data)
                session.listen(answer)
                await asyncio.shield(answer.done)
        except OpeningFailed as exc:
            answer.fail(exc.outcome, str(exc))
            answer.status = exc.status
        except TimeoutError:
            what = "accept a connection" if answer.submit_ns is None else "end its answer"
            answer.fail(Outcome.UPSTREAM_TIMEOUT, f"the server did not {what} within --timeout")
        finally:
            del self._open_requests[request_id]
            if session.is_reusable:
                self._idle_sessions.append(session)
            else:
                session.drop()
        x = self._finish_exchange(answer, began_ns, len(data) + (len(session.upgrade) if fresh else 0))
        if scheduled_ns is not None:
            x.scheduled_ns, x.dispatch_late_ns = scheduled_ns, began_ns - scheduled_ns
        return x

    def cancel(self, request_id: str) -> None:
        if request_id in self._open_requests:
            session, answer = self._open_requests[request_id]
            answer.fail(
                Outcome.CLIENT_CANCELLED, "llmtap ended the run before the whole answer arrived: see --drain"
            )
            session.cancel_opening()

    async def close(self) -> None:
        for session in list(self._sessions):
            session.start_close()
        self._timer.cancel()
        self._pool.close()
        self.lateness.close()
        if self._stamp_socket is not None:
            self._stamp_socket.close()

    def _sweep(self) -> None:
        """Regularly check the connections of all sessions."""
        now_ns = mono_ns()
        for session in list(self._sessions):
            session.check_connection(now_ns)
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _finish_exchange(self, answer: ResponseWait, began_ns: int, request_bytes: int) -> Exchange:
        x = answer.observer.finish(
            None,
            answer.outcome.value,
            answer.status,
            answer.error,
            0,
            self.lateness.worst_since(began_ns),
            request_bytes,
            answer.response_bytes,
        )
        if answer.refused is not None and x.outcome in (Outcome.COMPLETE, Outcome.TRUNCATED):
            x.outcome = Outcome.UPSTREAM_ERROR
            x.error = f"upstream sent an error in place of a response ({answer.refused})"
        x.uncertainty_ns = max(x.uncertainty_ns, answer.submit_width_ns)
        x.ttft_uncertainty_ns = max(x.ttft_uncertainty_ns, answer.submit_width_ns)
        x.request_id, x.anchor = answer.request_id, self.lateness.timebase.steps
        x.model = self.model or x.response_model
        x.stream = True
        x.timeline.submit_ns = answer.submit_ns
        if x.tokens.output is None:
            chunks = sum(flags & OUTPUT > 0 for flags in x.timeline.events.flags)
            if chunks:
                x.tokens.output, x.tokens.source = chunks, TokenSource.CHUNKS
        return x

    def _take_idle_session(self) -> WebSocketSession | None:
        while self._idle_sessions:
            session = self._idle_sessions.pop()
            if session.is_reusable and session.is_alive():
                return session
            session.drop()
        return None

    def _new_session(self) -> WebSocketSession:
        key = base64.b64encode(os.urandom(16))
        lines = [
            b"GET " + self._path + b" HTTP/1.1",
            b"Host: " + self._authority,
            b"Upgrade: websocket",
            b"Connection: Upgrade",
            b"Sec-WebSocket-Version: 13",
            b"Sec-WebSocket-Key: " + key,
        ]
        lines += [name + b": " + value for name, value in self._headers]
        self.connects += 1
        upgrade = b"\r\n".join((*lines, b"", b""))
        session = WebSocketSession(self._pool, upgrade, key, self._sessions, realtime=self._realtime)
        self._sessions.add(session)
        return session

    def _request_message(self, prompt: Prompt, output_tokens: int, request_id: str) -> bytes:
        if prompt.ids:
            raise ConfigError(
                "--target",
                "the prompts are token ids, and a WebSocket target accepts only text",
                "use an http:// target with --endpoint completions",
            )
        messages = [*prompt.history, *((("user", prompt.text),) if prompt.text else ())]
        response: JsonObject = {"input": _message_items(messages), "max_output_tokens": max(1, output_tokens)}
        if prompt.system:
            response["instructions"] = prompt.system
        if self._exact_output:
            response["ignore_eos"] = True
        if not self._realtime:
            model = {"model": self.model} if self.model else {}
            return _encode({"type": "response.create", **model, **response})
        if self._exact_output:
            response["min_tokens"] = max(1, output_tokens)
        response |= {"conversation": "none", "output_modalities": ["text"]}
        return _encode({"type": "response.create", "event_id": request_id, "response": response})


def parse_websocket_url(url: str) -> tuple[Origin, str, str | None]:
    """Return origin, path and model of `ws://host:port[/path][?model=NAME]`, or raise ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ConfigError(
            "--target", f"expected the URL of a WebSocket, got {url!r}", "such as ws://127.0.0.1:8000"
        )
    scheme = "https" if parts.scheme == "wss" else "http"
    origin = parse_origin(urlunsplit((scheme, parts.netloc, "", "", "")), "--target")
    return origin, parts.path.rstrip("/") or _PATH, next(iter(parse_qs(parts.query).get("model", ())), None)


def _message_items(messages: Sequence[tuple[str, str]]) -> list[JsonObject]:
    return [
        {
            "type": "message",
            "role": role,
            "content": [{"type": "output_text" if role == "assistant" else "input_text", "text": text}],
        }
        for role, text in messages
    ]
