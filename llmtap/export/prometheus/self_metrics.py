"""llmtap about itself: relays, meter, exporters, capture, and how the objectives were met.

A relay that left keeps its counters, so that sums over relays do not fall, and loses its gauges.
`llmtap_capture_paused` is the one to alert on: exchanges are measured and not captured; the reason is in
`llmtap_capture_problem`, which also reports that finished files cannot be delivered.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    "collect_meter",
    "collect_relays",
    "collect_slos",
]


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The capture at the time of a scrape. Counts are since the meter started."""

    to: str = ""
    """Destination of the files, without secrets."""
    level: str = ""
    """Level of privacy."""
    exchanges: int = 0
    """In the spool, or beyond it."""
    waiting: int = 0
    """Exchanges in memory."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Measured and not captured, by reason."""
    unshaped: int = 0
    """Captured without the shape of their request: it was too long, or too much was waiting."""
    problem: str | None = None
    """Why nothing can be written now: a word."""
    files_problem: str | None = None
    """Why finished files cannot be delivered now: a sentence without secrets."""
    bytes_written: int = 0
    """To the spool."""
    files: int = 0
    """Finished: Parquet at the destination."""
    files_waiting: int = 0
    """Closed spools that are not Parquet yet."""
    files_deleted: int = 0
    """To stay below the limit."""
    spool_bytes: int = 0
    local_bytes: int = 0
    """Spools and local Parquet files together."""
    failures: int = 0
    """Failed attempts to finish or deliver a file; each is retried."""
    recovered: int = 0
    """Exchanges found in spools that an earlier run left."""
    damaged: int = 0
    """Batches of such spools that could not be read."""

    def to_dict(self) -> dict[str, object]:
        """Public JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RelayState:
    """One relay at the time of a scrape."""

    name: str
    connected: bool
    status: RelayStatus | None
    lost: int = 0
    """Exchanges that were open when the relay went away for good."""
    implementation: str = ""
    """Implementation of the parts that can be compiled: `native`, `python`; empty: not reported."""


@dataclass(frozen=True, slots=True)
class ExporterState:
    """An exporter at the time of a scrape."""

    name: str
    sent: int
    """Spans that the receiver accepted."""
    queued: int
    failures: int
    """Failed requests: each was retried, or its spans are in `dropped`."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Spans by reason: queue_full, refused, rejected, shutdown."""


@dataclass(frozen=True, slots=True)
class MeterState:
    """The meter at the time of a scrape."""

    frames: int = 0
    live_exchanges: int = 0
    subscribers: int = 0
    """Of the live feed."""
    live_missed: int = 0
    """Exchanges that a subscriber of it was too slow for."""
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


@dataclass(frozen=True, slots=True)
class SloState:
    """All classes of objectives at the time of a scrape."""

    targets: Mapping[str, float] = field(default_factory=dict)
    """By class."""
    bounds_ns: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By class and objective."""
    counts: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By class and tenant: exchanges that counted, and those that met their objectives, since the start."""
    burn_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By class and window."""


_RELAY_COUNTERS: Final[tuple[tuple[str, str, Callable[[RelayStatus], float]], ...]] = (
    ("llmtap_relay_exchanges", "Exchanges begun", lambda s: s.opened),
    ("llmtap_tap_measured_exchanges", "Exchanges whose every frame was acknowledged", lambda s: s.measured),
    ("llmtap_relay_accepted_connections", "Connections accepted", lambda s: s.accepted),
    ("llmtap_relay_upstream_connects", "Connections made upstream", lambda s: s.upstream_connects),
    ("llmtap_relay_upstream_reuses", "Requests on a kept-alive connection", lambda s: s.upstream_reuses),
    ("llmtap_relay_upstream_unsolicited",
     "Connections closed because the upstream sent bytes that no request had asked for",
     lambda s: s.upstream_unsolicited),
    ("llmtap_relay_cpu_seconds", "CPU time of the relay", lambda s: s.cpu_ns / 1e9),
)  # fmt: skip
_RELAY_GAUGES: Final[tuple[tuple[str, str, Callable[[RelayStatus], float]], ...]] = (
    ("llmtap_relay_connections", "Client connections now", lambda s: s.connections),
    ("llmtap_relay_streams", "Exchanges in progress", lambda s: s.streams),
    ("llmtap_relay_upstream_idle", "Idle upstream connections", lambda s: s.upstream_idle),
    ("llmtap_relay_unsettled_exchanges", "Neither measured nor dropped yet", lambda s: s.unsettled),
    ("llmtap_relay_tap_pending_bytes", "Bytes waiting to go to the meter", lambda s: s.tap_pending_bytes),
    ("llmtap_relay_rss_bytes", "Resident memory of the relay", lambda s: s.rss_bytes),
)


def _by(values: Mapping[str, float], scale: float = 1) -> Iterator[tuple[tuple[str, ...], float]]:
    """Values by one label; `scale` of them make one of the metric's unit."""
    return (((name,), value if scale == 1 else value / scale) for name, value in values.items())


def collect_relays(relays: Iterable[RelayState]) -> Iterator[Metric]:
    """Counters of every relay known, gauges of those that are connected."""
    relays = list(relays)
    said = {relay.name: relay.status for relay in relays if relay.status is not None}
    now = {relay.name: said[relay.name] for relay in relays if relay.connected and relay.name in said}
    for metric, text, read in _RELAY_COUNTERS:
        yield counter(metric, text, ("relay",), _by({name: read(s) for name, s in said.items()}))
    for metric, text, read in _RELAY_GAUGES:
        yield gauge(metric, text, ("relay",), _by({name: read(s) for name, s in now.items()}))
    yield gauge(
        "llmtap_relay_up", "1 while the relay speaks to the meter", ("relay",),
        _by({relay.name: int(relay.connected) for relay in relays}),
    )  # fmt: skip
    yield gauge(
        "llmtap_relay_info",
        "Implementation of the parts that can be compiled of each relay that speaks to the meter",
        ("relay", "implementation"),
        [((r.name, r.implementation), 1) for r in relays if r.connected and r.implementation],
    )
    dropped = {(name, reason): n for name, s in said.items() for reason, n in s.dropped.items()}
    dropped.update({(relay.name, "relay_lost"): relay.lost for relay in relays if relay.lost})
    refused = {(name, limit): n for name, s in said.items() for limit, n in s.refused.items()}
    passed = {
        (name, way): n for name, s in said.items() for way, n in (("up", s.bytes_up), ("down", s.bytes_down))
    }
    packets = {(name, result): n for name, s in said.items() for result, n in s.packets.items()}
    watched = {(name, kind): n for name, s in said.items() for kind, n in s.watched.items()}
    if packets:
        missing = {name: s.missing_bytes for name, s in said.items() if s.packets}
        yield counter(
            "llmtap_watch_packets", "Packets that passed the filter: captured, or lost by the kernel",
            ("relay", "result"), packets.items(),
        )  # fmt: skip
        yield counter(
            "llmtap_watch_connections",
            "Connections of a passive vantage: followed, joined in the middle; not measured, by kind",
            ("relay", "kind"), watched.items(),
        )  # fmt: skip
        yield counter(
            "llmtap_watch_missing_bytes", "Bytes of streams that no packet brought", ("relay",), _by(missing)
        )
    for metric, text, label, counts in (
        ("llmtap_tap_dropped_exchanges", "Exchanges that passed unmeasured", "reason", dropped),
        ("llmtap_relay_refused", "Connections and requests turned away, by limit", "limit", refused),
        (
            "llmtap_relay_bytes",
            "Bytes passed on: up to the gateway, down to the clients",
            "direction",
            passed,
        ),
    ):  # fmt: skip
        yield counter(metric, text, ("relay", label), counts.items())


def collect_meter(meter: MeterState) -> Iterator[Metric]:
    """The meter's own figures, its exporters' and the capture's."""
    yield counter(
        "llmtap_label_overflow",
        "Exchanges counted as `other` because the label (or the number of series) was full",
        ("label",),
        _by(meter.label_overflow),
    )
    yield counter(
        "llmtap_meter_errors", "What the meter could not make sense of", ("kind",), _by(meter.errors)
    )
    for make, name, text, value in (
        (counter, "meter_frames", "Frames read from relays", meter.frames),
        (counter, "meter_cpu_seconds", "CPU time of the meter", meter.cpu_ns / 1e9),
        (gauge, "meter_rss_bytes", "Resident memory of the meter", meter.rss_bytes),
        (gauge, "meter_live_exchanges", "Exchanges being rebuilt", meter.live_exchanges),
        (gauge, "live_subscribers", "Subscribers of the live feed", meter.subscribers),
        (counter, "live_missed_exchanges",
         "Exchanges that a subscriber of the live feed was too slow for", meter.live_missed),
    ):  # fmt: skip
        yield make(f"llmtap_{name}", text, (), [((), value)])
    for name, text, values, scale in (
        ("smooth_goodput_tokens_per_second", f"Sum of {meter.smooth_goodput_text}, per second",
         meter.smooth_goodput, 1),
        ("goodput_requests_per_second", "Requests that met all their objectives, per second",
         meter.goodput, 1),
        ("window_uncertainty_seconds",
         "Worst lag of a relay's event loop in a window: no figure of it is more exact", meter.lag_ns, 1e9),
    ):  # fmt: skip
        yield gauge(f"llmtap_{name}", text, ("window",), _by(values, scale))
    if meter.exporters:
        yield from _collect_exporters(meter.exporters)
    if meter.capture is not None:
        yield from _collect_capture(meter.capture)


def _collect_exporters(exporters: Sequence[ExporterState]) -> Iterator[Metric]:
    one, dropped = ("exporter",), [((e.name, why), n) for e in exporters for why, n in e.dropped.items()]
    sent = {e.name: e.sent for e in exporters}
    yield counter("llmtap_export_sent", "Spans that receivers took", one, _by(sent))
    yield counter("llmtap_export_dropped", "Spans that no receiver got", ("exporter", "reason"), dropped)
    yield counter(
        "llmtap_export_failures", "Requests to receivers that failed", one,
        _by({e.name: e.failures for e in exporters}),
    )  # fmt: skip
    yield gauge(
        "llmtap_export_queued_spans", "Spans waiting for a receiver", one,
        _by({e.name: e.queued for e in exporters}),
    )  # fmt: skip


def _collect_capture(state: CaptureState) -> Iterator[Metric]:
    problems = [state.problem, state.files_problem and "files"]
    for make, name, text, value in (
        (counter, "exchanges", "Exchanges kept", state.exchanges),
        (counter, "unshaped_exchanges", "Exchanges kept without the shape of their request", state.unshaped),
        (counter, "written_bytes", "Bytes written to the spool", state.bytes_written),
        (counter, "files", "Files finished and delivered", state.files),
        (counter, "deleted_files", "Files deleted to stay below the bound", state.files_deleted),
        (counter, "failures", "Attempts to finish or deliver a file that failed", state.failures),
        (counter, "recovered_exchanges", "Exchanges found in spools of an earlier run", state.recovered),
        (counter, "damaged_batches", "Batches of such spools that could not be read", state.damaged),
        (counter, "dropped_exchanges", "Exchanges that were measured and not kept", state.dropped),
        (gauge, "paused",
         "1 while nothing can be written and exchanges are measured only; why: llmtap_capture_problem",
         int(state.problem is not None)),
        (gauge, "problem",
         ("1 for each thing that is wrong now: disk_full, folder or total_bytes pause the capture; "
          "files: finished ones do not get to their place, and wait"),
         {reason: 1 for reason in problems if reason}),
        (gauge, "waiting_exchanges", "Exchanges in memory, to be written", state.waiting),
        (gauge, "waiting_files", "Closed spools that are not Parquet yet", state.files_waiting),
        (gauge, "spool_bytes", "Size of all spools, the open one too", state.spool_bytes),
        (gauge, "local_bytes", "Size of all spools and local files together", state.local_bytes),
    ):  # fmt: skip
        if isinstance(value, int):
            yield make(f"llmtap_capture_{name}", text, (), [((), value)])
        else:
            yield make(f"llmtap_capture_{name}", text, ("reason",), _by(value))


def collect_slos(state: SloState) -> Iterator[Metric]:
    """Nothing where there are no objectives."""
    if not state.targets and not state.counts:
        return
    # Each class from the start, so that rate() sees its first exchange.
    counts = dict(state.counts)
    for name in state.targets:
        counts.setdefault((name, "default"), (0, 0))
    labels = ("slo", "tenant")
    for at, name, text in (
        (0, "events", "Exchanges that objectives applied to"), (1, "good", "Those that met every one of them")
    ):  # fmt: skip
        yield counter(f"llmtap_slo_{name}", text, labels, [(key, pair[at]) for key, pair in counts.items()])
    yield gauge(
        "llmtap_slo_target_ratio", "Share of the exchanges that must meet their objectives", ("slo",),
        _by(state.targets),
    )  # fmt: skip
    yield gauge(
        "llmtap_slo_objective_seconds",
        "Bounds of the objectives, each an edge of the histogram that shows it",
        ("slo", "objective"),
        [(key, bound_ns / 1e9) for key, bound_ns in state.bounds_ns.items()],
    )
    yield gauge(
        "llmtap_slo_burn_rate", "How many times faster than allowed the error budget goes, over a window",
        ("slo", "window"), state.burn_rates.items(),
    )  # fmt: skip
