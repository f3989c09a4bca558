"""The load of one step: a plan of requests, and how it is sent."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

from llmtap.load.replay.plan import ReplayPlan, ReplayQuestion, make_plan
from llmtap.units import NS_PER_S, Duration

__all__ = ["Load", "closed_load", "open_load"]

SPARE_SHARE = 1.25
"""A Poisson process may have more arrivals in a time than its rate says; so many more are drawn."""
SPARE = 50


@dataclass(slots=True, kw_only=True)
class Load:
    """A plan, and how it is sent."""

    plan: ReplayPlan
    closed: int | None = None
    """So many at a time; None: at the plan's own arrivals (open loop)."""
    rate_rps: float | None = None
    """What the plan's arrivals were made at."""
    duration_ns: int | None = None
    """Nothing is sent after so long; None: until the plan is over."""
    class_of: Callable[[int], str | None] = lambda row: None
    """The class of each row, where requests have classes."""
    about: dict[str, object] = field(default_factory=dict)
    """More that makes it what it is, for who reads the results."""

    def fingerprint(self) -> str:
        """Equal loads have equal ones: what is asked, when, and how it is sent."""
        requests = self.plan.requests
        digest = hashlib.sha256()
        for column in (requests.arrival_ns, requests.input, requests.output, requests.after):
            digest.update(column.tobytes())
            digest.update(b"|")
        digest.update(repr((self.closed, self.duration_ns, self.plan.describe(), self.about)).encode())
        return digest.hexdigest()[:16]


def open_load(
    workload: str,
    *,
    rate_rps: float,
    seed: int,
    requests: int | None = None,
    duration_s: float | None = None,
    arrivals: str = "poisson",
    tokenizer: str | None = None,
    chat: bool = True,
    output_tokens: int | None = None,
) -> Load:
    """A workload in an open loop: so many requests, or for so long (IETF 4.2.3).

    `output_tokens` is what every answer is to have, in place of the workload's own lengths.
    """
    count = requests
    if count is None:
        assert duration_s is not None
        count = ceil(rate_rps * duration_s * SPARE_SHARE) + SPARE
    plan = make_plan(
        ReplayQuestion(
            source=workload, requests=count, rate_rps=rate_rps, arrivals=arrivals, seed=seed,
            tokenizer=tokenizer, chat=chat,
        )
    )  # fmt: skip
    _fix_output(plan, output_tokens)
    duration_ns = None if duration_s is None else Duration(round(duration_s * NS_PER_S))
    return Load(plan=plan, rate_rps=rate_rps, duration_ns=duration_ns)


def closed_load(
    workload: str,
    *,
    slots: int,
    seed: int,
    requests: int,
    duration_s: float | None = None,
    tokenizer: str | None = None,
    chat: bool = True,
    output_tokens: int | None = None,
) -> Load:
    """A workload in a closed loop of so many slots (IETF 4.2.4); `requests` at most."""
    plan = make_plan(
        ReplayQuestion(
            source=workload, requests=requests, closed=True, seed=seed, tokenizer=tokenizer, chat=chat
        )
    )
    _fix_output(plan, output_tokens)
    duration_ns = None if duration_s is None else Duration(round(duration_s * NS_PER_S))
    return Load(plan=plan, closed=slots, duration_ns=duration_ns)


def _fix_output(plan: ReplayPlan, tokens: int | None) -> None:
    if tokens is None:
        return
    output: Sequence[int] = plan.requests.output
    for row in range(len(output)):
        plan.requests.output[row] = tokens
