"""Read OpenAI's Responses and Realtime APIs as Deltas: named events, and whole responses.

Texts come once as deltas and again, whole, in closing events: those are metadata. There is no `[DONE]`.

Source: openai/openai-python types/responses, types/realtime.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import (
    Delta,
    EventClass,
    TokenSource,
    UsageCounts,
    Verdict,
)
from llmtap.protocol.dialects import openai_shapes, shapes
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import OUTPUT, of_content_filters, of_error, of_refusal


class ResponseEvent(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    logprobs: Any = None
    item: Any = None
    response: Any = None
    command: Any = None
    content_filters: Any = None


_TEXTS: Final = {
    "response.output_text.delta": EventClass.CONTENT,
    "response.text.delta": EventClass.CONTENT,
    "response.content_part.delta": EventClass.CONTENT,
    "response.reasoning_summary_text.delta": EventClass.REASONING,
    "response.reasoning_text.delta": EventClass.REASONING,
    "response.reasoning_summary.delta": EventClass.REASONING,
    "response.reasoning.delta": EventClass.REASONING,
    "response.refusal.delta": EventClass.REFUSAL,
    "response.function_call_arguments.delta": EventClass.TOOL_CALL,
    "response.custom_tool_call_input.delta": EventClass.TOOL_CALL,
    "response.mcp_call_arguments.delta": EventClass.TOOL_CALL,
    "response.mcp_call.arguments.delta": EventClass.TOOL_CALL,
    "response.code_interpreter_call_code.delta": EventClass.TOOL_CALL,
    "response.shell_call_command.delta": EventClass.TOOL_CALL,
    "response.apply_patch_call_operation_diff.delta": EventClass.TOOL_CALL,
}
_SOUNDS: Final = frozenset(
    {
        "response.audio.delta", "response.output_audio.delta", "response.audio.transcript.delta",
        "response.audio_transcript.delta", "response.output_audio_transcript.delta",
    }
)  # fmt: skip
_ENDS: Final = frozenset(
    {
        "response.completed", "response.incomplete", "response.failed", "response.cancelled", "response.done",
    }
)  # fmt: skip
_OVER: Final = frozenset({"completed", "incomplete", "failed", "cancelled"})
_KEEPALIVES: Final = ("keepalive", "ping")


class OpenAIResponses(shapes.ObjectReader):
    name = "openai.responses"
    fields = shapes.Fields(ResponseEvent)
    names_read: Final = frozenset(ResponseEvent.__struct_encode_fields__)

    __slots__ = ("_spoken", "answer_id")

    def __init__(self) -> None:
        super().__init__()
        self.answer_id: str | None = None
        self._spoken = False

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("type")
        if value.get("object") == "response" or (isinstance(kind, str) and kind.startswith("response.")):
            return 3
        failed = kind == "error" or "error" in value or kind in _KEEPALIVES
        return int(failed and path.endswith("/responses"))

    def _read(self, said: ResponseEvent, data: bytes, event: SseEvent) -> Delta:
        kind = shapes.kind_of(said.type, event)
        delta = read_response_event(kind, said)
        if delta is None:
            return _read_other(kind, data, event)
        if not delta.done:
            _add_filters(delta, said)
        if delta.output:
            self._spoken = True
            delta.repeatable = kind in _TEXTS and delta.tokens < 0 and delta.verdict is None
        elif isinstance(said.response, dict):
            self._name(delta, said.response.get("model"))
            now = shapes.text_of(said.response.get("id"))[: shapes.ID_CHARS_MAX] or None
            delta.retry = kind == "response.created" and self._spoken and now != self.answer_id
            self.answer_id = now or self.answer_id
        return delta

    def read_body(self, body: bytes) -> Delta:
        value = openai_shapes.read_json(body)
        if not isinstance(value, dict) or value.get("object") != "response":
            return shapes.failure_in(value)
        status = shapes.text_of(value.get("status"))
        pieces = list(_output(value.get("output")))
        delta = read_end(value, status if status in _OVER else "", pieces)
        if delta.refusal and delta.verdict is None:
            delta.verdict = of_refusal("content.refusal")
        self._name(delta, value.get("model"))
        self.answer_id = shapes.text_of(value.get("id"))[: shapes.ID_CHARS_MAX] or None
        return delta


def read_response_event(kind: str, said: ResponseEvent) -> Delta | None:
    """What an event whose type begins with `response.` says; None for all others."""
    known = _TEXTS.get(kind)
    if known is not None:
        return _read_text(kind, known, said)
    if not kind.startswith("response."):
        return None
    if kind in _SOUNDS:
        if not said.delta:
            return Delta(EventClass.METADATA)
        spoken = "" if kind.endswith("audio.delta") else shapes.text_of(said.delta)
        return shapes.piece(EventClass.CONTENT, spoken, audio=True)
    if kind == "response.output_item.added":
        return _read_item(said.item)
    if kind in _ENDS:
        response = said.response if isinstance(said.response, dict) else {}
        status = kind.removeprefix("response.")
        if status == "done":
            status = shapes.text_of(response.get("status")) or "completed"
        return read_end(response, status, [], done=True)
    if kind == "response.shell_call_command.added":
        command = shapes.text_of(said.command)
        return shapes.piece(EventClass.TOOL_CALL, command) if command else Delta(EventClass.METADATA)
    if kind.endswith(".delta") and ("_arguments" in kind or ("_call" in kind and "output" not in kind)):
        # What the model writes; the output of a tool is not.
        return _read_text(kind, EventClass.TOOL_CALL, said)
    return Delta(EventClass.METADATA)


def _add_filters(delta: Delta, said: ResponseEvent) -> None:
    """Add what Azure's filters say before the end of a response."""
    filters = said.content_filters
    if filters is None and isinstance(said.response, dict):
        filters = said.response.get("content_filters")
    verdict = None if filters is None else of_content_filters(filters)
    if verdict is not None:
        delta.verdict = delta.verdict or verdict
        if verdict.kind is not None and not delta.output:
            delta.also = (delta.event_class, *delta.also)
            delta.event_class = EventClass.GUARDRAIL


def _read_text(kind: str, known: EventClass, said: ResponseEvent) -> Delta:
    text = said.delta
    if isinstance(text, dict):
        text = text.get("text")
    if not isinstance(text, str) or not text:
        return Delta(known if known is EventClass.TOOL_CALL else EventClass.METADATA)
    delta = shapes.piece(known, text)
    if said.logprobs and isinstance(said.logprobs, list):
        delta.tokens, delta.token_source = len(said.logprobs), TokenSource.LOGPROBS
    if known is EventClass.REFUSAL:
        delta.verdict = of_refusal(kind)
    return delta


def _read_item(item: Any) -> Delta:
    if not isinstance(item, dict):
        return Delta(EventClass.METADATA, parsed=False)
    kind = shapes.text_of(item.get("type"))
    if kind == "message":
        return Delta(EventClass.ROLE)
    if not kind.endswith("_call"):
        return Delta(EventClass.METADATA)
    written = _written(item)
    if item.get("name") or written:
        return shapes.piece(EventClass.TOOL_CALL, written)
    return Delta(EventClass.TOOL_CALL)  # a call of a built-in tool has no name


def _written(item: dict[str, Any]) -> str:
    """Return what the model wrote in a call: arguments, input, code, a patch, or shell commands."""
    operation, action = item.get("operation"), item.get("action")
    commands = action.get("commands", action.get("command")) if isinstance(action, dict) else None
    diff = operation.get("diff") if isinstance(operation, dict) else None
    found = (item.get("arguments"), item.get("input"), item.get("code"), diff)
    text = next((text for part in found if (text := shapes.text_of(part))), "")
    return text or "\n".join(
        shapes.text_of(c)
        for c in (commands if isinstance(commands, list) else [])[: openai_shapes.PIECES_MAX]
    )


def read_end(
    response: dict[str, Any], status: str, pieces: list[shapes.Piece], *, done: bool = False
) -> Delta:
    """Return the end of a response with its pieces. The finish reason is the status, and behind a colon why
    it is incomplete. `done`: its event ends a stream."""
    beside = [EventClass.DONE] if done else []
    verdict: Verdict | None = None
    error = response.get("error")
    details = response.get("incomplete_details")
    if not isinstance(details, dict):
        details = response.get("status_details")  # the Realtime API's name for both
        if isinstance(details, dict) and not error:
            error = details.get("error")
    reason = shapes.text_of(details.get("reason")) if isinstance(details, dict) else ""
    failed = status == "failed" or bool(error)
    if failed:
        beside.append(EventClass.ERROR)
        verdict = of_error({"error": error})
        if verdict is not None:
            verdict.signal, verdict.path = f"response.{verdict.signal}", None
    elif reason == "content_filter":
        verdict = Verdict("incomplete_details.reason", OUTPUT, "blocked", "output", value=reason)
    found = of_content_filters(response.get("content_filters"))
    if found is not None and found.kind is not None:
        if verdict is None:
            verdict = found
        elif verdict.signal == "incomplete_details.reason":
            verdict.kind, verdict.phase, verdict.category = found.kind, found.phase, found.category
    usage = response.get("usage")
    counts = openai_shapes.read_usage(usage)
    if counts is not None:
        beside.append(EventClass.USAGE)
    delta = shapes.gather(pieces, beside, verdict=verdict)
    delta.done = done
    delta.verdict = delta.verdict or found
    if failed:
        delta.error_type, delta.error_message = openai_shapes.read_error(error)
    if counts is not None:
        # Here the details are those of input and output.
        counts.reasoning = _detail(counts, usage, "output_token", "reasoning_tokens", counts.reasoning)
        counts.cached = _detail(counts, usage, "input_token", "cached_tokens", counts.cached)
        delta.usage, delta.counts = usage, counts
    if status:
        delta.finish_reason = f"{status}:{reason}" if reason and status == "incomplete" else status
    return delta


def _detail(counts: UsageCounts, usage: Any, part: str, name: str, known: int | None) -> int | None:
    details = usage.get(f"{part}s_details", usage.get(f"{part}_details"))
    told = details.get(name) if isinstance(details, dict) else None
    found = openai_shapes.count(told)
    counts.refused += told is not None and found is None
    return known if found is None else found


def _output(items: Any) -> Iterator[shapes.Piece]:
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        kind = shapes.text_of(item.get("type"))
        if kind.endswith("_call") and (item.get("name") or _written(item)):
            yield EventClass.TOOL_CALL, _written(item)
        for key in ("content", "summary"):
            parts = item.get(key)
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict):
                    yield from _part(part)


_PARTS: Final = {
    "output_text": ("text", EventClass.CONTENT),
    "refusal": ("refusal", EventClass.REFUSAL),
    "summary_text": ("text", EventClass.REASONING),
    "reasoning_text": ("text", EventClass.REASONING),
}


def _part(part: dict[str, Any]) -> Iterator[shapes.Piece]:
    key, kind = _PARTS.get(shapes.text_of(part.get("type")), ("", EventClass.CONTENT))
    text = shapes.text_of(part.get(key))
    if text:
        yield kind, text


def _read_other(kind: str, data: bytes, event: SseEvent) -> Delta:
    if kind in _KEEPALIVES:
        return Delta(EventClass.KEEPALIVE)
    return shapes.failure_in(openai_shapes.read_json(data), event.event)


class _Event(ResponseEvent, gc=False):
    session: Any = None


_FAMILIES: Final = frozenset(
    {
        "session", "transcription_session", "conversation", "input_audio_buffer", "output_audio_buffer",
        "rate_limits", "mcp_list_tools",
    }
)  # fmt: skip
"""First words of the types of events that say nothing of a response."""
_RECOVERABLE: Final = "invalid_request_error"


class OpenAIRealtime(shapes.ObjectReader):
    """Reader of the events of one response of a session. The session survives an `invalid_request_error`, so
    it is no failure of the exchange."""

    name = "openai.realtime"
    fields = shapes.Fields(_Event)

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("type")
        if not isinstance(kind, str):
            return 0
        if kind.partition(".")[0] in _FAMILIES and "." in kind:
            return 3
        # A session begins with itself; who comes late has the path to go by.
        ours = kind == "error" or kind.startswith("response.")
        return 4 if ours and path.endswith("/realtime") else 0

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        kind = shapes.kind_of(said.type, event)
        delta = read_response_event(kind, said)
        if delta is None:
            return self._read_other(kind, said.session, data)
        return delta

    def read_body(self, body: bytes) -> Delta:
        return shapes.failure_in(
            openai_shapes.read_json(body)
        )  # a JSON answer in place of a session is a failure

    def _read_other(self, kind: str, session: Any, data: bytes) -> Delta:
        if kind.partition(".")[0] not in _FAMILIES:
            delta = shapes.failure_in(openai_shapes.read_json(data))
            if delta.error_type is not None and _is_recoverable(data):
                delta.error_type = None
            return delta
        delta = Delta(EventClass.METADATA)
        self._name(delta, session.get("model") if isinstance(session, dict) else None)
        return delta


def _is_recoverable(data: bytes) -> bool:
    value = openai_shapes.read_json(data)
    error = value.get("error") if isinstance(value, dict) else None
    return isinstance(error, dict) and error.get("type") == _RECOVERABLE
