"""Convert Exchanges to rows of a capture (Arrow record batches), and back.

The meter's recorder (in its thread) and `parquet.RunWriter` call `to_batch`, and readers call `exchanges_of`.
`to_batch` runs for every exchange, so it must be fast: C functions gather the values, Arrow computes the
columns, and the event logs of a batch are joined as bytes.

- Offsets and durations are whole microseconds, rounded down; `uncertainty_us` is a bound and rounded up.
- Invalid Unicode is replaced, and a number that does not fit its column becomes null. If an exchange still
  cannot be converted, `to_batch` omits only this exchange and returns its error.
- `columns.py` has the columns, and the lowest privacy level that stores each column.
"""

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.columns import COLUMNS, OPTIONAL, Conversion, columns_at
from llmtap.capture.privacy.coarse import coarsen, floor_divide
from llmtap.capture.schema import EVENT_CLASS_NAMES, SCHEMA
from llmtap.exchange import exchange
from llmtap.exchange.outcome import EventClass, Outcome, Reading, TokenSource
from llmtap.exchange.strings import clean_path

_REQUIRED: Final = [column for column in COLUMNS if column.path and column.part_and_name[0] not in OPTIONAL]
"""Columns of attributes that every Exchange has."""
_SAME: Final = {column.name: column.path for column in _REQUIRED if column.conversion is Conversion.SAME}
_OFFSETS: Final = {column.name: column.path for column in _REQUIRED if column.conversion is Conversion.OFFSET}
_DURATIONS: Final = {
    column.name: column.path for column in _REQUIRED if column.conversion is Conversion.DURATION
}
_OFFSET_ATTRIBUTES: Final = [
    column.part_and_name for column in _REQUIRED if column.conversion is Conversion.OFFSET
]
_OTHER_ATTRIBUTES: Final = [
    (column.name, *column.part_and_name, column.conversion is Conversion.DURATION)
    for column in _REQUIRED
    if column.conversion is not Conversion.OFFSET
]
"""For each other column: its name, the part of the Exchange, the attribute, and whether it is in us."""
_OF_SHAPE, _OF_TEXT = (
    {column.name: column.part_and_name[1] for column in COLUMNS if column.part_and_name[0] == part}
    for part in ("shape", "text")
)
_COMPUTED: Final = {column.name: column.compute for column in COLUMNS if column.compute is not None}
_unchanged_values: Final = attrgetter(*_SAME.values())
_time_values: Final = attrgetter("timeline.arrival_ns", *_OFFSETS.values(), *_DURATIONS.values())
_EVENTS: Final = ("event_us", "event_class", "event_bytes", "event_tokens", "event_flags")
_REFUSAL: Final = ("kind", "source", "confidence")

_NO_SHAPE: Final = exchange.RequestShape()
_NO_TURN: Final = exchange.Turn("", "", -1)
_NO_REFUSAL: Final[dict[str, object]] = {}
_LONG: Final = pa.int64() if array("l").itemsize == 8 else pa.int32()
"""Arrow's type for the values of an array("l"), whose size depends on the platform."""
_CLASS_NAMES: Final = pa.array(EVENT_CLASS_NAMES, pa.string())

_JSON_BYTES_MAX: Final = 64 << 10
"""Maximum size of a JSON value; a larger one becomes null. A provider's usage has only some hundred bytes."""
_WORD_CHARS_MAX: Final = 64
_CAN_CONTAIN_TEXT: Final = re.compile(rb'[^!-~]|\\|[^"]{%d}' % (_WORD_CHARS_MAX + 1))
"""Matches compact JSON that can contain text. Numbers and short words have no blank and no escape."""
_WORD: Final = re.compile(rf"[!-~]{{1,{_WORD_CHARS_MAX}}}")
_DEPTH_MAX: Final = 8
_ROLE: Final = re.compile(r"[A-Za-z_-]{1,24}")

_to_json: Final = msgspec.json.Encoder().encode
_from_json: Final = msgspec.json.Decoder().decode
_clean: Final = lru_cache(4_096)(clean_path)
"""Function that cleans request paths. The observer has cleaned its own, but other exchanges need it."""


def to_batch(
    exchanges: Sequence[exchange.Exchange], *, capture: str, level: str
) -> tuple[pa.RecordBatch, list[Exception]]:
    """Return the exchanges as rows in SCHEMA, and an error for each exchange that cannot be converted."""
    try:
        return _encode(exchanges, capture, level), []
    except Exception:  # Convert the exchanges one by one, so that only the faulty exchange is lost.
        good: list[exchange.Exchange] = []
        failed: list[Exception] = []
        for x in exchanges:
            try:
                _encode([x], capture, level)
                good.append(x)
            except Exception as error:
                failed.append(error)
        return _encode(good, capture, level), failed


def _encode(xs: Sequence[exchange.Exchange], capture: str, level: str) -> pa.RecordBatch:
    n = len(xs)
    if not n:
        return pa.RecordBatch.from_pylist([], SCHEMA)
    columns: dict[str, Any] = dict(zip(_SAME, zip(*map(_unchanged_values, xs), strict=True), strict=True))
    columns |= {name: list(map(of, xs)) for name, of in _COMPUTED.items()}
    arrivals = _add_times(xs, columns)
    _add_events(xs, arrivals, columns)
    _add_request(xs, columns)
    _add_turns(xs, columns, found_sessions=level != "none")
    _add_answer(xs, columns)
    if level == "full":
        columns |= {name: [x.text and getattr(x.text, attr) for x in xs] for name, attr in _OF_TEXT.items()}
    columns["level"] = [level if level != "full" or x.text is not None else "shape" for x in xs]
    columns["capture"] = [capture] * n
    columns["path"] = [_clean(x.path) for x in xs]
    stored = columns_at(level)
    arrays = {
        field.name: _arrow_column(columns.get(field.name) if field.name in stored else None, n, field.type)
        for field in SCHEMA
    }
    if level == "coarse":
        coarsen(arrays)
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=SCHEMA)


def _add_times(xs: Sequence[exchange.Exchange], columns: dict[str, Any]) -> pa.Array:
    """Add all columns of times, computed together as one array for speed; return the monotonic arrivals."""
    n = len(xs)
    arrivals_ns, *rest = zip(*map(_time_values, xs), strict=True)
    arrivals, zeros = pa.array(arrivals_ns, pa.int64()), pa.array(bytes(n), pa.int64())
    origins = pa.concat_arrays([arrivals] * len(_OFFSETS) + [zeros] * (len(_DURATIONS) + 1))
    wall = [x.arrival_wall_ns for x in xs]
    us = _floor_us(pc.subtract(_arrow_column([*chain(*rest, wall)], len(origins), pa.int64()), origins))
    for i, name in enumerate((*_OFFSETS, *_DURATIONS)):
        columns[name] = us.slice(i * n, n)
    columns["arrival"] = us.slice(len(us) - n, n).cast(pa.timestamp("us", "UTC"))
    columns["arrival_ns"] = wall
    return arrivals


def _add_events(xs: Sequence[exchange.Exchange], arrivals: pa.Array, columns: dict[str, Any]) -> None:
    """Add the columns of the event logs, and the other lists of an answer."""
    logs = [x.timeline.events for x in xs]
    lengths = list(map(len, logs))
    offsets = _list_offsets(lengths)
    t_ns = _joined_column((log.t_ns for log in logs), pa.int64())
    rows = pc.list_parent_indices(pa.ListArray.from_arrays(offsets, t_ns))
    since_ns = pc.subtract(t_ns, arrivals.take(rows))
    tokens = _joined_column((log.tokens for log in logs), _LONG).cast(pa.int64())
    values = {
        "event_us": _floor_us(since_ns),
        "event_class": _CLASS_NAMES.take(_joined_column((log.classes for log in logs), pa.uint8())),
        "event_tokens": pc.if_else(pc.less(tokens, 0), pa.scalar(None, pa.int64()), tokens),
        "event_flags": _joined_column((log.flags for log in logs), pa.uint8()),
        "event_bytes": _joined_column((log.sizes for log in logs), _LONG).cast(pa.int64()),
    }
    for name, flat in values.items():
        assert len(flat) == len(t_ns), f"{name} has {len(flat)} values, but the log has {len(t_ns)} events"
        columns[name] = pa.ListArray.from_arrays(offsets, flat)
    chars = [log.chars if log.chars and len(log.chars) == len(log) else None for log in logs]
    if any(chars):
        columns["event_chars"] = _list_column(
            _joined_column(filter(None, chars), _LONG).cast(pa.int64()), chars
        )
    if any(x.text_blocks is not None for x in xs):
        columns["text_blocks"] = _lists_of_ints([x.text_blocks for x in xs])
    gaps = [x.server_gaps_ns for x in xs]
    if any(gap is not None for gap in gaps):
        columns["server_gap_us"] = _list_column(
            _floor_us(_joined_column((gap for gap in gaps if gap is not None), pa.int64())), gaps
        )


def _add_request(xs: Sequence[exchange.Exchange], columns: dict[str, Any]) -> None:
    shapes = [x.shape or _NO_SHAPE for x in xs]
    columns |= {name: [getattr(a, attribute) for a in shapes] for name, attribute in _OF_SHAPE.items()}
    columns["prompt_bytes"] = [sum(a.sizes) if a.sizes else None for a in shapes]
    columns["input_tokens"] = [
        a.tokens if x.tokens.input is None else x.tokens.input for x, a in zip(xs, shapes, strict=True)
    ]
    columns["input_token_source"] = [
        "usage" if x.tokens.input is not None else None if a.tokens is None else "tokenizer"
        for x, a in zip(xs, shapes, strict=True)
    ]
    roles = [None if x.shape is None else x.shape.roles for x in xs]
    flat = list(chain.from_iterable(filter(None, roles)))
    words = {role: role if _ROLE.fullmatch(role) else "other" for role in set(flat)}
    columns["message_roles"] = _list_column(
        _arrow_column([words[role] for role in flat], len(flat), pa.string()), roles
    )
    columns["message_bytes"] = _lists_of_ints([None if x.shape is None else x.shape.sizes for x in xs])
    columns["blocks"] = _lists_of_ints([None if a.block_size is None else a.blocks for a in shapes])


def _add_turns(xs: Sequence[exchange.Exchange], columns: dict[str, Any], *, found_sessions: bool) -> None:
    """Add the columns of the turns. If `found_sessions` is false (level `none`, which stores nothing about
    messages), leave out sessions that were found by their messages."""
    turns = [x.turn or _NO_TURN for x in xs]
    if not found_sessions:
        turns = [turn if turn.source == "explicit" else _NO_TURN for turn in turns]
    columns["session"] = [turn.session or None for turn in turns]
    columns["session_source"] = [turn.source or None for turn in turns]
    columns["turn"] = [None if turn.number < 0 else turn.number for turn in turns]
    columns["parent"] = [turn.parent for turn in turns]
    columns["think_us"] = [None if turn.think_ns is None else turn.think_ns // 1_000 for turn in turns]
    columns["turn_by"] = [turn.by for turn in turns]


def _add_answer(xs: Sequence[exchange.Exchange], columns: dict[str, Any]) -> None:
    refusals = [x.refusal or _NO_REFUSAL for x in xs]
    if any(refusals):
        for name in _REFUSAL:
            columns[f"refusal_{name}"] = [refusal.get(name) for refusal in refusals]
        columns["refusal_detail"] = [_json_text(refusal.get("detail")) for refusal in refusals]
    columns["usage"] = [_json_text(x.usage, words=True) for x in xs]
    columns["server_timing"] = [_json_text(x.server_timing, words=True) for x in xs]
    columns["guardrail"] = [_json_text(x.guardrail) for x in xs]


# ---------------------------------------------------------------- values to columns


def _arrow_column(values: Any, n: int, kind: pa.DataType) -> pa.Array:
    if values is None:
        return pa.nulls(n, kind)
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError):
        return pa.array([_fitting_value(value, kind) for value in values], kind)


def _fitting_value(value: Any, kind: pa.DataType) -> Any:
    """Return the value converted to the type of the column, or None if the column cannot hold it."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return str(value).encode("utf-8", "replace").decode()
    try:
        if pa.types.is_boolean(kind):
            return bool(value)
        if pa.types.is_floating(kind):
            return float(value)
        number = int(value)
    except (TypeError, ValueError, ArithmeticError):
        return None
    limit = 1 << kind.bit_width - 1
    return number if -limit <= number < limit else None


def _floor_us(ns: pa.Array) -> pa.Array:
    """Return nanoseconds as whole microseconds, rounded down."""
    return floor_divide(ns, 1_000)


def _joined_column(parts: Iterable[Any], kind: pa.DataType) -> pa.Array:
    """Join arrays and bytearrays to one column without nulls."""
    data = b"".join(parts)
    return pa.Array.from_buffers(kind, len(data) * 8 // kind.bit_width, [None, pa.py_buffer(data)])


def _list_offsets(lengths: Iterable[int]) -> pa.Array:
    """Return where each list begins in the joined values, as Arrow stores lists."""
    offsets = array("i", accumulate(lengths, initial=0))
    return pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)])


def _list_column(flat: pa.Array, parts: Sequence[Sequence[Any] | None]) -> pa.Array:
    """Cut `flat` into lists that are as long as the `parts`. The list of a part that is None is null."""
    offsets = _list_offsets(0 if part is None else len(part) for part in parts)
    return pa.ListArray.from_arrays(
        offsets, flat, mask=pa.array([part is None for part in parts], pa.bool_())
    )


def _lists_of_ints(parts: "Sequence[array[int] | None]") -> pa.Array:
    return _list_column(_joined_column((part for part in parts if part is not None), pa.int64()), parts)


def _json_text(value: object, *, words: bool = False) -> str | None:
    """Return the value as JSON, or None if it is not possible. `words`: keep only strings of one word."""
    if value is None:
        return None
    try:
        try:
            data = _to_json(value)
        except UnicodeError:
            data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        if words and _CAN_CONTAIN_TEXT.search(data):
            data = _to_json(_without_texts(_from_json(data), _DEPTH_MAX))
        return data.decode() if len(data) <= _JSON_BYTES_MAX else None
    except Exception:  # The provider's value can be nested too deep, be too large, or have no JSON type.
        return None


def _without_texts(value: Any, depth: int) -> Any:
    """Return the value with null in place of each string that is not one word; drop such member names."""
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) else None
    if not isinstance(value, dict | list):
        return value
    if not depth:
        return None
    if isinstance(value, list):
        return [_without_texts(one, depth - 1) for one in value]
    return {name: _without_texts(one, depth - 1) for name, one in value.items() if _WORD.fullmatch(name)}


# ---------------------------------------------------------------- rows to exchanges


def _set_part(x: exchange.Exchange, exchange_id: str) -> None:
    """Set the sequence number and the part of a session's response from its id (`relay-seq.part`)."""
    seq, _, part = exchange_id.removeprefix(f"{x.relay}-").partition(".")
    if x.relay and seq.isdecimal() and part.isdecimal():
        x.seq, x.part = int(seq), int(part)


def exchanges_of(batch: pa.RecordBatch) -> Iterator[exchange.Exchange]:
    """Yield the rows of a batch in SCHEMA as Exchanges.

    The times of these Exchanges are ns of the wall clock. The number of a turn is -1 if it is unknown.
    """
    n = batch.num_rows
    columns_of_arrays = {
        *_OFFSETS,
        *_EVENTS,
        "event_chars",
        "text_blocks",
        "server_gap_us",
        "blocks",
        "message_bytes",
        "arrival",
        "capture",
    }
    rows = {name: batch.column(name).to_pylist() for name in SCHEMA.names if name not in columns_of_arrays}
    arrivals = pc.fill_null(batch.column("arrival_ns"), 0)
    us = pa.concat_arrays([batch.column(name) for name in _OFFSETS])
    stamps = pc.add(pc.multiply(us, 1_000), pa.concat_arrays([arrivals] * len(_OFFSETS))).to_pylist()
    points = [stamps[i * n : (i + 1) * n] for i in range(len(_OFFSETS))]
    logs = _event_logs(batch, arrivals)
    gaps = _lists_as_arrays(batch.column("server_gap_us"), "q", lambda flat: pc.multiply(flat, 1_000))
    blocks, sizes, text_blocks = (
        _lists_as_arrays(batch.column(name), "q") for name in ("blocks", "message_bytes", "text_blocks")
    )
    for i in range(n):
        row = {name: values[i] for name, values in rows.items()}
        arrival_ns = row["arrival_ns"] or 0
        t = exchange.Timeline(arrival_ns, events=next(logs))
        x = exchange.Exchange(row["relay"] or "", row["seq"] or 0, arrival_ns, t)
        _set_part(x, row["id"] or "")
        x.server_gaps_ns, x.text_blocks = gaps[i], text_blocks[i]
        for (part, attribute), point in zip(_OFFSET_ATTRIBUTES, points, strict=True):
            setattr(t if part else x, attribute, point[i])
        _set_fields(x, row)
        x.shape = _shape_of(row, blocks[i], sizes[i])
        yield x


def _set_fields(x: exchange.Exchange, row: dict[str, Any]) -> None:
    """Set the attributes of an Exchange that are stored in plain columns."""
    for name, part, attribute, in_us in _OTHER_ATTRIBUTES:
        value = row[name]
        if value is not None:
            setattr(getattr(x, part) if part else x, attribute, value * 1_000 if in_us else value)
    x.path = row["path"] or ""
    x.arrival_mono_ns = row["arrival_mono_ns"]
    x.outcome = Outcome(x.outcome)
    x.reading = _reading_of(row["reading"], x)
    x.uncertainty_ns = (row["uncertainty_us"] or 0) * 1_000
    x.tokens.input = None if row["input_token_source"] == "tokenizer" else row["input_tokens"]
    x.tokens.source = TokenSource(row["token_source"] or "none")
    x.usage, x.server_timing, x.guardrail = (
        _read_json(row[name]) for name in ("usage", "server_timing", "guardrail")
    )
    if row["refusal_kind"] is not None or row["refusal_source"] is not None:
        x.refusal = {
            "kind": row["refusal_kind"],
            "source": row["refusal_source"],
            "detail": _read_json(row["refusal_detail"]),
            "confidence": row["refusal_confidence"],
        }
    if row["pair"] is not None:
        x.pair = exchange.PairMember(row["pair"])
    if row["session"] is not None:
        number = -1 if row["turn"] is None else row["turn"]
        x.turn = exchange.Turn(
            row["session"],
            row["session_source"] or "",
            number,
            row["parent"],
            _us_to_ns(row["think_us"]),
            row["turn_by"],
        )
    if row["request_body"] is not None or row["response_text"] is not None or row["level"] == "full":
        x.text = exchange.CapturedText(row["request_body"], row["response_text"], row["redactions"] or 0)


def _reading_of(reading: str | None, x: exchange.Exchange) -> Reading:
    """Return how the answer was read. If the row lacks the column (it is of a trace or an older version), the
    answer counts as read if the row has a dialect or the time of a token."""
    if reading is not None:
        return Reading(reading)
    was_read = x.dialect is not None or x.timeline.first_token_ns is not None
    return Reading.DIALECT if was_read else Reading.NONE


def _shape_of(
    row: dict[str, Any], blocks: "array[int] | None", sizes: "array[int] | None"
) -> exchange.RequestShape | None:
    """Return the shape of the request from a row of a capture; None: the row has none."""
    shape = exchange.RequestShape(roles=row["message_roles"] or [])
    for name, attribute in _OF_SHAPE.items():
        setattr(shape, attribute, row[name])
    if row["input_token_source"] == "tokenizer":
        shape.tokens = row["input_tokens"]
    shape.sizes = shape.sizes if sizes is None else sizes
    shape.blocks = shape.blocks if blocks is None else blocks
    # An empty shape has two meanings: with a list of roles, even an empty list, the request was understood;
    # without that list, the row has no shape.
    return None if shape == _NO_SHAPE and row["message_roles"] is None else shape


def _event_logs(batch: pa.RecordBatch, arrivals: pa.Array) -> Iterator[exchange.EventLog]:
    """Yield the log of the events of each row."""
    column = batch.column("event_us")
    rows = pc.list_parent_indices(column)
    t_ns = _lists_as_arrays(column, "q", lambda flat: pc.add(pc.multiply(flat, 1_000), arrivals.take(rows)))
    classes = _lists_as_arrays(batch.column("event_class"), "B", _class_codes)
    sizes = _lists_as_arrays(batch.column("event_bytes"), "l", lambda flat: pc.fill_null(flat, 0).cast(_LONG))
    tokens = _lists_as_arrays(
        batch.column("event_tokens"), "l", lambda flat: pc.fill_null(flat, -1).cast(_LONG)
    )
    flags = _lists_as_arrays(batch.column("event_flags"), "B", lambda flat: pc.fill_null(flat, 0))
    chars = _lists_as_arrays(batch.column("event_chars"), "l", lambda flat: pc.fill_null(flat, 0).cast(_LONG))
    for times, kinds, size, counted, flag, char in zip(
        t_ns, classes, sizes, tokens, flags, chars, strict=True
    ):
        if times is None:
            yield exchange.EventLog()
            continue
        n = len(times)
        yield exchange.EventLog(
            times,
            bytearray([EventClass.METADATA] * n if kinds is None else kinds),
            array("l", [0]) * n if size is None else size,
            array("l", [-1]) * n if counted is None else counted,
            bytearray(n if flag is None else flag),
            array("l") if char is None else char,
        )


def _class_codes(names: pa.Array) -> pa.Array:
    """Return the codes of event classes. A name that only a newer llmtap knows becomes `metadata`."""
    return pc.fill_null(pc.index_in(names, value_set=_CLASS_NAMES), int(EventClass.METADATA)).cast(pa.uint8())


def _lists_as_arrays(column: pa.Array, code: str, convert: Any = None) -> "list[array[int] | None]":
    """Return a column's lists as arrays of type `code`. `convert`: function applied to all values first."""
    flat = column.flatten()
    if convert is not None:
        flat = convert(flat)
    width = flat.type.bit_width // 8
    data = memoryview(flat.buffers()[1] or b"")[flat.offset * width :]
    arrays: list[array[int] | None] = []
    begin = 0
    for length in column.value_lengths().to_pylist():
        if length is None:
            arrays.append(None)
            continue
        values = array(code)
        values.frombytes(data[begin * width : (begin + length) * width])
        arrays.append(values)
        begin += length
    return arrays


def _read_json(text: str | None) -> Any:
    try:
        return None if text is None else _from_json(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _us_to_ns(us: int | None) -> int | None:
    return None if us is None else us * 1_000
