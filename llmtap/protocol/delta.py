"""Delta: the meaning of one event of an answer, in terms that all dialects share.

Dialects (`dialects/`) return Deltas; `exchange/observer.py` adds them to an Exchange. This module also has
the parts of a Delta: event class, token counts and their source, verdict of a guardrail, duration that the
server reports. Nothing in a Delta is specific to a provider, except `usage`, which is kept as sent.

Source: docs/dialects.md.
"""

from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from llmtap.json_types import JsonObject

MODEL_CHARS_MAX: Final = 1_024
"""Maximum length of a model's name that a dialect reads from an event. `exchange/bounds.py` shortens it
further."""
USAGE_TOKENS_MAX: Final = 10**8
"""Maximum number of tokens in the usage of one exchange: ten times the longest context window."""


class EventClass(IntEnum):
    """Primary class of an event: the first class of this list that applies. The value is its code in
    timelines."""

    GUARDRAIL = 0
    """First, because a guardrail may report itself as an error."""
    ERROR = 1
    REFUSAL = 2
    CONTENT = 3
    TOOL_CALL = 4
    REASONING = 5
    ROLE = 6
    DONE = 7
    USAGE = 8
    METADATA = 9
    KEEPALIVE = 10


class Word(StrEnum):
    """A closed set of words. Use the plain attribute `word`: reading `value` takes two calls in Python
    3.11."""

    def __init__(self, word: str) -> None:
        self.word = word


class Reading(Word):
    """How an answer was understood, which decides which of its figures are known."""

    DIALECT = "dialect"
    """Read by a known dialect."""
    INFERRED = "inferred"
    """No dialect fits: texts, counts and end were inferred from the structure of its events."""
    NONE = "none"
    """Not understood: only its reads and the ends of its events are timed."""


class ReadingLimit(StrEnum):
    """A limit that was reached while an answer was read, so that less is known about the answer."""

    KEPT_EVENTS = "kept_events"
    """No more events could be kept before the dialect was certain (`dialects/chooser.py`)."""
    REVISIONS = "revisions"
    """Further events that the dialect does not understand are not tried with other dialects."""
    STRUCTURE_VALUES = "structure_values"
    """Further values are not examined for the structure of the answer (`structure/`)."""
    STRUCTURE_PLACES = "structure_places"
    """Further places, counts or kinds of events are not compared."""
    STRUCTURE_TABLES = "structure_tables"
    """The table made from the structure of the answer does not grow any more."""
    LOGGED_EVENTS = "logged_events"
    """Later events are not logged one by one (`Exchange.unlogged_events`)."""
    HOLDS = "holds"
    """Later pauses by the client are not kept (`Timeline.holds`)."""


class TokenSource(Word):
    """Where a token count came from, best first (IETF draft, 4.4)."""

    USAGE = "usage"
    TOKEN_IDS = "token_ids"
    LOGPROBS = "logprobs"
    RUNNING_USAGE = "running_usage"
    TOKENIZER = "tokenizer"
    """Counted by llmtap with a configured tokenizer, from the text of the events."""
    CHUNKS = "chunks"
    """One token per chunk that carries text: an estimate, and named as one."""
    NONE = "none"


class UsageCounts(msgspec.Struct, gc=False):
    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cached: int | None = None
    refused: int = 0
    """Number of values refused because they are no count: negative, above USAGE_TOKENS_MAX, not whole, no
    number."""


class Verdict(msgspec.Struct, gc=False):
    signal: str
    kind: str | None = None
    """`model_refusal`, `input_guardrail`, `output_guardrail`, or `guardrail` if the evidence does not show
    which of the two. None if the guardrail only flags, or acts without naming the phase: then the events
    before it decide (`exchange/interventions.py`)."""
    action: str | None = None
    """`flagged`, `blocked`, `replaced` or `redacted`; None for the model's own refusal."""
    phase: str | None = None
    confidence: str = "high"
    value: str | None = None
    """The decisive code or reason, as the server sent it: possibly a text, so the Exchange gets `clean_word`
    of it."""
    category: str | None = None
    path: str | None = None
    substituted: bool = False
    """A canned text replaces the answer."""
    detail: JsonObject | None = None


class ServerTime(msgspec.Struct, gc=False):
    """One duration that the server reports of its own work (IETF draft, 4.6.3 option C)."""

    name: str
    ms: float
    """The duration as reported: it may be negative, not finite, or longer than the exchange
    (`exchange/verdict.py`)."""
    where: str
    """The object, or `header:NAME`, `trailer:NAME`, that held it."""
    path: str | None = None
    unit: str = "ms"
    """Unit in which the server sent the value: `s`, `ms`, `ns`, or `tokens/s` for a rate."""


class Delta(msgspec.Struct, gc=False):
    """Meaning of one event: what it adds to the answer. Most events set only a few of the fields."""

    event_class: EventClass
    size: int = 0
    """Bytes of the event in the decoded body; set by the caller of the dialect."""
    output: bool = False
    """The event carries generated output of any kind: text (blank too), a call's name, audio, a bare token
    id."""
    content: bool = False
    """The event carries content that is not only white space, or audio."""
    blank: bool = False
    reasoning: bool = False
    # The fast path of openai_chat.py builds the fields up to `also` by position.
    text: str = ""
    """Text of the primary class; if that is an error or a guardrail, the text of the content in the same
    event. The text is not stored."""
    choices: tuple[int, ...] = ()
    """Indexes of the choices that carry output. Without output: those that sent only a marker such as
    `<think>`, which was generated but is no text."""
    also: tuple[EventClass, ...] = ()
    tokens: int = -1
    """Tokens that the event itself declares; -1 if it declares none."""
    token_source: TokenSource = TokenSource.NONE
    model: str | None = None
    """Name of the model in the first event that has it, and in each event that changes it."""
    finish_reason: str | None = None
    usage: JsonObject | None = None
    """The usage object as sent; None also if it counts nothing (all values are 0)."""
    counts: UsageCounts | None = None
    usage_running: bool = False
    """`usage` is the count so far, sent with output; it is not the total."""
    error_type: str | None = None
    error_message: str | None = None
    tool_call: bool = False
    """The event carries a call's name or arguments, whether or not that is its primary class."""
    refusal: bool = False
    verdict: Verdict | None = None
    server_times: tuple[ServerTime, ...] = ()
    server_clock_ns: int = -1
    """Reading of the server's own clock at this event's last token, in ns since a moment that the server
    chose; -1 if not reported."""
    retry: bool = False
    """A gateway restarted the answer: after output came another role event, with a new id or model."""
    done: bool = False
    """The event is, or carries, the end marker of its dialect."""
    parsed: bool = True
    """False if the shape of the event was not understood: the event then counts for timing only."""
    repeatable: bool = False
    """The event is one piece of output of one choice and nothing else, and its reader stores nothing of the
    text: the same event with another text gives the same Delta with that text (`protocol/repetition.py`)."""
