"""Latency metrics of one exchange (TTFT, TPOT, ITL, ...) as pure functions, and bursts of events.

`measure` computes all figures of an Exchange (`Measured`) for the meter, the load generator and reports;
`summary.py` summarises many exchanges. Times are in ns; a figure that does not apply is None. DEFINITIONS.md
defines each figure. A burst consists of at least `EVENTS_MIN` events with output within `SPREAD_NS`, after a
hold: a gap of at least `HOLD_NS`, and of `HOLD_MEDIANS` times the median gap of the answer. No source defines
bursts, so these limits are our choice.
"""

from array import array
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
"""Minimum number of events in a burst: one or two can be in one TCP segment by chance."""
SPREAD_NS: Final = 1_000_000
"""Maximum time from the first to the last event of a burst: engines make tokens at larger distances."""
HOLD_NS: Final = 50_000_000
"""Minimum gap before a burst: shorter gaps occur between the tokens of a slow engine (20 tokens/s)."""
HOLD_MEDIANS: Final = 5
"""Minimum gap before a burst, as a multiple of the answer's median gap: the gap must be unusual."""
BURST_FACTOR: Final = 2.0
"""Chunks arrive in bursts if at least this multiple of the usual number of chunks arrives together."""
BURST_SENSITIVE: Final = ("tpot", "tbc", "itl")
"""Metrics that bursts make look better, because most gaps between the chunks of a burst are 0."""


@dataclass(frozen=True, slots=True)
class Bursts:
    """Number of bursts of an answer, of the events in them, and the longest hold before one of them."""

    count: int
    """Number of bursts."""
    events: int
    hold_max_ns: int | None
    """Longest time that a server held text before a burst."""


NO_BURSTS: Final = Bursts(0, 0, None)


def bursts_of(times_ns: Sequence[int], gaps_ns: Sequence[int], gap_max_ns: int) -> Bursts:
    """Return the bursts among the events that carry output.

    Args:
        times_ns: times of these events, ascending.
        gaps_ns: gaps between these times.
        gap_max_ns: longest of the gaps.
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
    """Return the mean number of chunks that arrive together, from the `chunking` of a summary's public JSON.

    It is the number of events per read. If the events of a burst came in several reads, and most chunks are
    in bursts, it is the number of events per burst. None without reads.
    """
    per_read: float | None = chunking.get("events_per_read")
    bursts, chunks = chunking.get("bursts") or {}, chunking.get("content_events") or 0
    split = per_read is not None and per_read < BURST_FACTOR and 0 < chunks <= 2 * bursts.get("events", 0)
    return bursts["events"] / bursts["n"] if split else per_read


def arrives_in_bursts(n: float | None, usual: float | None) -> bool:
    """Return whether chunks arrive in bursts, so that the metrics of BURST_SENSITIVE are misleading.

    `n`: number of chunks that arrive together. `usual`: that number in the result to compare with.
    """
    return bool(n and usual and n >= BURST_FACTOR * usual)


DEFAULT_BENEFIT: Final = Benefit()
_CARRIES_OUTPUT: Final = bytes(bool(flags & OUTPUT) for flags in range(256))
_UNDECLARED: Final = array("l", (-1,))
"""Number of tokens of an event that declares none (`EventLog.tokens`)."""
"""Table for `bytes.translate` of the flags of events: 1 for an event that carries output, else 0."""


def ttfb_ns(t: Timeline) -> int | None:
    """Return the time to first byte: from submission to the first byte of the response's body."""
    return _since_submit(t, t.first_byte_ns)


def ttft_ns(t: Timeline) -> int | None:
    """Return the time to first token: from submission to the first content that is not only white space.

    For an answer in one piece, it is the time to the whole answer; summaries do not include these answers.

    Source: IETF draft, 5.1.3.1 and B.1.1.
    """
    return _since_submit(t, t.first_content_ns)


def ttft_any_ns(t: Timeline) -> int | None:
    """Return the time from submission to the first token of any kind (reasoning, tool call, refusal, ...)."""
    return _since_submit(t, t.first_token_ns)


def ttft_reasoning_ns(t: Timeline) -> int | None:
    """Return the time from submission to the first reasoning text."""
    return _since_submit(t, t.first_reasoning_ns)


def ttft_tool_call_ns(t: Timeline) -> int | None:
    """Return the time from submission to the first piece of a tool call."""
    return _since_submit(t, t.first_tool_call_ns)


def first_event_ns(t: Timeline) -> int | None:
    """Return the time from submission to the first event of any class, such as a role or a ping."""
    return _since_submit(t, t.first_any_ns)


def e2e_ns(t: Timeline) -> int | None:
    """Return the time from submission to the last byte of the response; None if it never ended.

    Source: chapter on SLO metrics.
    """
    return _since_submit(t, t.response_end_ns)


def tpot_ns(t: Timeline, output_tokens: int | None) -> float | None:
    """Return the time per output token after the first: (last token - first token) / (output tokens - 1).

    None with fewer than two tokens, or if one event has all tokens: then no time passes between them.
    The time of the last token is used instead of the response's end (chapter on SLO metrics), so that the
    time until a usage event after the last token does not count as generation.
    """
    if t.first_token_ns is None or t.last_token_ns is None or output_tokens is None or output_tokens < 2:
        return None
    if t.events.flags.translate(_CARRIES_OUTPUT).count(1) < 2:
        return None
    return (t.last_token_ns - t.first_token_ns) / (output_tokens - 1)


def tpot_to_end_ns(t: Timeline, output_tokens: int | None) -> float | None:
    """Return TPOT until the end of the response, not the last token: (E2E - TTFT) / (output tokens - 1).

    TTFT is the time to the first token of any kind. None if `tpot_ns` is None, or if the response never
    ended. Source: chapter on SLO metrics; vLLM's benchmark.
    """
    if t.response_end_ns is None or t.first_token_ns is None or output_tokens is None:
        return None
    if tpot_ns(t, output_tokens) is None:
        return None
    return (t.response_end_ns - t.first_token_ns) / (output_tokens - 1)


def output_times_ns(log: EventLog) -> list[int]:
    """Return the times of the events that carry output, in order."""
    return list(compress(log.t_ns, log.flags.translate(_CARRIES_OUTPUT)))


def tbc_ns(times_ns: Sequence[int]) -> list[int]:
    """Return the gaps between consecutive events that carry output. Events of one read have gaps of 0.

    Source: IETF draft, 4.6.3 option A.
    """
    return list(map(sub, times_ns[1:], times_ns))


def itl_ns(times_ns: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return inter-token latencies by option B: every token has the time of its chunk.

    So a chunk of k tokens gives one whole gap and k - 1 zeros. `tokens`: number of tokens of each chunk.
    Source: IETF draft, 4.6.3 option B.
    """
    return tbc_ns(list(chain.from_iterable(map(repeat, times_ns, tokens))))


def itl_even_ns(times_ns: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return inter-token latencies by option B-even: the tokens of the chunk after a gap share it evenly.

    This is the method of SGLang's server. The tokens of the first chunk have no latency. The gap before a
    chunk without tokens is added to the next gap.
    """
    out: list[int] = []
    previous_ns: int | None = None
    for t_ns, k in zip(times_ns, tokens, strict=True):
        if k < 1:
            continue
        if previous_ns is not None:
            share_ns, rest_ns = divmod(t_ns - previous_ns, k)
            out += [share_ns] * (k - rest_ns)
            out += [share_ns + 1] * rest_ns
        previous_ns = t_ns
    return out


def itl_c_ns(x: Exchange) -> list[int] | None:
    """Return inter-token latencies by option C: gaps that the server reports; None if it reports none.

    Source: IETF draft, 4.6.3 option C.
    """
    return None if x.server_gaps_ns is None else list(x.server_gaps_ns)


def jitter_ns(gaps_ns: Sequence[int]) -> float | None:
    """Return the standard deviation (divisor n) of the gaps of one exchange; None with fewer than two gaps.

    Source: IETF draft, 5.4.3 step e.
    """
    n = len(gaps_ns)
    if n < 2:
        return None
    # n^2 variance = n sum(g^2) - (sum g)^2. With integers, this difference is exact.
    return sqrt(n * sum(map(mul, gaps_ns, gaps_ns)) - sum(gaps_ns) ** 2) / n


def tbc_max_ns(gaps_ns: Sequence[int]) -> int | None:
    """Return the longest gap between chunks. Source: IETF draft, 5.4.3 step f."""
    return max(gaps_ns, default=None)


def tokens_per_chunk(x: Exchange) -> list[int] | None:
    """Return the number of tokens of each event that carries output; None if unknown.

    It is known if each of these events declares its tokens (ids, logprobs, running usage). It is also known
    if the total equals the number of events: since each event has at least one token, it has exactly one.
    """
    log = x.timeline.events
    carries = log.flags.translate(_CARRIES_OUTPUT)
    n = carries.count(1)
    if not n:
        return None
    if log.tokens != _UNDECLARED * len(carries):
        declared = list(compress(log.tokens, carries))
        if min(declared) >= 0:
            return declared if any(declared) else None
    return [1] * n if _streamed_tokens(x) == n else None


_read_metrics: Final = values_of(OF_AN_EXCHANGE)
"""Function that returns the values of OF_AN_EXCHANGE of a `Measured`, in their order."""


@dataclass(slots=True)
class Measured:
    """All figures of one exchange, computed once. Times are in ns; a figure that does not apply is None."""

    ttft_ns: int | None
    ttft_scheduled_ns: int | None
    """`ttft_ns`, or else `ttft_any_ns`, counted from the scheduled time, if there is a schedule."""
    ttft_any_ns: int | None
    ttft_reasoning_ns: int | None
    ttft_tool_call_ns: int | None
    first_event_ns: int | None
    """Time to the first event of any kind."""
    ttfb_ns: int | None
    tpot_ns: float | None
    tpot_to_end_ns: float | None
    """TPOT to the end of the answer instead of the last token."""
    e2e_ns: int | None
    e2e_scheduled_ns: int | None
    """E2E from the scheduled time instead of the submission."""
    user_idle_ns: int | None
    """Total time for which the reader has nothing to read."""
    user_idle_eq4_ns: int | None
    """User idle latency with token i due at d_i = V i: eq. 4 of the smooth goodput paper as printed."""
    user_idle_from_first_token_ns: int | None
    """User idle latency of a reader who starts at the first token: it does not include the wait for it."""
    smooth_benefit: float | None
    """Value of the answer for the reader, in tokens (`Benefit.tokens`), with `user_idle_ns` as the wait."""
    smooth_benefit_eq4: float | None
    """As `smooth_benefit`, with `user_idle_eq4_ns` as the wait."""
    benefit: Benefit
    """Parameters of the reader with which the waits and benefits were computed."""
    tbc_ns: list[int]
    """Times between chunks."""
    tbc_max_ns: int | None
    """Longest time between chunks."""
    jitter_ns: float | None
    """Standard deviation of the times between chunks."""
    tokens_per_chunk: list[int] | None
    """Number of tokens in each chunk; None if unknown."""
    output_events: int
    """Number of events with output."""
    itl_b_ns: list[int] | None
    """ITL by option B; None if the tokens of each chunk are unknown."""
    itl_even_ns: list[int] | None
    """Times between tokens if the tokens of a chunk share its time evenly."""
    itl_c_ns: list[int] | None
    """ITL by option C; None if the server does not report its own times."""
    itl_policy: str
    """Description of the ITL option that fits this exchange, and of the source of its token counts."""
    bursts: Bursts
    """Groups of events that arrived together."""
    tokens_known: bool
    """Whether objectives judge the times of tokens: a dialect read them, or `judge_inferred` is set."""

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of an exchange by public name, in their units."""
        return {
            metric.name: _seconds(value) if metric.unit is Unit.SECONDS else value
            for metric, value in zip(OF_AN_EXCHANGE, _read_metrics(self), strict=True)
        }


def measure(x: Exchange, benefit: Benefit = DEFAULT_BENEFIT, *, judge_inferred: bool = False) -> Measured:
    """Return all figures of one exchange.

    `benefit`: parameters of the reader. `judge_inferred`: whether objectives also judge the times of tokens
    that no dialect read, but that were inferred from the structure of the answer.
    """
    t = x.timeline
    times = output_times_ns(t.events)
    tokens = tokens_per_chunk(x)
    single = tokens is not None and tokens.count(1) == len(tokens)
    tokens_assumed = 1.0
    if tokens is None:
        # At most the total is known: assume that each chunk has the mean number of tokens.
        streamed = _streamed_tokens(x)
        if times and streamed is not None:
            tokens_assumed = max(1.0, streamed / len(times))
    v_ns = benefit.reader_ns_per_token
    # The reader's waits since submission and since the first token differ only in their origin. So compute
    # the wait since time 0 (`longest_ns`), and subtract each origin below.
    gaps, pause, jitter, longest_ns = _gap_figures(times, round(v_ns * tokens_assumed))
    b = even = None
    if tokens is not None and single:
        # With one token per chunk, options B and B-even are both equal to the gaps (IETF B.2.1).
        b = even = gaps
    elif tokens is not None:
        b, even = itl_ns(times, tokens), itl_even_ns(times, tokens)
        longest_ns = user_idle_ns(times, 0, tokens, v_ns, clamped=False)
    idle = idle_eq4 = idle_from_first_token = None
    if longest_ns is not None:
        idle_from_first_token = max(0, longest_ns - times[0])
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
        user_idle_from_first_token_ns=idle_from_first_token,
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
    """Return `tbc_ns`, `tbc_max_ns`, `jitter_ns`, and the unclamped `user_idle_ns` since time 0, in one pass.

    `step_ns`: time that the reader needs for a chunk.
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
    """Return public JSON on the chunks of an answer (IETF draft, B.2): numbers of events, reads and tokens.

    `tokens_per_chunk_mean` is None if the token count is only a count of chunks. `single_token_share` is None
    if the number of tokens of each chunk is unknown.
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
    """Return the number of tokens in the events of the stream; None if only chunks were counted.

    A provider's total includes reasoning that it did not send. So the reasoning tokens are subtracted if no
    event has reasoning.
    """
    n = _written_tokens(x)
    if n is None or x.tokens.source in (TokenSource.NONE, TokenSource.CHUNKS):
        return None
    if x.tokens.reasoning and not (_shows_reasoning(x) or x.reasoning_is_separate):
        n = max(0, n - x.tokens.reasoning)
    return n


def _written_tokens(x: Exchange) -> int | None:
    """Return the output tokens, plus the reasoning tokens if these were sent and are counted separately."""
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
    # A server can answer before the request is complete (an early 413): the time does not apply then.
    if t_ns is None or t.submit_ns is None or t_ns < t.submit_ns:
        return None
    return t_ns - t.submit_ns


def _since_schedule(x: Exchange, since_submit_ns: int | None) -> int | None:
    """Convert a time since submission to one since the scheduled time; unchanged without a schedule."""
    submit_ns = x.timeline.submit_ns
    if since_submit_ns is None or submit_ns is None or x.scheduled_ns is None:
        return since_submit_ns
    return since_submit_ns + submit_ns - x.scheduled_ns


def _itl_policy(tokens: list[int] | None, single: bool, server: bool, source: TokenSource) -> str:
    """Return the ITL option that fits the numbers of tokens per chunk (IETF draft, 4.6.3 and B.2.1).

    `single`: whether each chunk has one token. `server`: whether the server reports its own times.
    """
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
