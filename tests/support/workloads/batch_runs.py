"""Small workloads whose every figure is worked out by hand.

The model is alpha 1 s, beta 0.1 s a token, gamma 0.5: h is 1, 1.25, 4/3, 1.375 for batches of one to four.
"""

from array import array
from collections.abc import Sequence

from llmtap.sim.model_options import LatencyModel, ModelOptions, ServingSetup, read_model_options
from llmtap.sim.sweep.simulate import SimulationResult, simulate
from llmtap.workload.requests import Requests

S = 1_000_000_000
MODEL = LatencyModel(alpha_ns=1 * S, beta_ns=S // 10, gamma=0.5)

Row = tuple[float, int, int]
"""Arrival in seconds, tokens of the prompt, tokens of the output."""


def workload(rows: Sequence[Row]) -> Requests:
    columns = ([round(t * S) for t, _, _ in rows], [n for _, n, _ in rows], [n for _, _, n in rows])
    return Requests(*(array("q", column) for column in columns), array("q", columns[2]))


def simulated(scheduler: str, rows: Sequence[Row], *, servers: int = 1, **settings: str) -> SimulationResult:
    """A run with the model above; `settings` as on the command line."""
    readings: ModelOptions = read_model_options(settings)
    return simulate(scheduler, workload(rows), ServingSetup(MODEL, readings), servers=servers)


def served(result: SimulationResult) -> list[tuple[float, float, int]]:
    """Of each request: start and end in seconds, and the size of its batch."""
    p = result.record
    return [(a / S, b / S, n) for a, b, n in zip(p.start_ns, p.end_ns, p.size, strict=True)]
