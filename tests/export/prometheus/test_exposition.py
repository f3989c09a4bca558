"""The exposition, parsed back as a scraper would."""

import platform
from array import array
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from llmtap import native
from llmtap.exchange.exchange import OUTPUT, Added, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.export.prometheus.catalogue import HISTOGRAMS
from llmtap.export.prometheus.exposition import Exposition
from llmtap.export.sinks import SeriesKey
from llmtap.meter.admin.views import relay_values
from llmtap.meter.relays import RelayState
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import Objectives
from tests.support.traffic.relay_status import relay_status

MS = 1_000_000


def stream(times_ms: list[int], tokens: int = 1) -> Exchange:
    log = EventLog()
    for t in times_ms:
        log.add(t * MS, EventClass.CONTENT, 100, tokens, OUTPUT)
    t = Timeline(
        arrival_ns=0,
        submit_ns=0,
        first_byte_ns=log.t_ns[0],
        first_token_ns=log.t_ns[0],
        first_content_ns=log.t_ns[0],
        last_token_ns=log.t_ns[-1],
        response_end_ns=log.t_ns[-1],
        events=log,
    )
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True)
    x.tokens = Tokens(output=len(times_ms) * abs(tokens), source=TokenSource.USAGE)
    x.added = Added(request_ns=40_000, first_chunk_ns=30_000)
    x.added.chunks_ns.extend([30_000] * len(times_ms))
    return x


def add(exposition: Exposition, *exchanges: Exchange, tenant: str = "t", model: str = "m") -> None:
    for x in exchanges:
        exposition.on_end(x, measure(x), SeriesKey(tenant, model), None)


Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(body: bytes) -> Found:
    return {
        (s.name, frozenset(s.labels.items())): s.value for f in parse_text(body.decode()) for s in f.samples
    }


def scrape(*exchanges: Exchange, **about: str) -> Found:
    exposition = Exposition("1")
    add(exposition, *exchanges, **about)
    return parsed(exposition.freeze().render()[0])


def shown(*args: Any) -> dict[tuple[str, ...], float]:
    """What llmtap says of itself, by name and labels."""
    found = parsed(Exposition("1").freeze(*args).render()[0])
    return {
        (name.removeprefix("llmtap_"), *sorted(dict(labels).values())): v
        for (name, labels), v in found.items()
    }


def of(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    read = name.startswith(READ) and "tenant" in labels
    return name, frozenset({**labels, **({"reading": "dialect"} if read else {})}.items())


WHO = {"tenant": "t", "model": "m"}
READ = tuple(one.name for one in HISTOGRAMS.values() if "reading" in one.labels)


def test_an_exchange_reaches_every_histogram() -> None:
    found = scrape(stream([100, 140, 240]))
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
    assert found[of("llmtap_build_info", version="1", python=python, implementation=native.NAME)] == 1


def test_every_kind_of_first_token_has_its_own_ttft() -> None:
    x = stream([100, 140, 240])
    t = x.timeline
    t.head_ns, t.first_any_ns = 40 * MS, 60 * MS
    t.first_reasoning_ns, t.first_tool_call_ns, t.first_refusal_ns = 100 * MS, 140 * MS, 240 * MS
    found = scrape(x)
    total = {
        kind: found[of("llmtap_time_to_first_token_seconds_sum", **WHO, kind=kind)]
        for kind in ("content", "any", "reasoning", "tool", "refusal")
    }
    assert total == {"content": 0.1, "any": 0.1, "reasoning": 0.1, "tool": 0.14, "refusal": 0.24}
    assert found[of("llmtap_time_to_headers_seconds_sum", **WHO)] == 0.04
    assert found[of("llmtap_time_to_first_event_seconds_sum", **WHO)] == 0.06
    assert found[of("llmtap_user_idle_after_first_token_seconds_sum", **WHO)] == pytest.approx(0.04)


def test_the_servers_own_clock_gives_option_c_and_what_it_disagrees_by() -> None:
    x = stream([100, 140, 240])
    x.server_gaps_ns = array("q", [39 * MS, 95 * MS, 2 * MS])
    x.server_timing = [{"name": "ttft", "ms": 90.0}, {"name": "total", "ms": 260.0}]
    found = scrape(x)
    assert found[of("llmtap_inter_token_seconds_count", **WHO, option="C")] == 3
    name = "llmtap_server_clock_disagreement_seconds_sum"
    assert found[of(name, **WHO, duration="ttft", longer="ours")] == pytest.approx(0.01)
    assert found[of(name, **WHO, duration="e2e", longer="server")] == pytest.approx(0.02)


def test_objectives_are_edges_of_the_histograms_that_show_them() -> None:
    text = "ttft:123ms tpot:45ms e2e:777ms tbc_max:61ms jitter:1ms user_idle:1.1s"
    exposition = Exposition("1", {"gold": Objectives.parse(text)})
    add(exposition, stream([100, 140, 240]))
    found = parsed(exposition.freeze().render()[0])
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


def test_a_bound_far_from_the_edges_gets_edges_close_to_it() -> None:
    family = HISTOGRAMS["ttft"]
    near = {edge for edge in family.with_bound(25_000 * MS).edges if 20_000 * MS < edge < 30_000 * MS}
    assert near == {round(25_000 * MS / 1.12), 25_000 * MS, 28_000 * MS}
    assert family.with_bound(500 * MS) == family
    assert set(family.with_bound(450 * MS).edges) - set(family.edges) == {450 * MS}


def quantile(cumulative: list[tuple[float, float]], q: float) -> float:
    """Interpolate as `histogram_quantile` of Prometheus does: (upper edge, count up to it), ascending."""
    rank = q * cumulative[-1][1]
    lower_edge = lower_count = 0.0
    for edge, count in cumulative:
        if count >= rank:
            return lower_edge + (edge - lower_edge) * (rank - lower_count) / (count - lower_count)
        lower_edge, lower_count = edge, count
    raise AssertionError("no bucket reaches the rank")


@pytest.mark.parametrize("p99_ms", [55, 95, 150, 158, 290, 400, 447, 900, 1_900])
@pytest.mark.parametrize("spread_ms", [2, 40])
def test_a_quantile_of_classic_buckets_is_within_12_percent(p99_ms: int, spread_ms: int) -> None:
    """All values are close to `p99_ms`: they fill one or two buckets, the worst case of interpolation."""
    exposition = Exposition("1")
    values_ms = [p99_ms - spread_ms * i / 1_000 for i in range(1_000)]
    for value_ms in values_ms:
        add(exposition, stream([round(value_ms)]))
    found = parsed(exposition.freeze().render()[0])
    cumulative = sorted(
        (float(dict(labels)["le"]), count)
        for (name, labels), count in found.items()
        if name == "llmtap_time_to_first_token_seconds_bucket" and ("kind", "content") in labels
    )
    truth_ms = sorted(map(round, values_ms))[989]
    assert 1_000 * quantile(cumulative, 0.99) == pytest.approx(truth_ms, rel=0.12)


CHAPTER_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
"""The buckets of vLLM's TTFT as seed 002 prints them; "and ITL only to 80"."""


def test_the_buckets_are_those_of_the_chapter_and_can_be_set() -> None:
    found = scrape(stream([100, 140, 240]))
    for edge in CHAPTER_TTFT:
        bucket = of("llmtap_time_to_first_token_seconds_bucket", **WHO, kind="content", le=str(edge))
        assert found[bucket] == (edge >= 0.1)
    for name in ("llmtap_inter_chunk_seconds_bucket", "llmtap_request_duration_seconds_bucket"):
        last = max(
            float(dict(labels)["le"]) for n, labels in found if n == name and ("le", "+Inf") not in labels
        )
        assert last >= 80
    exposition = Exposition("1", edges={"ttft": (0.05, 0.2)})
    add(exposition, stream([100]))
    found = parsed(exposition.freeze().render()[0])
    name = "llmtap_time_to_first_token_seconds_bucket"
    content = {
        dict(labels)["le"]: n
        for (m, labels), n in found.items()
        if m == name and ("kind", "content") in labels
    }
    assert content == {"0.05": 0, "0.2": 1, "+Inf": 1}


def test_smooth_goodput_and_fluidity_can_be_computed_from_counters() -> None:
    """By hand. A reader of 20 tokens/s wants tokens at 0, 50, 100 ms: those at 100, 140, 240 ms are 100, 90
    and 140 ms late. The idle latency is 140 ms, the penalty 5 x 0.14 = 0.7, the benefit 3 - 0.7 = 2.3 tokens.

    Bounds 120 and 50 ms: the first two tokens leave 20, then 30 ms of slack; the gap of 100 ms misses
    floor((100 - 30) / 50) = 1 deadline.
    """
    exposition = Exposition("1", {"gold": Objectives.parse("ttft:120ms tbc_max:50ms")})
    x = stream([100, 140, 240])
    for slo in ("gold", ""):
        exposition.on_end(x, measure(x), SeriesKey("t", "m", slo=slo), None)
    found = parsed(exposition.freeze().render()[0])
    assert found[of("llmtap_smooth_output_tokens_total", **WHO)] == 6
    assert found[of("llmtap_smooth_penalty_tokens_total", **WHO)] == pytest.approx(2 * 0.7)
    assert found[of("llmtap_token_deadlines_total", **WHO, result="met")] == 2
    assert found[of("llmtap_token_deadlines_total", **WHO, result="missed")] == 1


def test_tokens_events_and_bursts_are_counted() -> None:
    x = stream([100, 300, 301, 301, 301], tokens=2)
    x.tokens = Tokens(input=30, output=10, reasoning=4, cached=16, source=TokenSource.USAGE)
    x.reads = 3
    found = scrape(x)
    assert {
        name: found[of(f"llmtap_{name}_total", **WHO)]
        for name in (
            "input_tokens",
            "cached_input_tokens",
            "reasoning_tokens",
            "stream_events",
            "stream_reads",
            "bursts",
            "burst_events",
        )
    } == {
        "input_tokens": 30,
        "cached_input_tokens": 16,
        "reasoning_tokens": 4,
        "stream_events": 5,
        "stream_reads": 3,
        "bursts": 1,
        "burst_events": 4,
    }


def test_refusals_and_interventions_are_counted_by_kind_and_source() -> None:
    refused, flagged = stream([100, 140]), stream([100, 140])
    refused.outcome = Outcome.REFUSED
    refused.refusal = {"kind": "output_guardrail", "source": "finish_reason", "detail": None}
    flagged.guardrail = {"action": "flagged", "signal": "hook_results", "phase": "output"}
    many = [stream([100, 140]) for _ in range(100)]  # sources without end
    for i, x in enumerate(many):
        x.refusal = {"kind": "model_refusal", "source": f"s{i}"}
    found = scrape(refused, flagged, flagged, *many)
    name = "llmtap_guardrail_events_total"
    assert found[of(name, **WHO, kind="output_guardrail", source="finish_reason")] == 1
    assert found[of(name, **WHO, kind="flagged", source="hook_results")] == 2
    assert found[of(name, **WHO, kind="other", source="other")] == 70
    assert sum(key[0] == name for key in found) == 33


def made(times_ms: list[int], each: int = 1, **fields: Any) -> Exchange:
    x = stream(times_ms, each)
    for name, value in fields.items():
        setattr(x, name, value)
    return x


ITL = "inter_token_seconds_count"
SILENT = made([100, 140], outcome=Outcome.UPSTREAM_ERROR)
SILENT.timeline.events = EventLog()


@pytest.mark.parametrize(
    ("exchange", "there", "absent"),
    [
        (made([0, 40], 4), [(ITL, "A", 1), (ITL, "B", 7), (ITL, "B-even", 4)], []),
        (
            made([0, 40], -1, tokens=Tokens(output=9, source=TokenSource.USAGE)),
            [(ITL, "A", 1)],
            ["chunk_tokens_count"],
        ),
        (
            made([700], stream=False),
            [("request_duration_seconds_count", None, 1)],
            ["time_to_first_token_seconds_count", ITL],
        ),
        (
            made([700], outcome=Outcome.UPSTREAM_RESET),
            [("exchanges_total", "upstream_reset", 1)],
            ["request_duration_seconds_count"],
        ),
        (SILENT, [("no_token_total", "error", 1)], []),
        (made([100, 140], uncertain=True), [("uncertain_exchanges_total", None, 1)], []),
    ],
    ids=["several tokens a chunk", "tokens unknown", "one piece", "failed", "silent", "uncertain"],
)
def test_what_counts_where(
    exchange: Exchange, there: list[tuple[str, str | None, float]], absent: list[str]
) -> None:
    found = scrape(exchange)
    for name, label, value in there:
        of_name = {key: v for key, v in found.items() if key[0] == f"llmtap_{name}"}
        assert [v for key, v in of_name.items() if not label or label in dict(key[1]).values()] == [value]
    assert not {f"llmtap_{name}" for name in absent} & {name for name, _ in found}


def test_a_relay_that_left_keeps_its_counters_and_loses_its_gauges() -> None:
    status = relay_status(
        opened=10,
        measured=6,
        dropped={"tap_full": 2},
        connections=5,
        cpu_ns=1_500_000_000,
        upstreams={"http://a:8000": True, "http://b:8000": False},
    )
    lost = msgspec.structs.replace(status, lost=3)
    both = [RelayState("r0", True, status, implementation="native"), RelayState("r1", False, lost)]
    found = shown(relay_values([*both, RelayState("r2", True, None)]))
    for relay, up in (("r0", 1), ("r1", 0), ("r2", 1)):
        assert found["relay_up", relay] == up
        assert (("relay_exchanges_total", relay) in found) is (relay != "r2")
        assert (("relay_connections", relay) in found) is (relay == "r0")
        assert (("relay_upstream_up", "http://a:8000", relay) in found) is (relay == "r0")
    assert found["relay_upstream_up", "http://a:8000", "r0"] == 1
    assert found["relay_upstream_up", "http://b:8000", "r0"] == 0
    assert found["tap_measured_exchanges_total", "r1"] == 6
    assert found["relay_cpu_seconds_total", "r0"] == 1.5
    assert found["tap_dropped_exchanges_total", "r0", "tap_full"] == 2
    assert [found["tap_lost_exchanges_total", relay] for relay in ("r0", "r1")] == [0, 3]
