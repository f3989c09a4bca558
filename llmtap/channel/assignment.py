"""Which arm a unit of randomisation belongs to: a pure function of a key, a name and the unit.

A keyed hash (BLAKE2b, RFC 7693) of the experiment's name and the unit gives 128 bits. The upper half, read
as a number in [0, 1), picks the arm by the cumulated weights; the lower half is the unit's public id, by
which its exchanges are told to belong together and from which neither the unit nor its arm can be guessed.
So the assignment is sticky over connections, relays and restarts as long as key, name and weights stay,
and whoever has the key can work it out again: `Assigner(key, name, weights).arm(unit)`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Final

__all__ = ["Assigner", "request_unit"]

_DIGEST_BYTES: Final = 16


class Assigner:
    """Assigns units to arms, by weight. Arms are known by their place.

    Args:
        key: the salt, any text; whoever knows it can predict arms.
        name: the experiment's; another one deals the same units anew.
        weights: one positive number an arm.
    """

    __slots__ = ("_bounds", "_seed")

    def __init__(self, key: str, name: str, weights: Sequence[float]) -> None:
        assert weights and min(weights) > 0
        # RFC 7693 2.1 takes keys of up to 64 bytes: the digest of the text is one.
        secret = blake2b(key.encode()).digest()
        self._seed = blake2b(name.encode() + b"\0", digest_size=_DIGEST_BYTES, key=secret)
        total = sum(weights)
        # Upper bounds on the scale of the digest's half; the last is the whole of it, whatever was rounded.
        self._bounds = [round(w / total * 2**64) for w in accumulate(weights)][:-1]

    def assign(self, unit: bytes) -> tuple[int, str]:
        """The arm's place, and the unit's public id (16 hex digits)."""
        digest = self._seed.copy()
        digest.update(unit)
        raw = digest.digest()
        return bisect_right(self._bounds, int.from_bytes(raw[:8])), raw[8:].hex()

    def arm(self, unit: bytes) -> int:
        """The arm's place alone: for whoever checks an assignment."""
        return self.assign(unit)[0]


def request_unit(relay: str, seq: int) -> bytes:
    """The unit of a single request: its relay's name and its number there, as in the exchange's `id`."""
    return f"{relay}-{seq}".encode()
