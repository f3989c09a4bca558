"""Invariant: what is no number is left out, whatever stands in its place. Numbers are read as they are."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.protocol.server_times import (
    clock_ns,
    header_times,
    object_times,
    rate_times,
    trailer_times,
)


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        # Fixtures show the usual ones.
        ("usage", {"prompt_tokens": 5, "total_latency": 0.3774}, "total 377.4 usage"),
        ("perf_metrics", {"server-processing-time": "0.139"}, "total 139.0 perf_metrics"),
        ("metrics", {"queue_time_ms": None, "mean_itl_ms": True, "generation_time_ms": -1},
         "decode -1.0 metrics"),
        ("metrics", {"queue_time_ms": "soon", "mean_itl_ms": -(10**400), "generation_time_ms": 10**400},
         "decode inf metrics, mean_itl -inf metrics"),
        ("perf_metrics", {"server-processing-time": "inf", "server-time-to-first-token": "1" * 99},
         "total inf perf_metrics"),
        ("metrics", "none", ""),
    ],
)  # fmt: skip
def test_objects(place: str, value: Any, expected: str) -> None:
    assert ", ".join(f"{t.name} {t.ms} {t.where}" for t in object_times(place, value)) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (b"OpenAI-Processing-Ms", b"142", "total 142.0 ms openai-processing-ms"),
        (b"fireworks-server-time-to-first-token", b"0.121",
         "ttft 121.0 s fireworks-server-time-to-first-token"),
        (b"x-queue-time", b"long", ""),
        (b"Server-Timing", b'queue;dur=3.5, cache;desc="hit", gfet4t7; dur=901, ttft;desc="x";dur="7"',
         "queue 3.5 ms server-timing, unnamed 901.0 ms server-timing, ttft 7.0 ms server-timing"),
        (b"server-timing", b"a;dur=1e999, b;dur=, c;dur=-4, ;",
         "unnamed inf ms server-timing, unnamed -4.0 ms server-timing"),
    ],
)  # fmt: skip
def test_headers(name: bytes, value: bytes, expected: str) -> None:
    times = header_times([(name, value)])
    told = ", ".join(f"{t.name} {t.ms} {t.unit} {t.where.removeprefix('header:')}" for t in times)
    assert told == expected


@pytest.mark.parametrize(
    ("timings", "clock"),
    [
        ({"predicted_ms": 31.02}, 31_020_000),
        (None, -1),
        ({"predicted_ms": math.nan}, -1),
        ({"predicted_ms": 10**400}, -1),
        ({"predicted_ms": 1e10}, 10**16),
        ({"predicted_ms": 1.1e10}, -1),
    ],
)
def test_the_clock_of_llamacpp(timings: Any, clock: int) -> None:
    assert clock_ns(timings) == clock


@given(st.lists(st.tuples(st.sampled_from([b"server-timing", b"x-queue-time"]), st.binary(max_size=60))))
def test_nothing_in_a_header_raises(headers: list[tuple[bytes, bytes]]) -> None:
    assert all(type(time.ms) is float for time in header_times(headers))
    trailer_times([name + b":" + value for name, value in headers])


STATS = {"prompt_tps": 200.0, "generation_tps": 40.0, "prompt_tokens": 60, "generation_tokens": 9}


@pytest.mark.parametrize(
    ("more", "cached", "expected"),
    [
        ({}, None, {"prefill": 300.0, "decode": 200.0}),
        ({"prefix_cache_hit": "partial"}, 20, {"prefill": 200.0, "decode": 200.0}),
        ({"prefix_cache_hit": "partial"}, None, {"decode": 200.0}),
        ({"prefix_cache_hit": ["none"]}, 0, {"decode": 200.0}),
        ({"generation_tokens": 1}, 0, {"prefill": 300.0}),
        ({"prompt_tps": True, "generation_tokens": "9"}, 0, {}),
        ({"prompt_tokens": 10**400, "generation_tps": 1e-300}, 0, {"decode": pytest.approx(8e303)}),
    ],
)
def test_rates_are_told_as_the_times_behind_them(
    more: dict[str, Any], cached: int | None, expected: dict[str, float]
) -> None:
    assert {t.name: t.ms for t in rate_times({**STATS, **more}, cached)} == expected
