"""The interface of everything that receives finished exchanges."""

from typing import NamedTuple, Protocol

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured

__all__ = ["ExchangeSink", "SeriesKey"]


class SeriesKey(NamedTuple):
    """Labels that an exchange is counted under; the number of their values is bounded (`Labels`)."""

    tenant: str
    model: str
    arm: str = ""
    """Arm of the experiment; empty: none."""
    slo: str = ""
    """Class of objectives; empty: none."""
    uncertain: bool = False
    """Its timestamps are wider than `meter.uncertainty_limit`."""


class ExchangeSink(Protocol):
    """Receives each exchange once, on the meter's loop, after `measure` computed its terms."""

    def ended(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Take in a finished exchange. `met`: whether it met its objectives, None if it does not count."""
