"""Hash the blocks of a prompt, so that captures show what prompts share without storing text.

The meter's recorder passes parsed prompts to `BlockHasher`; the ids become a column of the capture. `chain`,
the digests of a conversation up to each message, serves `sessions.py`. The id of a block is a keyed BLAKE2b
of the block and of the id before it: two prompts have the same first n ids exactly when their first n blocks
agree in text, roles, pictures and tools. Roles and other marks (`exchange/prompt.py`) are hashed with the
block that begins at or after them. With tokens as unit, each message is tokenised alone, so that a longer
conversation keeps the ids of its beginning.

Source: Mooncake's trace (a hash id stands for a block and all before it); RFC 7693.
"""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

from llmtap.exchange.prompt import ID_BYTES, PromptMessage, PromptShape

CHAIN_BYTES: Final = 16
"""Of a conversation's digest: among 10^9 conversations two agree by chance with probability 10^-21."""
_ID_BYTES: Final = 8
"""A block's id is a signed 64-bit column. Among 10^8 blocks two agree by chance with probability 3 in
10,000."""
_TOKENISE_CHARS_MAX: Final = 1 << 20
"""A text beyond this takes a tokenizer a second or more, and fits no context."""

Tokenize = Callable[[str], Sequence[int]]


class Blocks(NamedTuple):
    """Blocks of one prompt."""

    ids: "array[int]"
    tokens: int | None
    """Tokens of the prompt; None by bytes."""


class BlockHasher:
    """Cuts prompts into blocks of `size` in `unit` (`tokens` need `tokenize`), and hashes them."""

    __slots__ = ("_salt", "_size", "_tokenize", "size", "skipped", "unit")

    def __init__(
        self, salt: bytes, *, size: int, unit: Literal["bytes", "tokens"], tokenize: Tokenize | None = None
    ) -> None:
        assert tokenize is not None or unit == "bytes", "tokens come from a tokenizer"
        self.size = size
        self.unit = unit
        self.skipped = 0
        """Prompts without blocks, because a text was too long for the tokenizer or it failed."""
        self._salt = salt
        self._tokenize = tokenize if unit == "tokens" else None
        self._size = size * (1 if unit == "bytes" else ID_BYTES)

    def blocks(self, prompt: PromptShape) -> Blocks | None:
        """Return the blocks of a prompt; None, and count it, if the tokenizer fails."""
        try:
            content, marks = self._laid_out(prompt)
        except Exception:  # of the tokenizer, which is not ours and may raise anything
            self.skipped += 1
            return None
        tokens = None if self._tokenize is None else len(content) // ID_BYTES
        return Blocks(self._hashed(content, marks), tokens)

    def _laid_out(self, prompt: PromptShape) -> tuple[bytearray, list[tuple[int, bytes]]]:
        """Return all text as bytes, and the marks with their places in it."""
        content = bytearray()
        marks = [(0, b"tools" + prompt.tools)] if prompt.tools else []
        for message in prompt.messages:
            marks.append((len(content), b"role" + message.role.encode()))
            if message.thinking:
                marks.append((len(content), b"thinking"))
                content += self._row(message.thinking)
                marks.append((len(content), b"said"))
            for part in message.parts:
                if isinstance(part, str):
                    content += self._row(part)
                elif isinstance(part, bytes):
                    marks.append((len(content), part))
                else:
                    if self._tokenize is None:  # or ids that spell a text would be this text
                        marks.append((len(content), b"ids"))
                    content += part.tobytes()
        return content, marks

    def _row(self, text: str) -> bytes:
        if self._tokenize is None:
            return text.encode()
        if len(text) > _TOKENISE_CHARS_MAX:
            raise ValueError("too long for a tokenizer")
        return array("I", self._tokenize(text)).tobytes()

    def _hashed(self, content: bytearray, marks: list[tuple[int, bytes]]) -> "array[int]":
        ids = array("q")
        size, salt = self._size, self._salt
        last = bytes(_ID_BYTES)
        waiting = iter(marks)
        mark = next(waiting, None)
        for start in range(0, len(content), size):
            block = content[start : start + size]
            # Each with its length before it: whatever a text holds, it cannot pass for a mark.
            pieces: list[bytes | bytearray] = [last, len(block).to_bytes(4), block]
            while mark is not None and mark[0] < start + size:
                pieces += ((mark[0] - start).to_bytes(4), len(mark[1]).to_bytes(4), mark[1])
                mark = next(waiting, None)
            last = blake2b(b"".join(pieces), digest_size=_ID_BYTES, key=salt, person=b"llmtap block").digest()
            ids.append(int.from_bytes(last, "little", signed=True))
        return ids


def chain(prompt: PromptShape, salt: bytes) -> list[bytes]:
    """Return the digests of the conversation up to each message, without thinking: clients drop it later."""
    state = blake2b(digest_size=CHAIN_BYTES, key=salt, person=b"llmtap chain")
    digests = []
    for message in prompt.messages:
        if message.parts or not message.thinking:
            state.update(_spelled(message))
        digests.append(state.copy().digest())
    return digests


def _spelled(message: PromptMessage) -> bytes:
    """Return a message as bytes that no other message has."""
    role = message.role.encode()
    pieces = [len(role).to_bytes(4), role, len(message.parts).to_bytes(4)]
    for part in message.parts:
        if isinstance(part, str):
            kind, data = b"t", part.encode()
        elif isinstance(part, bytes):
            kind, data = b"m", part
        else:
            kind, data = b"i", part.tobytes()
        pieces += (kind, len(data).to_bytes(8), data)
    return b"".join(pieces)
