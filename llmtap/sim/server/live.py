"""Driver of the simulated engine (`sim/engine.py`) in real time, for the simulated server.

`reception.py` creates a `LiveEngine`; `delivery.py` submits each choice of an answer as a `Ticket`, and its
`TokenListener` receives the tokens. The driver in virtual time is `run_virtual` of `sim/engine.py`.

The engine's times are exact even on a busy machine: a run ends at its computed time, even if `advance` is
called later, and a request arrives when the server accepted it. So the times of tokens depend only on the
times at which requests arrive and clients leave, and the virtual driver computes the same times for the same
arrivals. Only the sending of tokens can be late.

This module reads no clock: the caller passes the time, and the function `wake_at` requests a call of
`advance` at a given time. All events are processed in order of their times. Since a server runs for days,
ended requests are removed (`ServedRequests`). Their numbers are not reused, since schedulers serve equal
requests in the order of their numbers."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from random import Random
from typing import Protocol, cast

from llmtap.sim.engine import Batch, Engine, EngineRun, IterationState, Scheduler, Step
from llmtap.sim.model_options import PREDICTORS
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.server.options import EngineOptions
from llmtap.units import NEVER
from llmtap.workload.requests import Requests


class TokenListener(Protocol):
    """Listener for the tokens of one answer, called in order of time."""

    def on_token(self, choice: int, at_ns: int) -> None:
        """Receive a token that leaves the engine at `at_ns`."""

    def on_end(self, choice: int, at_ns: int) -> None:
        """Receive the end of a choice: the batch that contains it has ended."""

    def on_refused(self, at_ns: int) -> None:
        """Receive the time at which the engine gave up one of the choices."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One choice of an answer, which is a separate request for the engine."""

    listener: TokenListener | None
    """Listener for its tokens; None after the client disconnected."""
    choice: int
    """Index of the choice in the answer."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Hashes of the whole blocks of its prompt, for the prefix cache."""
    prompt: int = 0
    """Index of its prompt among the prompts of the request."""
    arrival_ns: int = 0
    """Planned arrival of the choice in the engine; 0 before the choice is submitted."""
    number: int = -1
    """Number of the choice in the engine; -1 until the choice arrives there."""
    predicted_tokens: int = 0
    """Predicted number of output tokens."""
    prefilled_tokens: int = 0
    """Number of prompt tokens that the engine has processed or is processing."""
    cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache; None before the first token."""
    last_ns: int = 0
    """Time at which its newest token leaves the engine."""
    is_over: bool = False
    """Whether the choice has ended or was given up, or its client has disconnected."""


class ServedRequests:
    """Requests in the engine: the columns of `Requests` as dicts, from which ended requests are removed."""

    def __init__(self, block_tokens: int = 0) -> None:
        self.arrival_ns: dict[int, int] = {}
        """By number of a request: its arrival. The other columns have the same form."""
        self.input: dict[int, int] = {}
        self.output: dict[int, int] = {}
        self.predicted: dict[int, int] = {}
        """By number: predicted output length."""
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.block_tokens = block_tokens
        self._next_number = 0
        """Number of the next request."""

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def add(self, ticket: Ticket) -> None:
        number = ticket.number = self._next_number
        self._next_number += 1
        self.arrival_ns[number] = ticket.arrival_ns
        self.input[number] = ticket.input_tokens
        self.output[number] = ticket.output_tokens
        self.blocks[number] = ticket.blocks

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for column in (self.arrival_ns, self.input, self.output, self.predicted, self.blocks):
                column.pop(number, None)


class LiveEngine:
    """A simulated engine in real time. The caller passes the current time to its methods."""

    def __init__(
        self,
        build: Callable[[Requests], Scheduler],
        wake_at: Callable[[int], None],
        *,
        servers: int = 1,
        predictor: str = "perfect",
        seed: int = 0,
        block_tokens: int = 0,
    ) -> None:
        """`build`: makes the scheduler. `wake_at`: requests a later call of `advance`. `block_tokens`:
        number of tokens in the blocks of tickets; 0: no prefix cache."""
        self._served_requests = ServedRequests(block_tokens)
        # The cast is correct: schedulers only index the columns, and dicts can be indexed as well.
        self._scheduler = build(cast(Requests, self._served_requests))
        self._engine = Engine(self._scheduler, servers)
        self._wake_at = wake_at
        """Function that requests a call of `advance` at a time."""
        self._predict = PREDICTORS[predictor]
        """Predictor of the output lengths, for schedulers that need them."""
        self._seed = seed
        self._has_prefix_cache = block_tokens > 0
        self._order = count()
        """Numbers for heap entries, so that entries with equal times keep their order."""
        self._runs_started = 0
        """Number of runs so far, which orders runs that end at the same time."""
        self._arrivals: list[tuple[int, int, Ticket]] = []
        """Heap of the requests that will arrive at the engine later, because the input filter holds them."""
        self._runs: list[tuple[int, int, EngineRun]] = []
        """Heap of the current runs, each with its end and its number; the run that ends first is first."""
        self._later_calls: list[tuple[int, int, Callable[[], None]]] = []
        """Heap of functions that report tokens and ends later, with the times at which to call them."""
        self._open_tickets: dict[int, Ticket] = {}
        """By number of a request: its ticket."""
        self._ended_requests: dict[int, list[int]] = {}
        """For each run (by number): ended requests to remove when it ends, because it can refer to them."""
        self.next_ns = NEVER
        """Time of the next event, unless a request arrives before it."""

    def __len__(self) -> int:
        return len(self._served_requests)

    def state(self) -> IterationState:
        """Return the scheduler's state; for schedulers of whole batches, which have no state, only counts."""
        state: IterationState | None = getattr(self._scheduler, "state", None)
        if state is not None:
            return state
        running = sum(r in self._open_tickets for _, _, run in self._runs for r in run.work.members)
        return IterationState(running=running, waiting=len(self._open_tickets) - running)

    def submit(self, now_ns: int, arrival_ns: int, tickets: Iterable[Ticket]) -> None:
        """Submit requests that arrive together at the engine at `arrival_ns`, which must be now or later."""
        for ticket in tickets:
            ticket.arrival_ns = arrival_ns
            heappush(self._arrivals, (arrival_ns, next(self._order), ticket))
        self.next_ns = min(self.next_ns, arrival_ns)
        if now_ns < self.next_ns:
            self._wake_at(self.next_ns)
        else:
            self.advance(now_ns)

    def leave(self, now_ns: int, tickets: Iterable[Ticket]) -> None:
        """Remove the requests of a client that has disconnected. Requests that have ended are ignored."""
        self.advance(now_ns)
        for ticket in tickets:
            ticket.listener = None
            if ticket.is_over:
                continue
            ticket.is_over = True
            if ticket.number < 0:
                self._arrivals = [entry for entry in self._arrivals if entry[2] is not ticket]
                heapify(self._arrivals)
            elif self._open_tickets.pop(ticket.number, None) is not None:
                self._handle_step(now_ns, self._engine.leave(now_ns, ticket.number))
                self._forget_later(ticket.number)
        self._update_next_time()

    def advance(self, now_ns: int) -> None:
        """Process all events until `now_ns`, in order of time."""
        if now_ns < self.next_ns:
            return
        while True:
            leaves_ns = self._later_calls[0][0] if self._later_calls else NEVER
            arrives_ns = self._arrivals[0][0] if self._arrivals else NEVER
            ends_ns = self._runs[0][0] if self._runs else NEVER
            if leaves_ns <= now_ns and leaves_ns <= arrives_ns and leaves_ns <= ends_ns:
                heappop(self._later_calls)[2]()
            elif arrives_ns <= now_ns and arrives_ns <= ends_ns:
                self._handle_arrival()
            elif ends_ns < now_ns:  # If equal, wait: further arrivals at this time must be processed first.
                self._finish_run()
            else:
                break
        self._update_next_time()

    def _update_next_time(self) -> None:
        self.next_ns = min(
            self._later_calls[0][0] if self._later_calls else NEVER,
            self._arrivals[0][0] if self._arrivals else NEVER,
            self._runs[0][0] + 1 if self._runs else NEVER,
        )
        self._wake_at(self.next_ns)

    def _handle_arrival(self) -> None:
        """Give the next arriving request to the scheduler."""
        now_ns, _, ticket = heappop(self._arrivals)
        self._served_requests.add(ticket)
        number = ticket.number
        tokens = ticket.input_tokens, ticket.output_tokens
        arrival_ns, inputs, outputs = (array("q", [n]) for n in (now_ns, *tokens))
        requests = Requests(arrival_ns, inputs, outputs)
        ticket.predicted_tokens = self._predict(requests, Random(f"{self._seed}/{number}"))[0]
        self._served_requests.predicted[number] = ticket.predicted_tokens
        self._open_tickets[number] = ticket
        self._handle_step(now_ns, self._engine.arrive(now_ns, number))

    def _finish_run(self) -> None:
        """Handle the end of a run: its tokens, and the runs that follow."""
        end_ns, run_number, run = heappop(self._runs)
        step = self._engine.on_done(end_ns, run)
        if not isinstance(run.work, Batch):
            self._report_tokens(end_ns, step)
        for number in step.output.finished:
            ticket = self._open_tickets.pop(number, None)
            if ticket is not None and isinstance(run.work, Batch):
                ticket.is_over = True
                if ticket.listener is not None:
                    ticket.listener.on_end(ticket.choice, end_ns)
        self._served_requests.forget(step.output.finished)
        self._served_requests.forget(self._ended_requests.pop(run_number, ()))
        self._handle_step(end_ns, step)

    def _report_tokens(self, now_ns: int, step: Step) -> None:
        """Report the tokens of an iteration to their listeners, now or when they leave the engine."""
        made, tickets, has_cache = step.output, self._open_tickets, self._has_prefix_cache
        for i, number in enumerate(made.tokens):
            ticket = tickets.get(number)
            if ticket is None:
                continue
            if has_cache and ticket.cached_tokens is None:
                ticket.cached_tokens = max(0, ticket.input_tokens - ticket.prefilled_tokens)
            due_ns = now_ns if made.due_ns is None else made.due_ns[i]
            ticket.last_ns = due_ns
            if due_ns <= now_ns:
                self._send_token(ticket, due_ns)
            else:
                self._call_later(due_ns, partial(self._send_token, ticket, due_ns))

    def _handle_step(self, now_ns: int, step: Step) -> None:
        """Report what a step has decided: requests given up, and runs begun."""
        for number in step.given_up:
            ticket = self._open_tickets.pop(number, None)
            self._forget_later(number)
            if ticket is not None:
                # Report the end only after the tokens that were already made have left the engine.
                at_ns = max(now_ns, ticket.last_ns)
                self._call_later(at_ns, partial(self._report_refusal, ticket, at_ns))
        for run in step.started:
            self._runs_started += 1
            heappush(self._runs, (run.end_ns, self._runs_started, run))
            if isinstance(run.work, Batch):
                for number in run.work.members:
                    ticket = self._open_tickets[number]
                    times = run.work.token_times(run.start_ns, ticket.output_tokens)
                    self._schedule_next_token(ticket, iter(times))
            elif self._has_prefix_cache:
                for number, tokens in run.work.prefill:
                    self._open_tickets[number].prefilled_tokens += tokens

    def _schedule_next_token(self, ticket: Ticket, times: Iterator[int]) -> None:
        """Schedule the next token of a request in a whole batch. `times`: times of its remaining tokens."""
        at_ns = next(times, None)
        if at_ns is not None:
            self._call_later(at_ns, partial(self._send_batch_token, ticket, at_ns, times))

    def _send_batch_token(self, ticket: Ticket, at_ns: int, times: Iterator[int]) -> None:
        """Pass on a token of a batch, and schedule the next one."""
        if not ticket.is_over:
            self._send_token(ticket, at_ns)
            self._schedule_next_token(ticket, times)

    def _send_token(self, ticket: Ticket, at_ns: int) -> None:
        if ticket.listener is not None:
            ticket.listener.on_token(ticket.choice, at_ns)

    def _report_refusal(self, ticket: Ticket, at_ns: int) -> None:
        ticket.is_over = True
        if ticket.listener is not None:
            ticket.listener.on_refused(at_ns)

    def _call_later(self, at_ns: int, act: Callable[[], None]) -> None:
        """Call a function at a simulated time."""
        heappush(self._later_calls, (at_ns, next(self._order), act))

    def _forget_later(self, number: int) -> None:
        """Remove an ended request when all current runs have ended, because these can refer to it."""
        if not self._runs:
            self._served_requests.forget((number,))
        else:
            self._ended_requests.setdefault(max(self._runs)[1], []).append(number)


def make_live_engine(options: EngineOptions, seed: int, wake_at: Callable[[int], None]) -> LiveEngine:
    build, setup = SCHEDULERS[options.scheduler].build, options.setup
    return LiveEngine(
        lambda requests: build(requests, setup),
        wake_at,
        servers=options.servers,
        predictor=setup.readings.predictor,
        seed=seed,
        block_tokens=options.block_tokens,
    )
