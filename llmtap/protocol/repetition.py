"""Recognise events that differ from the previous event only in their text, so that they need no parsing.

`exchange/answer.py` looks for such an event (`RepetitionFinder`); `exchange/observer.py` then offers each
read to a `TokenRun`, which collects the events and returns them as columns, to be logged together. It has a
compiled and a Python implementation.

If two events have the same bytes before and after one JSON string, their meaning differs only in that string.
A probe, which is the event with another text, verifies that the string is the text of the event; the dialect
states that its reader stores nothing of a text (`Delta.repeatable`). Up to LOOSE_MAX values at the top of the
object that no reader reads (id, date, padding) may differ too; each is checked to be one string or one whole
number.
"""

import json
from array import array
from collections.abc import Callable
from sys import getsizeof
from typing import Final, Protocol

import msgspec

from llmtap import native
from llmtap.protocol.delta import Delta
from llmtap.protocol.sse import SseEvent, SseParser

BLOCK_BYTES_MAX: Final = 4_096
"""Maximum size of a recognised event. An event with one token is much smaller; the limit bounds the memory of
the events that are held."""
_BEFORE_VALUE: Final = (b'":', b'": ')
"""Bytes that precede the value of a member. The probe shows whether that value is the text."""
LOOSE_MAX: Final = 3
"""Maximum number of loose values of an event. Each one is checked in every event; no known server sends
more."""
_SIZE_LINES: Final = {
    len(line) + size + 2: line for size in range(1, BLOCK_BYTES_MAX + 1) for line in [b"%x\r\n" % size]
}
"""First line of a chunk in its usual form (RFC 9112 7.1), by the size of the whole chunk."""
_PAYLOAD_SIZES: Final = {size: size - len(line) - 2 for size, line in _SIZE_LINES.items()}
_EVENTS_WORTH_SEARCH: Final = 16
"""The last search was worth its time only if at least so many events came after it. A search takes as much
time as its result saves in about five events."""
_VAIN_SEARCHES_MAX: Final = 8
_ENCODERS: Final[tuple[Callable[[str], bytes], ...]] = (
    msgspec.json.encode,
    lambda text: json.dumps(text).encode(),
)
"""The two ways in which servers write a text: in UTF-8, and in ASCII with escapes."""
_PROBE: Final = "a text of our own"
_decode_text: Final = msgspec.json.Decoder(str).decode
_decode_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_replace: Final = msgspec.structs.replace
_Loose = tuple[tuple[bytes, bool], ...]
Fixed = tuple[bytes, _Loose, _Loose, bytes]
"""Parts of a `Repetition`: `opening`, `ahead`, `beyond`, `closing`."""


class Repetition(msgspec.Struct, gc=False):
    """Part that all repetitions of an event share: everything but the text and the loose values.

    A loose value is a member that no reader reads, such as an id, and that may differ from event to event.
    """

    opening: bytes
    """All bytes before the first value (a loose value or the text). The quotes of a value belong to the bytes
    around it."""
    closing: bytes
    delta: Delta
    chunk_end: bytes
    ahead: _Loose = ()
    """For each loose value before the text: the bytes that follow it, and whether it is a string."""
    beyond: _Loose = ()
    """For each loose value after the text, from the last to the first: the bytes before it, and whether it is
    a string."""
    names: frozenset[str] = frozenset()
    sample: bytes = b""
    """The event in which the loose values were found, without its text; empty without loose values."""

    @property
    def fixed(self) -> Fixed:
        return self.opening, self.ahead, self.beyond, self.closing

    def text_in(self, data: bytes, chunked: bool = False) -> str:
        """Return the text of a block that is such an event; "" if it is not, or may not be. `chunked`: `data`
        is the HTTP chunk that holds the block."""
        size, start, closing = len(data), 0, self.closing
        if chunked:
            line = _SIZE_LINES.get(size)
            if line is None or not data.startswith(line):
                return ""
            start, closing = len(line), self.chunk_end
        elif size > BLOCK_BYTES_MAX:
            return ""
        opening = self.opening
        if not (data.startswith(opening, start) and data.endswith(closing)):
            return ""
        start += len(opening)
        end = size - len(closing)
        try:
            if self.names:
                start, end = self._text_span(data, start, end)
            # Decode the text with its quotes, so that anything but exactly one string is refused.
            return _decode_text(data[start - 1 : end + 1])
        except ValueError:
            return ""

    def _text_span(self, data: bytes, start: int, end: int) -> tuple[int, int]:
        """Return start and end of the text, after a check of each loose value. Raises ValueError. If a value
        contains the bytes of a fixed part, a check fails: the event is then parsed as usual, and a wrong text
        is never returned."""
        for fixed, is_string in self.ahead:
            stop = data.index(fixed, start, end)
            _check_value(data, start, stop, is_string)
            start = stop + len(fixed)
        for fixed, is_string in self.beyond:
            stop = data.rindex(fixed, start, end)
            _check_value(data, stop + len(fixed), end, is_string)
            end = stop
        return start, end


def _check_value(data: bytes, start: int, end: int, is_string: bool) -> None:
    """Raise ValueError unless these bytes are one string, without its quotes, or one whole number."""
    if is_string:
        _decode_text(data[start - 1 : end + 1])
    elif not ((number := data[start:end]).isdigit() and (number >= b"1" or number == b"0")):
        raise ValueError


def find_repetition(
    block: bytes,
    delta: Delta,
    read_event: Callable[[SseEvent], Delta],
    names_read: frozenset[str] | None = None,
    last: Repetition | None = None,
) -> Repetition | None:
    """Return the repetition of this block, which `read_event` read as `delta`; None if the text does not
    stand exactly once, as the value of a member. `names_read`: members read at the top of the object; `last`:
    the previous repetition, which shows which values are loose."""
    for encode in _ENCODERS:
        quoted = encode(delta.text)
        before, text, behind = block.partition(quoted)
        if text and quoted not in behind and before.endswith(_BEFORE_VALUE):
            behind = b'"' + behind
            candidate = Repetition(before + b'"', behind, _replace(delta, text=""), behind + b"\r\n")
            if not _is_alike(candidate.opening + _PROBE.encode() + candidate.closing, candidate, read_event):
                return None
            if names_read is None or last is None:
                return candidate
            return _with_loose_values(candidate, last, names_read, read_event) or candidate
    return None


def _is_alike(probe: bytes, candidate: Repetition, read_event: Callable[[SseEvent], Delta]) -> bool:
    """Return whether the reader gives for the probe the same Delta as for the block, with the probe's
    text."""
    events = SseParser().feed(probe)
    if len(events) != 1:
        return False
    delta = read_event(events[0])
    delta.size = candidate.delta.size
    return delta == _replace(candidate.delta, text=_PROBE)


def _member_spans(block: bytes) -> dict[str, bytes]:
    """Return the members of the object in a block, each value as its bytes; none if there is no object."""
    events = SseParser().feed(block)
    if len(events) != 1 or events[0].data is None:
        return {}
    try:
        return {name: bytes(value) for name, value in _decode_members(events[0].data).items()}
    except ValueError:
        return {}


def _with_loose_values(
    candidate: Repetition,
    last: Repetition,
    names_read: frozenset[str],
    read_event: Callable[[SseEvent], Delta],
) -> Repetition | None:
    """Return the candidate with loose values: those in which it differs from the last repetition. None if
    there are none or too many, or if one of them cannot be replaced."""
    sample, edge = candidate.opening + candidate.closing, len(candidate.opening)
    was, now = _member_spans(last.sample or last.opening + last.closing), _member_spans(sample)
    loose = {
        name: value
        for name, value in now.items()
        if name not in names_read
        and (name in last.names or was.get(name, value) != value)
        and (value.startswith(b'"') or value.isdigit())
    }
    if not 0 < len(loose) <= LOOSE_MAX:
        return None
    places = [_value_place(sample, name, value) for name, value in loose.items()]
    text = edge, edge, True
    if any(start <= edge <= end for start, end, _ in places):
        return None  # A value was not found, or is the text itself.
    values = sorted([*places, text])
    # Test the places: insert one extra byte at the start of each value. The members must change exactly as
    # expected, and the event must be read as before; else a place is wrong, or a reader uses the value.
    more = [b"x" if is_string else b"1" for _, _, is_string in values]
    more[values.index(text)] = b""
    changed = {
        name: b'"x' + value[1:] if value.startswith(b'"') else b"1" + value for name, value in loose.items()
    }
    if _member_spans(_insert_bytes(sample, values, more)) != now | changed:
        return None
    more[values.index(text)] = _PROBE.encode()
    if not _is_alike(_insert_bytes(sample, values, more), candidate, read_event):
        return None
    ends, starts = [0, *(end for _, end, _ in values)], [*(start for start, _, _ in values), len(sample)]
    opening, *fixed, closing = (sample[a:b] for a, b in zip(ends, starts, strict=True))
    n = values.index(text)
    kinds = [is_string for _, _, is_string in values]
    return Repetition(
        opening,
        closing,
        candidate.delta,
        closing + b"\r\n",
        ahead=tuple(zip(fixed[:n], kinds[:n], strict=True)),
        beyond=tuple(zip(fixed[n:], kinds[n + 1 :], strict=True))[::-1],
        names=frozenset(loose),
        sample=sample,
    )


def _value_place(sample: bytes, name: str, value: bytes) -> tuple[int, int, bool]:
    """Return where a member's value starts and ends, without its quotes, and whether it is a string; all of
    the sample if the value does not stand in exactly one place."""
    is_string = value.startswith(b'"')
    spelt = [msgspec.json.encode(name) + colon + value for colon in (b":", b": ")]
    if sum(map(sample.count, spelt)) != 1:
        return 0, len(sample), is_string
    end = max(sample.find(one) + len(one) for one in spelt if one in sample)
    return end - len(value) + is_string, end - is_string, is_string


def _insert_bytes(sample: bytes, values: list[tuple[int, int, bool]], more: list[bytes]) -> bytes:
    """Return the sample with the bytes of `more` inserted where these values start."""
    starts = [start for start, _, _ in values]
    parts = [sample[a:b] for a, b in zip([0, *starts], [*starts, len(sample)], strict=True)]
    return parts[0] + b"".join(new + part for new, part in zip(more, parts[1:], strict=True))


class Reader(Protocol):
    @property
    def names_read(self) -> frozenset[str] | None: ...

    def read_event(self, event: SseEvent) -> Delta: ...


class RepetitionFinder:
    """Finds the repeated event of one stream. It stops searching if the events that it finds do not come
    again."""

    __slots__ = ("_previous", "_search_offset", "_vain_searches_left", "repetition")

    def __init__(self) -> None:
        self.repetition: Repetition | None = None
        """The event that may come again; None after an event of another kind."""
        self._previous: Repetition | None = None
        """The previous repetition, possibly outdated; it shows which values are loose."""
        self._search_offset = 0
        """Offset in the body of the last search."""
        self._vain_searches_left = _VAIN_SEARCHES_MAX

    def search(self, block: bytes, delta: Delta, offset: int, reader: Reader) -> None:
        """Look for the event that may come again in `block`, which held one event of a repeatable kind.
        `offset`: where the block ends in the body."""
        if not self._vain_searches_left or len(block) > BLOCK_BYTES_MAX or not delta.text or delta.blank:
            return
        if offset - self._search_offset < _EVENTS_WORTH_SEARCH * len(block):
            self._vain_searches_left -= 1
        self._search_offset = offset
        repetition = find_repetition(block, delta, reader.read_event, reader.names_read, self._previous)
        self.repetition = repetition
        self._previous = repetition or self._previous


ROOM: Final = 64
"""Maximum number of events in a run of the Python implementation: enough to make logging them cheap."""
TEXTS_BYTES_MAX: Final = 6 << 10
"""Memory of kept texts at which a run is full. 64 tokens take half of it."""
RUN_BYTES: Final = 16 << 10
"""Memory of a run that is not full: 25 bytes for each of 256 events (in Python 150 for each of 64), and the
texts."""
RUN_BLOCKS: Final = 6
"""Copies of the repeated block in memory: three members of the repetition, and of the previous one, hold its
opening and closing."""

RunColumns = tuple["array[int]", "array[int]", "array[int]", bytes, list[str]]
"""Columns, with for each event: `t_ns` and `added_ns` of its read, bytes of its block, 1 if its text is only
white space; and its text, if texts are kept."""


class TokenRun(Protocol):
    """Events that are held to be logged together: as soon as the run is `full`, or as another kind of event
    comes."""

    keeps_texts: bool
    """Whether the texts of the events are kept. Change it only while the run is empty."""

    def __len__(self) -> int: ...

    @property
    def full(self) -> bool: ...

    def add(self, data: bytes, t_ns: int, added_ns: int) -> bool:
        """Add a read to the run if it is exactly one such event with a non-empty text. Return whether it was
        added."""

    def take(self) -> RunColumns:
        """Return the columns of the events, at least one, and forget them."""


class PythonTokenRun:
    __slots__ = ("_chunked", "_events", "_text_in", "_texts_bytes", "keeps_texts")

    def __init__(self, repetition: Repetition, *, chunked: bool, keeps_texts: bool) -> None:
        self._chunked = chunked
        self._text_in = repetition.text_in
        self._events: list[tuple[int, int, int, str]] = []
        self._texts_bytes = 0
        self.keeps_texts = keeps_texts

    def __len__(self) -> int:
        return len(self._events)

    @property
    def full(self) -> bool:
        return len(self._events) >= ROOM or self._texts_bytes >= TEXTS_BYTES_MAX

    def add(self, data: bytes, t_ns: int, added_ns: int) -> bool:
        text = self._text_in(data, self._chunked)
        if not text:
            return False
        if self.keeps_texts:
            self._texts_bytes += getsizeof(text)
        else:
            text = " " if text.isspace() else "x"
        self._events.append((t_ns, added_ns, len(data), text))
        return True

    def take(self) -> RunColumns:
        times, added_ns, read_sizes, texts = zip(*self._events, strict=True)
        self._events.clear()
        self._texts_bytes = 0
        sizes = [_PAYLOAD_SIZES[size] for size in read_sizes] if self._chunked else read_sizes
        blanks = bytes(map(str.isspace, texts))
        stored_texts = list(texts) if self.keeps_texts else []
        return array("q", times), array("q", added_ns), array("l", sizes), blanks, stored_texts


def make_token_run(repetition: Repetition, *, chunked: bool, keeps_texts: bool) -> TokenRun:
    """Return an empty run of these events. `chunked`: each read is one HTTP chunk, framing included."""
    if native.compiled is None:
        return PythonTokenRun(repetition, chunked=chunked, keeps_texts=keeps_texts)
    run: TokenRun = native.compiled.TokenRun(repetition.fixed, chunked, keeps_texts)
    return run
