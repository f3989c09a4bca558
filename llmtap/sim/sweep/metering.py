"""What the meter does with live exchanges, done with simulated ones: summed up, and captured if wanted.

It watches a run in virtual time (`virtual.Watcher`). Each request becomes an Exchange when it is over, is
measured once, counted, handed to the capture and forgotten: a million of them take the memory of one.
"""

from collections.abc import Sequence
from typing import Protocol

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary
from llmtap.sim.sweep.exchanges import ExchangeMaker

__all__ = ["Keeper", "VirtualMeter"]


class Keeper(Protocol):
    """Whoever keeps exchanges."""

    def add(self, x: Exchange) -> None:
        """One more."""


class VirtualMeter:
    """Sums up the exchanges of one run."""

    def __init__(
        self,
        maker: ExchangeMaker,
        *,
        objectives: Objectives | None = None,
        gap_max_ns: int,
        keeper: Keeper | None = None,
    ) -> None:
        """`gap_max_ns`: the longest time between tokens that is not `slow`."""
        self.summary = Summary(objectives)
        self.slow = 0
        """Requests with any gap above that."""
        self._make = maker.exchange
        self._gap_max_ns = gap_max_ns
        self._keep = None if keeper is None else keeper.add

    def ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        """A request is over."""
        x = self._make(request, token_ns, end_ns, served=served)
        measured = measure(x)
        self.summary.add(x, measured)
        if measured.tbc_max_ns is not None and measured.tbc_max_ns > self._gap_max_ns:
            self.slow += 1
        if self._keep is not None:
            self._keep(x)
