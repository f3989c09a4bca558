"""Interface of consumers of finished exchanges (`ExchangeSink`), and the states that the consumers report.

The meter's pipeline calls `ended` of each sink with the exchange, its metrics, its `SeriesKey` (tenant,
model, arm, class) and whether it met its objectives. `ExporterState` and `CaptureState` are the counts of the
OTLP exporter and of the capture, for `/metrics` and the summary. `parse_trace_parent` reads the header
`traceparent` for spans and exemplars. Source: https://www.w3.org/TR/trace-context/, 3.2 and 3.2.2.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple, Protocol

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured


class SeriesKey(NamedTuple):
    """Labels under which an exchange is counted; the number of their values is bounded (`Labels`)."""

    tenant: str
    model: str
    arm: str = ""
    slo: str = ""
    uncertain: bool = False


class ExchangeSink(Protocol):
    """Receives each exchange once, on the meter's loop, after `measure` computed its terms."""

    def ended(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Take in a finished exchange. `met`: whether it met its objectives, None if it does not count."""


@dataclass(frozen=True, slots=True)
class ExporterState:
    name: str
    sent: int
    queued: int
    failures: int
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The capture at the time of a scrape. Counts are since the meter started."""

    to: str = ""
    level: str = ""
    exchanges: int = 0
    """In the spool, or beyond it."""
    waiting: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    unshaped: int = 0
    """Captured without the shape of their request, which was too long or found the queue full."""
    problem: str | None = None
    """Reason why nothing can be written now, as one word."""
    files_problem: str | None = None
    """Reason why finished files cannot be delivered now: a sentence without secrets."""
    bytes_written: int = 0
    files: int = 0
    files_waiting: int = 0
    """Closed spools that are not Parquet yet."""
    files_deleted: int = 0
    spool_bytes: int = 0
    local_bytes: int = 0
    """Spools and local Parquet files together."""
    failures: int = 0
    recovered: int = 0
    damaged: int = 0
    """Batches of such spools that could not be read."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


# Version 00 ends after the flags; a later one may go on after a dash, and only its first four fields count.
_FIELDS: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


@dataclass(frozen=True, slots=True)
class TraceParent:
    trace_id: str
    span_id: str
    flags: int

    @property
    def sampled(self) -> bool:
        return bool(self.flags & 1)


def parse_trace_parent(text: str | None) -> TraceParent | None:
    """The fields of a `traceparent`, or None where there is none or it is not valid."""
    if text is None:
        return None
    m = _FIELDS.fullmatch(text.strip(" \t"))
    if m is None:
        return None
    version, trace_id, span_id, flags, more = m.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceParent(trace_id, span_id, int(flags, 16))
