"""A model whose TTFT rises after a day, for those who show steps."""

from llmtap.clock import ManualClock
from llmtap.export.sinks import SeriesKey
from llmtap.meter.pipeline.step_changes import StepBook
from llmtap.metrics.latency import measure
from tests.support.traffic.exchanges import streamed

S = 1_000_000_000
GAP_S = 8
DAY = 86_400 // GAP_S


def end_streams(
    book: StepBook, clock: ManualClock, n: int, *, factor: float = 1.0, model: str = "tiny"
) -> None:
    """End `n` streams, one in GAP_S; their TTFT is 99 ms times the factor."""
    x = streamed()
    m = measure(x)
    assert m.ttft_ns is not None
    m.ttft_ns = round(m.ttft_ns * factor)
    for _ in range(n):
        clock.advance(GAP_S * S)
        end_ns = clock.mono_ns()
        assert x.timeline.first_content_ns is not None
        x.timeline.first_content_ns = end_ns - S
        book.on_end(x, m, SeriesKey("acme", model), None)


def rise(book: StepBook, clock: ManualClock, factor: float = 1.6) -> None:
    """Let TTFT rise after 25 hours."""
    end_streams(book, clock, DAY + DAY // 24)
    end_streams(book, clock, 150, factor=factor)
