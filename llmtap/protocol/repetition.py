"""Recognise events that differ from the previous event only in their text, so that they need no parsing.

`exchange/answer.py` looks for such an event (`RepetitionFinder`). `exchange/observer.py` then offers each
read to a `TokenRun`, which collects the events and returns them as columns, to be logged together. `TokenRun`
has a compiled and a Python implementation.

If two events have the same bytes before and after one JSON string, their meaning differs only in that string.
A probe (the event with another text) verifies that the string is the text of the event, and the dialect
states that its reader stores nothing of the text (`Delta.repeatable`). Up to LOOSE_MAX members at the top of
the object that no reader reads (id, date, padding) can differ, too; each of their values must be one string
or one whole number. The numbers of a running usage can differ if all of them grow by the same amount, because
each then shows the number of output tokens so far.
"""

import json
from array import array
from collections.abc import Callable
from sys import getsizeof
from typing import Final, NamedTuple, Protocol

import msgspec

from llmtap import native
from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Delta
from llmtap.protocol.sse import SseEvent, SseParser

BLOCK_BYTES_MAX: Final = 4_096
"""Maximum size of a recognised event, to bound the memory of runs. Events with one token are much smaller."""
_BEFORE_VALUE: Final = (b'":', b'": ')
"""Bytes before the value of a member. The probe shows whether this value is the text of the event."""
LOOSE_MAX: Final = 3
"""Maximum number of loose values of an event, because each takes time. No known server sends more."""
_SIZE_LINES: Final = {
    len(line) + size + 2: line for size in range(1, BLOCK_BYTES_MAX + 1) for line in [b"%x\r\n" % size]
}
"""First line of a chunk in its usual form (RFC 9112 7.1), by the size of the whole chunk."""
_PAYLOAD_SIZES: Final = {size: size - len(line) - 2 for size, line in _SIZE_LINES.items()}
_EVENTS_WORTH_SEARCH: Final = 16
"""A search was vain if the next search follows after fewer events. A search takes the time of five events."""
_VAIN_SEARCHES_MAX: Final = 8
"""Maximum number of vain searches in one stream; afterwards, no more searches are made."""
_ENCODERS: Final[tuple[Callable[[str], bytes], ...]] = (
    msgspec.json.encode,
    lambda text: json.dumps(text).encode(),
)
"""The two ways in which servers write a text in JSON: in UTF-8, and in ASCII with escapes."""
_PROBE: Final = "a text of our own"
_decode_text: Final = msgspec.json.Decoder(str).decode
_decode_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_replace: Final = msgspec.structs.replace
_COUNT_DIGITS_MAX: Final = 8
"""Maximum number of digits of a running count: all such numbers are valid (`delta.USAGE_TOKENS_MAX`)."""
_USAGE: Final = "usage"
"""Member with the running counts."""


class LooseValue(NamedTuple):
    """A value that can differ in each event: of a member that no reader reads, such as an id, or a count."""

    fixed: bytes
    """The bytes between this value and the next one, on the side of the text."""
    is_string: bool
    """Whether the value is a string, not a whole number."""
    offset: int | None = None
    """For a number of a running usage: its difference from the number of output tokens so far; else None."""


_Loose = tuple[LooseValue, ...]
Fixed = tuple[bytes, _Loose, _Loose, bytes]
"""The fields `opening`, `ahead`, `beyond` and `closing` of a `Repetition`."""


class RunningTotal(Protocol):
    """Number of output tokens so far, of each choice, as the reader of a running usage stores it."""

    def growth(self, choice: int, count: int) -> int:
        """Store the count of a choice, and return its increase; 0 if it did not increase."""


class Repetition(msgspec.Struct, gc=False):
    """Part that is the same in all repetitions of an event: everything but the text and the loose values."""

    opening: bytes
    """All bytes before the first value (a loose value or the text), including its opening quote."""
    closing: bytes
    """All bytes after the last value, including its closing quote."""
    delta: Delta
    """Delta of the event without its text."""
    chunk_end: bytes
    """`closing`, and the line end of the HTTP chunk that holds the event."""
    ahead: _Loose = ()
    """Loose values before the text."""
    beyond: _Loose = ()
    """Loose values after the text, the last first."""
    names: frozenset[str] = frozenset()
    """Names of the members at the top of the object that have loose values."""
    offsets: dict[str, int] = {}
    """For each number of the usage that differs: its `LooseValue.offset`; empty without running counts."""
    sample: bytes = b""
    """The event in which the loose values were found, without its text; empty without loose values."""

    @property
    def fixed(self) -> Fixed:
        return self.opening, self.ahead, self.beyond, self.closing

    def usage_at(self, count: int) -> JsonObject | None:
        """Return the usage of the event with this number of output tokens so far."""
        usage = self.delta.usage
        return usage and usage | {name: count + offset for name, offset in self.offsets.items()}

    def text_in(self, data: bytes, chunked: bool = False) -> str:
        """Return the text of a block that repeats the event; "" if the block does not certainly repeat it.
        `chunked`: `data` is a whole HTTP chunk that holds the block."""
        return self.read(data, chunked)[0]

    def read(self, data: bytes, chunked: bool = False) -> tuple[str, int]:
        """Return the text as `text_in` does, and the number of output tokens so far; 0 if the event has no
        running count."""
        size, start, closing = len(data), 0, self.closing
        if chunked:
            line = _SIZE_LINES.get(size)
            if line is None or not data.startswith(line):
                return _NO_TEXT
            start, closing = len(line), self.chunk_end
        elif size > BLOCK_BYTES_MAX:
            return _NO_TEXT
        opening = self.opening
        if not (data.startswith(opening, start) and data.endswith(closing)):
            return _NO_TEXT
        start += len(opening)
        end = size - len(closing)
        count = 0
        try:
            if self.ahead or self.beyond:
                start, end, count = self._text_span(data, start, end)
            # Decode the text with its quotes, so that the decoder refuses anything but exactly one string.
            text = _decode_text(data[start - 1 : end + 1])
        except ValueError:
            return _NO_TEXT
        return (text, count) if text else _NO_TEXT

    def _text_span(self, data: bytes, start: int, end: int) -> tuple[int, int, int]:
        """Check each loose value, and return the start and end of the text, and the running count. Raises
        ValueError if a check fails. A value that contains a fixed part fails, so that no wrong text is
        returned."""
        count = 0
        for value in self.ahead:
            stop = data.index(value.fixed, start, end)
            count = _checked_count(data, start, stop, value, count)
            start = stop + len(value.fixed)
        for value in self.beyond:
            stop = data.rindex(value.fixed, start, end)
            count = _checked_count(data, stop + len(value.fixed), end, value, count)
            end = stop
        return start, end, count


_NO_TEXT: Final = ("", 0)


def _checked_count(data: bytes, start: int, end: int, value: LooseValue, count: int) -> int:
    """Check the bytes of a loose value. Raises ValueError unless they are one string, without its quotes, or
    one whole number, which must fit the running count if the value is one. `count`: the running count by the
    values before; 0 if none has it. Return the running count."""
    if value.is_string:
        _decode_text(data[start - 1 : end + 1])
        return count
    number = data[start:end]
    if not (number.isdigit() and (number >= b"1" or number == b"0")):
        raise ValueError("a value that differs between events is neither a text nor a whole number")
    if value.offset is None:
        return count
    shown = int(number) - value.offset if len(number) <= _COUNT_DIGITS_MAX else 0
    if shown <= 0 or count not in (0, shown):
        raise ValueError("the numbers of the usage do not all grow by the same amount")
    return shown


def find_repetition(
    block: bytes,
    delta: Delta,
    read_event: Callable[[SseEvent], Delta],
    names_read: frozenset[str] | None = None,
    last: Repetition | None = None,
    running: RunningTotal | None = None,
) -> Repetition | None:
    """Return the repetition of a block that `read_event` read as `delta`; None unless the text stands in the
    block exactly once, as the value of a member. `names_read`: members at the top of the object that the
    reader reads. `last`: the previous repetition; values that differ from it are loose. `running`: total that
    the reader counts by the usage of the block."""
    if delta.counts is not None:
        if running is None:
            return None
        read_event = _read_in_place(delta, read_event, running)
    for encode in _ENCODERS:
        quoted = encode(delta.text)
        before, text, behind = block.partition(quoted)
        if text and quoted not in behind and before.endswith(_BEFORE_VALUE):
            behind = b'"' + behind
            candidate = Repetition(before + b'"', behind, _replace(delta, text=""), behind + b"\r\n")
            probe = candidate.opening + _PROBE.encode() + candidate.closing
            if not _is_alike(probe, candidate.delta, read_event):
                return None
            if names_read is None or last is None:
                return candidate
            return _with_loose_values(candidate, last, names_read, read_event) or candidate
    return None


def _read_in_place(
    last: Delta, read_event: Callable[[SseEvent], Delta], running: RunningTotal
) -> Callable[[SseEvent], Delta]:
    """Return a function that reads an event as if it had come instead of the one that was read as `last`, and
    leaves the running total as it is."""
    (choice,), count = last.choices, _output_count(last)

    def read(event: SseEvent) -> Delta:
        running.growth(choice, count - max(0, last.tokens))
        try:
            return read_event(event)
        finally:
            running.growth(choice, count)

    return read


def _is_alike(probe: bytes, expected: Delta, read_event: Callable[[SseEvent], Delta]) -> bool:
    """Return whether the reader reads the probe as expected, with the text of the probe."""
    events = SseParser().feed(probe)
    if len(events) != 1:
        return False
    delta = read_event(events[0])
    delta.size = expected.size
    return delta == _replace(expected, text=_PROBE)


def _member_spans(block: bytes) -> dict[str, bytes]:
    """Return the members of the object in a block, with the bytes of their values; {} without an object."""
    events = SseParser().feed(block)
    if len(events) != 1 or events[0].data is None:
        return {}
    return _value_spans(events[0].data)


def _value_spans(data: bytes) -> dict[str, bytes]:
    """Return the members of an object in JSON, with the bytes of their values; {} without an object."""
    try:
        return {name: bytes(value) for name, value in _decode_members(data).items()}
    except ValueError:
        return {}


def _with_loose_values(
    candidate: Repetition,
    last: Repetition,
    names_read: frozenset[str],
    read_event: Callable[[SseEvent], Delta],
) -> Repetition | None:
    """Return the candidate with the values that differ from the last repetition as loose values. None if
    there are no such values or too many, or if the reader uses one of them."""
    sample, edge = candidate.opening + candidate.closing, len(candidate.opening)
    was, now = _member_spans(last.sample or last.opening + last.closing), _member_spans(sample)
    loose = {
        name: value
        for name, value in now.items()
        if name not in names_read
        and (name in last.names or was.get(name, value) != value)
        and (value.startswith(b'"') or value.isdigit())
    }
    counts = _running_counts(candidate.delta, was.get(_USAGE, b""), now.get(_USAGE, b""), last)
    offsets = {name: int(value) - _output_count(candidate.delta) for name, value in counts.items()}
    if not 0 < len(loose) + len(counts) <= LOOSE_MAX:
        return None
    text = _Place(edge, edge, True)
    places = [_value_place(sample, name, value) for name, value in loose.items()]
    if counts:
        usage = now[_USAGE]
        start = _value_place(sample, _USAGE, usage).start
        for name, value in counts.items():
            place = _value_place(usage, name, value)
            # Without a certain place, the probe below fails, because it then inserts a digit elsewhere.
            places.append(_Place(start + place.start, start + place.end, False, offsets[name]))
    if any(place.start <= edge <= place.end for place in places):
        return None  # The place of a value is not certain, or the value is the text itself.
    values = sorted([*places, text], key=lambda place: place[:2])
    # Test the places: put one more byte at the start of each value. A place is wrong if the members do not
    # change exactly as expected. The reader uses a value if it then reads the event differently.
    more = [b"x" if place.is_string else b"1" for place in values]
    more[values.index(text)] = b""
    changed = {
        name: b'"x' + value[1:] if value.startswith(b'"') else b"1" + value for name, value in loose.items()
    }
    found = _member_spans(_insert_bytes(sample, values, more))
    more_counts = {name: int(b"1" + value) for name, value in counts.items()}
    if counts:
        spans = _value_spans(found.get(_USAGE, b""))
        if spans != _value_spans(now[_USAGE]) | {name: b"%d" % n for name, n in more_counts.items()}:
            return None
        changed[_USAGE] = found[_USAGE]
    if found != now | changed:
        return None
    more[values.index(text)] = _PROBE.encode()
    expected = _with_counts(candidate.delta, more_counts)
    if not _is_alike(_insert_bytes(sample, values, more), expected, read_event):
        return None
    ends, starts = [0, *(place.end for place in values)], [*(place.start for place in values), len(sample)]
    opening, *fixed, closing = (sample[a:b] for a, b in zip(ends, starts, strict=True))
    n = values.index(text)
    parts = [
        LooseValue(between, place.is_string, place.offset)
        for between, place in zip(fixed, [*values[:n], *values[n + 1 :]], strict=True)
    ]
    return Repetition(
        opening,
        closing,
        candidate.delta,
        closing + b"\r\n",
        ahead=tuple(parts[:n]),
        beyond=tuple(parts[n:])[::-1],
        names=frozenset(loose),
        offsets=offsets,
        sample=sample,
    )


def _output_count(delta: Delta) -> int:
    """Return the number of output tokens so far that the usage of an event shows; 0 if it shows none."""
    return (delta.counts and delta.counts.output) or 0


def _running_counts(delta: Delta, was: bytes, now: bytes, last: Repetition) -> dict[str, bytes]:
    """Return the numbers of the usage that differ between two events; {} if the usage is no running count."""
    if delta.counts is None:
        return {}
    before = _value_spans(was)
    return {
        name: value
        for name, value in _value_spans(now).items()
        if value.isdigit() and (name in last.offsets or before.get(name, value) != value)
    }


def _with_counts(delta: Delta, more: dict[str, int]) -> Delta:
    """Return the Delta with these numbers in its usage, of which the number of output tokens is one."""
    if delta.counts is None or delta.usage is None or not more:
        return delta
    was, tokens = _output_count(delta), max(0, delta.tokens)
    count = next((n for name, n in more.items() if delta.usage.get(name) == was), was)
    return _replace(
        delta,
        usage=delta.usage | more,
        counts=_replace(delta.counts, output=count),
        tokens=count - was + tokens,
    )


class _Place(NamedTuple):
    """Place of a value, without its quotes, in a sample."""

    start: int
    end: int
    is_string: bool
    offset: int | None = None
    """As in `LooseValue`."""


def _value_place(sample: bytes, name: str, value: bytes) -> _Place:
    """Return the place of a member's value. If the value does not stand in exactly one place, return the
    whole sample."""
    is_string = value.startswith(b'"')
    spelt = [msgspec.json.encode(name) + colon + value for colon in (b":", b": ")]
    if sum(map(sample.count, spelt)) != 1:
        return _Place(0, len(sample), is_string)
    end = max(sample.find(one) + len(one) for one in spelt if one in sample)
    return _Place(end - len(value) + is_string, end - is_string, is_string)


def _insert_bytes(sample: bytes, values: list[_Place], more: list[bytes]) -> bytes:
    """Return the sample with one item of `more` inserted at the start of each of these values."""
    starts = [place.start for place in values]
    parts = [sample[a:b] for a, b in zip([0, *starts], [*starts, len(sample)], strict=True)]
    return parts[0] + b"".join(new + part for new, part in zip(more, parts[1:], strict=True))


class Reader(Protocol):
    """Reads the events of one answer."""

    @property
    def names_read(self) -> frozenset[str] | None:
        """Members that the dialect reads at the top of an event; None: possibly any."""
        ...

    @property
    def running_total(self) -> RunningTotal | None:
        """Total that the reader counts by a running usage; None: no repeatable event has one."""
        ...

    def read_event(self, event: SseEvent) -> Delta:
        """Return what an event contains."""
        ...


class RepetitionFinder:
    """Finds the repeated event of one stream. After too many vain searches it stops searching."""

    __slots__ = ("_previous", "_search_offset", "_vain_searches_left", "repetition")

    def __init__(self) -> None:
        self.repetition: Repetition | None = None
        """The event that is probably repeated; None after an event of another kind."""
        self._previous: Repetition | None = None
        """The previous repetition, even if its event is not repeated now: values that differ are loose."""
        self._search_offset = 0
        """Offset in the body at which the previous search was made."""
        self._vain_searches_left = _VAIN_SEARCHES_MAX
        """How many searches may still fail before the search ends."""

    def search(self, block: bytes, delta: Delta, offset: int, reader: Reader) -> None:
        """Set `repetition` to that of a block with one repeatable event. `offset`: end of the block."""
        if not self._vain_searches_left or len(block) > BLOCK_BYTES_MAX or not delta.text or delta.blank:
            return
        if offset - self._search_offset < _EVENTS_WORTH_SEARCH * len(block):
            self._vain_searches_left -= 1
        self._search_offset = offset
        repetition = find_repetition(
            block, delta, reader.read_event, reader.names_read, self._previous, reader.running_total
        )
        self.repetition = repetition
        self._previous = repetition or self._previous


ROOM: Final = 64
"""Maximum number of events in a run of the Python implementation; with this number, logging them is cheap."""
TEXTS_BYTES_MAX: Final = 6 << 10
"""A run is full when its stored texts take this memory. The texts of 64 tokens take half of it."""
RUN_BYTES: Final = 16 << 10
"""Maximum memory of a run: 33 bytes for each of 256 events (in Python: 150 for each of 64), and the texts."""
RUN_BLOCKS: Final = 6
"""Number of copies of the repeated block in memory: three in each of the current and previous repetition."""

RunColumns = tuple["array[int]", "array[int]", "array[int]", bytes, list[str], "array[int]"]
"""Columns with one value for each event of a run: `t_ns` and `added_ns` of its read, size of its block in
bytes, 1 if its text is only white space, its text if texts are stored, and its running count if it has
one."""


class TokenRun(Protocol):
    """Repeated events that are logged together, when the run is `full` or an event of another kind comes."""

    keeps_texts: bool
    """Whether the run stores the texts of its events. Change this only while the run is empty."""

    def __len__(self) -> int: ...

    @property
    def full(self) -> bool:
        """Whether no further event fits into the run."""
        ...

    def add(self, data: bytes, t_ns: int, added_ns: int) -> bool:
        """Add the event of a read and return True; return False if the read is not exactly one repetition."""

    def take(self) -> RunColumns:
        """Return the columns of the events and empty the run, which must have an event."""


class PythonTokenRun:
    """Token run in Python: the reference of the compiled one."""

    __slots__ = ("_chunked", "_events", "_has_counts", "_read", "_texts_bytes", "keeps_texts")

    def __init__(self, repetition: Repetition, *, chunked: bool, keeps_texts: bool) -> None:
        self._chunked = chunked
        """Whether each event comes as an HTTP chunk of its own."""
        self._read = repetition.read
        """Returns the text and the running count of an event that repeats; no text: the bytes are another
        event."""
        self._has_counts = any(value.offset is not None for value in (*repetition.ahead, *repetition.beyond))
        self._events: list[tuple[int, int, int, str, int]] = []
        """Time, added latency, size, text and running count of each event."""
        self._texts_bytes = 0
        """Memory of the texts, for the limit TEXTS_BYTES_MAX."""
        self.keeps_texts = keeps_texts
        """Whether texts are kept for a tokenizer or a recorder."""

    def __len__(self) -> int:
        return len(self._events)

    @property
    def full(self) -> bool:
        return len(self._events) >= ROOM or self._texts_bytes >= TEXTS_BYTES_MAX

    def add(self, data: bytes, t_ns: int, added_ns: int) -> bool:
        text, count = self._read(data, self._chunked)
        if not text:
            return False
        if self.keeps_texts:
            self._texts_bytes += getsizeof(text)
        else:
            text = " " if text.isspace() else "x"
        self._events.append((t_ns, added_ns, len(data), text, count))
        return True

    def take(self) -> RunColumns:
        """Return the columns of the events so far, and begin a new run."""
        times, added_ns, read_sizes, texts, counts = zip(*self._events, strict=True)
        self._events.clear()
        self._texts_bytes = 0
        sizes = [_PAYLOAD_SIZES[size] for size in read_sizes] if self._chunked else read_sizes
        blanks = bytes(map(str.isspace, texts))
        stored_texts = list(texts) if self.keeps_texts else []
        stored_counts = array("l", counts if self._has_counts else ())
        return array("q", times), array("q", added_ns), array("l", sizes), blanks, stored_texts, stored_counts


def make_token_run(repetition: Repetition, *, chunked: bool, keeps_texts: bool) -> TokenRun:
    """Return an empty run for this repetition. `chunked`: each read is one HTTP chunk with its framing."""
    if native.compiled is None:
        return PythonTokenRun(repetition, chunked=chunked, keeps_texts=keeps_texts)
    run: TokenRun = native.compiled.TokenRun(repetition.fixed, chunked, keeps_texts)
    return run
