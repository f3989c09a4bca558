"""One queue, batches as large as memory and the token SLA are thought to allow (seed 004, 5.3)."""

from collections import deque
from collections.abc import Mapping

from llmtap.sim.engine import NOBODY, GivenUp, Made
from llmtap.sim.latency import LatencyModel
from llmtap.sim.model_options import ModelOptions
from llmtap.sim.schedulers.batches import Batch, BatchSize, Former
from llmtap.workload.requests import Requests

__all__ = ["DynamicNoBins"]


class DynamicNoBins:
    """Serves the oldest requests, as many at a time as its controller says."""

    def __init__(self, requests: Requests, model: LatencyModel, readings: ModelOptions) -> None:
        self._requests = requests
        self._queue: deque[int] = deque()
        self._former = Former(requests, model, readings)
        self._candidates = readings.candidates
        self.size = BatchSize(model, readings, readings.b_max)

    def arrived(self, now_ns: int, request: int) -> None:
        """It goes to the end of the queue."""
        self._queue.append(request)

    def closed(self, now_ns: int) -> None:
        """Nothing here waits for more."""

    def form(self, now_ns: int) -> Batch | None:
        """The oldest requests."""
        if not self._queue:
            return None
        return self._former.take(self._queue, min(self._candidates, self.size.next()))

    def done(self, now_ns: int, work: Batch) -> Made:
        """The controller learns from it."""
        members, size = work.members, len(work.members)
        given, made = self._requests.input, self._requests.output
        inputs, outputs = sum([given[r] for r in members]) / size, sum([made[r] for r in members]) / size
        self.size.saw(work.step_ns, size, inputs, outputs)
        return Made(finished=members)

    def left(self, now_ns: int, request: int) -> None:
        """It leaves the queue; in a batch it stays until that is done."""
        if request in self._queue:
            self._queue.remove(request)

    def given_up(self) -> Mapping[int, GivenUp]:
        """Everybody is served."""
        return NOBODY
