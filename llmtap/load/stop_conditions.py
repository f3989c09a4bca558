"""Conditions that end a load early: too many failures, and a queue of the server that grows without end.

`parse_stop_when` reads `--stop-when "error_rate>10% saturated"`. The share of failures is judged by each
sending process (`LoadRun`), the queue by the parent with `QueueGrowth`, from the counts that all processes
report.

The queue is the number of requests that wait for their first token. In every load it can grow for a while.
Therefore `QueueGrowth` compares its length in turns: a turn ends when all requests that waited at its start
have their first token. If the queue is longer at the end of each of `TURNS` turns, during `GROWS_NS`, and by
more than chance explains, it grows without end.
"""

from math import sqrt
from typing import Final, NamedTuple

import msgspec

from llmtap.errors import ConfigError
from llmtap.gates.requirements import parse_conditions
from llmtap.units import NS_PER_S

SATURATED: Final = "saturated"
EXAMPLE: Final = "error_rate>10% saturated"
PLACE: Final = "--stop-when"
QUEUE_MIN: Final = 10
"""Minimum length of a queue whose growth is judged."""
TURNS: Final = 2
"""Minimum number of consecutive turns in which the queue must grow."""
GROWS_NS: Final = 30 * NS_PER_S
"""Minimum time during which the queue must grow: longer than a burst of most loads."""
DEVIATIONS: Final = 5.0
"""Growth by more standard deviations (of independent arrivals and first tokens) is not chance."""


class StopConditions(msgspec.Struct, frozen=True):
    """Conditions under which a load ends early."""

    error_rate: float | None = None
    """The load ends if the share of failures among the latest answers is above this value; None: never."""
    saturated: bool = False
    """Whether the load ends if the server's queue grows without end."""


def parse_stop_when(text: str) -> StopConditions:
    """Parse conditions, separated by blanks or commas. Raises ConfigError."""
    words = text.replace(",", " ").split()
    rest = " ".join(word for word in words if word != SATURATED)
    rate: float | None = None
    for condition in parse_conditions([rest], PLACE):
        if condition.figure.name != "error_rate" or condition.operator != ">" or rate is not None:
            problem = f"expected error_rate>SHARE once, {SATURATED}, or both; got {condition.text!r}"
            raise ConfigError(PLACE, problem, f"such as {EXAMPLE!r}")
        if condition.bound >= 1:
            problem = f"{condition.text!r} is never met: an error rate is at most 100%"
            raise ConfigError(PLACE, problem, "use a share below 100%")
        rate = condition.bound
    if not words:
        raise ConfigError(PLACE, f"expected at least one condition, got {text!r}", f"such as {EXAMPLE!r}")
    return StopConditions(rate, SATURATED in words)


class QueueTurn(NamedTuple):
    """Counts at the end of a turn: requests `sent`, `served` with a first token, and waiting in `queue`."""

    t_ns: int
    sent: int
    """Number of requests sent."""
    served: int
    """Number of requests with a first token."""
    queue: int
    """Number of requests that wait for their first token."""


class QueueGrowth:
    """Detects a queue that grows without end, from counts that are added in the order of time."""

    def __init__(self) -> None:
        self._first_turn: QueueTurn | None = None
        """Turn at which the growth began."""
        self._latest_turn: QueueTurn | None = None
        """Counts at the end of the latest turn; None: the queue does not grow."""
        self._turn_count = 0
        """Number of turns since `_first_turn`."""

    def add(self, t_ns: int, sent: int, waiting: int) -> str | None:
        """Return the reason to stop, or None.

        `sent`: number of requests so far. `waiting`: number of these that wait for their first token.
        """
        now = QueueTurn(t_ns, sent, sent - waiting, waiting)
        if self._first_turn is None or self._latest_turn is None:
            self._begin(now)
            return None
        if now.served >= self._latest_turn.served + self._latest_turn.queue:
            if now.queue <= self._latest_turn.queue:
                self._begin(now)
                return None
            self._latest_turn, self._turn_count = now, self._turn_count + 1
        first = self._first_turn
        if self._turn_count < TURNS or t_ns - first.t_ns < GROWS_NS or now.queue < self._latest_turn.queue:
            return None
        chance = sqrt((sent - first.sent) + (now.served - first.served))
        if now.queue - first.queue <= DEVIATIONS * chance:
            return None
        return (
            f"the queue of the server grew without end: {first.queue:,} requests waited for their first"
            f" token, and {(t_ns - first.t_ns) // NS_PER_S:,} s later {now.queue:,}"
        )

    def _begin(self, now: QueueTurn) -> None:
        """Begin to watch the queue at this turn, unless it is short."""
        self._first_turn = self._latest_turn = now if now.queue >= QUEUE_MIN else None
        self._turn_count = 0
