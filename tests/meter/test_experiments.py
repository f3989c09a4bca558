"""The experiment in the meter: who is counted where, what is said of it, and the switch."""

import json
import logging
import random
from datetime import datetime
from typing import Any

import msgspec
import pytest

from llmtap.channel.experiment import Experiment, read_switch, switch_word
from llmtap.channel.frames import Assigned, FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.export.sinks import SeriesKey
from llmtap.meter import experiments as module
from llmtap.meter.experiments import METRICS, SHARES, Experiments
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.exchanges import Query
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.tenants import Labels
from llmtap.metrics.latency import measure
from llmtap.report.experiment import experiment_lines
from llmtap.units import Duration
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.streams import streamed
from tests.support.traffic.tap_frames import Script

S = 1_000_000_000
A, B = {"name": "a"}, {"name": "b", "headers": {"X": "secret"}}


def viewed(experiment: Experiment | None = None) -> Experiments:
    return Experiments(experiment or an_experiment(A, B), ManualClock(now_ns=S))


def ended(
    view: Experiments, x: Exchange, arm: str | None, unit: str = "1", excluded: str | None = None
) -> None:
    x.arm, x.unit, x.excluded = arm, unit if arm else None, excluded
    view.on_end(x, measure(x), SeriesKey("t", "m"), None)


def results_of(view: Experiments) -> dict[str, Any]:
    """As a client of the API sees it."""
    out: dict[str, Any] = json.loads(msgspec.json.encode(view.results()()))
    return out


# ---------------------------------------------------------------- counting


def test_an_exchange_counts_in_its_arm_and_nowhere_else() -> None:
    view = viewed()
    for arm, unit in (("a", "1"), ("b", "2"), ("b", "3")):
        view.on_assignment(arm, unit, False)
    ended(view, streamed(100, 140, 160), "a", "1")
    ended(view, streamed(200, 240), "b", "2", excluded="not_json")
    ended(view, streamed(300), "a", "4", excluded="no_room")  # went this way for want of room: not a sample
    ended(view, streamed(300), None)
    ended(view, streamed(300), "of another configuration", "4")
    out = results_of(view)
    a, b = out["arms"]["a"], out["arms"]["b"]
    assert (a["assigned"], a["ended"], b["assigned"], b["ended"]) == (1, 1, 2, 1)
    assert (a["metrics"]["ttft"]["mean"], b["metrics"]["ttft"]["mean"]) == (0.1, 0.2)
    assert a["metrics"]["tbc"]["n"] == 2
    assert a["metrics"]["tbc"]["units"] == 1
    assert a["metrics"]["output_tokens"]["mean"] == 3
    assert (a["excluded"], b["excluded"]) == ({"no_room": 1}, {"not_json": 1})
    assert "p99" in a["metrics"]["ttft"]["marks"], "one sample is too few"
    assert out["differences"]["b"]["ttft"]["mean"]["difference"] == 0.1
    assert list(out["differences"]) == ["b"]


def test_every_metric_and_share_is_there_with_its_statistics() -> None:
    view = viewed()
    r = random.Random(1)
    for i in range(400):
        x = streamed(*(100 + r.randrange(50) + 20 * k for k in range(5)), tokens=2)
        ended(view, x, "ab"[i % 2], f"{r.getrandbits(64):016x}")
    out = results_of(view)
    for arm in out["arms"].values():
        assert list(arm["metrics"]) == list(METRICS)
        assert list(arm["shares"]) == list(SHARES)
    difference = out["differences"]["b"]
    assert set(difference) == {*METRICS, *SHARES}
    for metric in METRICS:
        assert set(difference[metric]) == {"mean", "p50", "p95", "p99"}, metric
        assert set(difference[metric]["mean"]) >= {"difference", "interval", "anytime_interval", "different"}
    assert difference["ttft"]["mean"]["different"] is False
    assert set(difference["refused"]["share"]) >= {"difference", "interval", "anytime_interval", "p"}
    chunking = out["arms"]["a"]["chunking"]
    assert (chunking["tokens_per_chunk_mean"], chunking["single_token_share"]) == (2, 0)
    assert chunking["events_per_read"] == 1
    assert out["comparisons"] == len(METRICS) + len(SHARES)


def test_an_arm_whose_chunks_arrive_together_has_a_caution() -> None:
    view = viewed()
    for i in range(4):
        x = streamed(*range(100, 180, 10))
        if i % 2:
            x.reads = 2
        ended(view, x, "ab"[i % 2], str(i))
    out = results_of(view)
    assert out["cautions"] == [
        {
            "arm": "b",
            "metrics": ["tpot", "tbc", "itl"],
            "events_per_read": 4.0,
            "control_events_per_read": 1.0,
        }
    ]
    assert set(out["cautions"][0]["metrics"]) <= set(METRICS)


def test_gaps_of_an_arm_whose_chunks_arrive_together_are_no_findings() -> None:
    """TBC, ITL and TPOT differ in both cases."""
    for together, found in ((False, {"tpot", "tbc", "itl"}), (True, set())):
        view = viewed()
        for i in range(400):
            gap_ms = 20 - 10 * (i % 2) + i % 7
            x = streamed(*range(100, 100 + 8 * gap_ms, gap_ms))
            if i % 2 and together:
                x.reads = 2
            ended(view, x, "ab"[i % 2], str(i))
        out = results_of(view)
        assert {one["metric"] for one in out["findings"]} & {"tpot", "tbc", "itl"} == found
        assert out["differences"]["b"]["tpot"]["mean"]["different"]


def test_a_slower_arm_is_found_and_a_refusing_one() -> None:
    view = viewed()
    r = random.Random(2)
    for i in range(1_200):
        arm = "ab"[i % 2]
        refused = arm == "b" and r.random() < 0.1
        first = round(100 * r.lognormvariate(0, 0.3)) + (40 if arm == "b" else 0)
        x = streamed(first, first + 20, outcome=Outcome.REFUSED if refused else Outcome.COMPLETE)
        ended(view, x, arm, f"{r.getrandbits(64):016x}")
    out = results_of(view)
    found = {finding["metric"] for finding in out["findings"]}
    assert {"ttft", "e2e", "user_idle", "refused"} <= found
    assert not found & {"tbc", "itl", "failed", "cancelled", "output_tokens", "tokens_per_chunk"}
    ttft = out["differences"]["b"]["ttft"]
    for what in ("mean", "p50"):
        low, high = ttft[what]["anytime_interval"]
        assert 0 < low < 0.04 < high
        assert ttft[what]["different"] is True
    assert out["arms"]["b"]["refusals"] == {"unknown": out["disclosure"]["requests_refused"]}
    assert out["arms"]["b"]["outcomes"]["refused"] > 30
    low, high = out["differences"]["b"]["refused"]["share"]["interval"]
    assert low < 0.1 < high


def test_intervals_of_labels_count_conversations_and_not_their_requests() -> None:
    """A guardrail refuses all ten requests of 4 of 20 conversations."""
    view = viewed(an_experiment(A, B, unit="conversation"))
    for i in range(400):
        conversation = i % 40
        refused = conversation in (1, 3, 5, 7)
        x = streamed(100, 120, outcome=Outcome.REFUSED if refused else Outcome.COMPLETE)
        x.label = "should-answer"
        ended(view, x, "ab"[i % 2], f"{conversation:016x}")
    labels = results_of(view)["arms"]["b"]["labels"]["should-answer"]
    low, high = labels["interval"]
    assert labels["share"] == 0.2
    # Wilson's interval of 4 of 20, and of t: of 40 of 200 it is 15 % to 26 %.
    assert (low, high) == (pytest.approx(0.075, abs=0.005), pytest.approx(0.43, abs=0.01))


def test_labels_give_each_arm_its_false_positives_and_negatives() -> None:
    """Arm b refuses a fifth of what it should answer and misses nothing; arm a answers everything."""
    view = viewed()
    r = random.Random(3)
    for i in range(1_000):
        arm, label = "ab"[i % 2], ("should-answer", "should-refuse")[i // 2 % 2]
        refused = arm == "b" and (label == "should-refuse" or i % 5 == 0)
        x = streamed(100, 120, outcome=Outcome.REFUSED if refused else Outcome.COMPLETE)
        x.label = label
        ended(view, x, arm, f"{r.getrandbits(64):016x}")
    out = results_of(view)
    a, b = out["arms"]["a"], out["arms"]["b"]
    assert (a["labels"]["should-answer"]["share"], b["labels"]["should-answer"]["share"]) == (0, 0.2)
    assert (a["labels"]["should-refuse"]["share"], b["labels"]["should-refuse"]["share"]) == (1, 0)
    assert (b["shares"]["false_positives"]["n"], b["shares"]["false_positives"]["share"]) == (250, 0.2)
    low, high = b["shares"]["false_positives"]["interval"]
    assert (low, high) == (pytest.approx(0.155, abs=0.001), pytest.approx(0.254, abs=0.001))
    assert b["labels"]["should-answer"]["interval"] == [low, high]
    assert out["differences"]["b"]["false_positives"]["share"]["difference"] == pytest.approx(0.2)
    assert out["differences"]["b"]["false_negatives"]["share"]["difference"] == -1
    assert {"false_positives", "false_negatives"} <= {one["metric"] for one in out["findings"]}
    assert [one["name"] for one in out["compared"]][-2:] == ["false_positives", "false_negatives"]
    assert out["comparisons"] == len(METRICS) + len(SHARES) + 2


@pytest.mark.parametrize(
    ("outcome", "share"),
    [
        (Outcome.UPSTREAM_ERROR, "failed"),
        (Outcome.UPSTREAM_RESET, "failed"),
        (Outcome.UPSTREAM_TIMEOUT, "failed"),
        (Outcome.TRUNCATED, "failed"),
        (Outcome.CLIENT_CANCELLED, "cancelled"),
        (Outcome.REFUSED, "refused"),
        (Outcome.COMPLETE, None),
    ],
)
def test_how_an_exchange_ended_counts_in_one_share(outcome: Outcome, share: str | None) -> None:
    view = viewed()
    ended(view, streamed(100, outcome=outcome), "a")
    shares = results_of(view)["arms"]["a"]["shares"]
    assert {name: about["share"] for name, about in shares.items()} == {
        name: float(name == share) for name in SHARES
    }


def test_what_several_requests_of_a_conversation_say_counts_as_one_unit() -> None:
    view = viewed(an_experiment(A, B, unit="conversation"))
    for _ in range(5):
        view.on_assignment("a", "c1", False)
        ended(view, streamed(100, 140), "a", "c1")
    view.on_assignment("a", "c2", True)
    ended(view, streamed(100, 140), "a", "c2")
    a = results_of(view)["arms"]["a"]
    assert (a["assigned"], a["units"], a["single_requests"]) == (6, 2, 1)
    assert (a["metrics"]["ttft"]["n"], a["metrics"]["ttft"]["units"]) == (6, 2)


def test_headers_and_fields_are_named_and_their_values_are_not() -> None:
    view = viewed(
        an_experiment(A, B, {"name": "c", "body": {"key": "hidden"}}, disclosure={"systems": ["LG"]})
    )
    text = json.dumps(results_of(view))
    assert "secret" not in text
    assert "hidden" not in text
    assert "pepper" not in text
    out = json.loads(text)
    assert out["arms"]["b"]["changes"] == {"headers": ["X"]}
    assert out["arms"]["c"]["changes"] == {"body": ["key"]}
    assert out["disclosure"] == {"systems": ["LG"], "requests_refused": 0}


def test_requests_that_an_arm_could_not_change_are_warned_of() -> None:
    view = viewed(an_experiment())
    for i in range(9):
        excluded = ("too_long", "no_room", "own_header", None)[min(i, 3)]
        ended(view, streamed(200, 240), "marked", f"{i:x}", excluded=excluded)
    result = results_of(view)
    (warning,) = result["warnings"]
    assert "marked: 1 of 8 requests" in warning and "too_long 1" in warning
    assert result["arms"]["marked"]["excluded"] == {"too_long": 1, "no_room": 1}


def test_the_times_of_the_figures_are_not_those_of_the_switch() -> None:
    clock = ManualClock(now_ns=0)
    view = Experiments(an_experiment(), clock)
    assert results_of(view)["figures"] == {"from": None, "to": None}
    first = streamed(100, 120)
    ended(view, first, "control")
    last = streamed(100, 120)
    last.arrival_wall_ns = first.arrival_wall_ns + 60 * 10**9
    ended(view, last, "marked", "2")
    clock.advance(3_600 * 10**9)
    view.switch(False)
    figures = results_of(view)["figures"]
    span = [datetime.fromisoformat(figures[name]) for name in ("from", "to")]
    assert (span[1] - span[0]).total_seconds() == 60
    assert span[0].timestamp() == pytest.approx(first.arrival_wall_ns / 1e9)
    other = Experiments(an_experiment(), clock)
    other.absorb(view.export()(), 0, Labels(9, 9, 9))
    assert results_of(other)["figures"] == figures


@pytest.mark.parametrize("strip", [False, True])
def test_clients_that_send_an_arms_header_themselves_are_counted_and_warned_of_once(
    strip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    view = viewed(an_experiment(strip_headers=strip))
    assert results_of(view)["warnings"] == []
    for i in range(5):
        view.on_assignment("control", f"{i:x}", False, own_headers=i < 3)
        view.on_assignment("marked", f"{i + 9:x}", False)
    result = results_of(view)
    assert [arm["own_headers"] for arm in result["arms"].values()] == [3, 0]
    warned = "\n".join(result["warnings"])
    assert all((text in warned) is not strip for text in ("3 of 5 requests", "X-Arm", "not clean"))
    assert caplog.text.count("event=experiment_own_headers") == 1
    assert ("warning: control" in "\n".join(experiment_lines(result))) is not strip


def test_what_a_relay_says_of_an_arm_ends_up_in_it() -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S), an_experiment(A, B))
    hello = Hello(relay="r0", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
    assembler = Assembler(hello, tally)
    assignment = msgspec.json.encode(Assigned(arm="b", unit="00ff"))
    script = (
        Script().request(1).frame(FrameKind.ARM, 1, data=assignment).head(1, 50).word(1, 60).end(1, 70, 1)
    )
    assembler.digest(script.frames())
    out = results_of(tally.experiments)
    assert (out["arms"]["b"]["assigned"], out["arms"]["b"]["ended"]) == (1, 0), (
        "counted as soon as it is dealt"
    )
    script = Script().close(1, 71, arm="b", route="headers X", unit="00ff", excluded="encoded").stream(2)
    assembler.digest(script.frames())
    out = results_of(tally.experiments)
    assert (out["arms"]["b"]["assigned"], out["arms"]["b"]["ended"]) == (1, 1)
    assert out["arms"]["b"]["excluded"] == {"encoded": 1}
    (_, plain, _), (_, armed, _) = tally.recent_exchanges.find(Query())
    assert (armed.arm, armed.route, armed.unit, armed.excluded) == ("b", "headers X", "00ff", "encoded")
    assert (plain.arm, plain.route, plain.unit, plain.excluded) == (None, None, None, None)
    assert tally.errors == {}


# ---------------------------------------------------------------- the sample ratio


def test_a_ratio_that_is_not_as_dealt_rings_once(caplog: pytest.LogCaptureFixture) -> None:
    view = viewed(an_experiment({**A, "weight": 3}, B))
    with caplog.at_level(logging.ERROR):
        for i in range(4_000):
            view.on_assignment("a" if i % 4 else "b", f"{i:x}", False)
        assert results_of(view)["sample_ratio"]["alarm"] is False
        for i in range(4_000):
            view.on_assignment("ab"[i % 2], f"{i:x}", False)
    ratio = results_of(view)["sample_ratio"]
    assert ratio["alarm"] is True
    assert ratio["units"] == {"a": 5_000, "b": 3_000}
    assert ratio["expected"] == {"a": 0.75, "b": 0.25}
    assert ratio["p"] < 1e-6
    assert [r.getMessage().split()[0] for r in caplog.records] == ["event=sample_ratio_mismatch"]


def test_an_alarm_does_not_go_away_by_itself() -> None:
    view = viewed()
    for i in range(400):
        view.on_assignment("a", f"{i:x}", False)
    assert results_of(view)["sample_ratio"]["alarm"] is True
    for i in range(400):
        view.on_assignment("b", f"{i:x}", False)
    assert results_of(view)["sample_ratio"]["alarm"] is True


def test_a_conversation_counts_once_in_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNITS_MAX", 100)
    view = viewed(an_experiment(A, B, unit="tenant"))
    for _ in range(1_000):
        view.on_assignment("a", "1", False)
    assert results_of(view)["sample_ratio"]["units"] == {"a": 1, "b": 0}
    assert results_of(view)["sample_ratio"]["alarm"] is False
    for i in range(150):
        view.on_assignment("ab"[i % 2], f"{i + 2:x}", False)
    ratio = results_of(view)["sample_ratio"]
    assert (sum(ratio["units"].values()), ratio["capped"]) == (100, True)


# ---------------------------------------------------------------- a worse arm


def run_until_stopped(
    view: Experiments, seed: int, factor: float, failing: float = 0.0, n: int = 1_200
) -> None:
    r = random.Random(seed)
    for _ in range(n):
        arm = "ab"[r.random() < 0.5]
        failed = r.random() < (failing if arm == "b" else 0)
        first = round(100 * r.lognormvariate(0, 0.6) * (factor if arm == "b" else 1))
        x = streamed(first, first + 20, outcome=Outcome.UPSTREAM_ERROR if failed else Outcome.COMPLETE)
        ended(view, x, arm, f"{r.getrandbits(64):016x}")
        if view.state != "running":
            return


@pytest.mark.parametrize(
    ("figures", "factor", "failing", "stopped"),
    [
        (["ttft"], 1.6, 0.0, "ttft"),
        (["failed", "e2e.p50"], 1.8, 0.0, "e2e.p50"),
        (["ttft.p95", "failed"], 1.0, 0.1, "failed"),
        (["ttft", "failed"], 0.5, 0.0, None),
        ([], 3.0, 0.5, None),
    ],
)
def test_a_worse_arm_ends_the_experiment(
    figures: list[str], factor: float, failing: float, stopped: str | None
) -> None:
    view, words = viewed(an_experiment(A, B, stop_worse=figures)), list[int]()
    view.join(0, words.append)
    run_until_stopped(view, 1, factor, failing)
    out = results_of(view)
    if stopped is None:
        assert (out["stopped"], out["state"]) == (None, "running")
        return
    assert view.experiment is not None
    assert (out["stopped"]["arm"], out["stopped"]["figure"]) == ("b", stopped)
    assert out["stopped"]["difference"] > 0
    assert (out["state"], out["switched_by"]) == ("off", "stop_worse")
    assert words[-1] == switch_word(view.experiment.id, False)
    view.switch(True)
    assert (results_of(view)["stopped"], results_of(view)["state"]) == (None, "running")


@pytest.mark.parametrize("share", ["failed", "refused"])
def test_shares_are_not_judged_while_answers_of_a_slow_arm_are_open(share: str) -> None:
    """One of ten requests of both arms fails at once; the other answers of arm b come much later."""
    view = viewed(an_experiment(A, B, stop_worse=[share]))
    late: list[tuple[Exchange, str]] = []
    for i in range(1_000):
        arm, unit = "ab"[i % 2], f"{i * 0x9E3779B97F4A7C15 % 2**64:016x}"
        view.on_assignment(arm, unit, False)
        if i % 20 < 2:
            x = streamed(1, outcome=Outcome.UPSTREAM_ERROR if share == "failed" else Outcome.REFUSED)
            x.refusal = None if share == "failed" else {"kind": "guardrail", "confidence": "high"}
            ended(view, x, arm, unit)
        elif arm == "a":
            ended(view, streamed(100, 140), arm, unit)
        else:
            late.append((streamed(100, 140), unit))
    early = results_of(view)
    assert (early["state"], early["stopped"]) == ("running", None)
    assert share not in [finding["metric"] for finding in early["findings"]]
    assert early["differences"]["b"][share]["share"].get("p") is None
    assert any("b: 450 requests are open" in warning for warning in early["warnings"])
    for x, unit in late:
        ended(view, x, "b", unit)
    out = results_of(view)
    assert (out["state"], out["warnings"]) == ("running", [])
    assert out["differences"]["b"][share]["share"]["p"] > 0.5


MINUTE = 60 * S


def ramp(**options: Any) -> tuple[Experiments, ManualClock, list[int]]:
    clock = ManualClock(now_ns=S)
    options = {"stop_worse": ["failed"], **options}
    experiment = an_experiment(A, B, schedule="10%, 50%", stage_time=Duration(10 * MINUTE), **options)
    view, words = Experiments(experiment, clock), list[int]()
    view.join(0, words.append)
    return view, clock, words


def send_units(view: Experiments, n: int, share: float, failing: float = 0.0, arrival_ns: int = 0) -> None:
    """End `n` requests, each a unit, of which `share` are in arm b; of these, `failing` fail."""
    for i in range(n):
        before, after = int(i * share), int((i + 1) * share)
        in_b = after > before
        failed = in_b and int(after * failing) > int(before * failing)
        x = streamed(100, 140, outcome=Outcome.UPSTREAM_ERROR if failed else Outcome.COMPLETE)
        x.timeline.arrival_ns = arrival_ns
        unit = f"{i:016x}"
        view.on_assignment("b" if in_b else "a", unit, False)
        ended(view, x, "b" if in_b else "a", unit)


def test_a_ramp_begins_its_next_stage_with_time_and_units_and_an_empty_comparison() -> None:
    view, clock, words = ramp()
    assert view.experiment is not None
    send_units(view, 640, 0.1)
    assert results_of(view)["stage"]["number"] == 1, "the stage is too short"
    clock.advance(10 * MINUTE)
    send_units(view, 63, 0.1)
    assert results_of(view)["stage"]["number"] == 1, "compared only after every 64 exchanges"
    send_units(view, 1, 0.1)
    out = results_of(view)
    stage = out["stage"]
    assert (stage["number"], stage["of"], stage["share"]) == (2, 2, 0.5)
    assert out["sample_ratio"]["expected"] == {"a": 0.5, "b": 0.5}
    assert [arm["ended"] for arm in out["arms"].values()] == [0, 0]
    assert [read_switch(word) for word in words] == [
        (view.experiment.id - 1, True),
        (view.experiment.id, True),
    ]
    (earlier,) = stage["earlier"]
    assert (earlier["number"], earlier["share"], sum(earlier["units"].values())) == (1, 0.1, 704)
    assert earlier["differences"]["b"]["failed"]["share"]["difference"] == 0
    assert (earlier["sample_ratio"]["units"], earlier["sample_ratio"]["alarm"]) == (earlier["units"], False)
    # The last stage goes on.
    clock.advance(20 * MINUTE)
    send_units(view, 640, 0.5, arrival_ns=clock.now_ns)
    assert results_of(view)["stage"]["number"] == 2
    assert not results_of(view)["sample_ratio"]["alarm"]


def test_a_stage_counts_only_requests_that_arrived_in_it() -> None:
    view, clock, _ = ramp()
    clock.advance(10 * MINUTE)
    send_units(view, 512, 0.1)
    assert results_of(view)["stage"]["number"] == 2
    began_ns = clock.now_ns
    send_units(view, 5, 0.1, arrival_ns=began_ns - 1)
    send_units(view, 5, 0.1, arrival_ns=began_ns + module.SETTLE_NS - 1)
    clock.advance(module.SETTLE_NS)
    send_units(view, 5, 0.5, arrival_ns=clock.now_ns)
    out = results_of(view)
    assert (out["stage"]["between_stages"], sum(arm["ended"] for arm in out["arms"].values())) == (10, 5)


def test_a_ramp_does_not_go_on_with_a_worse_arm_or_too_few_units() -> None:
    view, clock, words = ramp()
    clock.advance(10 * MINUTE)
    send_units(view, 448, 0.1)
    assert results_of(view)["stage"]["number"] == 1, "arm b has 44 units"
    view, clock, words = ramp()
    clock.advance(10 * MINUTE)
    send_units(view, 640, 0.1, failing=0.9)
    out = results_of(view)
    assert (out["state"], out["stage"]["number"], out["stage"]["earlier"]) == ("off", 1, [])
    assert out["stopped"]["figure"] == "failed" and not read_switch(words[-1])[1]


def test_the_time_of_a_stage_begins_when_the_experiment_is_switched_on() -> None:
    view, clock, _ = ramp(enabled=False)
    clock.advance(10 * MINUTE)
    assert "does not run" in results_of(view)["stage"]["sentence"]
    for _ in range(2):  # also after a pause
        view.switch(True)
        since = results_of(view)["since"]
        clock.advance(10 * MINUTE - 1)
        send_units(view, 640, 0.1)
        stage = results_of(view)["stage"]
        assert (stage["number"], stage["since"]) == (1, since)
        view.switch(False)
        clock.advance(MINUTE)
    view.switch(True)
    clock.advance(10 * MINUTE)
    send_units(view, 64, 0.1)
    assert results_of(view)["stage"]["number"] == 2


def test_the_time_without_a_meter_does_not_count_for_a_stage() -> None:
    view, clock, _ = ramp()
    clock.advance(4 * MINUTE)
    send_units(view, 640, 0.1)
    packed = view.export()()
    since = results_of(view)["stage"]["since"]
    clock.advance(60 * MINUTE)
    restarted = Experiments(view.experiment, clock)
    assert restarted.absorb(packed, 0, Labels(1, 1, 1)) == []
    for passed_ns, number in ((6 * MINUTE - 1, 1), (1, 2)):
        clock.advance(passed_ns)
        assert results_of(restarted)["stage"]["since"] == since
        send_units(restarted, 64, 0.1)
        assert results_of(restarted)["stage"]["number"] == number


@pytest.mark.parametrize(
    ("figures", "n", "unjudged"),
    [
        (["failed", "e2e.p50", "e2e.p95", "e2e.p99"], 1_280, "e2e.p95, e2e.p99"),
        (["false_positives", "failed"], 1_280, "false_positives"),
        (["e2e.p50"], 1_280, None),
    ],
)
def test_a_ramp_waits_for_each_figure_of_stop_worse(figures: list[str], n: int, unjudged: str | None) -> None:
    view, clock, _ = ramp(stop_worse=figures)
    clock.advance(10 * MINUTE)
    send_units(view, n, 0.1)
    stage = results_of(view)["stage"]
    assert stage["number"] == (2 if unjudged is None else 1)
    if unjudged is not None:
        assert f"cannot be judged yet: {unjudged} (" in stage["sentence"]


def test_a_ramp_waits_while_the_split_is_wrong() -> None:
    view, clock, _ = ramp()
    clock.advance(10 * MINUTE)
    send_units(view, 640, 0.5)
    out = results_of(view)
    assert (out["sample_ratio"]["alarm"], out["stage"]["number"]) == (True, 1)
    assert "does not begin, because the units are not split as configured" in out["stage"]["sentence"]


def test_a_restarted_meter_learns_the_stage_from_a_relay() -> None:
    view, _, words = ramp()
    assert view.experiment is not None
    view.join(switch_word(view.experiment.id + 1, True), words.append)
    out = results_of(view)
    assert (out["stage"]["number"], out["arms"]["b"]["weight"]) == (2, 0.5)
    # A relay that missed the change gets the present stage.
    view.join(switch_word(view.experiment.id - 1, True), words.append)
    assert read_switch(words[-1])[0] == view.experiment.id
    assert results_of(view)["stage"]["number"] == 2


def test_a_stage_that_a_relay_or_the_state_knows_goes_to_the_relays_before_it() -> None:
    view, _, before = ramp()
    assert view.experiment is not None
    old, new = switch_word(view.experiment.id, True), switch_word(view.experiment.id + 1, True)
    later: list[int] = []
    view.join(new, later.append)
    assert (before, later) == ([old, new], [new])
    packed = view.export()()
    view, _, before = ramp()
    assert view.experiment is not None
    view.switch(False)
    view.absorb_switch(packed)
    assert before == [old, switch_word(view.experiment.id - 1, False), switch_word(view.experiment.id, False)]


def test_equal_arms_are_seldom_stopped() -> None:
    """A/A: 40 experiments, looked at 18 times each, by three figures."""
    stops = 0
    for seed in range(40):
        view = viewed(an_experiment(A, B, stop_worse=["ttft", "ttft.p50", "failed"]))
        run_until_stopped(view, seed, 1.0, 0.0)
        stops += view.state != "running"
    assert stops <= 0.05 * 40


def test_a_covariate_is_the_size_of_the_first_request() -> None:
    outs = {}
    for covariate in ("none", "request_bytes"):
        view, r = viewed(an_experiment(A, B, covariate=covariate)), random.Random(4)
        for i in range(300):
            size = round(r.lognormvariate(7, 0.8))
            x = streamed(round((20 + size / 20) * r.lognormvariate(0, 0.2)))
            x.request_bytes = size
            ended(view, x, "ab"[i % 2], f"{r.getrandbits(64):016x}")
        out = results_of(view)
        assert out["covariate"] == covariate
        outs[covariate] = out["differences"]["b"]["ttft"]["mean"]
    assert "variance_left" not in outs["none"]
    assert outs["request_bytes"]["variance_left"] < 0.3
    assert outs["request_bytes"]["unadjusted_difference"] == outs["none"]["difference"]


# ---------------------------------------------------------------- the switch


def test_every_relay_is_told_when_it_comes_and_when_it_changes() -> None:
    experiment = an_experiment(A, B, enabled=False)
    view = viewed(experiment)
    one: list[int] = []
    two: list[int] = []
    on, off = switch_word(experiment.id, True), switch_word(experiment.id, False)
    view.join(0, one.append)
    assert (one, view.state) == ([off], "off")
    view.switch(True)
    view.join(0, two.append)
    assert (one, two, view.state) == ([off, on], [on], "running")
    view.leave(one.append)
    view.switch(False)
    assert (one, two) == ([off, on], [on, off])
    assert results_of(view)["switched_by"] == "api"


def test_a_new_meter_learns_from_its_relays_what_was_switched() -> None:
    experiment = an_experiment(A, B, enabled=True)
    on, off = switch_word(experiment.id, True), switch_word(experiment.id, False)
    view = viewed(experiment)
    fresh: list[int] = []
    old: list[int] = []
    view.join(0, fresh.append)
    view.join(off, old.append)
    assert (fresh, old, view.state) == ([on, off], [off], "off")
    assert results_of(view)["switched_by"] == "relay"
    late: list[int] = []
    view.join(on, late.append)
    assert (late, view.state) == ([off], "off"), "the first one counts"
    view = viewed(experiment)
    other: list[int] = []
    view.join(switch_word(experiment.id ^ 7, False), other.append)
    assert (other, view.state) == ([on], "running"), "a relay of the configuration before"


def test_it_is_over_when_its_end_has_come() -> None:
    clock = ManualClock(now_ns=S)
    experiment = an_experiment(A, B, until="10s", start_wall_ns=clock.wall_ns())
    view = Experiments(experiment, clock)
    assert view.state == "running"
    clock.advance(10 * S)
    assert view.state == "ended"
    assert results_of(view)["until"] == "2023-11-14T22:13:31Z"
