"""Whole batches: what the schedulers of seed 004 hand to a server, and how large they make them.

A batch starts together and ends together, when its longest request does.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Final

from llmtap.sim.latency import LatencyModel
from llmtap.sim.model_options import ModelOptions
from llmtap.workload.requests import Requests

__all__ = ["Batch", "BatchSize", "Former"]

_STEP: Final = 4
"""alpha of Algorithm 2: by how much the interval is moved."""
_CORRECTION: Final = 2
"""delta of Algorithm 2."""
_WEIGHT: Final = 0.2
"""Of the newest value in a moving average (5.3)."""
_BUFFER: Final = 0.1
"""Share of the token capacity that is kept free (Algorithm 1)."""
_WARM_UP: Final = 3


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are served together."""

    members: Sequence[int]
    duration_ns: int
    first_ns: int
    """From its start to the first token of each request: alpha (seed 004, 4.3)."""
    step_ns: float
    """Between two tokens of it."""
    queue: int = 0
    """Which of the scheduler's queues it is from."""

    def token_times(self, start_ns: int, tokens: int) -> range:
        """When a member's tokens are made, in a batch that began at `start_ns`.

        The seed says it in 4.3: the first after alpha, the others beta h(b) apart. That the batch may go on
        much longer (its length is that of its longest request, prompt included) is the seed's, too: all of
        its requests are complete when it ends. The step is rounded to whole ns.
        """
        first_ns = start_ns + self.first_ns
        step_ns = max(1, round(self.step_ns))
        return range(first_ns, first_ns + tokens * step_ns, step_ns)


class Former:
    """Makes batches of a queue's oldest requests."""

    def __init__(self, requests: Requests, model: LatencyModel, readings: ModelOptions) -> None:
        self._requests = requests
        self._model = model
        self._whole = readings.length == "prompt+output"
        self._kv_tokens = readings.safe_gb / readings.kv_gb_per_token
        self._checked = readings.memory_check == "hard"
        self._steps_ns = [0.0] + [model.step_ns(b) for b in range(1, readings.b_max + 1)]

    def take(self, queue: "deque[int]", count: int, number: int = 0) -> Batch:
        """A batch of the first `count` of a queue, or of all where it has fewer."""
        members = [queue.popleft() for _ in range(min(count, len(queue)))]
        given, made = self._requests.input, self._requests.output
        if self._checked:
            tokens = sum(given[r] + made[r] for r in members)
            # One stays, however large: it would never be served otherwise.
            while tokens > self._kv_tokens and len(members) > 1:
                last = members.pop()
                tokens -= given[last] + made[last]
                queue.appendleft(last)
        size = len(members)
        length = max([given[r] + made[r] for r in members] if self._whole else [made[r] for r in members])
        step_ns = self._steps_ns[size] if size < len(self._steps_ns) else self._model.step_ns(size)
        first_ns = round(self._model.alpha_ns)
        return Batch(members, round(self._model.alpha_ns + length * step_ns), first_ns, step_ns, number)


class BatchSize:
    """How large a queue's next batch may be: by memory (Algorithm 1) and by the token SLA (Algorithm 2)."""

    def __init__(self, model: LatencyModel, readings: ModelOptions, limit: int) -> None:
        self._readings = readings
        self._limit = limit
        b_max = limit if readings.controller_limit == "bin" else readings.b_max
        self._b_max = b_max
        self.low: float = 1
        self.high: float = b_max
        self.b_avg: float | None = {"middle": (1 + b_max) // 2, "one": 1, "first-batch": None}[
            readings.b_start
        ]
        self.tau_ns = model.beta_ns if readings.tau_start == "beta" else 0.0
        self._inputs, self._outputs = 300.0, 200.0
        self._updates = 0
        tokens = readings.free_gb / readings.kv_gb_per_token
        self._tokens = tokens - _BUFFER * tokens
        self._per_batch = readings.sla_step == "batch"
        self._too_slow_ns = readings.token_sla + readings.eps
        self._too_quick_ns = readings.token_sla - readings.eps
        self._half_band = (_STEP if readings.band == "alpha" else _CORRECTION) / 2
        self._guarded = readings.guards == "authors"

    def next(self) -> int:
        """The size for a batch that is formed now."""
        if self._per_batch:
            self._move()
        b_sla = floor((self.low + self.high) / 2)
        return max(1, min(self.by_memory(), b_sla, self._limit))

    def by_memory(self) -> int:
        """b_mem."""
        if not self._updates and self._readings.lengths_start == "limit":
            return self._limit
        expected = self._inputs + self._outputs
        fits = self._tokens / expected if expected else self._limit
        return max(1, min(self._limit, int(fits)))

    def saw(self, step_ns: float, size: int, inputs: float, outputs: float) -> None:
        """A batch of this size is done; its requests had so many tokens on average."""
        self.tau_ns = _WEIGHT * step_ns + (1 - _WEIGHT) * self.tau_ns
        self.b_avg = size if self.b_avg is None else _WEIGHT * size + (1 - _WEIGHT) * self.b_avg
        self._inputs = _WEIGHT * inputs + (1 - _WEIGHT) * self._inputs
        self._outputs = _WEIGHT * outputs + (1 - _WEIGHT) * self._outputs
        self._updates += 1
        if not self._per_batch:
            self._move()

    def _move(self) -> None:
        if self.b_avg is None or (self._guarded and self._updates < _WARM_UP):
            return
        b_avg = int(self.b_avg) if self._guarded else self.b_avg
        low, high = self.low, self.high
        if self.tau_ns > self._too_slow_ns:
            self.high = max(b_avg, low + _STEP)
            self.low = max(low - _CORRECTION, 1)
            if self._guarded:
                self.high = min(high, self.high)
        elif self.tau_ns < self._too_quick_ns:
            self.low = min(b_avg, high - _STEP)
            self.high = min(high + _CORRECTION, self._b_max)
            if self._guarded:
                self.low = max(low, self.low)
        else:
            self.high = min(b_avg + self._half_band, self._b_max)
            self.low = max(b_avg - self._half_band, 1)
        if self._guarded:
            self.low = min(max(1, self.low), self.high)
