"""State of the meter: makes observers, measures each finished exchange once, passes it to the sinks.

`ExchangePipeline` is the `Sink` of `assembler.py`: it makes an Observer for each opened exchange (`observe`),
and gets each finished one (`on_end`). It determines tenant and labels, computes the metrics
(`metrics/latency.py`), judges the objectives, and passes all to each ExchangeSink: windows, Prometheus,
recent exchanges, experiment, log, live feed, OTLP, capture. Calls to MCP servers are only counted for
Prometheus. It also takes the status of relays and counts errors. `admin/views.py` reads its state.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from llmtap.channel.experiment import Experiment
from llmtap.channel.frames import Assigned
from llmtap.channel.status import RelayStatus
from llmtap.clock import Clock
from llmtap.exchange.bounds import Budget
from llmtap.exchange.exchange import BACK, Exchange
from llmtap.exchange.label import NOT_ACCEPTED
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, ReadingLimit
from llmtap.export.prometheus.exposition import Exposition
from llmtap.export.sinks import ExchangeSink, ExporterState, SeriesKey
from llmtap.meter.experiments import Experiments
from llmtap.meter.first_token import UsualPhases
from llmtap.meter.options import MeterOptions, TenantOptions
from llmtap.meter.pipeline.cooperative_yield import CooperativeYield
from llmtap.meter.pipeline.exchanges import RecentExchanges, Streams
from llmtap.meter.pipeline.history import History
from llmtap.meter.pipeline.silences import SilenceBook
from llmtap.meter.pipeline.step_changes import StepBook
from llmtap.meter.pipeline.windows import Windows
from llmtap.meter.relays import RelayBook, UpstreamLoad
from llmtap.meter.slo import SloBook
from llmtap.meter.tenants import Labels, Tenants
from llmtap.metrics.cost import Price
from llmtap.metrics.latency import Measured, measure
from llmtap.metrics.slo import SloOptions
from llmtap.protocol.dialects.registry import BUILT_IN, Dialects
from llmtap.protocol.http1 import RequestHead
from llmtap.version import __version__

if TYPE_CHECKING:  # Arrow is imported only where exchanges are captured
    from llmtap.meter.pipeline.recorder import Recorder

if TYPE_CHECKING:  # numpy is imported only where exchanges are paired
    from llmtap.meter.pairs import PairBook

_NOT_ACCEPTED_OUTCOMES: Final = frozenset({Outcome.REJECTED, Outcome.CLIENT_ERROR, Outcome.UPSTREAM_ERROR})
BODIES_BYTES_MAX: Final = 256 << 20
"""Memory limit of the bodies of all incomplete requests and responses: 2,000 prompts of 100,000 characters.
Without it, slow uploads of 8 MiB in all streams of a relay would take 80 GB."""

log = logging.getLogger(__name__)


class ExchangePipeline:
    """All state of the meter. One thread writes; readers get copies or values that never change again.

    Args:
        tenants: rules that identify the tenant. salt: key of the hashes that replace API keys.
        slos: validated classes of objectives by name.
        price: prices for the costs in summaries; None if they are unknown.
        count_tokens: counts the tokens of a text where the server does not report them.
        dialects: dialects by which answers can be read.
    """

    def __init__(
        self,
        options: MeterOptions,
        clock: Clock,
        experiment: Experiment | None = None,
        *,
        tenants: TenantOptions | None = None,
        salt: str = "",
        slos: Mapping[str, SloOptions] | None = None,
        price: Price | None = None,
        count_tokens: Callable[[str], int] | None = None,
        dialects: Dialects = BUILT_IN,
    ) -> None:
        self.options = options
        self.clock = clock
        self.price = price
        self.benefit = options.benefit
        """Default reader, by which smooth goodput is computed."""
        self.relays = RelayBook()
        self.streams = Streams(clock)
        self.cpu_yield = CooperativeYield(clock.mono_ns, cpu_ns=clock.thread_cpu_ns)
        tenants = TenantOptions() if tenants is None else tenants
        self.tenants = Tenants(tenants, salt)
        self.slos = SloBook(slos or {}, clock)
        reserved = [*tenants.names.values(), *self.slos.tenants]
        self.labels = Labels(tenants.max, options.models_max, options.series_max, reserved)
        objectives = {name: slo.objectives for name, slo in self.slos.classes.items()}
        terms = repr((sorted((slos or {}).items()), self.benefit))
        self.windows = Windows(clock, objectives, terms=terms)
        self.history = History(clock)
        self.exposition = Exposition(
            __version__, objectives, options.buckets, native=options.native_histograms
        )
        self._class_benefits = {name: slo.reader(self.benefit) for name, slo in (slos or {}).items()}
        """By class of tenants: reader, by which smooth goodput is computed."""
        url = options.upstream_metrics
        self.upstream = None if url is None else UpstreamLoad(url)
        self.recent_exchanges = RecentExchanges(options.exchanges_kept, trace_url=options.trace_url)
        self.experiments = Experiments(experiment, clock)
        self.silences = SilenceBook(clock, options.silence_threshold, self.streams, self.relays, self.labels)
        self.usual_phases = UsualPhases(clock, self.recent_exchanges)
        """Parts of the wait for the first token, for comparison."""
        self.steps = StepBook(clock)
        """Detectors of lasting changes of the time to first token."""
        self.front_sinks: list[ExchangeSink] = [
            self.windows,
            self.history,
            self.exposition,
            self.usual_phases,
            self.silences,
            self.steps,
        ]
        """Sinks that count requests. They do not get the exchanges between a gateway and its engines, because
        these repeat requests that were counted in front of the gateway."""
        if experiment is not None:
            self.front_sinks.append(self.experiments)
        self.sinks: list[ExchangeSink] = [self.recent_exchanges, _ExchangeLog()]
        """Sinks that get every exchange as soon as it ends."""
        self.last_sinks = self.sinks
        """Sinks that get every exchange: if exchanges are paired, not before its pair is known."""
        self.recorder: Recorder | None = None
        self.pairs: PairBook | None = None
        self.exporters: list[Callable[[], ExporterState]] = []
        """Functions that return the state of each exporter."""
        self.frames = 0
        """Number of frames received from all relays."""
        self.open_exchanges = 0
        self.errors: dict[str, int] = {}
        """By kind of error: how often it occurred."""
        self.subscribers = 0
        """Number of subscribers of the live feed."""
        self.admin_limits: Counter[str] = Counter()
        """By limit of the admin port: how often it was reached."""
        self.reading_limits = Counter({limit.value: 0 for limit in ReadingLimit})
        """By limit of reading: number of answers that reached it, and so were not read completely."""
        self.live_missed = 0
        """Number of exchanges that slow subscribers of the live feed did not get."""
        self.crashes = 0
        """Number of earlier meters that ended without writing their state."""
        self._count_tokens = count_tokens
        """Counts the tokens of an answer without usage; None without a tokenizer."""
        self._dialects = dialects
        self._refusal_signs = options.refusal_signs
        self._body_budget = Budget(BODIES_BYTES_MAX, self._count_omitted_body)
        """Memory limit for the bodies of all exchanges under way."""

    def pair_with(self, pairs: "PairBook") -> None:
        """Pair the exchanges of both sides of a gateway. Call this before `last_sinks` gets any sink."""
        self.pairs = pairs
        self.sinks.append(pairs)
        self.last_sinks = pairs.sinks

    def attach_recorder(self, recorder: "Recorder") -> None:
        """Add the recorder of a capture; it gets all exchanges that end from now on."""
        self.recorder = recorder
        self.last_sinks.append(recorder)

    def observe(
        self, relay: str, seq: int, arrival_ns: int, arrival_wall_ns: int, head: bytes, clock: str
    ) -> Observer:
        """Return the Observer of a new exchange; `head`: head of its request as received."""
        on_request = None if self.recorder is None else self.recorder.observe_request
        observer = Observer(
            relay,
            seq,
            arrival_ns,
            arrival_wall_ns,
            head,
            clock,
            self.tenants.identify,
            self._refusal_signs,
            self._count_tokens,
            on_request if self.pairs is None else self._observe_paired,
            self._body_budget,
            dialects=self._dialects,
        )
        x = observer.exchange
        if self.pairs is not None:
            x.side = self.relays.side(relay)
        if x.call is not None or x.side == BACK:
            self.windows.count_opened(-1)
        return observer

    def _observe_paired(self, x: Exchange, head: RequestHead, body: bytes) -> bool:
        """Pass a complete request to capture and pairs. Return whether one needs the text of the answer."""
        is_captured = self.recorder is not None and self.recorder.observe_request(x, head, body)
        if self.pairs is None or x.side is None:
            return is_captured
        self.pairs.observe_request(x, body, text_is_captured=is_captured)
        return True

    def on_open(self) -> None:
        self.open_exchanges += 1
        self.windows.count_opened()

    def on_discard(self, n: int = 1) -> None:
        """Subtract `n` open exchanges that were discarded and will not end."""
        self.open_exchanges -= n

    def on_end(self, x: Exchange) -> None:
        """Measure a finished exchange once and pass it to every sink."""
        self.open_exchanges -= 1
        # Pause several times, so that relays get the CPU: this function takes as long as the handling of a
        # dozen frames.
        pause = self.cpu_yield.pause
        pause()
        slo = self.slos.class_of_tenant(x.tenant)
        reader = self.benefit if slo is None else self._class_benefits.get(slo.name, self.benefit)
        m = measure(x, reader, judge_inferred=self.options.judge_inferred)
        pause()
        if not self.options.request_objectives:
            x.slo_ttft_ns = x.slo_tpot_ns = None
        if x.label is not None and not self._accepts_label(x.tenant):
            x.label = NOT_ACCEPTED
        for kind, n in (x.invalid_values or {}).items():
            self.on_error(kind, f"exchange {x.id}: the server sent a value that cannot be true", n)
        self.reading_limits.update(limit.value for limit in x.reading_limits)
        x.uncertain = x.uncertainty_ns > self.options.uncertainty_limit
        trusted, refused = _is_accepted(x), x.outcome is Outcome.REFUSED
        x.tenant = self.labels.tenant(x.tenant, trusted=trusted, refused=refused)
        if x.call is not None:
            if x.endpoint != "mcp" and x.side != BACK:
                self.windows.count_opened(-1)  # subtract a call that was counted before its body showed it
            if x.side != BACK:
                self.exposition.on_call(x, m, trusted=trusted)
            if self.recorder is not None:
                self.recorder.leave_out("mcp")
            return
        tenant, model, arm = self.labels.fold(x.tenant, x.model, x.arm, trusted=trusted, refused=refused)
        is_back = x.side == BACK
        met = None if is_back else self.slos.judge(x, m, slo, tenant)
        key = SeriesKey(
            tenant,
            model,
            arm,
            "" if slo is None else slo.name,
            x.uncertain,
            x.reading.word,
            x.service_tier or "",
        )
        for sink in self.sinks if is_back else (*self.front_sinks, *self.sinks):
            try:
                sink.on_end(x, m, key, met)
            except Exception as error:  # one sink's failure must not affect the others
                self.on_error("listener", error)
            pause()

    def on_assignment(self, arm: Assigned) -> None:
        self.experiments.on_assignment(arm.arm, arm.unit, arm.single, own_headers=arm.own_headers)

    def on_status(self, relay: str, status: RelayStatus) -> None:
        """Store the counts that a relay reports twice a second."""
        skipped = self.relays.update(relay, status, self.clock.mono_ns())
        if self.pairs is not None and self.relays.side(relay) is not None:
            self.pairs.advance()
        self.windows.count_skipped(skipped)
        self.windows.record_lag(status.lag_ns_max)
        if self.recorder is not None:
            self.recorder.note_relay(
                relay, status.opened, status.dropped, status.unsettled, status.packets, status.watched
            )

    def on_relay_left(self, relay: str, final: RelayStatus) -> None:
        """Record that a relay without open exchanges disconnected. `final`: counts up to its last frame."""
        if self.recorder is not None:
            # Use `final`, which counts up to the last frame. The last status can be half a second older, and
            # would not count the rows written in this time.
            self.recorder.note_relay_left(relay, final.opened, final.dropped)

    def on_error(self, kind: str, error: BaseException | str, n: int = 1) -> None:
        """Count `n` errors of a kind, each of one exchange or batch, and log the first error of each kind."""
        count = self.errors.get(kind, 0)
        self.errors[kind] = count + n
        if not count:
            where = error if isinstance(error, BaseException) else None
            log.warning("event=meter_error kind=%s error=%r further=counted", kind, error, exc_info=where)

    def _accepts_label(self, tenant: str) -> bool:
        """Return whether labels that this tenant sends count. `tenant`: its full name, not a label value."""
        tenants = self.options.label_tenants
        return tenants is None or tenant in tenants

    def _count_omitted_body(self) -> None:
        limit = f"{BODIES_BYTES_MAX >> 20} MiB"
        self.on_error("body_memory", f"a body was not read: unfinished bodies take {limit}, the limit")


def _is_accepted(x: Exchange) -> bool:
    """Return whether the gateway accepted the request: it answered with a status below 400 and no error.

    Only the names of such a request get places among tenants, models and tools. Otherwise a client without a
    valid key, or one whose requests llmtap or the gateway refuses, could use up all places with invented
    names.
    """
    return x.status is not None and x.status < 400 and x.outcome not in _NOT_ACCEPTED_OUTCOMES


class _ExchangeLog:
    """Writes one line per exchange at level INFO."""

    def __init__(self) -> None:
        self._log = logging.getLogger("llmtap.exchange")

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        if self._log.isEnabledFor(logging.INFO):
            self._log.info(
                "event=exchange id=%s tenant=%r model=%r path=%r status=%s outcome=%s ttft_ms=%s e2e_ms=%s",
                x.id,
                x.tenant,
                x.model,
                x.path,
                x.status,
                x.outcome.value,
                _ms_text(m.ttft_ns if x.stream else None),
                _ms_text(m.e2e_ns),
            )


def _ms_text(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f}"
