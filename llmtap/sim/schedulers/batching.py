"""Schedulers of the multi-bin paper, which serve whole batches: fixed or controlled sizes, one queue or bins.

The engine (`sim/engine.py`) reports arriving requests to a scheduler, and gets the next `Batch` for a free
server from `form_work`. All requests of a batch start together, and end together when the longest one ends.
This module also has the bins of predicted lengths (`equal_mass_bins`) and the controller of the batch size
(`BatchSize`). Schedulers that compose a batch at every iteration are in `iterating.py`.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import floor
from typing import Final

from llmtap.sim.engine import NO_REQUESTS, Batch, EngineOutput, GivenUp
from llmtap.sim.model_options import LatencyModel, ModelOptions
from llmtap.workload.requests import Requests

_WARM_UP_BATCHES: Final = 3
"""Number of batches before the controller moves its interval, with the option `guards=authors`."""


class BatchFormer:
    """Makes batches from queued requests, and computes their durations."""

    def __init__(self, requests: Requests, model: LatencyModel, readings: ModelOptions) -> None:
        self._requests = requests
        self._model = model
        self._counts_output = readings.length == "prompt+output"
        """Whether a request's length includes its output, not only its prompt."""
        self._kv_tokens = readings.safe_gb / readings.kv_gb_per_token
        """Number of tokens that the memory holds."""
        self._checks_memory = readings.memory_check == "hard"
        """Whether a batch that does not fit in memory is made smaller."""
        self._steps_ns = [0.0] + [model.step_ns(b) for b in range(1, readings.b_max + 1)]
        """Time between two tokens, by batch size."""

    def make_batch(self, queue: "deque[int]", count: int, queue_number: int = 0) -> Batch:
        """Remove at most `count` requests from the queue, and return a batch of them."""
        members = [queue.popleft() for _ in range(min(count, len(queue)))]
        inputs, outputs = self._requests.input, self._requests.output
        if self._checks_memory:
            tokens = sum(inputs[r] + outputs[r] for r in members)
            # Always leave one request in the batch: a request that is too large would never be served.
            while tokens > self._kv_tokens and len(members) > 1:
                last = members.pop()
                tokens -= inputs[last] + outputs[last]
                queue.appendleft(last)
        size = len(members)
        length = max(
            [inputs[r] + outputs[r] for r in members]
            if self._counts_output
            else [outputs[r] for r in members]
        )
        step_ns = self._steps_ns[size] if size < len(self._steps_ns) else self._model.step_ns(size)
        first_ns = round(self._model.alpha_ns)
        duration_ns = round(self._model.alpha_ns + length * step_ns)
        return Batch(members, duration_ns, first_ns, step_ns, queue_number)


class BatchSize:
    """Controller of a queue's batch size: Algorithms 1 (memory) and 2 (token SLA) of the multi-bin paper."""

    def __init__(self, model: LatencyModel, readings: ModelOptions, limit: int) -> None:
        """`limit`: largest batch of the queue."""
        self._readings = readings
        self._limit = limit
        """Largest size that this queue's batches may have."""
        b_max = limit if readings.controller_limit == "bin" else readings.b_max
        self._b_max = b_max
        """Largest size of any batch (B_max of the paper)."""
        self._b_min = b_min = min(readings.b_min, limit)
        """Smallest size of a batch (B_min of the paper)."""
        self._alpha_step, self._delta_step = readings.alpha_step, readings.delta_step
        """`_alpha_step`: smallest width of the interval. `_delta_step`: how far an end moves at a time."""
        self._newest_weight = readings.alpha_ema
        """Weight of the newest batch in all moving averages."""
        self.low: float = b_min
        """Lower end of the sizes that the search considers."""
        self.high: float = b_max
        """`low` and `high`: ends of the interval of batch sizes; the token SLA allows its middle."""
        self.b_avg: float | None = {"middle": (b_min + b_max) // 2, "one": 1, "first-batch": None}[
            readings.b_start
        ]
        """Moving average of the batch size."""
        self.tau_ns = model.beta_ns if readings.tau_start == "beta" else 0.0
        """Moving average of the time between two tokens."""
        self._inputs_mean, self._outputs_mean = 300.0, 200.0
        """Mean number of input and of output tokens of a request so far."""
        self._updates = 0
        """Number of batches from which the controller has learned."""
        tokens = readings.free_gb / readings.kv_gb_per_token
        self._capacity_tokens = tokens - readings.rho * tokens
        """Tokens that fit in memory, less a reserve."""
        self._moves_per_batch = readings.sla_step == "batch"
        """Whether the interval moves after each batch, instead of before the next one."""
        self._slow_ns = readings.token_sla + readings.eps
        """Time per token above which batches become smaller."""
        self._fast_ns = readings.token_sla - readings.eps
        """Time per token below which batches become larger."""
        self._half_band = (self._alpha_step if readings.band == "alpha" else self._delta_step) / 2
        """Half of the interval's width when the latency is as wanted."""
        self._has_guards = readings.guards == "authors"
        """Whether to use the checks of the authors' program, which the paper does not have."""

    def next_size(self) -> int:
        """Return the maximum size of the next batch: the smaller of the sizes by memory and by token SLA."""
        if self._moves_per_batch:
            self._move_interval()
        b_sla = floor((self.low + self.high) / 2)
        return max(self._b_min, min(self.size_by_memory(), b_sla, self._limit))

    def size_by_memory(self) -> int:
        """Return how many requests of mean length fit into the KV memory."""
        if not self._updates and self._readings.lengths_start == "limit":
            return self._limit
        expected_tokens = self._inputs_mean + self._outputs_mean
        size = self._capacity_tokens / expected_tokens if expected_tokens else self._limit
        return max(self._b_min, min(self._limit, int(size)))

    def learn(self, step_ns: float, size: int, inputs: float, outputs: float) -> None:
        """Update the averages from a finished batch. `inputs`, `outputs`: mean tokens of its requests."""
        new, old = self._newest_weight, 1 - self._newest_weight
        self.tau_ns = new * step_ns + old * self.tau_ns
        self.b_avg = size if self.b_avg is None else new * size + old * self.b_avg
        self._inputs_mean = new * inputs + old * self._inputs_mean
        self._outputs_mean = new * outputs + old * self._outputs_mean
        self._updates += 1
        if not self._moves_per_batch:
            self._move_interval()

    def _move_interval(self) -> None:
        """Move the interval of batch sizes by the cases of Algorithm 2: too slow, too fast, or neither."""
        if self.b_avg is None or (self._has_guards and self._updates < _WARM_UP_BATCHES):
            return
        b_avg = int(self.b_avg) if self._has_guards else self.b_avg
        low, high = self.low, self.high
        if self.tau_ns > self._slow_ns:
            self.high = max(b_avg, low + self._alpha_step)
            self.low = max(low - self._delta_step, self._b_min)
            if self._has_guards:
                self.high = min(high, self.high)
        elif self.tau_ns < self._fast_ns:
            self.low = min(b_avg, high - self._alpha_step)
            self.high = min(high + self._delta_step, self._b_max)
            if self._has_guards:
                self.low = max(low, self.low)
        else:
            self.high = min(b_avg + self._half_band, self._b_max)
            self.low = max(b_avg - self._half_band, self._b_min)
        if self._has_guards:
            self.low = min(max(self._b_min, self.low), self.high)


_LAST_EDGE: Final = 4_096
"""Assumed upper edge of the last bin, which has none, to compute the mean length of its requests."""
_FIRST_REQUESTS: Final = 1_000
"""Number of the first requests from whose lengths the bins are computed, with `edges=first-1000`."""


class Bins:
    """Bins of predicted output lengths, by ascending lower edges. The last has no upper edge."""

    def __init__(self, edges: Sequence[int], *, below: str = "last") -> None:
        assert edges and list(edges) == sorted(edges), edges
        self.edges = list(edges)
        """Lowest length of each bin."""
        self._bin_below_first = len(edges) - 1 if below == "last" else 0
        """Bin of lengths below the first edge."""

    def __len__(self) -> int:
        return len(self.edges)

    def find(self, length: int) -> int:
        """Return the index of the bin of a length."""
        index = bisect_right(self.edges, length) - 1
        return index if index >= 0 else self._bin_below_first

    @property
    def spans(self) -> list[tuple[int, int | None]]:
        """Lower and upper edge of each bin."""
        return list(zip(self.edges, [*self.edges[1:], None], strict=True))


def equal_mass_bins(lengths: Iterable[int], count: int, readings: ModelOptions) -> Bins:
    """Return bins with equal numbers of requests (multi-bin paper, Algorithm 3): their edges are linear
    quantiles of the lengths, rounded down."""
    known = list(lengths)
    if readings.edges == "first-1000":
        known = known[:_FIRST_REQUESTS]
    known.sort()
    edges = []
    for i in range(count):
        # Compute the quantile i / count with integers, so that rounding does not move an edge.
        rank, part = divmod((len(known) - 1) * i, count)
        low, high = known[rank], known[min(rank + 1, len(known) - 1)]
        edges.append((low * (count - part) + high * part) // count)
    return Bins(edges, below=readings.below_first)


def batch_limits(bins: Bins, readings: ModelOptions) -> list[int]:
    """Return the maximum batch size of each bin (multi-bin paper, 8.2)."""
    if readings.bin_limit == "none":
        return [readings.b_max] * len(bins)
    memory_gb = readings.safe_gb if readings.bin_limit == "7gb" else readings.free_gb
    limits = []
    for low, high in bins.spans:
        # Twice the middle of the bin: assume as many prompt tokens as output tokens.
        tokens = low + (_LAST_EDGE if high is None else high)
        size = memory_gb / (tokens * readings.kv_gb_per_token) if tokens else readings.b_max
        limits.append(max(1, min(readings.b_max, int(size))))
    return limits


class _WholeBatches:
    """Base class: queues of waiting requests, which are served in whole batches in the order of arrival."""

    def __init__(
        self, requests: Requests, model: LatencyModel, readings: ModelOptions, queues: int = 1
    ) -> None:
        self._requests = requests
        self._queues: list[deque[int]] = [deque() for _ in range(queues)]
        """Waiting requests; all but one scheduler use a single queue."""
        self._batch_former = BatchFormer(requests, model, readings)

    def on_arrival(self, now_ns: int, request: int) -> None:
        self._queue_of(request).append(request)

    def on_close(self, now_ns: int) -> None: ...

    def on_done(self, now_ns: int, work: Batch) -> EngineOutput:
        return EngineOutput(finished=work.members)

    def on_left(self, now_ns: int, request: int) -> None:
        """Remove a request from its queue. A request in a running batch stays in it until the batch ends."""
        queue = self._queue_of(request)
        if request in queue:
            queue.remove(request)

    def take_given_up(self) -> Mapping[int, GivenUp]:
        return NO_REQUESTS

    def _queue_of(self, request: int) -> "deque[int]":
        return self._queues[0]


class StaticFifo(_WholeBatches):
    """One queue, with batches of a fixed size."""

    def __init__(self, requests: Requests, model: LatencyModel, readings: ModelOptions) -> None:
        super().__init__(requests, model, readings)
        self._size = readings.static_batch
        """Number of requests in a full batch."""
        self._waits_for_full = readings.partial == "wait"
        """Whether only full batches are formed, except at the end."""

    def on_close(self, now_ns: int) -> None:
        """Allow a final batch that is not full."""
        self._waits_for_full = False

    def form_work(self, now_ns: int) -> Batch | None:
        waiting = len(self._queues[0])
        if not waiting or (self._waits_for_full and waiting < self._size):
            return None
        return self._batch_former.make_batch(self._queues[0], self._size)


class DynamicNoBins(_WholeBatches):
    """One queue; the estimated memory and the token SLA limit the batches (multi-bin paper, 5.3)."""

    def __init__(
        self, requests: Requests, model: LatencyModel, readings: ModelOptions, limits: Sequence[int] = ()
    ) -> None:
        """`limits`: maximum batch size of each queue; empty: one queue with `b_max`. Each queue has its own
        controller, unless `readings.controllers` is global."""
        self.limits = list(limits) or [readings.b_max]
        """Largest batch size of each queue."""
        super().__init__(requests, model, readings, len(self.limits))
        self._candidates = readings.candidates
        """Largest number of requests that are considered for a batch."""
        if readings.controllers == "global":
            self._sizes = [BatchSize(model, readings, max(self.limits))] * len(self.limits)
            """Controller of each queue's batch size."""
        else:
            self._sizes = [BatchSize(model, readings, limit) for limit in self.limits]

    def form_work(self, now_ns: int) -> Batch | None:
        number = self._next_queue()
        if number is None:
            return None
        count = min(self._candidates, self._sizes[number].next_size(), self.limits[number])
        return self._batch_former.make_batch(self._queues[number], count, number)

    def on_done(self, now_ns: int, work: Batch) -> EngineOutput:
        members, size = work.members, len(work.members)
        inputs, outputs = self._requests.input, self._requests.output
        input_mean = sum([inputs[r] for r in members]) / size
        output_mean = sum([outputs[r] for r in members]) / size
        self._sizes[work.queue].learn(work.step_ns, size, input_mean, output_mean)
        return EngineOutput(finished=members)

    def _next_queue(self) -> int | None:
        return 0 if self._queues[0] else None


class MultiBinDynamic(DynamicNoBins):
    """A queue for each bin of predicted lengths, so that a batch has similar ones (multi-bin paper, 5.4)."""

    def __init__(self, requests: Requests, model: LatencyModel, readings: ModelOptions) -> None:
        self.bins = (
            Bins(readings.bin_edges, below=readings.below_first)
            if readings.bin_edges
            else equal_mass_bins(requests.predicted, readings.bins, readings)
        )
        super().__init__(requests, model, readings, batch_limits(self.bins, readings))
        self._bin_choice = readings.bin_choice
        """Rule by which the next bin is chosen."""
        self._next_bin = 0
        """Bin that is served next, in turn."""

    def _queue_of(self, request: int) -> "deque[int]":
        return self._queues[self.bins.find(self._requests.predicted[request])]

    def _next_queue(self) -> int | None:
        """Return the index of the queue from which the next batch is taken; None: all are empty."""
        queues = self._queues
        filled = [i for i, queue in enumerate(queues) if queue]
        if not filled:
            return None
        if self._bin_choice == "longest-queue":
            return max(filled, key=lambda i: len(queues[i]))
        if self._bin_choice == "oldest-head":
            arrivals = self._requests.arrival_ns
            return min(filled, key=lambda i: (arrivals[queues[i][0]], queues[i][0]))
        number = next((i for i in filled if i >= self._next_bin), filled[0])
        self._next_bin = (number + 1) % len(queues)
        return number
