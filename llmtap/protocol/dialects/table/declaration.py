"""Declare a dialect as a table of the values in its events and of their paths, and check such a table.

The files in `tables/` are the tables that llmtap ships. A table of a user has the same form, and stands in
`[dialects.NAME]` of the configuration or in its own file. `reader.py` reads answers with a table.

Source: ADDING.md explains every key with examples.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec

from llmtap.errors import ConfigError, raise_all
from llmtap.options.values import mistakes_in
from llmtap.protocol.delta import EventClass
from llmtap.protocol.server_times import SERVER_TIMES, UNITS

RULES_MAX: Final = 128
UNNAMED_MAX: Final = 32
"""Maximum number of rules without names of events, because each of these rules can be tried on each event."""
NAMES_MAX: Final = 512
PATHS_MAX: Final = 32
"""Maximum number of paths of one rule, because each path is followed in each event that the rule fits."""
PATH_CHARS_MAX: Final = 256
STEPS_MAX: Final = 16
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.\-]{0,31}")
_STEP: Final = re.compile(
    r"(?P<dot>\.?)(?P<member>[^.\[\]]+)|(?P<each>\[\])|\[(?P<key>[^\[\]=!]+)(?P<op>!?=)(?P<value>[^\[\]]*)\]"
)

Texts = str | tuple[str, ...]
Scalar = str | bool | int
Values = dict[str, Scalar]
EventMark = Literal["role", "done", "metadata", "keepalive", "error", "usage", "tool_call"]
VerdictKind = Literal["model_refusal", "input_guardrail", "output_guardrail"]
Action = Literal["flagged", "blocked", "replaced", "redacted"]
End = Literal["done", "[DONE]", "finish_reason", "none"]
ReasonMeaning = Literal[
    "stop", "length", "tool_call", "refusal", "input_guardrail", "output_guardrail", "failed"
]
OUTPUTS: Final = {
    "content": EventClass.CONTENT,
    "reasoning": EventClass.REASONING,
    "tool_call": EventClass.TOOL_CALL,
    "refusal": EventClass.REFUSAL,
}
"""Keys of a rule whose values are paths of text, with the class of this text."""
PAYLOADS: Final = {"payload": EventClass.CONTENT, "call": EventClass.TOOL_CALL}
"""Keys of a rule whose values are paths of output without text, with the class of this output."""


def doc(description: str) -> msgspec.Meta:
    """Return the help text of a key in the form of msgspec; `llmtap proxy --keys` prints it."""
    return msgspec.Meta(description=description)


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class VerdictRule(_Table, frozen=True):
    """Rule for a verdict of a guardrail or of the model."""

    path: Annotated[str, doc("Path of a value that is there only with the verdict.")]
    kind: Annotated[VerdictKind | None, doc("Kind of the verdict; none: it only flags.")] = None
    action: Annotated[Action, doc("Action of the guardrail.")] = "blocked"
    value: Annotated[Scalar | None, doc("Value at the path; none: any but null, false and empty.")] = None
    category: Annotated[Texts, doc("Paths of the category.")] = ()


class Rule(_Table, frozen=True):
    """Rule for the events that fit `event`, `has` and `where`; a missing condition fits all events."""

    event: Annotated[Texts, doc("Names of events; `message.*`: all that begin with `message.`.")] = ()
    has: Annotated[Texts, doc("Paths that all lead to a value other than null.")] = ()
    where: Annotated[Values, doc("Value at each path; `*` at the end of a text: any rest.")] = {}
    event_class: Annotated[EventMark | None, doc("Class beside the output; `done` ends the stream.")] = None
    done: Annotated[Values, doc("Value at each path of an event that ends the stream.")] = {}
    content: Annotated[Texts, doc("Paths of the text of the answer.")] = ()
    reasoning: Annotated[Texts, doc("Paths of the text of thoughts.")] = ()
    tool_call: Annotated[Texts, doc("Paths of the arguments of a call: a text or an object.")] = ()
    refusal: Annotated[Texts, doc("Paths of the text of the model's refusal.")] = ()
    payload: Annotated[Texts, doc("Paths of output without text: audio or other data.")] = ()
    call: Annotated[Texts, doc("Paths of the name of a call, which is output without text.")] = ()
    cumulative: Annotated[bool, doc("Each text repeats the text so far.")] = False
    repeats: Annotated[bool, doc("Repeats the output of other rules; used only if they read none.")] = False
    choice: Annotated[str | None, doc("Path of the index of a choice, in its list or event.")] = None
    role: Annotated[Texts, doc("Paths of the speaker, in an event without other content.")] = ()
    tokens: Annotated[str | None, doc("Path of the number, or the list, of the event's tokens.")] = None
    logprobs: Annotated[str | None, doc("Path of the log probabilities, one for each token.")] = None
    running_tokens: Annotated[Texts, doc("Paths of the number of output tokens so far.")] = ()
    usage: Annotated[Texts, doc("Paths of the object with the counts; `.` is the event itself.")] = ()
    finish_reason: Annotated[Texts, doc("Paths of the finish reason.")] = ()
    error: Annotated[Texts, doc("Paths of the error: an object with type and message, or a text.")] = ()
    times: Annotated[dict[str, str], doc("Durations of the server: path and unit of each.")] = {}
    verdicts: Annotated[tuple[VerdictRule, ...], doc("Verdicts of guardrails or the model.")] = ()


class Counts(_Table, frozen=True):
    """Paths of token counts in the usage object. The defaults are OpenAI's names."""

    input: Annotated[Texts, doc("Paths of the tokens of the prompt.")] = ("input_tokens", "prompt_tokens")
    output: Annotated[Texts, doc("Paths of the tokens of the answer.")] = (
        "output_tokens",
        "completion_tokens",
    )
    reasoning: Annotated[Texts, doc("Paths of the tokens of thoughts.")] = (
        "output_tokens_details.reasoning_tokens",
        "completion_tokens_details.reasoning_tokens",
        "reasoning_tokens",
    )
    cached: Annotated[Texts, doc("Paths of the cached tokens of the prompt.")] = (
        "input_tokens_details.cached_tokens",
        "prompt_tokens_details.cached_tokens",
        "cached_tokens",
        "prompt_token_details.cached_tokens",
    )
    total: Annotated[Texts, doc("Paths of the total, which can show that there is no output.")] = ()


class DialectTable(_Table, frozen=True, kw_only=True):
    """Declaration of one dialect. Raises ConfigError, which names all wrong keys."""

    name: Annotated[str, doc("Name in reports and metrics (default: NAME).")] = ""
    source: Annotated[str, doc("Page or package that documents the format.")]
    end: Annotated[End, doc("Mark at the end of each complete stream; `none`: no certain mark.")]
    paths: Annotated[Texts, doc("Ends of the paths of requests; `*` stands for any text.")] = ()
    match: Annotated[Texts, doc("Paths of an event's name; without it the `event:` line is used.")] = "type"
    envelope: Annotated[str | None, doc("Member that may hold the event: `result` of JSON-RPC.")] = None
    wrapped: Annotated[bool, doc("A known member names an event without a name, and holds it.")] = False
    message: Annotated[
        str | None, doc("Path of a message's id, if one event names its speaker and others have its text.")
    ] = None
    array: Annotated[
        Literal["events", "answers"],
        doc("Elements of a body that is an array: several answers, or events."),
    ] = "answers"
    plain_text: Annotated[
        Literal["content", "reasoning"] | None, doc("Class of data that is a JSON string, or no JSON.")
    ] = None
    model: Annotated[Texts, doc("Paths of the model, in any event.")] = "model"
    events: Annotated[dict[EventMark, Texts], doc("Names of events that are only of this class.")] = {}
    rules: Annotated[tuple[Rule, ...], doc("Rules of events and whole answers; the first that fits.")] = ()
    counts: Annotated[Counts, doc("Paths of token counts in the usage.")] = Counts()
    finish_reasons: Annotated[
        dict[str, ReasonMeaning],
        doc("Meanings of finish reasons that are unknown or mean something else."),
    ] = {}

    def __post_init__(self) -> None:
        raise_all(_table_mistakes(self, f"dialects.{self.name}"))

    @property
    def end_certain(self) -> bool:
        """Whether a stream without an end mark was certainly cut off."""
        return self.end != "none"


def decode_table(raw: Mapping[str, Any], name: str | None = None) -> DialectTable:
    """Convert decoded TOML to a DialectTable; `name`: its name if the TOML has none. Raises ConfigError with
    all mistakes."""
    raw = raw if name is None else {"name": name, **raw}
    try:
        return msgspec.convert(raw, DialectTable)
    except msgspec.ValidationError:
        # msgspec reports only the first mistake, so search for all of them.
        raise_all(mistakes_in(raw, DialectTable, f"dialects.{raw.get('name', '')}".rstrip(".")))
        raise


class Each(msgspec.Struct, frozen=True):
    """Step of a path to the elements of a list, or to a single value that a server sent instead of a list.
    With a key: only to objects in which the key has this value, or another value if `equal` is False."""

    key: str | None = None
    equal: bool = True
    """Whether elements must have the value, instead of not having it."""
    value: Any = None


Step = str | Each


def as_texts(value: Texts | Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the texts in the value of a key: one text, several texts, or the keys of a table."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


@lru_cache(maxsize=1_024)
def parse_path(path: str) -> tuple[Step, ...]:
    """Return the steps of a path; `.` has no steps. Raises ValueError if the path is invalid."""
    if path == ".":
        return ()
    steps: list[Step] = []
    at = 0
    while at < len(path) <= PATH_CHARS_MAX:
        match = _STEP.match(path, at)
        if match is None or (match["member"] and bool(match["dot"]) is (at == 0)):
            raise ValueError(f"the path {path!r} is invalid from character {at + 1}")
        at = match.end()
        if match["member"]:
            steps.append(match["member"])
        else:
            steps.append(
                Each(match["key"], match["op"] != "!=", match["key"] and _condition_value(match["value"]))
            )
    if not 0 < len(steps) <= STEPS_MAX:
        limits = f"1 to {STEPS_MAX} members and at most {PATH_CHARS_MAX} characters"
        raise ValueError(f"expected a path of {limits}, got {path[:PATH_CHARS_MAX]!r}")
    return tuple(steps)


def _condition_value(text: str) -> Any:
    """Return the value in a condition of a path: a JSON value, or a text without quotes."""
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return text


_CONDITIONS: Final = ("has", "where", "done")
_NO_PATHS: Final = ("event", "event_class", "cumulative", "repeats", "times", "verdicts")
"""Keys of a rule that are no paths, or have paths inside other values."""
_PATHS: Final = tuple(key for key in Rule.__struct_fields__ if key not in _NO_PATHS)


def rule_paths(rule: Rule) -> Iterator[tuple[str, str]]:
    """Yield each path of a rule after its key: `(key, path)`."""
    for key in _PATHS:
        yield from ((key, path) for path in as_texts(getattr(rule, key)))
    for name, path, _ in timed_paths(rule):
        yield f"times.{name}", path
    for verdict in rule.verdicts:
        yield from (("verdicts", path) for path in (verdict.path, *as_texts(verdict.category)))


def timed_paths(rule: Rule) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the path and the unit of each duration of a rule."""
    for name, time in rule.times.items():
        path, _, unit = time.rpartition(" ")
        yield name, path, unit


def count_paths(table: DialectTable) -> tuple[str, ...]:
    return tuple(path for key in Counts.__struct_fields__ for path in as_texts(getattr(table.counts, key)))


def _table_mistakes(table: DialectTable, place: str) -> Iterator[ConfigError]:
    rules = table.rules
    names = [
        name
        for texts in (*(rule.event for rule in rules), *table.events.values())
        for name in as_texts(texts)
    ]
    marks = {rule.event_class for rule in rules} | set(table.events)
    if not _NAME.fullmatch(table.name):
        yield ConfigError(
            f"{place}.name",
            f"expected a name of up to 32 lower-case letters, digits and . _ -, got {table.name!r}",
            "such as acme.chat",
        )
    for key, n, limit in (
        ("rules", len(rules), RULES_MAX),
        ("rules without names of events", sum(not rule.event for rule in rules), UNNAMED_MAX),
        ("names of events", len(names), NAMES_MAX),
        *(
            (f"paths in rules[{i}]", sum(1 for _ in rule_paths(rule)), PATHS_MAX)
            for i, rule in enumerate(rules)
        ),
    ):
        if n > limit:
            problem = f"the table has {n} {key}, and at most {limit} are allowed"
            yield ConfigError(place, problem, "remove the ones that are not needed")
    if not (rules or table.plain_text):
        yield ConfigError(place, "the table has no rules", "add [[rules]], or set plain_text")
    if table.end == "done" and "done" not in marks and not any(rule.done for rule in rules):
        yield ConfigError(
            f"{place}.end",
            'the value is "done", but no rule and no key of events has the class done',
            'add event_class = "done" to the rule of the last event',
        )
    if table.end == "finish_reason" and not any(rule.finish_reason for rule in rules):
        yield ConfigError(
            f"{place}.end",
            'the value is "finish_reason", but no rule has the key finish_reason',
            "add this key to a rule, or choose another end",
        )
    if table.counts != Counts() and not any(rule.usage for rule in rules):
        yield ConfigError(
            f"{place}.counts",
            "the table has counts, but no rule has the key usage, in which they are read",
            "add the key usage to a rule, or leave out counts",
        )
    for key in ("match", "model", "message"):
        yield from _path_mistakes(f"{place}.{key}", *as_texts(getattr(table, key)))
    for key in Counts.__struct_fields__:
        yield from _path_mistakes(f"{place}.counts.{key}", *as_texts(getattr(table.counts, key)))
    for i, rule in enumerate(rules):
        for key, path in rule_paths(rule):
            yield from _path_mistakes(f"{place}.rules[{i}].{key}", path, lists=key not in _CONDITIONS)
        for name, _, unit in timed_paths(rule):
            key = f"{place}.rules[{i}].times.{name}"
            if name not in SERVER_TIMES:
                hint = f"known names: {', '.join(SERVER_TIMES)}"
                yield ConfigError(key, f"unknown name of a duration {name!r}", hint)
            if unit not in UNITS:
                problem = f"expected a path, a blank and a unit, got {rule.times[name]!r}"
                yield ConfigError(key, problem, f"known units: {', '.join(UNITS)}")


def _path_mistakes(place: str, *paths: str, lists: bool = True) -> Iterator[ConfigError]:
    for path in paths:
        try:
            steps = parse_path(path)
        except ValueError as exc:
            yield ConfigError(place, str(exc), "such as choices[].delta.content, or . for the event itself")
        else:
            if not lists and any(isinstance(step, Each) for step in steps):
                yield ConfigError(
                    place,
                    f"the path {path!r} selects elements of a list, which is not allowed in a condition",
                    "write the path of the list itself, or of another member",
                )
