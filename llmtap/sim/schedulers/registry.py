"""All schedulers, by name."""

from collections.abc import Callable
from typing import Final

from llmtap.sim.engine import Scheduler
from llmtap.sim.latency import LatencyModel
from llmtap.sim.readings import Readings
from llmtap.sim.requests import Requests
from llmtap.sim.schedulers.dynamic_no_bins import DynamicNoBins
from llmtap.sim.schedulers.multi_bin_dynamic import MultiBinDynamic
from llmtap.sim.schedulers.static_fifo import StaticFifo

__all__ = ["SCHEDULERS"]

SCHEDULERS: Final[dict[str, Callable[[Requests, LatencyModel, Readings], Scheduler]]] = {
    "static_fifo": StaticFifo,
    "dynamic_no_bins": DynamicNoBins,
    "multi_bin_dynamic": MultiBinDynamic,
}
"""By the names of seed 004."""
