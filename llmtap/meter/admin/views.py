"""Data that the admin port shows, from the state of the pipeline: metrics, summaries, latency histograms.

`metrics_of`, `histograms_of` and `summary_of` take an ExchangePipeline, copy what they need on the meter's
loop, and return a function that does the rest in a worker thread. `server.py` calls them, `live_feed.py` for
its summary each second, `meter/process.py` for the summary of a file. The values of the metrics of llmtap
itself are set here.
"""

import resource
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Final

from llmtap import native
from llmtap.channel.status import LAG_EDGES_NS
from llmtap.clock import resident_bytes
from llmtap.counts import fields_of
from llmtap.export.prometheus.catalogue import LAG, Value
from llmtap.export.prometheus.exposition import Cell, FrozenExposition
from llmtap.export.sinks import CaptureState, ExporterState
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.windows import BY, labels_of
from llmtap.meter.relays import RelayState, UpstreamLoad
from llmtap.meter.slo import FrozenSlos, SloCount
from llmtap.meter.tenants import DEFAULT
from llmtap.metrics.silences import SilenceKind
from llmtap.version import __version__

_UPSTREAM_METRICS: Final = {
    "upstream_running_requests": "running",
    "upstream_waiting_requests": "waiting",
    "upstream_kv_cache_usage_ratio": "kv_use",
    "upstream_output_tokens": "generation_tokens",
}
_NO_SILENT_STREAMS: Final = {(kind.value, DEFAULT): 0 for kind in SilenceKind}
"""Samples with 0 while no stream is silent: without any sample, a dashboard would show "No data"."""
PAIRS_DEFAULT: Final = 20
PAIRS_MAX: Final = 1_000
"""Maximum number of single pairs in an answer of `/api/v1/pairs`."""
Values = Mapping[str, Value]
_Samples = dict[str, dict[tuple[str, ...], float]]


def metrics_of(p: ExchangePipeline) -> FrozenExposition:
    """Return a copy of all data of `/metrics`, which any thread can render."""
    relays = p.relays.states(p.clock.mono_ns())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    rates = p.windows.rates()
    values: Values = {
        "label_overflow": dict(p.labels.overflow),
        "meter_errors": dict(p.errors),
        "meter_frames": p.frames,
        "meter_crashes": p.crashes,
        "meter_cpu_seconds": usage.ru_utime + usage.ru_stime,
        "meter_rss_bytes": resident_bytes(),
        "admin_limits": dict(p.admin_limits),
        "reading_limits": dict(p.reading_limits),
        "live_missed_exchanges": p.live_missed,
        "silent_streams": {**_NO_SILENT_STREAMS, **p.silences.latest_report.by_tenant},
        "silence_not_judged_streams": p.silences.latest_report.not_judged,
        "ttft_step_ratio": p.steps.ratios(),
        "smooth_goodput_tokens_per_second": {
            name: r.smooth_goodput_tps for name, r in rates.items() if r.smooth_goodput_tps is not None
        },
        "goodput_requests_per_second": {
            name: r.goodput_rps for name, r in rates.items() if r.goodput_rps is not None
        },
        "window_uncertainty_seconds": {name: r.lag_ns / 1e9 for name, r in rates.items()},
        **({} if p.pairs is None else p.pairs.values()),
        **upstream_values(p.upstream),
        **relay_values(relays),
        **_slo_values(p.slos.freeze()),
        **exporter_values([exporter() for exporter in p.exporters]),
        **capture_values(None if p.recorder is None else p.recorder.state()),
    }
    smooth = (
        f"Sum of output tokens - {p.benefit.alpha:g} x user idle latency, {p.benefit.f_text},"
        f" of a reader of {p.benefit.speed:g} tokens/s with token i due at {p.benefit.due_text}, per second"
    )
    pairs = [] if p.pairs is None else list(p.pairs.histograms())
    histograms = [(LAG, lag_cells(relays)), *pairs]
    return p.exposition.freeze(values, histograms, {"smooth_goodput_tokens_per_second": smooth})


def upstream_values(upstream: UpstreamLoad | None) -> Values:
    if upstream is None:
        return {}
    values = upstream.values
    loads = {metric: values[name] for metric, name in _UPSTREAM_METRICS.items() if name in values}
    return {**loads, "upstream_scrape_failures": upstream.failures}


def relay_values(relays: Sequence[RelayState]) -> Values:
    """Return the metrics of relays.

    A disconnected relay keeps its counters, so that sums over relays do not fall, but not its gauges.
    """
    values: _Samples = {
        "relay_up": {(relay.name,): int(relay.connected) for relay in relays},
        "relay_info": {(r.name, r.implementation): 1 for r in relays if r.connected and r.implementation},
    }
    for relay in relays:
        if relay.status is not None:
            _add_status(values, relay.status, relay.name, vantage=relay.vantage, gauges=relay.connected)
    return values


def _add_status(
    values: _Samples, status: Hashable, *labels: str, vantage: str = "", gauges: bool = True
) -> None:
    """Add the metrics of a status to `values`. `labels`: the first label values of each sample."""
    for one in fields_of(type(status)):
        metric = one.declaration.metric
        if metric is not None and one.applies_to(vantage) and (gauges or not one.declaration.gauge):
            values.setdefault(metric, {}).update(one.samples(status, *labels))


def lag_cells(relays: Sequence[RelayState]) -> list[Cell]:
    return [
        ((relay.name,), relay.status.lag_buckets, relay.status.lag_sum_ns)
        for relay in relays
        if relay.status is not None and len(relay.status.lag_buckets) == len(LAG_EDGES_NS) + 1
    ]


def _slo_values(slos: FrozenSlos) -> Values:
    if not slos.classes and not slos.total:
        return {}
    # Export each class with 0 from the start, so that rate() of Prometheus includes its first exchange.
    counts = {
        **slos.total,
        **{(c, "default"): SloCount() for c in slos.classes if (c, "default") not in slos.total},
    }
    return {
        "slo_events": {key: count.counted for key, count in counts.items()},
        "slo_good": {key: count.good for key, count in counts.items()},
        "slo_not_judged": {key: count.not_judged for key, count in counts.items()},
        "slo_own_faults": {key: count.own_faults for key, count in counts.items()},
        "slo_target_ratio": {name: slo.target for name, slo in slos.classes.items()},
        "slo_objective_seconds": {
            (name, of): ns / 1e9 for name, slo in slos.classes.items() for of, ns in slo.objectives.bounds
        },
        "slo_burn_rate": slos.burn_rates(),
    }


def exporter_values(exporters: Sequence[ExporterState]) -> Values:
    values: _Samples = {}
    for exporter in exporters:
        _add_status(values, exporter, exporter.name)
    return values


def capture_values(state: CaptureState | None) -> Values:
    values: _Samples = {}
    if state is not None:
        problems = (state.problem, "files" if state.files_problem else None)
        values["capture_paused"] = {(): int(state.problem is not None)}
        values["capture_problem"] = {(problem,): 1 for problem in problems if problem is not None}
        _add_status(values, state)
    return values


def histograms_of(p: ExchangePipeline, window: str, *, certain: bool) -> Callable[[], dict[str, object]]:
    frozen = p.windows.freeze(window)

    def make_document() -> dict[str, object]:
        series = [
            {**labels_of(key), "n": summary.n, "histograms": summary.hdr_histograms()}
            for key, summary in frozen.series(certain=certain)
        ]
        return {
            "window": {
                "name": frozen.name,
                "seconds": frozen.seconds,
                "start": frozen.start,
                "end": frozen.end,
            },
            "unit": "ns",
            "encoding": "HdrHistogram V2, compressed, base64",
            "series": series,
        }

    return make_document


def _clear_after_cancel(summary: Any) -> None:
    """Set the tokens after a client's disconnect to null, because only the middleware reads such tokens."""
    for group in summary.get("by", {}).values():
        for part in group.values():
            part["tokens"]["after_cancel"] = None
    summary["tokens"]["after_cancel"] = None


def summary_of(
    p: ExchangePipeline, window: str | None = None, by: Collection[str] = BY, *, certain: bool = False
) -> Callable[[], dict[str, object]]:
    """Return a thread-safe function that makes the summary of a window.

    `window`: name of the window; None: that of the options; `all`: since the start. `by`: labels (of
    `windows.BY`) that split the summary. `certain`: leave out exchanges with an uncertainty above the limit.
    """
    frozen = p.windows.freeze(p.options.window_name if window is None else window)
    slos, steps = p.slos.freeze(), p.steps.to_dict()
    relays: dict[str, Any] = p.relays.to_dict(p.clock.mono_ns())
    errors, reading_limits = dict(p.errors), dict(p.reading_limits)
    capture = None if p.recorder is None else p.recorder.state().to_dict()
    upstream = None if p.upstream is None else p.upstream.to_dict()

    def make_document() -> dict[str, object]:
        out = frozen.to_dict(by, certain=certain, price=p.price)
        out["uncertain"]["limit"] = p.options.uncertainty_limit / 1e9  # type: ignore[index]
        if {one["vantage"] for one in relays.values()} != {"middleware"}:
            _clear_after_cancel(out)
        return out | {
            "slo": slos.to_dict(),
            "ttft_steps": steps,
            "relays": relays,
            "meter_errors": errors,
            "reading_limits": reading_limits,
            "capture": capture,
            "upstream": upstream,
            "meter": {
                "version": __version__,
                "implementation": native.NAME,
                "implementation_reason": native.REASON or None,
            },
        }

    return make_document
