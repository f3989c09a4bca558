"""Read OpenAI's Responses and Realtime APIs as Deltas: named events, and whole responses.

Each text comes twice: in pieces, and whole in an event that ends the text. The latter counts as metadata, so
that no text counts twice. There is no `[DONE]`.

Source: openai/openai-python types/responses, types/realtime.
"""

from collections.abc import Iterator
from typing import Any, Final

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Delta, EventClass, TokenSource, Verdict
from llmtap.protocol.dialects import openai_shapes, shapes
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import OUTPUT, azure_verdict, error_verdict, moderation_verdict, refusal_verdict

_TEXTS: Final = {
    f"response.{name}.delta": kind
    for kind, names in (
        (EventClass.CONTENT, ("output_text", "text", "content_part")),
        (
            EventClass.REASONING,
            (
                "reasoning_summary_text",
                "reasoning_text",
                "reasoning_summary",
                "reasoning",
            ),
        ),
        (EventClass.REFUSAL, ("refusal",)),
        (
            EventClass.TOOL_CALL,
            (
                "function_call_arguments",
                "custom_tool_call_input",
                "mcp_call_arguments",
                "mcp_call.arguments",
                "code_interpreter_call_code",
                "shell_call_command",
                "apply_patch_call_operation_diff",
            ),
        ),
    )
    for name in names
}
_SOUNDS: Final = frozenset(
    f"response.{name}.delta"
    for name in ("audio", "output_audio", "audio.transcript", "audio_transcript", "output_audio_transcript")
)
_OVER: Final = frozenset({"completed", "incomplete", "failed", "cancelled"})
_ENDS: Final = frozenset(f"response.{status}" for status in (*_OVER, "done"))
_KEEPALIVES: Final = ("keepalive", "ping")
_SESSION_EVENTS: Final = frozenset(
    f"{family}.{name}"
    for family, names in (
        ("session", ("created", "updated")),
        ("transcription_session", ("created", "updated")),
        ("conversation", ("created",)),
        ("conversation.item", ("created", "added", "done", "deleted", "retrieved", "truncated")),
        ("conversation.item.input_audio_transcription", ("delta", "completed", "failed", "segment")),
        (
            "input_audio_buffer",
            (
                "committed",
                "cleared",
                "speech_started",
                "speech_stopped",
                "timeout_triggered",
                "dtmf_event_received",
            ),
        ),
        ("output_audio_buffer", ("started", "stopped", "cleared")),
        ("mcp_list_tools", ("in_progress", "completed", "failed")),
        ("rate_limits", ("updated",)),
    )
    for name in names
)
"""Events of a Realtime session that do not belong to a response."""
_RECOVERABLE: Final = "invalid_request_error"
_PARTS: Final = {
    "output_text": ("text", EventClass.CONTENT),
    "refusal": ("refusal", EventClass.REFUSAL),
    "summary_text": ("text", EventClass.REASONING),
    "reasoning_text": ("text", EventClass.REASONING),
}


_PLACES: Final = frozenset({"sequence_number", "response", "response_id", "item", "item_id", "output_index"})


class OpenAIResponses(shapes.ObjectReader):
    """Reader of the Responses API."""

    name = "openai.responses"
    end_certain = True
    names_read: Final = frozenset(
        {"type", "delta", "logprobs", "item", "response", "command", "content_filters"}
    )

    __slots__ = ("_has_output", "answer_id")

    def __init__(self) -> None:
        super().__init__()
        self.answer_id: str | None = None
        """Id of the answer, which the next request can name; None until it is known."""
        self._has_output = False
        """Whether an event has had output."""

    @staticmethod
    def claim(value: JsonObject, path: str) -> int:
        """Return how certainly an object is of this dialect (`registry.Dialect.claim`)."""
        kind = value.get("type")
        if value.get("object") == "response":
            return 3
        if shapes.text_of(kind).startswith("response."):
            # Other APIs use such names, too, but without the members that show the place in a response.
            return 2 if _PLACES.isdisjoint(value) else 3
        failed = kind == "error" or "error" in value or kind in _KEEPALIVES
        return int(failed and path.endswith("/responses"))

    def _read(self, value: JsonObject, event: SseEvent) -> Delta:
        kind = shapes.kind_of(value, event)
        delta = _read_response_event(kind, value)
        if delta is None:
            if kind in _KEEPALIVES:
                return Delta(EventClass.KEEPALIVE)
            return shapes.failure_in(value, event.event)
        response = value["response"] if isinstance(value.get("response"), dict) else None
        if not delta.done:
            _add_filters(delta, value.get("content_filters", (response or {}).get("content_filters")))
        if delta.output:
            self._has_output = True
            delta.repeatable = kind in _TEXTS and delta.tokens < 0 and delta.verdict is None
        elif response is not None:
            self._set_model(delta, response.get("model"))
            now = _response_id(response)
            delta.retry = kind == "response.created" and self._has_output and now != self.answer_id
            self.answer_id = now or self.answer_id
        return delta

    def read_body(self, body: bytes) -> Delta:
        value = openai_shapes.read_json(body)
        if not isinstance(value, dict) or value.get("object") != "response":
            return shapes.failure_in(value)
        status = shapes.text_of(value.get("status"))
        delta = _read_end(value, status if status in _OVER else "", list(_output_pieces(value.get("output"))))
        if delta.refusal and delta.verdict is None:
            delta.verdict = refusal_verdict("content.refusal")
        self._set_model(delta, value.get("model"))
        self.answer_id = _response_id(value)
        return delta


class OpenAIRealtime(shapes.ObjectReader):
    """Reader of the events of one response in a session. The session continues after an
    `invalid_request_error`, so this error is no failure of the exchange."""

    name = "openai.realtime"
    claim_max = 4
    end_certain = True

    __slots__ = ()

    @staticmethod
    def claim(value: JsonObject, path: str) -> int:
        """Return how certainly an object is of this dialect (`registry.Dialect.claim`)."""
        kind = shapes.text_of(value.get("type"))
        if path.endswith("/realtime"):
            known = kind in _SESSION_EVENTS or kind == "error" or kind.startswith("response.")
            return 4 if known else int("error" in value)
        # Other APIs have events with the same names, so the claim is lower on another path.
        return 2 if kind in _SESSION_EVENTS else 0

    def _read(self, value: JsonObject, event: SseEvent) -> Delta:
        kind = shapes.kind_of(value, event)
        delta = _read_response_event(kind, value)
        if delta is not None:
            return delta
        if kind in _SESSION_EVENTS:
            delta, session = Delta(EventClass.METADATA), value.get("session")
            self._set_model(delta, session.get("model") if isinstance(session, dict) else None)
            return delta
        delta, error = shapes.failure_in(value), value.get("error")
        if isinstance(error, dict) and error.get("type") == _RECOVERABLE:
            delta.error_type = None
        return delta

    def read_body(self, body: bytes) -> Delta:
        # A JSON body instead of a session can only be a failure.
        return shapes.failure_in(openai_shapes.read_json(body))


def _response_id(response: JsonObject) -> str | None:
    return shapes.text_of(response.get("id"))[: shapes.ID_CHARS_MAX] or None


def _read_response_event(kind: str, value: JsonObject) -> Delta | None:
    """Return the Delta of an event whose type (`kind`) begins with `response.`; None for other events."""
    if not kind.startswith("response."):
        return None
    if kind in _TEXTS:
        return _read_text(kind, _TEXTS[kind], value)
    if kind in _SOUNDS:
        if not value.get("delta"):
            return Delta(EventClass.METADATA)
        spoken = "" if kind.endswith("audio.delta") else shapes.text_of(value["delta"])
        return shapes.piece(EventClass.CONTENT, spoken, audio=True)
    if kind == "response.output_item.added":
        return _read_item(value.get("item"))
    if kind in _ENDS:
        response = value["response"] if isinstance(value.get("response"), dict) else {}
        status = kind.removeprefix("response.")
        if status == "done":
            status = shapes.text_of(response.get("status")) or "completed"
        return _read_end(response, status, [], done=True)
    if kind == "response.shell_call_command.added":
        command = shapes.text_of(value.get("command"))
        return shapes.piece(EventClass.TOOL_CALL, command) if command else Delta(EventClass.METADATA)
    if kind.endswith(".delta") and ("_arguments" in kind or ("_call" in kind and "output" not in kind)):
        # The arguments of a call are output, because the model writes them; results of tools are not.
        return _read_text(kind, EventClass.TOOL_CALL, value)
    delta = f"{kind.rpartition('.')[0]}.delta"
    return Delta(
        EventClass.METADATA,
        parsed=delta in _TEXTS or delta in _SOUNDS or not _PLACES.isdisjoint(value),
    )


def _add_filters(delta: Delta, filters: Any) -> None:
    """Add the verdict of Azure's filters in an event before the end of a response."""
    verdict = azure_verdict(filters)
    if verdict is not None:
        delta.verdict = delta.verdict or verdict
        if verdict.kind is not None and not delta.output:
            delta.also = (delta.event_class, *delta.also)
            delta.event_class = EventClass.GUARDRAIL


def _read_text(kind: str, known: EventClass, value: JsonObject) -> Delta:
    """Read an event with a piece of text. `known`: class of its kind of event."""
    text, logprobs = value.get("delta"), value.get("logprobs")
    text = shapes.text_of(text.get("text") if isinstance(text, dict) else text)
    if not text:
        return Delta(known if known is EventClass.TOOL_CALL else EventClass.METADATA)
    delta = shapes.piece(known, text)
    if logprobs and isinstance(logprobs, list):
        delta.tokens, delta.token_source = len(logprobs), TokenSource.LOGPROBS
    if known is EventClass.REFUSAL:
        delta.verdict = refusal_verdict(kind)
    return delta


def _read_item(item: Any) -> Delta:
    if not isinstance(item, dict):
        return Delta(EventClass.METADATA, parsed=False)
    kind = shapes.text_of(item.get("type"))
    if not kind.endswith("_call"):
        return Delta(EventClass.ROLE if kind == "message" else EventClass.METADATA)
    written = _written_text(item)
    if item.get("name") or written:
        return shapes.piece(EventClass.TOOL_CALL, written)
    return Delta(EventClass.TOOL_CALL)  # The call of a built-in tool has no name.


def _written_text(item: JsonObject) -> str:
    """Return the text that the model wrote in a call: arguments, input, code, a patch, or shell commands."""
    operation, action = item.get("operation"), item.get("action")
    diff = operation.get("diff") if isinstance(operation, dict) else None
    for part in (item.get("arguments"), item.get("input"), item.get("code"), diff):
        if text := shapes.text_of(part):
            return text
    commands = action.get("commands", action.get("command")) if isinstance(action, dict) else None
    commands = commands[: openai_shapes.PIECES_MAX] if isinstance(commands, list) else []
    return "\n".join(map(shapes.text_of, commands))


def _read_end(response: JsonObject, status: str, pieces: list[shapes.Piece], *, done: bool = False) -> Delta:
    """Return the Delta of the end of a response, with its pieces. The finish reason is the status, or
    `incomplete:REASON`. `done`: the response is in the event that ends a stream."""
    beside = [EventClass.DONE] if done else []
    verdict: Verdict | None = None
    error, details = response.get("error"), response.get("incomplete_details")
    if not isinstance(details, dict):
        details = response.get("status_details")  # In Realtime, it has the error and the incomplete details.
        details = details if isinstance(details, dict) else {}
        error = error or details.get("error")
    reason = shapes.text_of(details.get("reason"))
    failed = status == "failed" or bool(error)
    if failed:
        beside.append(EventClass.ERROR)
        verdict = error_verdict({"error": error})
        if verdict is not None:
            verdict.signal, verdict.path = f"response.{verdict.signal}", None
    elif reason == "content_filter":
        verdict = Verdict("incomplete_details.reason", OUTPUT, "blocked", "output", value=reason)
    filter_verdict = azure_verdict(response.get("content_filters")) or moderation_verdict(
        response.get("moderation")
    )
    if filter_verdict is not None and filter_verdict.kind is not None:
        if verdict is None:
            verdict = filter_verdict
        elif verdict.signal == "incomplete_details.reason":
            verdict.kind, verdict.phase, verdict.category = (
                filter_verdict.kind,
                filter_verdict.phase,
                filter_verdict.category,
            )
    usage = response.get("usage")
    counts = openai_shapes.read_usage(usage)
    delta = shapes.gather(pieces, beside, verdict=verdict, counts=counts, usage=usage)
    delta.done = done
    delta.verdict = delta.verdict or filter_verdict
    if failed:
        openai_shapes.add_error(delta, error)
    if status:
        delta.finish_reason = f"{status}:{reason}" if reason and status == "incomplete" else status
    return delta


def _output_pieces(items: Any) -> Iterator[shapes.Piece]:
    """Yield the texts of the output items of a whole answer, with their classes."""
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        if shapes.text_of(item.get("type")).endswith("_call") and (item.get("name") or _written_text(item)):
            yield EventClass.TOOL_CALL, _written_text(item)
        for key in ("content", "summary"):
            parts = item.get(key)
            for part in parts if isinstance(parts, list) else ():
                members = part if isinstance(part, dict) else {}
                key, kind = _PARTS.get(shapes.text_of(members.get("type")), ("", EventClass.CONTENT))
                if text := shapes.text_of(members.get(key)):
                    yield kind, text
