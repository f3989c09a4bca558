"""The arms of a capture, compared as those of a running experiment."""

import re
from typing import Any

import pyarrow as pa
import pytest

from llmtap.capture.store.rows import exchanges_of, to_batch
from llmtap.channel.experiment import ARMS_MAX
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.meter.recorded_experiment import COLUMNS, RecordedExperiment
from llmtap.metrics.latency import DEFAULT_BENEFIT
from tests.support.traffic.streams import streamed

WINDOW = {"start": "2026-01-01T00:00:00Z", "end": "2026-01-01T01:00:00Z"}


def recorded(
    n: int, *, units: int | None = None, routes: tuple[str | None, str | None] = (None, "body x")
) -> list[Exchange]:
    """`n` exchanges, of two arms in turn; `guarded` is 100 ms slower, and refuses each tenth of its own."""
    exchanges = []
    for i in range(n):
        arm = ("plain", "guarded")[i % 2]
        first = 100 + i % 7 + (100 if i % 2 else 0)
        x = streamed(first, first + 20, seq=i + 1)
        x.arm, x.route = arm, routes[i % 2]
        x.unit = f"{(i if units is None else i % units) * 0x9E3779B97F4A7C15 % 2**64:016x}"
        x.outcome = Outcome.REFUSED if i % 20 == 1 else Outcome.COMPLETE
        exchanges.append(x)
    return exchanges


def batch_of(exchanges: list[Exchange]) -> pa.RecordBatch:
    batch, failed = to_batch(exchanges, capture="c", level="shape")
    assert not failed
    return batch


def result(exchanges: list[Exchange]) -> dict[str, Any]:
    batch = batch_of(exchanges)
    experiment = RecordedExperiment.from_batches([batch.select(COLUMNS)])
    assert experiment is not None
    for x in exchanges_of(batch):
        experiment.add(x, DEFAULT_BENEFIT)
    out: Any = experiment.to_dict("c", WINDOW)
    return out


def test_the_arms_are_compared_and_the_control_is_the_unchanged_one() -> None:
    out = result(recorded(400))
    assert (out["state"], out["control"], out["unit"], out["aa"]) == ("recorded", "plain", "request", False)
    ttft = out["differences"]["guarded"]["ttft"]
    assert ttft["p50"]["difference"] == pytest.approx(0.1, abs=0.002)
    assert ttft["mean"]["p"] < 0.01, "means need no shares"
    refused = out["differences"]["guarded"]["refused"]["share"]
    assert refused["difference"] == pytest.approx(0.1)
    low, high = refused["interval"]
    assert 0 < low < 0.1 < high
    assert "p" not in refused, "the shares of the arms are not known"
    assert out["sample_ratio"] | {"units": None, "alpha": None} == {
        "units": None,
        "expected": None,
        "p": None,
        "alpha": None,
        "alarm": False,
        "capped": False,
    }
    assert out["arms"]["guarded"]["refusals"] == {"unknown": 20}
    assert (out["since"], out["until"]) == (WINDOW["start"], WINDOW["end"])


def test_units_that_come_again_are_counted_once() -> None:
    out = result(recorded(400, units=40))
    assert (out["arms"]["plain"]["units"], out["arms"]["plain"]["ended"]) == (20, 200)
    assert out["unit"] == "unit"


def test_where_no_arm_was_changed_it_is_an_aa_test() -> None:
    out = result(recorded(20, routes=(None, None)))
    assert (out["aa"], out["control"]) == (True, "guarded")


def test_without_two_arms_or_with_too_many_there_is_no_comparison() -> None:
    one = recorded(4)[::2]
    assert RecordedExperiment.from_batches([batch_of(one).select(COLUMNS)]) is None
    many = recorded(2 * ARMS_MAX + 2)
    for i, x in enumerate(many):
        x.arm = f"arm-{i}"
    assert RecordedExperiment.from_batches([batch_of(many).select(COLUMNS)]) is None


def test_a_control_whose_clients_sent_the_header_and_coarse_times_are_warned_of() -> None:
    exchanges = recorded(200)
    for x in exchanges[:40:2]:
        x.excluded = "own_header"
    out = result(exchanges)
    assert out["arms"]["plain"]["own_headers"] == 20
    (warning,) = out["warnings"]
    assert "plain: the clients of 20 of 100 requests" in warning
    for x in exchanges:
        x.excluded, x.uncertain, x.uncertainty_ns = None, True, 100_000_000
    (warning,) = result(exchanges)["warnings"]
    assert "uncertain by 100 ms or more" in warning


def test_intervals_of_coarse_times_include_their_steps() -> None:
    exchanges = recorded(400)
    exact = result(exchanges)["differences"]["guarded"]
    for x in exchanges:
        x.uncertainty_ns = 100_000_000
    coarse = result(exchanges)["differences"]["guarded"]
    for name in ("interval", "anytime_interval"):
        low, high = exact["ttft"]["p50"][name]
        assert coarse["ttft"]["p50"][name] == pytest.approx((low - 0.1, high + 0.1))
    assert exact["ttft"]["mean"]["different"] and not coarse["ttft"]["mean"]["different"]
    for metric in ("output_tokens", "refused"):
        assert coarse[metric] == exact[metric], "only times are coarse"


def test_one_uncertain_time_does_not_make_the_average_uncertain() -> None:
    exchanges = recorded(400)
    exchanges[0].uncertain, exchanges[0].uncertainty_ns = True, 194_000_000
    assert result(exchanges)["warnings"] == []
    for x in exchanges[2::2]:
        x.uncertainty_ns = 4_000_000
    (warning,) = result(exchanges)["warnings"]
    assert "uncertain by 2 ms on average, and by up to 194 ms" in warning


def test_units_that_change_their_arm_are_warned_of() -> None:
    """A ramp: ten of the forty units of the control move to the other arm."""
    exchanges = recorded(400, units=40)
    assert result(exchanges)["warnings"] == []
    moved = {x.unit for x in exchanges if x.arm == "plain"}
    for x in exchanges[200:]:
        if x.unit in sorted(filter(None, moved))[:10]:
            x.arm, x.route = "guarded", "body x"
    (warning,) = result(exchanges)["warnings"]
    assert warning.startswith("10 units are in more than one arm")


def test_shares_that_change_over_time_are_warned_of() -> None:
    """A ramp with a request as the unit: 2 %, 10 % and 50 %, each for a minute. No unit comes again."""

    def ramp(*percents: int) -> list[Exchange]:
        exchanges = recorded(1_800)
        for i, x in enumerate(exchanges):
            is_changed = i * 0x9E3779B9 % 2**32 < percents[i // 600] * 2**32 // 100
            x.arm, x.route = ("guarded", "body x") if is_changed else ("plain", None)
            x.arrival_wall_ns += i * 100_000_000
        return exchanges

    (warning,) = result(ramp(2, 10, 50))["warnings"]
    found = re.match(
        r"guarded has between ([\d.]+)% and ([\d.]+)% of the requests at different times: ", warning
    )
    assert found is not None
    assert [float(share) for share in found.groups()] == pytest.approx([2, 50], abs=1)
    assert result(ramp(10, 10, 10))["warnings"] == []
    crowded = ramp(50, 50, 50)
    for x in crowded[900:1_200]:
        x.arm, x.route, x.excluded = "plain", None, "no_room"
    assert result(crowded)["warnings"] == [], "a request without room was not assigned by its share"
