"""Read text formats (lines, JSON Lines, CSV tables), write CSV, and keep decimal numbers exact.

The formats of `formats/` use this module: `json_rows` yields typed rows, `read_csv` yields blocks of columns,
`write_csv` writes a table, and other functions examine the first bytes of a file. Decimal numbers are read
exactly, unless the row type has a float. Errors name line and field.

Source: RFC 8259, jsonlines.org, RFC 4180 (but a line break inside quotes is an error).
"""

import csv
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from llmtap.traces.format import FormatError

LINE_BYTES_MAX: Final = 4 << 20
"""Maximum size of a line without text. A prompt of ten million tokens has 20,000 block ids: 200 KB."""
BODY_BYTES_MAX: Final = 256 << 20
"""Maximum size of a line with a request body. An agent's long context with images has 50 MB."""
_BLOCK_BYTES: Final = 1 << 19
"""Size in bytes of the text that is parsed at once: about 10,000 rows of a CSV file."""
_BOM: Final = b"\xef\xbb\xbf"
_SHOWN_CHARS: Final = 40


def read_lines(file: BinaryIO, bytes_max: int = BODY_BYTES_MAX) -> Iterator[tuple[int, bytes]]:
    """Yield the line numbers (from 1) and lines that are not blank, without a byte order mark. Raises
    FormatError for a line of more than `bytes_max` bytes."""
    number = 0
    while line := file.readline(bytes_max + 1):
        number += 1
        if len(line) > bytes_max:
            raise FormatError(f"line {number}: is longer than {bytes_max >> 20} MiB, the maximum")
        line = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
        if line:
            yield number, line


def clip_value(value: str) -> str:
    """Return a value for an error message: in quotes, and cut after _SHOWN_CHARS characters."""
    if len(value) <= _SHOWN_CHARS:
        return f'"{value}"'
    return f'"{value[:_SHOWN_CHARS]}..." ({len(value)} characters)'


# ---------------------------------------------------------------- decimal numbers

Number = int | Decimal


def number_ns(number: Number, places: int, line: int, field: str) -> int:
    """Convert a time in units of 10**places ns to ns. Raises FormatError if it is negative or too large."""
    if isinstance(number, int) and 0 <= number < 1_000_000_000:  # Fast path for most times.
        return number * int(10**places)
    value = Decimal(number)
    # Check the exponent before the conversion: 1e999999999 as a whole number would fill the memory.
    fits = value.is_finite() and (not value or value.adjusted() + places <= 19)
    ns = round(value.scaleb(places)) if fits else 1 << 63
    if ns >= 1 << 63:
        got = clip_value(str(number))
        raise FormatError(f"line {line}: {field}: expected a finite number below 2^63 ns, got {got}")
    if ns < 0:
        raise FormatError(f"line {line}: {field}: expected 0 or more, got {clip_value(str(number))}")
    return ns


def decimal_text(units: int, places: int, *, point: bool = False) -> str:
    """Return `units` (>= 0) / 10**places as a decimal text. `point`: write a whole number with `.0`."""
    whole, fraction = divmod(units, 10**places)
    digits = f"{fraction:0{places}}".rstrip("0") if fraction else "0" * point
    return f"{whole}.{digits}" if digits else str(whole)


# ---------------------------------------------------------------- JSON Lines

COUNT_MAX: Final = 10**18 - 1
"""Maximum number of tokens in a field, so that a sum of several such numbers still fits into 64 bits."""


class TokenCount(int):
    """Type of a field with a number of tokens: whole, in any notation, such as 472, 472.0 or 4.72e2."""


Id = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Id of a block, as the type of a field: a signed 64-bit integer."""

T = TypeVar("T", bound=msgspec.Struct)
_DECODER_MESSAGE: Final = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
"""Matches an error message of msgspec: the problem, and the path of the field."""
_FIRST_OBJECTS: Final = 50
"""Number of lines at the start of a file by which its format is recognised."""
_UNKNOWN_NAMES_MAX: Final = 20
"""Maximum number of unknown field names that are counted. A file with more names has another format."""


def json_rows(
    stream: BinaryIO, row: type[T], notes: list[str], *, bytes_max: int = LINE_BYTES_MAX
) -> Iterator[tuple[T, int]]:
    """Yield an object of the type `row` for each line, with the line number. Raises FormatError.

    After the last line, notes are added on fields that the type `row` does not have.
    """
    exact = msgspec.defstruct(row.__name__, [], bases=(row,), forbid_unknown_fields=True)
    strict: msgspec.json.Decoder[T] = msgspec.json.Decoder(exact, dec_hook=read_count)
    lenient = msgspec.json.Decoder(row, dec_hook=read_count).decode
    known = {field.encode_name for field in msgspec.structs.fields(row)}
    unknown = Counter[str]()
    for block in _line_blocks(read_lines(stream, bytes_max)):
        try:
            rows = strict.decode_lines(b"\n".join(line for _, line in block))
        except (ValueError, RecursionError):
            rows = []
        if len(rows) == len(block):
            yield from zip(rows, (number for number, _ in block), strict=True)
            continue
        # A line is wrong, has unknown fields, or has several objects. Read each line by itself to find it.
        for number, line in block:
            try:
                one = lenient(line)
            except (ValueError, RecursionError) as exc:
                error = error_of(exc, number)
                if line in (b"{", b"[") and len(block) > 1:
                    error = FormatError(f"{error}; `jq -c . FILE` writes each object on one line")
                raise error from None
            for name in _line_object(line):
                if name not in known and (name in unknown or len(unknown) < _UNKNOWN_NAMES_MAX):
                    unknown[name] += 1
            yield one, number
    notes += [f"{n} rows with a field {name!r} that is not kept" for name, n in unknown.items()]


def read_count(kind: type, value: object) -> TokenCount:
    """Convert the value of a TokenCount field. Raises ValueError, to which msgspec adds the field's name."""
    assert kind is TokenCount
    if not isinstance(value, int | float | Decimal) or isinstance(value, bool) or value != value // 1:
        raise ValueError(f"Expected `int`, got `{_JSON_NAMES.get(type(value), type(value).__name__)}`")
    if not 0 <= value <= COUNT_MAX:
        raise ValueError(f"Expected `int` {'>= 0' if value < 0 else f'<= {COUNT_MAX}'}")
    return TokenCount(value)


_JSON_NAMES: Final[dict[type, str]] = {list: "array", dict: "object"}


def _line_blocks(lines: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Join lines to blocks of about _BLOCK_BYTES."""
    block: list[tuple[int, bytes]] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line[1])
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def error_of(exc: ValueError | RecursionError, number: int) -> FormatError:
    """Return a FormatError with line and field, without the value, which can be a user's text."""
    if isinstance(exc, UnicodeDecodeError):
        return FormatError(f"line {number}: is not UTF-8; save the file as UTF-8")
    if isinstance(exc, RecursionError):
        return FormatError(f"line {number}: has more levels of lists and objects than can be read")
    match = _DECODER_MESSAGE.fullmatch(str(exc))
    assert match is not None
    what, field = match[1].replace("`", ""), match[2]
    if missing := re.fullmatch(r"Object missing required field (.*)", what):
        return FormatError(f"line {number}: {f'{field}.' if field else ''}{missing[1]}: is missing")
    what = what[:1].lower() + what[1:]
    if not isinstance(exc, msgspec.ValidationError):
        what = f"is not valid JSON: {what.removeprefix('jSON is malformed: ')}"
    return FormatError(f"line {number}: {f'{field}: ' if field else ''}{what}")


def start_of(head: bytes) -> bytes:
    """Return the first bytes of a file without byte order mark and white space, to detect its format."""
    return head.removeprefix(_BOM).lstrip()


def first_objects(head: bytes) -> list[dict[str, object]]:
    """Return the JSON objects in the first lines; [] if a line is not an object. Raises FormatError for a
    line that is nested too deeply."""
    lines = head.removeprefix(_BOM).split(b"\n")
    if len(lines) > 1:
        del lines[-1]  # Ignore the last line, which is cut off or empty.
    objects = []
    for number, line in enumerate(lines[:_FIRST_OBJECTS], 1):
        if line.strip():
            try:
                objects.append(_line_object(line))
            except RecursionError as exc:
                raise error_of(exc, number) from None
    return objects if all(objects) else []


def first_problem(head: bytes) -> str | None:
    """Return a message on the first line that is not a JSON object.

    Return None if all of the first lines are objects, if the file is not JSON, or if it is one JSON document
    of several lines.
    """
    if start_of(head)[:1] not in (b"{", b"["):
        return None
    lines = head.removeprefix(_BOM).split(b"\n")
    if len(lines) > 1:
        del lines[-1]  # Ignore the last line, which is cut off or empty.
    decoded = 0
    for number, line in enumerate(lines[:_FIRST_OBJECTS], 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except (ValueError, RecursionError) as exc:
            # The first line of a document of several lines is not JSON by itself, but that is no error.
            is_part = not decoded and len(lines) > 1 and "truncated" in str(exc)
            return None if is_part else str(error_of(exc, number))
        if not isinstance(value, dict):
            return (
                f"line {number}: expected a JSON object, got a JSON {_JSON_NAMES.get(type(value), 'value')}"
            )
        decoded += 1
    return None


def _line_object(line: bytes) -> dict[str, object]:
    try:
        decoded = msgspec.json.decode(line)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


# ---------------------------------------------------------------- CSV


@dataclass(frozen=True, slots=True)
class CsvKind:
    """Kind of the values of a CSV column: their allowed text, and the conversion from text and to text."""

    pattern: str
    """Regular expression (RE2) of the allowed texts."""
    description: str
    """Description of the allowed texts, for error messages."""
    parse: Callable[[pa.StringArray], pa.Array]
    """Function that converts texts to the values of a capture."""
    format: Callable[[Any], str]
    """Function that converts a value of a capture to text."""


@dataclass(frozen=True, slots=True)
class CsvColumn:
    """A column of a CSV file, and the column of a capture that has its values."""

    name: str
    """Name in the file."""
    kind: CsvKind
    column: str
    """Name of the column in a capture."""
    required: bool = True
    """Whether a file must have the column."""
    allows_empty: bool = False
    """Whether a row can have an empty value in the column."""


def _seconds_ns(texts: pa.StringArray) -> pa.Int64Array:
    parts = pc.extract_regex(texts, r"^(?P<whole>\d+)\.?(?P<fraction>\d*)$")
    fraction = pc.utf8_rpad(pc.struct_field(parts, "fraction"), 9, "0").cast(pa.int64())
    return pc.add_checked(
        pc.multiply_checked(pc.struct_field(parts, "whole").cast(pa.int64()), 1_000_000_000), fraction
    )


def _quoted_field(value: str) -> str:
    """Return a text as a field of CSV, in quotes if they are necessary. Line breaks become spaces."""
    value = value.replace("\r", " ").replace("\n", " ")
    return '"' + value.replace('"', '""') + '"' if '"' in value or "," in value else value


def _parse_counts(texts: pa.StringArray) -> pa.Int64Array:
    return pc.replace_substring_regex(texts, r"\.0*$", "").cast(pa.int64())


COUNT: Final = CsvKind(r"\d{1,18}(\.0*)?", "a whole number of at most 18 digits", _parse_counts, str)
SECONDS: Final = CsvKind(
    r"\d{1,10}(\.\d{1,9})?",
    "seconds, with at most nine digits after the point",
    _seconds_ns,
    lambda ns: decimal_text(ns, 9, point=True),
)
"""Kind of a column with seconds, which are read as ns. Ten digits before the point suffice for 300 years."""
SECONDS_US: Final = CsvKind(
    SECONDS.pattern,
    SECONDS.description,
    lambda texts: pc.divide(_seconds_ns(texts), 1_000),
    lambda us: decimal_text(us, 6),
)
TEXT: Final = CsvKind(r"[^\r\n]*", "text without line breaks", lambda texts: texts, _quoted_field)


def read_csv(
    stream: BinaryIO, columns: Sequence[CsvColumn], notes: list[str]
) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """Yield blocks of rows: the number of rows, and the known columns by their names in a capture.

    After the last block, a note on unknown columns is added. Raises FormatError.
    """
    first = stream.readline(LINE_BYTES_MAX)
    header = _split_fields(first.removeprefix(_BOM), 1)
    for c in columns:
        if header.count(c.name) > 1:
            raise FormatError(f"line 1: {c.name}: the column occurs twice; remove one")
        if c.required and c.name not in header:
            raise FormatError(f"line 1: {c.name}: the column is missing, but required")
    known = [c for c in columns if c.name in header]
    names = [name if name in {c.name for c in known} else f"\0{i}" for i, name in enumerate(header)]
    convert = arrow_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        include_columns=[c.name for c in known],
        strings_can_be_null=False,
    )
    read = arrow_csv.ReadOptions(use_threads=False, column_names=names, block_size=2 * LINE_BYTES_MAX)
    number = 2
    while block := stream.read(_BLOCK_BYTES):
        block += (rest := stream.readline(LINE_BYTES_MAX))
        if len(rest) == LINE_BYTES_MAX:
            number += block.count(b"\n")
            raise FormatError(f"line {number}: is longer than {LINE_BYTES_MAX >> 20} MiB, the maximum")
        if block.strip(b"\r\n"):
            try:
                table = arrow_csv.read_csv(pa.BufferReader(block), read, convert_options=convert)
                values = {c.column: _parse_column(c, table.column(c.name).combine_chunks()) for c in known}
            except pa.ArrowException:
                raise _first_row_error(block, number, header, known) from None
            yield table.num_rows, values
        number += block.count(b"\n")
    if unknown := [name for name in header if name not in {c.name for c in columns}]:
        notes.append(f"columns that are not kept: {', '.join(name or '(no name)' for name in unknown)}")


def _parse_column(c: CsvColumn, texts: pa.StringArray) -> pa.Array:
    """Return the values of a column. Raises pa.ArrowInvalid if a text does not match the column's kind."""
    pattern = f"^({c.kind.pattern}{'|' if c.allows_empty else ''})$"
    if not pc.all(pc.match_substring_regex(texts, pattern)).as_py():
        raise pa.ArrowInvalid(c.name)
    return c.kind.parse(pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts))


def _first_row_error(block: bytes, number: int, header: list[str], known: Sequence[CsvColumn]) -> FormatError:
    """Return the error for the first wrong line of a block. `number`: line number of its first line."""
    rows: list[tuple[int, list[str]]] = []
    error = FormatError(f"line {number}: is not valid CSV; check its quotes")
    for line_number, line in enumerate(block.split(b"\n"), number):
        if line.strip(b"\r"):
            try:
                fields = _split_fields(line, line_number)
            except FormatError as exc:
                error = exc
                break
            if len(fields) != len(header):
                error = FormatError(f"line {line_number}: expected {len(header)} columns, got {len(fields)}")
                break
            rows.append((line_number, fields))
    for c in known:
        values = [fields[header.index(c.name)] for _, fields in rows]
        # Search by bisection, because a check takes up to 1 ms, even for one line.
        first = bisect_left(range(len(values)), True, key=lambda n: not _values_fit(c, values[: n + 1]))
        if first < len(values):
            expected = c.kind.description + (", or nothing" if c.allows_empty else "")
            got = clip_value(values[first])
            error = FormatError(f"line {rows[first][0]}: {c.name}: expected {expected}, got {got}")
            del rows[first:]
    return error


def _values_fit(c: CsvColumn, values: list[str]) -> bool:
    try:
        _parse_column(c, pa.array(values, pa.string()))
    except pa.ArrowException:
        return False
    return True


def csv_header(head: bytes) -> set[str]:
    """Return the set of column names in the first bytes of a file, to detect its format."""
    return set(csv_columns(head))


def csv_columns(head: bytes) -> list[str]:
    """Return the column names in the first bytes of a file, in their order; [] if it is not CSV."""
    try:
        return _split_fields(head.removeprefix(_BOM).partition(b"\n")[0], 1)
    except FormatError:
        return []


def _split_fields(line: bytes, number: int) -> list[str]:
    try:
        fields: list[str] = next(csv.reader([line.decode().rstrip("\r\n")], strict=True), [])
    except UnicodeDecodeError as exc:
        raise FormatError(
            f"line {number}: byte {exc.start + 1} is not UTF-8; save the file as UTF-8"
        ) from None
    except csv.Error as exc:
        raise FormatError(f"line {number}: is not valid CSV: {exc}") from None
    return fields


def write_csv(
    out: BinaryIO,
    columns: Sequence[CsvColumn],
    batches: Iterable[Mapping[str, Sequence[Any]]],
    line_end: str = "\n",
) -> None:
    """Write a CSV table. Each batch has lists of values, by the names of the columns in a capture."""
    out.write((",".join(c.name for c in columns) + line_end).encode())
    for batch in batches:
        fields = [
            ["" if value is None else c.kind.format(value) for value in batch[c.column]] for c in columns
        ]
        out.write("".join(",".join(row) + line_end for row in zip(*fields, strict=True)).encode())
