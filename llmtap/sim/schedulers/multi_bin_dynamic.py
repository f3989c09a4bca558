"""A queue for each bin of predicted output lengths, each with a controller of its own (seed 004, 5.4).

A batch is of one bin, so that its requests are of like length and none waits long for the longest.
"""

from collections import deque
from collections.abc import Mapping

from llmtap.sim.bins import Bins, batch_limits, equal_mass
from llmtap.sim.engine import NOBODY, GivenUp, Made
from llmtap.sim.latency import LatencyModel
from llmtap.sim.model_options import ModelOptions
from llmtap.sim.schedulers.batches import Batch, BatchSize, Former
from llmtap.workload.requests import Requests

__all__ = ["MultiBinDynamic"]


class MultiBinDynamic:
    """Serves one bin after the other."""

    def __init__(self, requests: Requests, model: LatencyModel, readings: ModelOptions) -> None:
        """Bins are those given, or of equal mass by the predictions for all of `requests`."""
        self._requests = requests
        self.bins = (
            Bins(readings.bin_edges, below=readings.below_first)
            if readings.bin_edges
            else equal_mass(requests.predicted, readings.bins, readings)
        )
        self.limits = batch_limits(self.bins, readings)
        self.sizes = [BatchSize(model, readings, limit) for limit in self.limits]
        self._queues: list[deque[int]] = [deque() for _ in self.limits]
        self._waiting = 0
        self._former = Former(requests, model, readings)
        self._candidates = readings.candidates
        self._choose = {
            "round-robin": self._next_in_turn,
            "longest-queue": self._longest,
            "oldest-head": self._oldest,
        }[readings.bin_choice]
        self._turn = 0

    def arrived(self, now_ns: int, request: int) -> None:
        """It goes to the end of its bin's queue."""
        self._queues[self.bins.find(self._requests.predicted[request])].append(request)
        self._waiting += 1

    def closed(self, now_ns: int) -> None:
        """Nothing here waits for more."""

    def form(self, now_ns: int) -> Batch | None:
        """The oldest requests of the bin that is next."""
        if not self._waiting:
            return None
        number = self._choose()
        count = min(self._candidates, self.sizes[number].next())
        batch = self._former.take(self._queues[number], count, number)
        self._waiting -= len(batch.members)
        return batch

    def done(self, now_ns: int, work: Batch) -> Made:
        """The bin's controller learns from it."""
        members, size = work.members, len(work.members)
        given, made = self._requests.input, self._requests.output
        inputs, outputs = sum([given[r] for r in members]) / size, sum([made[r] for r in members]) / size
        self.sizes[work.queue].saw(work.step_ns, size, inputs, outputs)
        return Made(finished=members)

    def left(self, now_ns: int, request: int) -> None:
        """It leaves its bin's queue; in a batch it stays until that is done."""
        queue = self._queues[self.bins.find(self._requests.predicted[request])]
        if request in queue:
            queue.remove(request)
            self._waiting -= 1

    def given_up(self) -> Mapping[int, GivenUp]:
        """Everybody is served."""
        return NOBODY

    def _next_in_turn(self) -> int:
        queues = self._queues
        number = self._turn
        while not queues[number]:
            number = (number + 1) % len(queues)
        self._turn = (number + 1) % len(queues)
        return number

    def _longest(self) -> int:
        lengths = [len(queue) for queue in self._queues]
        return lengths.index(max(lengths))

    def _oldest(self) -> int:
        arrivals = self._requests.arrival_ns
        heads = [(arrivals[queue[0]], queue[0], i) for i, queue in enumerate(self._queues) if queue]
        return min(heads)[2]
