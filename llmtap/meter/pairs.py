"""Pair the exchanges of both sides of a gateway while they end, for the API, `/metrics` and the capture.

`PairBook` is a sink of the pipeline before the recorder and the OTLP exporter: it passes an exchange to them
when it knows the pair of the exchange, or that there is none. Until then it keeps a copy of the ended
exchange, with hashes of prompt and text under a key of its own (`pairing/live.py`). It searches for pairs
when the relays of the pair have reported, at most twice a second, so that a single event causes no work.
During a long search, the event loop runs between the steps. This module is imported only with `[pair]`,
because numpy takes 20 MB.
"""

import asyncio
import copy
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from itertools import chain, islice
from typing import Final

import msgspec
import numpy as np

from llmtap.capture.privacy.sessions import BlockHasher
from llmtap.capture.privacy.text_blocks import text_block_hashes
from llmtap.exchange.exchange import BACK, FRONT, EventLog, Exchange, PairMember, RequestShape
from llmtap.exchange.prompt import read_prompt
from llmtap.export.buckets import Buckets
from llmtap.export.prometheus.catalogue import PAIRS, HistogramFamily, Value
from llmtap.export.prometheus.exposition import Cell
from llmtap.export.sinks import ExchangeSink, SeriesKey
from llmtap.meter.options import PairOptions
from llmtap.meter.pipeline.cooperative_yield import CooperativeYield
from llmtap.meter.pipeline.exchanges import Streams
from llmtap.meter.relays import RelayBook
from llmtap.metrics.catalogue import Unit
from llmtap.metrics.latency import Measured
from llmtap.pairing.attempts import Role
from llmtap.pairing.clock import SAME_CLOCK
from llmtap.pairing.figures import FIGURES, BoundedValue, MeasuredPair, figures_of
from llmtap.pairing.live import Leftover, LiveMatcher, OpenExchange, Unpaired, open_exchange
from llmtap.pairing.matching import KEYS, Pair
from llmtap.pairing.summary import PairCounts, PairSummary, summarise_figures

PROMPT_BLOCK_BYTES: Final = 1 << 30
"""Block size that no prompt reaches: a prompt is one block, because only the hash of all of it is used."""
DELAYS_MAX: Final = 2_000_000
"""Maximum number of delays of single tokens that are kept for the recent pairs, which take 16 MB."""
ERROR: Final = "pairing"
"""Kind of error under which `ExchangePipeline.on_error` counts the errors of pairing."""
PERIOD_NS: Final = 500_000_000
"""Minimum time between two searches for pairs, by the relays' times of events."""


class LivePairs(PairSummary, frozen=True, kw_only=True):
    """Counts since the meter's start, and figures of the recent pairs."""

    waiting: int
    """Number of exchanges that wait for their partners."""
    recent: list[dict[str, object]]
    """Single pairs, the newest first."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Data of a request until the end of its exchange."""

    shape: RequestShape
    """Shape of the request, with one block: the hash of the whole prompt."""
    text_is_captured: bool
    """Whether the recorder needs the text of the answer, too."""


@dataclass(frozen=True, slots=True)
class _EndedExchange:
    """An ended exchange that waits for its partners, with the other arguments for the sinks' `on_end`."""

    exchange: Exchange
    measured: Measured
    key: SeriesKey
    """Labels of the series in which the exchange is counted."""
    met: bool | None
    """Whether the exchange met its objectives; None if it has none."""


class PairBook:
    """Pairs since the meter's start, and the figures of the recent ones.

    Args:
        turns: lets the relays and the event loop run between the steps of a search or clean-up.
        on_error: called with kind and exception if an error occurs; it concerns one exchange or search only.
    """

    def __init__(
        self,
        options: PairOptions,
        relays: RelayBook,
        streams: Streams,
        turns: CooperativeYield,
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self._options = options
        self._relays = relays
        self._streams = streams
        """Exchanges under way."""
        self._cpu_yield = turns
        self._on_error = on_error
        self._work_steps: Iterator[None] | None = None
        """Remaining steps of the present search or clean-up; None: no work is under way."""
        self._searched_until_ns: int | None = None
        """Time up to which the relays had reported all events at the latest search; None before the first."""
        self.sinks: list[ExchangeSink] = []
        """Sinks that get each exchange as soon as it is known whether the exchange has a pair."""
        key = secrets.token_bytes(16)
        self._text_key = key
        """Random key of the hashes by which texts of partners are compared."""
        self._hasher = BlockHasher(key, block_size=PROMPT_BLOCK_BYTES, unit="bytes")
        """Hashes prompts, so that only hashes are kept."""
        self._requests: dict[str, _Request] = {}
        """By id of an exchange under way: its request."""
        self._ended_exchanges: dict[str, _EndedExchange] = {}
        """By id: exchange that waits for its partners."""
        self._matcher = LiveMatcher(options.exchanges_max)
        """Finds the pairs."""
        self.counts = PairCounts(
            leftovers=Counter({_leftover_label(one, side): 0 for one in Leftover for side in (FRONT, BACK)})
        )
        self._undelivered_tokens = 0.0
        """Tokens of the engine that the gateway did not pass on, for a metric."""
        self._recent_pairs: deque[MeasuredPair] = deque()
        self._delay_count = 0
        """Number of token delays kept in `_recent_pairs`, for the limit DELAYS_MAX."""
        self._histograms: dict[tuple[str, str], Buckets] = {}
        """By name of a figure of pairs, and model: histogram of the figure."""

    def observe_request(self, x: Exchange, body: bytes, *, text_is_captured: bool) -> None:
        """Hash the prompt of a complete request, and keep the hash until the exchange has ended."""
        prompt = read_prompt(body, x.endpoint)
        blocks = None if prompt is None else self._hasher.blocks(prompt)
        shape = RequestShape(block_unit="bytes", block_size=PROMPT_BLOCK_BYTES)
        if blocks is not None:
            shape.blocks = blocks.ids
        self._requests[x.id] = _Request(shape, text_is_captured)

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        ended = _EndedExchange(x, m, key, met)
        if x.side is None:
            self._pass_on(ended)
            return
        self._ended_exchanges[x.id] = ended
        add = self._matcher.add_front if x.side == FRONT else self._matcher.add_back
        add(self._matcher_copy(x))

    def advance(self) -> None:
        """Pair the exchanges that can be paired now; called at each report of a relay. Never raises."""
        if self._work_steps is not None:
            return  # a search or a clean-up is under way, which the event loop continues
        known_ns, before_ns = self._relays.known_ns(), self._searched_until_ns
        if known_ns is None or (before_ns is not None and abs(known_ns - before_ns) < PERIOD_NS):
            self._work_steps = self._clean_up()
        else:
            self._searched_until_ns = known_ns
            self._work_steps = self._search(known_ns)
        self._continue()

    def close(self) -> None:
        """Pair all remaining exchanges at the end of the meter, when none is under way. Never raises."""
        work, self._work_steps = self._work_steps, None
        try:
            for _ in chain(work or (), self._settle(self._matcher.close())):
                self._cpu_yield.pause()
        except Exception as error:
            self._on_error(ERROR, error)

    def _continue(self, *, begins_round: bool = False) -> None:
        """Continue the search or clean-up until the event loop must run, which calls this again in its next
        round. `begins_round`: whether this call is the first work of a round."""
        if begins_round:
            self._cpu_yield.begin_turn()
        try:
            for _ in self._work_steps or ():
                self._cpu_yield.pause()
                if self._cpu_yield.loop_is_due and (loop := _running_loop()) is not None:
                    loop.call_soon(partial(self._continue, begins_round=True))
                    return
        except Exception as error:  # give up only this work; the next report of a relay begins new work
            self._on_error(ERROR, error)
        self._work_steps = None

    def _clean_up(self) -> Iterator[None]:
        """Pass to the sinks the exchanges that the matcher gave up. Forget the data of discarded ones."""
        yield from self._settle(self._matcher.take_left_out())
        if len(self._requests) > len(self._streams):
            yield from self._open_exchanges([], [])

    def _search(self, known_ns: int) -> Iterator[None]:
        """Pair exchanges, and pass on those that can no longer be paired. Yield between steps."""
        yield from self._settle(self._matcher.take_left_out())
        if len(self._matcher) or self._requests:
            fronts: list[OpenExchange] = []
            backs: list[OpenExchange] = []
            yield from self._open_exchanges(fronts, backs)
            yield from self._settle(self._matcher.advance(known_ns, fronts, backs))

    def _open_exchanges(self, fronts: list[OpenExchange], backs: list[OpenExchange]) -> Iterator[None]:
        """Append the exchanges under way to `fronts` or `backs`. Forget requests of discarded exchanges."""
        discarded = set(self._requests)
        for observer, _ in self._streams.open_exchanges():
            x = observer.exchange
            if x.side is not None and x.call is None and x.status != HTTPStatus.SWITCHING_PROTOCOLS:
                discarded.discard(x.id)
                request = self._requests.get(x.id)
                open_now = open_exchange(x, None if request is None else request.shape)
                (fronts if x.side == FRONT else backs).append(open_now)
            yield
        for id_ in discarded:
            self._requests.pop(id_, None)

    def _matcher_copy(self, x: Exchange) -> Exchange:
        """Return a copy for the matcher. Remove from the exchange texts that the capture must not store."""
        request = self._requests.pop(x.id, None)
        log = x.timeline.events
        timeline = replace(x.timeline, events=replace(log, chars=log.chars[:]))
        shape = None if request is None else request.shape
        ours = replace(x, timeline=timeline, shape=shape, turn=None, text=None, capture_data=None)
        if x.text is not None:
            ours.text_blocks = text_block_hashes(x.text.response_text or "", self._text_key)
        if request is None or not request.text_is_captured:
            x.text = None
            log.chars = array("l")
        return ours

    def _settle(self, decided: Iterable[Pair | Unpaired | None]) -> Iterator[None]:
        """Count the pairs and unpaired exchanges that the matcher returned, and pass them to the sinks."""
        for one in decided:
            if isinstance(one, Pair):
                self._add_pair(one)
            elif one is not None:
                x = one.exchange
                if one.error is not None:
                    self._on_error(ERROR, one.error)
                assert x.side is not None
                self.counts.leftovers[_leftover_label(one.reason, x.side)] += 1
                self._pass_on(self._ended_exchanges.pop(x.id))
            yield

    def _add_pair(self, pair: Pair) -> None:
        """Mark both exchanges of a pair as each other's partners, and add the figures of the pair."""
        id_ = pair.front.id
        front, *backs = (self._ended_exchanges.pop(x.id) for x in (pair.front, *pair.backs))
        partners = (front.exchange.span_ids,)
        front.exchange.pair = PairMember(id_, partners=tuple(back.exchange.span_ids for back in backs))
        for back, match in zip(backs, pair.matches, strict=True):
            evidence = tuple(one.value for one in match.evidence)
            back.exchange.pair = PairMember(id_, evidence=evidence, partners=partners)
        try:
            figures = figures_of(pair, SAME_CLOCK)
            front.exchange.pair = replace(front.exchange.pair, figures=dict(_figures_to_dict(figures)))
            for attempt, back in zip(figures.attempts, backs, strict=True):
                assert back.exchange.pair is not None
                back.exchange.pair = replace(back.exchange.pair, role=attempt.role.value)
            self.counts.add(figures)
            self._record_histograms(figures, front.key.model)
            self._keep_recent(figures)
        except Exception as error:  # report the error, and pass the exchanges on without figures of the pair
            self._on_error(ERROR, error)
        for ended in (front, *backs):
            self._pass_on(ended)

    def _record_histograms(self, figures: MeasuredPair, model: str) -> None:
        """Record the delays of a pair in the Prometheus histograms of its model."""
        for name in PAIRS:
            delays_ns = figures.token_delays_ns if name == "token" else None
            values = (
                [one.value for one in figures.values.get(name, ())]
                if delays_ns is None
                else delays_ns.tolist()
            )
            if not values:
                continue
            cell = self._histograms.get((name, model))
            if cell is None:
                cell = self._histograms[name, model] = Buckets(PAIRS[name].edges)
            cell.record_many([max(0, round(value)) for value in values])
        self._undelivered_tokens += sum(one.value for one in figures.values.get("tokens_undelivered", ()))

    def _keep_recent(self, figures: MeasuredPair) -> None:
        """Keep the figures of a pair as a recent one. Discard its events, which take most of the memory."""
        for x in (figures.pair.front, *figures.pair.backs):
            x.timeline.events, x.text_blocks, x.shape = EventLog(), None, None
        self._recent_pairs.append(figures)
        self._delay_count += _delay_count_of(figures)
        pairs = self._recent_pairs
        while len(pairs) > self._options.pairs_kept or (self._delay_count > DELAYS_MAX and pairs):
            self._delay_count -= _delay_count_of(pairs.popleft())

    def _pass_on(self, ended: _EndedExchange) -> None:
        """Report an exchange to the sinks, which had to wait for its partner."""
        for sink in self.sinks:
            try:
                sink.on_end(ended.exchange, ended.measured, ended.key, ended.met)
            except Exception as error:  # an error of a sink affects this exchange only
                self._on_error("listener", error)

    def values(self) -> dict[str, Value]:
        """Return the counts of `/metrics`, by name in `catalogue.SELF`."""
        counts = self.counts
        paired = {(side, "paired"): n for side, n in ((FRONT, counts.pairs), (BACK, counts.evidence.total()))}
        left = {tuple(reversed(reason.rsplit("_", 1))): n for reason, n in counts.leftovers.items()}
        return {
            "pair_exchanges": {**paired, **left},
            "pair_evidence": {kind.value: counts.evidence[kind] for kind, _ in KEYS},
            "pair_attempts": {role.value: counts.attempts[role] for role in Role},
            "pair_undelivered_tokens": self._undelivered_tokens,
            "pair_waiting_exchanges": len(self._matcher),
        }

    def histograms(self) -> Iterator[tuple[HistogramFamily, list[Cell]]]:
        """Yield each family of histograms with a copy of its histograms, one for each model."""
        for name, family in PAIRS.items():
            cells = [
                (model, buckets) for (figure, model), buckets in self._histograms.items() if figure == name
            ]
            yield family, [((model,), *buckets.read()) for model, buckets in cells]

    def summarise(self, limit: int) -> Callable[[], LivePairs]:
        """Return a thread-safe function that makes the summary, with at most `limit` single pairs."""
        recent, counts, waiting = list(self._recent_pairs), copy.deepcopy(self.counts), len(self._matcher)

        def make_summary() -> LivePairs:
            summary = summarise_figures(recent, counts, SAME_CLOCK, clock_source="monotonic", comparable=True)
            newest = [_pair_to_dict(figures) for figures in islice(reversed(recent), limit)]
            return LivePairs(**msgspec.structs.asdict(summary), waiting=waiting, recent=newest)

        return make_summary


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread; None if the thread runs no loop, as with frames from a file."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _leftover_label(leftover: Leftover, side: str) -> str:
    return f"{leftover.value}_{side}"


def _delay_count_of(figures: MeasuredPair) -> int:
    return 0 if figures.token_delays_ns is None else len(figures.token_delays_ns)


def _figures_to_dict(figures: MeasuredPair) -> Iterator[tuple[str, object]]:
    """Yield name and JSON (value and range, in s or tokens) of each figure. `token`: median of all delays."""
    for figure in FIGURES:
        scale = 1e9 if figure.unit is Unit.SECONDS else 1.0
        bounded = figures.values.get(figure.name, [])
        if figure.name == "token" and figures.token_delays_ns is not None:
            median_ns, (below_ns, above_ns) = (
                float(np.median(figures.token_delays_ns)),
                figures.token_range_ns,
            )
            bounded = [BoundedValue(median_ns, median_ns - below_ns, median_ns + above_ns)]
        parts = ("value", "low", "high")
        if bounded:
            yield figure.name, [{part: getattr(one, part) / scale for part in parts} for one in bounded]


def _pair_to_dict(figures: MeasuredPair) -> dict[str, object]:
    front = figures.pair.front
    return {
        "front": front.id,
        "model": front.model,
        "text": figures.text.value,
        "figures": dict(_figures_to_dict(figures)),
        "back": [
            {
                "id": attempt.exchange.id,
                "role": attempt.role.value,
                "evidence": [one.value for one in match.evidence],
                "model": attempt.exchange.model,
                "outcome": attempt.exchange.outcome.value,
                "text": attempt.text.relation.value,
                "front_chars": attempt.text.front_chars,
                "back_chars": attempt.text.back_chars,
                "equal_chars": attempt.text.common_chars,
            }
            for attempt, match in zip(figures.attempts, figures.pair.matches, strict=True)
        ],
    }
