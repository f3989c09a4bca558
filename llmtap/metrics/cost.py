"""What answers cost, where a price is configured. Sources: seed 002; IETF seed 000, 5.2.4.2 and 6.2.

A GPU costs the same busy or idle, so its time is that of the whole window times the number of GPUs, not the
time that requests spent on it.
"""

from dataclasses import dataclass

__all__ = ["Cost", "Price", "cost_of", "tokens_per_gpu_second"]


@dataclass(frozen=True, slots=True)
class Price:
    """What is paid: for GPUs by the hour, for tokens by the million, or both; amounts of one currency."""

    gpus: int = 0
    per_gpu_hour: float = 0.0
    per_million_input: float = 0.0
    per_million_output: float = 0.0
    currency: str = "USD"

    def __post_init__(self) -> None:
        amounts = (self.gpus, self.per_gpu_hour, self.per_million_input, self.per_million_output)
        if min(amounts) < 0:
            raise ValueError("prices and numbers of GPUs are at least 0")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a window's answers cost; None where the divisor is 0 or not known."""

    currency: str
    spent: float
    gpu_seconds: float
    per_output_token: float | None
    per_good_token: float | None
    """All that was spent, over the tokens of answers that met their objectives only."""
    per_gpu_second: float | None
    output_tokens_per_gpu_second: float | None
    output_tokens_per_unit: float | None
    """Output tokens per unit of the currency: tok/s over currency/h, times 3,600 (the draft's
    "tokens per dollar-hour" is tok/s over currency/h, without the 3,600)."""


def tokens_per_gpu_second(output_tokens: int, seconds: float, gpus: int) -> float | None:
    """Output tokens per second and GPU; None without GPUs or time. Source: IETF seed 000, 5.2.4.2."""
    return _ratio(output_tokens, seconds * gpus)


def cost_of(
    price: Price, seconds: float, output_tokens: int, good_tokens: int | None, input_tokens: int = 0
) -> Cost:
    """The cost of a window of `seconds` in which so many tokens were served.

    `good_tokens` are those of answers that met their objectives, None where there are no objectives.
    """
    gpu_seconds = seconds * price.gpus
    spent = gpu_seconds * price.per_gpu_hour / 3_600
    spent += (input_tokens * price.per_million_input + output_tokens * price.per_million_output) / 1e6
    return Cost(
        currency=price.currency,
        spent=spent,
        gpu_seconds=gpu_seconds,
        per_output_token=_ratio(spent, output_tokens),
        per_good_token=None if good_tokens is None else _ratio(spent, good_tokens),
        per_gpu_second=_ratio(spent, gpu_seconds),
        output_tokens_per_gpu_second=tokens_per_gpu_second(output_tokens, seconds, price.gpus),
        output_tokens_per_unit=_ratio(output_tokens, spent),
    )


def _ratio(amount: float, by: float) -> float | None:
    return amount / by if by else None
