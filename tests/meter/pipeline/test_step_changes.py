"""Steps of TTFT in the summary and on /metrics, by model."""

from typing import Any

import pytest

from llmtap.clock import ManualClock
from llmtap.meter.admin.views import metrics_of, summary_of
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.step_changes import StepBook
from llmtap.meter.tenants import OTHER
from llmtap.metrics.step_change import FALSE_ALARM_DAYS, StepState
from tests.support.traffic.exchanges import streamed
from tests.support.traffic.steps import GAP_S, S, end_streams, rise

WALL_OFFSET_S = 1_700_000_000
"""2023-11-14 22:13:20 UTC."""


def the_model(book: StepBook) -> dict[str, Any]:
    document: Any = book.to_dict()
    assert document["false_alarm_days"] == FALSE_ALARM_DAYS
    model: dict[str, Any] = document["models"]["tiny"]
    return model


def test_a_step_has_its_times_ratio_and_baseline() -> None:
    book = StepBook(clock := ManualClock())
    rise(book, clock)
    model = the_model(book)
    step = model["step"]
    assert model["state"] == StepState.STEP
    assert model["history"] == pytest.approx(25 * 3600 + 150 * GAP_S, rel=0.01)
    assert step["until"] is None
    began_s = WALL_OFFSET_S + 25 * 3600
    assert abs(step["since"] - began_s) <= 300
    assert began_s < step["found"] < began_s + 1_200
    assert step["low"] <= step["ratio"] <= step["high"]
    assert step["ratio"] == pytest.approx(1.6, rel=0.05)
    assert step["baseline"] == pytest.approx(0.099, rel=0.01)
    assert step["ttft"] == pytest.approx(step["ratio"] * step["baseline"])
    assert step["n"] >= 90
    assert book.ratios() == {"tiny": step["ratio"]}


def test_a_sentence_has_the_time_the_ratio_and_the_baseline() -> None:
    book = StepBook(clock := ManualClock())
    rise(book, clock)
    assert "Since 23:" in the_model(book)["sentence"]
    assert "UTC the TTFT of tiny is 1.6" in the_model(book)["sentence"]
    assert "the 25 hours before" in the_model(book)["sentence"]
    end_streams(book, clock, 3_600 // GAP_S, factor=1.6)
    assert "Since 2023-11-15 23:" in the_model(book)["sentence"], "the day before"


def test_a_model_that_is_not_judged_has_its_reason() -> None:
    book = StepBook(clock := ManualClock())
    end_streams(book, clock, 100)
    learning = the_model(book)
    assert (learning["state"], learning["step"]) == (StepState.LEARNING, None)
    assert "history is too short" in learning["sentence"]
    rise(book, clock, factor=1)
    assert the_model(book)["state"] == StepState.STEADY
    clock.advance(600 * S)
    few = the_model(book)
    assert (few["state"], few["step"]) == (StepState.FEW, None)
    assert book.ratios() == {}


def test_a_step_is_not_reported_while_too_few_streams_end() -> None:
    book = StepBook(clock := ManualClock())
    rise(book, clock)
    clock.advance(600 * S)
    few = the_model(book)
    assert (few["state"], few["step"]["until"]) == (StepState.FEW, None)
    assert "not judged now: fewer than 30 streams" in few["sentence"]
    assert book.ratios() == {}
    end_streams(book, clock, 60, factor=1.6)
    assert (the_model(book)["state"], list(book.ratios())) == (StepState.STEP, ["tiny"])


def test_a_step_is_the_new_normal_after_a_day_without_traffic_too() -> None:
    book = StepBook(clock := ManualClock())
    rise(book, clock)
    clock.advance(86_400 * S)
    assert book.ratios() == {}
    assert the_model(book)["state"] == StepState.LEARNING


def test_models_that_share_a_label_are_not_judged() -> None:
    book = StepBook(clock := ManualClock())
    end_streams(book, clock, 100, model=OTHER)
    assert book.to_dict()["models"] == {}


def test_the_summary_and_the_metrics_have_the_steps() -> None:
    pipeline = ExchangePipeline(MeterOptions(), clock := ManualClock())
    rise(pipeline.steps, clock)
    pipeline.on_open()
    pipeline.on_end(streamed())
    summary: Any = summary_of(pipeline)()
    ratio = summary["ttft_steps"]["models"]["tiny"]["step"]["ratio"]
    body, _ = metrics_of(pipeline).render()
    assert f'llmtap_ttft_step_ratio{{model="tiny"}} {ratio}' in body.decode()
