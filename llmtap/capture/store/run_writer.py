"""A run as a capture: files that `llmtap report`, `llmtap.read` and `llmtap convert` take as any.

Live captures go through a spool, because a kill must cost nothing. A run that was killed is run again, so
its rows go straight into Parquet, by the code that makes files of spools: a thousand rows make a batch, and a
file is written when its batches have grown to FILE_BYTES. Until the run is over its files say how many
requests are still under way, and the last one says that there are none: `integrity` tells a run cut short.
"""

import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from llmtap import __version__
from llmtap.capture.schema import CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.finisher import make_folder
from llmtap.capture.store.parquet import write_parquet
from llmtap.capture.store.places import Place, PlaceError, open_place, redacted
from llmtap.capture.store.rows import to_batch
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange

__all__ = ["RunWriter", "check_place"]

ROWS: Final = 1_000
"""Of a batch."""
FILE_BYTES: Final = 64 << 20
"""In memory, of the rows that become one file: some 8,000 exchanges of 200 events."""


def check_place(to: str | Path) -> Place:
    """Where a capture is to go. Makes the folder, and tries it; a store is not reached for.

    Raises ConfigError, whose place is `to`, where nothing can be written there.
    """
    shown = redacted(str(to))
    try:
        place = open_place(str(to))
        if place.folder is not None:
            make_folder(place.folder)
            # Of a file system that takes no writes, permissions do not tell.
            with tempfile.TemporaryFile(prefix=".llmtap-", dir=place.folder):
                pass
    except ConfigError as exc:
        raise ConfigError(shown, exc.problem, exc.hint) from None
    except OSError as exc:
        raise ConfigError(shown, f"cannot be written: {exc.strerror}") from None
    return place


class RunWriter:
    """Writes the exchanges of one run to a folder, or a URL that `capture.to` can be."""

    def __init__(
        self,
        to: str | Path,
        expected: Mapping[str, int],
        info: CaptureInfo,
        *,
        meter: str,
        clock: Clock | None = None,
    ) -> None:
        """Makes the folder. Raises ConfigError, whose place is `to`, where nothing can be written there.

        `expected`: exchanges that each relay, or what stands for one, has opened. Of `info` the capture's id,
        our version and the moment are filled in. `meter` names who counted.
        """
        self._shown = redacted(str(to))
        self._clock = SystemClock() if clock is None else clock
        now_ns = self._clock.wall_ns()
        began = datetime.fromtimestamp(now_ns // 10**9, UTC)
        self._info = msgspec.structs.replace(
            info,
            capture=f"{began:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
            tap_version=__version__,
            began_ns=now_ns,
        )
        self._meter = meter
        self._expected = dict(expected)
        self._written: Counter[str] = Counter()
        self._files = 0
        self._rows: list[Exchange] = []
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._place = check_place(to)

    def add(self, x: Exchange) -> None:
        """Keeps an exchange. Raises ConfigError where a file cannot be written."""
        self._rows.append(x)
        if len(self._rows) >= ROWS:
            self._encode()
            if self._bytes >= FILE_BYTES:
                self._write(last=False)

    def close(self) -> None:
        """Writes what is left. Raises ConfigError where that cannot be."""
        self._encode()
        self._write(last=True)

    def _encode(self) -> None:
        rows, self._rows = self._rows, []
        batch, failed = to_batch(rows, capture=self._info.capture, level=self._info.level)
        if failed:
            raise failed[0]
        self._written.update(x.relay for x in rows)
        self._batches.append(batch)
        self._bytes += batch.nbytes

    def _write(self, *, last: bool) -> None:
        batches, self._batches, self._bytes = self._batches, [], 0
        self._files += 1
        relays = {
            name: RelayCount(opened, unsettled=opened - self._written[name])
            for name, opened in self._expected.items()
        }
        now_ns = self._clock.wall_ns()
        when = f"{datetime.fromtimestamp(now_ns // 10**9, UTC):%Y%m%dT%H%M%S}{now_ns // 10**6 % 1_000:03d}Z"
        tag = re.sub(r"[^A-Za-z0-9_]", "_", self._info.capture)
        name = f"llmtap-{when}-{tag}-{self._files:04d}-{secrets.token_hex(4)}.parquet"
        info = msgspec.structs.replace(
            self._info, ledger=CaptureLedger(relays, meter=self._meter, closed=last), began_ns=now_ns
        )
        try:
            with tempfile.TemporaryDirectory(prefix=".llmtap-", dir=self._place.folder) as scratch:
                made = Path(scratch) / name
                write_parquet(made, info, batches)
                self._place.put(made, name)
        except PlaceError as exc:
            raise ConfigError(self._shown, f"cannot be written: {exc}") from None
        except OSError as exc:
            raise ConfigError(self._shown, f"cannot be written: {exc.strerror or exc}") from None
