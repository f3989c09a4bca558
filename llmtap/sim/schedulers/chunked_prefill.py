"""An iteration at a time, tokens first: Sarathi-Serve.

Every iteration makes the next token of all that run, and takes in pieces of prompts until it has `chunk`
tokens together. Nobody pauses while a prompt is taken in, and prompts take longer (seed 001, 3.2).
"""

from collections.abc import Mapping

from llmtap.sim.engine import GivenUp, Made
from llmtap.sim.schedulers.iterations import Iteration
from llmtap.sim.schedulers.roster import Roster
from llmtap.sim.serving import ServingSetup
from llmtap.workload.requests import Requests

__all__ = ["ChunkedPrefill"]


class ChunkedPrefill:
    """Decodes, and fills up with prompts: with the one that was begun, then with those that wait."""

    def __init__(self, requests: Requests, setup: ServingSetup) -> None:
        self._roster = Roster(requests, setup)
        self._chunk = setup.serving.chunk
        self.state = self._roster.state
        self._begun: int | None = None
        """Whose prompt is taken in in part. There is at most one: pieces are given out in order."""

    def arrived(self, now_ns: int, request: int) -> None:
        """It waits."""
        self._roster.arrived(now_ns, request)

    def closed(self, now_ns: int) -> None:
        """Nothing here waits for more."""

    def form(self, now_ns: int) -> Iteration | None:
        """A token of each that runs, and pieces of prompts."""
        roster = self._roster
        roster.begin(now_ns)
        decode = roster.grow()
        room = self._chunk - len(decode)
        pieces: list[tuple[int, int]] = []
        # It may have left, or had to give its memory to those that decode.
        if self._begun is not None and (rest := roster.rest(self._begun)) and room > 0:
            pieces.append((self._begun, min(rest, room)))
            room -= rest
        while room > 0 and (one := roster.seat()) is not None:
            request, rest = one
            pieces.append((request, min(rest, room)))
            room -= rest
        if pieces:
            self._begun = pieces[-1][0]
        return roster.iteration(pieces, decode)

    def done(self, now_ns: int, work: Iteration) -> Made:
        """All that it made leaves now."""
        return self._roster.done(now_ns, work)

    def left(self, now_ns: int, request: int) -> None:
        """Its memory is free at once."""
        self._roster.left(request)

    def given_up(self) -> Mapping[int, GivenUp]:
        """Those for whom there never was room, and those that were late."""
        return self._roster.given_up()
