"""Delta: the meaning of one event of an answer, in terms that are common to all dialects.

Dialects (`dialects/`) return Deltas; `exchange/observer.py` adds them to an Exchange. This module also has
the parts of a Delta: event class, token counts and their source, verdict of a guardrail, duration that the
server reports. Only `usage` is specific to a provider, because it is stored as sent.

Source: docs/dialects.md.
"""

from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from llmtap.json_types import JsonObject

MODEL_CHARS_MAX: Final = 1_024
"""Maximum length of a model's name that dialects return; `exchange/bounds.py` shortens it further."""
USAGE_TOKENS_MAX: Final = 10**8
"""Maximum number of tokens in the usage of one exchange: ten times the longest context window."""


class EventClass(IntEnum):
    """Primary class of an event: the first of these that applies. The value is its code in timelines."""

    GUARDRAIL = 0
    """The first class, because some guardrails report themselves as errors."""
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
    """Enumeration of words. Read `word` instead of `value`, which costs two function calls in Python 3.11."""

    def __init__(self, word: str) -> None:
        self.word = word


class Reading(Word):
    """How an answer was understood. This decides which figures of the answer are known."""

    DIALECT = "dialect"
    """Read by a known dialect."""
    INFERRED = "inferred"
    """No dialect fits: texts, counts and end were inferred from the structure of the events."""
    NONE = "none"
    """Not understood: only the reads of the answer and the ends of its events have times."""


class ReadingLimit(StrEnum):
    """A limit that was reached while an answer was read, and what is therefore not known about the answer."""

    KEPT_EVENTS = "kept_events"
    """Events were released before the answer was understood, because no more could be kept
    (`dialects/chooser.py`): output in them was not read as such."""
    REVISIONS = "revisions"
    """Other dialects are not tried on further events that the chosen dialect does not understand."""
    STRUCTURE_VALUES = "structure_values"
    """Further values are not examined for the structure of the answer (`structure/`)."""
    STRUCTURE_PLACES = "structure_places"
    """Further places, counts or kinds of events are not compared."""
    STRUCTURE_TABLES = "structure_tables"
    """The table made from the structure of the answer does not grow any more."""
    LOGGED_EVENTS = "logged_events"
    """Later events are not logged one by one (`Exchange.unlogged_events`)."""
    HOLDS = "holds"
    """Later pauses by the client are not stored (`Timeline.holds`)."""


class TokenSource(Word):
    """Source of a token count, the best first (IETF draft, 4.4)."""

    USAGE = "usage"
    TOKEN_IDS = "token_ids"
    LOGPROBS = "logprobs"
    RUNNING_USAGE = "running_usage"
    TOKENIZER = "tokenizer"
    """Counted by llmtap with a configured tokenizer, from the text of the events."""
    CHUNKS = "chunks"
    """One token for each chunk that carries text. Reports call this an estimate."""
    NONE = "none"


class UsageCounts(msgspec.Struct, gc=False):
    """Numbers of tokens in a usage object; None if not reported."""

    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cached: int | None = None
    """Number of prompt tokens that the server had in its prefix cache."""
    refused: int = 0
    """Number of invalid values: negative, above USAGE_TOKENS_MAX, fractional, or no number."""


class Verdict(msgspec.Struct, gc=False):
    """Sign of a guardrail or of a refusal in one event."""

    signal: str
    """Kind of evidence, such as `finish_reason`, `error.code` or `body_field`."""
    kind: str | None = None
    """`model_refusal`, `input_guardrail`, `output_guardrail`, or `guardrail` if the evidence does not show
    whether input or output was blocked. None if the guardrail only flags, or if it acts without a phase:
    `exchange/interventions.py` then decides by the events before it."""
    action: str | None = None
    """`flagged`, `blocked`, `replaced` or `redacted`; None for the model's own refusal."""
    phase: str | None = None
    """What the guardrail assessed: `input` or `output`; `unknown` if the evidence does not show it."""
    confidence: str = "high"
    """How certain the sign is, such as `high`."""
    value: str | None = None
    """The decisive code or reason as sent; possibly a text, so the Exchange stores only its `clean_word`."""
    category: str | None = None
    """Category of the content, such as `hate`, by which the guardrail decided."""
    path: str | None = None
    """Path of the decisive member in the event."""
    substituted: bool = False
    """The guardrail replaced the answer by a fixed text."""
    detail: JsonObject | None = None
    """Further members for the report of the exchange."""


class ServerTime(msgspec.Struct, gc=False):
    """One duration that the server reports about its own work (IETF draft, 4.6.3 option C)."""

    name: str
    """Name of the duration, one of `server_times.SERVER_TIMES`."""
    ms: float
    """The duration as reported; `exchange/verdict.py` removes invalid ones, such as negative durations."""
    where: str
    """Place of the duration: an object of an event, `header:NAME` or `trailer:NAME`."""
    path: str | None = None
    """Path of the duration in an event; None in headers and trailers."""
    unit: str = "ms"
    """Unit in which the server sent the value: `s`, `ms`, `ns`, or `tokens/s` for a rate."""


class Delta(msgspec.Struct, gc=False):
    """Meaning of one event: what the event adds to the answer. Most events set only a few fields."""

    event_class: EventClass
    size: int = 0
    """Bytes of the event in the decoded body; set by the caller of the dialect."""
    output: bool = False
    """The event carries generated output of any kind: a text (also only white space), the name of a call,
    audio, or a token id without text."""
    content: bool = False
    """The event carries audio, or content that is not only white space."""
    blank: bool = False
    """The event carries content that is only white space."""
    reasoning: bool = False
    """Whether the event has reasoning."""
    # The fast path of openai_chat.py sets the fields up to `also` by position: keep their order.
    text: str = ""
    """Text of the primary class; for an error or a guardrail, the text of the content in the event."""
    choices: tuple[int, ...] = ()
    """Indexes of the choices that carry output. Without output: indexes of the choices that sent only a
    marker such as `<think>`, which was generated but is no text."""
    also: tuple[EventClass, ...] = ()
    """Further classes of the event."""
    tokens: int = -1
    """Tokens that the event itself declares; -1 if it declares none."""
    token_source: TokenSource = TokenSource.NONE
    """Source of `tokens`."""
    model: str | None = None
    """Name of the model, only in the first event that has it, and in each event that changes it."""
    finish_reason: str | None = None
    usage: JsonObject | None = None
    """The usage object as sent; None if there is none, or all its values are 0."""
    counts: UsageCounts | None = None
    """Token counts of the event's usage."""
    usage_running: bool = False
    """`usage` counts the tokens so far, and was sent with output: it is not the total of the answer."""
    error_type: str | None = None
    error_message: str | None = None
    error_type_beside_code: str | None = None
    """The member `type` of an error whose `error_type` is its `code`."""
    tool_call: bool = False
    """The event carries the name or arguments of a call, even if TOOL_CALL is not its primary class."""
    refusal: bool = False
    """Whether the event has the text of a refusal."""
    verdict: Verdict | None = None
    """Sign of a guardrail or of a refusal."""
    server_times: tuple[ServerTime, ...] = ()
    server_clock_ns: int = -1
    """Server's clock at the event's last token, in ns since an arbitrary moment; -1 if not reported."""
    retry: bool = False
    """A gateway restarted the answer: after output, a second role event came with a new id or model."""
    done: bool = False
    """The event is, or carries, the end marker of its dialect."""
    parsed: bool = True
    """Whether the event was understood. If not, only its time is used."""
    repeatable: bool = False
    """The event is only one piece of output of one choice, and its reader stores nothing of the text. So the
    same event with another text gives the same Delta with that text (`protocol/repetition.py`). The event can
    have a running usage: its reader then stores only the number of output tokens so far."""
