"""Fairness as planted: slowdowns by hand, and engines of which one lets short requests wait for long ones."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmtap.bench.compliance.judge import judge
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.tests.fairness import TEST, FairnessParams
from llmtap.bench.tests.mixes import ClassMix
from llmtap.units import Duration
from llmtap.workload.ietf import SKEWED
from tests.bench.support import Planted, answered, measured, perform

S = 1_000_000_000


def slowed(one: dict[str, Any]) -> bool:
    return bool(one["inflation"]["mean"] > 2)


def served(ttft_s: Callable[[str, bool, Random], float]) -> Callable[[str, Load], Measurement]:
    """A server whose TTFT depends on the class, and on whether it is mixed; it takes 20 ms a token."""

    def answer(name: str, load: Load) -> Measurement:
        random, rows = Random(name), []
        requests = load.plan.requests
        for row in range(len(requests)):
            of = load.class_of(row) or ""
            first, output = ttft_s(of, name == "mix", random), requests.output[row]
            more = {"row": row, "request_class": of, "tpot_ns": 20e6, "output_tokens": output}
            rows.append(answered(requests.arrival_ns[row] / S, first, first + 0.02 * output, **more))
        return measured(name, rows, seconds=320.0)

    return answer


def test_slowdowns_by_hand(tmp_path: Path) -> None:
    """Short requests wait three times as long in the mix, long ones as long as alone.

    Of class means J = (3 + 1)^2 / (2 (9 + 1)); of requests (3 s + l)^2 / (n (9 s + l)).
    """
    times = {("short", False): 0.1, ("short", True): 0.3, ("long", False): 0.4, ("long", True): 0.4}
    session = Planted(tmp_path, served(lambda of, mixed, _: times[of, mixed]), "fairness")
    result = perform(TEST, session, rate=10.0, duration=Duration(60 * S), requests_per_class=20)
    report = result.measurements_to_dict()
    s, n = (sum(one["sent"] for one in report["classes"].values() if of(one)) for of in (slowed, bool))
    by_request = (2 * s + n) ** 2 / (n * (8 * s + n))
    for name, value in (("headline", by_request), ("by_class", 0.8)):
        assert report["jain"][name]["value"] == pytest.approx(value)
        assert report["jain"][name]["low"] == report["jain"][name]["high"] == pytest.approx(value)
    assert report["jain"]["slowdown"] == pytest.approx({"short": 3.0, "long": 1.0})
    for name in ("p50", "p95", "p99", "mean"):
        short, long = (report["classes"][one]["inflation"][name] for one in ("short", "long"))
        assert (short if name == "mean" else short["value"]) == pytest.approx(3.0)
        assert (long if name == "mean" else long["value"]) == pytest.approx(1.0)
    assert report["classes"]["short"]["starvation"]["value"] == 0.0
    results, metrics = result.tables[:2]
    assert results.caption == "Table 8: Per-Class Results"
    assert results.heads == ["Class", "Count", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99"]
    assert results.rows[0][0] == "Short"
    assert results.rows[0][2].startswith("300 ms (300 to 300)")
    assert metrics.caption == "Table 9: Fairness Metrics"
    assert [row[0] for row in metrics.rows] == [
        "Jain's Fairness Index",
        "Jain's index of class means",
        "Short Class Starvation",
        "Long Class Starvation",
    ]
    assert [row[1] for row in metrics.rows[:2]] == [f"{by_request:.2f}", "0.80"]
    assert [series.name for series in result.charts[0].series] == [
        "short, mixed",
        "short, alone",
        "long, mixed",
        "long, alone",
    ]
    assert any("significant unfairness" in note for note in result.notes)


def test_on_synthetic_skewed_the_mix_is_the_workload_of_the_draft(tmp_path: Path) -> None:
    session = Planted(tmp_path, served(lambda of, mixed, _: 0.1), "fairness")
    result = perform(
        TEST,
        session,
        rate=20.0,
        workload="synthetic-skewed",
        duration=Duration(30 * S),
        requests_per_class=10,
    )
    loads = dict(session.loads)
    own = SKEWED.requests(len(loads["mix"].plan.requests), session.seed)
    assert loads["mix"].plan.requests.input == own.input
    classes = result.measurements_to_dict()["classes"]
    assert classes["long"]["sent"] >= 10 and classes["short"]["sent"] > 5 * classes["long"]["sent"]
    assert result.configuration["Request classes"].startswith("short 18.3%, input 64-256")
    report = {
        "test": "fairness",
        "steps": [{"name": name, "result": {"plan": load.plan.describe()}} for name, load in session.loads],
        "measurements": result.measurements_to_dict(),
    }
    judged = {one.requirement.id: one.verdict for one in judge(report).rows}
    for id in ("5.6.2-1", "5.6.2-p1", "5.6.3-p1"):
        assert judged[id].status == "met", judged[id]


def test_each_class_alone_is_as_much_work_as_the_mix(tmp_path: Path) -> None:
    mix = ClassMix(FairnessParams().classes)
    session = Planted(tmp_path, served(lambda of, mixed, _: 0.1), "fairness")
    perform(TEST, session, rate=10.0, duration=Duration(30 * S), requests_per_class=10)
    rates = {name: load.rate_rps or 0.0 for name, load in session.loads}
    assert list(rates) == ["alone/short", "alone/long", "mix"]
    work = {"mix": mix, **{f"alone/{name}": mix.only_class(name) for name in ("short", "long")}}
    for name, rate in rates.items():
        assert rate * work[name].mean_tokens() == pytest.approx(10.0 * mix.mean_tokens())
    assert len({tuple(load.plan.requests.input[:5]) for _, load in session.loads}) == 3


def test_who_waits_five_medians_is_starved(tmp_path: Path) -> None:
    """In the mix one short request in twenty takes 0.6 s, the others 0.1 s."""

    def ttft_s(of: str, mixed: bool, random: Random) -> float:
        return 0.6 if of == "short" and mixed and random.random() < 0.05 else 0.1

    session = Planted(tmp_path, served(ttft_s), "fairness")
    result = perform(TEST, session, rate=20.0, duration=Duration(100 * S))
    short, long = (result.measurements_to_dict()["classes"][name]["starvation"] for name in ("short", "long"))
    assert short["low"] < 0.05 < short["high"]
    assert short["threshold"] == 0.5
    assert short["starved"] == round(short["value"] * short["n"])
    assert long["value"] == 0.0
