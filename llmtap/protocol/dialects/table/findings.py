"""Values at the paths of a rule in one event: `Findings`, and the functions that add values to it.

Each of these functions gets a value, the findings, and the index of the choice to which the value belongs.
"""

from collections.abc import Callable
from math import inf
from typing import Any, Final

import msgspec

from llmtap.protocol import verdicts
from llmtap.protocol.delta import EventClass, ServerTime, TokenSource, UsageCounts, Verdict
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import CHOICES_MAX
from llmtap.protocol.dialects.table.declaration import VerdictRule

NO_VALUE: Final = (inf, None)
_INCREMENTS: Final = (0, -1)
"""Length and hash for a choice whose texts do not repeat the text so far: no text has the hash -1."""
_PHASES: Final = {verdicts.INPUT: "input", verdicts.OUTPUT: "output"}

Get = Callable[[Any], Any]
Values = dict[str, tuple[float, Any]]
Visit = Callable[[Any, "Findings", int], None]


class TextsSoFar:
    """Stores the length and the hash of the text so far, by choice and class. The text is not stored."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: dict[tuple[int, EventClass], tuple[int, int]] = {}
        """By choice and class: length and hash of the text so far."""

    def new_part(self, index: int, kind: EventClass, text: str) -> str:
        """Return the part of a text after the text so far; the whole text if it does not begin with it."""
        marks, key = self._marks, (index, kind)
        length, mark = marks.get(key, (0, 0))
        if len(text) < length or hash(text[:length]) != mark:
            marks[key] = _INCREMENTS
            return text
        if key in marks or len(marks) < CHOICES_MAX:
            marks[key] = (len(text), hash(text))
        return text[length:]


class Findings(msgspec.Struct, gc=False):
    """Values that were found in one event, or in one whole body."""

    so_far: TextsSoFar | None = None
    """Texts of earlier events, for texts that repeat them."""
    root: Any = None
    """Object or list in which the paths of the rule begin."""
    values: Values = {}
    """Values of the whole event by key, each with the rank of its path among the paths of this key."""
    choice_values: dict[int, Values] = {}
    """Values of each choice, by the index of the choice."""
    texts: int = 0
    """Number of texts, including empty texts."""
    reads_tokens: bool = True
    """Whether the tokens of the event are counted; False if its output repeats that of earlier events."""
    is_text: bool = False
    """Whether the event has one text, and at most a model, a role and usage beside it."""
    elements: int = 0
    """Number of list elements that were searched."""
    ends: int = 0
    """Number of values of `Rule.done` that the event has."""
    pieces: list[shapes.Piece] = []
    """Class and text of each output."""
    choices: dict[int, None] = {}
    """Choices with output, as the keys of a dict, which keep their order."""
    beside: list[EventClass] = []
    """Classes of the event in addition to those of its pieces."""
    tokens: int = 0
    source: TokenSource = TokenSource.NONE
    """Source of `tokens`."""
    counts: list[UsageCounts] = []
    usage: Any = None
    total: Any = None
    """Total number of tokens that a count says; used if the parts are missing."""
    reason: str | None = None
    signal: str = "finish_reason"
    """Path of the finish reason, for verdicts."""
    verdict: Verdict | None = None
    error: Any = None
    times: tuple[ServerTime, ...] = ()
    cut: bool = False
    """Whether a limit was reached, so that the rest of the event is not read."""

    def store_verdict(self, verdict: Verdict | None) -> None:
        """Store a verdict, unless an earlier one is stored."""
        self.verdict = self.verdict or verdict


def equal(value: Any, wanted: Any) -> bool:
    """Return whether a value is the wanted one. A wanted text `abc*` is any text that begins with `abc`."""
    if type(value) is not type(wanted):
        return False
    if type(wanted) is str and wanted.endswith("*"):
        return bool(value.startswith(wanted[:-1]))
    return bool(value == wanted)


def add_text(kind: EventClass, cumulative: bool, value: Any, findings: Findings, index: int) -> None:
    if type(value) is str:
        findings.texts += 1
        if cumulative and findings.so_far is not None:
            value = findings.so_far.new_part(index, kind, value)
        if value:
            findings.pieces.append((kind, value))
            findings.choices[index] = None
    elif kind is EventClass.TOOL_CALL:  # The arguments are an object instead of a text.
        add_payload(kind, value, findings, index)


def add_payload(kind: EventClass, value: Any, findings: Findings, index: int) -> None:
    """Add an output that is no text, such as audio."""
    if value:
        findings.pieces.append((kind, ""))
        findings.choices[index] = None


def count_end(wanted: Any, value: Any, findings: Findings, index: int) -> None:
    """Count a value that marks the end of the answer."""
    findings.ends += equal(value, wanted)


def add_verdict(rule: VerdictRule, category: Get | None, value: Any, findings: Findings, index: int) -> None:
    if value and (rule.value is None or equal(value, rule.value)):
        word = verdicts.as_word(None if category is None else category(findings.root))
        findings.store_verdict(
            Verdict(
                "body_field",
                rule.kind,
                rule.action,
                _PHASES.get(rule.kind or ""),
                value=verdicts.as_word(value),
                category=word,
                path=rule.path,
            )
        )


def store_value(key: str, rank: int, value: Any, findings: Findings, index: int) -> None:
    """Store a value of the event, unless a value of a path with a lower rank is stored already."""
    if rank < findings.values.get(key, NO_VALUE)[0]:
        findings.values[key] = rank, value


def store_choice_value(key: str, rank: int, value: Any, findings: Findings, index: int) -> None:
    """Keep the value of a choice from the path that is listed first."""
    values = findings.choice_values.setdefault(index, {})
    if rank < values.get(key, NO_VALUE)[0]:
        values[key] = rank, value
