"""Hash the text of an answer, so that captures on both sides of a gateway can be compared without the text.

The text is cut into blocks of TEXT_BLOCK_CHARS characters. The hash of a block is a keyed BLAKE2b of the
block and of the hash before it: if the first n hashes of two texts are equal, so are their first n blocks.
Hashes of single tokens would be a substitution cipher, which an attacker could solve.
"""

from array import array
from hashlib import blake2b
from typing import Final

from llmtap.exchange.exchange import TEXT_BLOCK_CHARS

_HASH_BYTES: Final = 8
"""Length of a hash, which is stored in a signed 64-bit column."""


def text_block_hashes(text: str, key: bytes) -> "array[int]":
    """Return the chained hashes of the blocks of a text."""
    hashes = array("q")
    last = bytes(_HASH_BYTES)
    for start in range(0, len(text), TEXT_BLOCK_CHARS):
        block = text[start : start + TEXT_BLOCK_CHARS].encode("utf-8", "surrogatepass")
        last = blake2b(last + block, digest_size=_HASH_BYTES, key=key, person=b"llmtap answer").digest()
        hashes.append(int.from_bytes(last, "little", signed=True))
    return hashes
