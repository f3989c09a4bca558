"""What the OpenAI-shaped dialects have in common: usage, errors, running counts, the ranking of classes,
and events that are no JSON object.

Source: shared/dialects/dialects.md sections 1, 2 and 5.
"""

import json
from typing import Any, Final

import msgspec

from llmtap.wire.delta import Delta, EventClass, TokenSource, UsageCounts
from llmtap.wire.sse import SseEvent

__all__ = [
    "BAD_JSON",
    "Findings",
    "RunningCount",
    "read_error",
    "read_frame",
    "read_json",
    "read_usage",
    "unknown",
]

BAD_JSON: Final = (ValueError, RecursionError)
"""What decoders raise at bytes from outside: malformed, of another shape, not UTF-8, nested too deep."""


def read_frame(event: SseEvent) -> Delta:
    """An event whose data is no JSON object: a keep-alive, `[DONE]`, a block without data, or unknown."""
    data = event.data
    if data is None:
        alive = event.comment or event.event == b"ping"
        return Delta(EventClass.KEEPALIVE if alive else EventClass.METADATA)
    data = data.strip()
    if data == b"[DONE]":
        return Delta(EventClass.DONE, done=True)
    if not data or event.event == b"ping":
        return Delta(EventClass.KEEPALIVE)
    return unknown(event.event)


def unknown(name: bytes | None = None) -> Delta:
    """An event that nobody understood, except that its name may say that it is an error."""
    if name == b"error":
        return Delta(EventClass.ERROR, error_type="error")
    return Delta(EventClass.METADATA, parsed=False)


def read_json(data: bytes) -> Any:
    """Any JSON value, read as leniently as the standard library does (NaN, lone surrogates); else None."""
    try:
        return msgspec.json.decode(data)
    except BAD_JSON:
        pass
    try:
        return _clean(json.loads(data))
    except BAD_JSON:
        return None


def _clean(value: Any) -> Any:
    """The same value with lone surrogates replaced: nothing could write them out again."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case list():
            return [_clean(v) for v in value]
        case dict():
            return {_clean(k): _clean(v) for k, v in value.items()}
    return value


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def read_usage(usage: Any) -> UsageCounts | None:
    """The counts of a `usage` object; None if it is no object or counts nothing (all zero or null)."""
    if not isinstance(usage, dict):
        return None
    get = usage.get
    of_input, of_output = get("prompt_tokens_details"), get("completion_tokens_details")
    reasoning = of_output.get("reasoning_tokens") if isinstance(of_output, dict) else None
    cached = of_input.get("cached_tokens") if isinstance(of_input, dict) else None
    counts = UsageCounts(
        _count(get("prompt_tokens", get("input_tokens"))),
        _count(get("completion_tokens", get("output_tokens"))),
        # SGLang counts reasoning at the top level, DeepSeek what it had cached.
        _count(get("reasoning_tokens") if reasoning is None else reasoning),
        _count(get("prompt_cache_hit_tokens") if cached is None else cached),
    )
    return counts if counts.input or counts.output or _count(get("total_tokens")) else None


def read_error(error: Any) -> tuple[str, str | None]:
    """`(type, message)` of an error object, or of the text that stands in for one.

    The type is `code` where that is a word, else `type`, else a numeric `code`, else `"error"`.
    """
    if isinstance(error, str):
        return "error", error
    if not isinstance(error, dict):
        return "error", None
    code, kind, message = error.get("code"), error.get("type"), error.get("message")
    name = next((v for v in (code, kind) if isinstance(v, str) and v), None)
    if name is None:
        name = str(code) if type(code) is int else "error"
    return name, message if isinstance(message, str) else None


class RunningCount:
    """Tokens per event, from the difference of a `usage` that runs along with the output.

    A usage counts as running only if the stream's first chunk with a choice had one and did not end
    the choice: otherwise it is a total, whichever chunk it stands on.
    """

    __slots__ = ("_last", "running")

    def __init__(self) -> None:
        self.running: bool | None = None
        """None until the first chunk with a choice was seen."""
        self._last: dict[int, int] = {}

    def added(self, choices: list[int], counts: UsageCounts | None, *, running: bool) -> int:
        """Tokens since the last chunk of the same choice; 0 where nothing can be said.

        `running` is whether this chunk looks like one of a running count. vLLM counts each choice for
        itself, so a chunk of several choices says nothing.
        """
        if self.running is None and choices:
            self.running = running
        if not self.running or len(choices) != 1 or counts is None or counts.output is None:
            return 0
        last = self._last.get(choices[0], 0)
        self._last[choices[0]] = counts.output
        return max(0, counts.output - last)

    @property
    def several(self) -> bool:
        """More than one choice has a count of its own: no single one is the total."""
        return len(self._last) > 1


class Findings:
    """What the choices of one event say, put together and ranked."""

    __slots__ = ("_carrying", "_found", "_ids", "_indexes", "_logprobs", "_role", "_texts", "delta")

    def __init__(self) -> None:
        self.delta = Delta(EventClass.METADATA)
        self._found: set[EventClass] = set()
        self._texts: dict[EventClass, str] = {}
        self._carrying: list[int] = []
        self._indexes: list[int] = []
        self._ids = self._logprobs = 0
        self._role = False

    def choice(self, index: int, *, ids: int = 0, logprobs: int = 0, role: bool = False) -> None:
        """A choice and what it declares about itself; its pieces follow."""
        self._indexes.append(index)
        self._ids += ids
        self._logprobs += logprobs
        self._role |= role
        if ids:
            self._carry(index)

    def piece(
        self, index: int, kind: EventClass, text: str, *, output: bool = True, audio: bool = False
    ) -> None:
        """Something generated for a choice. A call that has only an id is a piece without output."""
        self._found.add(kind)
        self._texts[kind] = self._texts.get(kind, "") + text
        if output:
            self._carry(index)
        if kind is EventClass.CONTENT:
            self.delta.content |= audio or not text.isspace()
        elif kind is EventClass.REASONING:
            self.delta.reasoning = True

    def _carry(self, index: int) -> None:
        if index not in self._carrying:
            self._carrying.append(index)

    def finish(self, reason: str) -> None:
        """A choice ended."""
        self.delta.finish_reason = reason
        if reason == "content_filter":
            self._found.add(EventClass.GUARDRAIL)

    def guardrail(self) -> None:
        """A filter spoke up beside the choices."""
        self._found.add(EventClass.GUARDRAIL)

    def error(self, error: Any) -> None:
        """The event reports a failure."""
        self._found.add(EventClass.ERROR)
        self.delta.error_type, self.delta.error_message = read_error(error)

    def usage(self, usage: dict[str, Any] | None, running: RunningCount) -> None:
        """The event's usage object, if any; call it last."""
        delta = self.delta
        counts = read_usage(usage)
        goes_on = usage is not None and delta.finish_reason is None
        added = running.added(self._indexes, counts, running=goes_on)
        if counts is not None:
            self._found.add(EventClass.USAGE)
            delta.usage, delta.counts = usage, counts
            delta.usage_running = (
                running.running is True
                and bool(self._indexes)
                and (delta.finish_reason is None or running.several)
            )
        # Which count to believe: dialects.md section 5.
        if self._ids:
            delta.tokens, delta.token_source = self._ids, TokenSource.TOKEN_IDS
        elif self._logprobs:
            delta.tokens, delta.token_source = self._logprobs, TokenSource.LOGPROBS
        elif added:
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE

    def ranked(self) -> Delta:
        """The Delta of all that."""
        delta = self.delta
        ranked = sorted(self._found)
        if self._role:
            # A role names the speaker where nothing is said, counted or ended; else it is a side note.
            counted = delta.counts is not None and bool(delta.counts.output)
            if counted or delta.finish_reason is not None:
                ranked = [*(ranked or [EventClass.METADATA]), EventClass.ROLE]
            else:
                ranked = sorted([*ranked, EventClass.ROLE])
        if ranked:
            delta.event_class = ranked[0]
            delta.also = tuple(ranked[1:])
            delta.text = self._texts.get(ranked[0], "")
        delta.choices = tuple(self._carrying)
        delta.output = bool(self._carrying)
        delta.blank = EventClass.CONTENT in self._found and not delta.content
        return delta

    @property
    def empty(self) -> bool:
        """Nothing was found: neither a choice nor anything beside one."""
        return not (self._indexes or self._found)
