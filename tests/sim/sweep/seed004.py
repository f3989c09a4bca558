"""Seed 004's algorithms 1 to 5 again, as they stand there: a heap of events, seconds as doubles, objects.

An oracle for `llmtap/sim`: slow, plain, and of the default readings only.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ALPHA, BETA, GAMMA = 0.059653, 0.005742, 0.316
D_SLA, B_MIN, B_MAX, EMA = 0.010, 1, 128, 0.2
KV_GB = 1.875e-4


def overhead(b: int) -> float:
    return 1 + GAMMA * (b - 1) / b


def quantile(values: list[int], q: float) -> float:
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (rank - low)) + ordered[high] * (rank - low)


@dataclass
class Controller:
    eps: float
    b_max: int
    b_low: float = B_MIN
    b_high: float = B_MAX
    tau_avg: float = 0.0
    b_avg: float = (1 + B_MAX) // 2
    prompt: float = 300.0
    output: float = 200.0

    def b_mem(self) -> int:
        eta = (12.0 - 4.0) / KV_GB
        return max(B_MIN, min(self.b_max, math.floor((eta - 0.1 * eta) / (self.prompt + self.output))))

    def b_sla(self) -> int:
        alpha, delta = 4, 2
        if self.tau_avg > D_SLA + self.eps:
            self.b_high, self.b_low = max(self.b_avg, self.b_low + alpha), max(self.b_low - delta, B_MIN)
        elif self.tau_avg < D_SLA - self.eps:
            self.b_low, self.b_high = min(self.b_avg, self.b_high - alpha), min(self.b_high + delta, B_MAX)
        else:
            self.b_high = min(self.b_avg + alpha / 2, B_MAX)
            self.b_low = max(self.b_avg - alpha / 2, B_MIN)
        return math.floor((self.b_low + self.b_high) / 2)

    def update(self, batch: "list[Request]") -> None:
        n = len(batch)
        self.tau_avg = EMA * BETA * overhead(n) + (1 - EMA) * self.tau_avg
        self.b_avg = EMA * n + (1 - EMA) * self.b_avg
        self.prompt = EMA * sum(r.prompt for r in batch) / n + (1 - EMA) * self.prompt
        self.output = EMA * sum(r.output for r in batch) / n + (1 - EMA) * self.output


@dataclass
class Request:
    arrival: float
    prompt: int
    output: int
    start: float = -1.0
    end: float = -1.0
    size: int = 0


@dataclass
class Bin:
    low: int
    high: float
    controller: Controller
    queue: list[Request] = field(default_factory=list)


def simulate(
    scheduler: str, rows: Sequence[tuple[float, int, int]], eps: float, k: int
) -> list[tuple[float, float, int]]:
    """Of each request its start, its end and the size of its batch."""
    requests = [Request(*row) for row in rows]
    bins = _bins(requests, eps, k) if scheduler == "multi_bin_dynamic" else None
    bins = bins or [Bin(0, math.inf, Controller(eps, B_MAX))]
    events = [(r.arrival, 0, i) for i, r in enumerate(requests)]
    heapq.heapify(events)
    running: list[Request] | None = None
    serving, turn = bins[0], 0
    while events:
        now, kind, i = heapq.heappop(events)
        if kind == 0:
            wanted = requests[i].output
            place = next((b for b in bins if b.low <= wanted < b.high), bins[-1])
            place.queue.append(requests[i])
        else:
            assert running is not None
            serving.controller.update(running)
            running = None
        if running is not None:
            continue
        order = [(turn + j) % len(bins) for j in range(len(bins))]
        chosen = next((j for j in order if bins[j].queue), None)
        if chosen is None:
            continue
        serving, turn = bins[chosen], (chosen + 1) % len(bins)
        candidates = serving.queue[:128]
        target = 8
        if scheduler != "static_fifo":
            target = max(1, min(serving.controller.b_mem(), serving.controller.b_sla()))
        running = candidates[:target]
        del serving.queue[: len(running)]
        longest = max(r.prompt + r.output for r in running)
        end = now + ALPHA + BETA * longest * overhead(len(running))
        for r in running:
            r.start, r.end, r.size = now, end, len(running)
        heapq.heappush(events, (end, 1, -1))
    return [(r.start, r.end, r.size) for r in requests]


def _bins(requests: list[Request], eps: float, k: int) -> list[Bin]:
    points = [quantile([r.output for r in requests], i / k) for i in range(k + 1)]
    bins = []
    for i in range(k):
        low, high = math.floor(points[i]), math.floor(points[i + 1]) if i < k - 1 else math.inf
        tokens = low + (4_096 if high == math.inf else high)
        fits = math.floor(7.0 / (tokens * KV_GB)) if tokens else B_MAX
        bins.append(Bin(low, high, Controller(eps, max(1, min(B_MAX, fits)))))
    return bins
