"""Latency metrics of one exchange (TTFT, TPOT, ITL, ...) as pure functions, and bursts of events.

`measure` takes an Exchange and returns all terms (`Measured`), which the meter, the load generator and
reports use; many exchanges are summed up in `summary.py`. Values are ns, None where a term does not apply.
DEFINITIONS.md defines each term. A burst is at least `EVENTS_MIN` events with output within `SPREAD_NS`, the
first of them after a hold: a gap of at least `HOLD_NS` and `HOLD_MEDIANS` times the median gap of the answer.
These numbers are ours: no source defines the term.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from math import sqrt
from operator import mul, sub
from typing import Any, Final

from llmtap import native
from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline
from llmtap.exchange.outcome import EventClass, Reading, TokenSource
from llmtap.metrics.catalogue import OF_AN_EXCHANGE, Unit, values_of
from llmtap.metrics.deadlines import Benefit, user_idle_ns

EVENTS_MIN: Final = 3
"""Minimum number of events in a burst: fewer may be in one TCP segment by chance."""
SPREAD_NS: Final = 1_000_000
"""Maximum time between the events of a burst: no engine makes tokens faster, and writing many takes less."""
HOLD_NS: Final = 50_000_000
"""Minimum wait before a burst: a shorter one may be a token of a slow engine, or of a reader of 20
tokens/s."""
HOLD_MEDIANS: Final = 5
BURST_FACTOR: Final = 2.0
"""Chunks arrive in bursts if at least this many times as many arrive together as for the reference."""
BURST_SENSITIVE: Final = ("tpot", "tbc", "itl")
"""Metrics of gaps between chunks, which bursts make look better: most gaps within a burst are 0."""


@dataclass(frozen=True, slots=True)
class Bursts:
    count: int
    events: int
    hold_max_ns: int | None


NO_BURSTS: Final = Bursts(0, 0, None)


def bursts_of(times_ns: Sequence[int], gaps_ns: Sequence[int], gap_max_ns: int) -> Bursts:
    """Return the bursts among the events that carry output.

    Args:
        times_ns: their stamps, ascending. gaps_ns: the n - 1 gaps between them; gap_max_ns: the longest.
    """
    if gap_max_ns < HOLD_NS or len(times_ns) <= EVENTS_MIN:
        return NO_BURSTS
    least_ns = max(HOLD_NS, HOLD_MEDIANS * sorted(gaps_ns)[(len(gaps_ns) - 1) // 2])
    count = events = hold_max_ns = 0
    for i, gap_ns in enumerate(gaps_ns, 1):
        if gap_ns >= least_ns:
            size = bisect_right(times_ns, times_ns[i] + SPREAD_NS, i) - i
            if size >= EVENTS_MIN:
                count += 1
                events += size
                hold_max_ns = max(hold_max_ns, gap_ns)
    return Bursts(count, events, hold_max_ns) if count else NO_BURSTS


def chunks_at_a_time(chunking: Mapping[str, Any]) -> float | None:
    """Return the number of chunks that arrive together, by the `chunking` in the public JSON of a summary.

    This is the number of events per read. If most chunks are in bursts whose events came in several reads, it
    is the mean number of events of a burst. None without reads.
    """
    each: float | None = chunking.get("events_per_read")
    bursts, chunks = chunking.get("bursts") or {}, chunking.get("content_events") or 0
    split = each is not None and each < BURST_FACTOR and 0 < chunks <= 2 * bursts.get("events", 0)
    return bursts["events"] / bursts["n"] if split else each


def arrives_in_bursts(n: float | None, usual: float | None) -> bool:
    """Return whether `n` chunks arrive together where `usual` is the reference, so that the metrics of
    BURST_SENSITIVE are misleading."""
    return bool(n and usual and n >= BURST_FACTOR * usual)


DEFAULT_BENEFIT: Final = Benefit()
_CARRIES_OUTPUT: Final = bytes(bool(flags & OUTPUT) for flags in range(256))
"""Table for `bytes.translate`: 1 for the flags of an event that carries output, else 0."""


def ttfb_ns(t: Timeline) -> int | None:
    """Return the time to first byte: first byte of the response's body - submit."""
    return _since_submit(t, t.first_byte_ns)


def ttft_ns(t: Timeline) -> int | None:
    """Return the time to first token: first content that is not only white space - submit.

    For an answer that was not streamed, it is the time to the whole answer; summaries leave such answers out.

    Source: IETF draft, 5.1.3.1 and B.1.1.
    """
    return _since_submit(t, t.first_content_ns)


def ttft_any_ns(t: Timeline) -> int | None:
    """Return the time to the first token of any kind (reasoning, tool call, refusal, blanks) - submit."""
    return _since_submit(t, t.first_token_ns)


def ttft_reasoning_ns(t: Timeline) -> int | None:
    """Return the time to the first reasoning text - submit."""
    return _since_submit(t, t.first_reasoning_ns)


def ttft_tool_call_ns(t: Timeline) -> int | None:
    """Return the time to the first piece of a tool call - submit."""
    return _since_submit(t, t.first_tool_call_ns)


def first_event_ns(t: Timeline) -> int | None:
    """Return the time to the first event of any class, such as a role, a comment or a ping - submit."""
    return _since_submit(t, t.first_any_ns)


def e2e_ns(t: Timeline) -> int | None:
    """Return end to end time: last byte of the response - submit; None if the response never ended.

    Source: chapter on SLO metrics.
    """
    return _since_submit(t, t.response_end_ns)


def tpot_ns(t: Timeline, output_tokens: int | None) -> float | None:
    """Return the time per output token after the first: (last token - first token) / (output tokens - 1).

    None with fewer than two tokens, or if all came in a single event, whose one stamp spans no time. The last
    output stands in place of the response's end (chapter on SLO metrics), so that a trailing usage event does
    not count as generation.
    """
    if t.first_token_ns is None or t.last_token_ns is None or output_tokens is None or output_tokens < 2:
        return None
    if t.events.flags.translate(_CARRIES_OUTPUT).count(1) < 2:
        return None
    return (t.last_token_ns - t.first_token_ns) / (output_tokens - 1)


def tpot_to_end_ns(t: Timeline, output_tokens: int | None) -> float | None:
    """Return TPOT to the end of the response instead of the last token: (E2E - TTFT) / (output tokens - 1).

    TTFT is of any token. None where `tpot_ns` is None, or if the response never ended. Source: chapter on SLO
    metrics; vLLM's benchmark.
    """
    if t.response_end_ns is None or t.first_token_ns is None or output_tokens is None:
        return None
    if tpot_ns(t, output_tokens) is None:
        return None
    return (t.response_end_ns - t.first_token_ns) / (output_tokens - 1)


def output_times_ns(log: EventLog) -> list[int]:
    """Return the timestamps of the events that carry output, in order."""
    return list(compress(log.t_ns, log.flags.translate(_CARRIES_OUTPUT)))


def tbc_ns(times_ns: Sequence[int]) -> list[int]:
    """Return the gaps between consecutive events that carry output; 0 within one read.

    Source: IETF draft, 4.6.3 option A.
    """
    return list(map(sub, times_ns[1:], times_ns))


def itl_ns(times_ns: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return inter-token latencies by option B: every token gets the stamp of its chunk.

    A chunk of k tokens gives one full gap and k - 1 zeros. `tokens` holds the tokens of each chunk.
    Source: IETF draft, 4.6.3 option B.
    """
    return tbc_ns(list(chain.from_iterable(map(repeat, times_ns, tokens))))


def itl_even_ns(times_ns: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return inter-token latencies, a gap divided evenly among the tokens of the chunk that ends it.

    As SGLang's server does. The first chunk's tokens give no sample; a chunk without tokens leaves its gap to
    the next.
    """
    out: list[int] = []
    last_ns: int | None = None
    for t_ns, k in zip(times_ns, tokens, strict=True):
        if k < 1:
            continue
        if last_ns is not None:
            share_ns, rest_ns = divmod(t_ns - last_ns, k)
            out += [share_ns] * (k - rest_ns)
            out += [share_ns + 1] * rest_ns
        last_ns = t_ns
    return out


def itl_c_ns(x: Exchange) -> list[int] | None:
    """Return inter-token latencies by option C, gaps by the server's own clock; None if it reports none.

    Source: IETF draft, 4.6.3 option C.
    """
    return None if x.server_gaps_ns is None else list(x.server_gaps_ns)


def jitter_ns(gaps_ns: Sequence[int]) -> float | None:
    """Return the standard deviation (divided by n) of the gaps of one exchange; None with fewer than two.

    Source: IETF draft, 5.4.3 step e.
    """
    n = len(gaps_ns)
    if n < 2:
        return None
    # In integers there is no cancellation: n^2 var = n sum(g^2) - (sum g)^2, exactly.
    return sqrt(n * sum(map(mul, gaps_ns, gaps_ns)) - sum(gaps_ns) ** 2) / n


def tbc_max_ns(gaps_ns: Sequence[int]) -> int | None:
    """Return the longest gap between chunks. Source: IETF draft, 5.4.3 step f."""
    return max(gaps_ns, default=None)


def tokens_per_chunk(x: Exchange) -> list[int] | None:
    """Return the tokens of each event that carries output, or None if unknown.

    Known if every such event declares its own (ids, logprobs, running usage), or if the total equals the
    number of events: each has at least one token, so each has exactly one.
    """
    log = x.timeline.events
    declared = list(compress(log.tokens, log.flags.translate(_CARRIES_OUTPUT)))
    if not declared:
        return None
    if min(declared) >= 0:
        return declared if any(declared) else None
    return [1] * len(declared) if _streamed_tokens(x) == len(declared) else None


_of_an_exchange: Final = values_of(OF_AN_EXCHANGE)


@dataclass(slots=True)
class Measured:
    """All figures of one exchange, computed once. Times are in ns; a figure that does not apply is None."""

    ttft_ns: int | None
    ttft_scheduled_ns: int | None
    """First token (`ttft`, or else `ttft_any`) - scheduled; without a schedule - submit."""
    ttft_any_ns: int | None
    ttft_reasoning_ns: int | None
    ttft_tool_call_ns: int | None
    first_event_ns: int | None
    ttfb_ns: int | None
    tpot_ns: float | None
    tpot_to_end_ns: float | None
    e2e_ns: int | None
    e2e_scheduled_ns: int | None
    user_idle_ns: int | None
    user_idle_eq4_ns: int | None
    """User idle latency with d_i = V i, as eq. 4 of the smooth goodput paper is printed, without a grace."""
    user_idle_from_first_token_ns: int | None
    """User idle latency of a reader who starts at the first token, so without the wait for it."""
    smooth_benefit: float | None
    smooth_benefit_eq4: float | None
    """Benefit with `user_idle_eq4_ns` as the wait."""
    benefit: Benefit
    """Reader and parameters of the benefits and of the user idle latencies."""
    tbc_ns: list[int]
    tbc_max_ns: int | None
    jitter_ns: float | None
    tokens_per_chunk: list[int] | None
    output_events: int
    itl_b_ns: list[int] | None
    """ITL by option B; None if the tokens of each chunk are unknown."""
    itl_even_ns: list[int] | None
    itl_c_ns: list[int] | None
    """ITL by option C; None if the server does not report its own times."""
    itl_policy: str
    """How to read this exchange's ITL, and the source of its token counts."""
    bursts: Bursts
    tokens_known: bool
    """Whether objectives judge the exchange by its tokens: a dialect read the answer, or inferred readings
    count."""

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of an exchange by public name, in their units."""
        return {
            metric.name: _seconds(value) if metric.unit is Unit.SECONDS else value
            for metric, value in zip(OF_AN_EXCHANGE, _of_an_exchange(self), strict=True)
        }


def measure(x: Exchange, benefit: Benefit = DEFAULT_BENEFIT, *, judge_inferred: bool = False) -> Measured:
    """Return all terms of one exchange.

    `benefit` describes the reader. `judge_inferred` lets objectives judge the tokens of answers that were
    read by their structure.
    """
    t = x.timeline
    times = output_times_ns(t.events)
    tokens = tokens_per_chunk(x)
    single = tokens is not None and tokens.count(1) == len(tokens)
    pace = 1.0
    if tokens is None:
        # Only the total is known: assume the mean number of tokens for each chunk.
        streamed = _streamed_tokens(x)
        if times and streamed is not None:
            pace = max(1.0, streamed / len(times))
    v_ns = benefit.reader_ns_per_token
    # The reader's waits from submit and from the first token differ only by their origin, so compute one
    # wait, from time 0.
    gaps, pause, jitter, longest_ns = _gap_figures(times, round(v_ns * pace))
    b = even = None
    if tokens is not None and single:
        # With one token per chunk, options B and B-even are both equal to the gaps (IETF B.2.1).
        b = even = gaps
    elif tokens is not None:
        b, even = itl_ns(times, tokens), itl_even_ns(times, tokens)
        longest_ns = user_idle_ns(times, 0, tokens, v_ns, clamped=False)
    idle = idle_eq4 = reading = None
    if longest_ns is not None:
        reading = max(0, longest_ns - times[0])
        if t.submit_ns is not None:
            since_submit_ns = longest_ns - t.submit_ns
            idle = max(0, since_submit_ns - benefit.grace_tokens * v_ns)
            idle_eq4 = max(0, since_submit_ns - v_ns)
    c = itl_c_ns(x)
    ttft, ttft_any, e2e = ttft_ns(t), ttft_any_ns(t), e2e_ns(t)
    first_ns = ttft_any if ttft is None else ttft
    written = _written_tokens(x)
    tpot = tpot_ns(t, written)
    return Measured(
        ttft_ns=ttft,
        ttft_scheduled_ns=_since_schedule(x, first_ns),
        ttft_any_ns=ttft_any,
        ttft_reasoning_ns=ttft_reasoning_ns(t),
        ttft_tool_call_ns=ttft_tool_call_ns(t),
        first_event_ns=first_event_ns(t),
        ttfb_ns=ttfb_ns(t),
        tpot_ns=tpot,
        tpot_to_end_ns=None if tpot is None else tpot_to_end_ns(t, written),
        e2e_ns=e2e,
        e2e_scheduled_ns=_since_schedule(x, e2e),
        user_idle_ns=idle,
        user_idle_eq4_ns=idle_eq4,
        user_idle_from_first_token_ns=reading,
        smooth_benefit=benefit.tokens(x.tokens.output, idle),
        smooth_benefit_eq4=benefit.tokens(x.tokens.output, idle_eq4),
        benefit=benefit,
        tbc_ns=gaps,
        tbc_max_ns=pause,
        jitter_ns=jitter,
        tokens_per_chunk=tokens,
        output_events=len(times),
        itl_b_ns=b,
        itl_even_ns=even,
        itl_c_ns=c,
        itl_policy=_itl_policy(tokens, single, c is not None, x.tokens.source),
        bursts=NO_BURSTS if pause is None else bursts_of(times, gaps, pause),
        tokens_known=x.reading is Reading.DIALECT or (judge_inferred and x.reading is Reading.INFERRED),
    )


def _gap_figures(times_ns: list[int], step_ns: int) -> tuple[list[int], int | None, float | None, int | None]:
    """Return `tbc_ns`, `tbc_max_ns`, `jitter_ns` and the unclamped `user_idle_ns` from 0 on, in one pass.

    Args:
        step_ns: time that the reader takes for a chunk.
    """
    figures = None if native.compiled is None else native.compiled.gap_figures(times_ns, step_ns)
    if figures is None:
        gaps = tbc_ns(times_ns)
        longest_ns = user_idle_ns(times_ns, 0, 1, step_ns, clamped=False)
        return gaps, tbc_max_ns(gaps), jitter_ns(gaps), longest_ns
    gaps, pause, deviation, longest_ns = figures
    return gaps, pause, sqrt(deviation) / len(gaps) if len(gaps) > 1 else None, longest_ns


def metrics_of(x: Exchange) -> dict[str, float | None]:
    """Return the exchange's metrics by public name, in their units."""
    return measure(x).metrics()


def chunking_of(x: Exchange) -> dict[str, object]:
    """Return the chunking of the answer (IETF draft, B.2): events, those with output, reads, tokens in each.

    `tokens_per_chunk_mean` needs a token count that is not itself a count of chunks;
    `single_token_share` needs the tokens of each chunk. Both are None otherwise.
    """
    tokens = tokens_per_chunk(x)
    log = x.timeline.events
    times = output_times_ns(log)
    carrying = len(times)
    streamed = sum(tokens) if tokens is not None else _streamed_tokens(x)
    gaps = tbc_ns(times)
    bursts = bursts_of(times, gaps, max(gaps)) if gaps else NO_BURSTS
    return {
        "events": len(log),
        "content_events": carrying,
        "reads": x.reads,
        "events_per_read": len(log) / x.reads if x.reads else None,
        "bytes_per_event_mean": sum(log.sizes) / len(log) if log else None,
        "tokens_per_chunk_mean": streamed / carrying if carrying and streamed is not None else None,
        "single_token_share": None if tokens is None else tokens.count(1) / carrying,
        "bursts": bursts.count,
        "burst_events": bursts.events,
        "burst_hold_max": _seconds(bursts.hold_max_ns),
    }


def _streamed_tokens(x: Exchange) -> int | None:
    """Return the tokens of all events of the stream; None if only chunks were counted.

    A provider's total includes reasoning that it did not send; without a reasoning event that part is
    subtracted.
    """
    n = _written_tokens(x)
    if n is None or x.tokens.source in (TokenSource.NONE, TokenSource.CHUNKS):
        return None
    if x.tokens.reasoning and not (_shows_reasoning(x) or x.reasoning_is_separate):
        n = max(0, n - x.tokens.reasoning)
    return n


def _written_tokens(x: Exchange) -> int | None:
    """Return the output tokens, with reasoning that was sent and is counted separately."""
    n = x.tokens.output
    return (
        n + (x.tokens.reasoning or 0)
        if n is not None and x.reasoning_is_separate and _shows_reasoning(x)
        else n
    )


def _shows_reasoning(x: Exchange) -> bool:
    """Return whether the answer has an event with reasoning."""
    return EventClass.REASONING.value in x.timeline.events.classes


def _since_submit(t: Timeline, t_ns: int | None) -> int | None:
    # None if the answer came before the request was complete (an early 413).
    if t_ns is None or t.submit_ns is None or t_ns < t.submit_ns:
        return None
    return t_ns - t.submit_ns


def _since_schedule(x: Exchange, since_submit_ns: int | None) -> int | None:
    """Return a time since submission as one since the scheduled time; unchanged without a schedule."""
    submit_ns = x.timeline.submit_ns
    if since_submit_ns is None or submit_ns is None or x.scheduled_ns is None:
        return since_submit_ns
    return since_submit_ns + submit_ns - x.scheduled_ns


def _itl_policy(tokens: list[int] | None, single: bool, server: bool, source: TokenSource) -> str:
    """Return the delivery pattern, which decides the ITL option (IETF draft, 4.6.3 and B.2.1)."""
    if tokens is None:
        option = "A (time between chunks)"
    elif single or tokens.count(1) > 0.9 * len(tokens):
        option = "direct (single-token chunks)"
    else:
        option = "B-even (gaps spread over the tokens of a chunk)"
    if server:
        option = f"C (the server's stamps) beside {option}"
    return f"{option}; tokens by {source.value}"


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9
