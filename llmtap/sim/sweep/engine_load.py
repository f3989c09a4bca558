"""Number of requests and tokens in an engine at any time, computed from the times of its requests.

`fitting.py` uses `EngineLoad` to find the iterations that only decoded, and their numbers of requests and
tokens.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import output_times_ns, tokens_per_chunk

_ROUNDED_NS: Final = 2_000
"""Tolerance for times in captures, which are rounded down to whole us after each request's arrival."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Size of the KV memory of the measured server."""

    blocks: int
    """Number of blocks."""
    block_tokens: int
    """Number of tokens in a block."""


@dataclass(slots=True)
class RequestTimes:
    """Times and token counts of one request."""

    arrival_ns: int
    start_ns: int
    """Time at which the server began to process the request, if it reports this; else the arrival."""
    first_ns: int | None
    """Time of the first token of a stream; `last_ns`: of the last token."""
    last_ns: int | None
    """Time of the last token of a stream."""
    end_ns: int
    prompt: int | None
    """Number of prompt tokens that were not cached."""
    context: int
    """Number of all prompt tokens; `output`: number of output tokens."""
    output: int
    """Number of output tokens."""
    times_ns: list[int]
    """Time of each token; empty if unknown."""


def request_times(x: Exchange) -> RequestTimes | None:
    """Return the times of an exchange; None if it reached no engine."""
    t, tokens = x.timeline, x.tokens
    if t.submit_ns is None and t.first_token_ns is None:
        return None
    submit_ns = t.arrival_ns if t.submit_ns is None else t.submit_ns
    # Use only the first entry, not the sum: a gateway and its engine can both report the same wait.
    queue_waits_ms = (float(str(one["ms"])) for one in x.server_timing or () if one.get("name") == "queue")
    queue_wait_ms = next(queue_waits_ms, 0.0)
    last_ns = t.last_token_ns if x.stream else None
    if last_ns is None and x.stream and t.first_token_ns is not None:
        last_ns = t.response_end_ns  # Traces such as Dynamo's have the end of an answer, not its last token.
    times: list[int] = []
    if last_ns is not None and not x.unlogged_events:
        counts = tokens_per_chunk(x)
        if counts is not None and counts.count(1) == len(counts):
            times = output_times_ns(t.events)
    prompt_tokens = tokens.input
    return RequestTimes(
        submit_ns,
        submit_ns + round(queue_wait_ms * 1e6),
        t.first_token_ns if x.stream else None,
        last_ns,
        last_ns or t.response_end_ns or t.delivered_ns or submit_ns,
        None if prompt_tokens is None else max(0, prompt_tokens - (tokens.cached or 0)),
        prompt_tokens or 0,
        len(times) or tokens.output or 0,
        times,
    )


class EngineLoad:
    """Number of running requests, and number of their tokens in memory (context), at any time."""

    def __init__(self, rows: Sequence[RequestTimes], memory: KvMemory | None = None) -> None:
        running = [row for row in rows if row.first_ns is not None and row.last_ns is not None]
        self._arrivals = sorted(row.arrival_ns for row in rows)
        self._end_times = sorted(row.end_ns for row in rows)
        self._start_times = sorted(row.start_ns for row in rows)
        self._settled_times = sorted(row.end_ns if row.first_ns is None else row.first_ns for row in rows)
        """Times at which requests stop waiting: at their first token or their end."""
        firsts = sorted((row.first_ns or 0, row.context, row.prompt or 0) for row in running)
        lasts = sorted((row.last_ns or 0, row.context, row.output) for row in running)
        self._first_times, self._last_times = [t for t, _, _ in firsts], [t for t, _, _ in lasts]
        """Time of the first token, and of the last token, of each request, ascending."""
        is_later = (
            t - previous_ns > _ROUNDED_NS
            for previous_ns, t in pairwise([-3 * _ROUNDED_NS, *self._first_times])
        )
        self._first_token_iterations = [0, *accumulate(is_later)]
        self._begun_context = [0, *accumulate(n for _, n, _ in firsts)]
        """Tokens in memory of all requests that have begun, in order of their first tokens."""
        self._begun_prompt_tokens = [0, *accumulate(n for _, _, n in firsts)]
        """Prompt tokens of all requests that have begun, in order of their first tokens."""
        self._ended_context = [0, *accumulate(n for _, n, _ in lasts)]
        """Tokens in memory that ended requests have released, in order of their ends."""
        self._ended_output_tokens = [0, *accumulate(n for _, _, n in lasts)]
        self._token_times = sorted(t for row in running for t in row.times_ns)
        """Time of each token of all requests."""
        self._integrals = _LoadIntegrals(running)
        """Integrals of the load over time."""
        self.has_token_times = all(row.times_ns for row in running)
        self._memory = memory if self.has_token_times else None
        """Size of the KV memory, to find requests that wait for it; None: unknown."""
        if self._memory is not None:
            self._store_periods(rows, running)

    def _store_periods(self, rows: Sequence[RequestTimes], running: Sequence[RequestTimes]) -> None:
        """Store the periods in which a request waits or is in prefill, or is possibly preempted."""
        # A wait ends when the request "settles": it gets its first token, or ends without a token.
        waits = [
            (row.start_ns, row.end_ns if row.first_ns is None else row.first_ns, row.context) for row in rows
        ]
        waits.sort(key=lambda wait: wait[1])
        self._settled_times = [end_ns for _, end_ns, _ in waits]
        self._waits = [(start_ns, tokens) for start_ns, _, tokens in waits]
        """Start and prompt tokens of each wait, by its end. At any time, the wait that ends next is that of
        the head of the queue, if it has already begun."""
        pauses = [(a, b) for row in running for a, b in pairwise(row.times_ns) if self.is_full(a)]
        self._preempted_times = sorted(a for a, _ in pauses)
        self._resumed_times = sorted(b for _, b in pauses)

    def is_full(self, t_ns: int) -> bool:
        """Return whether the memory is possibly too small for the next token of each running request.

        A block that several prompts share is counted once for each of them.
        """
        assert self._memory is not None
        d, context = self.decoding_state(t_ns + _ROUNDED_NS)
        return context // self._memory.block_tokens + 2 * d > self._memory.blocks

    def running_count(self, t_ns: int) -> int:
        """Return the number of requests that decode at this time."""
        return bisect_left(self._first_times, t_ns) - bisect_left(self._last_times, t_ns)

    def was_alone(self, row: RequestTimes) -> bool:
        """Return whether no other request was open from the arrival of a request to its first token."""
        assert row.first_ns is not None
        arrived = bisect_left(self._arrivals, row.first_ns)
        return arrived - bisect_right(self._end_times, row.arrival_ns) == 1

    def is_undisturbed(self, t_ns: int) -> bool:
        """Return whether no request is in prefill at this time, and none can begin its prefill.

        This is the case if no request waits, or if the next request does not fit into the memory.
        """
        later_ns = t_ns + _ROUNDED_NS
        settled = bisect_right(self._settled_times, later_ns)
        none_waits = bisect_right(self._start_times, later_ns) <= settled
        if self._memory is None:
            return none_waits
        if bisect_right(self._preempted_times, later_ns) > bisect_right(self._resumed_times, later_ns):
            return False
        if none_waits:
            return True
        head_start_ns, tokens = self._waits[settled]
        context = self.decoding_state(later_ns)[1]
        # A request that waits because the memory is full is not in prefill. `blocks_used` is a lower bound of
        # the blocks in use. So if the next prompt does not fit even with this bound, its request was not
        # admitted.
        blocks_used = -(-context // self._memory.block_tokens)
        blocks_needed = -(-tokens // self._memory.block_tokens)
        return head_start_ns <= later_ns and blocks_used + blocks_needed > self._memory.blocks

    def decoding_state(self, t_ns: int) -> tuple[int, int]:
        """Return the number of requests that decode at this time, and the number of their tokens in memory.

        The number of tokens is valid only if all tokens have times.
        """
        begun, ended = bisect_left(self._first_times, t_ns), bisect_left(self._last_times, t_ns)
        tokens_made = bisect_left(self._token_times, t_ns) - self._ended_output_tokens[ended]
        # Do not count the newest token of each request: the next iteration adds it to the memory.
        context = self._begun_context[begun] - self._ended_context[ended] + tokens_made - (begun - ended)
        return begun - ended, context

    def prompts_processed(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return, for a period, the number of iterations with first tokens, and of their prompt tokens."""
        low, high = (bisect_right(self._first_times, t_ns + _ROUNDED_NS) for t_ns in (start_ns, end_ns))
        prompts = self._begun_prompt_tokens[high] - self._begun_prompt_tokens[low]
        return self._first_token_iterations[high] - self._first_token_iterations[low], prompts

    def means(self, row: RequestTimes) -> tuple[float, float]:
        """Return the means of (d - 1) / d (d requests decode) and of the context, from first token to last.

        The means are over iterations if all tokens have times, else over time.
        """
        assert row.first_ns is not None
        assert row.last_ns is not None
        if self.has_token_times:
            loads = [self.decoding_state(t_ns - _ROUNDED_NS) for t_ns in row.times_ns[1:]]
            n = len(loads)
            return sum((d - 1) / d for d, _ in loads if d) / n, sum(context for _, context in loads) / n
        share, context = self._integrals.until(row.last_ns)
        share_before, context_before = self._integrals.until(row.first_ns)
        length_ns = row.last_ns - row.first_ns
        return (share - share_before) / length_ns, (context - context_before) / length_ns


class _LoadIntegrals:
    """Integrals over time of (d - 1) / d (d requests decode) and of the context c (linear between points)."""

    def __init__(self, running: Sequence[RequestTimes]) -> None:
        firsts, lasts = (
            np.array(ends) for ends in zip(*((r.first_ns, r.last_ns) for r in running), strict=True)
        )
        grown = np.array([float(row.output - 1) for row in running]) * (lasts > firsts)
        pace = grown / np.maximum(lasts - firsts, 1)
        context = np.array([float(row.context) for row in running])
        times = np.concatenate([firsts, lasts])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        """Times at which the load changes, ascending."""
        elapsed = np.diff(self._times)
        d = np.cumsum(np.repeat([1, -1], len(running))[order])
        self._share = np.where(d > 0, (d - 1) / np.maximum(d, 1), 0.0)
        """(d - 1) / d from each of the times to the next."""
        self._pace = np.cumsum(np.concatenate([pace, -pace])[order])
        """Growth of the context in tokens per ns, from each of the times to the next."""
        self._context = np.cumsum(np.concatenate([context, -context - grown])[order])
        """Context at each of the times."""
        self._context[1:] += np.cumsum(self._pace[:-1] * elapsed)
        self._share_integrals = np.append(0, np.cumsum(self._share[:-1] * elapsed))
        self._context_integrals = np.append(
            0, np.cumsum((self._context[:-1] + self._pace[:-1] * elapsed / 2) * elapsed)
        )

    def until(self, t_ns: int) -> tuple[float, float]:
        """Return the integrals of (d - 1) / d and of c from the first point to this time."""
        i = int(np.searchsorted(self._times, t_ns, side="right")) - 1
        elapsed_ns = t_ns - int(self._times[i])
        share = self._share_integrals[i] + self._share[i] * elapsed_ns
        context = (
            self._context_integrals[i] + (self._context[i] + self._pace[i] * elapsed_ns / 2) * elapsed_ns
        )
        return float(share), float(context)
