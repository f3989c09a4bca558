"""Alerts about llmtap itself: is it running, does it measure all traffic, are its figures valid.

SLO alerts depend on what llmtap counted, so each way in which it may count nothing, or something wrong, has
an alert here. `increase` misses the first event of a counter that appears with that event: where it matters,
a series that did not exist 15 minutes ago counts from zero.

Alerts keep the labels that identify an instance (`_TAP`), so that they can be routed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["Alert", "self_alerts"]

_TAP: Final = "job, namespace, pod, instance"
"""`namespace` and `pod` are the Prometheus Operator's."""
_LAG_MAX: Final = "0.01"
"""Seconds; where `meter.uncertainty_limit` begins to flag exchanges."""
_ADDED_MAX: Final = "0.005"
"""Seconds that the tap may add to a chunk, at p99; relay and meter on one CPU stay below that (README)."""
_UNMEASURED_MAX: Final = "0.01"
_UNCERTAIN_MAX: Final = "0.05"
_RESTARTS_MAX: Final = 2
"""In an hour: so many are somebody's reloads."""
_LIMITS: Final = "tap_overloaded|connections|accept_failed"
_TRAFFIC_MIN: Final = 100
"""Exchanges in an hour; with so many, 15 minutes without one are no chance (e^-25)."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule."""

    name: str
    """Also the name of its page in `deploy/runbooks/`."""
    severity: str
    """`page`: somebody looks now; `ticket`: this week."""
    expr: str
    summary: str
    description: str
    wait: str | None = None
    """How long it must hold first, as Prometheus writes durations."""
    labels: Mapping[str, str] | None = None


def self_alerts(job: str) -> list[Alert]:
    """All of them, for the scrape job of that name."""
    return [*_presence(job), *_measuring(job), *_figures(job), *_keeping(job)]


def _presence(job: str) -> list[Alert]:
    j = f'job="{job}"'
    return [
        Alert(
            "LlmtapDown",
            "page",
            f"up{{{j}}} == 0",
            "{{ $labels.instance }}: the tap cannot be scraped",
            "No scrape of {{ $labels.instance }} succeeded for 2 minutes: the tap is down, or its admin"
            " port is, or the token is wrong. Nothing is known of the traffic meanwhile.",
            wait="2m",
        ),
        Alert(
            "LlmtapAbsent",
            "page",
            f"absent(up{{{j}}})",
            f"there is no tap: the job {job} has no target",
            f"For 5 minutes Prometheus had no target in the job {job}. No objective is watched.",
            wait="5m",
        ),
        Alert(
            "LlmtapNoRelay",
            "page",
            f"(\n  sum by ({_TAP}) (llmtap_relay_up{{{j}}})\n"
            f"  or sum by ({_TAP}) (0 * (up{{{j}}} == 1))\n) == 0\n",
            "{{ $labels.instance }}: no relay speaks to the meter",
            "For 2 minutes no relay of {{ $labels.instance }} was connected to its meter: traffic is"
            " refused, or it passes unmeasured.",
            wait="2m",
        ),
        Alert(
            "LlmtapNoTraffic",
            "ticket",
            f"sum(increase(llmtap_relay_exchanges_total{{{j}}}[15m])) == 0\n"
            "and\n"
            f"sum(increase(llmtap_relay_exchanges_total{{{j}}}[1h] offset 15m)) >= {_TRAFFIC_MIN}\n",
            f"{job}: no exchange for 15 minutes, after an hour with traffic",
            f"Not one exchange began in 15 minutes; in the hour before there were {_TRAFFIC_MIN} at least."
            " Clients cannot reach the tap, or go another way. Without traffic no burn-rate alert rings.",
        ),
        Alert(
            "LlmtapRefusing",
            "page",
            f"sum by ({_TAP}, limit) (\n"
            f'  increase(llmtap_relay_refused_total{{{j},limit=~"{_LIMITS}"}}[5m])\n) > 0\n',
            "{{ $labels.instance }}: the tap turns requests away ({{ $labels.limit }})",
            "{{ $value | humanize }} requests or connections in 5 minutes found a limit of the tap itself"
            " ({{ $labels.limit }}): users see 503, connections that close, or (accept_failed) they wait.",
            wait="5m",
        ),
    ]


def _measuring(job: str) -> list[Alert]:
    j = f'job="{job}"'
    return [
        Alert(
            "LlmtapExchangesUnmeasured",
            "ticket",
            "(\n"
            f"  sum by ({_TAP}) (llmtap_tap_dropped_exchanges_total{{{j}}})\n"
            "  - (\n"
            f"    sum by ({_TAP}) (llmtap_tap_dropped_exchanges_total{{{j}}} offset 15m)\n"
            f"    or 0 * sum by ({_TAP}) (llmtap_relay_exchanges_total{{{j}}} offset 15m)\n"
            "  )\n)\n"
            f"/ (sum by ({_TAP}) (increase(llmtap_relay_exchanges_total{{{j}}}[15m])) > 0)\n"
            f"> {_UNMEASURED_MAX}\n",
            "{{ $labels.instance }}: exchanges pass unmeasured",
            "{{ $value | humanizePercentage }} of the exchanges of 15 minutes are in no figure (allowed:"
            f" {100 * float(_UNMEASURED_MAX):g} %); llmtap_tap_dropped_exchanges_total has the reasons.",
        ),
        Alert(
            "LlmtapMeterRestarts",
            "ticket",
            f"sum by ({_TAP}) (resets(llmtap_meter_frames_total{{{j}}}[1h])) > {_RESTARTS_MAX}",
            "{{ $labels.instance }}: the meter starts again and again",
            "The meter began anew {{ $value | humanize }} times within an hour; each time its windows,"
            " burn rates and experiment results begin at nothing, and exchanges under way go unmeasured.",
        ),
        Alert(
            "LlmtapMeterErrors",
            "ticket",
            _came("llmtap_meter_errors_total", j, "kind"),
            "{{ $labels.instance }}: the meter cannot make sense of something ({{ $labels.kind }})",
            "{{ $value | humanize }} times in 15 minutes; kind {{ $labels.kind }}. The log has the first"
            " of each kind, with where it happened.",
        ),
        Alert(
            "LlmtapLabelsFull",
            "ticket",
            f"sum by ({_TAP}, label) (increase(llmtap_label_overflow_total{{{j}}}[1h])) > 0",
            "{{ $labels.instance }}: no names are left for the label {{ $labels.label }}",
            "{{ $value | humanize }} exchanges of an hour were counted as `other`, because the label"
            " {{ $labels.label }} has all the values it may have.",
            wait="30m",
        ),
    ]


def _figures(job: str) -> list[Alert]:
    j = f'job="{job}"'
    return [
        Alert(
            "LlmtapRelayLag",
            "ticket",
            "histogram_quantile(\n"
            f"  0.99, sum by ({_TAP}, relay, le) (rate(llmtap_tap_loop_lag_seconds_bucket{{{j}}}[5m]))\n"
            f") > {_LAG_MAX}\n",
            "{{ $labels.instance }}: relay {{ $labels.relay }} is late",
            "For 10 minutes its event loop was {{ $value | humanizeDuration }} late at p99 (bound:"
            f" {float(_LAG_MAX) * 1e3:g} ms): clients get chunks so much later, and figures are as"
            " uncertain.",
            wait="10m",
        ),
        Alert(
            "LlmtapFiguresUncertain",
            "ticket",
            f"sum by ({_TAP}) (rate(llmtap_uncertain_exchanges_total{{{j}}}[15m]))\n"
            f"/ (sum by ({_TAP}) (rate(llmtap_exchanges_total{{{j}}}[15m])) > 0)\n"
            f"> {_UNCERTAIN_MAX}\n",
            "{{ $labels.instance }}: stamps are too wide",
            "{{ $value | humanizePercentage }} of the exchanges have stamps wider than"
            f" meter.uncertainty_limit (allowed: {100 * float(_UNCERTAIN_MAX):g} %).",
            wait="15m",
        ),
        Alert(
            "LlmtapAddedLatency",
            "ticket",
            "histogram_quantile(\n"
            f"  0.99, sum by ({_TAP}, le) (\n"
            f'    rate(llmtap_tap_added_seconds_bucket{{{j},point="chunk"}}[15m])\n  )\n'
            f") > {_ADDED_MAX}\n",
            "{{ $labels.instance }}: the tap delays what it passes",
            "At p99 it adds {{ $value | humanizeDuration }} to a chunk (bound:"
            f" {float(_ADDED_MAX) * 1e3:g} ms), from the read to the kernel's taking the bytes.",
            wait="15m",
        ),
    ]


def _keeping(job: str) -> list[Alert]:
    j = f'job="{job}"'
    return [
        Alert(
            "LlmtapCapturePaused",
            "ticket",
            f"max by ({_TAP}) (llmtap_capture_paused{{{j}}}) == 1",
            "{{ $labels.instance }}: the capture is paused",
            "For 5 minutes exchanges were measured and not kept; llmtap_capture_problem says why.",
            wait="5m",
        ),
        Alert(
            "LlmtapCaptureStuck",
            "ticket",
            f'max by ({_TAP}) (llmtap_capture_problem{{{j},reason="files"}}) == 1',
            "{{ $labels.instance }}: finished capture files do not get to their place",
            "For 30 minutes they waited in the spool. When capture.total_bytes is reached, the capture"
            " pauses.",
            wait="30m",
        ),
        Alert(
            "LlmtapCaptureIncomplete",
            "ticket",
            _came("llmtap_capture_dropped_exchanges_total", j, "reason"),
            "{{ $labels.instance }}: exchanges are missing from the capture ({{ $labels.reason }})",
            "{{ $value | humanize }} exchanges of 15 minutes were measured and not kept; reason:"
            " {{ $labels.reason }}.",
        ),
        Alert(
            "LlmtapExportDropping",
            "ticket",
            _came("llmtap_export_dropped_total", j, "exporter, reason"),
            "{{ $labels.instance }}: spans are lost ({{ $labels.reason }})",
            "{{ $value | humanize }} spans of 15 minutes reached no receiver of"
            " {{ $labels.exporter }}; reason: {{ $labels.reason }}.",
        ),
    ]


def _came(counter: str, j: str, labels: str) -> str:
    """Growth of a counter in 15 minutes where there was any, from zero if the series did not exist before.

    A plain difference would be wrong after a restart of the meter.
    """
    series = f"{counter}{{{j}}}"
    return (
        f"sum by ({_TAP}, {labels}) (\n"
        f"  ({series} unless {series} offset 15m)\n"
        f"  or increase({series}[15m])\n) > 0\n"
    )
