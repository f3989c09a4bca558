"""All schedulers, by name."""

from collections.abc import Callable
from typing import Final, NamedTuple

from llmtap.sim.engine import Scheduler
from llmtap.sim.schedulers.chunked_prefill import ChunkedPrefill
from llmtap.sim.schedulers.continuous_batching import ContinuousBatching
from llmtap.sim.schedulers.decode_prepone import DecodePrepone
from llmtap.sim.schedulers.dynamic_no_bins import DynamicNoBins
from llmtap.sim.schedulers.iterations import Iterating
from llmtap.sim.schedulers.multi_bin_dynamic import MultiBinDynamic
from llmtap.sim.schedulers.output_delay import OutputDelay, output_delay
from llmtap.sim.schedulers.shortest_predicted_first import shortest_predicted_first
from llmtap.sim.schedulers.static_fifo import StaticFifo
from llmtap.sim.serving import Setup
from llmtap.workload.requests import Requests

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


def _iterations(scheduler: Callable[[Requests, Setup], Iterating]) -> Kind:
    def build(requests: Requests, setup: Setup) -> Iterating:
        gap_ns = setup.serving.output_delay
        built = scheduler(requests, setup)
        return OutputDelay(built, gap_ns) if gap_ns else built

    return Kind(build, iterates=True)


SCHEDULERS: Final[dict[str, Kind]] = {
    "static_fifo": _batches(StaticFifo),
    "dynamic_no_bins": _batches(DynamicNoBins),
    "multi_bin_dynamic": _batches(MultiBinDynamic),
    "continuous_batching": _iterations(ContinuousBatching),
    "chunked_prefill": _iterations(ChunkedPrefill),
    "decode_prepone": _iterations(DecodePrepone),
    "output_delay": Kind(output_delay, iterates=True),
    "shortest_predicted_first": _iterations(shortest_predicted_first),
}
"""The first three by the names of seed 004. Output delay is a scheduler by name, and an option of all others
that iterate."""
