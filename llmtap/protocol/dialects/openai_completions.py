"""OpenAI's older completions: `text_completion` events and bodies, where a choice has a `text`.

Source: openai/openai-openapi openapi.yaml; shared/dialects/dialects.md section 3.2. With `echo` the
prompt comes back in the first chunk's text: it cannot be told from the answer, and only usage or token
ids count right then.
"""

from typing import Any, Final

import msgspec

from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass
from llmtap.protocol.dialects.openai_beside import BESIDE_NAMES, add_beside, read_beside
from llmtap.protocol.dialects.openai_shapes import (
    BAD_JSON,
    CHOICES_MAX,
    EVENT_CHOICES_MAX,
    INDEX_MAX,
    Findings,
    Index,
    RunningCount,
    read_frame,
    read_json,
    unknown,
)
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import of_guardrail_action

__all__ = ["OpenAICompletions"]


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    index: Index = 0
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    content_filter_results: Any = None


class _Chunk(msgspec.Struct, gc=False):
    """What may come with output; all else is in `Beside`."""

    choices: list[_Choice] | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    moderation: Any = None
    timings: Any = None
    hook_results: Any = None
    warnings: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class OpenAICompletions:
    """Reads one answer."""

    name = "openai.completions"
    names_read: Final = frozenset(_Chunk.__struct_encode_fields__)

    __slots__ = ("_finished", "_model", "_predicted", "_running", "_spoken")

    def __init__(self) -> None:
        self._model: str | None = None
        self._running = RunningCount()
        self._predicted = RunningCount()
        self._finished = False
        self._spoken: set[int] = set()
        """Choices that have begun to speak."""

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        """How sure a first JSON value makes us that the answer is ours; see `registry.py`."""
        kind = value.get("object")
        if isinstance(kind, str) and kind.startswith("text_completion"):
            return 3
        choices = value.get("choices")
        if isinstance(choices, list):
            # Together repeats a chat delta as `text`: where both are, it is chat.
            if any(isinstance(c, dict) and "text" in c and "delta" not in c for c in choices):
                return 2
        elif not any(name in value for name in BESIDE_NAMES):
            return 0
        return int(path.endswith("/completions") and not path.endswith("/chat/completions"))

    def read_event(self, event: SseEvent) -> Delta:
        """What one event of a stream says. Never raises."""
        data = event.data
        if data is None or not data.lstrip().startswith(b"{"):
            return read_frame(event)
        return self._read_json(data, event.event, streamed=True)

    def read_body(self, body: bytes) -> Delta:
        """What a whole JSON answer says. Never raises."""
        return self._read_json(body, None, streamed=False)

    def _read_json(self, data: bytes, name: bytes | None, *, streamed: bool) -> Delta:
        try:
            chunk = _decode(data)
        except BAD_JSON:
            value = read_json(data)
            if not isinstance(value, dict):
                return unknown(name)
            chunk = _build(value)
        if name == b"ping":
            return Delta(EventClass.KEEPALIVE)
        findings = Findings()
        choices = chunk.choices or ()
        beside = None
        if (
            not choices
            or name is not None
            or choices[0].finish_reason
            or len(choices) > 1
            or chunk.error is not None
            or chunk.moderation is not None
            or chunk.hook_results is not None
            or chunk.warnings is not None
        ):
            beside = read_beside(data)
        replaced = beside is not None and of_guardrail_action(beside.guardrail_action) is not None
        findings.cut = len(choices) > EVENT_CHOICES_MAX
        for choice in choices[:EVENT_CHOICES_MAX]:
            self._read_choice(choice, findings, streamed=streamed, replaced=replaced)
        usage: Any = chunk.usage
        known = chunk.choices is not None
        if beside is not None:
            add_beside(findings, beside, data, name, finished=self._finished)
            usage = beside.counted()[0]
            known = known or beside.known
        if findings.delta.finish_reason is not None:
            self._finished = True
        findings.usage(usage, self._running)
        if chunk.timings is not None:
            findings.timings(chunk.timings, self._predicted)
        delta = findings.ranked()
        if chunk.model and chunk.model != self._model:
            self._model = delta.model = chunk.model[:MODEL_CHARS_MAX]
        delta.parsed = (known or not findings.empty) and not findings.cut
        delta.repeatable = (
            streamed
            and beside is None
            and delta.text != ""
            and delta.tokens < 0
            and delta.model is None
            and usage is None
            and chunk.timings is None
            and not findings.cut
            and all(choice.content_filter_results is None for choice in choices)
        )
        return delta

    def _read_choice(self, choice: _Choice, findings: Findings, *, streamed: bool, replaced: bool) -> None:
        index, text, reason = choice.index, choice.text, choice.finish_reason
        findings.choice(
            index,
            ids=len(choice.token_ids or ()),
            logprobs=0 if choice.logprobs is None else len(choice.logprobs.tokens or ()),
        )
        spoken = isinstance(text, str) and bool(text)
        if reason:
            verdict = findings.finish(reason, choice.content_filter_results)
            if verdict is not None and streamed and spoken and index not in self._spoken:
                # The only text, in the very block of the verdict, stands in for the answer.
                replaced = verdict.substituted = True
                verdict.action = "replaced"
        if choice.content_filter_results is not None:
            findings.filtered(choice.content_filter_results, alone=text is None)
        if spoken and not replaced:
            findings.piece(index, EventClass.CONTENT, text)
            if len(self._spoken) < CHOICES_MAX:
                self._spoken.add(index)


def _build(value: dict[str, Any]) -> _Chunk:
    """The chunk in a JSON object that does not quite have its shape; what does not fit is left out."""
    get = value.get
    choices, model, usage = get("choices"), get("model"), get("usage")
    return _Chunk(
        [_build_choice(c) for c in choices if isinstance(c, dict)] if isinstance(choices, list) else None,
        model if isinstance(model, str) else None,
        usage if isinstance(usage, dict) else None,
        *(get(name) for name in _Chunk.__struct_fields__[3:]),
    )


def _build_choice(value: dict[str, Any]) -> _Choice:
    get = value.get
    index, reason, ids = get("index"), get("finish_reason"), get("token_ids")
    return _Choice(
        get("text"),
        index if type(index) is int and 0 <= index < INDEX_MAX else 0,
        reason if isinstance(reason, str) else None,
        None,
        ids if isinstance(ids, list) else None,
        get("content_filter_results"),
    )
