"""Status that a vantage reports to the meter twice a second: its counters since the start, and gauges.

Each field with a `Count` declares a counter or gauge. To add a counter, add a field here, and increment it in
`Reporter.counts` where the event happens. The API, its schema and `/metrics` are made from these fields, so
the name is declared nowhere else.
"""

from typing import Annotated, Final, Literal

import msgspec

from llmtap.counts import PASSIVE, RELAY, Count

LAG_EDGES_NS: Final = (
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    5_000_000_000,
)
"""Upper bounds of the lag buckets; one more bucket has all larger values."""
_RELAY: Final = (RELAY,)
_PASSIVE: Final = (PASSIVE,)
_BYTES: Final = "Bytes passed on: up to the gateway, down to the clients"


class RelayStatus(msgspec.Struct, kw_only=True):
    """Status of a vantage. Fields that do not apply to its kind of vantage keep their default."""

    opened: Annotated[int, Count("Exchanges started", "relay_exchanges")] = 0
    measured: Annotated[
        int, Count("Exchanges whose every frame was acknowledged", "tap_measured_exchanges")
    ] = 0
    dropped: Annotated[
        dict[str, int], Count("Exchanges that passed unmeasured", "tap_dropped_exchanges", "reason")
    ] = {}
    unsettled: Annotated[int, Count("Exchanges that run, or that the meter has not acknowledged")] = 0
    lost: Annotated[
        int,
        Count(
            "Exchanges under way when the vantage died: each ended as tap_error, and is not dropped",
            "tap_lost_exchanges",
        ),
    ] = 0
    """The meter sets this field after the vantage has died; a vantage itself never reports it."""
    connections: Annotated[
        int, Count("Client connections now", "relay_connections", gauge=True, vantages=(RELAY, PASSIVE))
    ] = 0
    streams: Annotated[int, Count("Exchanges in progress", "relay_streams", gauge=True)] = 0
    upstream_idle: Annotated[
        int, Count("Idle upstream connections", "relay_upstream_idle", gauge=True, vantages=_RELAY)
    ] = 0
    upstream_connects: Annotated[
        int, Count("Connections made upstream", "relay_upstream_connects", vantages=_RELAY)
    ] = 0
    upstream_reuses: Annotated[
        int, Count("Requests on a kept-alive connection", "relay_upstream_reuses", vantages=_RELAY)
    ] = 0
    thread_loans: Annotated[
        int,
        Count(
            "Times that the rest of a response went to the forwarding thread",
            "relay_thread_loans",
            vantages=_RELAY,
        ),
    ] = 0
    upstream_unsolicited: Annotated[
        int,
        Count(
            "Connections closed because the upstream sent bytes that no request had asked for",
            "relay_upstream_unsolicited",
            vantages=_RELAY,
        ),
    ] = 0
    upstreams: Annotated[
        dict[str, bool],
        Count(
            "1 if the upstream accepted the latest connection of the relay; its responses do not count",
            "relay_upstream_up",
            "upstream",
            gauge=True,
            vantages=_RELAY,
        ),
    ] = {}
    accepted: Annotated[int, Count("Client connections accepted", vantages=_RELAY)] = 0
    refused: Annotated[
        dict[str, int],
        Count("Connections and requests turned away, by limit", "relay_refused", "limit", vantages=_RELAY),
    ] = {}
    skipped: Annotated[
        dict[str, int],
        Count(
            "Requests forwarded but not measured, as no inference: by rule of relay.skip",
            "relay_skipped_requests",
            "rule",
        ),
    ] = {}
    tap_pending_bytes: Annotated[
        int, Count("Bytes waiting to go to the meter", "relay_tap_pending_bytes", gauge=True)
    ] = 0
    cpu_ns: Annotated[int, Count("CPU time of the relay", "relay_cpu_seconds")] = 0
    rss_bytes: Annotated[int, Count("Resident memory of the relay", "relay_rss_bytes", gauge=True)] = 0
    lag_ns_max: Annotated[int, Count("Worst event-loop lag since the last status")] = 0
    bytes_up: Annotated[int, Count(_BYTES, "relay_bytes", "direction", value="up")] = 0
    bytes_down: Annotated[int, Count(_BYTES, "relay_bytes", "direction", value="down")] = 0
    side: Annotated[
        Literal["client", "server", "host", "middle", "mixed", ""],
        Count("Place of a passive vantage; host: both ends; null: unknown", vantages=_PASSIVE),
    ] = ""
    packets: Annotated[
        dict[str, int],
        Count(
            "Packets that passed the filter: captured, or lost by the kernel",
            "watch_packets",
            "result",
            vantages=_PASSIVE,
        ),
    ] = {}
    watched: Annotated[
        dict[str, int],
        Count(
            "Connections of a passive vantage: with a request (followed, joined late); not measured, by kind",
            "watch_connections",
            "kind",
            vantages=_PASSIVE,
        ),
    ] = {}
    missing_bytes: Annotated[
        int, Count("Bytes of streams that no packet brought", "watch_missing_bytes", vantages=_PASSIVE)
    ] = 0

    t_ns: int = 0
    """Time of the status."""
    lag_buckets: list[int] = []
    """Number of event-loop lags since the start, by bucket of LAG_EDGES_NS; the last one has larger lags."""
    lag_sum_ns: int = 0
    """Sum of all delays of the event loop, for the metric of their mean."""
    upstream_up: bool | None = None
    """Whether the upstream accepted the connection of the latest check; None: not checked."""
    upstreams_tried_ns: dict[str, int] = {}
    """Monotonic time when the latest attempt to connect ended, by URL of the upstream."""
    draining: bool = False
    """Whether the process accepts no more requests."""
