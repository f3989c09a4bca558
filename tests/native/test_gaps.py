"""The compiled numbers of an exchange against their Python twins.

Invariant: every number is the same, floats to the last bit; where a number is too large, Python counts.
"""

import random
from array import array
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest

from llmtap import native
from llmtap.exchange.exchange import OUTPUT, Exchange, Timeline
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.export.buckets import GAP_EDGES_NS, TOKEN_EDGES, Buckets
from llmtap.metrics import latency
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import Measured, measure
from llmtap.native import REASON

compiled = native.compiled
pytestmark = pytest.mark.skipif(compiled is None, reason=f"the compiled path does not run: {REASON}")

LARGE = (2**31, 2**40, 2**53, 2**53 + 1, 2**62, 2**63 - 1)
TOO_LARGE = (2**63, 2**64, 2**200, -(2**63) - 1)


def numbers(rng: random.Random, n: int) -> list[int]:
    """Values of all sizes; some of them are equal, negative or large."""
    most = rng.choice((1, 50, 1_023, 10**6, 10**9, 10**12, 2**53))
    out = [rng.randrange(-most if rng.random() < 0.05 else 0, most + 1) for _ in range(n)]
    if n and rng.random() < 0.2:
        out[rng.randrange(n)] = rng.choice(LARGE) * rng.choice((1, -1))
    return out


def times(rng: random.Random, n: int) -> list[int]:
    """Ascending stamps as of one answer: bursts, long pauses, any origin."""
    gaps = [rng.choice((0, 1, rng.randrange(30_000_000), rng.randrange(10**12))) for _ in range(n)]
    return list(accumulate(gaps, initial=rng.choice((0, 10**9, 10**15, 2**62))))[:n]


def of_python(monkeypatch: pytest.MonkeyPatch, work: Any, *args: Any) -> Any:
    """What the Python twin makes of it."""
    with monkeypatch.context() as patch:
        patch.setattr(native, "compiled", None)
        return work(*args)


@pytest.mark.parametrize("seed", range(4))
def test_gaps_jitter_and_waits_are_the_same(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    assert compiled is not None
    rng = random.Random(seed)
    counted = 0
    for _ in range(2_000):
        n = rng.choice((0, 1, 2, 3, 20, 300))
        stamps = times(rng, n) if rng.random() < 0.7 else numbers(rng, n)
        step = rng.choice((0, 1, 50_000_000, 10**12, rng.randrange(10**9), 2**61, -1))
        expected = of_python(monkeypatch, latency._gap_figures, stamps, step)
        assert latency._gap_figures(stamps, step) == expected
        counted += compiled.gap_figures(stamps, step) is not None
    assert counted > 1_000


@pytest.mark.parametrize("seed", range(4))
def test_histograms_and_buckets_are_the_same(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def counts(values: list[int], edges: tuple[int, ...]) -> Any:
        histogram, buckets = Histogram(values), Buckets(edges)
        buckets.record_many(values)
        buckets.record_many(array("q", values))
        return (
            histogram.to_bytes(),
            histogram.n,
            histogram.total,
            histogram.percentiles((0, 0.5, 1)),
            buckets.read(),
        )

    rng = random.Random(seed)
    for _ in range(500):
        values = numbers(rng, rng.choice((0, 1, 16, 17, 23, 24, 200, 600)))
        if values and rng.random() < 0.3:
            values[0] = rng.choice((*GAP_EDGES_NS, *TOKEN_EDGES)) + rng.choice((-1, 0, 1))
        edges = rng.choice((GAP_EDGES_NS, TOKEN_EDGES))
        assert counts(values, edges) == of_python(monkeypatch, counts, values, edges)


def test_floats_are_rounded_as_python_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edges of buckets, and where a number is rounded to a double and then to a float."""
    values = [
        sign * ((1 << bits) + shift)
        for bits in range(1, 63)
        for low in range(bits)
        for shift in (0, 1 << low, (1 << low) - 1, -(1 << low), -(1 << low) - 1)
        for sign in (1, -1)
    ]

    def counted(*values: int) -> bytes:
        return Histogram(values * 17).to_bytes()

    for value in values:
        assert counted(value) == of_python(monkeypatch, counted, value), value
    assert counted(*values) == of_python(monkeypatch, counted, *values), "many buckets in a crowded table"
    far = [4**power for power in range(31)]
    assert counted(*far) == of_python(monkeypatch, counted, *far), "the buckets of all have the same low bits"


def test_what_is_too_large_is_counted_by_python() -> None:
    assert compiled is not None
    for large in TOO_LARGE:
        seen: Counter[int] = Counter()
        cells = array("Q", bytes(24))
        assert compiled.gap_figures([1, large], 1) is None
        assert compiled.gap_figures([1, 2, 3], large) is None
        assert compiled.count_by_float([1, large], seen) is None
        assert compiled.count_by_edge([1, large], (1, 2), cells) is None
        assert compiled.count_by_edge([1], (1, large), cells) is None
        assert (not seen, not any(cells)) == (True, True), "nothing is counted before it is refused"
    for values in ([2**62] * 2, [-(2**62)] * 3):
        assert compiled.count_by_float(values, Counter()) is None
        assert compiled.count_by_edge(values, (1, 2), array("Q", bytes(24))) is None
    assert compiled.gap_figures([-(2**62), 2**62], 0) is None
    assert compiled.gap_figures([0, 1, 2], 2**62) is None
    assert compiled.gap_figures([-5, -5, -5], 2**62) is None
    assert compiled.gap_figures([0, 2**63 - 1] * 4, 0) is None
    assert Buckets((2,)).read() == (array("Q", [0, 0]), 0)
    buckets = Buckets((2,))
    buckets.record_many([1, 2**70])
    assert buckets.read() == (array("Q", [1, 1]), 2**70 + 1)


def test_wrong_arguments_are_refused() -> None:
    assert compiled is not None
    cells = array("Q", bytes(24))
    for work in (
        lambda: compiled.gap_figures((1, 2), 1),
        lambda: compiled.gap_figures(None, 1),
        lambda: compiled.count_by_float([1], [1]),
        lambda: compiled.count_by_float([1], None),
        lambda: compiled.count_by_edge([1], (1, 2, 3), cells),
        lambda: compiled.count_by_edge([1], (1, 2), array("q", bytes(24))),
        lambda: compiled.count_by_edge([1], (1, 2), [0, 0, 0]),
        lambda: compiled.count_by_edge([1], (1, 2), None),
    ):
        with pytest.raises((TypeError, ValueError)):
            work()
    for values in ([1.5], [True], ["a"], [None]):
        assert compiled.count_by_float([*values, 1], {}) is None
    assert not any(cells)


def answer(rng: random.Random) -> Exchange:
    """A stream of any pace and any knowledge of its tokens."""
    x = Exchange("r", 1, 0, Timeline(0, submit_ns=rng.choice((None, 0, 10**6))), stream=True)
    kind = rng.choice(("single", "declared", "total", "unknown"))
    n = rng.choice((0, 1, 2, 3, 40, 400))
    for t_ns in times(rng, n):
        flags = OUTPUT if rng.random() < 0.95 else 0
        tokens = rng.randrange(6) if kind == "declared" else -1
        x.timeline.events.add(t_ns, EventClass.CONTENT, 100, tokens, flags)
    outputs = list(latency.output_times_ns(x.timeline.events))
    if outputs:
        x.timeline.first_token_ns, x.timeline.last_token_ns = outputs[0], outputs[-1]
    if kind != "unknown":
        x.tokens.output = len(outputs) if kind == "single" else rng.randrange(3 * n + 1)
        x.tokens.source = TokenSource.USAGE
    return x


def test_an_exchange_is_measured_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    seen = Counter[str]()
    for _ in range(1_500):
        x, benefit = answer(rng), Benefit(reader_ns_per_token=rng.choice((50_000_000, 1, 10**12)))
        found = measure(x, benefit)
        expected: Measured = of_python(monkeypatch, measure, x, benefit)
        assert found == expected
        assert (found.itl_b_ns is found.tbc_ns) == (expected.itl_b_ns is expected.tbc_ns)
        seen[found.itl_policy.split(";")[0]] += 1
    assert len(seen) == 3
