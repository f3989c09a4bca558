"""The exposition, parsed back as a scraper would."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from llmtap.export.house import MeterState, RelayState
from llmtap.export.prometheus import Exposition
from llmtap.metrics.latency import measure
from llmtap.record.exchange import Added, EventLog, Exchange, Timeline, Tokens
from llmtap.record.outcome import EventClass, Outcome, TokenSource
from llmtap.tap.frames import LAG_EDGES_NS
from tests.support.relay_status import relay_status

MS = 1_000_000
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


def stream(times_ms: list[int], tokens: int = 1) -> Exchange:
    log = EventLog()
    for t in times_ms:
        log.add(t * MS, EventClass.CONTENT, 100, tokens, False)
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
        exposition.add(x, measure(x), tenant, model)


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
    assert found[of("llmtap_build_info", version="1.2", python=__import__("platform").python_version())] == 1


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
