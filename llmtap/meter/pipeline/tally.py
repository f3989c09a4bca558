"""Everything the meter counts, in one place: finished exchanges come in, every number goes out from here."""

import logging
import resource
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

from llmtap import __version__, native
from llmtap.channel.experiment import Experiment
from llmtap.channel.frames import Assigned, RelayStatus
from llmtap.clock import Clock
from llmtap.exchange.budget import Budget
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.export.prometheus.exposition import Exposition, Frozen
from llmtap.export.prometheus.self_metrics import ExporterState, MeterState
from llmtap.export.prometheus.slo_metrics import SloState
from llmtap.memory import resident_bytes
from llmtap.meter.experiments import Experiments
from llmtap.meter.labels import Labels
from llmtap.meter.options import MeterOptions, TenantOptions
from llmtap.meter.pipeline.cooperative_yield import CooperativeYield
from llmtap.meter.pipeline.open_streams import Streams
from llmtap.meter.pipeline.recent_exchanges import RecentExchanges
from llmtap.meter.pipeline.windows import BY_DEFAULT, SeriesKey, Windows
from llmtap.meter.relays import RelayBook
from llmtap.meter.slo import SloBook
from llmtap.meter.tenants import Tenants
from llmtap.metrics.cost import Price
from llmtap.metrics.latency import Measured, measure
from llmtap.metrics.slo import SloOptions

if TYPE_CHECKING:  # Arrow is imported only where exchanges are kept
    from llmtap.meter.pipeline.recorder import Recorder

__all__ = ["Tally"]

UNAUTHORIZED = 401
BODIES_BYTES_MAX: Final = 256 << 20
"""Of requests and answers of one piece that are not whole yet, together: 2,000 prompts of 100,000 characters.
Slow uploads of 8 MiB each would take 80 GB otherwise, as many as a relay has streams (`relay.streams`)."""

log = logging.getLogger(__name__)
_exchange_log = logging.getLogger("llmtap.exchange")


class Tally:
    """The meter's memory. One thread writes; what readers take is a copy or never changes again.

    Args:
        tenants: rules that tell who asks; `salt`: key of the hashes that stand for API keys.
        slos: classes of tenants by name, checked.
        price: what is paid, None if that is not known.
        count_tokens: counts the tokens of a text where nobody tells them.
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
    ) -> None:
        self.options = options
        self.clock = clock
        self.relays = RelayBook()
        self.turns = CooperativeYield(clock.mono_ns, cpu_ns=clock.thread_cpu_ns)
        self.windows = Windows(clock)
        self.kept = RecentExchanges(options.exchanges_kept, benefit=options.benefit)
        tenants = TenantOptions() if tenants is None else tenants
        self.tenants = Tenants(tenants, salt)
        self.slos = SloBook(slos or {}, clock)
        told_beforehand = [*tenants.names.values(), *self.slos.tenants]
        self.labels = Labels(tenants.max, options.models_max, options.series_max, told_beforehand)
        bounds = [bound for slo in self.slos.classes.values() for bound in slo.objectives.bounds]
        self.exposition = Exposition(__version__, bounds)
        self.streams = Streams(clock)
        """Exchanges under way, for who asks."""
        self.frames = 0
        """Frames read, from all relays."""
        self.live = 0
        """Exchanges being rebuilt, of all relays."""
        self.errors: dict[str, int] = {}
        """What could not be measured, by kind of error."""
        self.listeners: list[Callable[[Exchange, Measured], None]] = []
        """Who else is told of each finished exchange."""
        self.experiments = Experiments(experiment, clock)
        if experiment is not None:
            self.listeners.append(self.experiments.ended)
        self.exporters: list[Callable[[], ExporterState]] = []
        """What exporters say of themselves."""
        self.subscribers = 0
        """Of the live feed."""
        self.live_missed = 0
        """Exchanges that some subscriber of it was too slow for."""
        self._benefit = options.benefit
        self._price = price
        self._count_tokens = count_tokens
        self._patterns = options.patterns
        self._bodies = Budget(BODIES_BYTES_MAX, self._body_not_kept)
        self.recorder: Recorder | None = None
        """Who keeps the exchanges, where that is wanted; see `keep`."""

    def keep(self, recorder: "Recorder") -> None:
        """From now on exchanges are kept, too."""
        self.recorder = recorder
        self.listeners.append(recorder.ended)

    def observe(
        self, relay: str, seq: int, arrival_ns: int, arrival_wall_ns: int, head: bytes, clock: str
    ) -> Observer:
        """An observer for an exchange that began just now."""
        return Observer(
            relay, seq, arrival_ns, arrival_wall_ns, head, clock,
            self.tenants.identify, self._patterns, self._count_tokens,
            None if self.recorder is None else self.recorder.hear, self._bodies,
        )  # fmt: skip

    def opened(self) -> None:
        """An exchange began."""
        self.live += 1
        self.windows.opened()

    def forgot(self, n: int = 1) -> None:
        """Exchanges were given up half-way."""
        self.live -= n

    def ended(self, x: Exchange) -> None:
        """An exchange is complete, in whatever way it ended."""
        self.live -= 1
        pause = self.turns.pause  # all this takes as long as a dozen frames
        pause()
        m = measure(x, self._benefit)
        pause()
        if not self.options.request_objectives:
            x.slo_ttft_ns = x.slo_tpot_ns = None
        for kind, n in (x.invalid_values or {}).items():
            self.failed(kind, f"exchange {x.id}: the server sent a value that cannot be true", n)
        x.uncertain = x.uncertainty_ns > self.options.uncertainty_limit
        slo = self.slos.of(x.tenant)
        # Whoever has no valid key could otherwise use up all the names.
        x.tenant = self.labels.tenant(x.tenant, trusted=x.status != UNAUTHORIZED)
        tenant, model, arm = self.labels.fold(x.tenant, x.model, x.arm)
        met = self.slos.judge(x, m, slo, tenant)
        who = SeriesKey(tenant, model, arm, "" if slo is None else slo.name, x.uncertain)
        self.windows.add(x, m, who, None if slo is None else slo.objectives, met)
        pause()
        self.exposition.add(x, m, tenant, model, arm)
        pause()
        self.kept.add(x)
        for tell in self.listeners:
            try:
                tell(x, m)
            except Exception as error:  # an exporter's trouble is not the meter's
                self.failed("listener", error)
        if _exchange_log.isEnabledFor(logging.INFO):
            _exchange_log.info(
                "event=exchange id=%s tenant=%r model=%r path=%r status=%s outcome=%s ttft_ms=%s e2e_ms=%s",
                x.id, x.tenant, x.model, x.path, x.status, x.outcome.value, _ms(m.ttft_ns), _ms(m.e2e_ns),
            )  # fmt: skip

    def assigned(self, arm: Assigned) -> None:
        """An exchange was dealt to an arm of the experiment."""
        self.experiments.assigned(arm.arm, arm.unit, arm.single)

    def status(self, relay: str, status: RelayStatus) -> None:
        """A relay spoke of itself."""
        self.relays.say(relay, status, self.clock.mono_ns())
        if self.relays.is_elsewhere(relay):
            return  # counted here, measured and kept there
        self.windows.lagged(status.lag_ns_max)
        if self.recorder is not None:
            self.recorder.relay_said(relay, status.opened, status.dropped, status.unsettled)

    def left(self, relay: str, final: RelayStatus) -> None:
        """A relay went away; `final` are its counts as of its last frame, and nothing of it is under way."""
        if self.recorder is not None:
            # Its own last word is half a second older: a capture would doubt what has become rows since.
            self.recorder.relay_left(relay, final.opened, final.dropped)

    def failed(self, kind: str, error: BaseException | str, n: int = 1) -> None:
        """Count `n` things that could not be measured; the first of each kind is logged."""
        seen = self.errors.get(kind, 0)
        self.errors[kind] = seen + n
        if not seen:
            where = error if isinstance(error, BaseException) else None
            log.warning("event=meter_error kind=%s error=%r further=counted", kind, error, exc_info=where)

    def _body_not_kept(self) -> None:
        self.failed("body_memory", f"bodies under way take {BODIES_BYTES_MAX >> 20} MiB: one was not read")

    def freeze(self) -> Frozen:
        """A copy of all that `/metrics` shows, to be rendered anywhere."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        rates = self.windows.rates()
        state = MeterState(
            frames=self.frames,
            live_exchanges=self.live,
            cpu_ns=round((usage.ru_utime + usage.ru_stime) * 1e9),
            rss_bytes=resident_bytes(),
            errors=dict(self.errors),
            subscribers=self.subscribers,
            live_missed=self.live_missed,
            label_overflow=dict(self.labels.overflow),
            smooth_goodput={
                name: r.smooth_goodput_tps for name, r in rates.items() if r.smooth_goodput_tps is not None
            },
            smooth_goodput_text=(
                f"output tokens - {self._benefit.alpha:g} x user idle latency,"
                f" {self._benefit.f_text}, of a reader of {self._benefit.speed:g} tokens/s"
            ),
            goodput={name: r.goodput_rps for name, r in rates.items() if r.goodput_rps is not None},
            lag_ns={name: r.lag_ns for name, r in rates.items()},
            exporters=[state() for state in self.exporters],
            capture=None if self.recorder is None else self.recorder.state(),
        )
        return self.exposition.freeze(self.relays.states(self.clock.mono_ns()), state, self._slo_state())

    def _slo_state(self) -> SloState:
        frozen = self.slos.freeze()
        classes = frozen.classes
        return SloState(
            targets={name: slo.target for name, slo in classes.items()},
            bounds_ns={(name, of): ns for name, slo in classes.items() for of, ns in slo.objectives.bounds},
            counts=frozen.total,
            burn_rates=frozen.burn_rates(),
        )

    def summary(
        self, window: str | None = None, by: Collection[str] = BY_DEFAULT, *, certain: bool = False
    ) -> Callable[[], dict[str, object]]:
        """The summary of a window, or of `all` since the start, as work for any thread.

        Args:
            window: its name; None: the one of the options.
            by: what to split it by, some of `windows.BY`.
            certain: without the exchanges whose stamps are too wide.
        """
        frozen = self.windows.freeze(self.options.window_name if window is None else window)
        slos = self.slos.freeze()
        relays = self.relays.to_dict(self.clock.mono_ns())
        errors = dict(self.errors)
        limit_s = self.options.uncertainty_limit / 1e9
        capture = None if self.recorder is None else self.recorder.state().to_dict()

        def work() -> dict[str, object]:
            out = frozen.to_dict(by, certain=certain, price=self._price)
            out["uncertain"]["limit"] = limit_s  # type: ignore[index]
            out |= {"slo": slos.to_dict(), "relays": relays, "meter_errors": errors, "capture": capture}
            out["meter"] = {
                "version": __version__,
                "implementation": native.NAME,
                "implementation_reason": native.REASON or None,
            }
            return out

        return work


def _ms(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f}"
