"""State of one simulated server: its waiting, running and preempted requests and their KV memory.

The schedulers of `iterating.py` call a `Roster` to admit requests, to take memory for the next tokens, and to
begin and end an `Iteration`. A roster also has the deadlines of requests, to give late requests up. A request
takes the memory of its prompt when it is admitted (it gets a "seat"), and one more block whenever its next
token begins a new block. A request is admitted only if the blocks for the next step of the running requests
stay free. If the memory is full nevertheless, the most recently admitted request is preempted: its KV is
recomputed later, or swapped out and in. The request admitted first is never preempted, so all requests are
served in the end. A request larger than the memory is rejected on arrival.

Every iteration that decodes includes all decoding requests. So when a request begins to decode, the numbers
of the steps of its last token and of its next block are known. Therefore, a step needs no work for each
request.

`Memory` only counts blocks. With a prefix cache, whole blocks of prompts have names (numbers), which are
equal for prompts with equal beginnings; a named block is in memory only once. A computed named block stays
cached after the last request released it, until its memory is needed. The least recently used block is
evicted first; of one prompt, later blocks are evicted before earlier blocks. The workload sets the number of
tokens in a named block (`Requests.block_tokens`), which takes one or more whole blocks of memory.

The module is long because the queue, the seats and the memory change together.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from llmtap.sim.engine import NO_REQUESTS, EngineOutput, GivenUp, Iteration, IterationState
from llmtap.sim.model_options import ServingSetup
from llmtap.workload.requests import Requests


class Memory:
    """KV memory of one server. `names` in its methods: names of the blocks with which the tokens begin."""

    def __init__(self, tokens: int, block_tokens: int, named_tokens: int = 0) -> None:
        """`named_tokens`: number of tokens in a named block; 0 without a prefix cache."""
        self.total_blocks = tokens // block_tokens
        self.held_blocks = 0
        """Number of blocks in use by running requests."""
        self.named_tokens = named_tokens
        """Number of tokens in a named block; 0 without a prefix cache."""
        self._block_tokens = block_tokens
        self._blocks_per_name = self.blocks_for(named_tokens)
        """Number of memory blocks for one named block."""
        self._holders: dict[int, int] = {}
        """Number of requests that hold each named block."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Named blocks that are in memory but held by no request; the first one is evicted next."""

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.held_blocks

    @property
    def cached_blocks(self) -> int:
        return len(self._cached) * self._blocks_per_name

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def blocks_without_cache(self, tokens: int, names: Sequence[int] = ()) -> int:
        """Return the number of blocks that these tokens need if the cache is empty."""
        return self.blocks_for(tokens - len(names) * self.named_tokens) + len(names) * self._blocks_per_name

    def blocks_needed(self, tokens: int, names: Sequence[int] = ()) -> int:
        """Return the number of blocks that `hold` would take; blocks that are held already do not count."""
        holders = self._holders
        shared = sum(name in holders for name in names) if names else 0
        return self.blocks_without_cache(tokens, names) - shared * self._blocks_per_name

    def cached_prefix(self, names: Sequence[int]) -> int:
        """Return the number of leading blocks of `names` that are in memory."""
        count = 0
        for name in names:
            if name not in self._holders and name not in self._cached:
                break
            count += 1
        return count

    def hold(self, tokens: int, names: Sequence[int] = ()) -> None:
        """Take the memory that a request with these tokens needs."""
        holders, cached = self._holders, self._cached
        size = self.blocks_for(tokens - len(names) * self.named_tokens)
        for name in names:
            if name in holders:
                holders[name] += 1
            else:
                holders[name] = 1
                cached.pop(name, None)
                size += self._blocks_per_name
        self.take(size)

    def take(self, blocks: int) -> None:
        """Take blocks, and evict cached blocks if their memory is needed."""
        self.held_blocks += blocks
        assert self.held_blocks <= self.total_blocks, "more blocks are held than the memory has"
        cached = self._cached
        while cached and self.held_blocks + len(cached) * self._blocks_per_name > self.total_blocks:
            cached.popitem(last=False)

    def release(self, tokens: int, names: Sequence[int] = (), computed: int = 0) -> None:
        """Release the memory of a request. Named blocks within its first `computed` tokens stay cached."""
        holders, cached = self._holders, self._cached
        size = self.blocks_for(tokens - len(names) * self.named_tokens)
        for i in range(len(names) - 1, -1, -1):
            name = names[i]
            if holders[name] > 1:
                holders[name] -= 1
            else:
                del holders[name]
                size += self._blocks_per_name
                if (i + 1) * self.named_tokens <= computed:
                    cached[name] = None
        self.held_blocks -= size
        assert self.held_blocks >= 0


class Deadlines:
    """Deadline of each request's next token, to give late requests up (smooth goodput paper, 4.1, eq. 5)."""

    def __init__(self, ttft_ns: int, tbt_ns: int) -> None:
        self._ttft_ns = ttft_ns
        self._tbt_ns = tbt_ns
        """Longest allowed time between tokens."""
        self._next_ns: dict[int, int] = {}
        """By request: deadline of its next token."""
        self._missed_requests: set[int] = set()
        """Requests with a token that came too late."""

    def on_arrival(self, now_ns: int, request: int) -> None:
        self._next_ns[request] = now_ns + self._ttft_ns

    def on_tokens(self, now_ns: int, requests: Iterable[int]) -> None:
        deadlines, next_ns = self._next_ns, now_ns + self._tbt_ns
        for request in requests:
            if deadlines[request] < now_ns:
                self._missed_requests.add(request)
            deadlines[request] = next_ns

    def on_delay(self, due_ns: Mapping[int, int]) -> None:
        """Set the deadlines again after a delay. `due_ns`: for each request, when its newest token leaves."""
        for request, leaves_ns in due_ns.items():
            if request in self._next_ns:
                self._next_ns[request] = leaves_ns + self._tbt_ns

    def forget(self, request: int) -> None:
        del self._next_ns[request]
        self._missed_requests.discard(request)

    def missed_requests(self, now_ns: int) -> list[int]:
        """Return the requests of which a token was late, or whose next token is late now."""
        missed = self._missed_requests
        return [r for r, next_ns in self._next_ns.items() if next_ns < now_ns or r in missed]


class WaitingQueue:
    """Queue of requests, ordered by rank and then by number, which is the order of arrival."""

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: rank of each request, 0 or more; None: all ranks are equal."""
        self._ranks = ranks
        """By request: rank, which decides the order; None: order of arrival."""
        self._heap: list[tuple[int, int]] = []
        """Rank and number of each waiting request, and of some that were removed."""
        self._waiting_requests: set[int] = set()
        """Requests that wait. A removed request stays in `_heap` until it would be the next one."""

    def __len__(self) -> int:
        return len(self._waiting_requests)

    def __contains__(self, request: int) -> bool:
        return request in self._waiting_requests

    def add(self, request: int, *, is_preempted: bool = False) -> None:
        rank = -1 if is_preempted else self._ranks[request] if self._ranks is not None else 0
        heappush(self._heap, (rank, request))
        self._waiting_requests.add(request)

    def remove(self, request: int) -> None:
        self._waiting_requests.remove(request)
        heap, waiting = self._heap, self._waiting_requests
        while heap and heap[0][1] not in waiting:
            heappop(heap)

    def head(self) -> int | None:
        return self._heap[0][1] if self._heap else None


@dataclass(slots=True)
class _Seat:
    """State of an admitted request."""

    names: Sequence[int]
    """Names of the named blocks with which its tokens begin."""
    tokens: int
    """Number of tokens for which memory was taken when the request was admitted."""
    unprocessed: int
    """Part of `tokens` that is not processed yet."""
    cached: int = 0
    """Part of `tokens` that was found in the prefix cache."""
    start_step: int = 0
    """Number of the step before the request's first decoding step."""
    end_step: int = 0
    """Number of the step that makes its last token; 0: not decoding yet."""


class Roster:
    """Requests of one server and their memory."""

    def __init__(self, requests: Requests, setup: ServingSetup, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: order of the waiting requests, as for `WaitingQueue`."""
        serving = setup.serving
        self._requests = requests
        self._iteration_model = setup.iterations
        self._seats_max = serving.seqs_max
        """Largest number of requests that run at a time."""
        self._uses_swap = serving.preemption == "swap"
        """Whether preempted requests are swapped out, instead of being computed again."""
        self._swap_token_ns = serving.swap_token
        """Time to swap one token out or in."""
        self._attention_ns = serving.attention / 1_000**2
        """Attention time of a prompt of one token; it grows with the square of the length."""
        self._has_cache = serving.prefix_cache and requests.block_tokens > 0
        """Whether prompts can share blocks of memory."""
        named_tokens = requests.block_tokens if self._has_cache else 0
        self.memory = Memory(serving.kv_tokens, serving.block, named_tokens)
        self.state = IterationState()
        self.running: list[int] = []
        """Decoding requests, in the order in which they began. The list is replaced, never changed."""
        self._waiting = WaitingQueue(ranks)
        self._seats: dict[int, _Seat] = {}
        """State of each admitted request, in the order of admission."""
        self._made_tokens: dict[int, int] = {}
        """Number of tokens that each preempted request had made."""
        self._preempted_requests: set[int] = set()
        """Requests that have been preempted at least once."""
        self._swapped_requests: set[int] = set()
        """Waiting requests whose KV is swapped out."""
        self._swap_ns = 0
        """Duration of swapping since the previous iteration was composed."""
        self._step = 0
        """Number of the newest decoding step."""
        self._growing_requests = [0] * serving.block
        """Number of running requests that begin a new block of memory, by the step modulo the block size."""
        self._ending_requests: dict[int, list[int]] = {}
        """Requests by the number of the step that makes their last token."""
        self._context_tokens = 0
        """Number of tokens in memory of all running requests."""
        self._deadlines = Deadlines(serving.ttft, serving.tbt) if serving.give_up == "late" else None
        self._given_up: dict[int, GivenUp] = {}
        """Requests given up since the latest call of `take_given_up`."""

    def on_arrival(self, now_ns: int, request: int) -> None:
        """Queue a request, or reject it if it is larger than the memory."""
        tokens = self._prompt_tokens(request) + self._requests.output[request]
        if self.memory.blocks_without_cache(tokens, self._block_names(request)) > self.memory.total_blocks:
            self._given_up[request] = GivenUp.TOO_LARGE
            return
        self._waiting.add(request)
        if self._deadlines is not None:
            self._deadlines.on_arrival(now_ns, request)
        self.state.waiting = len(self._waiting)

    def on_left(self, now_ns: int, request: int) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._release_seats([request])
        self._forget(request)
        self._update_state()

    def take_given_up(self) -> Mapping[int, GivenUp]:
        if not self._given_up:
            return NO_REQUESTS
        given_up, self._given_up = self._given_up, {}
        return given_up

    def prepare_iteration(self, now_ns: int) -> None:
        """Give up late requests, and swap in the requests that fit into the memory."""
        if self._deadlines is not None:
            for late in self._deadlines.missed_requests(now_ns):
                self._given_up[late] = GivenUp.LATE
                self.on_left(now_ns, late)
        while self._swapped_requests:
            request = self._waiting.head()
            if request is None or request not in self._swapped_requests:
                return
            names, made = self._block_names(request), self._made_tokens[request]
            tokens = self._prompt_tokens(request) + made - 1
            # Require memory for the next token, too: without it, the request would be swapped out again.
            if not self._fits(tokens + 1, names, 1):
                return
            seat = self._give_seat(request, tokens, names)
            self._swapped_requests.remove(request)
            self._swap_ns += seat.unprocessed * self._swap_token_ns
            del self._made_tokens[request]
            self._start_decoding(request, seat, made)

    def admit_next(self, limit: int | None = None, *, steps: int = 1) -> tuple[int, int] | None:
        """Admit the next waiting request. Return its number and the number of its tokens to process.

        Return None if no request waits, if it does not fit into the memory, or if it has more than `limit`
        tokens to process. The memory for the next `steps` steps of the running requests stays free.
        """
        request = self._waiting.head()
        if request is None or request in self._swapped_requests:
            return None
        names = self._block_names(request)
        tokens = self._prompt_tokens(request) + self._made_tokens.get(request, 0)
        if limit is not None and max(1, tokens - self._cached_tokens(names)) > limit:
            return None
        if not self._fits(tokens, names, steps):
            return None
        seat = self._give_seat(request, tokens, names)
        # Even if the whole prompt is cached, process its last token: this makes the first token of the
        # answer.
        seat.unprocessed = max(1, seat.unprocessed)
        seat.cached = tokens - seat.unprocessed
        return request, seat.unprocessed

    def admit_prompts(self, tokens_max: int, *, steps: int = 1) -> list[tuple[int, int]]:
        """Admit whole prompts with at most `tokens_max` tokens in total; a single prompt can have more."""
        admitted: list[tuple[int, int]] = []
        limit: int | None = None
        while (prompt := self.admit_next(limit, steps=steps)) is not None:
            admitted.append(prompt)
            limit = (tokens_max if limit is None else limit) - prompt[1]
        return admitted

    def prompt_tokens_left(self, request: int) -> int:
        seat = self._seats.get(request)
        return 0 if seat is None else seat.unprocessed

    def take_decode_memory(self) -> list[int]:
        """Take memory for the next token of each running request, and return the requests that still run.

        Requests are preempted if the memory is full.
        """
        if not self.running:
            return self.running
        memory, growing = self.memory, self._growing_requests
        phase = self._step % len(growing)
        while growing[phase] > memory.free_blocks:
            self._preempt(next(reversed(self._seats)))
        memory.take(growing[phase])
        self._step += 1
        self._context_tokens += len(self.running)
        return self.running

    def make_iteration(
        self, prefill: Sequence[tuple[int, int]], decode: Sequence[int] = ()
    ) -> Iteration | None:
        """Return an iteration of these parts of prompts and these decoding requests; None if both are empty.

        `decode`: the result of `take_decode_memory`.
        """
        self._update_state()
        if not prefill and not decode:
            return None
        size = len(decode)
        tokens = sum([n for _, n in prefill]) if prefill else 0
        duration_ns = self._iteration_model.duration_ns(
            tokens, size, self._context_tokens - size if size else 0
        )
        duration_ns += self._swap_ns + self._attention_time_ns(prefill)
        self._swap_ns = 0
        return Iteration(duration_ns, prefill, decode)

    def forecast(self, steps: int, prefill: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the time in ns until these prompts are processed, and until the first token after that.

        Before the prompts are processed, all running requests make `steps` tokens. The times are exact unless
        a request leaves, is given up as late, or is swapped in.
        """
        duration_ns = self._iteration_model.duration_ns
        size, context, total_ns = len(self.running), self._context_tokens, self._swap_ns
        for step in range(self._step + 1, self._step + steps + 1):
            if not size:
                break
            total_ns += duration_ns(0, size, context)
            context += size
            for request in self._ending_requests.get(step, ()):
                size -= 1
                context -= self._tokens_held(self._seats[request], step)
        total_ns += duration_ns(sum([n for _, n in prefill]), 0) + self._attention_time_ns(prefill)
        whole_ns = total_ns
        for request, _ in prefill:
            if self._made_tokens.get(request, 0) + 1 < self._requests.output[request]:
                size += 1
                context += self._seats[request].tokens
        return whole_ns, whole_ns + duration_ns(0, size, context)

    def return_to_queue(self, requests: Sequence[int]) -> None:
        """Undo the admission of requests whose prompts have not been processed."""
        for request in requests:
            seat = self._seats.pop(request)
            # Do not cache the blocks of these requests: some are not computed, since another of these
            # requests was to compute them.
            self.memory.release(seat.tokens, seat.names)
            self._waiting.add(request, is_preempted=True)

    def on_delay(self, due_ns: Mapping[int, int]) -> None:
        """Compute the deadlines of the next tokens from the times at which the newest tokens leave."""
        if self._deadlines is not None:
            self._deadlines.on_delay(due_ns)

    def on_done(self, now_ns: int, work: Iteration) -> EngineOutput:
        """Return the tokens that an iteration made, and the requests that it finished.

        Requests with a complete prompt begin to decode; finished requests release their memory.
        """
        tokens: Sequence[int] = ()
        finished: list[int] = []
        cached: dict[int, int] | None = None
        if work.decode:
            # If `running` is still the same list, no request has begun or ended since, so it needs no filter.
            tokens = (
                work.decode
                if work.decode is self.running
                else [request for request in work.decode if request in self._seats]
            )
            finished = self._ending_requests.pop(self._step, [])
            if finished:
                self._release_seats(finished)
        if work.prefill:
            first, ended, cached = self._finish_prompts(work.prefill)
            tokens = [*tokens, *first]
            finished += ended
        if self._deadlines is not None:
            self._deadlines.on_tokens(now_ns, tokens)
        for request in finished:
            self.state.recovered += request in self._preempted_requests
            self._forget(request)
        return EngineOutput(finished, tokens, cached=cached)

    def _finish_prompts(
        self, prefill: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[int], dict[int, int] | None]:
        """Process these parts of prompts. Return the requests that made a token after their prompt, the
        requests that ended with it, and the number of cached tokens of each prompt."""
        first, ended = [], []
        cached: dict[int, int] | None = {} if self._has_cache else None
        for request, tokens in prefill:
            seat = self._seats.get(request)
            if seat is None:
                continue
            seat.unprocessed -= tokens
            if seat.unprocessed:
                continue
            made = self._made_tokens.pop(request, 0)
            if not made:
                self.state.prefix_hits += seat.cached
                if cached is not None:
                    self.state.prefix_queries += seat.tokens
                    cached[request] = seat.cached
            if self._requests.output[request]:
                first.append(request)
            if made + 1 < self._requests.output[request]:
                self._start_decoding(request, seat, made + 1)
            else:
                ended.append(request)
        self._release_seats(ended)
        return first, ended, cached

    def _attention_time_ns(self, prefill: Sequence[tuple[int, int]]) -> int:
        """Return the attention time of these parts of prompts.

        The sum over all parts of a prompt is quadratic in the length of the prompt.
        """
        if not self._attention_ns:
            return 0
        squares = 0
        for request, tokens in prefill:
            seat = self._seats[request]
            before = seat.tokens - seat.unprocessed
            squares += (before + tokens) ** 2 - before**2
        return round(self._attention_ns * squares)

    def _prompt_tokens(self, request: int) -> int:
        """Return the number of prompt tokens; an empty prompt counts as one token."""
        return max(1, self._requests.input[request])

    def _block_names(self, request: int) -> Sequence[int]:
        """Return the names of the prompt's whole blocks, by which the cache finds them."""
        if not self._has_cache:
            return ()
        whole = self._requests.input[request] // self._requests.block_tokens
        return self._requests.blocks[request][:whole]

    def _cached_tokens(self, names: Sequence[int]) -> int:
        """Return the number of tokens in the leading blocks of `names` that are in memory."""
        return self.memory.cached_prefix(names) * self.memory.named_tokens if names else 0

    def _fits(self, tokens: int, names: Sequence[int], steps: int) -> bool:
        """Return whether a request fits in addition to the next `steps` steps of the running requests."""
        if len(self._seats) >= self._seats_max:
            return False
        growing, n = self._growing_requests, len(self._growing_requests)
        reserved = sum([growing[(self._step + i) % n] for i in range(steps)])
        return self.memory.blocks_needed(tokens, names) + reserved <= self.memory.free_blocks

    def _give_seat(self, request: int, tokens: int, names: Sequence[int]) -> _Seat:
        """Admit a waiting request, with memory for its tokens."""
        cached = self._cached_tokens(names)
        self.memory.hold(tokens, names)
        self._waiting.remove(request)
        seat = self._seats[request] = _Seat(names, tokens, tokens - cached)
        return seat

    def _start_decoding(self, request: int, seat: _Seat, made: int) -> None:
        """Move a request whose prompt is processed to the requests that make tokens."""
        seat.unprocessed = 0
        seat.start_step = self._step
        seat.end_step = self._step + self._requests.output[request] - made
        self._ending_requests.setdefault(seat.end_step, []).append(request)
        self._growing_requests[self._block_phase(seat)] += 1
        self._context_tokens += seat.tokens
        self.running = [*self.running, request]

    def _tokens_held(self, seat: _Seat, step: int) -> int:
        """Return the number of tokens of a request in the KV memory; it grows by 1 in each step."""
        return seat.tokens + step - seat.start_step

    def _block_phase(self, seat: _Seat) -> int:
        """Return the step, modulo the block size, in which a decoding request begins a new block."""
        unnamed_tokens = seat.tokens - len(seat.names) * self.memory.named_tokens
        return (seat.start_step - unnamed_tokens) % len(self._growing_requests)

    def _release_seats(self, requests: Sequence[int]) -> None:
        """Free the memory of requests that leave the batch."""
        decoded = False
        for request in requests:
            seat = self._seats.pop(request)
            tokens = seat.tokens
            if seat.end_step:
                decoded = True
                tokens = self._tokens_held(seat, self._step)
                self._context_tokens -= tokens
                self._growing_requests[self._block_phase(seat)] -= 1
                if seat.end_step in self._ending_requests:
                    self._ending_requests[seat.end_step].remove(request)
            self.memory.release(tokens, seat.names, tokens - seat.unprocessed)
        if decoded:
            self.running = [request for request in self.running if request in self._seats]

    def _preempt(self, request: int) -> None:
        """Take a request out of the batch and put it back into the queue; it keeps the tokens it has made."""
        seat, state, made = self._seats[request], self.state, self._made_tokens.get(request, 0)
        tokens = seat.tokens - seat.unprocessed
        if seat.end_step:
            tokens = self._tokens_held(seat, self._step)
            made = self._requests.output[request] - (seat.end_step - self._step)
        self._release_seats([request])
        self._waiting.add(request, is_preempted=True)
        self._made_tokens[request] = made
        if seat.end_step and self._uses_swap:
            self._swapped_requests.add(request)
            self._swap_ns += tokens * self._swap_token_ns
            state.swapped_tokens += tokens
        else:
            # Count only tokens whose KV is lost: the named blocks stay in the prefix cache.
            cached = min(len(seat.names) * self.memory.named_tokens, tokens)
            state.preempted_tokens += tokens - cached
        state.preemptions += 1
        state.preempted += request not in self._preempted_requests
        self._preempted_requests.add(request)

    def _forget(self, request: int) -> None:
        """Remove all data of a request that has ended or was given up."""
        self._made_tokens.pop(request, None)
        self._swapped_requests.discard(request)
        self._preempted_requests.discard(request)
        if self._deadlines is not None:
            self._deadlines.forget(request)

    def _update_state(self) -> None:
        state, memory = self.state, self.memory
        state.running = len(self._seats)
        state.waiting = len(self._waiting)
        state.kv_used = memory.held_blocks / memory.total_blocks if memory.total_blocks else 0.0
        state.kv_peak = max(state.kv_peak, state.kv_used)
