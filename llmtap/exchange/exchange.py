"""The Exchange: the record of one request and its answer, with the timeline of events.

`observer.py` builds it from bytes, in the meter, in the load generator and for saved responses; the simulator
and the gRPC client fill it directly, and `capture/store/rows.py` restores it from a capture. Timestamps are
ns of the host's monotonic clock, None where a point was never reached. `to_dict` is the public JSON: seconds
since arrival, and the metrics that the caller passes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from llmtap.exchange.outcome import EventClass, Outcome, TokenSource


@dataclass(slots=True)
class RequestShape:
    """The shape of a request: no word of it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    tools: int | None = None
    images: int | None = None
    """Pictures, sounds and files in the prompt, without their bytes."""
    response_format: str | None = None
    """`text`, `json_object`, `json_schema`, or another single word."""
    roles: list[str] = field(default_factory=list)
    """Of each message; that of a completion is `prompt`."""
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Bytes of each message: of UTF-8, or four a token id."""
    blocks: "array[int]" = field(default_factory=lambda: array("q"))
    """Chained hashes of the prompt's blocks: two prompts begin alike as far as their leading ids agree."""
    block_size: int | None = None
    block_unit: str | None = None
    """`tokens` or `bytes`."""
    tokens: int | None = None


@dataclass(slots=True)
class Turn:
    """The place of an exchange in its conversation."""

    session: str
    source: str
    """`explicit`: the request named its conversation, or the answer before. `prefix`: its messages go on from
    an earlier one's."""
    number: int
    parent: str | None = None
    """Id of the exchange before."""
    think_ns: int | None = None
    """From the end of the previous answer to this arrival: what a person, or a tool, took."""
    by: str | None = None
    """`human`, or `tool` where the last message is the result of a call (an agent's loop)."""


@dataclass(slots=True)
class CapturedText:
    """Redacted texts, at the capture level `full` alone."""

    request_body: str | None = None
    response_text: str | None = None
    redactions: int = 0


EVENT_CLASSES = tuple(EventClass)
_POINTS: Final = (
    "request_end", "submit", "head", "first_byte", "first_any", "first_token", "first_reasoning",
    "first_tool_call", "first_refusal", "first_content", "last_token", "response_end", "delivered",
)  # fmt: skip
"""Names in the public timeline, in its order; each is a field of `Timeline` without `_ns`."""
BLANK: Final = 1
"""Flag of an event whose content was only white space."""
OUTPUT: Final = 2
"""Flag of an event that carries generated output of any kind."""


@dataclass(slots=True)
class EventLog:
    """What passed, event by event, as parallel columns (40 bytes an event instead of an object)."""

    t_ns: "array[int]" = field(default_factory=lambda: array("q"))
    """The stamp of the read in which the event became complete."""
    classes: bytearray = field(default_factory=bytearray)
    sizes: "array[int]" = field(default_factory=lambda: array("l"))
    """Bytes of the event in the decoded body."""
    tokens: "array[int]" = field(default_factory=lambda: array("l"))
    """Tokens the event itself declares (ids, logprobs, running usage), or that a configured tokenizer counts
    in its text; -1 where neither says."""
    flags: bytearray = field(default_factory=bytearray)
    """BLANK and OUTPUT, of each event: a guardrail's or an error's event may carry output, too."""

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
    arrival_ns: int
    request_end_ns: int | None = None
    submit_ns: int | None = None
    """Last byte of the request handed to the upstream's socket (IETF draft, B.1.1: T_submit)."""
    head_ns: int | None = None
    first_byte_ns: int | None = None
    first_any_ns: int | None = None
    """First event of any class, a keep-alive too."""
    first_token_ns: int | None = None
    """First event with generated output: content (blank too), reasoning, tool call, refusal."""
    first_reasoning_ns: int | None = None
    first_tool_call_ns: int | None = None
    first_refusal_ns: int | None = None
    first_content_ns: int | None = None
    """First content that is not blank (IETF draft, 5.1.3.1: T_first)."""
    last_token_ns: int | None = None
    response_end_ns: int | None = None
    delivered_ns: int | None = None
    """Last byte accepted by the client's socket."""
    paused_ns: int = 0
    events: EventLog = field(default_factory=EventLog)


@dataclass(slots=True)
class Tokens:
    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cached: int | None = None
    source: TokenSource = TokenSource.NONE


@dataclass(slots=True)
class Added:
    """What the tap itself added: from a read to the moment the kernel took the bytes, in ns."""

    request_ns: int | None = None
    """From the request's last byte read to its last byte written, connecting included."""
    first_chunk_ns: int | None = None
    chunk_max_ns: int | None = None
    chunks_ns: "array[int]" = field(default_factory=lambda: array("q"))
    connect_ns: int | None = None
    """To connect to the upstream, look-up of its name and TLS included; None where a kept connection was
    used. Part of `request_ns` where the request came in one read."""


@dataclass(slots=True)
class Exchange:
    relay: str
    seq: int
    """Its number in that relay, from 1, without gaps: what is missing was dropped and counted."""
    arrival_wall_ns: int
    timeline: Timeline
    outcome: Outcome = Outcome.COMPLETE
    method: str = ""
    path: str = ""
    endpoint: str | None = None
    """`chat.completions`, `completions`, ... or None for a path we do not know."""
    dialect: str | None = None
    call: str | None = None
    """Of a request to an MCP server, which is no model traffic: its method, then its tool or prompt."""
    model: str | None = None
    response_model: str | None = None
    tenant: str = "default"
    route: str | None = None
    arm: str | None = None
    """Of the experiment that was running; None when it took part in none."""
    unit: str | None = None
    excluded: str | None = None
    """Why the arm's change was not made to this request."""
    trace_parent: str | None = None
    """The request's `traceparent`, as sent (W3C Trace Context)."""
    slo_ttft_ns: int | None = None
    """What the request asks for itself, by `x-llm-d-slo-ttft-ms`; below by `x-llm-d-slo-tpot-ms`."""
    slo_tpot_ns: int | None = None
    request_id: str | None = None
    """X-Request-Id of the request, else of the response."""
    answer_id: bytes | None = None
    """Id by which a later request may name this answer (`previous_response_id`); only its digest is kept."""
    status: int | None = None
    stream: bool = False
    """The answer was a stream; if the upstream failed before any output, the request asked for one."""
    padded: bool = False
    """Events carry random padding, which their sizes include."""
    finish_reason: str | None = None
    refusal: dict[str, object] | None = None
    """Refusal: `kind`, `source`, `detail` and `confidence`; see `exchange/verdict.py`."""
    guardrail: dict[str, object] | None = None
    """What a filter, rail or hook did: `phase`, `action`, `signal`, `event`, `category`; `late` and
    `tokens_before` where tokens had gone out before it acted."""
    retries: int = 0
    """Times that a gateway began the answer again; `usage` is that of the last attempt."""
    resent: int = 0
    """Times that the relay sent the request again, on a fresh connection."""
    no_token_reason: str | None = None
    """Why a stream never brought a token: `guardrail`, `refusal`, `error`, `client_error`, `cancelled`,
    `rejected`, `empty` (keep-alives and an end marker at most) or `only_metadata`. None where one came, and
    for an answer in one piece."""
    tokens: Tokens = field(default_factory=Tokens)
    usage: dict[str, object] | None = None
    server_timing: list[dict[str, object]] | None = None
    """Durations that the server reports: `name`, `ms`, `where`. Those that cannot be true are removed."""
    server_gaps_ns: "array[int] | None" = None
    """ITL option C: gaps between tokens by the server's clock."""
    invalid_values: dict[str, int] | None = None
    """Number of values that cannot be true, by reason (`exchange/verdict.py`)."""
    error: str | None = None
    """What went wrong, in one sentence that names the side; never text of a body."""
    added: Added = field(default_factory=Added)
    uncertainty_ns: int = 0
    """Largest error of the times of output events, of the submission and of the end."""
    uncertain: bool = False
    """`uncertainty_ns` exceeds the operator's limit."""
    clock: str = "mono"
    """`mono`: stamped on read; `kernel`: stamped by the kernel on arrival; `virtual`: simulated."""
    anchor: int = 0
    """Times that the host's wall clock was set between the start of the relay and the arrival."""
    asked: RequestShape | None = None
    """The request's shape; this and the next two only while a capture runs."""
    turn: Turn | None = None
    said: CapturedText | None = None
    keeping: object | None = None
    scheduled_ns: int | None = None
    """When a plan wanted it sent (mono); None for other people's traffic."""
    dispatch_late_ns: int | None = None
    reads: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    unparsed_events: int = 0
    """Events of a shape that the dialect does not know: timed as chunks."""
    part: int = 0
    """Number of the response in its session, from 1; 0 without a session."""
    unlogged_events: int = 0
    """Events beyond the length of the event log; they are in the points alone."""

    @property
    def id(self) -> str:
        return f"{self.relay}-{self.seq}" if not self.part else f"{self.relay}-{self.seq}.{self.part}"

    @property
    def reasoning_apart(self) -> bool:
        """Whether the usage counts reasoning beside the output and not within it: by its name (Gemini), or
        because only so its counts add up to its total (xAI)."""
        usage, reasoning = self.usage or {}, self.tokens.reasoning
        if not reasoning:
            return False
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens"))
        if not all(isinstance(n, int) for n in counts):
            return "thoughtsTokenCount" in usage
        given, output, total = counts
        return bool(given + output + reasoning == total)  # type: ignore[operator]

    def since_arrival(self, t_ns: int | None) -> float | None:
        return None if t_ns is None else (t_ns - self.timeline.arrival_ns) / 1e9

    def to_dict(
        self, metrics: dict[str, float | None], chunking: dict[str, object], *, events: bool = False
    ) -> dict[str, object]:
        """Return public JSON: stable names, seconds, null where a thing is absent."""
        t, s = self.timeline, self.since_arrival
        out: dict[str, object] = {
            "id": self.id, "relay": self.relay, "seq": self.seq,
            "arrival": _rfc3339(self.arrival_wall_ns),
            "tenant": self.tenant, "model": self.model, "route": self.route, "arm": self.arm,
            "unit": self.unit, "excluded": self.excluded,
            "endpoint": self.endpoint, "dialect": self.dialect, "method": self.method, "path": self.path,
            "request_id": self.request_id, "status": self.status, "stream": self.stream,
            "padded": self.padded, "outcome": self.outcome.value,
            "timeline": {name: s(getattr(t, f"{name}_ns")) for name in _POINTS},
            "metrics": metrics,
            "tokens": {
                "input": self.tokens.input, "output": self.tokens.output, "reasoning": self.tokens.reasoning,
                "cached": self.tokens.cached, "source": self.tokens.source.value,
            },
            "chunking": chunking,
            "finish_reason": self.finish_reason, "refusal": self.refusal, "guardrail": self.guardrail,
            "retries": self.retries, "resent": self.resent, "no_token_reason": self.no_token_reason,
            "usage": self.usage, "server_timing": self.server_timing, "error": self.error,
            "clock": self.clock, "uncertainty": self.uncertainty_ns / 1e9, "uncertain": self.uncertain,
            "paused": t.paused_ns / 1e9,
            "added": {
                name: None if (ns := getattr(self.added, f"{name}_ns")) is None else ns / 1e9
                for name in ("request", "connect", "first_chunk", "chunk_max")
            },
            "request_bytes": self.request_bytes, "response_bytes": self.response_bytes,
        }  # fmt: skip
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


def _rfc3339(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat().replace("+00:00", "Z")
