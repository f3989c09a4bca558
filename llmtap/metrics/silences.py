"""Silences of streams: times without a token, and how many streams went on after them.

`silences_of` returns the silences of a finished exchange, `SilenceCounts` counts those of many (the estimates
are in `survival.py`), and `client_timeout` suggests after which silence a client may give up. The meter and
the reports of captures use them. DEFINITIONS.md defines a silence.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured
from llmtap.metrics.survival import EndedShare, SurvivalCounts, ended_share, first_share_below, survival_curve
from llmtap.units import NS_PER_S

_DECADE: Final = (
    10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 40, 45, 50, 55, 60, 66, 73, 80, 90,
)  # fmt: skip
"""Edges of the cells within a factor of 10, in steps of at most 12.5 %; round durations are edges."""
SILENCE_NS_MIN: Final = 100_000_000
"""Shortest silence: ordinary gaps between tokens are shorter."""
SILENCE_NS_MAX: Final = 600 * NS_PER_S
"""Lower edge of the last cell, for all longer silences."""
EDGES_NS: Final = tuple(
    edge
    for edge in (step * scale * NS_PER_S // 100 for scale in (1, 10, 100, 1_000) for step in _DECADE)
    if edge <= SILENCE_NS_MAX
)
SHOWN_S: Final = (1, 2, 5, 10, 30, 60, 120, 300)
"""Silences in seconds that reports show; each is an edge."""
TIMEOUT_SHARE: Final = 0.01
"""A client may give up after a silence if fewer than this share of the streams go on after such a silence."""
TIMEOUT_SILENCES_MIN: Final = 100
"""Minimum number of silences from which `client_timeout` suggests a length: with fewer, a share of 1 % is
less than one stream."""
TIMEOUT_FOLLOW_UP: Final = 2
"""Streams must have been observed for this many times the suggested silence, or it would not be known whether
they go on."""


class SilenceKind(StrEnum):
    """The token for which a silent stream waits."""

    FIRST_TOKEN = "first_token"
    NEXT_TOKEN = "next_token"


class Silence(NamedTuple):
    kind: SilenceKind
    duration_ns: int
    resumed: bool
    """Whether a token ended the silence; else it is censored by the end of the stream."""


def silences_of(x: Exchange, m: Measured) -> Iterator[Silence]:
    """Yield the silences of a finished stream that last SILENCE_NS_MIN or longer, none if its answer was not
    understood.
    """
    t = x.timeline
    if not x.stream or x.not_understood:
        return
    end_ns = t.delivered_ns if t.response_end_ns is None else t.response_end_ns
    wait_ns, has_token = m.ttft_any_ns, t.first_token_ns is not None
    if not has_token and t.submit_ns is not None and end_ns is not None:
        wait_ns = end_ns - t.submit_ns
    if wait_ns is not None and wait_ns >= SILENCE_NS_MIN:
        yield Silence(SilenceKind.FIRST_TOKEN, wait_ns, has_token)
    if m.tbc_max_ns is not None and m.tbc_max_ns >= SILENCE_NS_MIN:
        for gap_ns in m.tbc_ns:
            if gap_ns >= SILENCE_NS_MIN:
                yield Silence(SilenceKind.NEXT_TOKEN, gap_ns, True)
    if t.last_token_ns is not None and end_ns is not None and end_ns - t.last_token_ns >= SILENCE_NS_MIN:
        yield Silence(SilenceKind.NEXT_TOKEN, end_ns - t.last_token_ns, False)


class SilenceCounts:
    """Silences of many streams, by kind."""

    __slots__ = ("kinds", "streams")

    def __init__(self) -> None:
        self.kinds = {kind: SurvivalCounts(EDGES_NS) for kind in SilenceKind}
        self.streams = 0

    def add(self, x: Exchange, m: Measured) -> None:
        """Count the silences of a finished exchange."""
        if x.stream and not x.not_understood:
            self.streams += 1
            for kind, duration_ns, resumed in silences_of(x, m):
                self.kinds[kind].add(duration_ns, ended=resumed)

    def copy(self) -> "SilenceCounts":
        copied = SilenceCounts()
        copied.kinds = {kind: counts.copy() for kind, counts in self.kinds.items()}
        copied.streams = self.streams
        return copied

    def to_dict(self) -> dict[str, object]:
        """Return public JSON: durations in seconds; null where too few silences are known."""
        return {
            "streams": self.streams,
            **{kind.value: _counts_to_dict(counts) for kind, counts in self.kinds.items()},
        }


def client_timeout(counts: SurvivalCounts) -> EndedShare | None:
    """Return the shortest silence after which fewer than 1 % of the streams go on.

    None if no silence is known well enough: too few streams were silent for so long, or were observed for
    twice that time. If the share is still 1 % or more after the longest silence that is known well enough,
    the length of that silence is returned.
    """
    return first_share_below(counts, TIMEOUT_SHARE, TIMEOUT_SILENCES_MIN, TIMEOUT_FOLLOW_UP)


def resumption_to_dict(counts: SurvivalCounts, silent_ns: int) -> dict[str, object]:
    """Return the number of streams that went on after a silence, as public JSON.

    `silence`: its length, rounded down to an edge of the grid. `n`: silences of at least this length;
    `resumed`: those of them that a token ended. `share`: estimated share of the streams that go on before
    `until`, with its interval; null if it is not known.
    """
    return _share_to_dict(ended_share(counts, silent_ns))


def _counts_to_dict(counts: SurvivalCounts) -> dict[str, object]:
    timeout = client_timeout(counts)
    suggested = timeout is not None and timeout.share is not None and timeout.share < TIMEOUT_SHARE
    return {
        "n": counts.n,
        "resumed": sum(counts.ended),
        "went_on": [resumption_to_dict(counts, s * NS_PER_S) for s in SHOWN_S],
        "timeout": None if timeout is None else {**_share_to_dict(timeout), "suggested": suggested},
        "survival": [
            {
                "silence": point.duration / NS_PER_S,
                "n": point.n,
                "share": point.share,
                "low": point.low,
                "high": point.high,
            }
            for point in survival_curve(counts)
        ],
    }


def _share_to_dict(at: EndedShare) -> dict[str, object]:
    return {
        "silence": at.since / NS_PER_S,
        "n": at.n,
        "resumed": at.ended,
        "until": None if at.until is None else at.until / NS_PER_S,
        "share": at.share,
        "low": at.low,
        "high": at.high,
    }
