"""Common code of all dialects: lenient JSON, events without JSON, usage, errors, counts of tokens.

For chunks in OpenAI's format, there are also running counts (`RunningCount`), llama.cpp's `timings`, and
`Findings`, which merges the choices of a chunk into one Delta.

Source: docs/dialects.md.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from llmtap.protocol.delta import USAGE_TOKENS_MAX, Delta, EventClass, TokenSource, UsageCounts, Verdict
from llmtap.protocol.json_memory import bounded_decoder
from llmtap.protocol.server_times import clock_ns, object_times
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import FAILED, PASSED_ON, filters_verdict, finish_reason_verdict, reason_kind

BAD_JSON: Final = (ValueError, RecursionError)
"""Exceptions of decoders if JSON is malformed, has another shape, is not UTF-8, or is nested too deeply."""
CHOICES_MAX: Final = 128
"""Maximum number of choices of one answer for which a reader stores state; OpenAI's limit for `n`, too."""
EVENT_CHOICES_MAX: Final = 4_096
"""Maximum number of choices that are read of one event or whole answer: twice OpenAI's limit of prompts in
one request. The rest is not read, and the event counts as not understood (`Delta.parsed`)."""
PIECES_MAX: Final = 4_096
"""Maximum number of pieces of output (content parts, tool calls, items) that are read of one event or whole
answer. The rest is not read, and the event counts as not understood (`Delta.parsed`)."""
INDEX_MAX: Final = 1 << 31
"""Indexes of choices are below this number, and a larger index is read as 0. Without a limit, a server could
send indexes with equal hashes in Python (n and n + 2^61 - 1), and a set of them would take quadratic time."""
Index = Annotated[int, msgspec.Meta(ge=0, lt=INDEX_MAX)]
_CODE_MAX: Final = 1 << 40
_LENIENT_BYTES_MAX: Final = 1 << 20
"""Maximum size of JSON that is read leniently, because this takes up to 0.5 us per byte."""
_COUNT_TYPES: Final = frozenset((int, type(None)))
_decode: Final = bounded_decoder()


def read_non_object(event: SseEvent) -> Delta:
    """Return the Delta of an event without a JSON object: a keep-alive, `[DONE]`, no or unknown data."""
    data = event.data
    if data is None:
        alive = event.comment or event.event == b"ping"
        return Delta(EventClass.KEEPALIVE if alive else EventClass.METADATA)
    data = data.strip()
    if data == b"[DONE]":
        return Delta(EventClass.DONE, done=True)
    if not data or event.event == b"ping":
        return Delta(EventClass.KEEPALIVE)
    if data.startswith(b"[") and isinstance(value := read_json(data), list) and len(value) == 1:
        error = value[0].get("error") if isinstance(value[0], dict) else None
        if error:  # Google's services send their errors in a list.
            kind, message = read_error(error)
            return Delta(EventClass.ERROR, error_type=kind, error_message=message)
    return unknown_delta(event.event)


def unknown_delta(name: bytes | None = None) -> Delta:
    """Return the Delta of an event that was not understood. If its name is `error`, it is an error."""
    if name == b"error":
        return Delta(EventClass.ERROR, error_type="error")
    return Delta(EventClass.METADATA, parsed=False)


def is_object(data: bytes) -> bool:
    return data.startswith(b"{") or data.lstrip().startswith(b"{")


NOT_ENDED: Final = frozenset({"null", "none", "not_finished", "thinking_end"})
"""Finish reasons, in lower case, of answers that have not ended. Source: dashscope-sdk-python
api_entities/dashscope_response.py; cloud.ibm.com/apidocs/watsonx-ai; jina-ai/node-DeepResearch src/app.ts."""


def read_json(data: bytes) -> Any:
    """Return the JSON value in `data`, which can have NaN, lone surrogates, and bytes that are not UTF-8.

    Return None if `data` is no JSON, or would take too much memory (`protocol/json_memory.py`).
    """
    try:
        return _decode(data)
    except BAD_JSON:
        pass
    if len(data) > _LENIENT_BYTES_MAX:
        return None
    try:
        return _without_surrogates(json.loads(data.decode("utf-8", "replace")))
    except BAD_JSON:
        return None


def read_data(data: bytes) -> Any:
    """Return the JSON value of an event's data, or the data as text if they are no JSON."""
    value = read_json(data)
    if value is None and data.strip() != b"null" and not data.lstrip().startswith((b"{", b"[{")):
        value = data.decode("utf-8", "replace")
    return value


def _without_surrogates(value: Any) -> Any:
    """Return the value with lone surrogates replaced, because UTF-8 cannot encode them."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case list():
            return [_without_surrogates(v) for v in value]
        case dict():
            return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


def read_count(value: Any) -> int | None:
    """Return a value as a count of tokens; None if it is no valid count. Some servers send `6.0` for 6."""
    if type(value) is int:
        return value if 0 <= value <= USAGE_TOKENS_MAX else None
    return read_count(int(value)) if type(value) is float and value.is_integer() else None


def read_counts(of_input: Any, of_output: Any, reasoning: Any = None, cached: Any = None) -> UsageCounts:
    """Return the counts of a usage. An invalid value becomes None, and is counted in `refused`."""
    # Fast path, because some servers send a usage with every token.
    given = (of_input, of_output, reasoning, cached)
    if _COUNT_TYPES.issuperset(map(type, given)):
        numbers = list(filter(None, given))
        if not numbers or (min(numbers) > 0 and max(numbers) <= USAGE_TOKENS_MAX):
            return UsageCounts(*given)
    counts = UsageCounts(
        read_count(of_input),
        read_count(of_output),
        None if reasoning is None else read_count(reasoning),
        None if cached is None else read_count(cached),
    )
    counts.refused = (
        (of_input is not None and counts.input is None)
        + (of_output is not None and counts.output is None)
        + (reasoning is not None and counts.reasoning is None)
        + (cached is not None and counts.cached is None)
    )
    return counts


def sum_counts(counts: Sequence[UsageCounts]) -> UsageCounts:
    def total(name: str) -> int | None:
        values = [n for c in counts if (n := getattr(c, name)) is not None]
        return sum(values) if values else None

    refused = sum(c.refused for c in counts)
    return UsageCounts(total("input"), total("output"), total("reasoning"), total("cached"), refused)


def read_usage(usage: Any) -> UsageCounts | None:
    """Return the counts of a `usage` object; None if it is no object, or all its counts are zero or null."""
    if not isinstance(usage, dict):
        return None
    get = usage.get
    of_input, of_output = get("prompt_tokens_details"), get("completion_tokens_details")
    prompt, completion = get("prompt_tokens"), get("completion_tokens")
    if not (prompt or completion):
        # Read the names of Responses, or of Realtime (`input_token_details`). Some servers send these names
        # and the names of chat, but null or zero in the members of chat.
        prompt, completion = get("input_tokens", prompt), get("output_tokens", completion)
        of_input = get("input_tokens_details", get("input_token_details", of_input))
        of_output = get("output_tokens_details", get("output_token_details", of_output))
    reasoning = of_output.get("reasoning_tokens") if isinstance(of_output, dict) else None
    cached = of_input.get("cached_tokens") if isinstance(of_input, dict) else None
    counts = read_counts(
        prompt,
        completion,
        # SGLang counts reasoning tokens, and DeepSeek cached tokens, at the top of the usage.
        get("reasoning_tokens") if reasoning is None else reasoning,
        get("prompt_cache_hit_tokens") if cached is None else cached,
    )
    if counts.input or counts.output or counts.refused or read_count(get("total_tokens")):
        return counts
    return None


def is_zero(usage: Any) -> bool:
    return isinstance(usage, dict) and not any(usage.get(n) for n in ("prompt_tokens", "completion_tokens"))


def read_error(error: Any) -> tuple[str, str | None]:
    """Return `(type, message)` of an error: an object, the first object of a list, or a text. The type is
    `code` if this is a text, else `type`, else a numeric `code`, else `"error"`."""
    if isinstance(error, list) and error:
        error = error[0]
    if isinstance(error, str):
        return "error", error
    if not isinstance(error, dict):
        return "error", None
    # Prefer `err_type`: SGLang puts the type of the error there, and the type of the finish reason in `type`.
    code, kind, message = error.get("code"), error.get("err_type") or error.get("type"), error.get("message")
    name = next((v for v in (code, kind) if isinstance(v, str) and v), None)
    if name is None:
        name = str(code) if type(code) is int and abs(code) <= _CODE_MAX else "error"
    return name, message if isinstance(message, str) else None


def add_error(delta: Delta, error: Any) -> None:
    """Add an error to `delta`: its type and message, and its member `type` if a `code` takes precedence."""
    delta.error_type, delta.error_message = read_error(error)
    if isinstance(error, list) and error:
        error = error[0]
    if isinstance(error, dict) and error.get("code") == delta.error_type:
        kind = error.get("type")
        if isinstance(kind, str) and kind not in ("", "error", delta.error_type):
            delta.error_type_beside_code = kind


class RunningCount:
    """Counts the tokens of each event as the growth of a running `usage`. A usage is a running count if the
    first chunk with a choice has it without a finish reason, and if it counts the first text (the totals of
    Gemini are not in step with the text). Otherwise it is the total of the answer."""

    __slots__ = ("_last_counts", "is_running")

    def __init__(self) -> None:
        self.is_running: bool | None = None
        """Whether the usage is a running count; None before the first chunk with a choice."""
        self._last_counts: dict[int, int] = {}
        """By choice: latest count, from which the next event's tokens are computed."""

    def tokens_added(
        self,
        choices: list[int],
        counts: UsageCounts | None,
        *,
        running: bool,
        text: bool = False,
        role: bool = False,
    ) -> int:
        """Return the number of tokens since the previous chunk of the same choice; 0 if unknown, and for a
        chunk of several choices. `running`: the chunk has a usage and no finish reason. `role`: the chunk has
        a role and no text, so that its tokens are counted with the next chunk."""
        if self.is_running is None and choices:
            self.is_running = running
        if text and running and not (counts is not None and counts.output):
            self.is_running = False
        if not self.is_running or role or len(choices) != 1 or counts is None or counts.output is None:
            return 0
        return self.growth(choices[0], counts.output)

    def growth(self, choice: int, count: int) -> int:
        """Return the increase of the count of a choice since the previous event that reported it."""
        last = self._last_counts.get(choice, 0)
        if choice in self._last_counts or len(self._last_counts) < CHOICES_MAX:
            self._last_counts[choice] = count
        return max(0, count - last)

    def has_count(self, choice: int) -> bool:
        return choice in self._last_counts

    @property
    def has_several_choices(self) -> bool:
        """Whether several choices have their own counts, so that no count is the total of the answer."""
        return len(self._last_counts) > 1


def add_timings(delta: Delta, timings: Any, choices: Sequence[int], predicted: RunningCount) -> None:
    """Add llama.cpp's `timings` to a Delta: the server's clock at the tokens of `choices`, and the number of
    these tokens if no better count is known. `predicted`: running count of `predicted_n`."""
    delta.repeatable = False
    delta.server_times += object_times("timings", timings)
    if len(choices) != 1 or not isinstance(timings, dict):
        return
    delta.server_clock_ns = clock_ns(timings)
    total = read_count(timings.get("predicted_n"))
    added = 0 if total is None else predicted.growth(choices[0], total)
    if added and delta.tokens < 0:
        delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        if not delta.output:
            # A token without text, such as the last token, also counts as output.
            delta.output, delta.choices = True, tuple(choices)


def end_timings(delta: Delta, timings: Any, predicted: RunningCount) -> None:
    """Add llama.cpp's `timings` as the usage at the end. `prompt_n` does not count cached prompt tokens."""
    if not isinstance(timings, dict) or delta.counts is not None or delta.finish_reason is None:
        return
    total, cached = read_count(timings.get("predicted_n")), read_count(timings.get("cache_n"))
    of_input = read_count(timings.get("prompt_n"))
    if of_input is not None:
        of_input += cached or 0
    if total is not None:
        delta.usage = {name: v for name, v in timings.items() if type(v) in (int, float)}
        delta.counts = read_counts(of_input, total, None, cached)
        delta.usage_running = predicted.has_several_choices
        delta.also = (*delta.also, EventClass.USAGE)


_RANKED: Final[dict[int, tuple[EventClass, ...]]] = {}
"""Cache of the classes in a mask of bits, in the order of EventClass; it has at most 2^11 entries."""


def _ranked_classes(mask: int) -> tuple[EventClass, ...]:
    """Return the classes whose bits are set, in their order."""
    classes = _RANKED.get(mask)
    if classes is None:
        classes = _RANKED[mask] = tuple(c for c in EventClass if mask >> c & 1)
    return classes


class Findings(msgspec.Struct, gc=False):
    """Merges the content of all choices of one event, and of its other members, into one Delta."""

    delta: Delta = msgspec.field(default_factory=lambda: Delta(EventClass.METADATA))
    """Result for the whole event."""
    cut: bool = False
    """Whether a limit was reached, so that the rest of the event is not read."""
    has_rails: bool = False
    """Whether NeMo Guardrails reports beside the choices, so that the text of a filtered answer is NeMo's."""
    _class_mask: int = 0
    """Bit n is set if the event has output of the class with the code n."""
    _texts: dict[int, list[str]] = {}
    """By class: texts of the event."""
    _pieces: int = 0
    """Number of texts in the event, for the limit PIECES_MAX."""
    _output_choices: dict[int, None] = {}
    """Choices with output, as the keys of a dict, which keep their order."""
    _indexes: list[int] = []
    """Index of each choice in the event."""
    _markers: list[int] = []
    _id_count: int = 0
    """Number of token ids in the event."""
    _logprob_count: int = 0
    """Number of tokens with log probabilities in the event."""
    _role: bool = False
    """Whether a choice names its speaker, as the first chunk does."""

    def add_choice(self, index: int, *, ids: int = 0, logprobs: int = 0, role: bool = False) -> None:
        """Add a choice with its numbers of token ids and log probabilities. Add its pieces afterwards."""
        self._indexes.append(index)
        self._logprob_count += logprobs
        self._role |= role
        if ids:
            self._id_count += ids
            self._output_choices[index] = None

    def add_piece(
        self, index: int, kind: EventClass, text: str, *, output: bool = True, audio: bool = False
    ) -> None:
        """Add a generated piece of a choice. `output`: False for a call that has only an id."""
        self._pieces += 1
        if self._pieces > PIECES_MAX:
            self.cut = True
            return
        self._class_mask |= 1 << kind
        self._texts.setdefault(kind, []).append(text)
        if output:
            self._output_choices[index] = None
        delta = self.delta
        if kind is EventClass.CONTENT:
            delta.content |= audio or not text.isspace()
        elif kind is EventClass.TOOL_CALL:
            delta.tool_call |= output
        elif kind is EventClass.REASONING:
            delta.reasoning = True
        elif kind is EventClass.REFUSAL:
            delta.refusal = True

    def add_marker(self, index: int) -> None:
        """Record that a choice sent (a part of) a marker such as `<think>`: generated, but no text."""
        self._markers.append(index)

    def add_classes(self, *classes: EventClass) -> None:
        """Add classes of the event."""
        for kind in classes:
            self._class_mask |= 1 << kind

    def add_finish(
        self,
        reason: str,
        filters: Any = None,
        *,
        only_text: bool = False,
        signal: str = "finish_reason",
        judged: bool = True,
    ) -> bool:
        """Add the finish reason of a choice. `filters`: results of Azure's filter for the choice.
        `only_text`: all text of the choice is in this event. `signal`: name of the field of the reason.
        `judged`: whether the reason gives a verdict. Return whether the text is a guardrail's."""
        if reason.lower() in NOT_ENDED:
            return False
        self.delta.finish_reason = reason
        verdict = finish_reason_verdict(reason, signal) if judged else None
        if verdict is not None:
            filter_verdict = filters_verdict(filters)
            verdict.category = None if filter_verdict is None else filter_verdict.category
            if only_text:
                verdict.substituted, verdict.action = True, "replaced"
            self.add_verdict(verdict, EventClass.REFUSAL if reason == "refusal" else EventClass.GUARDRAIL)
        elif reason_kind(reason) in FAILED and self.delta.error_type is None:
            self._class_mask |= 1 << EventClass.ERROR
            self.delta.error_type = reason
        return only_text and verdict is not None

    def add_verdict(self, verdict: Verdict | None, shown: EventClass | None = EventClass.GUARDRAIL) -> None:
        """Add a verdict, if any, with the event class `shown`. The Delta gets the first verdict of a
        guardrail that acted; if none acted, the first verdict."""
        if verdict is None:
            return
        if shown is not None:
            self._class_mask |= 1 << shown
        standing = self.delta.verdict
        if standing is None or (standing.action in PASSED_ON and verdict.action not in PASSED_ON):
            self.delta.verdict = verdict

    def add_filter_results(self, results: Any, *, alone: bool) -> None:
        """Add the results of Azure's filter for a choice. `alone`: it has no content, so a filter that acted
        sets the class of the event."""
        verdict = filters_verdict(results)
        if verdict is not None:
            self.add_verdict(verdict, EventClass.GUARDRAIL if alone and verdict.kind is not None else None)

    def add_error(self, error: Any, verdict: Verdict | None = None) -> None:
        """Add a failure. `verdict`: verdict of the guardrail that caused the failure, if any."""
        self._class_mask |= 1 << EventClass.ERROR
        add_error(self.delta, error)
        self.add_verdict(verdict)

    def add_timings(self, timings: Any, predicted: RunningCount) -> None:
        """Add llama.cpp's `timings`, which can come with each piece. Call this after `add_choice`."""
        indexes = self._indexes
        runs = bool(self._output_choices) or (len(indexes) == 1 and predicted.has_count(indexes[0]))
        add_timings(self.delta, timings, indexes if runs else [], predicted)

    def add_usage(self, usage: Any, running: RunningCount) -> None:
        """Add the usage object of the event, if any. Call this after `add_choice`."""
        if usage is None and running.is_running is not None and not (self._id_count or self._logprob_count):
            return
        delta = self.delta
        counts = None if usage is None else read_usage(usage)
        runs, text = usage is not None and delta.finish_reason is None, bool(self._texts)
        added = running.tokens_added(
            self._indexes, counts, running=runs, text=text, role=self._role and not text
        )
        if counts is not None:
            self._class_mask |= 1 << EventClass.USAGE
            delta.usage, delta.counts = usage, counts
            goes_on = delta.finish_reason is None or running.has_several_choices
            delta.usage_running = running.is_running is True and bool(self._indexes) and goes_on
        if self._id_count:
            delta.tokens, delta.token_source = self._id_count, TokenSource.TOKEN_IDS
        elif self._logprob_count:
            delta.tokens, delta.token_source = self._logprob_count, TokenSource.LOGPROBS
        elif added:
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
            # The counted tokens are output, even without text.
            self._output_choices[self._indexes[0]] = None

    def to_delta(self) -> Delta:
        """Return the Delta of all findings. Its primary class is the first in the order of EventClass."""
        delta = self.delta
        mask = self._class_mask
        # If the event has a finish reason or counts output tokens, ROLE is not its primary class.
        counted = delta.counts is not None and bool(delta.counts.output) and not self._markers
        if self._role and (counted or delta.finish_reason is not None):
            classes = (*_ranked_classes(mask or 1 << EventClass.METADATA), EventClass.ROLE)
        else:
            classes = _ranked_classes(mask | self._role << EventClass.ROLE)
        if classes:
            first = delta.event_class = classes[0]
            delta.also = classes[1:]
            if self._texts:
                spoken = EventClass.CONTENT if first <= EventClass.ERROR else first
                delta.text = "".join(self._texts.get(spoken, ()))
        if self._output_choices:
            delta.choices = tuple(self._output_choices)
            delta.output = True
        elif self._markers:
            delta.choices = tuple(self._markers)
        delta.blank = bool(mask >> EventClass.CONTENT & 1) and not delta.content
        return delta

    @property
    def has_choices(self) -> bool:
        return bool(self._indexes)

    @property
    def is_empty(self) -> bool:
        return not (self._indexes or self._class_mask)
