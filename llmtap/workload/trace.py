"""A trace as requests: any format that `llmtap convert` reads, as many rows as wanted, at the load wanted.

- The first rows of the trace are taken, and put in the order of their arrivals.
- A trace that is too short begins again one mean gap after its last arrival: of n rows, row k is row k mod
  n, floor(k / n) x (span + mean gap) later. Its prompt is the same prompt, to its blocks: a prefix cache that
  remembers long enough hits each row that comes again, as far as it was kept.
- Scaling by S divides all distances from the first arrival by S, so bursts stay bursts. A rate is a scale:
  that by which the rows taken arrive at this rate on average.
- Where a trace says which blocks its prompts begin with, requests have them, whole ones only. Blocks of bytes
  (a capture without a tokenizer) are taken for as many tokens as the trace has per byte on average.
- Where a trace has dates, requests begin at its first one, whatever the scale.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from glob import has_magic
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.formats import parquet_capture, registry
from llmtap.capture.formats.format import FormatError, Source
from llmtap.capture.streams import opened
from llmtap.errors import ConfigError
from llmtap.workload.requests import Requests

__all__ = ["Trace", "load_trace", "opened_trace"]

_COLUMNS = ("arrival_ns", "input_tokens", "output_tokens")
_BLOCKS = ("blocks", "block_size", "block_unit", "prompt_bytes")


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows of a trace, in the order of their arrivals."""

    requests: Requests
    format: str = ""
    notes: list[str] = field(default_factory=list)
    """What was left out, and what was taken for something."""
    dated: bool = False
    """Arrivals count from 1970 UTC, and not from the trace's own zero."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def span_ns(self) -> int:
        """From the first arrival to the last."""
        arrivals = self.requests.arrival_ns
        return arrivals[-1] - arrivals[0] if arrivals else 0

    @property
    def rate_rps(self) -> float | None:
        """Mean rate; None where all arrive at once."""
        return (len(self) - 1) * 1e9 / self.span_ns if self.span_ns else None

    def first(self, count: int) -> "Trace":
        """The first `count` of them, or all."""
        return replace(self, requests=self.requests.taken(range(min(count, len(self)))))

    def requests_at(self, *, count: int, scale: float = 1.0) -> Requests:
        """So many requests, from time 0, S times as dense. Raises ValueError where the trace cannot go on."""
        given = self.requests
        n, span_ns = len(given), self.span_ns
        if count > n and span_ns == 0:
            raise ValueError("all rows arrive at once: there is no gap after which they could come again")
        offsets = [t - given.arrival_ns[0] for t in given.arrival_ns[: min(n, count)]]
        if count > n:
            # span + span / (n - 1) is n span / (n - 1); rounded once, not in each round.
            rounds = range(-(-count // n))
            offsets = [t + k * span_ns * n // (n - 1) for k in rounds for t in offsets][:count]
        if scale != 1:
            offsets = [round(t / scale) for t in offsets]
        more = -(-count // n)
        return Requests(
            array("q", offsets), (given.input * more)[:count], (given.output * more)[:count], array("q"),
            (given.blocks * more)[:count], given.block_tokens, given.arrival_ns[0] if self.dated else 0,
        )  # fmt: skip


def load_trace(
    place: str,
    *,
    count: int | None = None,
    source_format: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Trace:
    """Reads the first `count` rows of a trace or capture that have all three of arrival and token counts.

    Rows without output tokens are failed ones: they have 0. Raises ConfigError, whose place is the trace.
    """
    rows = _Rows(count)
    with opened_trace(place, source_format=source_format, progress=progress) as (source, name):
        rows.take(source)
    if not rows.requests:
        raise ConfigError(place, rows.why_none())
    return Trace(rows.in_order(), name, rows.notes(), rows.dated)


@contextmanager
def opened_trace(
    place: str,
    *,
    source_format: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Iterator[tuple[Source, str]]:
    """A trace or capture to be read, and its format's name.

    Raises ConfigError, whose place is the trace, also for what is found while its batches are read.
    """
    try:
        if "://" in place or Path(place).is_dir() or (has_magic(place) and not Path(place).exists()):
            yield parquet_capture.read_many(place)[0], parquet_capture.FORMAT.name
            return
        with opened(place, registry.SNIFF_BYTES, progress) as file:
            plain = place.removesuffix(".gz").removesuffix(".zst")
            given = (
                registry.detect("" if place == "-" else Path(plain).name, file.head)
                if source_format is None
                else registry.by_name(source_format)
            )
            if given is parquet_capture.FORMAT and not file.seekable:
                raise FormatError("Parquet is read from its end: give it as a file, not compressed")
            assert given.read is not None
            yield given.read(file.stream), given.name
    except FormatError as exc:
        raise ConfigError(place, str(exc)) from None
    except (OSError, EOFError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise ConfigError(place, f"cannot be read: {reason}") from None
    except (pa.ArrowException, msgspec.MsgspecError) as exc:
        raise ConfigError(place, f"does not fit its format: {str(exc).splitlines()[0]}") from None


class _Rows:
    """Takes the columns that are needed off the batches."""

    dated = False

    def __init__(self, count: int | None) -> None:
        self.requests = Requests()
        self._left = count
        self._blocks = _Blocks()
        self._without = dict.fromkeys(_COLUMNS[:2], 0)

    def take(self, source: Source) -> None:
        self.dated = source.info.arrivals == "wall"
        for batch in source.batches:
            columns = [batch.column(name) for name in (*_COLUMNS, *_BLOCKS)]
            for name, column in zip(_COLUMNS[:2], columns, strict=False):
                self._without[name] += column.null_count
            if columns[0].null_count or columns[1].null_count:
                told = pc.and_(columns[0].is_valid(), columns[1].is_valid())
                columns = [column.filter(told) for column in columns]
            columns = [column.slice(0, self._left) for column in columns]
            made = pc.fill_null(columns[2], 0)
            for ours, theirs in zip(
                (self.requests.arrival_ns, self.requests.input, self.requests.output),
                (columns[0], columns[1], made), strict=True,
            ):  # fmt: skip
                ours.extend(theirs.to_pylist())
            self._blocks.take(columns[3:])
            if self._left is not None:
                self._left -= len(made)
                if not self._left:
                    break
        self.requests.block_tokens, self.requests.blocks = self._blocks.whole(self.requests.input)

    def in_order(self) -> Requests:
        arrivals = self.requests.arrival_ns
        rows = sorted(range(len(arrivals)), key=arrivals.__getitem__)  # which is stable
        return self.requests if rows == list(range(len(rows))) else self.requests.taken(rows)

    def notes(self) -> list[str]:
        told = {"arrival_ns": "have no arrival time", "input_tokens": "have no count of input tokens"}
        left_out = [f"{n:,} rows {told[name]}: left out" for name, n in self._without.items() if n]
        return left_out + self._blocks.notes

    def why_none(self) -> str:
        if self._without["arrival_ns"]:
            return "none of its rows has an arrival time"
        if self._without["input_tokens"]:
            return "none of its rows has a count of input tokens"
        return "has no rows"


class _Blocks:
    """Takes the blocks that prompts begin with off the batches, where a trace has any."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._ids: list[tuple[int, ...]] = []
        """Of each row; empty where it has none."""
        self._kind: tuple[int, str] | None = None
        """Size and unit of the first: ids of others mean something else."""
        self._bytes: dict[int, int] = {}
        """Rows whose blocks are of bytes, and the bytes of their prompts."""
        self._other = 0

    def take(self, columns: Sequence[pa.Array]) -> None:
        """The next rows: _BLOCKS."""
        lists = columns[0]
        if lists.null_count == len(lists):
            self._ids += [()] * len(lists)
            return
        for ids, size, unit, n_bytes in zip(*(column.to_pylist() for column in columns), strict=True):
            if ids and size:
                kind = size, unit or "tokens"
                if self._kind is None:
                    self._kind = kind
                if kind != self._kind:
                    self._other += 1
                    ids = ()
                elif kind[1] == "bytes" and n_bytes:
                    self._bytes[len(self._ids)] = n_bytes
            self._ids.append(tuple(ids or ()) if size else ())

    def whole(self, inputs: "array[int]") -> tuple[int, list[tuple[int, ...]]]:
        """Tokens of a block, and the whole blocks of each row; 0 and none where the trace has none."""
        if self._kind is None:
            return 0, []
        size, unit = self._kind
        if self._other:
            self.notes.append(f"{self._other:,} rows have prompt blocks of another size: taken for unknown")
        if unit == "bytes":
            n_bytes = sum(self._bytes.values())
            tokens = sum(inputs[row] for row in self._bytes)
            if not tokens:
                return 0, []
            in_bytes, size = size, max(1, round(size * tokens / n_bytes))
            self.notes.append(
                f"prompt blocks of {in_bytes:,} bytes are taken for {size:,} tokens, by the mean"
            )
        return size, [ids[: n // size] for ids, n in zip(self._ids, inputs, strict=True)]
