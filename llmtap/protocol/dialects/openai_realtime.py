"""OpenAI Realtime: the events of a session, each a message of a WebSocket.

A session holds any number of responses. They share the one exchange of its tunnel: their events are timed
there, its tokens are the sum of theirs, and its finish reason and usage are those of the last. A request that
the server cannot follow is an error event and the session goes on, so it is no failure of the exchange.

Source: OpenAI's Realtime API reference (server events); openai/openai-python types/realtime.
"""

from typing import Any, Final

from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, UsageCounts
from llmtap.protocol.dialects.native_shapes import Fields, failure_in, is_object, kind_of
from llmtap.protocol.dialects.openai_responses import ResponseEvent, read_response_event
from llmtap.protocol.dialects.openai_shapes import read_frame, read_json, sum_counts, unknown
from llmtap.protocol.sse import SseEvent

__all__ = ["OpenAIRealtime"]


class _Event(ResponseEvent, gc=False):
    session: Any = None


_fields: Final = Fields(_Event)
_FAMILIES: Final = frozenset(
    {
        "session", "transcription_session", "conversation", "input_audio_buffer", "output_audio_buffer",
        "rate_limits", "mcp_list_tools",
    }
)  # fmt: skip
"""First words of the types of events that say nothing of a response."""
_RECOVERABLE: Final = "invalid_request_error"


class OpenAIRealtime:
    """Reads one session; an event is a message."""

    name = "openai.realtime"

    __slots__ = ("_counts", "_model")

    def __init__(self) -> None:
        self._model: str | None = None
        self._counts = UsageCounts()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        """How sure a first JSON value makes us that the answer is ours; see `registry.py`."""
        kind = value.get("type")
        if not isinstance(kind, str):
            return 0
        if kind.partition(".")[0] in _FAMILIES and "." in kind:
            return 3
        # A session begins with itself; who comes late has the path to go by.
        ours = kind == "error" or kind.startswith("response.")
        return 4 if ours and path.endswith("/realtime") else 0

    def read_event(self, event: SseEvent) -> Delta:
        """What one message says. Never raises."""
        data = event.data
        if data is None or not is_object(data):
            return read_frame(event)
        said = _fields.read(data)
        if said is None:
            return unknown(event.event)
        kind = kind_of(said.type, event)
        delta = read_response_event(kind, said)
        if delta is None:
            return self._read_other(kind, said.session, data)
        if delta.counts is not None:
            self._counts = delta.counts = sum_counts([self._counts, delta.counts])
        return delta

    def read_body(self, body: bytes) -> Delta:
        """What a JSON answer in place of a session says: a failure. Never raises."""
        return failure_in(read_json(body))

    def _read_other(self, kind: str, session: Any, data: bytes) -> Delta:
        if kind.partition(".")[0] not in _FAMILIES:
            delta = failure_in(read_json(data))
            if delta.error_type is not None and _is_recoverable(data):
                delta.error_type = None
            return delta
        delta = Delta(EventClass.METADATA)
        model = session.get("model") if isinstance(session, dict) else None
        if isinstance(model, str) and model and model != self._model:
            self._model = delta.model = model[:MODEL_CHARS_MAX]
        return delta


def _is_recoverable(data: bytes) -> bool:
    value = read_json(data)
    error = value.get("error") if isinstance(value, dict) else None
    return isinstance(error, dict) and error.get("type") == _RECOVERABLE
