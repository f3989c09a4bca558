"""Schedulers that compose a new batch at every iteration: continuous batching, chunked prefill and variants.

The engine (`sim/engine.py`) reports arriving requests to a scheduler, and gets the next `Iteration` for a
free server from `form_work`. The scheduler decides which prompts and which answers an iteration processes;
its `Roster` (`roster.py`) has the requests and their KV memory. `OutputDelay` wraps such a scheduler and
delays its tokens. Schedulers of whole batches are in `batching.py`.
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

    If a waiting request fits into the memory, the next iteration processes only prompts, of up to
    `tokens_max` tokens, and the running requests pause (the generation stall of the smooth goodput paper,
    3.2). Otherwise, all running requests make their next token.
    """

    def __init__(self, requests: Requests, setup: ServingSetup, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: rank of each request; waiting requests are served by rank, then by order of arrival."""
        self._roster = roster = Roster(requests, setup, ranks)
        """Requests and memory of the server, which this class shares with its subclasses."""
        self._serving = setup.serving
        self.state = roster.state
        self.on_arrival, self.on_left = roster.on_arrival, roster.on_left
        self.take_given_up = roster.take_given_up

    def on_close(self, now_ns: int) -> None:
        pass

    def form_work(self, now_ns: int) -> Iteration | None:
        roster = self._roster
        roster.prepare_iteration(now_ns)
        prefill = roster.admit_prompts(self._serving.tokens_max)
        return roster.make_iteration(prefill, () if prefill else roster.take_decode_memory())

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        return self._roster.on_done(now_ns, work)


class ChunkedPrefill(ContinuousBatching):
    """Chunked prefill, as in Sarathi-Serve: running requests never pause.

    Every iteration makes the next token of all running requests, and processes pieces of prompts, until the
    iteration has `chunk` tokens in total (smooth goodput paper, 3.2).
    """

    _partial_request: int | None = None
    """Request whose prompt is partly processed: at most one, because prompts are processed in order."""

    def form_work(self, now_ns: int) -> Iteration | None:
        roster = self._roster
        roster.prepare_iteration(now_ns)
        decode = roster.take_decode_memory()
        tokens_left = self._serving.chunk - len(decode)
        pieces: list[tuple[int, int]] = []
        # Continue the partly processed prompt. `rest` is 0 if its request has left, or if
        # `take_decode_memory` preempted it.
        if (
            self._partial_request is not None
            and (rest := roster.prompt_tokens_left(self._partial_request))
            and tokens_left > 0
        ):
            pieces.append((self._partial_request, min(rest, tokens_left)))
            tokens_left -= rest
        while tokens_left > 0 and (admitted := roster.admit_next()) is not None:
            request, rest = admitted
            pieces.append((request, min(rest, tokens_left)))
            tokens_left -= rest
        if pieces:
            self._partial_request = pieces[-1][0]
        return roster.make_iteration(pieces, decode)


class DecodePrepone(ContinuousBatching):
    """Continuous batching that makes `prepone` tokens before each prefill, and releases them during the
    prefill.

    These tokens leave at equal distances until the first token after the prefill, but at the latest when the
    prompts are processed (smooth goodput paper, 3.3). Requests that arrive after the prefill was planned wait
    for the next prefill. If a request leaves or is given up as late, the distances are not exactly equal.
    """

    def __init__(self, requests: Requests, setup: ServingSetup) -> None:
        super().__init__(requests, setup)
        self._tokens_ahead = setup.serving.prepone
        """Number of tokens made before a prefill, which are released during it."""
        self._prompts: list[tuple[int, int]] = []
        """Prompts of the planned prefill."""
        self._tokens_made_ahead = 0
        """Number of tokens that each running request has made since the prefill was planned."""
        self._prefill_end_ns = self._next_token_ns = 0
        """Planned end of the prefill, and time of the first token after it."""
        self._common_departure_ns = 0
        """Time at which the last token of each running request without an entry in `_departures_ns` left."""
        self._departures_ns: dict[int, int] = {}
        """By request: time at which its last token leaves the server."""
        self._from_ns: dict[int, int] = {}
        """For each request that ran when the prefill was planned: time at which its newest token left."""

    def form_work(self, now_ns: int) -> Iteration | None:
        roster = self._roster
        roster.prepare_iteration(now_ns)
        if not all(roster.prompt_tokens_left(request) for request, _ in self._prompts):
            # A request of the planned prefill has left, or was given up as late: plan the prefill again.
            remaining = [request for request, _ in self._prompts if roster.prompt_tokens_left(request)]
            roster.return_to_queue(remaining)
            self._prompts = []
        if not self._prompts:
            self._tokens_made_ahead = 0
            self._prompts = roster.admit_prompts(self._serving.tokens_max, steps=self._tokens_ahead)
            if self._prompts:
                prefill_ns, next_ns = roster.forecast(self._tokens_ahead, self._prompts)
                self._prefill_end_ns, self._next_token_ns = now_ns + prefill_ns, now_ns + next_ns
                common_ns = self._common_departure_ns
                self._from_ns = {r: self._departures_ns.get(r, common_ns) for r in roster.running}
        if self._prompts and (self._tokens_made_ahead >= self._tokens_ahead or not roster.running):
            prompts, self._prompts = self._prompts, []
            return roster.make_iteration(prompts)
        return roster.make_iteration((), roster.take_decode_memory())

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        """Delay the tokens that were made ahead, so that they leave at even intervals."""
        output = self._roster.on_done(now_ns, work)
        if work.prefill:
            self._departures_ns.update(dict.fromkeys(output.tokens, now_ns))
            return output
        if self._prompts:
            due_ns = self._departure_times(now_ns, output.tokens)
            self._departures_ns.update(due_ns)
        else:
            due_ns = {request: t for request, t in self._departures_ns.items() if t > now_ns}
            self._common_departure_ns, self._departures_ns = now_ns, due_ns
            if not due_ns:
                return output
        self._roster.on_delay(due_ns)
        return with_departure_times(output, [due_ns.get(request, now_ns) for request in output.tokens])

    def _departure_times(self, now_ns: int, requests: Sequence[int]) -> dict[int, int]:
        """Return, for each of these requests, the time at which the token that it just made ahead leaves."""
        self._tokens_made_ahead += 1
        gaps, due_ns = self._tokens_ahead + 1, {}
        for request in requests:
            from_ns = self._from_ns.get(request, now_ns)
            even_ns = from_ns + (self._next_token_ns - from_ns) * self._tokens_made_ahead // gaps
            due_ns[request] = max(now_ns, from_ns, min(even_ns, self._prefill_end_ns))
        return due_ns


class OutputDelay:
    """Wraps a scheduler and delays its tokens (smooth goodput paper, 3.4).

    A token leaves at least p (`gap_ns`) after the token before it: q_1 = t_1, q_i = max(t_i, q_(i-1) + p),
    where t_i is the time at which the scheduler releases token i, and q_i the time at which the token leaves.
    Whether a request is late is decided by t, not by q.
    """

    def __init__(self, scheduler: Iterating, gap_ns: int) -> None:
        self._scheduler = scheduler
        self._gap_ns = gap_ns
        """Smallest time between two tokens of a request."""
        self._next_ns: dict[int, int] = {}
        """Earliest time at which the next token of each open request can leave."""
        self.state = scheduler.state
        self.on_arrival = scheduler.on_arrival
        self.on_close = scheduler.on_close
        self.form_work = scheduler.form_work

    def on_done(self, now_ns: int, work: Any) -> EngineOutput:
        """Delay each token until the gap after the one before has passed."""
        output = self._scheduler.on_done(now_ns, work)
        next_ns, departures_ns = self._next_ns, []
        releases_ns = repeat(now_ns) if output.due_ns is None else output.due_ns
        for request, release_ns in zip(output.tokens, releases_ns, strict=False):
            departure_ns = max(release_ns, next_ns.get(request, release_ns))
            next_ns[request] = departure_ns + self._gap_ns
            departures_ns.append(departure_ns)
        for request in output.finished:
            next_ns.pop(request, None)
        return with_departure_times(output, departures_ns)

    def on_left(self, now_ns: int, request: int) -> None:
        self._next_ns.pop(request, None)
        self._scheduler.on_left(now_ns, request)

    def take_given_up(self) -> Mapping[int, GivenUp]:
        requests = self._scheduler.take_given_up()
        for request in requests:
            self._next_ns.pop(request, None)
        return requests
