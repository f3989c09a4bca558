"""The event that comes again and again: a token stream repeats all of an event but the text in it.

Once an event is understood, the bytes before and behind its text are known. Where another event has the same
bytes, and between them one JSON string, it says the same with that string for a text, and nothing else of it
has to be read: not its lines, not its JSON.

Why that is right: to put one string in the place of another as the value of a member changes that value, and
nothing else in the event. That this value is the text, and not one that happens to be alike, is tried out
with a text of our own. That a reader remembers nothing of a text is for its dialect to say
(`Delta.repeatable`).
"""

import json
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from llmtap.wire.delta import Delta
from llmtap.wire.sse import SseEvent, SseParser

__all__ = ["BLOCK_BYTES_MAX", "Repetition", "find_repetition"]

BLOCK_BYTES_MAX: Final = 4_096
"""Of an event that is known again: far beyond a token, and some of them may be kept for a moment."""
_MEMBERS: Final = tuple(
    f'"{name}":{space}'.encode()
    for name in (
        "content", "reasoning_content", "reasoning", "arguments", "text", "thinking", "partial_json",
    )
    for space in ("", " ")
)  # fmt: skip
"""What may stand before a text. A value in such a place is a text or nothing that is read."""
_SIZE_LINES: Final = {
    len(line) + size + 2: line for size in range(1, BLOCK_BYTES_MAX + 1) for line in [b"%x\r\n" % size]
}
"""First line of a chunk, as nearly everyone writes it (RFC 9112 7.1), by the bytes of the whole of it."""
_PAYLOADS: Final = {size: size - len(line) - 2 for size, line in _SIZE_LINES.items()}
"""Bytes of payload of these chunks."""
_ENCODERS: Final[tuple[Callable[[str], bytes], ...]] = (
    msgspec.json.encode,
    lambda text: json.dumps(text).encode(),
)
"""The two ways in which servers write a text: in UTF-8, and in ASCII with escapes."""
_PROBE: Final = "a text of our own"
_decode_text: Final = msgspec.json.Decoder(str).decode
_replace: Final = msgspec.structs.replace


class Repetition(msgspec.Struct, gc=False):
    """What is the same in each of these events."""

    before: bytes
    """All up to the quote that opens the text, and that too."""
    behind: bytes
    """All from the quote that closes it."""
    delta: Delta
    """What the first of them said, without its text."""
    chunk_end: bytes
    """`behind`, and the end of a chunk."""

    def text_in(self, block: bytes) -> str:
        """The text of a block that is one of these events; "" if it is none, or may be none."""
        before, behind = self.before, self.behind
        if not (block.startswith(before) and block.endswith(behind)) or len(block) > BLOCK_BYTES_MAX:
            return ""
        try:
            # With its quotes: what is more than one string, or less, is refused.
            return _decode_text(block[len(before) - 1 : 1 - len(behind)])
        except ValueError:
            return ""

    def text_in_chunk(self, chunk: bytes) -> str:
        """The same where such a block is the one chunk of a read, and its framing around it."""
        before, behind = self.before, self.chunk_end
        line = _SIZE_LINES.get(len(chunk))
        if line is None or not (
            chunk.startswith(line) and chunk.startswith(before, len(line)) and chunk.endswith(behind)
        ):
            return ""
        try:
            return _decode_text(chunk[len(line) + len(before) - 1 : 1 - len(behind)])
        except ValueError:
            return ""

    def sizes_in_chunks(self, sizes: Sequence[int]) -> list[int]:
        """Bytes of the blocks in chunks of these sizes, in which texts were found."""
        return [_PAYLOADS[size] for size in sizes]


def find_repetition(block: bytes, delta: Delta, read_event: Callable[[SseEvent], Delta]) -> Repetition | None:
    """What may come again of this block of an event stream, of which `read_event` has just made `delta`.

    None where the text does not stand in it once, and in a place that we know.
    """
    for encode in _ENCODERS:
        quoted = encode(delta.text)
        before, text, behind = block.partition(quoted)
        if text and quoted not in behind and before.endswith(_MEMBERS):
            behind = b'"' + behind
            found = Repetition(before + b'"', behind, _replace(delta, text=""), behind + b"\r\n")
            return found if _is_read(found, read_event) else None
    return None


def _is_read(found: Repetition, read_event: Callable[[SseEvent], Delta]) -> bool:
    """Whether another text in its place is read as the text, and all else stays as it was."""
    events = SseParser().feed(found.before + _PROBE.encode() + found.behind)
    if len(events) != 1:
        return False
    delta = read_event(events[0])
    delta.size = found.delta.size
    return delta == _replace(found.delta, text=_PROBE)
