"""Cost of answers by a configured price, and energy from samples of power.

`cost_of` computes the cost of a time window from a `Price` and the window's tokens; `energy_of` computes
joules from samples of power in W. Summaries, monitoring and benchmarks call them. GPU time is the whole
window times the number of GPUs. Power is interpolated between samples (trapezoids) up to `GAP_NS_MAX` apart.
Longer gaps count as missing time, which is reported.

Source: chapter on SLO metrics; IETF draft, 5.2.4.2 and 6.2; exo-bench's methodology, "System Metrics".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final


@dataclass(frozen=True, slots=True)
class Price:
    """Price of GPUs per hour, of tokens per million, or both; all amounts have one currency."""

    gpus: int = 0
    per_gpu_hour: float = 0.0
    per_million_input: float = 0.0
    per_million_output: float = 0.0
    currency: str = "USD"

    def __post_init__(self) -> None:
        for name in ("gpus", "per_gpu_hour", "per_million_input", "per_million_output"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name):g}")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of the answers in a time window, in units of `currency`. A ratio with a divisor of 0 is None."""

    currency: str
    spent: float
    """Cost of all answers."""
    gpu_seconds: float
    """Number of GPUs x seconds of the window."""
    per_output_token: float | None
    """Cost / output tokens."""
    per_good_token: float | None
    """Whole cost / number of output tokens of answers that met their objectives."""
    per_gpu_second: float | None
    output_tokens_per_gpu_second: float | None
    output_tokens_per_unit: float | None
    """Output tokens per unit of the currency. (The IETF draft's "tokens per dollar-hour" is the tokens per
    second / the cost per hour, which is this value / 3,600.)"""


def tokens_per_gpu_second(output_tokens: int, seconds: float, gpus: int) -> float | None:
    """Return output tokens / (seconds x GPUs); None without GPUs or time. Source: IETF draft, 5.2.4.2."""
    return _ratio_of(output_tokens, seconds * gpus)


def cost_of(
    price: Price, seconds: float, output_tokens: int, good_tokens: int | None, input_tokens: int = 0
) -> Cost:
    """Return the cost of a time window of `seconds` with these tokens.

    `good_tokens`: output tokens of answers that met their objectives; None without objectives.
    """
    gpu_seconds = seconds * price.gpus
    spent = gpu_seconds * price.per_gpu_hour / 3_600
    spent += (input_tokens * price.per_million_input + output_tokens * price.per_million_output) / 1e6
    return Cost(
        currency=price.currency,
        spent=spent,
        gpu_seconds=gpu_seconds,
        per_output_token=_ratio_of(spent, output_tokens),
        per_good_token=None if good_tokens is None else _ratio_of(spent, good_tokens),
        per_gpu_second=_ratio_of(spent, gpu_seconds),
        output_tokens_per_gpu_second=tokens_per_gpu_second(output_tokens, seconds, price.gpus),
        output_tokens_per_unit=_ratio_of(output_tokens, spent),
    )


def _ratio_of(amount: float, by: float) -> float | None:
    return amount / by if by else None


GAP_NS_MAX: Final = 3_000_000_000
"""Maximum time between two samples to interpolate power: at 1 Hz, one sample can fail, the next be late."""


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy in the part of a time window that samples cover (`known_ns`); `missing_ns` is the other part."""

    joules: float
    known_ns: int
    """Time for which the power is known."""
    missing_ns: int = 0
    """Time without samples."""


def energy_of(
    times_ns: Sequence[int],
    power_w: Sequence[float | None],
    *,
    from_ns: int | None = None,
    to_ns: int | None = None,
    gap_ns_max: int = GAP_NS_MAX,
) -> Energy | None:
    """Return the energy from `from_ns` to `to_ns`, by default from the first to the last sample.

    `times_ns`: times of the samples, ascending. `power_w`: power of each sample; None: the sample failed.
    Power is interpolated linearly between two samples; a gap above `gap_ns_max` is missing time. The first
    sample also counts for `gap_ns_max` before it, and the last one for `gap_ns_max` after it. None if no part
    of the window is known.
    """
    assert len(times_ns) == len(power_w), "each time needs a value of power"
    known = [(t_ns, power) for t_ns, power in zip(times_ns, power_w, strict=True) if power is not None]
    if not known:
        return None
    (first_ns, first_w), (last_ns, last_w) = known[0], known[-1]
    from_ns = first_ns if from_ns is None else from_ns
    to_ns = last_ns if to_ns is None else to_ns
    lines = [
        (first_ns - gap_ns_max, first_w, first_ns, first_w),
        *((t_ns, watt, u_ns, next_w) for (t_ns, watt), (u_ns, next_w) in pairwise(known)),
        (last_ns, last_w, last_ns + gap_ns_max, last_w),
    ]
    joules, known_ns = 0.0, 0
    for t_ns, watt, u_ns, next_w in lines:
        assert t_ns <= u_ns, "the times of the samples do not ascend"
        begin_ns, end_ns = max(t_ns, from_ns), min(u_ns, to_ns)
        if begin_ns >= end_ns or u_ns - t_ns > gap_ns_max:
            continue
        slope = (next_w - watt) / (u_ns - t_ns)
        middle_ns = (begin_ns + end_ns) / 2
        joules += (watt + slope * (middle_ns - t_ns)) * (end_ns - begin_ns) / 1e9
        known_ns += end_ns - begin_ns
    if not known_ns:
        return None
    return Energy(joules, known_ns, to_ns - from_ns - known_ns)


def average_power_w(windows: Iterable[Energy]) -> float | None:
    """Return all joules / all known seconds of several windows, in W; None if no power is known."""
    joules, known_ns = 0.0, 0
    for window in windows:
        joules += window.joules
        known_ns += window.known_ns
    return joules / (known_ns / 1e9) if known_ns else None


def joules_per_token(joules: float | None, tokens: int | None) -> float | None:
    """Return the energy per token of a window; None without tokens, or if either argument is unknown."""
    return None if joules is None or not tokens else joules / tokens
