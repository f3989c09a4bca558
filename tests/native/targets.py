"""Fuzz targets: inputs made from a seed, and what must hold for each of them.

Every implementation is compared with an oracle that shares no code with it.
"""

import re
from array import array
from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol

from msgspec.structs import replace

from llmtap.errors import PeerProtocolError
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.anthropic import Anthropic
from llmtap.protocol.dialects.openai_chat import OpenAIChat
from llmtap.protocol.http1 import LINE_BYTES_MAX, ChunkedDecoder
from llmtap.protocol.repetition import (
    PythonTokenRun,
    Repetition,
    TokenRun,
    find_repetition,
    make_token_run,
)
from llmtap.protocol.sse import SseParser
from tests.native.cases import ChunkedBodies, TokenEvents, in_a_chunk
from tests.native.codings import Codings
from tests.native.messages import Heads, Requests, Responses
from tests.native.passages import Passages
from tests.native.tls_reuse import TlsReuse

FULL: Final = 10_000_000
"""Inputs of each target in a full run."""


class Target(Protocol):
    """Makes inputs and checks them."""

    def case(self) -> Any: ...

    def check(self, case: Any) -> None: ...


# ---------------------------------------------------------------- framing

_PLAIN_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,15}\r\n")
_HEX: Final = frozenset(b"0123456789abcdefABCDEF")
_TOKEN: Final = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_TRAILER_ENDS: Final = (b"\n", b"\r\n", b":\r\n", b"a:\r\n")
"""One of these completes each part of a valid line."""
Framed = tuple[str, bytes]


def _read_at_once(body: bytes) -> Framed:
    """The oracle: how a chunked body stands, and its payload; by the whole of it (RFC 9112 7.1)."""
    payload: list[bytes] = []
    at, trailers = 0, False
    while True:
        stop = body.find(b"\n", at) + 1
        if not stop:
            part = body[at:]
            if len(part) > LINE_BYTES_MAX or not _may_begin_a_line(part, trailers=trailers):
                return "refused", b""
            return "open", b"".join(payload)
        line, at = body[at:stop], stop
        if trailers:
            if line == b"\r\n":
                return "complete", b"".join(payload)
            if _TRAILER.fullmatch(line) is None:
                return "refused", b""
            continue
        size = _read_size_line(line)
        if size is None or len(line) > LINE_BYTES_MAX:
            return "refused", b""
        trailers = not size
        if size:
            payload.append(body[at : at + size])
            end = body[at + size : at + size + 2]
            if not b"\r\n".startswith(end):
                return "refused", b""
            at += size + 2
            if at >= len(body) and len(end) < 2:
                return "open", b"".join(payload)


def _may_begin_a_line(part: bytes, *, trailers: bool) -> bool:
    if trailers:
        lines = [part + end for end in _TRAILER_ENDS]
        return any(line == b"\r\n" or _TRAILER.fullmatch(line) for line in lines)
    return not part or _size_state(part) != "wrong"


def _read_size_line(line: bytes) -> int | None:
    if _PLAIN_SIZE.fullmatch(line) is None and _size_state(line) != "end":
        return None
    digits = 0
    while line[digits] in _HEX:
        digits += 1
    return int(line[:digits], 16)


def _size_state(line: bytes) -> str:
    """State behind a chunk-size line, or a part of one, by a walk over its bytes (RFC 9112 7.1.1)."""
    state, significant = "start", 0
    for c in line:
        blank = c in b" \t"
        if state in ("start", "digits") and c in _HEX:
            significant += bool(significant or c != 0x30)
            state = "digits" if significant <= 15 else "wrong"
        elif state in ("digits", "name", "value", "quoted") and c == 0x0D:
            state = "cr"
        elif state in ("digits", "before semicolon", "value", "quoted") and blank:
            state = "before semicolon"
        elif state in ("name", "behind name") and blank:
            state = "behind name"
        elif state in ("digits", "before semicolon", "name", "behind name", "value", "quoted") and c == 0x3B:
            state = "semicolon"
        elif state in ("semicolon", "equals") and blank:
            pass
        elif state in ("semicolon", "name") and c in _TOKEN:
            state = "name"
        elif state in ("name", "behind name") and c == 0x3D:
            state = "equals"
        elif state in ("equals", "value") and c in _TOKEN:
            state = "value"
        elif state == "equals" and c == 0x22:
            state = "text"
        elif state == "text" and c == 0x22:
            state = "quoted"
        elif state == "text" and c == 0x5C:
            state = "backslash"
        elif state in ("text", "backslash") and (blank or 0x20 < c < 0x7F or c >= 0x80):
            state = "text"
        elif state == "cr" and c == 0x0A:
            state = "end"
        else:
            return "wrong"
    return state


def _decode(reads: list[bytes]) -> Framed:
    """What the Python implementation makes of these reads."""
    decoder, payload = ChunkedDecoder(), []
    try:
        for read in reads:
            payload.append(decoder.feed(read))
            if decoder.done:
                return "complete", b"".join(payload)
    except PeerProtocolError:
        return "refused", b""
    return "open", b"".join(payload)


class Framing:
    """Chunk framing in any cuts: state and payload are those of the whole body."""

    implementations: tuple[Callable[[list[bytes]], Framed], ...] = (_decode,)

    def __init__(self, rng: Random) -> None:
        self._bodies = ChunkedBodies(rng)
        self.seen: dict[str, int] = {}
        """Inputs by state."""

    def case(self) -> list[bytes]:
        return self._bodies.case()

    def check(self, case: list[bytes]) -> None:
        expected = _read_at_once(b"".join(case))
        for implementation in self.implementations:
            found = implementation(case)
            assert found == expected, f"{found} instead of {expected}"
        self.seen[expected[0]] = self.seen.get(expected[0], 0) + 1


# ---------------------------------------------------------------- token events

_CHAT: Final = '{"id":%s,"object":"chat.completion.chunk","n":%s,"choices":[{"index":0,"delta":{"content":"'
_CHAT_TAIL: Final = b'"},"finish_reason":null}]}\n\n'
_PIECE: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"'
_IDS: Final = ('"a"', '"b"', '"\\u00e9"', '""', "7", "null", '"a\\"', '"a","id":"b"')
_NUMBERS: Final = ("1", "2", "10", "01", "-1", "1.5", '"1"')
_LOOSE: Final = tuple(b"data: " + (_CHAT % (i, n)).encode() for i in _IDS for n in _NUMBERS)
_USAGE: Final = '{"usage":{"prompt_tokens":7,"completion_tokens":%s,"total_tokens":%s},'
_COUNTS: Final = ("1", "2", "3", "30", "0", "01", "-1", "1.5", '"2"', "99999999", "100000000", "8,7")
_TOTALS: Final = ("8", "9", "10", "37", "7", "08", "100000006", "null")
_COUNTED: Final = tuple(
    f"data: {_USAGE % counts}{(_CHAT % (1, 1))[1:]}".encode()
    for counts in [("1", "8"), ("2", "9"), *((count, total) for count in _COUNTS for total in _TOTALS)]
)
_COUNTED_ROLE: Final = (
    f"data: {_USAGE % (0, 7)}"
    '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
).encode()
Event = tuple[int, bytes, bytes]


class Tokens:
    """Token events in any spelling: a text that is recognised by the bytes is the one that a reader finds."""

    implementations: tuple[Callable[..., TokenRun], ...] = (PythonTokenRun, make_token_run)

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._sources: list[tuple[TokenEvents, Repetition, OpenAIChat | Anthropic]] = []
        counting = OpenAIChat()
        _read(counting, _COUNTED_ROLE)
        for dialect, heads, tail, loose in (
            (OpenAIChat(), _LOOSE[:1], _CHAT_TAIL, 0),
            (OpenAIChat(), _LOOSE, _CHAT_TAIL, 2),
            (counting, _COUNTED, _CHAT_TAIL, 2),
            (Anthropic(), (_PIECE + b'text_delta","text":"',), b'"}}\n\n', 0),
            (Anthropic(), (_PIECE + b'thinking_delta","thinking":"',), b'"}}\r\n\r\n', 0),
        ):
            found = None
            # The first event with content is like no other; the second loose one differs in its id or counts.
            for head in (heads[0], heads[0], heads[(1 if heads is _COUNTED else 8) % len(heads)]):
                block = head + b"hi" + tail
                delta = _read(dialect, block)
                assert delta is not None
                if not delta.repeatable:
                    continue
                running = dialect.running_total if isinstance(dialect, OpenAIChat) else None
                found = find_repetition(block, delta, dialect.read_event, dialect.names_read, found, running)
            assert found is not None and len(found.ahead) + len(found.beyond) == loose
            self._sources.append((TokenEvents(rng, heads, tail), found, dialect))
        self.recognised = self.missed = 0

    def case(self) -> Event:
        """Number of the source, an event, and the event in a chunk."""
        number = self._rng.randrange(len(self._sources))
        block = self._sources[number][0].case()
        return number, block, in_a_chunk(self._rng, block)

    def check(self, case: Event) -> None:
        number, block, chunk = case
        _, known, dialect = self._sources[number]
        text = known.text_in(block)
        self._compare_runs(known, block, text, len(block))
        if text:
            self._compare(dialect, known, block, text)
        else:
            self.missed += 1
        text = known.text_in(chunk, chunked=True)
        self._compare_runs(known, chunk, text, len(block) if text else 0, chunked=True)
        if text:
            decoder = ChunkedDecoder()
            payload = decoder.feed(chunk)
            assert decoder.is_between_chunks, "the chunk is not whole"
            self._compare(dialect, known, payload, text)

    def _compare_runs(
        self, known: Repetition, read: bytes, text: str, size: int, *, chunked: bool = False
    ) -> None:
        """Both implementations of TokenRun take what the repetition recognises."""
        counts = array("l", (known.read(read, chunked)[1],) if known.offsets else ())
        expected = (
            array("q", (5,)),
            array("q", (7,)),
            array("l", (size,)),
            bytes((text.isspace(),)),
            [text],
            counts,
        )
        for make in self.implementations:
            run = make(known, chunked=chunked, keeps_texts=True)
            assert run.add(read, 5, 7) == bool(text), make
            if text:
                found = run.take()
                assert found == expected, f"{found} instead of {expected}"

    def _compare(self, dialect: OpenAIChat | Anthropic, known: Repetition, block: bytes, text: str) -> None:
        self.recognised += 1
        delta = _read(dialect, block)
        assert delta is not None, "more or less than one event"
        assert delta.text == text
        blank = delta.event_class is EventClass.CONTENT and text.isspace()
        assert delta.blank == blank
        # Whoever recognises a text looks at whether it is blank.
        same = replace(
            known.delta, text=text, size=delta.size, blank=blank, content=known.delta.content and not blank
        )
        if known.offsets:
            # The tokens of an event depend on the event before it.
            same.tokens, same.token_source = delta.tokens, delta.token_source
            assert delta.counts is not None
            count = delta.counts.output or 0
            same.usage, same.counts = known.usage_at(count), replace(delta.counts, output=count)
        assert delta == same, f"{delta} instead of {same}"


def _read(dialect: OpenAIChat | Anthropic, block: bytes) -> Delta | None:
    """The event in the block as its dialect reads it; None if the block is not exactly one event."""
    events = SseParser().feed(block)
    if len(events) != 1 or events[0].end != len(block):
        return None
    delta = dialect.read_event(events[0])
    delta.size = len(block)
    return delta


TARGETS: Final[dict[str, Callable[[Random], Target]]] = {
    "framing": Framing,
    "tokens": Tokens,
    "heads": Heads,
    "requests": Requests,
    "responses": Responses,
    "passages": Passages,
    "codings": Codings,
    "tls_reuse": TlsReuse,
}
