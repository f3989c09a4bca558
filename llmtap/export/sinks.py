"""Interface of consumers of finished exchanges (`ExchangeSink`), and the states that the consumers report.

The meter's pipeline calls `on_end` of each sink with the exchange, its metrics, its `SeriesKey` (tenant,
model, arm, class, reading) and whether it met its objectives. `ExporterState` and `CaptureState` have the
counts of the OTLP exporter and of the capture, for `/metrics` and the summary.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple, Protocol

from llmtap.counts import Count
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Reading
from llmtap.metrics.latency import Measured


class SeriesKey(NamedTuple):
    """Labels under which an exchange is counted. The number of values of each label is bounded (`Labels`)."""

    tenant: str
    model: str
    arm: str = ""
    slo: str = ""
    """Name of the SLO class."""
    uncertain: bool = False
    """Whether the exchange's timestamps are too uncertain."""
    reading: str = Reading.DIALECT.value
    """How the answer was read: by a dialect, or inferred."""
    service_tier: str = ""


class ExchangeSink(Protocol):
    """Consumer of finished exchanges. It gets each exchange once, with metrics, on the meter's event loop."""

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Process a finished exchange. `met`: whether the exchange met its objectives; None if the objectives
        do not count the exchange."""


@dataclass(frozen=True, slots=True)
class ExporterState:
    """State of an exporter at the time of a scrape. The counts start with the meter."""

    name: str
    sent: Annotated[int, Count("Spans that receivers took", "export_sent")]
    queued: int
    """Number of spans that wait to be sent."""
    failures: Annotated[int, Count("Requests to receivers that failed", "export_failures")]
    dropped: Annotated[Mapping[str, int], Count("Spans that no receiver got", "export_dropped", "reason")] = (
        field(default_factory=dict)
    )


@dataclass(frozen=True, slots=True)
class CapturePause:
    """Pause of a capture that cannot write now. The capture tries again, and resumes without an operator."""

    reason: str
    """Reason of the pause, as in `CaptureState.problem`."""
    seconds: float
    """Length of the pause so far, in seconds."""
    waiting: int
    """Number of exchanges that wait in memory."""
    waiting_bytes: int
    """Size of the exchanges that wait in memory."""
    lost: int
    """Number of exchanges that were not kept since the pause began, because the memory was full."""
    memory_lasts: float | None
    """Time in seconds until the memory is full, at the present rate; None if it is not known."""
    sentence: str
    """Description of the pause for users."""


@dataclass(frozen=True, slots=True)
class CaptureState:
    """State of the capture at the time of a scrape. The counts start with the meter."""

    to: str = ""
    """Folder or URL of the capture, without secrets."""
    level: str = ""
    """Privacy level."""
    exchanges: Annotated[int, Count("Exchanges kept", "capture_exchanges")] = 0
    waiting: Annotated[
        int, Count("Exchanges in memory, to be written", "capture_waiting_exchanges", gauge=True)
    ] = 0
    dropped: Annotated[
        Mapping[str, int],
        Count(
            "Exchanges that were measured and not kept; deleted: their file was deleted at the limit",
            "capture_dropped_exchanges",
            "reason",
        ),
    ] = field(default_factory=dict)
    unshaped: Annotated[
        int, Count("Exchanges kept without the shape of their request", "capture_unshaped_exchanges")
    ] = 0
    """Number of exchanges without a shape: the request was too long, or the queue was full."""
    problem: str | None = None
    """Reason why no rows can be written now, as one word."""
    pause: CapturePause | None = None
    """Length and effects of the pause while `problem` is set, else None."""
    files_problem: str | None = None
    """Reason why complete files cannot be delivered now, as a sentence without secrets."""
    bytes_written: Annotated[int, Count("Bytes written to the spool", "capture_written_bytes")] = 0
    files: Annotated[int, Count("Files finished and delivered", "capture_files")] = 0
    files_waiting: Annotated[
        int, Count("Closed spools that are not Parquet yet", "capture_waiting_files", gauge=True)
    ] = 0
    files_deleted: Annotated[int, Count("Files deleted to stay below the bound", "capture_deleted_files")] = 0
    spool_bytes: Annotated[
        int, Count("Size of all spools, the open one too", "capture_spool_bytes", gauge=True)
    ] = 0
    local_bytes: Annotated[
        int, Count("Size of all spools and local files together", "capture_local_bytes", gauge=True)
    ] = 0
    failures: Annotated[
        int, Count("Attempts to finish or deliver a file that failed", "capture_failures")
    ] = 0
    recovered: Annotated[
        int, Count("Exchanges found in spools of an earlier run", "capture_recovered_exchanges")
    ] = 0
    damaged: Annotated[
        int, Count("Batches of such spools that could not be read", "capture_damaged_batches")
    ] = 0

    def to_dict(self) -> dict[str, object]:
        return asdict(self)
