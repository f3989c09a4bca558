"""An iteration at a time, prompts first: as vLLM's scheduler before it took prompts in pieces.

As long as somebody waits for whom there is room, an iteration takes in whole prompts, and those that already
make tokens pause (the generation stall of seed 001, 3.2). Otherwise all that run make their next token.
"""

from collections.abc import Mapping, Sequence

from llmtap.sim.engine import GivenUp, Made
from llmtap.sim.schedulers.iterations import Iteration
from llmtap.sim.schedulers.roster import Roster
from llmtap.sim.serving import ServingSetup
from llmtap.workload.requests import Requests

__all__ = ["ContinuousBatching"]


class ContinuousBatching:
    """Takes in as many prompts as `tokens_max` allows, else decodes."""

    def __init__(self, requests: Requests, setup: ServingSetup, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: who waits is served in their order, and of arrival; None: of arrival alone."""
        self._roster = Roster(requests, setup, ranks)
        self._tokens_max = setup.serving.tokens_max
        self.state = self._roster.state

    def arrived(self, now_ns: int, request: int) -> None:
        """It waits."""
        self._roster.arrived(now_ns, request)

    def closed(self, now_ns: int) -> None:
        """Nothing here waits for more."""

    def form(self, now_ns: int) -> Iteration | None:
        """Prompts, or a token of each that runs."""
        roster = self._roster
        roster.begin(now_ns)
        prefill = roster.prompts(self._tokens_max)
        return roster.iteration(prefill, () if prefill else roster.grow())

    def done(self, now_ns: int, work: Iteration) -> Made:
        """All that it made leaves now."""
        return self._roster.done(now_ns, work)

    def left(self, now_ns: int, request: int) -> None:
        """Its memory is free at once."""
        self._roster.left(request)

    def given_up(self) -> Mapping[int, GivenUp]:
        """Those for whom there never was room, and those that were late."""
        return self._roster.given_up()
