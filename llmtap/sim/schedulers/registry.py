"""All schedulers, by name."""

from collections.abc import Callable
from typing import Final, NamedTuple

from llmtap.sim.engine import Scheduler
from llmtap.sim.requests import Requests
from llmtap.sim.schedulers.dynamic_no_bins import DynamicNoBins
from llmtap.sim.schedulers.multi_bin_dynamic import MultiBinDynamic
from llmtap.sim.schedulers.static_fifo import StaticFifo
from llmtap.sim.serving import Setup

__all__ = ["SCHEDULERS", "Kind"]


class Kind(NamedTuple):
    """A scheduler as it can be asked for."""

    build: Callable[[Requests, Setup], Scheduler]
    iterates: bool
    """It composes anew at every iteration; else it serves whole batches, as seed 004 has it."""


def _batches(
    scheduler: type[StaticFifo] | type[DynamicNoBins] | type[MultiBinDynamic],
) -> Kind:
    return Kind(lambda requests, setup: scheduler(requests, setup.model, setup.readings), iterates=False)


SCHEDULERS: Final[dict[str, Kind]] = {
    "static_fifo": _batches(StaticFifo),
    "dynamic_no_bins": _batches(DynamicNoBins),
    "multi_bin_dynamic": _batches(MultiBinDynamic),
}
"""The first three by the names of seed 004."""
