"""Read text formats (lines, JSON Lines, CSV tables), write CSV, and keep decimal numbers exact.

The formats of `formats/` use it: `json_rows` yields typed rows, `read_csv` blocks of columns, `write_csv`
writes a table, and other functions look at the first bytes of a file. Numbers with a point are read from
their digits, unless the row type asks for floats. Errors name line and field.

Source: RFC 8259, jsonlines.org, RFC 4180 (a line break inside quotes is refused).
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
"""Maximum size of a line in formats without text. A prompt of ten million tokens has 20,000
block ids: 200 KB."""
BODY_BYTES_MAX: Final = 256 << 20
"""Maximum size of a line with a request body. An agent's long context with images has 50 MB."""
_BLOCK_BYTES: Final = 1 << 19
"""Size of the text that is parsed at once: about 10,000 rows of a CSV file."""
_BOM: Final = b"\xef\xbb\xbf"
_SHOWN_CHARS: Final = 40


def read_lines(file: BinaryIO, bytes_max: int = BODY_BYTES_MAX) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines with their numbers from 1, without a byte order mark. Raises FormatError."""
    number = 0
    while line := file.readline(bytes_max + 1):
        number += 1
        if len(line) > bytes_max:
            raise FormatError(f"line {number}: is longer than {bytes_max >> 20} MiB")
        line = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
        if line:
            yield number, line


def clip_value(value: str) -> str:
    """Return a value for an error message: in quotes, and cut if it is longer than a line."""
    if len(value) <= _SHOWN_CHARS:
        return f'"{value}"'
    return f'"{value[:_SHOWN_CHARS]}..." ({len(value)} characters)'


# ---------------------------------------------------------------- decimal numbers

Number = int | Decimal


def number_ns(number: Number, places: int, line: int, field: str) -> int:
    """Convert a time in units of 10**places ns to whole ns. Raises FormatError if it is
    negative or too large."""
    if isinstance(number, int) and 0 <= number < 1_000_000_000:  # Nearly all times are of this kind.
        return number * int(10**places)
    value = Decimal(number)
    # Check the exponent first: 1e999999999 as a whole number would fill the memory.
    fits = value.is_finite() and (not value or value.adjusted() + places <= 19)
    ns = round(value.scaleb(places)) if fits else 1 << 63
    if ns >= 1 << 63:
        raise FormatError(f"line {line}: {field}: is not a finite number below 2^63")
    if ns < 0:
        raise FormatError(f"line {line}: {field}: is negative")
    return ns


def decimal_text(units: int, places: int, *, point: bool = False) -> str:
    """Return `units` (>= 0) of 10**-places as a decimal number. `point`: write a whole number with `.0`."""
    whole, fraction = divmod(units, 10**places)
    digits = f"{fraction:0{places}}".rstrip("0") if fraction else "0" * point
    return f"{whole}.{digits}" if digits else str(whole)


# ---------------------------------------------------------------- JSON Lines

COUNT_MAX: Final = 10**18 - 1
"""Maximum count of tokens, so that sums of several counts still fit into 64 bits."""


class TokenCount(int):
    """Number of tokens in a row type: a whole number in any notation, such as 472, 472.0 or 4.72e2."""


Id = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

T = TypeVar("T", bound=msgspec.Struct)
_WHERE: Final = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_FIRST_OBJECTS: Final = 50
_UNKNOWN_NAMES_MAX: Final = 20
"""Maximum number of unknown field names; a file with more has another format."""


def json_rows(
    stream: BinaryIO, row: type[T], notes: list[str], *, bytes_max: int = LINE_BYTES_MAX
) -> Iterator[tuple[T, int]]:
    """Yield a typed row for each line, with the line number. Raises FormatError.

    Fields that the type `row` does not have are counted in the notes.
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
        # The block could not be read at once: a line is wrong, has unknown fields, or has several objects.
        # Read it line by line to find out which.
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
    """Convert the value of a `Count` field. Raises ValueError, to which msgspec adds the
    name of the field."""
    assert kind is TokenCount
    if not isinstance(value, int | float | Decimal) or isinstance(value, bool) or value != value // 1:
        raise ValueError(f"Expected `int`, got `{_JSON_NAMES.get(type(value), type(value).__name__)}`")
    if not 0 <= value <= COUNT_MAX:
        raise ValueError(f"Expected `int` {'>= 0' if value < 0 else f'<= {COUNT_MAX}'}")
    return TokenCount(value)


_JSON_NAMES: Final[dict[type, str]] = {list: "array", dict: "object"}


def _line_blocks(lines: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
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
    """Return the error of a decoder with line and field, but without the value, which may
    be a user's text."""
    if isinstance(exc, UnicodeDecodeError):
        return FormatError(f"line {number}: is not UTF-8")
    if isinstance(exc, RecursionError):
        return FormatError(f"line {number}: is nested too deeply")
    match = _WHERE.fullmatch(str(exc))
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
    """Return the objects in the first lines; [] if a line is something else. Raises FormatError."""
    lines = head.removeprefix(_BOM).split(b"\n")
    if len(lines) > 1:
        del lines[-1]  # The last line is cut off, or empty.
    objects = []
    for number, line in enumerate(lines[:_FIRST_OBJECTS], 1):
        if line.strip():
            try:
                objects.append(_line_object(line))
            except RecursionError as exc:
                raise error_of(exc, number) from None
    return objects if all(objects) else []


def first_problem(head: bytes) -> str | None:
    """Return a message on the first line that is no JSON object.

    None if all of the first lines are objects, or if the file is no JSON, or one document of several lines.
    """
    if start_of(head)[:1] not in (b"{", b"["):
        return None
    lines = head.removeprefix(_BOM).split(b"\n")
    if len(lines) > 1:
        del lines[-1]  # The last line is cut off, or empty.
    decoded = 0
    for number, line in enumerate(lines[:_FIRST_OBJECTS], 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except (ValueError, RecursionError) as exc:
            # If this is the first line of a document of several lines, it is no JSON by itself: report no
            # error.
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
    """Kind of the values of a column: their allowed text, and the conversion from text and to text."""

    pattern: str
    """Regular expression (RE2) of the allowed texts."""
    description: str
    """Description of the allowed texts, for error messages."""
    parse: Callable[[pa.StringArray], pa.Array]
    text: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class CsvColumn:
    name: str
    """Name in the file."""
    kind: CsvKind
    column: str
    """Name of the column in a capture."""
    required: bool = True
    empty: bool = False
    """Whether a value may be empty."""


def _seconds_ns(texts: pa.StringArray) -> pa.Int64Array:
    parts = pc.extract_regex(texts, r"^(?P<whole>\d+)\.?(?P<fraction>\d*)$")
    fraction = pc.utf8_rpad(pc.struct_field(parts, "fraction"), 9, "0").cast(pa.int64())
    return pc.add_checked(
        pc.multiply_checked(pc.struct_field(parts, "whole").cast(pa.int64()), 1_000_000_000), fraction
    )


def _quoted_field(value: str) -> str:
    """Return a text as a field of CSV, in quotes if it needs them. Line breaks become spaces."""
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
"""Kind of a column with seconds, which are converted to ns. Ten digits before the point are 300 years."""
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

    Raises FormatError.
    """
    first = stream.readline(LINE_BYTES_MAX)
    header = _split_fields(first.removeprefix(_BOM), 1)
    for c in columns:
        if header.count(c.name) > 1:
            raise FormatError(f"line 1: {c.name}: the column occurs twice")
        if c.required and c.name not in header:
            raise FormatError(f"line 1: {c.name}: the column is missing")
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
            raise FormatError(f"line {number}: is longer than {LINE_BYTES_MAX >> 20} MiB")
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
    """Return the values of a column. Raises pa.ArrowInvalid if a text does not match the
    kind of the column."""
    pattern = f"^({c.kind.pattern}{'|' if c.empty else ''})$"
    if not pc.all(pc.match_substring_regex(texts, pattern)).as_py():
        raise pa.ArrowInvalid(c.name)
    return c.kind.parse(pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts))


def _first_row_error(block: bytes, number: int, header: list[str], known: Sequence[CsvColumn]) -> FormatError:
    """Return the error of the first line of a block that does not fit. `number`: number of its first line."""
    rows: list[tuple[int, list[str]]] = []
    error = FormatError(f"line {number}: is not valid CSV")
    for at, line in enumerate(block.split(b"\n"), number):
        if line.strip(b"\r"):
            try:
                fields = _split_fields(line, at)
            except FormatError as exc:
                error = exc
                break
            if len(fields) != len(header):
                error = FormatError(f"line {at}: expected {len(header)} columns, got {len(fields)}")
                break
            rows.append((at, fields))
    for c in known:
        values = [fields[header.index(c.name)] for _, fields in rows]
        # Search by bisection: a check takes up to 1 ms even for one line, too much for a check of each line.
        first = bisect_left(range(len(values)), True, key=lambda n: not _values_fit(c, values[: n + 1]))
        if first < len(values):
            wanted = c.kind.description + (", or nothing" if c.empty else "")
            got = clip_value(values[first])
            error = FormatError(f"line {rows[first][0]}: {c.name}: expected {wanted}, got {got}")
            del rows[first:]
    return error


def _values_fit(c: CsvColumn, values: list[str]) -> bool:
    try:
        _parse_column(c, pa.array(values, pa.string()))
    except pa.ArrowException:
        return False
    return True


def csv_header(head: bytes) -> set[str]:
    """Return the column names in the first bytes of a file, to detect its format."""
    return set(csv_columns(head))


def csv_columns(head: bytes) -> list[str]:
    """Return the column names in the first bytes of a file, in their order; [] if it is no CSV file."""
    try:
        return _split_fields(head.removeprefix(_BOM).partition(b"\n")[0], 1)
    except FormatError:
        return []


def _split_fields(line: bytes, number: int) -> list[str]:
    try:
        fields: list[str] = next(csv.reader([line.decode().rstrip("\r\n")], strict=True), [])
    except UnicodeDecodeError as exc:
        raise FormatError(f"line {number}: byte {exc.start + 1} is not UTF-8") from None
    except csv.Error as exc:
        raise FormatError(f"line {number}: is not valid CSV: {exc}") from None
    return fields


def write_csv(
    out: BinaryIO,
    columns: Sequence[CsvColumn],
    batches: Iterable[Mapping[str, Sequence[Any]]],
    end: str = "\n",
) -> None:
    """Write a table. Each batch has the values of the columns, by the names of the columns in a capture."""
    out.write((",".join(c.name for c in columns) + end).encode())
    for batch in batches:
        fields = [["" if value is None else c.kind.text(value) for value in batch[c.column]] for c in columns]
        out.write("".join(",".join(row) + end for row in zip(*fields, strict=True)).encode())
