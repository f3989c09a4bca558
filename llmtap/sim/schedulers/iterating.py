"""Schedulers that compose a new batch at every iteration: continuous batching, chunked prefill and variants.

The engine (`sim/engine.py`) reports arriving requests to them, and requests the next `Iteration` of a free
server (`form_work`). They decide which prompts and which answers an iteration processes; the `Roster`
(`roster.py`) keeps the requests and their KV memory. `OutputDelay` wraps such a scheduler and delays its
tokens. Schedulers of whole batches are in `batching.py`.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from llmtap.sim.engine import EngineOutput, GivenUp, Iterating, Iteration, with_departure_times
from llmtap.sim.model_options import ServingSetup
from llmtap.sim.schedulers.roster import Roster
from llmtap.workload.requests import Requests


class ContinuousBatching:
    """Continuous batching with whole prompts first, like vLLM's scheduler before chunked prefill.

    While a waiting request fits, an iteration processes prompts of up to `tokens_max` tokens and the running
    requests pause (the generation stall of the smooth goodput paper, 3.2). Otherwise all running requests
    make their next token.
    """

    def __init__(self, requests: Requests, setup: ServingSetup, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: waiting requests are served in the order of these values; equal ones
        in order of arrival."""
        self._roster = roster = Roster(requests, setup, ranks)
        self._serving = setup.serving
        self.state = roster.state
        self.on_arrival, self.on_left = roster.on_arrival, roster.on_left
        self.take_given_up = roster.take_given_up

    def on_close(self, now_ns: int) -> None:
        pass

    def form_work(self, now_ns: int) -> Iteration | None:
        roster = self._roster
        roster.begin(now_ns)
        prefill = roster.admit_prompts(self._serving.tokens_max)
        return roster.make_iteration(prefill, () if prefill else roster.take_decode_memory())

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        return self._roster.on_done(now_ns, work)


class ChunkedPrefill(ContinuousBatching):
    """Chunked prefill, as in Sarathi-Serve: running requests never pause.

    Every iteration makes the next token of all running requests, and processes pieces of prompts until the
    iteration has `chunk` tokens in total (smooth goodput paper, 3.2).
    """

    _partial_request: int | None = None
    """Request whose prompt is partly processed; at most one, since pieces are assigned in order."""

    def form_work(self, now_ns: int) -> Iteration | None:
        roster = self._roster
        roster.begin(now_ns)
        decode = roster.take_decode_memory()
        room = self._serving.chunk - len(decode)
        pieces: list[tuple[int, int]] = []
        # Continue the prompt that was begun. `rest` is 0 if the request has left, or was preempted by
        # `take_decode_memory`.
        if (
            self._partial_request is not None
            and (rest := roster.prompt_tokens_left(self._partial_request))
            and room > 0
        ):
            pieces.append((self._partial_request, min(rest, room)))
            room -= rest
        while room > 0 and (admitted := roster.admit_next()) is not None:
            request, rest = admitted
            pieces.append((request, min(rest, room)))
            room -= rest
        if pieces:
            self._partial_request = pieces[-1][0]
        return roster.make_iteration(pieces, decode)


class DecodePrepone(ContinuousBatching):
    """Continuous batching that makes `prepone` tokens before each prefill, and releases them during the
    prefill.

    These tokens leave at equal distances until the first token after the prefill, but not after the prompts
    are complete (smooth goodput paper, 3.3). Requests that arrive after the prefill was planned wait for the
    next one. If a request leaves or is late, the distances are not exactly equal.
    """

    def __init__(self, requests: Requests, setup: ServingSetup) -> None:
        super().__init__(requests, setup)
        self._tokens_ahead = setup.serving.prepone
        self._prompts: list[tuple[int, int]] = []
        self._made_tokens = 0
        self._whole_ns = self._next_ns = 0
        """`_whole_ns`: time at which the prompts will be complete; `_next_ns`: time of the first token after
        that."""
        self._all_left_ns = 0
        """Departure time of the newest token of each running request, except for requests in `_left_ns`."""
        self._left_ns: dict[int, int] = {}
        self._from_ns: dict[int, int] = {}
        """Departure time of the newest token of each running request when the prefill was planned."""

    def form_work(self, now_ns: int) -> Iteration | None:
        roster = self._roster
        roster.begin(now_ns)
        if not all(roster.prompt_tokens_left(request) for request, _ in self._prompts):
            # A request of the planned prefill has left, or was given up as late: plan the prefill again.
            roster.put_back([request for request, _ in self._prompts if roster.prompt_tokens_left(request)])
            self._prompts = []
        if not self._prompts:
            self._made_tokens = 0
            self._prompts = roster.admit_prompts(self._serving.tokens_max, steps=self._tokens_ahead)
            if self._prompts:
                whole_ns, next_ns = roster.forecast(self._tokens_ahead, self._prompts)
                self._whole_ns, self._next_ns = now_ns + whole_ns, now_ns + next_ns
                self._from_ns = {r: self._left_ns.get(r, self._all_left_ns) for r in roster.running}
        if self._prompts and (self._made_tokens >= self._tokens_ahead or not roster.running):
            prompts, self._prompts = self._prompts, []
            return roster.make_iteration(prompts)
        return roster.make_iteration((), roster.take_decode_memory())

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        output = self._roster.on_done(now_ns, work)
        if work.prefill:
            self._left_ns.update(dict.fromkeys(output.tokens, now_ns))
            return output
        if self._prompts:
            due_ns = self._departure_times(now_ns, output.tokens)
            self._left_ns.update(due_ns)
        else:
            due_ns = {request: t for request, t in self._left_ns.items() if t > now_ns}
            self._all_left_ns, self._left_ns = now_ns, due_ns
            if not due_ns:
                return output
        self._roster.on_delay(due_ns)
        return with_departure_times(output, [due_ns.get(request, now_ns) for request in output.tokens])

    def _departure_times(self, now_ns: int, requests: Sequence[int]) -> dict[int, int]:
        """Return the departure times of the tokens that were just made ahead."""
        self._made_tokens += 1
        gaps, due_ns = self._tokens_ahead + 1, {}
        for request in requests:
            from_ns = self._from_ns.get(request, now_ns)
            even_ns = from_ns + (self._next_ns - from_ns) * self._made_tokens // gaps
            due_ns[request] = max(now_ns, from_ns, min(even_ns, self._whole_ns))
        return due_ns


class OutputDelay:
    """Wraps a scheduler and delays its tokens (smooth goodput paper, 3.4).

    A token leaves at least p after the token before it: q_1 = t_1, q_i = max(t_i, q_(i-1) + p). t_i is the
    time at which the scheduler releases token i, q_i its departure time after the delay. Lateness is judged
    by t.
    """

    def __init__(self, scheduler: Iterating, gap_ns: int) -> None:
        self._scheduler = scheduler
        self._gap_ns = gap_ns
        self._next_ns: dict[int, int] = {}
        """Earliest departure time of the next token of each open request."""
        self.state = scheduler.state
        self.on_arrival = scheduler.on_arrival
        self.on_close = scheduler.on_close
        self.form_work = scheduler.form_work

    def on_done(self, now_ns: int, work: Any) -> EngineOutput:
        output = self._scheduler.on_done(now_ns, work)
        next_ns, leaving_ns = self._next_ns, []
        wanted_ns = repeat(now_ns) if output.due_ns is None else output.due_ns
        for request, due_ns in zip(output.tokens, wanted_ns, strict=False):
            leaves_ns = max(due_ns, next_ns.get(request, due_ns))
            next_ns[request] = leaves_ns + self._gap_ns
            leaving_ns.append(leaves_ns)
        for request in output.finished:
            next_ns.pop(request, None)
        return with_departure_times(output, leaving_ns)

    def on_left(self, now_ns: int, request: int) -> None:
        self._next_ns.pop(request, None)
        self._scheduler.on_left(now_ns, request)

    def take_given_up(self) -> Mapping[int, GivenUp]:
        requests = self._scheduler.take_given_up()
        for request in requests:
            self._next_ns.pop(request, None)
        return requests
