"""Base of the readers of OpenAI's chat and completions: a chunk as a Delta, with all beside its choices.

`openai_chat.py` and `openai_completions.py` extend `ChoicesReader` by the choices of their chunks. Errors,
filters, guardrail fields, hook results and server durations beside the choices are decoded in a second pass,
where they may occur. Other dialects use `read_failure`, which finds an error in JSON that is not theirs.

Source: docs/dialects.md.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from llmtap.protocol import verdicts
from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, ServerTime, Verdict
from llmtap.protocol.dialects import openai_shapes
from llmtap.protocol.server_times import object_times, rate_times
from llmtap.protocol.sse import SseEvent

BESIDE_NAMES: Final = (
    "error", "errors", "moderation", "hook_results", "warnings", "prompt_filter_results",
    "prompt_annotations", "promptFeedback", "code",
)  # fmt: skip
"""Members that an object without choices may have, and be part of an answer all the same."""
_ERROR_BYTES_MAX: Final = 1 << 20
"""Of an event with an error that is searched for a guardrail's signs; the longest known has a few KiB."""
_FINE: Final = (0, 200, "0", "200", "", "ok", "OK", "success", "Success")
"""Codes of what went well, where every answer has a code and a message."""


class Beside(msgspec.Struct, gc=False):
    """What servers put beside the choices. Any: looked at before use, never trusted."""

    usage: Any = None
    error: Any = None
    errors: Any = None
    moderation: Any = None
    timings: Any = None
    hook_results: Any = None
    warnings: Any = None
    detections: Any = None
    x_groq: Any = None
    metrics: Any = None
    time_info: Any = None
    perf_metrics: Any = None
    nvext: Any = None
    prompt_filter_results: Any = None
    prompt_annotations: Any = None
    prompt_feedback: Any = msgspec.field(default=None, name="promptFeedback")
    guardrail_action: Any = msgspec.field(default=None, name="amazon-bedrock-guardrailAction")
    guardrails_data: Any = None
    guardrails: Any = None
    status: Any = None
    invocation: Any = msgspec.field(default=None, name="amazon-bedrock-invocationMetrics")
    generation_stats: Any = None
    # An error may lie flat: with `object` "error" (older vLLM), or with nothing but a code (DashScope, WSO2).
    object: Any = None
    message: Any = None
    type: Any = None
    code: Any = None
    choices: msgspec.Raw = openai_shapes.NO_RAW

    def failure(self, name: bytes | None = None) -> Any:
        error = self.error or self.errors
        if error:
            return error
        if isinstance(self.x_groq, dict) and self.x_groq.get("error"):
            return self.x_groq["error"]
        if name == b"error" or self.object == "error" or self.flat:
            return {"code": self.code, "type": self.type, "message": self.message}
        return None

    @property
    def flat(self) -> bool:
        if self.choices is not openai_shapes.NO_RAW or not self.message:
            return False
        return self.type == "error" or (self.code is not None and self.code not in _FINE)

    def replaced(self) -> Verdict | None:
        """Return NeMo's verdict. Bedrock's is that of `bedrock.add_guardrail`."""
        return verdicts.of_rails(self.guardrails_data, "guardrails_data", self.status) or verdicts.of_rails(
            self.guardrails, "guardrails", self.status
        )

    @property
    def known(self) -> bool:
        return any(getattr(self, name) is not None for name in _KNOWN)

    def counted(self) -> tuple[Any, str]:
        if self.usage is None and isinstance(self.x_groq, dict):
            return self.x_groq.get("usage"), "x_groq.usage"
        if self.usage is None and isinstance(self.invocation, dict):
            names = (("prompt_tokens", "inputTokenCount"), ("completion_tokens", "outputTokenCount"))
            return {name: self.invocation.get(key) for name, key in names}, "usage"
        if isinstance(self.usage, dict) and isinstance(self.generation_stats, dict):
            # exo's rates, cache hit and peak memory, which no count of tokens tells.
            return {**self.usage, "generation_stats": self.generation_stats}, "usage"
        return self.usage, "usage"

    def times(self) -> tuple[ServerTime, ...]:
        """Durations of the server's own work, `timings` left out."""
        usage, place = self.counted()
        out = object_times(place, usage)
        if isinstance(usage, dict) and "latency_checkpoint" in usage:
            out += object_times("usage.latency_checkpoint", usage["latency_checkpoint"])
        for place, told in (
            ("metrics", self.metrics), ("time_info", self.time_info), ("perf_metrics", self.perf_metrics),
            ("nvext.timing", self.nvext.get("timing") if isinstance(self.nvext, dict) else None),
            ("amazon-bedrock-invocationMetrics", self.invocation),
        ):  # fmt: skip
            if told is not None:
                out += object_times(place, told)
        if self.generation_stats is not None:
            counts = openai_shapes.read_usage(usage)
            out += rate_times(self.generation_stats, None if counts is None else counts.cached)
        return out


_decode_beside: Final = msgspec.json.Decoder(Beside).decode
_BESIDE_NAMES: Final = tuple(
    (f.name, f.encode_name) for f in msgspec.structs.fields(Beside) if f.name != "choices"
)


_KNOWN: Final = tuple(
    f.name
    for f in msgspec.structs.fields(Beside)
    if f.name not in ("choices", "object", "message", "type", "code", "status")
)


def read_beside(data: bytes) -> Beside:
    try:
        return _decode_beside(data)
    except openai_shapes.BAD_JSON:
        value = openai_shapes.read_json(data)
    if not isinstance(value, dict):
        return Beside()
    return _build(value)


def _build(value: dict[str, Any]) -> Beside:
    found: dict[str, Any] = {field: value.get(key) for field, key in _BESIDE_NAMES}
    found["choices"] = openai_shapes.to_raw(value.get("choices"))
    return Beside(**found)


def add_beside(
    findings: openai_shapes.Findings,
    beside: Beside,
    data: bytes,
    name: bytes | None,
    *,
    finished: bool = False,
) -> None:
    """What stands beside the choices, usage and timings left out. `finished`: the answer had ended."""
    if beside.hook_results is not None:
        findings.verdict(verdicts.of_hook_results(beside.hook_results))
    if beside.moderation is not None:
        findings.verdict(verdicts.of_moderation(beside.moderation))
    if beside.warnings is not None:
        findings.verdict(verdicts.of_warnings(beside.warnings, beside.detections, answered=findings.chose))
    findings.verdict(beside.replaced())
    if beside.prompt_feedback is not None:
        findings.verdict(verdicts.of_block_reason(beside.prompt_feedback, "promptFeedback"))
    prompts = beside.prompt_filter_results or beside.prompt_annotations
    if prompts is not None:
        verdict = verdicts.of_prompt_filter_results(prompts)
        if verdict is not None:
            findings.verdict(verdict, EventClass.GUARDRAIL if verdict.kind is not None else None)
    error = beside.failure(name)
    if error is not None:
        verdict = verdicts.of_error(openai_shapes.read_json(data)) if len(data) <= _ERROR_BYTES_MAX else None
        if verdict is None and finished and openai_shapes.read_error(error)[0] == "400":
            # Nothing about a request can be bad once it was answered: a guardrail at the end of the
            # stream, too late to withhold anything (BerriAI/litellm#39036).
            verdict = Verdict("error.code", verdicts.OUTPUT, "blocked", "output", "medium", "400")
        findings.error(error, verdict)
    times = beside.times()
    if times:
        findings.delta.server_times += times


def read_failure(value: Any, name: bytes | None = None) -> Delta | None:
    """Return an error in an unknown dialect (in an `error` member, a list, or flat in an event that `name` or
    a guardrail's code marks); None if it is none."""
    if not isinstance(value, dict):
        return openai_shapes.unknown(name) if name == b"error" else None
    beside = _build(value)
    error, verdict = beside.failure(name), verdicts.of_error(value)
    if error is None or (verdict is None and beside.flat and name != b"error" and beside.object != "error"):
        return None
    findings = openai_shapes.Findings()
    findings.error(error, verdict)
    return findings.ranked()


class ChunkFields(msgspec.Struct, gc=False):
    """What may come with output; everything else is in `Beside`. A dialect adds its `choices`."""

    model: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    moderation: Any = None
    timings: Any = None
    hook_results: Any = None
    warnings: Any = None
    x_groq: Any = None
    guardrails_data: Any = None
    guardrail_action: Any = msgspec.field(default=None, name="amazon-bedrock-guardrailAction")


class ChoicesReader:
    """Base of the two dialects: reads a chunk, and what stands beside its choices where something may."""

    __slots__ = ("_finished", "_model", "_predicted", "_running")

    def __init__(self) -> None:
        self._model: str | None = None
        self._running = openai_shapes.RunningCount()
        self._predicted = openai_shapes.RunningCount()
        self._finished = False

    def read_event(self, event: SseEvent) -> Delta:
        data = event.data
        if data is None or not openai_shapes.is_object(data):
            return openai_shapes.read_frame(event)
        return self._read_json(data, event.event, streamed=True)

    def read_body(self, body: bytes) -> Delta:
        return self._read_json(body, None, streamed=False)

    def _read_json(self, data: bytes, name: bytes | None, *, streamed: bool) -> Delta:
        chunk = self._decoded(data)
        return (
            openai_shapes.unknown(name) if chunk is None else self._read(chunk, data, name, streamed=streamed)
        )

    def _decoded(self, data: bytes) -> Any:
        raise NotImplementedError

    def _read(self, chunk: Any, data: bytes, name: bytes | None, *, streamed: bool) -> Delta:
        if name == b"ping":
            return Delta(EventClass.KEEPALIVE)
        findings = openai_shapes.Findings()
        choices = chunk.choices or ()
        beside = None if is_plain(chunk, name) else read_beside(data)
        if choices:
            self._begin(chunk, data)
            verdict = None if beside is None else beside.replaced()
            replaced = verdict is not None and verdict.substituted
            if verdict is not None and verdict.confidence == "high":
                findings.verdict(verdict)  # it says more than the finish reason does
            findings.railed = beside is not None and beside.guardrails_data is not None
            findings.cut = len(choices) > openai_shapes.EVENT_CHOICES_MAX
            for position, choice in enumerate(choices[: openai_shapes.EVENT_CHOICES_MAX]):
                self._read_choice(choice, position, findings, streamed=streamed, replaced=replaced)
        usage: Any = chunk.usage
        known = chunk.choices is not None
        if beside is not None:
            add_beside(findings, beside, data, name, finished=self._finished)
            usage = beside.counted()[0]
            known = known or beside.known
            if not known and beside.type == "ping":
                return Delta(EventClass.KEEPALIVE)
            verdict = findings.delta.verdict
            if (
                findings.railed
                and verdict is not None
                and verdict.substituted
                and openai_shapes.is_unused(usage)
            ):
                verdict.kind, verdict.phase = verdicts.INPUT, "input"  # NeMo: no model was asked
        if findings.delta.finish_reason is not None:
            self._finished = True
        if usage is None and choices:
            usage = getattr(choices[0], "usage", None)
        findings.usage(usage, self._running)
        if chunk.timings is not None:
            findings.timings(chunk.timings, self._predicted)
        delta = findings.ranked()
        if streamed and chunk.timings is not None:
            openai_shapes.end_timings(delta, chunk.timings, self._predicted)
        self._end(delta, chunk, data)
        if chunk.model and chunk.model != self._model:
            self._model = delta.model = chunk.model[:MODEL_CHARS_MAX]
        delta.parsed = (known or not findings.empty) and not findings.cut
        return delta

    def _begin(self, chunk: Any, data: bytes) -> None:
        """Called before the choices of a chunk are read."""

    def _read_choice(
        self, choice: Any, position: int, findings: openai_shapes.Findings, *, streamed: bool, replaced: bool
    ) -> None:
        """Add what a choice says; `replaced`: a guardrail's text stands in place of its own."""
        raise NotImplementedError

    def _end(self, delta: Delta, chunk: Any, data: bytes) -> None:
        """Called with the Delta of a chunk, before the model is compared."""


def is_plain(chunk: Any, name: bytes | None) -> bool:
    """Return whether nothing stands beside the choices: there is one, and it goes on."""
    choices = chunk.choices
    return bool(
        choices and name is None and not choices[0].finish_reason and len(choices) == 1 and is_alone(chunk)
    )


def is_alone(chunk: Any) -> bool:
    return (
        chunk.error is None
        and chunk.moderation is None
        and chunk.hook_results is None
        and chunk.warnings is None
        and chunk.x_groq is None
        and chunk.guardrails_data is None
        and chunk.guardrail_action is None
    )


Built = TypeVar("Built")
_ALSO: Final = tuple(
    (f.name, f.encode_name) for f in msgspec.structs.fields(ChunkFields) if f.name not in ("model", "usage")
)


def build_chunk(
    value: Any,
    chunk: Callable[..., Built],
    choice: Callable[..., Any],
    parts: Callable[[Any], dict[str, Any]],
) -> Built | None:
    """Return the chunk in a JSON object that the typed decode refused, without what does not fit. `parts`
    returns the fields of a choice that are the dialect's own."""
    if not isinstance(value, dict):
        return None
    get = value.get
    choices, model, usage = get("choices"), get("model"), get("usage")
    return chunk(
        choices=[
            choice(**_common(c), **parts(c.get)) for c in choices if isinstance(c, dict)
        ] if isinstance(choices, list) else None,
        model=model if isinstance(model, str) else None,
        usage=usage if isinstance(usage, dict) else None,
        **{name: get(key) for name, key in _ALSO},
    )  # fmt: skip


def _common(value: dict[str, Any]) -> dict[str, Any]:
    index, reason, ids = value.get("index"), value.get("finish_reason"), value.get("token_ids")
    return {
        "index": index if type(index) is int and 0 <= index < openai_shapes.INDEX_MAX else 0,
        "finish_reason": reason if isinstance(reason, str) else None,
        "token_ids": ids if isinstance(ids, list) else None,
    }
