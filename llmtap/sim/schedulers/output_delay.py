"""A buffer between an engine and its clients that holds tokens back: seed 001's output delay (3.4).

A token leaves no sooner than some time p after the one before it: q_1 = t_1, q_i = max(t_i, q_(i-1) + p),
where t is when tokens are made and q when they leave. The engine does not know of the buffer behind it: it
judges who is late by when it made the tokens.
"""

from collections.abc import Mapping
from itertools import repeat
from typing import Any

from llmtap.sim.engine import GivenUp, Made
from llmtap.sim.schedulers.iterations import Iterating, made_later

__all__ = ["OutputDelay"]


class OutputDelay:
    """Any scheduler whose tokens leave one by one, with this buffer behind it."""

    def __init__(self, scheduler: Iterating, gap_ns: int) -> None:
        """`gap_ns`: p."""
        self._scheduler = scheduler
        self._gap_ns = gap_ns
        self._next_ns: dict[int, int] = {}
        """Of requests under way: when the next token may leave."""
        self.state = scheduler.state

    def arrived(self, now_ns: int, request: int) -> None:
        """It is the scheduler's."""
        self._scheduler.arrived(now_ns, request)

    def closed(self, now_ns: int) -> None:
        """The scheduler may want to know."""
        self._scheduler.closed(now_ns)

    def form(self, now_ns: int) -> Any | None:
        """What the scheduler says."""
        return self._scheduler.form(now_ns)

    def done(self, now_ns: int, work: Any) -> Made:
        """The same tokens, some of them later."""
        made = self._scheduler.done(now_ns, work)
        next_ns, gap_ns = self._next_ns, self._gap_ns
        leaving_ns = []
        wanted_ns = repeat(now_ns) if made.due_ns is None else made.due_ns
        for request, due_ns in zip(made.tokens, wanted_ns, strict=False):
            may_ns = next_ns.get(request, due_ns)
            leaves_ns = may_ns if may_ns > due_ns else due_ns
            next_ns[request] = leaves_ns + gap_ns
            leaving_ns.append(leaves_ns)
        for request in made.finished:
            next_ns.pop(request, None)
        return made_later(made, leaving_ns)

    def left(self, now_ns: int, request: int) -> None:
        """What it would still get is nobody's."""
        self._next_ns.pop(request, None)
        self._scheduler.left(now_ns, request)

    def given_up(self) -> Mapping[int, GivenUp]:
        """By the scheduler."""
        requests = self._scheduler.given_up()
        for request in requests:
            self._next_ns.pop(request, None)
        return requests
