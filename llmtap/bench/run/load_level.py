"""How much load a share of capacity is: what a test takes for capacity where it is told to load by a share.

Capacity is of a workload: the rate that a test of uniform lengths sustains says little of a mix with long
prompts. So the throughput test's result is taken where it is of the same workload, and otherwise capacity is
looked for with the workload itself: closed loops of twice as many requests at a time, until they bring no
more output tokens per second. Of each the first 10 % are dropped, and the end, in which slots fall empty
(IETF seed 000, 5.2.3.2).
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pyarrow.compute as pc

from llmtap.bench.run.loads import Load
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import BASELINE, BenchSession
from llmtap.bench.run.steady import steady_of

__all__ = [
    "WARM_TOKENS",
    "Capacity",
    "LoadLevelSearch",
    "capacity_told",
    "find_capacity",
    "is_long",
    "overload",
]

WARM_TOKENS: Final = 100
"""Of each answer in a warm-up: 100 requests are then the 10,000 tokens that 4.5.1 asks for, too."""
ANSWERS_MIN: Final = 3
GAIN_MIN: Final = 0.05
"""A level that brings less more than this has found the end."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What shares of load are of."""

    rps: float
    tps: float | None
    """Output tokens per second; None where only a rate was given, or answers do not tell."""
    how: str
    """Where it comes from, for the report."""
    saturated: bool = True
    """More load brought no more; False where the search ended at the most it may have in flight."""


class LoadLevelSearch(msgspec.Struct, frozen=True, kw_only=True):
    """How it is looked for."""

    slots_first: int = 8
    slots_max: int = 256
    rounds: int = 6
    """Requests of a level, for each slot."""


def capacity_told(
    session: BenchSession, max_rate: float | None, workload: str | None = None
) -> Capacity | None:
    """As the user gave it, or as the throughput test found it for this workload; None where neither is so.

    `workload` None is one that no other test knows.
    """
    if max_rate is not None:
        return Capacity(rps=max_rate, tps=None, how="given as max_rate")
    if workload is None:
        return None
    found = session.results.read_json("throughput/result.json") or {}
    rps = _at(found, "measurements", "sustainable_load_rps")
    if isinstance(rps, dict):
        rps = rps.get("value")
    same = _at(found, "params", "workload") == workload
    if not same or not isinstance(rps, int | float) or rps <= 0:
        return None
    return Capacity(
        rps=float(rps), tps=None, how="sustainable load of the throughput test, of the same workload"
    )


async def find_capacity(
    session: BenchSession,
    load_of: Callable[[int, int], Load],
    search: LoadLevelSearch,
    *,
    arm: str = BASELINE,
    name: str = "capacity",
    warm_by: Load | None = None,
) -> Capacity:
    """The rate at which closed loops complete requests once more of them at a time bring no more.

    Args:
        load_of: a closed loop of so many slots and requests, with rows of its own for each number of slots.
        arm: whose capacity it is.
        name: of the steps.
        warm_by: as `Session.measure` has it.
    """
    slots = search.slots_first
    best: tuple[float, float | None, float, int] | None = None
    while True:
        session.watcher.left(f"{name}: {slots} requests at a time, {search.slots_max} at most")
        measured = await session.measure(
            f"{name}/{slots:04d}-at-a-time", load_of(slots, search.rounds * slots), arm=arm, warm_by=warm_by
        )
        rps, tps = _rates(measured)
        made = rps if tps is None else tps
        saturated = best is not None and made < best[2] * (1 + GAIN_MIN)
        if best is None or made > best[2]:
            best = rps, tps, made, slots
        if saturated or slots >= search.slots_max:
            break
        slots = min(2 * slots, search.slots_max)
    rps, tps, _, at = best
    more = "more bring no more" if saturated else f"more than {search.slots_max} were not tried"
    return Capacity(rps=rps, tps=tps, how=f"closed loop of {at} at a time: {more}", saturated=saturated)


def _rates(measured: Measurement) -> tuple[float, float | None]:
    """Requests and output tokens per second of a closed loop.

    Where tokens are known, requests are as many as these are answers: at the beginning nothing ends for as
    long as a first answer takes, but it is being made.
    """
    steady = steady_of(measured)
    tps = steady.output_tps
    mean = pc.mean(measured.ended_well()["output_tokens"]).as_py()
    return (tps / mean if tps and mean else steady.completed_rps), tps


def overload(measured: Measurement) -> float | None:
    """Completions by arrivals of an open loop that was above saturation; None where it was not (5.2.3.1).

    Fewer than 90 % complete, and what is in flight grows; a load that is not long enough says nothing.
    """
    steady = steady_of(measured)
    judged = steady.falls_short and steady.queue_grows and is_long(measured)
    return steady.delivered if judged else None


def is_long(measured: Measurement) -> bool:
    """A load lasted for three answers or more: what begins and ends with it is not most of it.

    An answer's time is what it takes when nobody waits: the shortest TTFT, and the median from there on.
    """
    table = measured.ended_well()
    sent_ns = pc.max(measured.table["sent_ns"]).as_py() or 0
    first_ns = pc.min(table["ttft_ns"]).as_py() or 0
    rest_ns = pc.approximate_median(pc.subtract(table["e2e_ns"], table["ttft_ns"])).as_py() or 0.0
    return bool(sent_ns >= ANSWERS_MIN * (first_ns + rest_ns))


def _at(told: Any, *names: str) -> Any:
    for name in names:
        told = told.get(name) if isinstance(told, dict) else None
    return told
