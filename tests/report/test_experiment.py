"""What an experiment has come to, of results that the meter worked out."""

import json
from typing import Any

import msgspec

from llmtap.clock import ManualClock
from llmtap.export.sinks import SeriesKey
from llmtap.meter.experiments import Experiments
from llmtap.metrics.latency import measure
from llmtap.report.experiment import arms_table, experiment_lines
from tests.support.traffic.exchanges import streamed
from tests.support.traffic.experiments import an_experiment

REFUSAL = {"kind": "output_guardrail", "source": "finish_reason", "detail": {}, "confidence": "high"}


def results(n: int, slower_ms: int = 0, refused: int = 0) -> dict[str, Any]:
    """`n` exchanges an arm, of which those of `marked` begin later and some are refused."""
    experiments = Experiments(an_experiment(), ManualClock())
    for i in range(n):
        for k, arm in enumerate(("control", "marked")):
            unit = f"{7919 * (2 * i + k):x}"
            x = streamed(2 * i + k + 1, 5, arm=arm, unit=unit)
            late_ms = i % 5 + (slower_ms if arm == "marked" else 0)
            events = x.timeline.events
            for place, t_ns in enumerate(events.t_ns):
                events.t_ns[place] = t_ns + late_ms * 1_000_000
            first = events.t_ns[0]
            x.timeline.first_token_ns = x.timeline.first_content_ns = first
            x.timeline.last_token_ns = events.t_ns[4]
            if arm == "marked" and i < refused:
                x.refusal = REFUSAL
            experiments.assigned(arm, unit, True)
            experiments.ended(x, measure(x), SeriesKey(x.tenant, ""), None)
    told: dict[str, Any] = json.loads(msgspec.json.encode(experiments.results()()))
    return told


def test_none_is_told() -> None:
    assert experiment_lines({"state": "none"}) == experiment_lines({}) == ["no experiment is configured"]


def test_with_few_units_nothing_is_compared() -> None:
    heading, split, verdict = experiment_lines(results(10, slower_ms=300))
    assert heading == (
        "experiment test: running, dealt by request, control control; "
        "control 10 of 10 ended, marked 10 of 10 ended"
    )
    assert split.startswith("split: control 10, marked 10 units, as it was dealt (p ")
    assert verdict == "means are compared from 50 units an arm on: control has 10, marked has 10"


def test_a_planted_difference_stands_with_its_interval() -> None:
    lines = experiment_lines(results(200, slower_ms=300))
    [ttft] = [line for line in lines if line.startswith("marked: TTFT +")]
    assert ttft.startswith("marked: TTFT +300 ms in the mean (95 %: +")
    assert ttft.endswith("at every look")
    assert not any("TPOT" in line for line in lines)


def test_without_a_difference_nothing_stands() -> None:
    assert experiment_lines(results(200))[-1] == "no difference stands in 13 comparisons so far"


def test_a_share_is_told_in_percent() -> None:
    lines = experiment_lines(results(200, refused=100))
    assert any(line.startswith("marked: share refused +50.0%") for line in lines)


def test_an_arm_whose_chunks_come_in_bursts_is_told_of() -> None:
    told = results(60)
    assert not any("at a time" in line for line in experiment_lines(told))
    told["arms"]["control"]["chunking"]["events_per_read"] = 1.05
    told["arms"]["marked"]["chunking"]["events_per_read"] = 8.0
    assert experiment_lines(told)[-1].startswith("marked: chunks come 8 at a time (control: 1.05), so most")


def test_the_arms_stand_beside_each_other() -> None:
    rows = arms_table(results(60, slower_ms=300, refused=7)).rows
    assert [(row[0], row[1], row[-1]) for row in rows] == [("control", "60", "0"), ("marked", "60", "7")]
    slower = float(rows[1][2]) - float(rows[0][2])
    assert slower == 300
    assert not arms_table({"state": "none"}).rows


def test_a_broken_split_comes_before_everything() -> None:
    told = results(60)
    told["sample_ratio"] |= {"alarm": True, "p": 1e-9}
    assert experiment_lines(told)[1].startswith("ALARM: ")
