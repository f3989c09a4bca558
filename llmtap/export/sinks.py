"""Interface of consumers of finished exchanges (`ExchangeSink`), and the states that the consumers report.

The meter's pipeline calls `ended` of each sink with the exchange, its metrics, its `SeriesKey` (tenant,
model, arm, class) and whether it met its objectives. `ExporterState` and `CaptureState` are the counts of the
OTLP exporter and of the capture, for `/metrics` and the summary.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol

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
