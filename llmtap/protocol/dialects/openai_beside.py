"""What servers and gateways put beside the choices of an OpenAI-shaped event: errors, filters, rails, hooks,
and how long they took.

Such fields come with events that end something or carry no choice, so they are decoded in a second pass.

Source: shared/dialects/dialects.md sections 3.5, 6 and 7.
"""

from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, ServerTime, Verdict
from llmtap.protocol.dialects.openai_shapes import (
    BAD_JSON,
    NO_RAW,
    Findings,
    read_error,
    read_json,
    read_usage,
    to_raw,
    unknown,
)
from llmtap.protocol.server_times import object_times, rate_times
from llmtap.protocol.verdicts import (
    OUTPUT,
    of_block_reason,
    of_error,
    of_guardrail_action,
    of_hook_results,
    of_moderation,
    of_prompt_filter_results,
    of_warnings,
)

__all__ = ["BESIDE_NAMES", "Beside", "add_beside", "read_beside", "read_failure"]


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
    invocation: Any = msgspec.field(default=None, name="amazon-bedrock-invocationMetrics")
    generation_stats: Any = None
    # An error may lie flat: with `object` "error" (older vLLM), or with nothing but a code (DashScope, WSO2).
    object: Any = None
    message: Any = None
    type: Any = None
    code: Any = None
    choices: msgspec.Raw = NO_RAW

    def failure(self, name: bytes | None = None) -> Any:
        """The error in this event, or None; `name` is that of the event."""
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
        """It looks like an error that has nothing around it."""
        if self.choices is not NO_RAW or not self.message:
            return False
        return self.type == "error" or (self.code is not None and self.code not in _FINE)

    @property
    def known(self) -> bool:
        """Something stands here that we know of, errors left out."""
        return any(getattr(self, name) is not None for name in _KNOWN)

    def counted(self) -> tuple[Any, str]:
        """The usage object, and where it stands."""
        if self.usage is None and isinstance(self.x_groq, dict):
            return self.x_groq.get("usage"), "x_groq.usage"
        return self.usage, "usage"

    def times(self) -> tuple[ServerTime, ...]:
        """Durations of the server's own work, `timings` left out."""
        usage, place = self.counted()
        out = object_times(place, usage)
        if isinstance(usage, dict) and "latency_checkpoint" in usage:
            out += object_times("usage.latency_checkpoint", usage["latency_checkpoint"])
        if self.metrics is not None:
            out += object_times("metrics", self.metrics)
        if self.time_info is not None:
            out += object_times("time_info", self.time_info)
        if self.perf_metrics is not None:
            out += object_times("perf_metrics", self.perf_metrics)
        if isinstance(self.nvext, dict):
            out += object_times("nvext.timing", self.nvext.get("timing"))
        if self.invocation is not None:
            out += object_times("amazon-bedrock-invocationMetrics", self.invocation)
        if self.generation_stats is not None:
            counts = read_usage(usage)
            out += rate_times(self.generation_stats, None if counts is None else counts.cached)
        return out


_decode_beside: Final = msgspec.json.Decoder(Beside).decode
_BESIDE_NAMES: Final = tuple(
    (f.name, f.encode_name) for f in msgspec.structs.fields(Beside) if f.name != "choices"
)


_KNOWN: Final = tuple(
    f.name
    for f in msgspec.structs.fields(Beside)
    if f.name not in ("choices", "object", "message", "type", "code")
)


def read_beside(data: bytes) -> Beside:
    """What stands beside the choices of a JSON object; nothing, where `data` is none."""
    try:
        return _decode_beside(data)
    except BAD_JSON:
        value = read_json(data)
    if not isinstance(value, dict):
        return Beside()
    return _build(value)


def _build(value: dict[str, Any]) -> Beside:
    found: dict[str, Any] = {field: value.get(key) for field, key in _BESIDE_NAMES}
    found["choices"] = to_raw(value.get("choices"))
    return Beside(**found)


def add_beside(
    findings: Findings, beside: Beside, data: bytes, name: bytes | None, *, finished: bool = False
) -> None:
    """What stands beside the choices, usage and timings left out. `finished`: the answer had ended."""
    if beside.hook_results is not None:
        findings.verdict(of_hook_results(beside.hook_results))
    if beside.moderation is not None:
        findings.verdict(of_moderation(beside.moderation))
    if beside.warnings is not None:
        findings.verdict(of_warnings(beside.warnings, beside.detections, answered=findings.chose))
    if beside.guardrail_action is not None:
        findings.verdict(of_guardrail_action(beside.guardrail_action))
    if beside.prompt_feedback is not None:
        findings.verdict(of_block_reason(beside.prompt_feedback, "promptFeedback"))
    prompts = beside.prompt_filter_results or beside.prompt_annotations
    if prompts is not None:
        verdict = of_prompt_filter_results(prompts)
        if verdict is not None:
            findings.verdict(verdict, EventClass.GUARDRAIL if verdict.kind is not None else None)
    error = beside.failure(name)
    if error is not None:
        verdict = of_error(read_json(data)) if len(data) <= _ERROR_BYTES_MAX else None
        if verdict is None and finished and read_error(error)[0] == "400":
            # Nothing about a request can be bad once it was answered: a guardrail at the end of the
            # stream, too late to withhold anything (BerriAI/litellm#39036).
            verdict = Verdict("error.code", OUTPUT, "blocked", "output", "medium", "400")
        findings.error(error, verdict)
    times = beside.times()
    if times:
        findings.delta.server_times += times


def read_failure(value: Any, name: bytes | None = None) -> Delta | None:
    """An error in a dialect nobody knows; None if it is none.

    In an `error` member, in a list of them, or flat, if that is a guardrail's. `name` is that of the event,
    which alone may say that it is an error.
    """
    if not isinstance(value, dict):
        return unknown(name) if name == b"error" else None
    beside = _build(value)
    error, verdict = beside.failure(name), of_error(value)
    if error is None or (verdict is None and beside.flat and name != b"error" and beside.object != "error"):
        return None
    findings = Findings()
    findings.error(error, verdict)
    return findings.ranked()
