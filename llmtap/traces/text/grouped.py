"""Records collected by a key, in bounded memory: the turns of a session, which lie apart in a capture.

A record goes to an unnamed temporary file as soon as there are many; in memory stay 24 bytes of each, and
each key once.
"""

from array import array
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Grouped"]

_MEMORY_BYTES: Final = 32 << 20
"""Of records, before they go to a file."""


class Grouped:
    """Takes records in any order; gives them by group, in the order in which the keys were first seen."""

    def __init__(self) -> None:
        # No context manager: it lives as long as this object, which is one.
        self._file = SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115
        self._groups: dict[object, int] = {}
        self._group = array("q")
        self._order = array("q")
        self._end = array("q")

    def __enter__(self) -> "Grouped":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, key: object, order: int, record: bytes) -> None:
        """A record of the group `key`; `order` is its place there; equals keep the order of coming."""
        self._file.write(record)
        self._group.append(self._groups.setdefault(key, len(self._groups)))
        self._order.append(order)
        self._end.append((self._end[-1] if self._end else 0) + len(record))

    def groups(self) -> Iterator[Iterator[bytes]]:
        """The groups; each is to be read before the next one is asked for."""
        table = pa.table(
            {
                "group": pa.Array.from_buffers(
                    pa.int64(), len(self._group), [None, pa.py_buffer(self._group)]
                ),
                "order": pa.Array.from_buffers(
                    pa.int64(), len(self._order), [None, pa.py_buffer(self._order)]
                ),
                "n": pa.array(range(len(self._group)), pa.int64()),
            }
        )
        by = [("group", "ascending"), ("order", "ascending"), ("n", "ascending")]
        sorted_ = pc.sort_indices(table, sort_keys=by)
        at, n = 0, len(sorted_)
        while at < n:
            group = self._group[sorted_[at].as_py()]
            end = at
            while end < n and self._group[sorted_[end].as_py()] == group:
                end += 1
            yield (self._record(sorted_[i].as_py()) for i in range(at, end))
            at = end

    def _record(self, i: int) -> bytes:
        start = self._end[i - 1] if i else 0
        self._file.seek(start)
        return self._file.read(self._end[i] - start)
