"""The exposition, parsed back as a scraper would."""

import platform
from array import array

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from llmtap import native
from llmtap.channel.frames import LAG_EDGES_NS
from llmtap.exchange.exchange import OUTPUT, Added, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.export.prometheus.exposition import Exposition
from llmtap.export.prometheus.self_metrics import MeterState, RelayState, SloState
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.latency import measure
from tests.support.traffic.relay_status import relay_status

MS = 1_000_000
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


def stream(times_ms: list[int], tokens: int = 1) -> Exchange:
    log = EventLog()
    for t in times_ms:
        log.add(t * MS, EventClass.CONTENT, 100, tokens, OUTPUT)
    t = Timeline(
        arrival_ns=0, submit_ns=0, first_byte_ns=log.t_ns[0], first_token_ns=log.t_ns[0],
        first_content_ns=log.t_ns[0], last_token_ns=log.t_ns[-1], response_end_ns=log.t_ns[-1], events=log,
    )  # fmt: skip
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True)
    x.tokens = Tokens(output=len(times_ms) * abs(tokens), source=TokenSource.USAGE)
    x.added = Added(request_ns=40_000, first_chunk_ns=30_000)
    x.added.chunks_ns.extend([30_000] * len(times_ms))
    return x


def add(exposition: Exposition, *exchanges: Exchange, tenant: str = "t", model: str = "m") -> None:
    for x in exchanges:
        exposition.ended(x, measure(x), SeriesKey(tenant, model), None)


def scrape(exposition: Exposition, *args: object) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body, _ = exposition.freeze(*args).render()  # type: ignore[arg-type]
    return {
        (s.name, frozenset(s.labels.items())): s.value for f in parse_text(body.decode()) for s in f.samples
    }  # fmt: skip


def of(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


WHO = {"tenant": "t", "model": "m"}


def test_an_exchange_reaches_every_histogram() -> None:
    exposition = Exposition("1.2")
    add(exposition, stream([100, 140, 240]))
    found = scrape(exposition)
    for name, labels, count, total in (
        ("llmtap_time_to_first_token_seconds", {"kind": "content"}, 1, 0.1),
        ("llmtap_time_to_first_token_seconds", {"kind": "any"}, 1, 0.1),
        ("llmtap_time_to_first_byte_seconds", {}, 1, 0.1),
        ("llmtap_inter_chunk_seconds", {}, 2, 0.14),
        ("llmtap_inter_token_seconds", {"option": "A"}, 2, 0.14),
        ("llmtap_inter_token_seconds", {"option": "B"}, 2, 0.14),
        ("llmtap_inter_token_seconds", {"option": "B-even"}, 2, 0.14),
        ("llmtap_time_per_output_token_seconds", {}, 1, 0.07),
        ("llmtap_request_duration_seconds", {}, 1, 0.24),
        ("llmtap_user_idle_seconds", {}, 1, 0.14),
        ("llmtap_chunk_tokens", {}, 3, 3.0),
    ):
        assert found[of(f"{name}_count", **WHO, **labels)] == count, name
        assert found[of(f"{name}_sum", **WHO, **labels)] == pytest.approx(total), name
    assert found[of("llmtap_tap_added_seconds_count", point="chunk")] == 3
    assert found[of("llmtap_tap_added_seconds_count", point="request")] == 1
    assert found[of("llmtap_exchanges_total", **WHO, outcome="complete")] == 1
    assert found[of("llmtap_output_tokens_total", **WHO, source="usage")] == 3
    python = platform.python_version()
    assert found[of("llmtap_build_info", version="1.2", python=python, implementation=native.NAME)] == 1


def test_a_bucket_holds_its_own_edge() -> None:
    exposition = Exposition("1")
    add(exposition, stream([100, 140, 240]))
    found = scrape(exposition)
    bucket = "llmtap_inter_chunk_seconds_bucket"
    assert [found[of(bucket, **WHO, le=le)] for le in ("0.03", "0.04", "0.075", "0.1", "+Inf")] == [
        0,
        1,
        1,
        2,
        2,
    ]


def test_chunks_of_several_tokens_tell_the_options_apart() -> None:
    exposition = Exposition("1")
    add(exposition, stream([0, 40], tokens=4))
    found = scrape(exposition)
    count = "llmtap_inter_token_seconds_count"
    assert [found[of(count, **WHO, option=o)] for o in ("A", "B", "B-even")] == [1, 7, 4]


def test_unknown_tokens_leave_only_option_a() -> None:
    exposition = Exposition("1")
    x = stream([0, 40], tokens=-1)
    x.tokens.output = 9
    add(exposition, x)
    found = scrape(exposition)
    assert of("llmtap_inter_token_seconds_count", **WHO, option="A") in found
    assert of("llmtap_inter_token_seconds_count", **WHO, option="B") not in found
    assert of("llmtap_chunk_tokens_count", **WHO) not in found


def test_an_answer_in_one_piece_has_a_duration_and_no_ttft() -> None:
    exposition = Exposition("1")
    x = stream([700])
    x.stream = False
    add(exposition, x)
    found = scrape(exposition)
    assert found[of("llmtap_request_duration_seconds_count", **WHO)] == 1
    assert not any(name.startswith("llmtap_time_to_first_token") for name, _ in found)


def test_a_failed_answer_counts_by_outcome_and_has_no_duration() -> None:
    exposition = Exposition("1")
    x = stream([700])
    x.outcome = Outcome.UPSTREAM_RESET
    add(exposition, x)
    found = scrape(exposition)
    assert found[of("llmtap_exchanges_total", **WHO, outcome="upstream_reset")] == 1
    assert of("llmtap_request_duration_seconds_count", **WHO) not in found


def test_lag_comes_from_the_relays() -> None:
    buckets = [0] * (len(LAG_EDGES_NS) + 1)
    buckets[0], buckets[-1] = 5, 2
    status = relay_status(lag_buckets=buckets, lag_sum_ns=3_000_000_000)
    found = scrape(Exposition("1"), [RelayState("r0", True, status)], MeterState(frames=4))
    assert found[of("llmtap_tap_loop_lag_seconds_bucket", relay="r0", le="+Inf")] == 7
    assert found[of("llmtap_tap_loop_lag_seconds_sum", relay="r0")] == 3.0
    assert found[of("llmtap_meter_frames_total")] == 4


def test_a_status_with_other_buckets_is_passed_over() -> None:
    found = scrape(Exposition("1"), [RelayState("r0", True, relay_status(lag_buckets=[1, 2]))])
    assert not any(name.startswith("llmtap_tap_loop_lag") for name, _ in found)


def test_what_is_frozen_does_not_change() -> None:
    exposition = Exposition("1")
    add(exposition, stream([100, 140]))
    frozen = exposition.freeze()
    before = frozen.render()
    add(exposition, stream([100, 140]), stream([5, 6]), tenant="u")
    assert frozen.render() == before


def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    exposition = Exposition("1")
    add(exposition, stream([100, 140]))
    body, content_type = exposition.freeze().render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(body.decode())}
    assert {"llmtap_time_to_first_token_seconds", "llmtap_exchanges", "llmtap_build"} <= names
    body, content_type = exposition.freeze().render("text/plain")
    assert content_type.startswith("text/plain")
    assert b"_created" not in body


def test_label_values_may_be_anything() -> None:
    exposition = Exposition("1")
    add(exposition, stream([100, 140]), model='a"b\\c\nd')
    found = scrape(exposition)
    assert found[of("llmtap_exchanges_total", tenant="t", model='a"b\\c\nd', outcome="complete")] == 1


def test_every_kind_of_first_token_has_its_own_ttft() -> None:
    exposition = Exposition("1")
    x = stream([100, 140, 240])
    t = x.timeline
    t.head_ns, t.first_any_ns = 40 * MS, 60 * MS
    t.first_reasoning_ns, t.first_tool_call_ns, t.first_refusal_ns = 100 * MS, 140 * MS, 240 * MS
    add(exposition, x)
    found = scrape(exposition)
    total = {
        kind: found[of("llmtap_time_to_first_token_seconds_sum", **WHO, kind=kind)]
        for kind in ("content", "any", "reasoning", "tool", "refusal")
    }
    assert total == {"content": 0.1, "any": 0.1, "reasoning": 0.1, "tool": 0.14, "refusal": 0.24}
    assert found[of("llmtap_time_to_headers_seconds_sum", **WHO)] == 0.04
    assert found[of("llmtap_time_to_first_event_seconds_sum", **WHO)] == 0.06
    assert found[of("llmtap_user_idle_after_first_token_seconds_sum", **WHO)] == pytest.approx(0.04)


def test_the_servers_own_clock_gives_option_c_and_what_it_disagrees_by() -> None:
    exposition = Exposition("1")
    x = stream([100, 140, 240])
    x.server_gaps_ns = array("q", [39 * MS, 95 * MS, 2 * MS])
    x.server_timing = [{"name": "ttft", "ms": 90.0}, {"name": "total", "ms": 260.0}]
    add(exposition, x)
    found = scrape(exposition)
    assert found[of("llmtap_inter_token_seconds_count", **WHO, option="C")] == 3
    name = "llmtap_server_clock_disagreement_seconds_sum"
    assert found[of(name, **WHO, duration="ttft", longer="ours")] == pytest.approx(0.01)
    assert found[of(name, **WHO, duration="e2e", longer="server")] == pytest.approx(0.02)


def test_objectives_are_edges_of_the_histograms_that_show_them() -> None:
    bounds = [("ttft", 123_000_000), ("tpot", 45_000_000), ("e2e", 777_000_000), ("tbc_max", 61_000_000)]
    exposition = Exposition("1", [*bounds, ("jitter", 1), ("user_idle", 1_100_000_000)])
    add(exposition, stream([100, 140, 240]))
    found = scrape(exposition)
    for name, labels, le in (
        ("llmtap_time_to_first_token_seconds", {"kind": "content"}, "0.123"),
        ("llmtap_time_per_output_token_seconds", {}, "0.045"),
        ("llmtap_request_duration_seconds", {}, "0.777"),
        ("llmtap_inter_chunk_seconds", {}, "0.061"),
        ("llmtap_inter_token_seconds", {"option": "A"}, "0.061"),
        ("llmtap_user_idle_seconds", {}, "1.1"),
    ):
        assert of(f"{name}_bucket", **WHO, **labels, le=le) in found, name
    assert found[of("llmtap_time_to_first_token_seconds_bucket", **WHO, kind="content", le="0.123")] == 1
    assert of("llmtap_time_to_first_byte_seconds_bucket", **WHO, le="0.123") not in found


def test_tokens_events_and_bursts_are_counted() -> None:
    exposition = Exposition("1")
    x = stream([100, 300, 301, 301, 301], tokens=2)
    x.tokens = Tokens(input=30, output=10, reasoning=4, cached=16, source=TokenSource.USAGE)
    x.reads = 3
    add(exposition, x)
    found = scrape(exposition)
    assert {
        name: found[of(f"llmtap_{name}_total", **WHO)]
        for name in ("input_tokens", "cached_input_tokens", "reasoning_tokens", "stream_events",
                     "stream_reads", "bursts", "burst_events")
    } == {
        "input_tokens": 30, "cached_input_tokens": 16, "reasoning_tokens": 4, "stream_events": 5,
        "stream_reads": 3, "bursts": 1, "burst_events": 4,
    }  # fmt: skip


def test_refusals_and_interventions_are_counted_by_kind_and_source() -> None:
    exposition = Exposition("1")
    refused, flagged = stream([100, 140]), stream([100, 140])
    refused.outcome = Outcome.REFUSED
    refused.refusal = {"kind": "output_guardrail", "source": "finish_reason", "detail": None}
    flagged.guardrail = {"action": "flagged", "signal": "hook_results", "phase": "output"}
    add(exposition, refused, flagged, flagged)
    for i in range(100):  # sources without end
        x = stream([100, 140])
        x.refusal = {"kind": "model_refusal", "source": f"s{i}"}
        add(exposition, x)
    found = scrape(exposition)
    name = "llmtap_guardrail_events_total"
    assert found[of(name, **WHO, kind="output_guardrail", source="finish_reason")] == 1
    assert found[of(name, **WHO, kind="flagged", source="hook_results")] == 2
    assert found[of(name, **WHO, kind="other", source="other")] == 70
    assert sum(key[0] == name for key in found) == 33


def test_counters_whose_labels_are_known_begin_at_nought() -> None:
    exposition = Exposition("1")
    add(exposition, stream([100, 140]))
    found = scrape(exposition)
    outcomes = {key[1]: value for key, value in found.items() if key[0] == "llmtap_exchanges_total"}
    assert len(outcomes) == len(Outcome)
    assert sum(outcomes.values()) == 1
    assert found[of("llmtap_no_token_total", **WHO, reason="empty")] == 0


def test_a_stream_without_a_token_is_counted_by_its_reason() -> None:
    exposition = Exposition("1")
    x = stream([100, 140])
    x.timeline.events = EventLog()
    x.outcome = Outcome.UPSTREAM_ERROR
    add(exposition, x)
    assert scrape(exposition)[of("llmtap_no_token_total", **WHO, reason="error")] == 1


def test_the_arm_is_a_label_where_there_is_one() -> None:
    exposition = Exposition("1")
    x = stream([100, 140])
    exposition.ended(x, measure(x), SeriesKey("t", "m", "guarded"), None)
    add(exposition, x)
    found = scrape(exposition)
    assert found[of("llmtap_exchanges_total", **WHO, arm="guarded", outcome="complete")] == 1
    assert found[of("llmtap_exchanges_total", **WHO, outcome="complete")] == 1
    assert found[of("llmtap_inter_chunk_seconds_count", **WHO, arm="guarded")] == 1


def test_what_is_uncertain_is_counted() -> None:
    exposition = Exposition("1")
    x = stream([100, 140])
    x.uncertain = True
    add(exposition, x, stream([100, 140]))
    assert scrape(exposition)[of("llmtap_uncertain_exchanges_total", **WHO)] == 1


def test_classes_and_windows_are_shown() -> None:
    slos = SloState(
        targets={"gold": 0.99},
        bounds_ns={("gold", "ttft"): 500 * MS},
        counts={("gold", "t"): (10, 9)},
        burn_rates={("gold", "5m"): 10.0},
    )
    state = MeterState(goodput={"1m": 2.5}, smooth_goodput={"1m": 40.0}, lag_ns={"1m": 3 * MS})
    found = scrape(Exposition("1"), [], state, slos)
    assert found[of("llmtap_slo_events_total", slo="gold", tenant="t")] == 10
    assert found[of("llmtap_slo_good_total", slo="gold", tenant="t")] == 9
    assert found[of("llmtap_slo_events_total", slo="gold", tenant="default")] == 0
    assert found[of("llmtap_slo_target_ratio", slo="gold")] == 0.99
    assert found[of("llmtap_slo_objective_seconds", slo="gold", objective="ttft")] == 0.5
    assert found[of("llmtap_slo_burn_rate", slo="gold", window="5m")] == 10
    assert found[of("llmtap_goodput_requests_per_second", window="1m")] == 2.5
    assert found[of("llmtap_smooth_goodput_tokens_per_second", window="1m")] == 40
    assert found[of("llmtap_window_uncertainty_seconds", window="1m")] == 0.003
