"""Where the tokens of an answer come from: a plan that is known when the request is accepted, or an engine.

Both are a `PlanSource`: brought up to a moment, it tells the answer's `Delivery` of all that was made.

A `ResponsePlan` is the due time of each token, in ns from the request's acceptance. A fixed schedule makes
it: token i is due at `ttft + i * itl`, counted from the request and not from the token before, so that
lateness does not add up. An engine has no plan (`live.py`); who asks it for an answer is a `Fed`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, chain, repeat
from typing import Protocol

from llmtap.sim.server.delivery import Delivery
from llmtap.sim.server.live import Live, Ticket
from llmtap.sim.server.options import SimOptions
from llmtap.units import NEVER

__all__ = ["Fed", "FixedSchedule", "PlanSource", "Planned", "PlannedWork", "Planner", "ResponsePlan"]


@dataclass(frozen=True, slots=True)
class PlannedWork:
    """What a planner must know of an answer."""

    prompt_tokens: int
    output_tokens: int
    options: SimOptions
    """With what the request asked for."""


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """When the tokens of one answer are made."""

    due_ns: Iterator[int]
    """From acceptance, never falling, as many as there are tokens or more. Read as the answer goes on."""


class Planner(Protocol):
    """Whoever knows beforehand when tokens are made."""

    def plan(self, work: PlannedWork, chance: random.Random) -> ResponsePlan:
        """The plan of one answer; `chance` is the answer's own, so that it depends on no other."""
        ...


class FixedSchedule:
    """An engine without a queue, as fast for a thousand as for one."""

    def plan(self, work: PlannedWork, chance: random.Random) -> ResponsePlan:
        options = work.options
        ttft_ns = round(options.ttft * _vary(options.spread, chance))
        itl_ns = round(options.itl * _vary(options.spread, chance))
        sigma = options.pacing.jitter
        if not sigma:
            gaps: Iterator[int] = repeat(itl_ns)
        else:
            # The mean of a lognormal is exp(mu + sigma^2 / 2): with this mu it is 1, and no rate changes.
            mu = -sigma * sigma / 2
            gaps = (round(itl_ns * chance.lognormvariate(mu, sigma)) for _ in repeat(None))
        return ResponsePlan(accumulate(chain((ttft_ns,), gaps)))


def _vary(spread: float, chance: random.Random) -> float:
    return 1 + chance.uniform(-spread, spread)


class PlanSource(Protocol):
    """Where the tokens of one answer come from."""

    given_up: bool
    """There will be no more of them."""
    next_ns: int
    """When the next token will be made, as far as that is known and nobody else will tell."""

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompts that a prefix cache had; None where there is none, or it is not known yet."""

    def advance(self, now_ns: int) -> None:
        """Tells the answer's delivery of all that is made until now."""

    def close(self, now_ns: int) -> None:
        """Nobody waits for the rest; called once, at the end."""


class Planned:
    """The tokens of one answer whose times are known."""

    given_up = False
    cached_tokens = None

    def __init__(
        self,
        delivery: Delivery,
        plans: Sequence[tuple[Iterator[int], int]],
        made_ns: Sequence[list[int]],
        begin_ns: int,
        wait_ns: int,
    ) -> None:
        """`plans` has of each choice the times, from `begin_ns`, and how many tokens it has; `made_ns` is
        where they are written down. The engine begins `wait_ns` after that, which is not in them."""
        self._delivery = delivery
        self._made_ns = made_ns
        self._begin_ns = begin_ns + wait_ns
        self._wait_ns = wait_ns
        self._times = [times for times, _ in plans]
        self._left = [tokens for _, tokens in plans]
        self._heads = [(self._begin_ns + next(times), i) for i, (times, tokens) in enumerate(plans) if tokens]
        """A heap: the next token of each choice that has one."""
        heapify(self._heads)
        self.next_ns = self._heads[0][0] if self._heads else NEVER

    def advance(self, now_ns: int) -> None:
        heads, delivery = self._heads, self._delivery
        while heads and heads[0][0] <= now_ns and not delivery.closed:
            at_ns, choice = heads[0]
            self._made_ns[choice].append(at_ns - self._wait_ns)
            delivery.made(choice, at_ns)
            self._left[choice] -= 1
            if self._left[choice]:
                heapreplace(heads, (self._begin_ns + next(self._times[choice]), choice))
            else:
                heappop(heads)
        self.next_ns = heads[0][0] if heads else NEVER

    def close(self, now_ns: int) -> None:
        """Nothing goes on without somebody who asks."""


class Fed:
    """The tokens of one answer as an engine makes them. Calls `on_news` when it has told of some."""

    next_ns = NEVER

    def __init__(self, live: Live, delivery: Delivery, made_ns: Sequence[list[int]]) -> None:
        self._live = live
        self._delivery = delivery
        self._made_ns = made_ns
        self.tickets: Sequence[Ticket] = ()
        """What the engine is asked for."""
        self.given_up = False
        self.turned_away = False
        """It was given up when it came: there was no room to wait."""
        self.on_news: Callable[[], None] = _nobody

    @property
    def cached_tokens(self) -> int | None:
        """Of choices of one prompt, what the first of them found."""
        found = {ticket.prompt: ticket.cached for ticket in reversed(self.tickets)}
        known = [cached for cached in found.values() if cached is not None]
        return sum(known) if known else None

    def ask(self, now_ns: int, arrival_ns: int) -> None:
        """The engine gets it, at once or when the input filter lets it pass."""
        self._live.submit(now_ns, arrival_ns, self.tickets)

    def advance(self, now_ns: int) -> None:
        self._live.advance(now_ns)

    def close(self, now_ns: int) -> None:
        self._live.leave(now_ns, self.tickets)
        self.on_news = _nobody

    # Told by the engine.

    def token(self, choice: int, at_ns: int) -> None:
        self._made_ns[choice].append(at_ns)
        self._delivery.made(choice, at_ns)
        self.on_news()

    def over(self, choice: int, at_ns: int) -> None:
        self._delivery.over(choice, at_ns)
        self.on_news()

    def refused(self, at_ns: int) -> None:
        if not self.given_up:
            self.turned_away = all(ticket.arrival_ns == at_ns for ticket in self.tickets)
        self.given_up = True
        self._delivery.give_up(at_ns)
        self.on_news()


def _nobody() -> None:
    """Nobody listens yet; whoever will looks for himself first."""
