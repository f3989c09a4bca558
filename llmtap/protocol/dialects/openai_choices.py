"""Read chunks with choices as Deltas: base class of OpenAI's chat and completions, and the completions.

`ChoicesReader` reads the choices of a chunk and its other members; `openai_chat.py` extends it. Errors,
filters, fields of guardrails, results of hooks and durations of the server are decoded in a second pass, only
for chunks that can have them. A choice of the older completions has a `text`, or only token ids. With `echo`,
the first text is the prompt, so only usage or token ids give the correct count.

Source: openai/openai-openapi openapi.yaml; docs/dialects.md.
"""

from typing import Any, ClassVar, Final

import msgspec

from llmtap.json_types import JsonObject
from llmtap.protocol import verdicts
from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, ServerTime, Verdict
from llmtap.protocol.dialects import openai_shapes
from llmtap.protocol.dialects.openai_shapes import Findings, Index
from llmtap.protocol.json_memory import bounded_decoder
from llmtap.protocol.server_times import object_times, rate_times
from llmtap.protocol.sse import SseEvent

BESIDE_NAMES: Final = (
    "error",
    "errors",
    "moderation",
    "hook_results",
    "warnings",
    "prompt_filter_results",
    "prompt_annotations",
    "promptFeedback",
    "code",
)
"""Members that show that an object without choices is a part of an answer."""
_GUARDRAIL: Final = "amazon-bedrock-guardrailAction"
_INVOCATION: Final = "amazon-bedrock-invocationMetrics"
_KNOWN: Final = (
    *BESIDE_NAMES[:-1],
    "usage",
    "timings",
    "detections",
    "x_groq",
    "metrics",
    "time_info",
    "perf_metrics",
    "nvext",
    "guardrails_data",
    "guardrails",
    "generation_stats",
    _GUARDRAIL,
    _INVOCATION,
)
_KEPT_WITH_USAGE: Final = (("generation_stats",), ("metrics", "speculative_decoding"))
"""Paths of objects to store with the usage: exo's rates, cache hit and memory, vLLM's accepted drafts."""
_USUAL: Final = frozenset(
    ("id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint")
)
"""Members of OpenAI's own chunks. A chunk with no other members needs no second pass."""
_ERROR_BYTES_MAX: Final = 1 << 20
"""Maximum size of an event with an error in which a guardrail is searched. Known events have a few KiB."""
_FINE: Final = (0, 200, "0", "200", "", "ok", "OK", "success", "Success")
"""Codes that mean success: some servers put a code and a message into every answer."""


def failure_of(value: JsonObject, name: bytes | None = None) -> Any:
    """Return the error in an object; None if there is none. The error is a member, or the object itself if it
    is marked as an error by its event's `name`, by `object` (older vLLM), or by a code (DashScope, WSO2)."""
    groq = value.get("x_groq")
    error = value.get("error") or value.get("errors") or (isinstance(groq, dict) and groq.get("error"))
    if error:
        return error
    if name == b"error" or value.get("object") == "error" or is_flat_error(value):
        return {key: value.get(key) for key in ("code", "type", "message")}
    return None


def is_flat_error(value: JsonObject) -> bool:
    """Return whether an object is itself an error: it has a message, and an error's type or code."""
    code = value.get("code")
    is_marked = value.get("type") == "error" or (code is not None and code not in _FINE)
    return is_marked and bool(value.get("message")) and "choices" not in value


def _guardrail_verdict(value: JsonObject) -> Verdict | None:
    """Return the verdict of NeMo Guardrails. `bedrock.add_guardrail` reads that of Bedrock."""
    candidates = (
        verdicts.rails_verdict(value.get(name), name, value.get("status"))
        for name in ("guardrails_data", "guardrails")
    )
    return next(filter(None, candidates), None)


def _usage_and_place(value: JsonObject) -> tuple[Any, str]:
    """Return the usage of a chunk, and the path of the object that holds it."""
    usage, groq, invoked = value.get("usage"), value.get("x_groq"), value.get(_INVOCATION)
    if usage is None and isinstance(groq, dict):
        return groq.get("usage"), "x_groq.usage"
    if usage is None and isinstance(invoked, dict):
        names = {"prompt_tokens": "inputTokenCount", "completion_tokens": "outputTokenCount"}
        return {name: invoked.get(key) for name, key in names.items()}, "usage"
    for path in _KEPT_WITH_USAGE:
        stats: Any = value
        for name in path:
            stats = stats.get(name) if isinstance(stats, dict) else None
        if isinstance(usage, dict) and isinstance(stats, dict):
            usage = {**usage, path[-1]: stats}
    return usage, "usage"


def _usage_times(usage: Any, place: str = "usage") -> tuple[ServerTime, ...]:
    """Return the durations in a usage object; `place`: its path."""
    out = object_times(place, usage)
    checkpoint = usage.get("latency_checkpoint") if isinstance(usage, dict) else None
    return out if checkpoint is None else out + object_times("usage.latency_checkpoint", checkpoint)


def _server_times(value: JsonObject) -> tuple[ServerTime, ...]:
    """Return the durations of the server's own work, except llama.cpp's `timings`."""
    usage, place = _usage_and_place(value)
    nvext = value.get("nvext")
    out = _usage_times(usage, place)
    for place, times in (
        ("metrics", value.get("metrics")),
        ("time_info", value.get("time_info")),
        ("perf_metrics", value.get("perf_metrics")),
        ("nvext.timing", nvext.get("timing") if isinstance(nvext, dict) else None),
        (_INVOCATION, value.get(_INVOCATION)),
    ):
        if times is not None:
            out += object_times(place, times)
    stats = value.get("generation_stats")
    if stats is not None:
        counts = openai_shapes.read_usage(usage)
        out += rate_times(stats, None if counts is None else counts.cached)
    return out


def add_other_members(
    findings: Findings, value: JsonObject, size: int, name: bytes | None, *, finished: bool = False
) -> None:
    """Add the members of an event to its findings, except choices, usage and timings. `size`: bytes of the
    event. `finished`: whether an earlier event had a finish reason."""
    get = value.get
    if name is None and _USUAL.issuperset(value) and get("object") != "error":
        findings.delta.server_times += _usage_times(get("usage"))
        return
    findings.add_verdict(verdicts.hook_results_verdict(get("hook_results")))
    findings.add_verdict(verdicts.moderation_verdict(get("moderation")))
    findings.add_verdict(
        verdicts.warnings_verdict(get("warnings"), get("detections"), answered=findings.has_choices)
    )
    findings.add_verdict(_guardrail_verdict(value))
    findings.add_verdict(verdicts.block_reason_verdict(get("promptFeedback"), "promptFeedback"))
    verdict = verdicts.prompt_filter_verdict(get("prompt_filter_results") or get("prompt_annotations"))
    if verdict is not None:
        findings.add_verdict(verdict, EventClass.GUARDRAIL if verdict.kind is not None else None)
    error = failure_of(value, name)
    if error is not None:
        verdict = verdicts.error_verdict(value) if size <= _ERROR_BYTES_MAX else None
        if verdict is None and finished and openai_shapes.read_error(error)[0] == "400":
            # After the finish reason, an error 400 cannot concern the request: it is from a guardrail that
            # assesses the whole answer at the end of the stream (BerriAI/litellm#39036).
            verdict = Verdict("error.code", verdicts.OUTPUT, "blocked", "output", "medium", "400")
        findings.add_error(error, verdict)
    findings.delta.server_times += _server_times(value)


class ChunkFields(msgspec.Struct, gc=False):
    """Members of a chunk that the first pass reads. Each dialect adds its own `choices`."""

    model: str | None = None
    usage: JsonObject | None = None
    error: Any = None
    """Error in place of, or after, the answer."""
    moderation: Any = None
    """Verdicts of a moderation model on the input or the output."""
    timings: Any = None
    """Durations of llama.cpp."""
    hook_results: Any = None
    warnings: Any = None
    x_groq: Any = None
    """Extra fields of Groq, which hold usage and errors."""
    guardrails_data: Any = None
    guardrail_action: Any = msgspec.field(default=None, name=_GUARDRAIL)


class ChoicesReader:
    """Base of the readers of chat and completions. It reads the choices of a chunk, and its other members."""

    __slots__ = ("_has_finished", "_model", "_predicted_count", "_running_count")
    chunk_type: ClassVar[type[ChunkFields]]
    """Struct of the dialect's chunk, with its own `choices`."""
    decode: ClassVar[Any]
    """Decoder of `chunk_type`."""

    def __init__(self) -> None:
        self._model: str | None = None
        self._running_count = openai_shapes.RunningCount()
        """Tokens so far by the usage in each chunk, if the server sends it."""
        self._predicted_count = openai_shapes.RunningCount()
        """Tokens so far by llama.cpp's `timings` in each chunk."""
        self._has_finished = False
        """Whether a chunk has had a finish reason."""

    def read_event(self, event: SseEvent) -> Delta:
        data = event.data
        if data is None or not openai_shapes.is_object(data):
            return openai_shapes.read_non_object(event)
        return self._read_json(data, event.event, streamed=True)

    def read_body(self, body: bytes) -> Delta:
        return self._read_json(body, None, streamed=False)

    def _read_json(self, data: bytes, name: bytes | None, *, streamed: bool) -> Delta:
        try:
            chunk = self.decode(data)
        except openai_shapes.BAD_JSON:
            value = openai_shapes.read_json(data)
            if not isinstance(value, dict):
                return openai_shapes.unknown_delta(name)
            chunk = msgspec.convert(_without_wrong_types(value), self.chunk_type)
        return self._read(chunk, data, name, streamed=streamed)

    def _read(self, chunk: Any, data: bytes, name: bytes | None, *, streamed: bool) -> Delta:
        if name == b"ping":
            return Delta(EventClass.KEEPALIVE)
        findings = Findings()
        choices = chunk.choices or ()
        value = None if is_plain(chunk, name) else openai_shapes.read_json(data)
        is_usual = value is None or _USUAL.issuperset(value)
        if choices:
            self._before_choices(chunk, data)
            verdict = None if value is None or is_usual else _guardrail_verdict(value)
            replaced = verdict is not None and verdict.substituted
            if verdict is not None and verdict.confidence == "high":
                findings.add_verdict(verdict)  # Added first: it is more precise than the finish reason.
            findings.has_rails = chunk.guardrails_data is not None
            findings.cut = len(choices) > openai_shapes.EVENT_CHOICES_MAX
            for position, choice in enumerate(choices[: openai_shapes.EVENT_CHOICES_MAX]):
                self._read_choice(choice, position, findings, streamed=streamed, replaced=replaced)
        usage: Any = chunk.usage
        known = chunk.choices is not None
        if value is not None:
            add_other_members(findings, value, len(data), name, finished=self._has_finished)
            usage = value.get("usage") if is_usual else _usage_and_place(value)[0]
            known = known or any(value.get(name) is not None for name in _KNOWN)
            if not known and value.get("type") == "ping":
                return Delta(EventClass.KEEPALIVE)
            verdict = findings.delta.verdict
            substituted = verdict is not None and verdict.substituted
            if verdict is not None and substituted and findings.has_rails and openai_shapes.is_zero(usage):
                # No tokens were used, so NeMo's guardrail acted before the model was called.
                verdict.kind, verdict.phase = verdicts.INPUT, "input"
        self._has_finished |= findings.delta.finish_reason is not None
        if usage is None and choices:
            usage = getattr(choices[0], "usage", None)
        findings.add_usage(usage, self._running_count)
        if chunk.timings is not None:
            findings.add_timings(chunk.timings, self._predicted_count)
        delta = findings.to_delta()
        if streamed and chunk.timings is not None:
            openai_shapes.end_timings(delta, chunk.timings, self._predicted_count)
        self._after_choices(delta, chunk, data)
        if chunk.model and chunk.model != self._model:
            self._model = delta.model = chunk.model[:MODEL_CHARS_MAX]
        delta.parsed = (known or not findings.is_empty) and not findings.cut
        return delta

    def _before_choices(self, chunk: Any, data: bytes) -> None:
        """Prepare the reading of a chunk. Called before its choices are read."""

    def _read_choice(
        self, choice: Any, position: int, findings: Findings, *, streamed: bool, replaced: bool
    ) -> None:
        """Add the content of a choice. `replaced`: its text is that of a guardrail, not of the model."""
        raise NotImplementedError

    def _after_choices(self, delta: Delta, chunk: Any, data: bytes) -> None:
        """Complete the Delta of a chunk. Called before the model is compared with that of earlier chunks."""


def is_plain(chunk: Any, name: bytes | None) -> bool:
    """Return whether the chunk has only one unfinished choice, so that no second pass is needed."""
    choices = chunk.choices
    return bool(
        choices and name is None and not choices[0].finish_reason and len(choices) == 1 and is_bare(chunk)
    )


def is_bare(chunk: Any) -> bool:
    """Return whether a chunk has no error and no member of a guardrail or of a gateway."""
    return (
        chunk.error is None
        and chunk.moderation is None
        and chunk.hook_results is None
        and chunk.warnings is None
        and chunk.x_groq is None
        and chunk.guardrails_data is None
        and chunk.guardrail_action is None
    )


def _without_wrong_types(value: JsonObject) -> JsonObject:
    """Return a chunk, which the typed decoder refused, without the values that have a wrong type."""
    choices, model, usage = value.get("choices"), value.get("model"), value.get("usage")
    return value | {
        "choices": [_typed_choice(c) for c in choices if isinstance(c, dict)]
        if isinstance(choices, list)
        else None,
        "model": model if isinstance(model, str) else None,
        "usage": usage if isinstance(usage, dict) else None,
    }


def _typed_choice(choice: JsonObject) -> JsonObject:
    """Return a choice without members of a wrong type."""
    get, index = choice.get, choice.get("index")
    kinds = {"finish_reason": str, "token_ids": list, "delta": dict, "message": dict}
    return choice | {
        "index": index if type(index) is int and 0 <= index < openai_shapes.INDEX_MAX else 0,
        "logprobs": None,
        **{name: get(name) if isinstance(get(name), kind) else None for name, kind in kinds.items()},
    }


class _Logprobs(msgspec.Struct, gc=False):
    """Log probabilities of a choice."""

    tokens: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    """One choice of a chunk or of a whole answer."""

    text: Any = None
    index: Index = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    """DeepSeek on Bedrock sends this field instead of `finish_reason`. vLLM sends it, too, with the stop text
    or token that ended the answer."""
    logprobs: _Logprobs | None = None
    token_ids: list[Any] | None = None
    content_filter_results: Any = None


class _Chunk(ChunkFields, gc=False):
    """A chunk, or a whole answer."""

    choices: list[_Choice] | None = None


class OpenAICompletions(ChoicesReader):
    """Reader of the completions API."""

    name = "openai.completions"
    end_certain = True
    names_read: Final = frozenset(_Chunk.__struct_encode_fields__)
    chunk_type = _Chunk
    decode = staticmethod(bounded_decoder(_Chunk))

    __slots__ = ("_choices_with_text",)

    def __init__(self) -> None:
        super().__init__()
        self._choices_with_text: set[int] = set()
        """Choices that have had text."""

    @staticmethod
    def claim(value: JsonObject, path: str) -> int:
        """Return how certainly an object is of this dialect (`registry.Dialect.claim`)."""
        if openai_shapes.text_of(value.get("object")).startswith("text_completion"):
            return 3
        choices = value.get("choices")
        if isinstance(choices, list):
            # A choice with `text` and `delta` is one of chat: Together repeats the text of the delta as
            # `text`. In vLLM's answers without text, a choice has only `token_ids`.
            if any(
                isinstance(c, dict) and ("text" in c or "token_ids" in c) and "delta" not in c
                for c in choices
            ):
                return 2
        elif not any(name in value for name in BESIDE_NAMES):
            return 0
        return int(path.endswith("/completions") and not path.endswith("/chat/completions"))

    def _read(self, chunk: _Chunk, data: bytes, name: bytes | None, *, streamed: bool) -> Delta:
        for choice in chunk.choices or ():
            if choice.finish_reason is None and isinstance(choice.stop_reason, str):
                choice.finish_reason = choice.stop_reason
        delta = super()._read(chunk, data, name, streamed=streamed)
        delta.repeatable = (
            streamed
            and is_plain(chunk, name)
            and delta.text != ""
            and delta.tokens < 0
            and delta.finish_reason is None
            and delta.model is None
            and chunk.usage is None
            and chunk.timings is None
            and chunk.choices is not None
            and chunk.choices[0].content_filter_results is None
        )
        return delta

    def _read_choice(
        self, choice: _Choice, position: int, findings: Findings, *, streamed: bool, replaced: bool
    ) -> None:
        index, text, results = choice.index, choice.text, choice.content_filter_results
        logprobs = 0 if choice.logprobs is None else len(choice.logprobs.tokens or ())
        findings.add_choice(index, ids=len(choice.token_ids or ()), logprobs=logprobs)
        spoken = isinstance(text, str) and bool(text)
        if choice.finish_reason:
            only = streamed and spoken and index not in self._choices_with_text
            replaced |= findings.add_finish(choice.finish_reason, results, only_text=only)
        findings.add_filter_results(results, alone=text is None)
        if spoken and not replaced:
            findings.add_piece(index, EventClass.CONTENT, text)
            if len(self._choices_with_text) < openai_shapes.CHOICES_MAX:
                self._choices_with_text.add(index)
