"""Read the durations that servers report about their own work, as `ServerTime`s with common names.

Tables list the fields of events, headers and trailers with their units. The dialects call this module for
events, and `exchange/verdict.py` for headers and trailers. It also returns negative and infinite durations,
which `exchange/verdict.py` removes and counts.

Source: docs/dialects.md; W3C Server Timing; IETF draft, 4.6.3 option C.
"""

import re
from collections.abc import Iterable
from math import inf
from typing import Any, Final

from llmtap.protocol.delta import ServerTime

SERVER_TIMES: Final = (
    "queue",
    "prefill",
    "ttft",
    "ttft_from_schedule",
    "decode",
    "mean_itl",
    "inference",
    "load",
    "total",
    "overhead",
    "callback",
    "unnamed",
)
"""Common names of durations. `ttft_from_schedule` does not include the time in the queue. `total` is the
duration of the whole request at this server; in a header, the time until the server sent the head."""

_MS_PER: Final = {"ms": 1.0, "s": 1e3, "us": 1e-3, "ns": 1e-6}
UNITS: Final = tuple(_MS_PER)
_CLOCK_MS_MAX: Final = 1e10
"""Largest valid reading of a server's clock, four months, so that differences in ns fit 64 bits."""
_RATE_MAX: Final = 1e12
_TIMING_ENTRIES_MAX: Final = 32

_TIMES_IN_SECONDS: Final = {
    "queue_time": ("queue", "s"),
    "prompt_time": ("prefill", "s"),
    "completion_time": ("decode", "s"),
    "total_time": ("total", "s"),
}
_OBJECTS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "timings": {  # llama.cpp
        "prompt_ms": ("prefill", "ms"),
        "predicted_ms": ("decode", "ms"),
        "predicted_per_token_ms": ("mean_itl", "ms"),
    },
    "metrics": {  # vLLM, except the last member, which is that of Bedrock
        "queue_time_ms": ("queue", "ms"),
        "time_to_first_token_ms": ("ttft_from_schedule", "ms"),
        "generation_time_ms": ("decode", "ms"),
        "mean_itl_ms": ("mean_itl", "ms"),
        "latencyMs": ("total", "ms"),
    },
    "x_groq.usage": _TIMES_IN_SECONDS,
    "time_info": _TIMES_IN_SECONDS,  # Cerebras
    "usage": {  # SambaNova
        "time_to_first_token": ("ttft", "s"),
        "total_latency": ("total", "s"),
    },
    "usage.latency_checkpoint": {  # Azure
        "service_ttft_ms": ("ttft", "ms"),
        "total_duration_ms": ("total", "ms"),
    },
    "perf_metrics": {  # Fireworks
        "server-time-to-first-token": ("ttft", "s"),
        "server-processing-time": ("total", "s"),
    },
    "nvext.timing": {  # Dynamo
        "prefill_wait_time_ms": ("queue", "ms"),
        "prefill_time_ms": ("prefill", "ms"),
        "ttft_ms": ("ttft", "ms"),
        "total_time_ms": ("total", "ms"),
    },
    "amazon-bedrock-invocationMetrics": {
        "firstByteLatency": ("ttft", "ms"),
        "invocationLatency": ("total", "ms"),
    },
}
_FIELDS: Final = {
    place: tuple((key, name, unit, f"{place}.{key}") for key, (name, unit) in fields.items())
    for place, fields in _OBJECTS.items()
}
"""Fields of each object, by its place: `(key, name, unit, path)`."""
_HEADERS: Final[dict[bytes, tuple[str, str]]] = {
    b"openai-processing-ms": ("total", "ms"),
    b"x-envoy-upstream-service-time": ("total", "ms"),
    b"fireworks-server-time-to-first-token": ("ttft", "s"),
    b"fireworks-server-processing-time": ("total", "s"),
    # TGI. Not read: x-compute-time (repeats x-total-time) and x-validation-time (no work on tokens).
    b"x-queue-time": ("queue", "ms"),
    b"x-inference-time": ("inference", "ms"),
    b"x-time-per-token": ("mean_itl", "ms"),
    b"x-total-time": ("total", "ms"),
    b"x-litellm-response-duration-ms": ("total", "ms"),
    b"x-litellm-overhead-duration-ms": ("overhead", "ms"),
    b"x-litellm-callback-duration-ms": ("callback", "ms"),
}
_SERVER_TIMING: Final = b"server-timing"
# RFC 9110 5.6.6: the value of a parameter can be in quotation marks.
_DURATION: Final = re.compile(r';\s*dur\s*=\s*"?([0-9.eE+-]{1,32})', re.IGNORECASE)


def object_times(place: str, value: Any) -> tuple[ServerTime, ...]:
    """Return the durations in the object at `place` in an event; () if `value` is no object."""
    if not isinstance(value, dict):
        return ()
    out = []
    for key, name, unit, path in _FIELDS[place]:
        ms = duration_ms(value.get(key), unit)
        if ms is not None:
            out.append(ServerTime(name, ms, place, path, unit))
    return tuple(out)


def rate_times(stats: Any, cached: int | None) -> tuple[ServerTime, ...]:
    """Return the durations of prefill and decode, computed from the rates and numbers of tokens in exo's
    `generation_stats`. `cached`: number of cached prompt tokens, which were not prefilled; needed for a
    partial cache hit. An exact hit has no prefill. Source: methodology of exo-bench."""
    if not isinstance(stats, dict):
        return ()
    hit = stats.get("prefix_cache_hit", "none")
    left_out = 0 if hit == "none" else cached if hit == "partial" else None
    out = []
    for name, tokens, without, rate in (
        ("prefill", "prompt_tokens", left_out, "prompt_tps"),
        # The duration begins with the first token, so this token does not count.
        ("decode", "generation_tokens", 1, "generation_tps"),
    ):
        ms = None if without is None else _span_ms(stats.get(tokens), without, stats.get(rate))
        if ms is not None:
            out.append(ServerTime(name, ms, "generation_stats", f"generation_stats.{rate}", "tokens/s"))
    return tuple(out)


def clock_ns(timings: Any) -> int:
    """Return llama.cpp's clock at a token, from its `timings`: ns since decoding began, -1 if unknown."""
    return duration_clock_ns(timings.get("predicted_ms") if isinstance(timings, dict) else None, "ms")


def duration_clock_ns(value: Any, unit: str) -> int:
    """Return the reading of a server's clock in ns; -1 if the value is not a valid duration."""
    ms = duration_ms(value, unit)
    return -1 if ms is None or not 0 <= ms <= _CLOCK_MS_MAX else round(ms * 1e6)


def header_times(headers: Iterable[tuple[bytes, bytes]], place: str = "header") -> list[ServerTime]:
    out: list[ServerTime] = []
    for name, value in headers:
        known = _HEADERS.get(name)
        if known is None:
            name = name.lower()
            known = _HEADERS.get(name)
        if known is not None:
            ms = duration_ms(value.decode("latin-1"), known[1])
            if ms is not None:
                out.append(ServerTime(known[0], ms, f"{place}:{name.decode('latin-1')}", None, known[1]))
        elif name == _SERVER_TIMING:
            out += _server_timing(value.decode("latin-1"), f"{place}:server-timing")
    return out


def trailer_times(lines: Iterable[bytes]) -> list[ServerTime]:
    fields = (line.partition(b":") for line in lines)
    return header_times(((name, value.strip()) for name, _, value in fields), "trailer")


def _server_timing(value: str, where: str) -> list[ServerTime]:
    """Return the durations in a Server-Timing field such as `queue;dur=3.5, prefill;dur=61`."""
    out = []
    for entry in value.split(",")[:_TIMING_ENTRIES_MAX]:
        name = entry.partition(";")[0].strip().lower()
        m = _DURATION.search(entry)
        ms = None if m is None else duration_ms(m[1], "ms")
        if ms is not None:
            out.append(ServerTime(name if name in SERVER_TIMES else "unnamed", ms, where))
    return out


def _span_ms(tokens: Any, without: int, rate: Any) -> float | None:
    """Return the time in ms for `tokens` - `without` tokens at a rate; None if a value is invalid."""
    if type(tokens) is not int or (type(rate) is not float and type(rate) is not int):
        return None
    if not 0 < rate <= _RATE_MAX or not without < tokens <= _RATE_MAX:
        return None
    return duration_ms((tokens - without) / rate, "s")


def duration_ms(value: Any, unit: str) -> float | None:
    """Convert a duration, a number or its text, from `unit` to ms. Return None if the value is no number; a
    number can be negative or infinite."""
    if type(value) is str:
        try:
            value = float(value) if len(value) <= 32 else None
        except ValueError:
            return None
    # Compare the type itself: in Python a bool is an instance of int.
    if type(value) is not float and type(value) is not int:
        return None
    try:
        return round(value * _MS_PER[unit], 6)
    except OverflowError:  # The integer is too large for a float.
        return inf if value > 0 else -inf
