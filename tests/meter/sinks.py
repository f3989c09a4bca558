"""A sink that keeps what it receives."""

from llmtap.exchange.exchange import Exchange
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.latency import Measured


class CollectingSink:
    """Keeps the exchanges, and the keys they were counted under; or raises `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.exchanges: list[Exchange] = []
        self.keys: list[SeriesKey] = []
        self._error = error

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        if self._error is not None:
            raise self._error
        self.exchanges.append(x)
        self.keys.append(key)
