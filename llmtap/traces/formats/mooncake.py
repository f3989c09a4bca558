"""The trace formats `mooncake` and `guidellm`, which have the same fields, and ids of prefix blocks in files.

JSON Lines `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [int, ...]}` with
one id for each block of 512 tokens, including a partial last block. `guidellm` is the input of guidellm's
`--profile kind=replay`: times in seconds, and an optional `duration` of the whole answer. A file with a
`duration` is guidellm's. Otherwise the values of the times decide. If they can be seconds or milliseconds,
both formats match, so that the user must choose one (`_possible_units`).

`aiperf.py` also uses `BlockIds`, which returns the block ids to write.

Source: kvcache-ai/Mooncake, FAST25-release/traces; guidellm 0.8.1.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.traces import format
from llmtap.traces.text import Id, Number, TokenCount, decimal_text, first_objects, json_rows, number_ns

BLOCK_TOKENS: Final = 512
"""Number of tokens in a block. The programs that read these files expect this number."""
BLOCK_COLUMNS: Final = ("blocks", "block_size", "block_unit", "input_tokens")
_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids", "duration")
_COLUMNS: Final = ("arrival_ns", "input_tokens", "output_tokens", "response_end_us")
_MS_PLACES: Final = 6
"""A millisecond, the unit of times in Mooncake's format, has 10**6 ns."""
_SECOND_PLACES: Final = 9
"""A second, the unit of times in guidellm's format, has 10**9 ns."""


class _Row(msgspec.Struct):
    """One line of a Mooncake trace."""

    timestamp: Number
    """Arrival in ms."""
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: Annotated[list[Id], msgspec.Meta(max_length=1 << 24)] | None = None
    duration: Number | None = None


def block_columns(ids: Sequence[Sequence[int] | None]) -> dict[str, list[Any]]:
    """Return the columns of a capture for rows with the given block ids (None: a row has no ids)."""
    return {
        "blocks": list(ids),
        "block_size": [None if i is None else BLOCK_TOKENS for i in ids],
        "block_unit": [None if i is None else "tokens" for i in ids],
    }


def _batches(places: int, stream: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
    bare = broken = finer = 0
    typed_rows = json_rows(stream, _Row, notes)
    while rows := list(islice(typed_rows, format.ROWS_PER_BATCH)):
        ids = [row.hash_ids for row, _ in rows]
        columns = {
            "arrival_ns": [number_ns(row.timestamp, places, line, "timestamp") for row, line in rows],
            "input_tokens": [row.input_length for row, _ in rows],
            "output_tokens": [row.output_length for row, _ in rows],
            "response_end_us": [
                None if row.duration is None else number_ns(row.duration, places, line, "duration") // 1_000
                for row, line in rows
            ],
            **block_columns(ids),
        }
        bare += ids.count(None)
        broken += sum(_is_inconsistent(row.hash_ids, row.input_length) for row, _ in rows)
        if places == _MS_PLACES:
            finer += sum(row.timestamp != row.timestamp // 1 for row, _ in rows)
        yield format.batch_of(len(rows), columns)
    if finer:
        notes.append(f"{finer:,} times have fractions of a millisecond; `--from guidellm` reads seconds")
    if bare:
        notes.append(f"{bare:,} rows have no hash_ids")
    if broken:
        notes.append(f"{broken:,} rows have another number of hash_ids than blocks of {BLOCK_TOKENS} tokens")


def _is_inconsistent(ids: Sequence[int] | None, tokens: int | None) -> bool:
    """Return whether the number of block ids differs from the number of blocks that the prompt has."""
    return ids is not None and tokens is not None and len(ids) != -(-tokens // BLOCK_TOKENS)


def _write(places: int, writer: format.TraceWriter) -> None:
    """Write a trace. Times in seconds are exact. Times in milliseconds are rounded down to whole
    milliseconds, unless the source has this format."""
    ids, cut = BlockIds(writer), 0
    seconds = places == _SECOND_PLACES
    whole_ns = 1 if seconds or writer.is_own_format else 10**places
    for batch in writer.rows_to_write((*_COLUMNS, *BLOCK_COLUMNS)):
        columns = [batch.column(name).to_pylist() for name in _COLUMNS]
        lines = []
        for arrival, input_tokens, output_tokens, end, blocks in zip(
            *columns, ids.ids_of_rows(batch), strict=True
        ):
            cut += arrival % whole_ns > 0
            time = decimal_text(arrival // whole_ns * whole_ns, places, point=seconds)
            line = f'{{"timestamp": {time}, "input_length": {input_tokens}, "output_length": {output_tokens}'
            if blocks is not None:
                line += f', "hash_ids": {blocks}'
            if seconds and end is not None:
                line += f', "duration": {decimal_text(end, 6, point=True)}'
            lines.append(line + "}\n")
        writer.out.write("".join(lines).encode())
    ids.report()
    writer.note(cut, "arrivals lost what is finer than the format's digits")


class BlockIds:
    """Ids of prefix blocks for a file that is written.

    Salted hashes are replaced by small numbers, in the order of their first use; the map of all ids is in
    memory. If BLOCK_TOKENS is n times the size of the source's blocks, n blocks are joined to one: of their
    ids, every n-th id and the last id are written. Ids of blocks of other sizes are written unchanged. Rows
    with another number of ids than ceil(tokens / BLOCK_TOKENS) are counted, because some readers reject them.
    """

    def __init__(self, writer: format.TraceWriter) -> None:
        self._writer = writer
        self._numbers: defaultdict[int, int] = defaultdict()
        """By id in the capture: number in the file, counted from 0."""
        self._numbers.default_factory = self._numbers.__len__
        self.missing_rows = 0
        """Number of rows without ids."""
        self._inconsistent_rows = self._joined_rows = 0
        """Number of rows whose blocks do not fit their prompt, and of rows whose blocks were joined to
        larger ones."""
        self._other_kinds: dict[tuple[int | None, str | None], None] = {}
        """Sizes and units of blocks that cannot be joined to blocks of BLOCK_TOKENS."""

    def ids_of_rows(self, batch: pa.RecordBatch) -> list[list[int] | None]:
        """Return the block ids of each row; None if the blocks of the row are not known."""
        lists = int_lists(batch.column("blocks"))
        self._join_blocks(batch, lists)
        if self._writer.info.blocks == "salted":
            numbers = self._numbers
            lists = [None if ids is None else [numbers[i] for i in ids] for ids in lists]
        self.missing_rows += lists.count(None)
        self._inconsistent_rows += sum(map(_is_inconsistent, lists, batch.column("input_tokens").to_pylist()))
        return lists

    def _join_blocks(self, batch: pa.RecordBatch, lists: list[list[int] | None]) -> None:
        """In rows with smaller blocks, replace the block ids by the ids of joined blocks of BLOCK_TOKENS."""
        sizes, units = batch.column("block_size"), batch.column("block_unit")
        fits = pc.and_(pc.equal(sizes, BLOCK_TOKENS), pc.equal(units, "tokens"))
        if fits.true_count == len(fits):
            return
        known = zip(lists, sizes.to_pylist(), units.to_pylist(), strict=True)
        for row, (ids, size, unit) in enumerate(known):
            if ids is None or (size == BLOCK_TOKENS and unit == "tokens"):
                continue
            if unit == "tokens" and size and BLOCK_TOKENS % size == 0:
                n = BLOCK_TOKENS // size
                lists[row] = ids[n - 1 :: n] + (ids[-1:] if len(ids) % n else [])
                self._joined_rows += 1
            else:
                self._other_kinds[size, unit] = None

    def report(self) -> None:
        """Add the counts to the report on the written trace."""
        changes, writer = [], self._writer
        inconsistent = f"rows have another number of ids than ceil(input_length / {BLOCK_TOKENS})"
        if self._joined_rows:
            changes.append(
                f"{self._joined_rows:,} rows had smaller blocks: of their ids every n-th, and the last"
            )
        if self._other_kinds:
            sizes = " or ".join(f"{n or 0:,} {unit}" for n, unit in self._other_kinds)
            changes.append(
                f"blocks of {sizes} go out as ids of {BLOCK_TOKENS} tokens: "
                f"{self._inconsistent_rows:,} {inconsistent}"
            )
        if any(unit == "bytes" for _, unit in self._other_kinds):
            changes.append("with meter.tokenizer set, a capture's blocks are of tokens")
        if changes:
            writer.changed["prefix blocks"] = "; ".join(changes)
        writer.note(self.missing_rows, "rows have no prefix blocks, and are written without them")
        if not self._other_kinds:
            writer.note(self._inconsistent_rows, inconsistent)


def int_lists(column: pa.ListArray) -> list[list[int] | None]:
    """Return the lists of a column. This is faster than `to_pylist` of the column."""
    flat = iter(column.flatten().to_pylist())
    lengths = pc.list_value_length(column).to_pylist()
    return [None if n is None else list(islice(flat, n)) for n in lengths]


_BUSY_MS: Final = 10.0
"""If the times are whole numbers with a smaller mean distance, they are possibly not milliseconds: the trace
would have more than 100 requests per second."""
_BUSY_FRACTIONS_MS: Final = 1.0
"""If the times have fractions and a smaller mean distance, they are not milliseconds: the trace would have
more than 1,000 requests per second, more than any known trace."""

_EPOCH_S: Final = 1e9
"""Smallest whole number that is possibly a number of seconds since 1970. As milliseconds from the beginning
of a trace, it would be eleven days."""


def _sniff(places: int, head: bytes, name: str) -> bool:
    """Return whether the first rows have only fields of this format, and times that can be in its unit."""
    objects = first_objects(head)
    if not objects or not all({*_FIELDS[:3]} <= o.keys() <= {*_FIELDS} for o in objects):
        return False
    if any("duration" in o for o in objects):
        return places == _SECOND_PLACES
    return places in _possible_units([o["timestamp"] for o in objects])


def _possible_units(times: Sequence[object]) -> tuple[int, ...]:
    """Return the possible units of times: both milliseconds and seconds if the values do not decide."""
    try:
        values = [float(t) for t in times if isinstance(t, int | float | str)]
    except (ValueError, OverflowError):
        values = []
    if len(values) < len(times):
        return (_MS_PLACES,)  # A time is invalid: choose any format, whose reader then reports the line.
    distance = (max(values) - min(values)) / (len(values) - 1) if len(values) > 1 else None
    if all(value.is_integer() for value in values):
        is_busy = distance is not None and 0 < distance < _BUSY_MS
        in_doubt = is_busy or _EPOCH_S <= max(values) < _EPOCH_S * 100
        return (_MS_PLACES, _SECOND_PLACES) if in_doubt else (_MS_PLACES,)
    is_busy = distance is not None and distance < _BUSY_FRACTIONS_MS
    return (_SECOND_PLACES,) if is_busy else (_MS_PLACES, _SECOND_PLACES)


_INFO: Final = {"blocks": "trace", "block_unit": "tokens", "block_size": BLOCK_TOKENS}

FORMATS: Final = (
    format.TraceFormat(
        name="mooncake",
        title="Mooncake trace (JSON Lines, milliseconds)",
        extensions=(".jsonl",),
        aspects=format.LENGTHS | {"prefix blocks"},
        required_aspects=format.LENGTHS,
        remarks={
            "arrival": "in whole milliseconds, from the first one",
            "prefix blocks": "blocks of 512 tokens; the ids of others go over, but readers that count them "
            "(guidellm) reject such rows",
            **format.NO_FAILED,
            "session and turn": "only shared blocks tell which requests belong together",
        },
        sniff=partial(_sniff, _MS_PLACES),
        info=_INFO,
        batches=partial(_batches, _MS_PLACES),
        write_rows=partial(_write, _MS_PLACES),
    ),
    format.TraceFormat(
        name="guidellm",
        title="guidellm trace (JSON Lines, seconds)",
        extensions=(".jsonl",),
        aspects=format.LENGTHS | {"prefix blocks", "end of the answer"},
        required_aspects=format.LENGTHS,
        remarks={
            "prefix blocks": "blocks of 512 tokens: it rejects rows whose number of ids is another",
            **format.NO_FAILED,
        },
        sniff=partial(_sniff, _SECOND_PLACES),
        info=_INFO,
        batches=partial(_batches, _SECOND_PLACES),
        write_rows=partial(_write, _SECOND_PLACES),
    ),
)
