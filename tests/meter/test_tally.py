import logging

import pytest

from llmtap.clock import ManualClock
from llmtap.meter.options import MeterOptions
from llmtap.meter.tally import Tally
from llmtap.record.outcome import Outcome
from llmtap.tap.frames import Hello
from tests.support.relay_status import relay_status
from tests.support.streams import streamed

S = 1_000_000_000


def tally(**options: int) -> Tally:
    return Tally(MeterOptions(**options), ManualClock(now_ns=S))


def test_an_exchange_is_counted_everywhere_once() -> None:
    t = tally()
    t.opened()
    assert t.live == 1
    t.ended(streamed(100, 140))
    assert (t.live, len(t.kept)) == (0, 1)
    assert t.summary(everything=False)()["n"] == 1
    assert t.summary(everything=True)()["n"] == 1
    body, _ = t.freeze().render()
    assert b'llmtap_exchanges_total{model="m",outcome="complete",tenant="default"} 1.0' in body


def test_labels_beyond_the_bound_are_other() -> None:
    t = tally(models_max=1)
    for model in ("a", "b", "c"):
        t.ended(streamed(100, model=model))
    by = t.summary(everything=False)()["by"]
    assert isinstance(by, dict)
    assert {name: part["n"] for name, part in by["model"].items()} == {"a": 1, "other": 2}
    body, _ = t.freeze().render()
    assert b'llmtap_label_overflow_total{label="model"} 2.0' in body


def test_failures_are_counted_always_and_told_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    t = tally()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            t.failed("ValueError", ValueError("odd"))
        t.failed("bad_batch", "not a batch")
    assert t.errors == {"ValueError": 3, "bad_batch": 1}
    assert [record.getMessage().split()[1] for record in caplog.records] == [
        "kind=ValueError",
        "kind=bad_batch",
    ]
    assert t.summary(everything=False)()["meter_errors"] == t.errors


def test_one_line_for_each_exchange_at_info(caplog: pytest.LogCaptureFixture) -> None:
    t = tally()
    with caplog.at_level(logging.INFO):
        t.ended(streamed(100, 140, outcome=Outcome.TRUNCATED, model="a b\n"))
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("event=exchange id=r-1 tenant=default model='a b\\n' ")
    assert "outcome=truncated ttft_ms=100.000" in line


def test_a_relays_status_reaches_summary_and_exposition() -> None:
    t = tally()
    t.relays.join(Hello(relay="r0", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0))
    t.status("r0", relay_status(opened=4, measured=3, unsettled=1, lag_ns_max=2_000_000))
    out = t.summary(everything=False)()
    assert isinstance(out["relays"], dict)
    assert out["relays"]["r0"]["opened"] == 4
    assert out["uncertainty"] == 0.002
    assert b'llmtap_relay_exchanges_total{relay="r0"} 4.0' in t.freeze().render()[0]
