"""Columns of a capture: each row of the table `COLUMNS` declares one column.

To add a column, add its row here and its meaning in FORMAT.md. All other code loops over the table: the
schema, writing and reading of exchanges, the privacy levels, the coarse values, the encodings of Parquet and
the labels of `report --by`. `pytest --rewrite-golden` writes names, types and levels in FORMAT.md. No
migration is needed, because the new column is null in older files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Final

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import TokenSource

OPTIONAL: Final = ("shape", "turn", "text")
"""Parts of an Exchange that can be None. Columns of their attributes are then null."""
STRING, INT, SMALL, BOOL, DOUBLE = "string", "int64", "int32", "bool", "double"


class Conversion(Enum):
    """Conversion of an attribute of an Exchange to the value in the column."""

    SAME = "unchanged"
    OFFSET = "ns of the monotonic clock to us since the arrival"
    DURATION = "ns to us"


class Coarse(Enum):
    """Content of a column at the privacy level `coarse`. TIME, BYTES and TOKENS are rounded to a step: the
    member's value is the step's name in `coarse.STEPS`."""

    TIME = "time_us"
    BYTES = "bytes"
    TOKENS = "tokens"
    SAME = "the exact value"
    NULL = "nothing: it has, or repeats, an exact value that this level hides"
    OWN = "a rule of its own in `privacy/coarse.py`"


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of a column of a capture."""

    name: str
    type: str
    """Type as in FORMAT.md; `schema.py` has the types of Arrow."""
    path: str = ""
    """Path of the attribute of the Exchange that is written to the column and restored from it."""
    conversion: Conversion = Conversion.SAME
    """How the attribute becomes the value in the column."""
    level: str = "none"
    """Lowest privacy level that stores the column: none, shape or full. The level
    `coarse` stores the same columns as `shape`."""
    coarse: Coarse = Coarse.SAME
    distinct: bool = False
    """Whether values rarely repeat. Then there is no dictionary, which would cost 1 to 2 bytes per value."""
    statistics: bool = False
    """Whether the file has the minimum and maximum of the column, by which readers skip row groups. Never
    True for text, because these values would reveal some of it."""
    is_label: bool = False
    """Whether a report can be split by the column (`report --by`)."""
    compute: Callable[[Exchange], Any] | None = None
    """Function that computes the value from the Exchange. If both `compute` and `path` are missing,
    `store/rows.py` computes the column for a whole batch."""

    @property
    def part_and_name(self) -> tuple[str, str]:
        """Names of the Exchange's part that has the attribute (empty: the Exchange), and of the attribute."""
        part, _, name = self.path.rpartition(".")
        return part, name

    @property
    def getter(self) -> Callable[[Exchange], Any] | None:
        """Function that returns an Exchange's value before conversion, or None without its part."""
        part, name = self.part_and_name
        if part in OPTIONAL:
            return lambda x: None if (owner := getattr(x, part)) is None else getattr(owner, name)
        return attrgetter(self.path) if self.path else self.compute


def _offset_column(name: str, path: str) -> Column:
    """Return a column of a time, which is stored as its distance from the arrival."""
    return Column(name, INT, path, Conversion.OFFSET, coarse=Coarse.TIME, distinct=True)


def _duration_column(name: str, path: str, *, coarse: Coarse = Coarse.SAME, distinct: bool = True) -> Column:
    return Column(name, INT, path, Conversion.DURATION, coarse=coarse, distinct=distinct)


def _arrival_mono_ns(x: Exchange) -> int | None:
    """Return the arrival by the monotonic clock; None if the timeline has times of another clock."""
    if x.arrival_mono_ns is not None:
        return x.arrival_mono_ns
    arrival_ns = x.timeline.arrival_ns
    return arrival_ns if x.clock in ("mono", "kernel") and arrival_ns != x.arrival_wall_ns else None


def _uncertainty_us(x: Exchange) -> int:
    return -(-x.uncertainty_ns // 1_000)


def _token_source(x: Exchange) -> str | None:
    source = x.tokens.source
    return None if source is TokenSource.NONE else source.value


COLUMNS: Final = (
    # Identity and time.
    Column("capture", STRING),
    Column("relay", STRING, "relay", statistics=True),
    Column("seq", INT, "seq", distinct=True, statistics=True),
    Column("id", STRING, distinct=True, compute=lambda x: x.id),
    Column("arrival_ns", INT, coarse=Coarse.OWN, distinct=True, statistics=True),
    Column("arrival", "timestamp us UTC", coarse=Coarse.OWN, distinct=True, statistics=True),
    Column("arrival_mono_ns", INT, coarse=Coarse.NULL, distinct=True, compute=_arrival_mono_ns),
    Column("anchor", SMALL, "anchor"),
    Column("tenant", STRING, "tenant", statistics=True, is_label=True),
    Column("model", STRING, "model", statistics=True, is_label=True),
    Column("response_model", STRING, "response_model"),
    Column("route", STRING, "route", statistics=True),
    Column("arm", STRING, "arm", statistics=True, is_label=True),
    Column("side", STRING, "side", statistics=True, is_label=True),
    Column("pair", STRING, distinct=True, compute=lambda x: x.pair_id),
    Column("unit", STRING, "unit", distinct=True),
    Column("excluded", STRING, "excluded"),
    Column("label", STRING, "label", is_label=True),
    Column("endpoint", STRING, "endpoint", statistics=True),
    Column("dialect", STRING, "dialect"),
    Column("reading", STRING, "reading", is_label=True),
    Column("method", STRING, "method"),
    Column("path", STRING),
    Column("service_tier", STRING, "service_tier", is_label=True),
    Column("service_tier_requested", STRING, "service_tier_requested"),
    Column("request_id", STRING, "request_id", distinct=True),
    Column("upstream_request_id", STRING, "upstream_request_id", distinct=True),
    Column("trace_parent", STRING, "trace_parent", distinct=True),
    Column("level", STRING, statistics=True),
    # The request.
    Column("stream", BOOL, "stream"),
    Column("max_tokens", INT, "shape.max_tokens"),
    Column("temperature", DOUBLE, "shape.temperature"),
    Column("top_p", DOUBLE, "shape.top_p"),
    Column("n", SMALL, "shape.n"),
    Column("tools", SMALL, "shape.tools"),
    Column("images", SMALL, "shape.images"),
    Column("response_format", STRING, "shape.response_format"),
    Column("message_roles", "list of string", level="shape"),
    Column("message_bytes", "list of int64", level="shape", coarse=Coarse.OWN, distinct=True),
    Column("prompt_bytes", INT, coarse=Coarse.BYTES, distinct=True),
    Column("request_bytes", INT, "request_bytes", coarse=Coarse.BYTES, distinct=True),
    Column("blocks", "list of int64", level="shape", distinct=True),
    Column("block_size", SMALL, "shape.block_size", level="shape"),
    Column("block_unit", STRING, "shape.block_unit", level="shape"),
    _duration_column("slo_ttft_us", "slo_ttft_ns", distinct=False),
    _duration_column("slo_tpot_us", "slo_tpot_ns", distinct=False),
    # The turn of the conversation.
    Column("session", STRING, "turn.session", statistics=True, is_label=True),
    Column("session_source", STRING, "turn.source"),
    Column("turn", SMALL, "turn.number"),
    Column("parent", STRING, "turn.parent", distinct=True),
    _duration_column("think_us", "turn.think_ns", coarse=Coarse.TIME),
    Column("turn_by", STRING, "turn.by"),
    # The timeline.
    _offset_column("scheduled_us", "scheduled_ns"),
    _offset_column("request_end_us", "timeline.request_end_ns"),
    _offset_column("connected_us", "timeline.connected_ns"),
    _offset_column("submit_us", "timeline.submit_ns"),
    _offset_column("head_us", "timeline.head_ns"),
    _offset_column("first_byte_us", "timeline.first_byte_ns"),
    _offset_column("first_any_us", "timeline.first_any_ns"),
    _offset_column("first_token_us", "timeline.first_token_ns"),
    _offset_column("first_reasoning_us", "timeline.first_reasoning_ns"),
    _offset_column("first_tool_call_us", "timeline.first_tool_call_ns"),
    _offset_column("first_refusal_us", "timeline.first_refusal_ns"),
    _offset_column("first_content_us", "timeline.first_content_ns"),
    _offset_column("last_token_us", "timeline.last_token_ns"),
    _offset_column("response_end_us", "timeline.response_end_ns"),
    _offset_column("delivered_us", "timeline.delivered_ns"),
    _duration_column("paused_us", "timeline.paused_ns", coarse=Coarse.TIME),
    _duration_column("send_wait_us", "timeline.send_wait_ns", coarse=Coarse.TIME),
    _duration_column("dispatch_late_us", "dispatch_late_ns"),
    _duration_column("added_request_us", "added.request_ns"),
    _duration_column("connect_us", "added.connect_ns"),
    _duration_column("added_first_chunk_us", "added.first_chunk_ns"),
    _duration_column("added_chunk_max_us", "added.chunk_max_ns"),
    Column("clock", STRING, "clock"),
    Column("uncertainty_us", INT, coarse=Coarse.OWN, distinct=True, compute=_uncertainty_us),
    Column("uncertain", BOOL, "uncertain", coarse=Coarse.OWN),
    # The events of the answer.
    Column("event_us", "list of int64", coarse=Coarse.OWN, distinct=True),
    Column("event_class", "list of string", coarse=Coarse.OWN),
    Column("event_bytes", "list of int64", level="shape", coarse=Coarse.OWN),
    Column("event_tokens", "list of int64", coarse=Coarse.NULL),
    Column("event_flags", "list of uint8", coarse=Coarse.OWN),
    Column("event_chars", "list of int64", level="shape", coarse=Coarse.NULL),
    Column("text_blocks", "list of int64", level="shape", coarse=Coarse.NULL, distinct=True),
    Column("server_gap_us", "list of int64", coarse=Coarse.NULL, distinct=True),
    Column("reads", SMALL, "reads", coarse=Coarse.NULL),
    Column("response_bytes", INT, "response_bytes", coarse=Coarse.BYTES, distinct=True),
    Column("unparsed_events", INT, "unparsed_events"),
    Column("unlogged_events", INT, "unlogged_events"),
    # The end of the exchange.
    Column("status", SMALL, "status", statistics=True),
    Column("outcome", STRING, "outcome", statistics=True),
    Column("finish_reason", STRING, "finish_reason"),
    Column("error", STRING, "error"),
    Column("refusal_kind", STRING),
    Column("refusal_source", STRING),
    Column("refusal_detail", STRING),
    Column("refusal_confidence", STRING),
    Column("guardrail", STRING),
    Column("retries", SMALL, "retries"),
    Column("resent", SMALL, "resent"),
    Column("no_token_reason", STRING, "no_token_reason"),
    Column("input_tokens", INT, coarse=Coarse.TOKENS),
    Column("input_token_source", STRING),
    Column("output_tokens", INT, "tokens.output", coarse=Coarse.TOKENS),
    Column("reasoning_tokens", INT, "tokens.reasoning", coarse=Coarse.TOKENS),
    Column("cached_tokens", INT, "tokens.cached", coarse=Coarse.TOKENS),
    Column("token_source", STRING, compute=_token_source),
    Column("usage", STRING, coarse=Coarse.NULL),
    Column("server_timing", STRING, coarse=Coarse.NULL, distinct=True),
    Column("request_body", STRING, "text.request_body", level="full", distinct=True),
    Column("response_text", STRING, "text.response_text", level="full", distinct=True),
    Column("redactions", SMALL, "text.redactions", level="full"),
)
"""All columns, in the order of the schema. No column is a struct: some readers cannot filter structs."""
LABEL_GETTERS: Final = {
    column.name: getter for column in COLUMNS if column.is_label and (getter := column.getter)
}
"""By label that a report can be split by (`--by`): the function that reads its value from an Exchange."""
_LEVELS: Final = ("none", "shape", "full")


def columns_at(level: str) -> frozenset[str]:
    """Return the names of the columns that a privacy level stores."""
    stored = _LEVELS[: _LEVELS.index("shape" if level == "coarse" else level) + 1]
    return frozenset(
        column.name
        for column in COLUMNS
        if column.level in stored and not (level == "coarse" and column.coarse is Coarse.NULL)
    )
