"""Read signs of refusals and guardrails in an event: finish reasons, errors, fields of filters and hooks.

There is one function for each place of such a sign. The dialects pass it the decoded value, and it returns a
Verdict or None. `exchange/interventions.py` combines the verdicts of an exchange, renames the signals of
errors (such as `error.code`) by status and kind of body, and replaces a value that is not a single word.
Texts are searched for phrases and never stored.

Source: docs/dialects.md.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Verdict

MODEL_REFUSAL: Final = "model_refusal"
INPUT: Final = "input_guardrail"
OUTPUT: Final = "output_guardrail"
GUARDRAIL: Final = "guardrail"
"""Kind of a verdict whose evidence does not show whether the guardrail acted on input or output."""
PASSED_ON: Final = ("flagged", "redacted")
"""Actions of a guardrail that let the answer pass, so they are no refusals."""

UNKNOWN: Final = "unknown"
_NO_TRACE: Final = "whether input or output was blocked is only in the trace"


def mark_unknown(verdict: Verdict, reason: str) -> None:
    """Set the phase of a guardrail to unknown. `reason`: text that says why the evidence does not show it."""
    verdict.kind, verdict.phase = GUARDRAIL, UNKNOWN
    verdict.detail = {"stage": UNKNOWN, "why": reason}


_WORD: Final = re.compile(r"[A-Za-z0-9_.:/\-]{1,64}")
_ITEMS_MAX: Final = 64
_MESSAGE_CHARS_MAX: Final = 4_096


def as_word(value: Any) -> str | None:
    """Return a value as text if it is a single short word, such as a code or a category; else None."""
    if type(value) is int and -1_000_000 < value < 1_000_000:
        return str(value)
    return value if isinstance(value, str) and _WORD.fullmatch(value) else None


def refusal_verdict(signal: str, path: str | None = None) -> Verdict:
    return Verdict(signal, MODEL_REFUSAL, path=path)


_FILTERED: Final = frozenset(
    {
        "content_filter",
        "content-filter",
        "contentfilter",
        "sensitive",
        "moderation",
        "error_toxic",
        # Finish reasons of Gemini, which some gateways pass on.
        "safety",
        "prohibited_content",
        "blocklist",
        "recitation",
        "spii",
        "image_safety",
        "image_prohibited_content",
        "image_recitation",
        "model_armor",
        "refusal",  # of Anthropic's classifier of streams, which some gateways pass on
    }
)
_INTERVENED: Final = frozenset({"guardrail_intervened", "content_filtered"})
FAILED: Final = frozenset({"error", "insufficient_system_resource", "network_error", "timeout"})
"""Finish reasons of failures: `error` of OpenRouter and vLLM; the others of DeepSeek, Zhipu and Cohere."""


def reason_kind(reason: str) -> str:
    """Return a finish reason in lower case, and without the detail that Gemini's OpenAI-compatible endpoint
    adds, as in `content_filter: PROHIBITED_CONTENT`."""
    return reason.partition(":")[0].strip().lower()


def finish_reason_verdict(reason: str, signal: str = "finish_reason") -> Verdict | None:
    """Return the verdict of a finish reason that names a filter; else None. With Bedrock's reasons, a fixed
    text replaces the answer, and it is unknown whether input or output was blocked."""
    low = reason_kind(reason)
    if low in _FILTERED:
        return Verdict(signal, OUTPUT, "blocked", "output", value=reason)
    if low not in _INTERVENED:
        return None
    verdict = Verdict(signal, None, "replaced", None, "medium", reason, substituted=True)
    mark_unknown(verdict, _NO_TRACE)
    return verdict


def filters_verdict(results: Any, place: str = "content_filter_results") -> Verdict | None:
    """Return the verdict in the results of Azure's filter for one choice: `filtered` means that the filter
    acted, `detected` alone that it only flagged."""
    for key, kind, action in (("filtered", OUTPUT, "blocked"), ("detected", None, "flagged")):
        category = _category_name(results, key)
        if category is not None:
            return Verdict(f"{place}.{key}", kind, action, "output", category=category or None)
    return None


def prompt_filter_verdict(results: Any) -> Verdict | None:
    filters = (
        r.get("content_filter_results") or r.get("content_filter_result") for r in _objects_in(results)
    )
    verdict = _strongest_verdict(filters_verdict(f, "prompt_filter_results") for f in filters)
    return None if verdict is None else _as_input_verdict(verdict)


def azure_verdict(filters: Any) -> Verdict | None:
    """Return the verdict in Azure's `content_filters` in the Responses API. `blocked`, or a
    `filtered` result, means that a filter acted; `detected` alone that it only flagged. `source_type` names
    the phase."""
    return _strongest_verdict(map(_content_filter_verdict, _objects_in(filters)))


def _content_filter_verdict(entry: JsonObject) -> Verdict | None:
    results = entry.get("content_filter_results")
    verdict = filters_verdict(results, "content_filters")
    if entry.get("blocked") is True and (verdict is None or verdict.kind is None):
        category = _category_name(results, "detected") or None
        verdict = Verdict("content_filters.blocked", OUTPUT, "blocked", "output", category=category)
    return verdict if verdict is None or entry.get("source_type") != "prompt" else _as_input_verdict(verdict)


def _as_input_verdict(verdict: Verdict) -> Verdict:
    """Make a verdict one on the prompt instead of the answer."""
    verdict.phase = "input"
    verdict.kind = None if verdict.kind is None else INPUT
    return verdict


def _strongest_verdict(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """Return the first verdict of a filter that acted; if none acted, the first verdict."""
    present = [v for v in verdicts if v is not None]
    return next((v for v in present if v.kind is not None), present[0] if present else None)


def _category_name(results: Any, key: str) -> str | None:
    """Return the name of the first result with `key` true: "" if the name is not a single word, None if there
    is no such result. A result is an object, or an array of objects (`custom_blocklists`)."""
    if isinstance(results, dict):
        for i, (name, result) in enumerate(results.items()):
            if i == _ITEMS_MAX:
                break
            details = result.get("details") if isinstance(result, dict) else result
            if any(entry.get(key) is True for entry in (*_objects_in([result]), *_objects_in(details))):
                return as_word(name) or ""
    return None


def hook_results_verdict(results: Any) -> Verdict | None:
    """Return the verdict in the results of Portkey's hooks, in which `verdict: false` means flagged. If a
    hook denied the request, only the status and the error show it."""
    hooks = results if isinstance(results, dict) else {}
    for name, phase in (("before_request_hooks", "input"), ("after_request_hooks", "output")):
        for i, hook in _indexed_objects(hooks.get(name)):
            if hook.get("verdict") is False:
                return Verdict(f"hook_results.{name}[{i}].verdict", None, "flagged", phase)
    return None


def moderation_verdict(moderation: Any) -> Verdict | None:
    """Return the verdict in OpenAI's moderation of input and output, which stands beside the answer: its
    `results[].flagged`, or in the Responses API `flagged`."""
    for name in ("output", "input"):
        part = moderation.get(name) if isinstance(moderation, dict) else None
        if isinstance(part, dict) and part.get("flagged") is True:
            return Verdict(f"moderation.{name}.flagged", None, "flagged", name)
        for i, result in _indexed_objects(part.get("results") if isinstance(part, dict) else None):
            if result.get("flagged") is True:
                return Verdict(f"moderation.{name}.results[{i}].flagged", None, "flagged", name)
    return None


_UNSUITABLE: Final = {"UNSUITABLE_INPUT": "input", "UNSUITABLE_OUTPUT": "output"}


def warnings_verdict(warnings: Any, detections: Any, *, answered: bool) -> Verdict | None:
    """Return the verdict in the warnings of the FMS orchestrator. With an answer, they only flag it."""
    for i, warning in _indexed_objects(warnings):
        kind = warning.get("type")
        phase = _UNSUITABLE.get(kind) if isinstance(kind, str) else None
        if phase is not None:
            known: dict[str, Any] = {
                "value": kind,
                "category": _detection_type(detections, phase),
                "path": f"warnings[{i}].type",
            }
            if answered:
                return Verdict("body_field", None, "flagged", phase, **known)
            return _block_verdict("body_field", phase, **known)
    return None


def _detection_type(detections: Any, phase: str) -> str | None:
    for detection in _objects_in(detections.get(phase) if isinstance(detections, dict) else None):
        for result in _objects_in(detection.get("results")):
            if kind := as_word(result.get("detection_type")):
                return kind
    return None


def guardrail_action_verdict(action: Any, trace: Any = None) -> Verdict | None:
    """Return the verdict of Bedrock's `amazon-bedrock-guardrailAction`: a fixed text replaced the answer.
    `trace` (`amazon-bedrock-trace`) shows whether the input or the output was assessed, and whether personal
    data was only masked. Without it, the phase is unknown."""
    if not isinstance(action, str) or action.upper() not in ("INTERVENED", "GUARDRAIL_INTERVENED"):
        return None
    phase, acted = phase_of_trace(trace)
    if acted == "redacted":
        place = "amazon-bedrock-guardrailAction"
        return Verdict("body_field", None, acted, phase or "output", value=action, path=place)
    verdict = Verdict(
        "body_field",
        INPUT if phase == "input" else OUTPUT,
        "replaced",
        phase,
        "medium" if phase is None else "high",
        action,
        path="amazon-bedrock-guardrailAction",
        substituted=True,
    )
    if phase is None:
        mark_unknown(verdict, _NO_TRACE)
    return verdict


_ASSESSED_PHASES: Final = {
    "input": "input",
    "inputAssessment": "input",
    "inputAssessments": "input",
    "output": "output",
    "outputs": "output",
    "outputAssessments": "output",
    "outputAssessment": "output",
}
_TRACE_DEPTH_MAX: Final = 8
_ACTION_STRENGTHS: Final = {"BLOCKED": 2, "ANONYMIZED": 1, "MASKED": 1}


def phase_of_trace(trace: Any) -> tuple[str | None, str | None]:
    """Return the phase and the strongest action in the trace of a guardrail. The phase is None if the action
    was on input and output, or on neither. The action is `replaced`, `redacted` (masked) or None."""
    guardrail = trace.get("guardrail", trace.get("guardrails", trace)) if isinstance(trace, dict) else None
    if not isinstance(guardrail, dict):
        return None, None
    strengths: dict[str, int] = {}
    for name, part in guardrail.items():
        if part and (phase := _ASSESSED_PHASES.get(name)) is not None:
            strengths[phase] = max(strengths.get(phase, 0), _action_level(part))
    strongest = max(strengths.values(), default=0)
    phases = [phase for phase, acted in strengths.items() if acted == strongest]
    return phases[0] if len(phases) == 1 else None, (None, "redacted", "replaced")[strongest]


def _action_level(value: Any, depth: int = 0) -> int:
    """Return the strength of the strongest action in a part of a trace: 2 blocked, 1 masked, 0 none."""
    own = 0
    if isinstance(value, dict):
        action = value.get("action")
        own = _ACTION_STRENGTHS.get(action, 0) if isinstance(action, str) else 0
        value = list(value.values())
    if depth == _TRACE_DEPTH_MAX or not isinstance(value, list):
        return own
    return max((own, *(_action_level(v, depth + 1) for v in value[:_ITEMS_MAX])))


def rails_verdict(data: Any, place: str, status: Any = None) -> Verdict | None:
    """Return the verdict of NeMo Guardrails. `data` lists the activated rails: as objects, in which `stop`
    shows the rail that blocked, or as names, which blocked if `status` is `blocked`."""
    log = data.get("log") if isinstance(data, dict) else None
    rails = log.get("activated_rails") if isinstance(log, dict) else None
    for i, rail in enumerate(rails[:_ITEMS_MAX] if isinstance(rails, list) else ()):
        members = rail if isinstance(rail, dict) else {"name": rail, "stop": status == "blocked"}
        kind, name = members.get("type"), members.get("name")
        if members.get("stop") is not True or not isinstance(name, str):
            continue
        phase = kind if kind in ("input", "output") else _named_phase(name)
        path = f"{place}.log.activated_rails[{i}]"
        verdict = _block_verdict("body_field", phase, path=path, detail=_rail_detail(name))
        verdict.action, verdict.substituted = "replaced", True
        return verdict
    return None


_RAIL_WORDS: Final = frozenset(
    {
        "ai",
        "api",
        "alignscore",
        "autoalign",
        "blocked",
        "bot",
        "check",
        "content",
        "data",
        "defense",
        "detect",
        "detection",
        "facts",
        "guard",
        "guardrailsai",
        "hallucination",
        "heuristics",
        "injection",
        "input",
        "inspect",
        "jailbreak",
        "llama",
        "lynx",
        "mask",
        "model",
        "moderation",
        "on",
        "output",
        "patronus",
        "pii",
        "prompt",
        "protect",
        "response",
        "retrieval",
        "safety",
        "self",
        "sensitive",
        "terms",
        "topic",
        "user",
    }
)
"""Words in the names of the rails in the library of NeMo Guardrails, such as `self check input`."""


def _rail_detail(name: str) -> JsonObject:
    """Return the name of a rail as a detail. A name that is neither a single word nor a name of the library
    becomes `other`, because it is possibly a text of a user."""
    return {"rail": as_word(name) or (name if _RAIL_WORDS.issuperset(name.split(" ")) else "other")}


def block_reason_verdict(feedback: Any, place: str) -> Verdict | None:
    """Return the verdict in Gemini's `promptFeedback.blockReason`, which some gateways pass on."""
    for key in ("blockReason", "block_reason"):
        reason = as_word(feedback.get(key)) if isinstance(feedback, dict) else None
        if reason is not None and not reason.upper().endswith("UNSPECIFIED"):
            return Verdict("body_field", INPUT, "blocked", "input", value=reason, path=f"{place}.{key}")
    return None


_CODES: Final[dict[str, str | None]] = {
    **dict.fromkeys(
        (
            "content_filter",
            "responsibleaipolicyviolation",
            "moderation_blocked",
            "bio_policy",
            "image_content_policy_violation",
            "data_inspection_failed",
            "datainspectionfailed",
            "1301",
            "900514",
            "content_blocked",
            "misalignment_policy_violation",
        )
    ),
    "invalid_prompt": "input",
    "content_policy_violation": "input",
    "2016": "input",
    "2017": "output",
}
"""Error codes of guardrails, in lower case, with their phases; None if the code does not show the phase."""
_TYPES: Final[dict[str, str | None]] = {
    "guardrails_violation": "output",
    "hooks_failed": None,
    "content_filter": None,
    "content_policy_violation": "input",
    "data_inspection_failed": None,
}
_DECISIVE_PHRASES: Final = ("Violated guardrail policy", "GUARDRAIL_INTERVENED")
"""Phrases of LiteLLM, and of Bedrock through LiteLLM, that show a guardrail without any other sign."""
_PHRASES: Final = (
    "Content violates usage guidelines",
    "violates usage guidelines",
    "content management policy",
    "content filtering policy",
    "content blocked",
    "replaced by policy",
    "was flagged",
    "guardrail",
)
_SAFETY_CHECK: Final = re.compile(r"SAFETY_CHECK_TYPE_[A-Z_]{1,40}")
_OF_INPUT: Final = re.compile(r"\b(input|prompt|request)\b", re.IGNORECASE)
_OF_OUTPUT: Final = re.compile(r"\b(output|response|completion|answer)\b", re.IGNORECASE)


def error_verdict(value: Any) -> Verdict | None:
    """Return the verdict in an error of a guardrail; None for another error.

    `value`: the whole JSON object, because some gateways put results of guardrails beside the error.
    """
    if not isinstance(value, dict):
        return None
    error, place = _error_in(value)
    message = error.get("message")
    text = message[:_MESSAGE_CHARS_MAX] if isinstance(message, str) else ""
    return (
        _policy_gateway_verdict(message, place)
        or _code_verdict(error, value, text, place)
        or _type_verdict(error, value, place)
        or _metadata_verdict(error, place)
        or _message_verdict(text)
    )


def _error_in(value: JsonObject) -> tuple[JsonObject, str]:
    """Return the error as an object, and the prefix of the paths of its members, such as `error.`."""
    for key in ("error", "errors"):
        error = value.get(key)
        if isinstance(error, dict) and error:
            return error, f"{key}."
        if isinstance(error, list) and error and isinstance(error[0], dict):
            return error[0], f"{key}[0]."
        if isinstance(error, str) and error:
            return {**value, "message": error}, ""  # xAI puts the code beside the text of the error.
    groq = value.get("x_groq")
    if isinstance(groq, dict) and isinstance(groq.get("error"), str):
        return {"message": groq["error"]}, "x_groq."
    return value, ""


def _block_verdict(signal: str, phase: str | None, **known: Any) -> Verdict:
    kind = None if phase is None else INPUT if phase == "input" else OUTPUT
    return Verdict(signal, kind, "blocked", phase, **known)


def _policy_gateway_verdict(message: Any, place: str) -> Verdict | None:
    """Return the verdict in an error of a gateway that passes on Bedrock's guardrail."""
    if not isinstance(message, dict):
        return None
    phase = {"REQUEST": "input", "RESPONSE": "output"}.get(str(message.get("direction")))
    if message.get("action") == "GUARDRAIL_INTERVENED":
        return _block_verdict("error.message", phase, value=message["action"], path=f"{place}message.action")
    return _block_verdict("error.message", phase) if "interveningGuardrail" in message else None


def _code_verdict(error: JsonObject, value: JsonObject, text: str, place: str) -> Verdict | None:
    """Return the verdict that the code of an error shows; None: none."""
    inner = error.get("innererror") or error.get("inner_error")
    inner = inner if isinstance(inner, dict) else {}
    for source, path in ((error, f"{place}code"), (inner, f"{place}innererror.code")):
        code = as_word(source.get("code"))
        if code is None or code.lower() not in _CODES:
            continue
        if code.lower() == "content_blocked" and error.get("type") == "guardrails_violation":
            return None  # The type of NeMo's error is more precise, and `_type_verdict` reads it.
        keys = ("content_filter_result", "content_filter_results")
        filters = (holder.get(key) for holder in (inner, error) for key in keys)
        category = next((c for f in filters if (c := _category_name(f, "filtered"))), None)
        azure = azure_verdict(error.get("content_filters")) or Verdict("")
        phase = _CODES[code.lower()] or azure.phase or _filtered_phase(value) or _named_phase(text)
        return _block_verdict("error.code", phase, value=code, path=path, category=category or azure.category)
    return None


def _filtered_phase(value: JsonObject) -> str | None:
    """Return the phase (input or output) whose text a content filter names; None without one."""
    for entry in _objects_in(value.get("contentFilter") or value.get("content_filter")):
        if (role := entry.get("role")) in ("user", "history", "system", "assistant"):
            return "output" if role == "assistant" else "input"
    return None


def _type_verdict(error: JsonObject, value: JsonObject, place: str) -> Verdict | None:
    """Return the verdict that the type of an error shows; None: none."""
    kind = error.get("type")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        return None
    phase, detail = _TYPES[kind.lower()], None
    if kind == "guardrails_violation":
        rail = error.get("param")
        if isinstance(rail, str):
            detail = _rail_detail(rail)
            phase = "input" if _named_phase(rail) == "input" else phase
    elif kind == "hooks_failed":
        hooks = hook_results_verdict(value.get("hook_results") or error.get("hook_results"))
        phase = None if hooks is None else hooks.phase
    return _block_verdict("error.type", phase, value=kind, path=f"{place}type", detail=detail)


def _metadata_verdict(error: JsonObject, place: str) -> Verdict | None:
    metadata = error.get("metadata")
    if not isinstance(metadata, dict):
        return None
    reasons = metadata.get("reasons")
    if not isinstance(reasons, list) and "flagged_input" not in metadata:
        return None
    category = as_word(reasons[0]) if isinstance(reasons, list) and reasons else None
    return _block_verdict("error.metadata", "input", path=f"{place}metadata.reasons", category=category)


def _message_verdict(text: str) -> Verdict | None:
    """Return the verdict that words in the message of an error show; None: none."""
    for phrase in _DECISIVE_PHRASES:
        if phrase in text:
            return _block_verdict("error.message", None, detail={"value": phrase})
    low = text.lower()
    for phrase in _PHRASES:
        if phrase.lower() in low:
            check = _SAFETY_CHECK.search(text)
            detail = {"why": phrase} | ({} if check is None else {"category": check[0]})
            return _block_verdict("error.message", _named_phase(text), detail=detail)
    return None


def _named_phase(text: str) -> str | None:
    """Return `input` or `output` if the text names one of them and not the other; else None."""
    of_input, of_output = _OF_INPUT.search(text), _OF_OUTPUT.search(text)
    if (of_input is None) == (of_output is None):
        return None
    return "output" if of_input is None else "input"


def _objects_in(value: Any) -> Iterator[JsonObject]:
    return (item for _, item in _indexed_objects(value))


def _indexed_objects(value: Any) -> Iterator[tuple[int, JsonObject]]:
    if isinstance(value, list):
        for i, item in enumerate(value[:_ITEMS_MAX]):
            if isinstance(item, dict):
                yield i, item
