"""Stores for tests: small batches, small spools, and what is found in the files in the end."""

import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llmtap.capture.options import CaptureOptions
from llmtap.capture.schema import SCHEMA, CaptureInfo, CaptureLedger
from llmtap.capture.store.spool import SpoolWriter
from llmtap.capture.store.store import Store
from llmtap.clock import Clock, SystemClock
from llmtap.units import Bytes

INFO = CaptureInfo(capture="c1", level="shape")
NOTHING = CaptureLedger()


def options(to: object, **more: object) -> CaptureOptions:
    """Spools of 64 KiB, the smallest there are."""
    small: dict[str, object] = {"rotate_bytes": Bytes(64 << 10)}
    return CaptureOptions(to=str(to), **(small | more))  # type: ignore[arg-type]


def store(to: object, clock: Clock | None = None, **more: object) -> Store:
    """An open one."""
    made = Store(options(to, **more), INFO, clock or SystemClock())
    made.open()
    return made


def thin(start: int, n: int = 5) -> pa.RecordBatch:
    """Rows of some bytes, numbered from `start`."""
    return pa.RecordBatch.from_pylist(
        [{"seq": seq, "id": f"r0-{seq}", "tenant": "t"} for seq in range(start, start + n)], schema=SCHEMA
    )


def fat(start: int, n: int = 1, size: int = 20_000) -> pa.RecordBatch:
    """Rows of `size` bytes that cannot be made smaller by more than half."""
    rng = random.Random(start)
    return pa.RecordBatch.from_pylist(
        [
            {"seq": seq, "id": f"r0-{seq}", "request_body": rng.randbytes(size // 2).hex()}
            for seq in range(start, start + n)
        ],
        schema=SCHEMA,
    )


def append(to: Store, batch: pa.RecordBatch, ledger: CaptureLedger = NOTHING) -> None:
    """It has to be taken."""
    assert to.append(batch, ledger), to.problem


def numbers(files: Path | Iterable[Path]) -> list[int]:
    """The `seq` of all rows in all files of a folder, sorted; twice what is there twice."""
    found: list[int] = []
    for path in files.glob("*.parquet") if isinstance(files, Path) else files:
        found += pq.read_table(path, columns=["seq"])["seq"].to_pylist()
    return sorted(found)


def files_in(folder: Path) -> list[Path]:
    """The files of a capture, in the order of their names."""
    return sorted(folder.glob("*.parquet"))


def left_spool(folder: Path, name: str, batches: Iterable[pa.RecordBatch], info: CaptureInfo = INFO) -> Path:
    """A spool as a process that died has left it."""
    spool = folder / ".spool"
    spool.mkdir(parents=True, exist_ok=True)
    writer = SpoolWriter(spool / name, info)
    for batch in batches:
        writer.append(batch)
    writer.close()
    return writer.path


def no_room(*_: object, **__: object) -> None:
    """In place of anything that writes to a disk: it is full."""
    raise OSError(28, "No space left on device")
