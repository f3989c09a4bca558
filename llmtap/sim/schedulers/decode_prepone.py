"""Continuous batching that makes some tokens ahead of each prefill, and releases them during it (001, 3.3).

When prompts are to be taken in while others run, these first make their next `prepone` tokens, one iteration
each. The tokens leave one by one over the time until the next that is made after the prefill, so that all
gaps up to that one are equal, but none leaves after the prompts are whole. That is no later than if these
prompts had been taken in first; whoever is taken in gets the first token later by these iterations.

The prompts are seated before, so that what follows is known; those that arrive in between wait for the next
prefill. If the time turns out to be another, since somebody left or was late, the gaps are not quite equal.
"""

from collections.abc import Mapping, Sequence

from llmtap.sim.engine import GivenUp, Made
from llmtap.sim.schedulers.iterations import Iteration, made_later
from llmtap.sim.schedulers.roster import Roster
from llmtap.sim.serving import ServingSetup
from llmtap.workload.requests import Requests

__all__ = ["DecodePrepone"]


class DecodePrepone:
    """Decodes before it takes in prompts."""

    def __init__(self, requests: Requests, setup: ServingSetup) -> None:
        self._roster = Roster(requests, setup)
        self._tokens_max = setup.serving.tokens_max
        self._ahead = setup.serving.prepone
        self.state = self._roster.state
        self._prompts: list[tuple[int, int]] = []
        """Seated, and not yet taken in."""
        self._made = 0
        """Tokens made ahead of them."""
        self._whole_ns = self._next_ns = 0
        """When they are to be taken in, and when the next token after that is to be there."""
        self._all_left_ns = 0
        """When the newest token of all that run left, but for those of whom `_left_ns` says it."""
        self._left_ns: dict[int, int] = {}
        self._from_ns: dict[int, int] = {}
        """The same when the first token ahead was begun, of all that ran then."""

    def arrived(self, now_ns: int, request: int) -> None:
        """It waits."""
        self._roster.arrived(now_ns, request)

    def closed(self, now_ns: int) -> None:
        """Nothing here waits for more."""

    def form(self, now_ns: int) -> Iteration | None:
        """A token of each that runs, or prompts if enough of these were made."""
        roster = self._roster
        roster.begin(now_ns)
        if not all(roster.rest(request) for request, _ in self._prompts):
            # Somebody left, or was late: what would be taken in now, and how long it takes, is another thing.
            roster.unseat([request for request, _ in self._prompts if roster.rest(request)])
            self._prompts = []
        if not self._prompts:
            self._made = 0
            self._prompts = roster.prompts(self._tokens_max, steps=self._ahead)
            if self._prompts:
                self._plan(now_ns)
        if self._prompts and (self._made >= self._ahead or not roster.running):
            prompts, self._prompts = self._prompts, []
            return roster.iteration(prompts)
        return roster.iteration((), roster.grow())

    def _plan(self, now_ns: int) -> None:
        whole_ns, next_ns = self._roster.forecast(self._ahead, self._prompts)
        self._whole_ns, self._next_ns = now_ns + whole_ns, now_ns + next_ns
        left_ns = self._left_ns
        self._from_ns = {r: left_ns.get(r, self._all_left_ns) for r in self._roster.running}

    def done(self, now_ns: int, work: Iteration) -> Made:
        """Tokens that were made ahead leave later."""
        made = self._roster.done(now_ns, work)
        if work.prefill:
            self._left_ns.update(dict.fromkeys(made.tokens, now_ns))
            return made
        if self._prompts:
            due_ns = self._spread(now_ns, made.tokens)
            self._left_ns.update(due_ns)
        else:
            due_ns = {request: t for request, t in self._left_ns.items() if t > now_ns}
            self._all_left_ns, self._left_ns = now_ns, due_ns
            if not due_ns:
                return made
        self._roster.delayed(due_ns)
        return made_later(made, [due_ns.get(request, now_ns) for request in made.tokens])

    def _spread(self, now_ns: int, requests: Sequence[int]) -> dict[int, int]:
        """When the token that each of them just made ahead leaves."""
        self._made += 1
        gaps, due_ns = self._ahead + 1, {}
        for request in requests:
            from_ns = self._from_ns.get(request, now_ns)
            even_ns = from_ns + (self._next_ns - from_ns) * self._made // gaps
            due_ns[request] = max(now_ns, from_ns, min(even_ns, self._whole_ns))
        return due_ns

    def left(self, now_ns: int, request: int) -> None:
        """Its memory is free at once."""
        self._roster.left(request)

    def given_up(self) -> Mapping[int, GivenUp]:
        """Those for whom there never was room, and those that were late."""
        return self._roster.given_up()
