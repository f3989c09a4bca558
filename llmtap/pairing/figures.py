"""Figures of one pair: what the gateway added, held back, cut, changed, retried and threw away.

`FIGURES` declares each figure, `MeasuredPair` has the values, and `summary.py` and the reports loop over
`FIGURES`. Every value has a range that contains the true value, computed from the uncertainties of both
exchanges and of the clock. Delays are from one vantage to the other, so they include the network between them
and the time that the relay at the back itself took. That time is subtracted at the low end of a range.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec import Struct

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.catalogue import Unit
from llmtap.metrics.latency import output_times_ns, ttft_ns
from llmtap.pairing.alignment import (
    Alignment,
    TextRelation,
    Times,
    align,
    first_block_length,
    held_tokens_max,
    text_events,
)
from llmtap.pairing.attempts import GatewayAttempt, Role, attempts_of
from llmtap.pairing.clock import SAME_CLOCK, VantageOffset
from llmtap.pairing.matching import ROUNDING_NS, Pair, error_ns


class BoundedValue(Struct, frozen=True):
    """A value, and the range that contains the true value: in tokens, or in ns (in a summary: in seconds)."""

    value: float
    low: float
    """Smallest possible value."""
    high: float


@dataclass(frozen=True, slots=True)
class PairFigure:
    """Declaration of a figure of a pair. The values are in `MeasuredPair.values` under `name`."""

    name: str
    title: str
    definition: str
    """Formula in words, for reports."""
    unit: Unit = Unit.SECONDS


FIGURES: Final = (
    PairFigure(
        "request",
        "request",
        "Last byte of the request sent to the gateway until the first byte of its first attempt, with "
        "the side calls before it. Below 0 if the gateway forwards a request while it reads it.",
    ),
    PairFigure(
        "ttft",
        "first token",
        "TTFT at the front minus TTFT at the back, of the delivered attempt. It contains retries and the "
        "time of the request, and does not depend on the clock offset.",
    ),
    PairFigure("first_token", "first token, way back", "First content at the front minus that at the back."),
    PairFigure(
        "block_wait",
        "wait for a block",
        "First token of an answer at the back until the last one that the gateway delivers with it, in one "
        "event or in events at most 1 ms apart: 0 if the gateway does not collect tokens. If it is not "
        "longer than the uncertainty of the front, its range begins at 0: a late read can merge events.",
    ),
    PairFigure(
        "block_check",
        "check of a block",
        "That last token at the back until the front has the first event: the time in which a guardrail "
        "checks the block, and all other time of the gateway.",
    ),
    PairFigure("token", "each token", "Time from the arrival of a token at the back until the front has it."),
    PairFigure("token_hold_max", "longest delay of a token", "The longest such time of an answer."),
    PairFigure(
        "tokens_held",
        "tokens held back",
        "Largest number of tokens that the gateway had and had not delivered when an event reached the "
        "front, with the tokens of this event: 1 if it holds nothing back.",
        Unit.TOKENS,
    ),
    PairFigure(
        "tokens_per_event_back",
        "tokens per event, back",
        "Tokens of the delivered attempt by its events with output.",
        Unit.TOKENS,
    ),
    PairFigure(
        "tokens_per_event_front",
        "tokens per event, front",
        "The same tokens by the events with output at the front, of answers that were not cut or changed.",
        Unit.TOKENS,
    ),
    PairFigure(
        "retries",
        "lost to retries",
        "First attempt until the delivered one begins, of requests with retries or fallbacks.",
    ),
    PairFigure(
        "tokens_undelivered",
        "tokens not delivered",
        "Tokens of attempts that were not delivered, and of the end of an answer that was cut; of requests "
        "with such tokens.",
        Unit.TOKENS,
    ),
    PairFigure(
        "side_call",
        "side calls",
        "Duration of the gateway's requests with another prompt, such as those of a guardrail.",
    ),
)
"""All figures of a pair, in the order in which tables show them."""


@dataclass(slots=True)
class MeasuredPair:
    """Figures of one pair."""

    pair: Pair
    attempts: list[GatewayAttempt]
    """Requests that the gateway made for the request of the front."""
    text: TextRelation
    """How the texts at the front and at the back differ."""
    values: dict[str, list[BoundedValue]] = field(default_factory=dict)
    """Values by name of the figure. Only `side_call` can have several values. The values of `token` are in
    `token_delays_ns`."""
    token_delays_ns: Times | None = None
    """Delay of each token in ns; None if the texts could not be aligned."""
    token_range_ns: tuple[int, int] = (0, 0)
    """How far the true delay of a token can be below, and above, the measured delay, in ns."""

    @property
    def delivered_attempt(self) -> GatewayAttempt | None:
        """Attempt whose text the client received; None if there is none."""
        return next((one for one in self.attempts if one.role is Role.DELIVERED), None)

    def add(self, name: str, value: float, below: float = 0, above: float | None = None) -> None:
        """Add a value of the figure `name`. The true value lies between `value - below` and `value + above`.
        If `above` is None, it is equal to `below`."""
        bounded = BoundedValue(value, value - below, value + (below if above is None else above))
        self.values.setdefault(name, []).append(bounded)


def figures_of(pair: Pair, clock: VantageOffset = SAME_CLOCK) -> MeasuredPair:
    """Return the figures of one pair."""
    figures = MeasuredPair(pair, attempts_of(pair), TextRelation.UNKNOWN)
    main = [one.exchange for one in figures.attempts if one.role is not Role.SIDE_CALL]
    front, delivered = pair.front, figures.delivered_attempt
    if front.timeline.submit_ns is not None:
        first = main[0]
        waited_ns = first.timeline.arrival_ns - clock.offset_ns - front.timeline.submit_ns
        figures.add("request", waited_ns, error_ns(front, first, clock))
    for one in figures.attempts:
        if one.role is Role.SIDE_CALL and (lasted_ns := _duration_ns(one.exchange)) is not None:
            figures.add("side_call", lasted_ns, 2 * (one.exchange.uncertainty_ns + ROUNDING_NS))
    if delivered is not None:
        figures.text = delivered.text.relation
        _add_delays(figures, front, delivered, clock)
        _add_chunking(figures, front, delivered)
        if any(one.role in (Role.RETRY, Role.FALLBACK) for one in figures.attempts):
            lost_ns = delivered.exchange.timeline.arrival_ns - main[0].timeline.arrival_ns
            if lost_ns > 0:
                error = delivered.exchange.uncertainty_ns + main[0].uncertainty_ns + 2 * ROUNDING_NS
                figures.add("retries", lost_ns, error)
    tokens = _undelivered_tokens(figures)
    if tokens:
        figures.add("tokens_undelivered", tokens)
    return figures


def _duration_ns(x: Exchange) -> int | None:
    """Return the time from the arrival to the end of the response; None if the response has no end."""
    t = x.timeline
    return None if t.response_end_ns is None else t.response_end_ns - t.arrival_ns


def _add_delays(
    figures: MeasuredPair, front: Exchange, delivered: GatewayAttempt, clock: VantageOffset
) -> None:
    """Add by how much the gateway delays first tokens and ends, with the errors of the clocks."""
    back = delivered.exchange
    error = error_ns(front, back, clock)
    front_ns, back_ns = ttft_ns(front.timeline), ttft_ns(back.timeline)
    first_chunk_ns = back.added.first_chunk_ns or 0
    if front.stream and back.stream and front_ns is not None and back_ns is not None:
        relay_ns = first_chunk_ns + (back.added.request_ns or 0)
        duration_error = front.uncertainty_ns + back.uncertainty_ns + 2 * ROUNDING_NS
        figures.add("ttft", front_ns - back_ns, duration_error + relay_ns, duration_error)
    front_ns, back_ns = front.timeline.first_content_ns, back.timeline.first_content_ns
    if front.stream and back.stream and front_ns is not None and back_ns is not None:
        figures.add("first_token", front_ns - back_ns + clock.offset_ns, error + first_chunk_ns, error)
    aligned = align(front, back, delivered.text) if front.stream and back.stream else None
    if aligned is not None:
        relay_ns = back.added.chunk_max_ns or 0
        figures.token_range_ns = (error + relay_ns, error)
        delays_ns = figures.token_delays_ns = aligned.delays_ns(clock.offset_ns)
        figures.add("token_hold_max", int(delays_ns.max()), error + relay_ns, error)
        last = first_block_length(aligned, clock.offset_ns, error) - 1
        wait_ns = int(aligned.back_ns[last] - aligned.back_ns[0])
        wait_error = 2 * (back.uncertainty_ns + ROUNDING_NS)
        # If the front was read late, its events can share a timestamp although the gateway held nothing back.
        is_merged = wait_ns <= front.uncertainty_ns
        figures.add("block_wait", wait_ns, max(wait_error, wait_ns) if is_merged else wait_error, wait_error)
        check_ns = int(aligned.front_ns[0] - aligned.back_ns[last]) + clock.offset_ns
        figures.add("block_check", check_ns, error + relay_ns, error)
        _add_held_tokens(figures, aligned, clock.offset_ns, error)


def _add_held_tokens(figures: MeasuredPair, aligned: Alignment, offset_ns: int, error: int) -> None:
    value, low, high = (held_tokens_max(aligned, -offset_ns + by_ns) for by_ns in (0, error, -error))
    figures.add("tokens_held", value, value - min(value, low), max(value, high) - value)


def _add_chunking(figures: MeasuredPair, front: Exchange, delivered: GatewayAttempt) -> None:
    """Add the tokens per event of both sides, from the number of output tokens that the server reported."""
    back = delivered.exchange
    back_events, front_events = (len(output_times_ns(x.timeline.events)) for x in (back, front))
    tokens = back.tokens.output
    if not (front.stream and back.stream and back_events and front_events and tokens):
        return
    tokens = max(tokens - _hidden_reasoning(back), back_events)
    figures.add("tokens_per_event_back", tokens / back_events)
    if delivered.text.relation in (TextRelation.EQUAL, TextRelation.UNKNOWN):
        figures.add("tokens_per_event_front", tokens / front_events)


def _hidden_reasoning(x: Exchange) -> int:
    """Return the number of reasoning tokens that the server counted as output but did not send."""
    is_sent = x.timeline.first_reasoning_ns is not None
    return 0 if is_sent or x.reasoning_is_separate else x.tokens.reasoning or 0


def _undelivered_tokens(figures: MeasuredPair) -> int:
    """Return the number of tokens that were generated for the prompt but never delivered."""
    lost = 0
    for one in figures.attempts:
        if one.role is Role.DELIVERED:
            if one.text.relation is TextRelation.CUT:
                _, ends, tokens = text_events(one.exchange)
                lost += int(tokens[np.searchsorted(ends, one.text.front_chars, "right") :].sum())
        elif one.role is not Role.SIDE_CALL:
            lost += one.exchange.tokens.output or 0
    return lost
