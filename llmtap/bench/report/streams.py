"""Two streams of a load as their readers had them: the one that was usual, and the one that was worst.

A reader of a given speed begins with the first token, reads on, and waits for what is not there yet. Beside
what was delivered and what was read stands the deadline of each token: when a reader would want it who began
to read as the request was sent and never waited. How far a delivery lies behind its deadline is idle time.

Source: seed 001, Fig. 1, eq. 4 and 6, in the reading of `metrics/deadlines.py`.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.test import ChartSeries, ChartSpec
from llmtap.metrics.deadlines import READER_NS_PER_TOKEN, user_idle_ns
from llmtap.units import NS_PER_S, to_seconds

__all__ = ["read_ns", "stream_charts"]

_SPEED: Final = NS_PER_S / READER_NS_PER_TOKEN


def stream_charts(measured: Measurement) -> list[ChartSpec]:
    """Of the request whose reader's waits, added up, are the load's median, and of the one with the most.

    Where a chunk brings several tokens, each is taken to bring as many as the answer's chunks do on average.
    """
    table = measured.ended_well().select(["ttft_any_ns", "gaps_ns", "output_tokens"])
    streams = []
    for first_ns, gaps_ns, tokens in zip(*(column.to_pylist() for column in table.columns), strict=True):
        if first_ns is not None and gaps_ns:
            each = max(1.0, (tokens or 0) / (len(gaps_ns) + 1))
            times_ns = list(accumulate([first_ns, *gaps_ns]))
            streams.append((user_idle_ns(times_ns, 0, each) or 0, times_ns, each))
    streams.sort(key=lambda stream: stream[0])
    if not streams:
        return []
    chosen = {"usual": streams[(len(streams) - 1) // 2], "worst": streams[-1]}
    return [_chart(name, *stream) for name, stream in chosen.items()]


def read_ns(times_ns: Sequence[int], per_event_ns: int) -> list[int]:
    """When each event was begun to be read: once it was there, and what was before it had been read."""
    read: list[int] = []
    for t_ns in times_ns:
        read.append(max(t_ns, read[-1] + per_event_ns) if read else t_ns)
    return read


def _chart(name: str, idle_ns: int, times_ns: list[int], each: float) -> ChartSpec:
    tokens: list[float | None] = [round((i + 1) * each, 2) for i in range(len(times_ns))]
    per_event_ns = round(each * READER_NS_PER_TOKEN)
    lines = {
        "delivered": times_ns,
        f"read, at {_SPEED:g} tokens/s": read_ns(times_ns, per_event_ns),
        "wanted (deadline)": [i * per_event_ns for i in range(len(times_ns))],
    }
    return ChartSpec(
        title=f"A stream, the {name}: its reader waits {idle_ns / 1e6:,.0f} ms in all",
        kind="steps", x_title="time since submission (s)", y_title="tokens",
        series=[
            ChartSeries(name=line, x=[to_seconds(ns) for ns in at_ns], y=tokens)
            for line, at_ns in lines.items()
        ],
    )  # fmt: skip
