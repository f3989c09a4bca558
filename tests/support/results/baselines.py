"""Both sides of replayed rows, of times that are known, and a capture of the one side."""

from array import array
from collections.abc import Sequence
from pathlib import Path

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import EventClass
from llmtap.load.replay.baseline import Baseline, RecordedAnswer
from tests.support.storage.captures import write_capture
from tests.support.traffic.exchanges import streamed

MS = 1_000_000
_FIRST_MS = 99
"""Of `streamed`, from submit."""
_POINTS = (
    "head_ns",
    "first_byte_ns",
    "first_any_ns",
    "first_token_ns",
    "first_content_ns",
    "last_token_ns",
    "response_end_ns",
    "delivered_ns",
)


def answer(number: int, ttft_ms: float, words: int = 3, *, at_ms: int = 0, gap_ms: float = 20) -> Exchange:
    """A streamed answer whose prompt has `number` + 10 tokens."""
    x = streamed(number + 1, words, at_ms=at_ms, gap_ms=gap_ms)
    later_ns = round((ttft_ms - _FIRST_MS) * MS)
    for name in _POINTS:
        if (t_ns := getattr(x.timeline, name)) is not None:
            setattr(x.timeline, name, t_ns + later_ns)
    x.timeline.events.t_ns = array("q", (t_ns + later_ns for t_ns in x.timeline.events.t_ns))
    x.tokens.input = number + 10
    assert EventClass.CONTENT.value in x.timeline.events.classes
    return x


def captured(path: Path, arrivals_ms: Sequence[int], ttft_ms: float = 20) -> str:
    """A capture whose row i arrives then, with a prompt of i + 10 tokens, in this order."""
    rows = [answer(i, ttft_ms, 3 + i, at_ms=at_ms) for i, at_ms in enumerate(arrivals_ms)]
    return str(write_capture(path, rows))


def recorded(rows: int) -> RecordedAnswer:
    """Rows of a source that nobody reads."""
    return RecordedAnswer("nowhere", "llmtap", array("q", range(rows)))


def both(pairs: Sequence[tuple[Exchange, Exchange]]) -> Baseline:
    """What rows were, and what they are now."""
    baseline = Baseline(recorded(len(pairs)))
    for row, (_, now) in enumerate(pairs):
        baseline.add_replayed(row, now)
    for row, (then, _) in enumerate(pairs):
        baseline.add_recorded(row, then)
    return baseline
