"""A simulated run as a capture.

Times are virtual. Where a workload has dates, the capture begins at its first; where it has none, arrivals
count from 1970 UTC, and the files say that they are a trace's own (`CaptureInfo.arrivals`).
"""

from pathlib import Path

from llmtap.capture.schema import CaptureInfo
from llmtap.capture.store.parquet import RunWriter
from llmtap.clock import Clock
from llmtap.sim.sweep.exchanges import relay_name
from llmtap.workload.requests import Requests

__all__ = ["FlightRecorder"]


class FlightRecorder(RunWriter):
    """Writes the exchanges of one run to a folder, or a URL that `capture.to` can be."""

    def __init__(
        self, to: str | Path, scheduler: str, requests: Requests, *, clock: Clock | None = None
    ) -> None:
        """Makes the folder. Raises ConfigError, whose place is `to`, where nothing can be written there."""
        info = CaptureInfo(
            level="shape",
            block_unit="tokens" if requests.blocks else "",
            block_size=requests.block_tokens,
            arrivals="wall" if requests.epoch_ns else "trace",
            blocks="trace" if requests.blocks else "salted",
        )
        super().__init__(to, {relay_name(scheduler): len(requests)}, info, meter="sim", clock=clock)
