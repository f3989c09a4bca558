"""The Exchange: the record of one request and its answer, with the timeline of events.

`observer.py` builds it from bytes, in the meter, in the load generator and for saved responses. The simulator
and the gRPC client fill it directly, and `capture/store/rows.py` restores it from a capture. Timestamps are
ns of the host's monotonic clock; None means that a point was never reached. `to_dict` returns the public
JSON: seconds since arrival, and the metrics that the caller passes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Final

from llmtap.exchange.outcome import EventClass, Outcome, Reading, ReadingLimit, TokenSource
from llmtap.exchange.strings import (
    NAME_CHARS_MAX,
    PATH,
    WORD_CHARS_MAX,
    Bound,
    clean_composed,
    clean_name,
    clean_word,
)
from llmtap.exchange.trace_context import SpanIds, parse_trace_parent, span_ids_of
from llmtap.protocol.http1 import METHOD_CHARS_MAX


@dataclass(slots=True)
class RequestShape:
    """Structure and parameters of a request, without its text."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    """Number of choices that the client asks for."""
    tools: int | None = None
    """Number of tools that the client offers to the model."""
    images: int | None = None
    """Number of images, sounds and files in the prompt."""
    response_format: Annotated[str | None, Bound(32, "client", clean_name)] = None
    """`text`, `json_object`, `json_schema`, or another single word."""
    roles: Annotated[list[str], Bound(32, "client", clean_name, 10_016)] = field(default_factory=list)
    """Role of each message; `prompt` for a completion."""
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Size of each message in bytes: UTF-8 text, or four bytes for each token id."""
    blocks: "array[int]" = field(default_factory=lambda: array("q"))
    """Chained hashes of the prompt's blocks. If the first n hashes of two prompts are equal, so are their
    first n blocks."""
    block_size: int | None = None
    """Size of a block of `blocks`, in tokens or bytes."""
    block_unit: Annotated[str | None, Bound(16, "llmtap")] = None
    """Unit of `block_size`: `tokens` or `bytes`."""
    tokens: int | None = None
    """Number of tokens in the prompt, if the capture has a tokenizer."""


@dataclass(slots=True)
class Turn:
    """Place of an exchange in its conversation."""

    session: Annotated[str, Bound(64, "llmtap")]
    """Identifier of the conversation."""
    source: Annotated[str, Bound(16, "llmtap")]
    """`explicit`: the request named its conversation or the previous answer. `prefix`: its messages begin
    with those of an earlier request."""
    number: int
    """Position of the request in the conversation."""
    parent: Annotated[str | None, Bound(128, "llmtap")] = None
    """Id of the previous exchange of the conversation."""
    think_ns: int | None = None
    """Time that a person or a tool took: from the end of the previous answer to this arrival."""
    by: Annotated[str | None, Bound(16, "llmtap")] = None
    """`tool` if the last message is the result of a tool call (an agent's loop), else `human`."""


@dataclass(slots=True)
class CapturedText:
    """Redacted texts of an exchange; stored only at the capture level `full`."""

    request_body: Annotated[str | None, Bound(8 << 20, "client")] = None
    response_text: Annotated[str | None, Bound(4 << 20, "upstream")] = None
    redactions: int = 0
    """Number of places at which personal data or secrets were replaced."""


@dataclass(slots=True)
class PairMember:
    """Place of an exchange in a pair: one exchange at a gateway's front, with its exchanges at the back."""

    id: Annotated[str, Bound(128, "llmtap")]
    """Id of the pair, which is the id of the exchange at the front."""
    role: Annotated[str, Bound(16, "llmtap")] = ""
    """Purpose of a request that the gateway made (`pairing/attempts.py`); empty for the front."""
    evidence: Annotated[tuple[str, ...], Bound(16, "llmtap")] = ()
    """Evidence that an exchange at the back belongs to the pair, the decisive evidence first."""
    figures: Annotated[dict[str, object] | None, Bound(32, "llmtap", members=256)] = None
    """Figures of the pair (`pairing/figures.py`), only of the exchange at the front."""
    partners: tuple[SpanIds, ...] = ()
    """Ids of the trace spans of the pair's exchanges on the other side of the gateway."""

    def to_dict(self) -> dict[str, object]:
        return {
            "id": self.id,
            "role": self.role or None,
            "evidence": list(self.evidence),
            "figures": self.figures,
        }


EVENT_CLASSES = tuple(EventClass)
_POINTS: Final = (
    "request_end",
    "submit",
    "head",
    "first_byte",
    "first_any",
    "first_token",
    "first_reasoning",
    "first_tool_call",
    "first_refusal",
    "first_content",
    "last_token",
    "response_end",
    "delivered",
)
"""Names of the points in the public timeline, in its order; each is a field of `Timeline` without `_ns`."""
FRONT: Final = "front"
"""Side of a gateway where its clients are."""
BACK: Final = "back"
"""Side of a gateway where its engines are."""
TEXT_BLOCK_CHARS: Final = 32
"""Number of characters of a block of `Exchange.text_blocks`; the last block can be shorter."""
A2A: Final = "a2a"
"""Endpoint and dialect of the agent protocol A2A."""
BLANK: Final = 1
"""Flag of an event whose content was only white space."""
OUTPUT: Final = 2
"""Flag of an event that carries generated output of any kind."""


@dataclass(slots=True)
class EventLog:
    """Events of an answer as parallel columns: 40 bytes for each event, less than an object would take."""

    t_ns: "array[int]" = field(default_factory=lambda: array("q"))
    """Timestamp of the read that completed the event."""
    classes: bytearray = field(default_factory=bytearray)
    """Code of each event's EventClass."""
    sizes: "array[int]" = field(default_factory=lambda: array("l"))
    """Size of the event in the decoded body, in bytes."""
    tokens: "array[int]" = field(default_factory=lambda: array("l"))
    """Tokens that the event declares (ids, logprobs, running usage), or that a configured tokenizer counts in
    its text; -1: unknown."""
    flags: bytearray = field(default_factory=bytearray)
    """Flags BLANK and OUTPUT of each event. Events of a guardrail or an error can have OUTPUT, too."""
    chars: "array[int]" = field(default_factory=lambda: array("l"))
    """Number of characters of content that each event adds to the first choice; empty unless a capture needs
    the text."""

    def add(self, t_ns: int, event_class: EventClass, size: int, tokens: int, flags: int) -> None:
        self.t_ns.append(t_ns)
        self.classes.append(event_class)
        self.sizes.append(size)
        self.tokens.append(tokens)
        self.flags.append(flags)

    def add_many(
        self, t_ns: Sequence[int], classes: bytes, sizes: Sequence[int], tokens: Sequence[int], flags: bytes
    ) -> None:
        self.t_ns.extend(t_ns)
        self.classes += classes
        self.sizes.extend(sizes)
        self.tokens.extend(tokens)
        self.flags += flags

    def __len__(self) -> int:
        return len(self.t_ns)


@dataclass(slots=True)
class Timeline:
    """Points of an exchange in ns of the monotonic clock; None: not reached."""

    arrival_ns: int
    request_end_ns: int | None = None
    """Last byte of the request read."""
    submit_ns: int | None = None
    """Time when the upstream's socket took the last byte of the request (IETF draft, B.1.1: T_submit)."""
    head_ns: int | None = None
    """Head of the response complete."""
    first_byte_ns: int | None = None
    first_any_ns: int | None = None
    """Time of the first event of any class, including keep-alives."""
    first_token_ns: int | None = None
    """Time of the first event with generated output: content (also white space), reasoning, tool call,
    refusal."""
    first_reasoning_ns: int | None = None
    first_tool_call_ns: int | None = None
    first_refusal_ns: int | None = None
    first_content_ns: int | None = None
    """Time of the first content that is not blank (IETF draft, 5.1.3.1: T_first)."""
    last_token_ns: int | None = None
    response_end_ns: int | None = None
    delivered_ns: int | None = None
    """Time when the client's socket took the last byte."""
    paused_ns: int = 0
    """Total time in which the client did not read, so that the relay stopped reading the stream."""
    events: EventLog = field(default_factory=EventLog)
    connected_ns: int | None = None
    """Time when the connection to the upstream was ready; None: a connection was reused. Used, like
    `send_wait_ns`, only to divide the wait into phases (`metrics/phases.py`)."""
    holds: "array[int]" = field(default_factory=lambda: array("q"))
    """Begin and end of each pause in which the client did not read, so that the relay stopped reading the
    stream; ascending. If the pauses do not add up to `paused_ns`, some are missing."""
    send_wait_ns: int = 0
    """Total time in which the upstream's socket did not take bytes of the request."""


@dataclass(slots=True)
class Tokens:
    """Token counts of an exchange; None: unknown. `source`: source of `output`."""

    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    """Number of reasoning tokens."""
    cached: int | None = None
    """Number of input tokens that the server had in its prefix cache."""
    source: TokenSource = TokenSource.NONE


@dataclass(slots=True)
class Added:
    """Latency added by llmtap, in ns: from a read until the kernel took the bytes for the other side."""

    request_ns: int | None = None
    """Time from the read of the request's last byte until that byte was written, including the connection
    setup."""
    first_chunk_ns: int | None = None
    """Latency added to the first bytes of the body."""
    chunk_max_ns: int | None = None
    """Largest latency added to one read."""
    chunks_ns: "array[int]" = field(default_factory=lambda: array("q"))
    """Added latency of each read of the response."""
    connect_ns: int | None = None
    """Time to connect to the upstream, including name resolution and TLS; None if a connection was reused.
    Part of `request_ns` if the request came in one read."""


@dataclass(slots=True)
class Exchange:
    """One request and its response with its timeline."""

    relay: Annotated[str, Bound(64, "llmtap")]
    seq: int
    """Number of the exchange in its relay, from 1. A missing number is an exchange that was dropped."""
    arrival_wall_ns: int
    timeline: Timeline
    outcome: Outcome = Outcome.COMPLETE
    method: Annotated[str, Bound(METHOD_CHARS_MAX, "client", clean_name)] = ""
    path: Annotated[str, PATH] = ""
    endpoint: Annotated[str | None, Bound(32, "llmtap")] = None
    """`chat.completions`, `completions`, ... None: the path is unknown."""
    dialect: Annotated[str | None, Bound(32, "llmtap")] = None
    reading: Reading = Reading.DIALECT
    """How the answer was parsed, which decides what objectives apply (`metrics/objectives.py`). The observer
    sets it. Other code that fills an exchange knows all its events, so the default is correct."""
    content_type: Annotated[str | None, Bound(64, "upstream", clean_name)] = None
    """Media type of the answer, without parameters."""
    call: Annotated[str | None, Bound(160, "client", clean_composed)] = None
    """Method of a request to an MCP server (not model traffic), followed by its tool or prompt."""
    model: Annotated[str | None, Bound(NAME_CHARS_MAX, "client", clean_name)] = None
    response_model: Annotated[str | None, Bound(NAME_CHARS_MAX, "upstream", clean_name)] = None
    """Name of the model in the answer; the request can name another."""
    service_tier: Annotated[str | None, Bound(32, "llmtap")] = None
    """Service tier of the answer, else of the request: a word of `protocol/tiers.py`."""
    service_tier_requested: Annotated[str | None, Bound(32, "llmtap")] = None
    """Service tier that the request demands; None: none."""
    tenant: Annotated[str, Bound(64, "client")] = "default"
    """Tenant of the request: a name, or the hash of an API key (`meter/tenants.py`)."""
    route: Annotated[str | None, Bound(256, "operator")] = None
    """Name of the configured route that chose the upstream."""
    arm: Annotated[str | None, Bound(64, "operator")] = None
    """Arm of the running experiment; None: not part of an experiment."""
    unit: Annotated[str | None, Bound(64, "llmtap")] = None
    """Public id of the experiment's unit (request, conversation or tenant) that was assigned to the arm."""
    excluded: Annotated[str | None, Bound(64, "llmtap")] = None
    """Reason why the arm's change does not fully apply to the request: the change was not applied, or the
    client itself sent a header field of another arm (`own_header`)."""
    label: Annotated[str | None, Bound(16, "llmtap")] = None
    """Label of the request: the reaction that its sender expects, as a word of `exchange/label.py`; None: no
    label."""
    trace_parent: Annotated[str | None, Bound(256, "client", clean_name)] = None
    """The request's `traceparent`, as sent (W3C Trace Context)."""
    slo_ttft_ns: int | None = None
    """Objective set by the request's header `x-llm-d-slo-ttft-ms`."""
    slo_tpot_ns: int | None = None
    """Objective set by the request's header `x-llm-d-slo-tpot-ms`."""
    request_id: Annotated[str | None, Bound(256, "client", clean_name)] = None
    """`X-Request-Id` of the request, else of the response."""
    upstream_request_id: Annotated[str | None, Bound(256, "upstream", clean_name)] = None
    """The response's own id, from a field of `observer.RESPONSE_IDS`; the provider's support asks for it."""
    answer_id: bytes | None = None
    """Digest of the answer's id, which the conversation's next request can name (`previous_response_id`)."""
    status: int | None = None
    stream: bool = False
    """Whether the answer was a stream or, if the upstream failed before any output, whether the request
    wanted a stream."""
    padded: bool = False
    """Whether events contain random padding, which their sizes include."""
    finish_reason: Annotated[str | None, Bound(WORD_CHARS_MAX, "upstream", clean_word)] = None
    refusal: Annotated[dict[str, object] | None, Bound(128, "upstream", clean_composed, 32)] = None
    """Refusal: `kind`, `source`, `detail` and `confidence`; see `exchange/interventions.py`."""
    guardrail: Annotated[dict[str, object] | None, Bound(128, "upstream", clean_composed, 32)] = None
    """Action of a filter, rail or hook: `phase`, `action`, `signal`, `event`, `category`; `late` and
    `tokens_before` if the client had received tokens before."""
    retries: int = 0
    """Number of times that a gateway began the answer again; `usage` is from the last attempt."""
    resent: int = 0
    """Number of times that the relay sent the request again, on a new connection."""
    no_token_reason: Annotated[str | None, Bound(32, "llmtap")] = None
    """Reason why a stream had no token: `guardrail`, `refusal`, `error`, `client_error`, `cancelled`,
    `rejected`, `empty` (keep-alives and an end marker at most) or `only_metadata`. None if there was a token,
    and for an answer that is not a stream."""
    tokens: Tokens = field(default_factory=Tokens)
    usage: Annotated[dict[str, object] | None, Bound(WORD_CHARS_MAX, "upstream", clean_name, 256)] = None
    """The usage object as the provider sent it."""
    server_timing: Annotated[list[dict[str, object]] | None, Bound(64, "llmtap", members=2_048)] = None
    """Durations that the server reports: `name`, `ms`, `where`. Impossible ones are removed."""
    server_gaps_ns: "array[int] | None" = None
    """ITL option C: gaps between tokens by the server's clock."""
    invalid_values: Annotated[dict[str, int] | None, Bound(32, "llmtap", members=16)] = None
    """Number of impossible values that were removed, by reason (`exchange/verdict.py`)."""
    error: Annotated[str | None, Bound(512, "llmtap")] = None
    """One sentence that names the side at fault; it never contains text of a body."""
    added: Added = field(default_factory=Added)
    """Latency that llmtap added."""
    uncertainty_ns: int = 0
    """Largest error of the times of output events, submission and end."""
    ttft_uncertainty_ns: int = 0
    """Largest error of the times of submission and first token."""
    uncertain: bool = False
    """Whether `uncertainty_ns` exceeds the operator's limit."""
    clock: Annotated[str, Bound(16, "llmtap")] = "mono"
    """`mono`: stamped on read; `kernel`: stamped by the kernel on arrival; `virtual`: simulated."""
    anchor: int = 0
    """Number of times that the host's wall clock was set after the relay's start and before the arrival."""
    side: Annotated[str | None, Bound(8, "llmtap")] = None
    """FRONT or BACK if the exchanges of both sides of a gateway are paired."""
    pair: PairMember | None = None
    """Set when the exchange is paired, after its end."""
    shape: RequestShape | None = None
    """Set only during a capture, like `turn` and `text`."""
    turn: Turn | None = None
    """Place in a conversation; None if no conversation could be recognised."""
    text: CapturedText | None = None
    text_blocks: "array[int] | None" = None
    """Chained hashes of the content of the first choice; None unless the capture has `capture.pair_key`."""
    arrival_mono_ns: int | None = None
    """Arrival by the monotonic clock of the exchange's host. Set only for an exchange that was read from a
    capture, whose timeline is in wall time."""
    capture_data: object | None = None
    """Data of the meter's recorder about the exchange, until its end."""
    scheduled_ns: int | None = None
    """Planned time to send the request (monotonic); None: not sent by the load generator."""
    dispatch_late_ns: int | None = None
    """Time from `scheduled_ns` until the first byte was sent."""
    reads: int = 0
    """Number of reads of the response with payload, and not only framing."""
    request_bytes: int = 0
    response_bytes: int = 0
    unparsed_events: int = 0
    """Number of events whose format the dialect does not know; they are timed as chunks."""
    part: int = 0
    """Number of the response in its WebSocket session, from 1; 0 without a session."""
    reading_limits: tuple[ReadingLimit, ...] = ()
    """Limits that were reached while the answer was parsed."""
    unlogged_events: int = 0
    """Number of events after the event log was full; they change only the points of the timeline."""

    @property
    def id(self) -> str:
        """Relay and number, such as `r0-17`, and the part, if there is one, such as `r0-17.2`."""
        return f"{self.relay}-{self.seq}" if not self.part else f"{self.relay}-{self.seq}.{self.part}"

    @property
    def pair_id(self) -> str | None:
        return None if self.pair is None else self.pair.id

    @property
    def trace_id(self) -> str | None:
        parent = parse_trace_parent(self.trace_parent)
        return None if parent is None else parent.trace_id

    @property
    def span_ids(self) -> SpanIds:
        name = f"{self.id} {self.arrival_wall_ns} {self.timeline.arrival_ns}"
        return span_ids_of(name, parse_trace_parent(self.trace_parent))

    @property
    def not_understood(self) -> bool:
        """Whether the answer could not be parsed although it has events."""
        return self.reading is Reading.NONE and self.unparsed_events > 0

    @property
    def reasoning_is_separate(self) -> bool:
        """Whether the usage counts reasoning tokens in addition to output tokens, and not as a part of them.

        True if the name of the count shows it (Gemini), or if only then the counts add up to the total (xAI).
        """
        usage, reasoning = self.usage or {}, self.tokens.reasoning
        if not reasoning:
            return False
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens"))
        if not all(isinstance(n, int) for n in counts):
            return "thoughtsTokenCount" in usage
        input_tokens, output_tokens, total = counts
        return bool(input_tokens + output_tokens + reasoning == total)  # type: ignore[operator]

    def since_arrival(self, t_ns: int | None) -> float | None:
        """Return a monotonic time as seconds since the arrival; None for None."""
        return None if t_ns is None else (t_ns - self.timeline.arrival_ns) / 1e9

    def to_dict(
        self,
        metrics: dict[str, float | None],
        chunking: dict[str, object],
        held: dict[str, object] | None = None,
        *,
        events: bool = False,
    ) -> dict[str, object]:
        """Return the exchange as public JSON: stable names, times in seconds, null for absent values."""
        t, s = self.timeline, self.since_arrival
        out: dict[str, object] = {
            "id": self.id,
            "relay": self.relay,
            "seq": self.seq,
            "arrival": _rfc3339_text(self.arrival_wall_ns),
            "tenant": self.tenant,
            "model": self.model,
            "service_tier": self.service_tier,
            "service_tier_requested": self.service_tier_requested,
            "route": self.route,
            "side": self.side,
            "pair": None if self.pair is None else self.pair.to_dict(),
            "arm": self.arm,
            "unit": self.unit,
            "excluded": self.excluded,
            "label": self.label,
            "endpoint": self.endpoint,
            "dialect": self.dialect,
            "reading": self.reading.value,
            "content_type": self.content_type,
            "method": self.method,
            "path": self.path,
            "request_id": self.request_id,
            "upstream_request_id": self.upstream_request_id,
            "trace_id": self.trace_id,
            "status": self.status,
            "stream": self.stream,
            "padded": self.padded,
            "outcome": self.outcome.value,
            "timeline": {name: s(getattr(t, f"{name}_ns")) for name in _POINTS},
            "metrics": metrics,
            "tokens": {
                "input": self.tokens.input,
                "output": self.tokens.output,
                "reasoning": self.tokens.reasoning,
                "cached": self.tokens.cached,
                "source": self.tokens.source.value,
            },
            "chunking": chunking,
            "finish_reason": self.finish_reason,
            "refusal": self.refusal,
            "guardrail": self.guardrail,
            "retries": self.retries,
            "resent": self.resent,
            "no_token_reason": self.no_token_reason,
            "usage": self.usage,
            "server_timing": self.server_timing,
            "error": self.error,
            "clock": self.clock,
            "uncertainty": self.uncertainty_ns / 1e9,
            "uncertain": self.uncertain,
            "paused": t.paused_ns / 1e9,
            "held": held,
            "added": {
                name: None if (ns := getattr(self.added, f"{name}_ns")) is None else ns / 1e9
                for name in ("request", "connect", "first_chunk", "chunk_max")
            },
            "request_bytes": self.request_bytes,
            "response_bytes": self.response_bytes,
        }
        if events:
            out["events"] = self.events_to_dicts()
        return out

    def events_to_dicts(self, start: int = 0, stop: int | None = None) -> list[dict[str, object]]:
        log, s, part = self.timeline.events, self.since_arrival, slice(start, stop)
        return [
            {
                "t": s(t_ns),
                "class": EVENT_CLASSES[code].name.lower(),
                "bytes": size,
                "tokens": None if tokens < 0 else tokens,
            }
            for t_ns, code, size, tokens in zip(
                log.t_ns[part], log.classes[part], log.sizes[part], log.tokens[part], strict=True
            )
        ]


def _rfc3339_text(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat().replace("+00:00", "Z")
