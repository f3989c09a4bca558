"""Silences of streams: periods without a token, and the number of streams that resumed after them.

`silences_of` returns the silences of a finished exchange, and `SilenceCounts` counts the silences of many
exchanges (the estimates are in `survival.py`). `client_timeout` suggests a timeout for clients: a silence
after which few streams resume. The meter and the reports of captures use them. DEFINITIONS.md defines a
silence.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured
from llmtap.metrics.survival import EndedShare, SurvivalCounts, ended_share, first_share_below, survival_curve
from llmtap.units import NS_PER_S

_DECADE: Final = (
    10,
    11,
    12,
    13,
    14,
    15,
    16,
    18,
    20,
    22,
    24,
    27,
    30,
    33,
    36,
    40,
    45,
    50,
    55,
    60,
    66,
    73,
    80,
    90,
)
"""Edges of the cells of the grid within a factor of 10: each is at most 12.5 % above the edge before it.
Round durations are edges."""
SILENCE_NS_MIN: Final = 100_000_000
"""Shortest silence that is counted: ordinary gaps between tokens are shorter."""
SILENCE_NS_MAX: Final = 600 * NS_PER_S
"""Lower edge of the last cell, in which all longer silences are counted."""
EDGES_NS: Final = tuple(
    edge
    for edge in (step * scale * NS_PER_S // 100 for scale in (1, 10, 100, 1_000) for step in _DECADE)
    if edge <= SILENCE_NS_MAX
)
"""Edges of the grid of durations (`SurvivalCounts.edges`)."""
SHOWN_S: Final = (1, 2, 5, 10, 30, 60, 120, 300)
"""Silences in seconds that reports show; each is an edge of the grid."""
TIMEOUT_SHARE: Final = 0.01
"""A silence is suggested as a timeout if less than this share of the streams resumes after it."""
TIMEOUT_SILENCES_MIN: Final = 100
"""Minimum number of silences of at least the suggested length: 1 % of fewer is less than one stream."""
TIMEOUT_FOLLOW_UP: Final = 2
"""Streams must be observed for this multiple of a suggested silence, to know whether they resume."""


class SilenceKind(StrEnum):
    """The token for which a silent stream waits."""

    FIRST_TOKEN = "first_token"
    NEXT_TOKEN = "next_token"


class Silence(NamedTuple):
    """A period of a stream without a token."""

    kind: SilenceKind
    duration_ns: int
    resumed: bool
    """Whether a token ended the silence; otherwise, the end of the stream did (a censored duration)."""


def silences_of(x: Exchange, m: Measured) -> Iterator[Silence]:
    """Yield the silences of at least SILENCE_NS_MIN of a finished stream; none if its answer was not
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
    """Numbers of silences of many streams, by kind and duration."""

    __slots__ = ("kinds", "streams")

    def __init__(self) -> None:
        self.kinds = {kind: SurvivalCounts(EDGES_NS) for kind in SilenceKind}
        """By kind of silence: numbers of silences by duration."""
        self.streams = 0
        """Number of streams, with or without a silence."""

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
        """Return public JSON: durations in seconds; null for an estimate from too few silences."""
        return {
            "streams": self.streams,
            **{kind.value: _counts_to_dict(counts) for kind, counts in self.kinds.items()},
        }


def client_timeout(counts: SurvivalCounts) -> EndedShare | None:
    """Return the shortest silence (an edge of the grid) after which less than 1 % of the streams resume.

    A silence is considered only if enough streams reached it, and enough were observed for twice its length;
    None if there is no such silence. If 1 % or more resume even after the longest of these
    silences, that silence is returned.
    """
    return first_share_below(counts, TIMEOUT_SHARE, TIMEOUT_SILENCES_MIN, TIMEOUT_FOLLOW_UP)


def resumption_to_dict(counts: SurvivalCounts, silent_ns: int) -> dict[str, object]:
    """Return public JSON on the streams that resumed after a silence of `silent_ns`.

    `silence`: its length, rounded down to an edge of the grid. `n`: number of silences of at least this
    length. `resumed`: number of these that a token ended. `share`: estimated share of the streams that resume
    before `until`, with its interval; null if it is unknown.
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


def _share_to_dict(estimate: EndedShare) -> dict[str, object]:
    return {
        "silence": estimate.since / NS_PER_S,
        "n": estimate.n,
        "resumed": estimate.ended,
        "until": None if estimate.until is None else estimate.until / NS_PER_S,
        "share": estimate.share,
        "low": estimate.low,
        "high": estimate.high,
    }
