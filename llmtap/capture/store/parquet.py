"""Write Parquet files of captures: given rows in one file, or all exchanges of a run (`RunWriter`).

`finisher.py` makes files of the meter's spools with `write_parquet`. Replays, benchmarks and simulations add
their exchanges to a `RunWriter`.

The encodings are chosen by measurements with streams of 200 tokens about 20 ms apart (jitter 1 to 2 ms),
8,000 exchanges in one row group, zstd level 3, bytes per event:

    column         PLAIN   dictionary   DELTA_BINARY_PACKED   BYTE_STREAM_SPLIT
    event_us       2.32    2.50         2.71                  2.14
    event_bytes    0.51    0.41         0.81                  0.46
    event_class    0.002   0.0004       -                     -
    event_tokens   0.014   0.0002       0.0003                0.001
    event_flags    0.010   0.0002       0.0003                0.001

BYTE_STREAM_SPLIT would save 8 %, but few readers have it for integers (SPARK-56894); DELTA needs Spark 3.3.
So columns are PLAIN, or a dictionary where values repeat: 2.73 bytes per event, and 109 per exchange for all
others. zstd level 1 costs 2 % more bytes, level 9 costs 9 % more and five times the CPU.

The footer of 8 KB has statistics only of columns to filter by (of all: 3 KB more, and people's text in it),
and no copy of the Arrow schema (8 KB more).

A run writes straight to Parquet, without a spool, because a killed run is repeated. Until it is over its
files say how many requests are under way, and the last one says none: `integrity` reports a run cut short.
"""

import secrets
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from llmtap import __version__
from llmtap.capture.schema import META_KEY, SCHEMA, CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.places import Place, PlaceError, file_stem, make_folder, open_place, redacted
from llmtap.capture.store.rows import to_batch
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange

GROUP_BYTES: Final = 32 << 20
"""Of a row group, in memory: some 4,000 exchanges of 200 events."""
_LEVEL: Final = 3

_PLAIN: Final = frozenset((
    "seq", "id", "arrival_ns", "arrival", "unit", "request_id", "trace_parent", "message_bytes",
    "prompt_bytes", "request_bytes", "blocks", "parent", "think_us", "scheduled_us", "request_end_us",
    "submit_us", "head_us", "first_byte_us", "first_any_us", "first_token_us", "first_reasoning_us",
    "first_tool_call_us", "first_refusal_us", "first_content_us", "last_token_us", "response_end_us",
    "delivered_us", "paused_us", "dispatch_late_us", "added_request_us", "connect_us", "added_first_chunk_us",
    "added_chunk_max_us", "uncertainty_us", "event_us", "server_gap_us", "response_bytes", "server_timing",
    "request_body", "response_text",
))  # fmt: skip
"""Columns whose values hardly repeat: a dictionary of them costs 1 to 2 bytes more per value."""
_STATISTICS: Final = (
    "relay", "seq", "arrival_ns", "arrival", "tenant", "model", "route", "arm", "endpoint", "level",
    "session", "status", "outcome",
)  # fmt: skip
"""Columns by which readers skip row groups. Never text."""


def write_parquet(where: Path | BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch]) -> int:
    """Write the rows in their order, with one row group in memory; return their number. Raises OSError."""
    rows = 0
    writer = pq.ParquetWriter(
        where, SCHEMA, compression="zstd", compression_level=_LEVEL, store_schema=False,
        use_dictionary=[_leaf(field) for field in SCHEMA if field.name not in _PLAIN],
        write_statistics=list(_STATISTICS), write_page_checksum=True,
    )  # fmt: skip
    try:
        for group in _groups(batches):
            rows += group.num_rows
            writer.write_table(group, row_group_size=group.num_rows)
        writer.add_key_value_metadata({META_KEY: msgspec.json.encode(info)})
    finally:
        writer.close()
    return rows


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= GROUP_BYTES:
            yield pa.Table.from_batches(held, SCHEMA)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held, SCHEMA)


def _leaf(field: pa.Field) -> str:
    """Its column's path in Parquet: a list's values lie two levels down."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)


ROWS: Final = 1_000
"""Of a batch."""
FILE_BYTES: Final = 64 << 20
"""In memory, of the rows that become one file: some 8,000 exchanges of 200 events."""


def check_place(to: str | Path) -> Place:
    """Open the place of a capture; create and try a local folder. Raises ConfigError with the place `to`."""
    shown = redacted(str(to))
    try:
        place = open_place(str(to))
        if place.folder is not None:
            make_folder(place.folder)
            # Permissions do not show that a file system is read-only.
            with tempfile.TemporaryFile(prefix=".llmtap-", dir=place.folder):
                pass
    except ConfigError as exc:
        raise ConfigError(shown, exc.problem, exc.hint) from None
    except OSError as exc:
        raise ConfigError(shown, f"cannot be written: {exc.strerror}") from None
    return place


class RunWriter:
    """Writes the exchanges of one run to a folder or URL, as `capture.to`."""

    def __init__(
        self, to: str | Path, expected: Mapping[str, int], info: CaptureInfo, *, meter: str,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """Raises ConfigError with the place `to` if nothing can be written there.

        `expected`: exchanges opened by each relay. `info` gets the capture's id, our version and the time.
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
        """Write an exchange. Raises ConfigError if a file cannot be written."""
        self._rows.append(x)
        if len(self._rows) >= ROWS:
            self._encode()
            if self._bytes >= FILE_BYTES:
                self._write(last=False)

    def close(self) -> None:
        """Write what is left. Raises ConfigError."""
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
        name = file_stem(self._info.capture, now_ns, self._files) + ".parquet"
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
