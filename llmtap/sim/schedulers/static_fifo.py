"""One queue, batches of a fixed size (seed 004, 5.2): the baseline."""

from collections import deque
from collections.abc import Mapping

from llmtap.sim.engine import NOBODY, GivenUp, Made
from llmtap.sim.latency import LatencyModel
from llmtap.sim.model_options import ModelOptions
from llmtap.sim.schedulers.batches import Batch, Former
from llmtap.workload.requests import Requests

__all__ = ["StaticFifo"]


class StaticFifo:
    """Serves the oldest requests, so many at a time."""

    def __init__(self, requests: Requests, model: LatencyModel, readings: ModelOptions) -> None:
        self._queue: deque[int] = deque()
        self._former = Former(requests, model, readings)
        self._size = readings.static_batch
        self._waits = readings.partial == "wait"

    def arrived(self, now_ns: int, request: int) -> None:
        """It goes to the end of the queue."""
        self._queue.append(request)

    def closed(self, now_ns: int) -> None:
        """The last batch need not be full."""
        self._waits = False

    def form(self, now_ns: int) -> Batch | None:
        """The oldest requests."""
        if not self._queue or (self._waits and len(self._queue) < self._size):
            return None
        return self._former.take(self._queue, self._size)

    def done(self, now_ns: int, work: Batch) -> Made:
        """All of a batch end together."""
        return Made(finished=work.members)

    def left(self, now_ns: int, request: int) -> None:
        """It leaves the queue; in a batch it stays until that is done."""
        if request in self._queue:
            self._queue.remove(request)

    def given_up(self) -> Mapping[int, GivenUp]:
        """Everybody is served."""
        return NOBODY
