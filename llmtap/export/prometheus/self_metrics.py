"""The tap about itself: what relays say of themselves, and the meter of its own work.

A relay that left keeps its counters, so that sums over relays do not fall, and loses its gauges.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.metrics_core import Metric

from llmtap.channel.frames import RelayStatus
from llmtap.export.prometheus.text import counter, gauge

__all__ = [
    "CaptureState",
    "ExporterState",
    "MeterState",
    "RelayState",
    "SloState",
    "collect_capture",
    "collect_meter",
    "collect_relays",
    "collect_slos",
]


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The capture at the time of a scrape. Counts are since the meter started."""

    to: str = ""
    """Where files go: without secrets."""
    level: str = ""
    """Of privacy."""
    exchanges: int = 0
    """In the spool, or beyond it."""
    waiting: int = 0
    """Exchanges in memory."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Measured, and not kept, by reason."""
    unshaped: int = 0
    """Kept without the shape of their request: it was too long, or too much was waiting."""
    problem: str | None = None
    """Why nothing can be written now: a word."""
    files_problem: str | None = None
    """Why finished files do not get to their place now, and wait: a sentence without secrets."""
    bytes_written: int = 0
    """To the spool."""
    files: int = 0
    """Finished: Parquet, where it was to go."""
    files_waiting: int = 0
    """Closed spools that are not Parquet yet."""
    files_deleted: int = 0
    """To stay below the bound."""
    spool_bytes: int = 0
    local_bytes: int = 0
    """Spools and local Parquet files together."""
    failures: int = 0
    """Attempts to finish or deliver a file that failed; each is tried again."""
    recovered: int = 0
    """Exchanges found in spools that an earlier run left."""
    damaged: int = 0
    """Batches of such spools that could not be read."""

    def to_dict(self) -> dict[str, object]:
        """As the admin API shows it."""
        return {
            "to": self.to, "level": self.level, "exchanges": self.exchanges, "waiting": self.waiting,
            "dropped": dict(self.dropped), "unshaped": self.unshaped, "problem": self.problem,
            "files_problem": self.files_problem, "bytes_written": self.bytes_written,
            "files": self.files, "files_waiting": self.files_waiting, "files_deleted": self.files_deleted,
            "spool_bytes": self.spool_bytes, "local_bytes": self.local_bytes, "failures": self.failures,
            "recovered": self.recovered, "damaged": self.damaged,
        }  # fmt: skip


def collect_capture(state: CaptureState) -> Iterator[Metric]:
    """Counters and gauges, all named `llmtap_capture_...`."""
    for name, text, value in (
        ("exchanges", "Exchanges kept", state.exchanges),
        ("unshaped_exchanges", "Exchanges kept without the shape of their request", state.unshaped),
        ("written_bytes", "Bytes written to the spool", state.bytes_written),
        ("files", "Files finished and delivered", state.files),
        ("deleted_files", "Files deleted to stay below the bound", state.files_deleted),
        ("failures", "Attempts to finish or deliver a file that failed", state.failures),
        ("recovered_exchanges", "Exchanges found in spools of an earlier run", state.recovered),
        ("damaged_batches", "Batches of such spools that could not be read", state.damaged),
    ):
        yield counter(f"llmtap_capture_{name}", text, (), [((), value)])
    yield counter(
        "llmtap_capture_dropped_exchanges",
        "Exchanges that were measured and not kept",
        ("reason",),
        [((reason,), n) for reason, n in state.dropped.items()],
    )
    yield gauge(
        "llmtap_capture_paused",
        "1 while nothing can be written and exchanges are measured only; why: llmtap_capture_problem",
        (),
        [((), int(state.problem is not None))],
    )
    problems = [] if state.problem is None else [state.problem]
    if state.files_problem is not None:
        problems.append("files")
    yield gauge(
        "llmtap_capture_problem",
        "1 for each thing that is wrong now: disk_full, folder or total_bytes pause the capture; "
        "files: finished ones do not get to their place, and wait",
        ("reason",),
        [((reason,), 1) for reason in problems],
    )
    for name, text, value in (
        ("waiting_exchanges", "Exchanges in memory, to be written", state.waiting),
        ("waiting_files", "Closed spools that are not Parquet yet", state.files_waiting),
        ("spool_bytes", "Size of all spools, the open one too", state.spool_bytes),
        ("local_bytes", "Size of all spools and local files together", state.local_bytes),
    ):
        yield gauge(f"llmtap_capture_{name}", text, (), [((), value)])


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


@dataclass(frozen=True, slots=True)
class SloState:
    """All classes at the time of a scrape."""

    targets: Mapping[str, float] = field(default_factory=dict)
    """By class."""
    bounds_ns: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By class and objective."""
    counts: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By class and tenant: exchanges that counted, and those that met their objectives, since the start."""
    burn_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By class and window."""


def collect_slos(state: SloState) -> Iterator[Metric]:
    """Nothing where there are no objectives."""
    if not state.targets and not state.counts:
        return
    counted = {key: n for key, (n, _) in state.counts.items()}
    good = {key: n for key, (_, n) in state.counts.items()}
    for name in state.targets:
        # Each class from the start, so that rate() sees its first exchange.
        counted.setdefault((name, "default"), 0)
        good.setdefault((name, "default"), 0)
    labels = ("slo", "tenant")
    yield counter("llmtap_slo_events", "Exchanges that objectives applied to", labels, counted.items())
    yield counter("llmtap_slo_good", "Those that met every one of them", labels, good.items())
    yield gauge(
        "llmtap_slo_target_ratio",
        "Share of the exchanges that must meet their objectives",
        ("slo",),
        [((name,), target) for name, target in state.targets.items()],
    )
    yield gauge(
        "llmtap_slo_objective_seconds",
        "Bounds of the objectives, each an edge of the histogram that shows it",
        ("slo", "objective"),
        [(key, bound_ns / 1e9) for key, bound_ns in state.bounds_ns.items()],
    )
    yield gauge(
        "llmtap_slo_burn_rate",
        "How many times faster than allowed the error budget goes, over a window",
        ("slo", "window"),
        state.burn_rates.items(),
    )
