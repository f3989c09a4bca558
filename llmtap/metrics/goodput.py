"""How many exchanges met their objectives: a tally to add to and to merge.

Each exchange is judged by the objectives that it was added under; the tally keeps one count for each set
of them, so that tenants with different bounds can be summed without losing what was asked of whom.

Source: seed 002 (requests per second that met every bound), seed 001 eq. 5 (the same in tokens).
"""

from collections import Counter
from dataclasses import dataclass, field

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import Measured
from llmtap.metrics.objectives import Objectives

__all__ = ["REQUESTED", "Goodput", "GoodputCount", "judge"]

REQUESTED = "as requested"
"""The name of objectives that only the requests themselves brought, by header."""
_NOTHING_ASKED = Objectives(())


def judge(objectives: Objectives | None, m: Measured, x: Exchange) -> tuple[Objectives, bool] | None:
    """The objectives of this exchange, its own requests in the place of its class's, and whether it met them.

    None when there are none, or when it does not count (`Objectives.meets`).
    """
    asked = objectives
    if x.slo_ttft_ns is not None or x.slo_tpot_ns is not None:
        asked = (objectives or _NOTHING_ASKED).replaced(ttft=x.slo_ttft_ns, tpot=x.slo_tpot_ns)
    if asked is None:
        return None
    met = asked.meets(m, x)
    return None if met is None else (asked, met)


@dataclass(slots=True)
class GoodputCount:
    """Under one set of objectives."""

    counted: int = 0
    met: int = 0
    tokens: int = 0
    """Output tokens of all that counted, and below of those that met their objectives."""
    good_tokens: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    """By bound, how often it was broken; `ended` where the exchange was bad by how it ended."""

    def merge(self, other: "GoodputCount") -> None:
        self.counted += other.counted
        self.met += other.met
        self.tokens += other.tokens
        self.good_tokens += other.good_tokens
        self.broken.update(other.broken)

    def to_dict(self, seconds: float) -> dict[str, object]:
        """Public JSON; rates over `seconds`."""
        return {
            "met": self.met,
            "counted": self.counted,
            "attainment": self.met / self.counted if self.counted else None,
            "requests_per_second": self.met / seconds if seconds > 0 else None,
            "tokens_per_second": self.good_tokens / seconds if seconds > 0 else None,
            "token_attainment": self.good_tokens / self.tokens if self.tokens else None,
            "broken": dict(sorted(self.broken.items())),
        }


class Goodput:
    """Counts by the objectives' canonical text."""

    __slots__ = ("by_objectives",)

    def __init__(self) -> None:
        self.by_objectives: dict[str, GoodputCount] = {}

    def add(self, objectives: Objectives | None, m: Measured, x: Exchange) -> bool | None:
        """Judges and counts one exchange; says whether it met its objectives, None if it does not count."""
        verdict = judge(objectives, m, x)
        if verdict is None:
            return None
        asked, met = verdict
        # What a header asked for is not part of the name: clients could make names without end.
        name = REQUESTED if objectives is None else objectives.text
        count = self.by_objectives.get(name)
        if count is None:
            count = self.by_objectives[name] = GoodputCount()
        tokens = x.tokens.output or 0
        count.counted += 1
        count.tokens += tokens
        if met:
            count.met += 1
            count.good_tokens += tokens
        else:
            count.broken.update(asked.broken(m, x) or ("ended",))
        return met

    def merge(self, other: "Goodput") -> None:
        """Adds all that `other` holds; `other` stays as it is."""
        for name, count in other.by_objectives.items():
            self.by_objectives.setdefault(name, GoodputCount()).merge(count)

    def total(self) -> GoodputCount:
        """All objectives together: each exchange by its own."""
        total = GoodputCount()
        for count in self.by_objectives.values():
            total.merge(count)
        return total

    def to_dict(self, seconds: float) -> dict[str, object] | None:
        """Public JSON, None where there were no objectives: the total, and under `by` each set of them."""
        counts = self.by_objectives
        if not counts:
            return None
        return {
            "objectives": next(iter(counts)) if len(counts) == 1 else "several, see by",
            **self.total().to_dict(seconds),
            "by": {name: count.to_dict(seconds) for name, count in sorted(counts.items())},
        }
