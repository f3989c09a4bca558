"""An iterating scheduler that does as it is told: one request at a time, and some of them not to the end.

Taking in a prompt is an iteration of 2 s, which makes the first token; each other token is one of 1 s.
"""

from collections import deque
from collections.abc import Mapping

from llmtap.sim.engine import EngineOutput, GivenUp, Iteration, IterationState
from llmtap.workload.requests import Requests

S = 1_000_000_000


class Scripted:
    """`tokens_max`: by request, how many tokens it makes before it is given up; 0: it is turned away."""

    def __init__(self, requests: Requests, tokens_max: Mapping[int, int]) -> None:
        self.state = IterationState()
        self._outputs = requests.output
        self._max = tokens_max
        self._waiting: deque[int] = deque()
        self._made: dict[int, int] = {}
        self._given_up: dict[int, GivenUp] = {}

    def on_arrival(self, now_ns: int, request: int) -> None:
        if self._max.get(request) == 0:
            self._given_up[request] = GivenUp.TOO_LARGE
        else:
            self._waiting.append(request)

    def on_close(self, now_ns: int) -> None:
        pass

    def on_left(self, now_ns: int, request: int) -> None:
        self._waiting.remove(request)

    def form_work(self, now_ns: int) -> Iteration | None:
        if not self._waiting:
            return None
        request = self._waiting[0]
        if request not in self._made:
            return Iteration(2 * S, prefill=((request, 1),))
        return Iteration(S, decode=(request,))

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        request = self._waiting[0]
        made = self._made[request] = self._made.get(request, 0) + 1
        if made == self._outputs[request]:
            self._waiting.popleft()
            return EngineOutput((request,), (request,))
        if made == self._max.get(request):
            self._given_up[self._waiting.popleft()] = GivenUp.LATE
            self.state.preemptions += 1
        return EngineOutput((), (request,))

    def take_given_up(self) -> Mapping[int, GivenUp]:
        result, self._given_up = self._given_up, {}
        return result
