from llmtap.export.prometheus.self_metrics import (
    ExporterState,
    MeterState,
    RelayState,
    collect_meter,
    collect_relays,
)
from tests.support.traffic.relay_status import relay_status


def samples(metrics) -> dict[tuple[str, ...], float]:  # type: ignore[no-untyped-def]
    return {(s.name, *s.labels.values()): s.value for metric in metrics for s in metric.samples}


def test_a_relay_is_shown_as_it_describes_itself() -> None:
    status = relay_status(
        opened=10, measured=6, dropped={"tap_full": 2}, unsettled=2, connections=5, streams=2,
        cpu_ns=1_500_000_000, refused={"streams": 1}, bytes_up=100, bytes_down=900,
    )  # fmt: skip
    found = samples(collect_relays([RelayState("r0", True, status, implementation="native")]))
    for key, value in {
        ("llmtap_relay_exchanges_total", "r0"): 10, ("llmtap_tap_measured_exchanges_total", "r0"): 6,
        ("llmtap_tap_dropped_exchanges_total", "r0", "tap_full"): 2, ("llmtap_relay_connections", "r0"): 5,
        ("llmtap_relay_unsettled_exchanges", "r0"): 2, ("llmtap_relay_cpu_seconds_total", "r0"): 1.5,
        ("llmtap_relay_refused_total", "r0", "streams"): 1, ("llmtap_relay_bytes_total", "r0", "down"): 900,
        ("llmtap_relay_up", "r0"): 1, ("llmtap_relay_info", "r0", "native"): 1,
    }.items():  # fmt: skip
        assert found[key] == value, key


def test_a_relay_that_left_keeps_its_counters_and_loses_its_gauges() -> None:
    found = samples(collect_relays([RelayState("r0", False, relay_status(opened=10, connections=5), lost=3)]))
    assert found["llmtap_relay_exchanges_total", "r0"] == 10
    assert found["llmtap_tap_dropped_exchanges_total", "r0", "relay_lost"] == 3
    assert found["llmtap_relay_up", "r0"] == 0
    assert ("llmtap_relay_connections", "r0") not in found
    assert ("llmtap_relay_info", "r0", "") not in found


def test_a_relay_that_has_not_spoken_is_only_up() -> None:
    assert samples(collect_relays([RelayState("r0", True, None)])) == {("llmtap_relay_up", "r0"): 1}


def test_the_meter_counts_its_own_failures() -> None:
    state = MeterState(
        frames=9, errors={"ValueError": 2}, label_overflow={"model": 4}, smooth_goodput={"1m": -1.5}
    )  # fmt: skip
    found = samples(collect_meter(state))
    assert found["llmtap_meter_errors_total", "ValueError"] == 2
    assert found["llmtap_label_overflow_total", "model"] == 4
    assert found["llmtap_meter_frames_total",] == 9
    assert found["llmtap_smooth_goodput_tokens_per_second", "1m"] == -1.5


def test_exporters_tell_what_they_sent_and_what_they_dropped() -> None:
    otlp = ExporterState("otlp", sent=5, queued=2, failures=3, dropped={"queue_full": 4})
    found = {
        (s.name, *s.labels.values()): s.value
        for family in collect_meter(MeterState(exporters=[otlp]))
        for s in family.samples
        if s.name.startswith("llmtap_export")
    }
    assert found == {
        ("llmtap_export_sent_total", "otlp"): 5,
        ("llmtap_export_dropped_total", "otlp", "queue_full"): 4,
        ("llmtap_export_failures_total", "otlp"): 3,
        ("llmtap_export_queued_spans", "otlp"): 2,
    }
    assert not [f for f in collect_meter(MeterState()) if f.name.startswith("llmtap_export")]
