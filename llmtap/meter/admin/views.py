"""What the admin port shows of the meter: copies taken on its loop, rendered in worker threads."""

import resource
from collections.abc import Callable, Collection

from llmtap import __version__, native
from llmtap.export.prometheus.exposition import Frozen
from llmtap.export.prometheus.self_metrics import MeterState, SloState
from llmtap.memory import resident_bytes
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.windows import BY_DEFAULT

__all__ = ["metrics_of", "summary_of"]


def metrics_of(p: ExchangePipeline) -> Frozen:
    """A copy of all that `/metrics` shows, to be rendered in any thread."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    rates = p.windows.rates()
    state = MeterState(
        frames=p.frames,
        live_exchanges=p.live,
        cpu_ns=round((usage.ru_utime + usage.ru_stime) * 1e9),
        rss_bytes=resident_bytes(),
        errors=dict(p.errors),
        subscribers=p.subscribers,
        live_missed=p.live_missed,
        label_overflow=dict(p.labels.overflow),
        smooth_goodput={
            name: r.smooth_goodput_tps for name, r in rates.items() if r.smooth_goodput_tps is not None
        },
        smooth_goodput_text=(
            f"output tokens - {p.benefit.alpha:g} x user idle latency,"
            f" {p.benefit.f_text}, of a reader of {p.benefit.speed:g} tokens/s"
        ),
        goodput={name: r.goodput_rps for name, r in rates.items() if r.goodput_rps is not None},
        lag_ns={name: r.lag_ns for name, r in rates.items()},
        exporters=[exporter() for exporter in p.exporters],
        capture=None if p.recorder is None else p.recorder.state(),
    )
    slos = p.slos.freeze()
    slo_state = SloState(
        targets={name: slo.target for name, slo in slos.classes.items()},
        bounds_ns={(name, of): ns for name, slo in slos.classes.items() for of, ns in slo.objectives.bounds},
        counts=slos.total,
        burn_rates=slos.burn_rates(),
    )
    return p.exposition.freeze(p.relays.states(p.clock.mono_ns()), state, slo_state)


def summary_of(
    p: ExchangePipeline,
    window: str | None = None,
    by: Collection[str] = BY_DEFAULT,
    *,
    certain: bool = False,
) -> Callable[[], dict[str, object]]:
    """The summary of a window, or of `all` since the start, as work for any thread.

    Args:
        window: its name; None: the one of the options.
        by: what to split it by, some of `windows.BY`.
        certain: without the exchanges whose stamps are too wide.
    """
    frozen = p.windows.freeze(p.options.window_name if window is None else window)
    slos = p.slos.freeze()
    relays = p.relays.to_dict(p.clock.mono_ns())
    errors = dict(p.errors)
    capture = None if p.recorder is None else p.recorder.state().to_dict()

    def work() -> dict[str, object]:
        out = frozen.to_dict(by, certain=certain, price=p.price)
        out["uncertain"]["limit"] = p.options.uncertainty_limit / 1e9  # type: ignore[index]
        return out | {
            "slo": slos.to_dict(),
            "relays": relays,
            "meter_errors": errors,
            "capture": capture,
            "meter": {
                "version": __version__,
                "implementation": native.NAME,
                "implementation_reason": native.REASON or None,
            },
        }

    return work
