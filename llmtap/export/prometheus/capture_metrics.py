"""The capture about itself, for `/metrics`: what was kept, what was not and why, what is waiting.

`llmtap_capture_paused` is the one to alert on: exchanges are measured, and not kept. `llmtap_capture_problem`
says why, and also tells when finished files do not get to their place.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from llmtap.export.prometheus.families import counter, gauge

__all__ = ["CaptureState", "collect_capture"]


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The capture at the time of a scrape. Counts are since the meter started."""

    to: str = ""
    """Where files go: without secrets."""
    level: str = ""
    """Of privacy."""
    exchanges: int = 0
    """In the spool, or beyond it."""
    waiting: int = 0
    """Exchanges in memory."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Measured, and not kept, by reason."""
    unshaped: int = 0
    """Kept without the shape of their request: it was too long, or too much was waiting."""
    problem: str | None = None
    """Why nothing can be written now: a word."""
    files_problem: str | None = None
    """Why finished files do not get to their place now, and wait: a sentence without secrets."""
    bytes_written: int = 0
    """To the spool."""
    files: int = 0
    """Finished: Parquet, where it was to go."""
    files_waiting: int = 0
    """Closed spools that are not Parquet yet."""
    files_deleted: int = 0
    """To stay below the bound."""
    spool_bytes: int = 0
    local_bytes: int = 0
    """Spools and local Parquet files together."""
    failures: int = 0
    """Attempts to finish or deliver a file that failed; each is tried again."""
    recovered: int = 0
    """Exchanges found in spools that an earlier run left."""
    damaged: int = 0
    """Batches of such spools that could not be read."""

    def to_dict(self) -> dict[str, object]:
        """As the admin API shows it."""
        return {
            "to": self.to, "level": self.level, "exchanges": self.exchanges, "waiting": self.waiting,
            "dropped": dict(self.dropped), "unshaped": self.unshaped, "problem": self.problem,
            "files_problem": self.files_problem, "bytes_written": self.bytes_written,
            "files": self.files, "files_waiting": self.files_waiting, "files_deleted": self.files_deleted,
            "spool_bytes": self.spool_bytes, "local_bytes": self.local_bytes, "failures": self.failures,
            "recovered": self.recovered, "damaged": self.damaged,
        }  # fmt: skip


def collect_capture(state: CaptureState) -> Iterator[Metric]:
    """Counters and gauges, all named `llmtap_capture_...`."""
    for name, text, value in (
        ("exchanges", "Exchanges kept", state.exchanges),
        ("unshaped_exchanges", "Exchanges kept without the shape of their request", state.unshaped),
        ("written_bytes", "Bytes written to the spool", state.bytes_written),
        ("files", "Files finished and delivered", state.files),
        ("deleted_files", "Files deleted to stay below the bound", state.files_deleted),
        ("failures", "Attempts to finish or deliver a file that failed", state.failures),
        ("recovered_exchanges", "Exchanges found in spools of an earlier run", state.recovered),
        ("damaged_batches", "Batches of such spools that could not be read", state.damaged),
    ):
        yield counter(f"llmtap_capture_{name}", text, (), [((), value)])
    yield counter(
        "llmtap_capture_dropped_exchanges",
        "Exchanges that were measured and not kept",
        ("reason",),
        [((reason,), n) for reason, n in state.dropped.items()],
    )
    yield gauge(
        "llmtap_capture_paused",
        "1 while nothing can be written and exchanges are measured only; why: llmtap_capture_problem",
        (),
        [((), int(state.problem is not None))],
    )
    problems = [] if state.problem is None else [state.problem]
    if state.files_problem is not None:
        problems.append("files")
    yield gauge(
        "llmtap_capture_problem",
        "1 for each thing that is wrong now: disk_full, folder or total_bytes pause the capture; "
        "files: finished ones do not get to their place, and wait",
        ("reason",),
        [((reason,), 1) for reason in problems],
    )
    for name, text, value in (
        ("waiting_exchanges", "Exchanges in memory, to be written", state.waiting),
        ("waiting_files", "Closed spools that are not Parquet yet", state.files_waiting),
        ("spool_bytes", "Size of all spools, the open one too", state.spool_bytes),
        ("local_bytes", "Size of all spools and local files together", state.local_bytes),
    ):
        yield gauge(f"llmtap_capture_{name}", text, (), [((), value)])
