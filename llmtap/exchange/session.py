"""Split a WebSocket session of the Responses or Realtime API into one Exchange per response.

The meter's assembler passes the bytes of both directions to a `Session`, which makes one Observer for each
response. An exchange begins with the client's `response.create`; if the server creates a response by itself,
the exchange begins with the latest committed audio or `response.steer`. An exchange ends with the response,
with an error in place of the response, or with the session. An event belongs to the response that it names,
or else to the response on its stream (`stream_id`).

Other sessions are one exchange. To split Gemini Live, a turn would begin at the last `realtimeInput` or at
`clientContent.turnComplete` and end at `serverContent.turnComplete`. OpenAI Live has no mark of an answer.

Source: developers.openai.com api/docs/guides/websocket-mode, responses/websocket-events and realtime server
events.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llmtap.exchange.bounds import Share, bounded
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome
from llmtap.exchange.verdict import no_token_reason
from llmtap.json_types import JsonObject
from llmtap.protocol.dialects.openai_shapes import read_json
from llmtap.protocol.websocket import MessageParser, Opcode, WebSocketMessage

SESSION_ENDPOINTS: Final = frozenset({"responses", "realtime"})
RESPONSES_MAX: Final = 64
"""Maximum number of running and requested responses of a session. Further responses are not measured."""
_CAUSE_BYTES_MAX: Final = 1 << 16
"""Maximum size of a message that is stored because it can cause a response; the content of a larger one is
not stored."""
_ENDS: Final = frozenset({"completed", "incomplete", "failed", "cancelled", "done"})
_CAUSES: Final = ("input_audio_buffer.commit", "response.steer")
"""Types of client messages after which the server can begin a response without a `response.create`."""
_COMMITTED: Final = ("input_audio_buffer.committed", "input_audio_buffer.speech_stopped")
"""Events by which the server reports that it committed the audio itself (voice activity detection)."""
_CUT_OFF: Final = "the session ended before the response did"


@dataclass(slots=True, eq=False)
class _Response:
    """A requested or running response of the session."""

    observer: Observer
    stream_id: str
    """Stream of the session to which the response belongs; empty if there is one stream."""
    event_id: str
    """Event id of the client's message that requested the response; an error can name this id."""
    request_bytes: int
    response_bytes: int = 0
    id: str = ""
    """The server's id of the response; empty until it is known."""
    began: bool = False
    """Whether the server has sent its first event."""


class Session:
    """Responses of one session. `observe(t_ns)` returns a new observer, for an exchange whose request was
    read at `t_ns`. `on_end` is called with each complete exchange, `on_discard` for each discarded one.
    Memory for unfinished messages is taken from `share`. `deflates`: messages can be compressed."""

    __slots__ = (
        "_causes",
        "_client_parser",
        "_is_realtime",
        "_make_observer",
        "_model",
        "_on_discard",
        "_on_end",
        "_open_responses",
        "_server_parser",
        "_share",
        "began",
        "lost",
    )

    def __init__(
        self,
        endpoint: str,
        observe: Callable[[int], Observer],
        on_end: Callable[[Exchange], None],
        on_discard: Callable[[], None],
        share: Share | None = None,
        *,
        deflates: bool = False,
    ) -> None:
        self.began = False
        """Whether the session had a response. If so, the tunnel is not an exchange of its own."""
        self._is_realtime = endpoint == "realtime"
        """Whether the session is of OpenAI's Realtime API, which also responds without a request."""
        self._make_observer = observe
        """Returns the builder of a new exchange."""
        self._on_end = on_end
        self._on_discard = on_discard
        """Function that is called with the number of responses that are not measured."""
        self._share = Share() if share is None else share
        self._client_parser = MessageParser("client", masked=True, deflates=deflates)
        self._server_parser = MessageParser("upstream", masked=False, deflates=deflates)
        self._open_responses: list[_Response] = []
        """Responses that have not ended."""
        self._causes: dict[str, tuple[int, int, bytes]] = {}
        """Latest message of each stream that can cause a response: time of its read, added latency, and
        content."""
        self._model: str | None = None  # model of the session, if the server has named it
        self.lost = False
        """Whether messages are no longer parsed."""

    @property
    def observers(self) -> list[Observer]:
        return [r.observer for r in self._open_responses]

    def client_data(self, data: bytes, t_ns: int, added_ns: int) -> None:
        """Process bytes from the client, read at `t_ns` and written `added_ns` later."""
        for message in () if self.lost else self._client_parser.feed(data):
            event = _read_event(message)
            kind, stream, payload = (
                _text_member(event, "type"),
                _text_member(event, "stream_id"),
                message.payload or b"",
            )
            if kind == "response.create":
                self._begin_response(
                    stream, t_ns, added_ns, payload, _text_member(event, "event_id"), message.size
                )
            elif kind in _CAUSES:
                # `response.steer` belongs to the stream of the response that it names.
                steered = _text_member(event, "previous_response_id")
                named = (r.stream_id for r in self._open_responses if steered and r.id == steered)
                self._store_cause(next(named, stream), t_ns, added_ns, payload)
        self._count_memory()

    def server_data(self, data: bytes, t_ns: int, added_ns: int) -> None:
        """Process bytes from the server, read at `t_ns` and written `added_ns` later."""
        for message in () if self.lost else self._server_parser.feed(data):
            event = _read_event(message)
            kind, stream = _text_member(event, "type"), _text_member(event, "stream_id")
            if kind.startswith("response."):
                self._add_event(event, kind.removeprefix("response."), stream, message, t_ns, added_ns)
            elif kind == "error":
                self._fail_response(event, stream, message, t_ns, added_ns)
            elif kind in _COMMITTED and stream not in self._causes:
                self._store_cause(stream, t_ns, added_ns, b"")
            elif kind.startswith("session."):
                self._model = _text_member(_object_member(event, "session"), "model") or self._model
        self._count_memory()

    @property
    def broken(self) -> str | None:
        """Reason why the messages of one side cannot be parsed; None: they can."""
        return self._client_parser.broken or self._server_parser.broken

    def _count_memory(self) -> None:
        """Count the memory of the unfinished messages. Drop them if the limit of all exchanges is reached."""
        causes = self._causes.values()
        kept_bytes = (
            self._client_parser.kept_bytes
            + self._server_parser.kept_bytes
            + sum(len(cause[2]) for cause in causes)
        )
        if not self._share.resize(kept_bytes):
            self._client_parser.drop()
            self._server_parser.drop()
            self._causes = {stream: (*cause[:2], b"") for stream, cause in self._causes.items()}

    def close(self, delivered_ns: int | None, outcome: str, error: str | None, lag_ns: int = 0) -> None:
        """End all running responses, because the session has ended or its relay has died."""
        self._share.close()
        ended_as = Outcome.TRUNCATED if outcome == Outcome.COMPLETE else Outcome(outcome)
        for response in list(self._open_responses):
            self._end_response(response, delivered_ns, ended_as, error or _CUT_OFF, lag_ns)

    def give_up(self, reason: str) -> None:
        """Stop parsing the messages. The running responses end with the error `reason`."""
        self.lost = True
        self._client_parser.drop()
        self._server_parser.drop()
        self._count_memory()
        for response in self._open_responses:
            response.observer.give_up(reason)

    def abandon(self) -> None:
        """Discard all running responses."""
        self._share.close()
        for response in self._open_responses:
            response.observer.abandon()
            self._on_discard()
        self._open_responses.clear()

    def _store_cause(self, stream: str, t_ns: int, added_ns: int, payload: bytes) -> None:
        """Store the client's event that requests a response, until the response begins."""
        if stream in self._causes or len(self._causes) < RESPONSES_MAX:
            stored = payload if len(payload) <= _CAUSE_BYTES_MAX else b""
            self._causes[stream] = (t_ns, added_ns, stored)

    def _begin_response(
        self, stream: str, t_ns: int, added_ns: int, payload: bytes, event_id: str = "", size: int = 0
    ) -> _Response | None:
        """Begin the exchange of a response; None: too many are open."""
        self._causes.pop(stream, None)
        if len(self._open_responses) >= RESPONSES_MAX:
            return None
        observer = self._make_observer(t_ns)
        observer.begin_response(payload, t_ns, added_ns)
        response = _Response(observer, stream, event_id, size)
        self._open_responses.append(response)
        self.began = True
        return response

    def _response_of(self, event: JsonObject, stream: str) -> _Response | None:
        """Return the response that a message names, else the running response of its stream, else the oldest
        requested response of its stream."""
        name = _text_member(_object_member(event, "response"), "id") or _text_member(event, "response_id")
        response = next((r for r in self._open_responses if name and r.id == name), None)
        if response is not None:
            return response
        others = [
            r for r in self._open_responses if r.stream_id == stream and not (name and r.began and r.id)
        ]
        return next((r for r in others if r.began), others[0] if others else None)

    def _add_event(
        self, event: JsonObject, kind: str, stream: str, message: WebSocketMessage, t_ns: int, added_ns: int
    ) -> None:
        response = None
        if kind == "created":
            response = next((r for r in self._open_responses if r.stream_id == stream and not r.began), None)
            if response is None:
                cause_ns, cause_added_ns, payload = self._causes.get(stream, (t_ns, added_ns, b""))
                response = self._begin_response(stream, cause_ns, cause_added_ns, payload)
            if response is not None:
                response.began = True
                response.id = _text_member(_object_member(event, "response"), "id")
        elif "." not in kind or kind.partition(".")[0] not in ("steer", "inject"):
            response = self._response_of(event, stream)
        if response is None:
            return
        response.response_bytes += message.size
        response.observer.message(message, t_ns, added_ns)
        if kind in _ENDS:
            self._end_response(response, t_ns + added_ns, Outcome.COMPLETE, None, end_ns=t_ns)

    def _fail_response(
        self, event: JsonObject, stream: str, message: WebSocketMessage, t_ns: int, added_ns: int
    ) -> None:
        """End the response that an error belongs to: one that has not begun, which the error replaces, or
        else the running response of a stream of the Responses API. A running response of a Realtime session
        continues after an error."""
        name = _text_member(_object_member(event, "error"), "event_id")
        waiting = [r for r in self._open_responses if not r.began and r.stream_id == stream]
        if name:
            waiting = [r for r in waiting if not r.event_id or r.event_id == name]
        response = waiting[0] if waiting else None
        if response is None and not self._is_realtime:
            response = next((r for r in self._open_responses if r.stream_id == stream), None)
        if response is None:
            return
        response.response_bytes += message.size
        response.observer.message(message, t_ns, added_ns)
        # Pass COMPLETE, so that `judge` decides by the events whether this is a refusal or an error, as for
        # an answer over HTTP.
        self._end_response(response, t_ns + added_ns, Outcome.COMPLETE, None, end_ns=t_ns, failed=True)

    def _end_response(
        self,
        response: _Response,
        delivered_ns: int | None,
        outcome: Outcome,
        error: str | None,
        lag_ns: int = 0,
        *,
        end_ns: int | None = None,
        failed: bool = False,
    ) -> None:
        """Finish the exchange of a response, and pass it on."""
        self._open_responses.remove(response)
        observer = response.observer
        if end_ns is not None:
            observer.response_end(end_ns)
        sizes = (response.request_bytes, response.response_bytes)
        x = observer.finish(delivered_ns, outcome.value, None, error, 0, lag_ns, *sizes)
        if x.model is None and self._model is not None:
            x.model = bounded("model", self._model)
        if x.finish_reason == "cancelled" and x.outcome is not Outcome.UPSTREAM_ERROR:
            # The client cancelled the response, or its user began to speak (`turn_detected`).
            x.outcome = Outcome.CLIENT_CANCELLED
            if x.no_token_reason is not None:
                x.no_token_reason = no_token_reason(x)
        if failed and x.outcome in (Outcome.COMPLETE, Outcome.TRUNCATED):
            x.outcome, x.error = Outcome.UPSTREAM_ERROR, "upstream sent an error in place of a response"
        self._on_end(x)


def _read_event(message: WebSocketMessage) -> JsonObject:
    value = None if message.opcode is not Opcode.TEXT else read_json(message.payload or b"")
    return value if isinstance(value, dict) else {}


def _object_member(message: JsonObject, name: str) -> JsonObject:
    member = message.get(name)
    return member if isinstance(member, dict) else {}


def _text_member(message: JsonObject, name: str) -> str:
    member = message.get(name)
    return member[:128] if isinstance(member, str) else ""
