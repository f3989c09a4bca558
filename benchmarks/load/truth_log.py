"""Log of the benchmark server: the true times that the reports of the tools are compared with.

`sse_server --schedule-log` writes a line for each event that was given to the kernel: request_id, seq, t_ns
(sent), due_ns, arrival_ns. The first event is due TTFT after the request was read, which gives that time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cases import TTFT_MS, Case


@dataclass(frozen=True, slots=True)
class Log:
    """Requests in the order in which the server had read them; ns of CLOCK_MONOTONIC."""

    read_ns: list[int]
    sent_ns: list[list[int]]  # of each, its token events; usage is left out

    @property
    def begin_ns(self) -> int:
        return self.read_ns[0]

    @property
    def end_ns(self) -> int:
        return max(stamps[-1] for stamps in self.sent_ns)


def read_log(path: Path, case: Case) -> Log:
    """Raises ValueError where the log has no request."""
    sent: dict[str, list[int]] = {}
    read: dict[str, int] = {}
    with path.open() as lines:
        for request, seq, t_ns, due_ns, _ in list(csv.reader(lines))[1:]:
            if seq == "0":
                read[request] = int(due_ns) - TTFT_MS * 1_000_000
            if int(seq) < case.events:
                sent.setdefault(request, []).append(int(t_ns))
    if not read:
        raise ValueError("the server has had no request")
    order = sorted(read, key=read.__getitem__)
    return Log([read[name] for name in order], [sent[name] for name in order])


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def truth(log: Log) -> dict[str, dict[str, float]]:
    """TTFT (first send - request read) and the gaps between events, all pooled, in ms."""
    ttft = [stamps[0] - read for read, stamps in zip(log.read_ns, log.sent_ns, strict=True)]
    gaps = [b - a for stamps in log.sent_ns for a, b in pairwise(stamps)]
    return {"ttft_ms": _in_ms(ttft), "itl_ms": _in_ms(gaps)}


def _in_ms(values: list[int]) -> dict[str, float]:
    return {
        "mean": sum(values) / len(values) / 1e6,
        "p50": quantile(values, 0.50) / 1e6,
        "p99": quantile(values, 0.99) / 1e6,
    }
