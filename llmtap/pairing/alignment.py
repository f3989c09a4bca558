"""Compare the text of an answer on both sides of a gateway, and align it in time.

`compare_text` uses the lengths and chained hashes that a capture with `capture.pair_key` stores. `align`
finds the event that delivered each token: by characters, as far as the texts are equal. Without hashes, it
uses token counts, if both sides have the same total and the count of each event is known.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from llmtap.exchange.exchange import TEXT_BLOCK_CHARS, Exchange
from llmtap.metrics.latency import SPREAD_NS, output_times_ns, tokens_per_chunk

Times = NDArray[np.int64]
"""Times or durations in ns."""


class TextRelation(StrEnum):
    """Result of a comparison of the text at the front with the text at the back."""

    EQUAL = "equal"
    CUT = "cut"
    """The text at the front ends earlier. Its last characters, which do not fill a block, are not
    compared."""
    EXTENDED = "extended"
    """The text at the front is longer. The last characters of the back, which do not fill a block, are not
    compared."""
    CHANGED = "changed"
    """The texts differ before the end of the shorter one."""
    UNKNOWN = "unknown"
    """There is no text, a side has no hashes of its whole text, or the shorter text does not fill a block."""


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Result of a comparison by lengths and hashes, in characters."""

    relation: TextRelation
    front_chars: int
    back_chars: int
    common_chars: int
    """Length of the equal beginning, in whole blocks. The first difference is less than one block later."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Times at which tokens that both sides received were complete at the back and at the front."""

    basis: str
    """Reason for the alignment. `text`: hashes of the characters are equal. `tokens`: token counts are
    equal."""
    back_ns: Times
    """Time at which each token was complete at the back."""
    front_ns: Times
    weights: NDArray[np.int64]
    """Number of tokens at each time, because one event can have several tokens."""

    def delays_ns(self, offset_ns: int) -> Times:
        """Return the delay of each token from the back to the front, in ns. `offset_ns`: clock of the back
        minus clock of the front."""
        return np.repeat(self.front_ns - self.back_ns + offset_ns, self.weights)


def common_blocks(front: Exchange, back: Exchange) -> int:
    """Return the number of blocks at the beginning of both texts whose hashes are equal."""
    n = 0
    for a, b in zip(front.text_blocks or (), back.text_blocks or (), strict=False):
        if a != b:
            break
        n += 1
    return n


def compare_text(front: Exchange, back: Exchange) -> TextComparison:
    """Compare the texts of two answers by their lengths and hashes."""
    front_chars, back_chars = sum(front.timeline.events.chars), sum(back.timeline.events.chars)
    hashed = _is_hashed(front, front_chars) and _is_hashed(back, back_chars)
    if not hashed or not (front_chars or back_chars):
        return TextComparison(TextRelation.UNKNOWN, front_chars, back_chars, 0)
    blocks = common_blocks(front, back)
    common_chars = min(blocks * TEXT_BLOCK_CHARS, front_chars, back_chars)
    whole = blocks == len(front.text_blocks or ()) == len(back.text_blocks or ())
    if whole and front_chars == back_chars:
        relation = TextRelation.EQUAL
    elif front_chars != back_chars and min(front_chars, back_chars) < TEXT_BLOCK_CHARS:
        relation = TextRelation.UNKNOWN
    elif front_chars < back_chars and blocks == front_chars // TEXT_BLOCK_CHARS:
        relation = TextRelation.CUT
    elif front_chars > back_chars and blocks == back_chars // TEXT_BLOCK_CHARS:
        relation = TextRelation.EXTENDED
    else:
        relation = TextRelation.CHANGED
    return TextComparison(relation, front_chars, back_chars, common_chars)


def _is_hashed(x: Exchange, chars: int) -> bool:
    """Return whether there are hashes of the whole text."""
    return x.text_blocks is not None and len(x.text_blocks) == -(-chars // TEXT_BLOCK_CHARS)


def text_events(x: Exchange) -> tuple[Times, NDArray[np.int64], NDArray[np.int64]]:
    """Return three arrays with a value for each event with text: its time in ns, the number of characters up
    to its end, and its number of tokens. An event that does not declare its tokens counts as one token."""
    log = x.timeline.events
    chars = np.array(log.chars, np.int64)
    indexes = np.flatnonzero(chars)
    tokens = np.maximum(np.array(log.tokens, np.int64)[indexes], 1)
    return np.array(log.t_ns, np.int64)[indexes], np.cumsum(chars[indexes]), tokens


def align(front: Exchange, back: Exchange, text: TextComparison) -> Alignment | None:
    """Return the alignment of an answer; None if nothing shows which event delivered which token."""
    if text.relation is not TextRelation.UNKNOWN:
        return _align_text(front, back, text.common_chars)
    texts_differ = front.text_blocks and back.text_blocks
    return None if texts_differ else _align_tokens(front, back)


def _align_text(front: Exchange, back: Exchange, common_chars: int) -> Alignment | None:
    back_ns, back_ends, tokens = text_events(back)
    front_ns, front_ends, _ = text_events(front)
    n = int(np.searchsorted(back_ends, common_chars, "right"))
    if not n:
        return None
    delivered = np.searchsorted(front_ends, back_ends[:n], "left")
    return Alignment("text", back_ns[:n], front_ns[delivered], tokens[:n])


def _align_tokens(front: Exchange, back: Exchange) -> Alignment | None:
    front_tokens, back_tokens = tokens_per_chunk(front), tokens_per_chunk(back)
    if not front_tokens or not back_tokens or sum(front_tokens) != sum(back_tokens):
        return None
    front_ends, back_ends = np.cumsum(front_tokens), np.cumsum(back_tokens)
    front_ns, back_ns = (np.array(output_times_ns(x.timeline.events), np.int64) for x in (front, back))
    delivered = [bisect_left(front_ends, end) for end in back_ends]
    return Alignment("tokens", back_ns, front_ns[delivered], np.array(back_tokens, np.int64))


def first_block_length(alignment: Alignment, offset_ns: int, error_ns: int) -> int:
    """Return the length of the first block: number of times in `alignment` whose tokens arrived together.

    The tokens of a block reach the front in one event, or in events at most `SPREAD_NS` apart, and the
    gateway had all of them when the first event reached the front. `offset_ns`: clock of the back minus clock
    of the front. `error_ns`: largest error of a difference between a time of the back and a time of the
    front.
    """
    front_ns, back_ns = alignment.front_ns, alignment.back_ns[1:] - offset_ns
    gaps_ns = np.diff(front_ns)
    together = (gaps_ns == 0) | ((gaps_ns <= SPREAD_NS) & (back_ns <= front_ns[0] + error_ns))
    return 1 + int(np.argmin(np.append(together, False)))


def held_tokens_max(alignment: Alignment, shift_ns: int) -> int:
    """Return the largest number of tokens that the gateway had received but not yet delivered.

    The tokens are counted when an event reaches the front, with the tokens of this event: a gateway that
    holds nothing back has 1. `shift_ns` is added to the times of the back.
    """
    arrivals_ns, order = np.unique(alignment.front_ns, return_index=True)
    ends = np.cumsum(alignment.weights)
    # searchsorted() needs ascending times, but the correction of a clock can make a time smaller.
    produced_ns = np.maximum.accumulate(alignment.back_ns) + shift_ns
    counts = np.concatenate(([0], ends))
    produced = counts[np.searchsorted(produced_ns, arrivals_ns, "right")]
    delivered = counts[order]
    return int(np.max(produced - delivered, initial=0))
