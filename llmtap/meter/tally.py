"""Everything the meter counts, in one place: finished exchanges come in, every number goes out from here."""

import logging
import resource
from collections.abc import Callable

from llmtap import __version__
from llmtap.clock import Clock
from llmtap.export.house import MeterState
from llmtap.export.prometheus import Exposition, Frozen
from llmtap.meter.kept import Kept
from llmtap.meter.labels import Labels
from llmtap.meter.options import MeterOptions
from llmtap.meter.relays import RelayBook
from llmtap.meter.windows import Windows, window_name
from llmtap.metrics.latency import measure
from llmtap.record.exchange import Exchange
from llmtap.tap.frames import RelayStatus

__all__ = ["Tally"]

log = logging.getLogger(__name__)
_exchange_log = logging.getLogger("llmtap.exchange")


class Tally:
    """The meter's memory. One thread writes; what readers take is a copy or never changes again."""

    def __init__(self, options: MeterOptions, clock: Clock) -> None:
        self.options = options
        self.clock = clock
        self.relays = RelayBook()
        self.windows = Windows(options.window, clock)
        self.kept = Kept(options.exchanges_kept)
        self.exposition = Exposition(__version__)
        self.labels = Labels(options.tenants_max, options.models_max)
        self.frames = 0
        """Frames read, from all relays."""
        self.live = 0
        """Exchanges being rebuilt, of all relays."""
        self.errors: dict[str, int] = {}
        """What could not be measured, by kind of error."""

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
        m = measure(x)
        tenant, model = self.labels.fold(x.tenant, x.model)
        self.windows.add(x, m, tenant, model)
        self.exposition.add(x, m, tenant, model)
        self.kept.add(x)
        if _exchange_log.isEnabledFor(logging.INFO):
            _exchange_log.info(
                "event=exchange id=%s tenant=%s model=%r path=%r status=%s outcome=%s ttft_ms=%s e2e_ms=%s",
                x.id, x.tenant, x.model, x.path, x.status, x.outcome.value, _ms(m.ttft_ns), _ms(m.e2e_ns),
            )  # fmt: skip

    def status(self, relay: str, status: RelayStatus) -> None:
        """A relay spoke of itself."""
        self.relays.say(relay, status, self.clock.mono_ns())
        self.windows.lagged(status.lag_ns_max)

    def failed(self, kind: str, error: BaseException | str) -> None:
        """Something could not be measured: counted always, told once for each kind."""
        seen = self.errors.get(kind, 0)
        self.errors[kind] = seen + 1
        if not seen:
            where = error if isinstance(error, BaseException) else None
            log.warning("event=meter_error kind=%s error=%r further=counted", kind, error, exc_info=where)

    def freeze(self) -> Frozen:
        """A copy of all that `/metrics` shows, to be rendered anywhere."""
        goodput = self.windows.smooth_goodput()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        state = MeterState(
            frames=self.frames,
            live_exchanges=self.live,
            cpu_ns=round((usage.ru_utime + usage.ru_stime) * 1e9),
            rss_bytes=_rss_bytes(fallback=usage.ru_maxrss * 1024),
            errors=dict(self.errors),
            label_overflow=dict(self.labels.overflow),
            smooth_goodput={} if goodput is None else {window_name(self.options.window): goodput},
        )
        return self.exposition.freeze(self.relays.states(self.clock.mono_ns()), state)

    def summary(self, *, everything: bool) -> Callable[[], dict[str, object]]:
        """The summary of the window, or of everything since the start, as work for any thread."""
        frozen = self.windows.freeze(everything)
        relays = self.relays.to_dict(self.clock.mono_ns())
        errors = dict(self.errors)
        return lambda: {**frozen.to_dict(), "relays": relays, "meter_errors": errors}


def _ms(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f}"


def _rss_bytes(fallback: int) -> int:
    """Resident memory now; the peak where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return fallback
