"""The board of the tap itself: what it costs, sees, keeps and lost."""

from __future__ import annotations

from panels import Board, Panel, Row, bars, datasource, heatmap, lines, stat
from queries import JOB, JOB_VARIABLE, p99, rate

__all__ = ["tap_board"]


def _tap_now() -> tuple[Panel, ...]:
    unmeasured = f"sum(llmtap_tap_dropped_exchanges_total{{{JOB}}}) or vector(0)"
    return (
        stat(
            "Up",
            "Scrapes that succeed.",
            (f"up{{{JOB}}}", "{{instance}}"),
            width=3,
            steps=[("red", None), ("green", 1)],
        ),
        stat(
            "Relays",
            "That speak to their meter.",
            (f"sum(llmtap_relay_up{{{JOB}}})", "relays"),
            width=3,
            steps=[("red", None), ("green", 1)],
        ),
        stat(
            "Upstreams",
            "1: the upstream accepted the latest connection of each relay. Responses do not count.",
            (f"min by (upstream) (llmtap_relay_upstream_up{{{JOB}}})", "{{upstream}}"),
            width=3,
            steps=[("red", None), ("green", 1)],
        ),
        stat(
            "Streams", "Exchanges in progress.", (f"sum(llmtap_relay_streams{{{JOB}}})", "streams"), width=3
        ),
        stat(
            "Unmeasured",
            "Exchanges in no figure, since the proxies started.",
            (unmeasured, "exchanges"),
            width=4,
            steps=[("green", None), ("orange", 1)],
        ),
        stat(
            "Uncertainty",
            "Worst lag of a relay's loop in the last minute: no figure of it is more exact.",
            (f'max(llmtap_window_uncertainty_seconds{{{JOB},window="1m"}})', "1m"),
            unit="s",
            width=4,
            steps=[("green", None), ("orange", 0.01), ("red", 0.1)],
        ),
        stat(
            "Version",
            "What runs.",
            (f"count by (version) (llmtap_build_info{{{JOB}}})", "{{version}}"),
            width=4,
        ),
    )


def _cost() -> tuple[Panel, ...]:
    return (
        lines(
            "Added latency",
            "p99 of what the tap adds: to a request, to the first chunk, to any chunk.",
            (p99("llmtap_tap_added_seconds", JOB, "point"), "{{point}}"),
        ),
        heatmap(
            "Added to chunks, all",
            "The whole distribution.",
            "llmtap_tap_added_seconds",
            f'{JOB},point="chunk"',
        ),
        lines(
            "Loop lag",
            "How late each relay's event loop was, p99.",
            (p99("llmtap_tap_loop_lag_seconds", JOB, "instance, relay"), "{{instance}} {{relay}}"),
        ),
        lines(
            "CPU",
            "Cores.",
            (rate("llmtap_relay_cpu_seconds_total", JOB, "instance"), "{{instance}} relays"),
            (rate("llmtap_meter_cpu_seconds_total", JOB, "instance"), "{{instance}} meter"),
            unit="short",
        ),
        lines(
            "Memory",
            "Resident.",
            (f"sum by (instance) (llmtap_relay_rss_bytes{{{JOB}}})", "{{instance}} relays"),
            (f"sum by (instance) (llmtap_meter_rss_bytes{{{JOB}}})", "{{instance}} meter"),
            unit="bytes",
        ),
        lines(
            "Scrapes",
            "How long they take, and how many series they bring.",
            (f"scrape_duration_seconds{{{JOB}}}", "{{instance}}: seconds"),
        ),
    )


def _sees() -> tuple[Panel, ...]:
    return (
        lines(
            "Exchanges",
            "Begun, and measured: every frame acknowledged by the meter.",
            (rate("llmtap_relay_exchanges_total", JOB), "begun"),
            (rate("llmtap_tap_measured_exchanges_total", JOB), "measured"),
            unit="reqps",
        ),
        bars(
            "Unmeasured",
            "By reason: no_meter, meter_lost, overflow. Lost: cut, as a relay died; measured until then.",
            (rate("llmtap_tap_dropped_exchanges_total", JOB, "reason"), "{{reason}}"),
            (rate("llmtap_tap_lost_exchanges_total", JOB), "lost with a relay"),
        ),
        bars(
            "Turned away",
            "Requests and connections, by the limit they met.",
            (rate("llmtap_relay_refused_total", JOB, "limit"), "{{limit}}"),
        ),
        lines(
            "Connections",
            "Of clients; idle ones to the gateway.",
            (f"sum(llmtap_relay_connections{{{JOB}}})", "clients"),
            (f"sum(llmtap_relay_upstream_idle{{{JOB}}})", "upstream, idle"),
            unit="short",
        ),
        lines(
            "Upstream connections",
            "Made, and used again.",
            (rate("llmtap_relay_upstream_connects_total", JOB), "made"),
            (rate("llmtap_relay_upstream_reuses_total", JOB), "used again"),
            unit="reqps",
        ),
        lines(
            "Bytes",
            "Up to the gateway, down to the clients.",
            (rate("llmtap_relay_bytes_total", JOB, "direction"), "{{direction}}"),
            unit="Bps",
        ),
        lines(
            "Waiting for the meter",
            "Bytes in the relays' channels; at relay.tap_bytes exchanges are dropped.",
            (f"sum by (instance, relay) (llmtap_relay_tap_pending_bytes{{{JOB}}})", "{{instance}} {{relay}}"),
            unit="bytes",
        ),
        lines(
            "Frames",
            "That the meter read.",
            (rate("llmtap_meter_frames_total", JOB), "frames/s"),
            unit="short",
        ),
        bars(
            "Not understood",
            "Frames and exchanges by kind of error; answers and events of unknown format; full labels. "
            "A dialect for an answer: llmtap inspect FILE --draft NAME.",
            (rate("llmtap_meter_errors_total", JOB, "kind"), "error: {{kind}}"),
            (
                rate("llmtap_answers_without_dialect_total", JOB, "reading, path, content_type"),
                "answers, {{reading}}: {{path}} {{content_type}}",
            ),
            (rate("llmtap_unparsed_events_total", JOB), "unknown events"),
            (rate("llmtap_label_overflow_total", JOB, "label"), "no name left: {{label}}"),
            unit="short",
        ),
    )


def _keeps() -> tuple[Panel, ...]:
    return (
        stat(
            "Capture",
            "1 while it is paused: exchanges are measured and not kept.",
            (f"max by (instance) (llmtap_capture_paused{{{JOB}}})", "{{instance}}"),
            height=8,
            width=4,
            steps=[("green", None), ("red", 1)],
        ),
        lines(
            "Kept",
            "Exchanges by what became of them.",
            (rate("llmtap_capture_exchanges_total", JOB), "kept"),
            (rate("llmtap_capture_dropped_exchanges_total", JOB, "reason"), "dropped: {{reason}}"),
            unit="reqps",
            width=10,
        ),
        lines(
            "On disk",
            "Spools, and all local files together; capture.total_bytes is the bound.",
            (f"sum(llmtap_capture_spool_bytes{{{JOB}}})", "spools"),
            (f"sum(llmtap_capture_local_bytes{{{JOB}}})", "all"),
            unit="bytes",
            width=10,
        ),
        lines(
            "Waiting",
            "Exchanges in memory, closed spools that are not Parquet yet.",
            (f"sum(llmtap_capture_waiting_exchanges{{{JOB}}})", "exchanges"),
            (f"sum(llmtap_capture_waiting_files{{{JOB}}})", "files"),
            unit="short",
            width=12,
        ),
        lines(
            "OpenTelemetry",
            "Spans that receivers took, and that none got.",
            (rate("llmtap_export_sent_total", JOB, "exporter"), "{{exporter}}: sent"),
            (
                rate("llmtap_export_dropped_total", JOB, "exporter, reason"),
                "{{exporter}}: dropped, {{reason}}",
            ),
            unit="short",
            width=12,
        ),
    )


def tap_board() -> Board:
    return Board(
        "llmtap-tap",
        "llmtap: the tap itself",
        "What the tap costs, what it sees, and what it lost.",
        (datasource(), JOB_VARIABLE),
        (
            Row("Now", _tap_now()),
            Row("What it costs", _cost()),
            Row("What it sees", _sees()),
            Row("What it keeps and sends", _keeps()),
        ),
    )
