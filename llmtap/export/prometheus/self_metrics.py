"""The tap about itself: what relays say of themselves, and the meter of its own work.

A relay that left keeps its counters, so that sums over relays do not fall, and loses its gauges.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.metrics_core import Metric

from llmtap.channel.frames import RelayStatus
from llmtap.export.prometheus.capture_metrics import CaptureState, collect_capture
from llmtap.export.prometheus.families import counter, gauge

__all__ = ["ExporterState", "MeterState", "RelayState", "collect_meter", "collect_relays"]


@dataclass(frozen=True, slots=True)
class RelayState:
    """One relay as the meter knows it at the time of a scrape."""

    name: str
    connected: bool
    status: RelayStatus | None
    lost: int = 0
    """Exchanges that were open when the relay went away for good."""
    implementation: str = ""
    """Implementation of the parts that can be compiled: `native`, `python`; empty: not reported."""


@dataclass(frozen=True, slots=True)
class ExporterState:
    """An exporter about itself at the time of a scrape."""

    name: str
    sent: int
    """Spans that the receiver took."""
    queued: int
    failures: int
    """Requests that did not arrive: each was tried again, or its spans are in `dropped`."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Spans by reason: queue_full, refused, rejected, shutdown."""


@dataclass(frozen=True, slots=True)
class MeterState:
    """The meter about itself at the time of a scrape."""

    frames: int = 0
    live_exchanges: int = 0
    subscribers: int = 0
    """Of the live feed."""
    live_missed: int = 0
    """Exchanges that some subscriber of it was too slow for."""
    cpu_ns: int = 0
    rss_bytes: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Exchanges or frames that could not be measured, by kind of error."""
    label_overflow: Mapping[str, int] = field(default_factory=dict)
    """Exchanges counted as `other`, by the label that was full."""
    smooth_goodput: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second, by name of the window."""
    smooth_goodput_text: str = "output tokens - alpha x user idle latency"
    """What it sums."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Requests per second that met their objectives, by name of the window."""
    lag_ns: Mapping[str, int] = field(default_factory=dict)
    """Worst lag of a relay's event loop, by name of the window."""
    exporters: Sequence[ExporterState] = ()
    capture: CaptureState | None = None
    """None where nothing is captured."""


_RELAY_COUNTERS: Final[tuple[tuple[str, str, Callable[[RelayStatus], float]], ...]] = (
    ("llmtap_relay_exchanges", "Exchanges begun", lambda s: s.opened),
    ("llmtap_tap_measured_exchanges", "Exchanges whose every frame was acknowledged", lambda s: s.measured),
    ("llmtap_relay_accepted_connections", "Connections accepted", lambda s: s.accepted),
    ("llmtap_relay_upstream_connects", "Connections made upstream", lambda s: s.upstream_connects),
    ("llmtap_relay_upstream_reuses", "Requests on a kept-alive connection", lambda s: s.upstream_reuses),
    (
        "llmtap_relay_upstream_unsolicited",
        "Connections closed because the upstream sent bytes that no request had asked for",
        lambda s: s.upstream_unsolicited,
    ),
    ("llmtap_relay_cpu_seconds", "CPU time of the relay", lambda s: s.cpu_ns / 1e9),
)
_RELAY_GAUGES: Final[tuple[tuple[str, str, Callable[[RelayStatus], float]], ...]] = (
    ("llmtap_relay_connections", "Client connections now", lambda s: s.connections),
    ("llmtap_relay_streams", "Exchanges in progress", lambda s: s.streams),
    ("llmtap_relay_upstream_idle", "Idle upstream connections", lambda s: s.upstream_idle),
    ("llmtap_relay_unsettled_exchanges", "Neither measured nor dropped yet", lambda s: s.unsettled),
    ("llmtap_relay_tap_pending_bytes", "Bytes waiting to go to the meter", lambda s: s.tap_pending_bytes),
    ("llmtap_relay_rss_bytes", "Resident memory of the relay", lambda s: s.rss_bytes),
)


def collect_relays(relays: Iterable[RelayState]) -> Iterator[Metric]:
    """Counters of every relay known, gauges of those that speak."""
    relays = list(relays)
    said = [(relay.name, relay.status) for relay in relays if relay.status is not None]
    now = [(relay.name, relay.status) for relay in relays if relay.connected and relay.status is not None]
    for metric, text, read in _RELAY_COUNTERS:
        yield counter(metric, text, ("relay",), [((name,), read(status)) for name, status in said])
    for metric, text, read in _RELAY_GAUGES:
        yield gauge(metric, text, ("relay",), [((name,), read(status)) for name, status in now])
    yield gauge(
        "llmtap_relay_up",
        "1 while the relay speaks to the meter",
        ("relay",),
        [((relay.name,), int(relay.connected)) for relay in relays],
    )
    yield gauge(
        "llmtap_relay_info",
        "Implementation of the parts that can be compiled of each relay that speaks to the meter",
        ("relay", "implementation"),
        [
            ((relay.name, relay.implementation), 1)
            for relay in relays
            if relay.connected and relay.implementation
        ],
    )
    dropped = {(name, reason): n for name, status in said for reason, n in status.dropped.items()}
    dropped.update({(relay.name, "relay_lost"): relay.lost for relay in relays if relay.lost})
    yield counter(
        "llmtap_tap_dropped_exchanges",
        "Exchanges that passed unmeasured",
        ("relay", "reason"),
        dropped.items(),
    )
    yield counter(
        "llmtap_relay_refused",
        "Connections and requests turned away, by limit",
        ("relay", "limit"),
        [((name, limit), n) for name, status in said for limit, n in status.refused.items()],
    )
    yield counter(
        "llmtap_relay_bytes",
        "Bytes passed on: up to the gateway, down to the clients",
        ("relay", "direction"),
        [
            ((name, direction), n)
            for name, status in said
            for direction, n in (("up", status.bytes_up), ("down", status.bytes_down))
        ],
    )


def collect_meter(meter: MeterState) -> Iterator[Metric]:
    """The meter's own figures."""
    yield counter(
        "llmtap_label_overflow",
        "Exchanges counted as `other` because the label (or the number of series) was full",
        ("label",),
        [((label,), n) for label, n in meter.label_overflow.items()],
    )
    yield counter(
        "llmtap_meter_errors",
        "What the meter could not make sense of",
        ("kind",),
        [((kind,), n) for kind, n in meter.errors.items()],
    )
    yield counter("llmtap_meter_frames", "Frames read from relays", (), [((), meter.frames)])
    yield counter("llmtap_meter_cpu_seconds", "CPU time of the meter", (), [((), meter.cpu_ns / 1e9)])
    yield gauge("llmtap_meter_rss_bytes", "Resident memory of the meter", (), [((), meter.rss_bytes)])
    yield gauge("llmtap_meter_live_exchanges", "Exchanges being rebuilt", (), [((), meter.live_exchanges)])
    yield gauge("llmtap_live_subscribers", "Subscribers of the live feed", (), [((), meter.subscribers)])
    yield counter(
        "llmtap_live_missed_exchanges",
        "Exchanges that a subscriber of the live feed was too slow for",
        (),
        [((), meter.live_missed)],
    )
    yield gauge(
        "llmtap_smooth_goodput_tokens_per_second",
        f"Sum of {meter.smooth_goodput_text}, per second",
        ("window",),
        [((window,), value) for window, value in meter.smooth_goodput.items()],
    )
    yield gauge(
        "llmtap_goodput_requests_per_second",
        "Requests that met all their objectives, per second",
        ("window",),
        [((window,), value) for window, value in meter.goodput.items()],
    )
    yield gauge(
        "llmtap_window_uncertainty_seconds",
        "Worst lag of a relay's event loop in a window: no figure of it is more exact",
        ("window",),
        [((window,), ns / 1e9) for window, ns in meter.lag_ns.items()],
    )
    if meter.exporters:
        yield from _collect_exporters(meter.exporters)
    if meter.capture is not None:
        yield from collect_capture(meter.capture)


def _collect_exporters(exporters: Sequence[ExporterState]) -> Iterator[Metric]:
    yield counter(
        "llmtap_export_sent",
        "Spans that receivers took",
        ("exporter",),
        [((e.name,), e.sent) for e in exporters],
    )
    yield counter(
        "llmtap_export_dropped",
        "Spans that no receiver got",
        ("exporter", "reason"),
        [((e.name, reason), n) for e in exporters for reason, n in e.dropped.items()],
    )
    yield counter(
        "llmtap_export_failures",
        "Requests to receivers that failed",
        ("exporter",),
        [((e.name,), e.failures) for e in exporters],
    )
    yield gauge(
        "llmtap_export_queued_spans",
        "Spans waiting for a receiver",
        ("exporter",),
        [((e.name,), e.queued) for e in exporters],
    )
