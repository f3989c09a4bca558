"""Small captures on the disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtap.capture.schema import CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.parquet import write_parquet
from llmtap.capture.store.rows import to_batch
from llmtap.exchange.exchange import Exchange


def ledger(
    opened: int, *, unsettled: int = 0, relay: str = "run.0.1", meter: str = "m1", **told: Any
) -> CaptureLedger:
    """One relay's word; `dropped` is the relay's, `not_kept` the meter's."""
    count = RelayCount(opened, told.pop("dropped", {}), unsettled)
    return CaptureLedger({relay: count}, told.pop("not_kept", {}), meter, **told)


def write_capture(path: Path, exchanges: Sequence[Exchange], level: str = "shape", **info: Any) -> Path:
    """A file of these rows; the folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    batch, failed = to_batch(exchanges, capture=info.get("capture", "c1"), level=level)
    assert not failed
    told = {"capture": "c1", "level": level, "tap_version": "0.1.0", **info}
    write_parquet(path, CaptureInfo(**told), [batch])
    return path
