"""What a cache is worth, as planted: by hand, and by the latency model of an engine that has one."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.sut.sut import TargetArm
from llmtap.bench.tests.prefix_cache import TEST, PrefixRun, hot_prefix_count, prefix_figures
from llmtap.workload.plan import NO_CONTEXT
from tests.bench.support import Planted, answered, measured, perform

S = 1_000_000_000
ARMS = {"cache_off": TargetArm(headers={"x-cache": "off"}), "cache_on": TargetArm()}
Cached = Callable[[str, int, Random], int | None]


def served(cached: Cached, *, tokens: int = 1_000, ms_a_token: float = 0.1) -> Any:
    """A server that takes 10 ms and, for each token of the prompt that is not in its cache, `ms_a_token`; all
    requests share a prefix of `tokens`, of which `cached` says how many it has."""

    def answer(name: str, load: Load) -> Measurement:
        random, rows = Random(name), []
        requests = load.plan.requests
        for row, given in enumerate(requests.input):
            had = cached(name, row, random)
            ttft = (0.01 + ms_a_token / 1e3 * (given - (had or 0))) * random.gauss(1, 0.02)
            more = {"row": row, "cached_tokens": had, "output_tokens": 1, "input_tokens": given}
            rows.append(answered(requests.arrival_ns[row] / S, ttft, ttft + 1e-8, **more))
        return measured(name, rows)

    return answer


def planted(tmp_path: Path, cached: Cached, arms: dict[str, TargetArm] | None = None) -> Planted:
    session = Planted(tmp_path, served(cached), "prefix-cache")
    session.arms = ARMS if arms is None else arms
    return session


def run(session: Planted, tmp_path: Path, **params: Any) -> Any:
    file = tmp_path / "plain.toml"
    file.write_text("input = 100\noutput = 1\n")
    usual = {"workload": str(file), "prefix_tokens": (1_000, 1_000), "rate": 5.0, "requests": 60}
    return perform(TEST, session, **{**usual, **params})


def state(name: str) -> str:
    return name.rpartition("/")[2]


def by_state(name: str, row: int, random: Random) -> int:
    """Nothing where it is off or for the first; then 960 of the 1,000, whole blocks; warm from the first."""
    if state(name) in ("off", "throughput-off") or (state(name) == "cold" and row == 0):
        return 0
    return 960


def test_reductions_and_hit_rates_by_hand(tmp_path: Path) -> None:
    """1,100 tokens are 10 + 110 ms, of which 96 ms fall away: 0.8."""
    session = planted(tmp_path, by_state)
    result = run(session, tmp_path, concurrency=0)
    report = result.measurements_to_dict()
    for one in ("cold", "warm"):
        reduction = report["reduction"][one]
        assert reduction["p50"]["low"] < 0.8 < reduction["p50"]["high"]
        assert reduction["p50"]["high"] - reduction["p50"]["low"] < 0.02
        assert reduction["pairs"] == 180
        assert reduction["by_repeats"]["n"] == 3
        assert reduction["by_repeats"]["low"] < 0.8 < reduction["by_repeats"]["high"]
    # A request in sixty of the cold runs had nothing: it is the slowest 1.7 %.
    assert report["ttft"]["cold"]["p99"]["value"] > 0.1 > report["ttft"]["warm"]["p99"]["value"]
    assert report["hit_rate"]["off"]["value"] == 0.0
    assert report["hit_rate"]["cold"]["value"] == pytest.approx(0.96 * 59 / 60)
    assert report["hit_rate"]["warm"]["value"] == pytest.approx(0.96)
    assert report["throughput"] is None
    table = result.tables[0]
    assert table.caption == "Table 10: Cache Effectiveness"
    assert table.heads == ["Configuration", "TTFT P50", "TTFT P95", "TTFT P99"]
    assert [row[0] for row in table.rows] == ["Cache Disabled", "Cache (Cold)", "Cache (Warm)"]
    assert [series.name for series in result.charts[0].series] == [row[0] for row in table.rows]
    assert result.deviations == []


def test_off_and_cold_have_the_same_requests_and_nothing_was_sent_before(tmp_path: Path) -> None:
    session = planted(tmp_path, by_state)
    run(session, tmp_path, requests=10, repeats=2, throughput_requests=10)
    loads = dict(session.loads)
    texts = {name: load.plan.describe()["texts"] for name, load in loads.items()}
    for repeat in (0, 1):
        assert loads[f"{repeat}/off"].fingerprint() == loads[f"{repeat}/cold"].fingerprint()
        assert texts[f"{repeat}/off"] == texts[f"{repeat}/cold"] != texts[f"{repeat}/warm"]
        cold, warm = (loads[f"{repeat}/{one}"].plan.requests for one in ("cold", "warm"))
        assert (cold.input, cold.arrival_ns, cold.blocks) == (warm.input, warm.arrival_ns, warm.blocks)
        assert texts[f"{repeat}/throughput-off"] == texts[f"{repeat}/throughput-on"]
    assert len(set(texts.values())) == 6  # two repeats of cold, warm, throughput
    again = planted(tmp_path / "again", by_state)
    run(again, tmp_path, requests=10, repeats=2, throughput_requests=10)
    assert not {load.plan.describe()["texts"] for _, load in again.loads} & set(texts.values())
    # Lengths and arrivals are of the seed, and the same in every run.
    assert dict(again.loads)["0/cold"].plan.requests.arrival_ns == loads["0/cold"].plan.requests.arrival_ns


class Noting(Planted):
    """It keeps how each load was to be measured."""

    how: dict[str, dict[str, Any]]

    async def measure(self, name: str, load: Load, **how: Any) -> Measurement:
        self.how[name] = how
        return await super().measure(name, load, **how)


def test_warm_ups_know_no_prefix_of_the_loads_and_only_warm_is_primed(tmp_path: Path) -> None:
    session = Noting(tmp_path, served(by_state), "prefix-cache")
    session.arms, session.how = ARMS, {}
    run(session, tmp_path, requests=10, repeats=2, throughput_requests=10)
    texts = {load.plan.describe()["texts"] for _, load in session.loads}
    for name, load in session.loads:
        how = session.how[name]
        assert how["arm"] == ("cache_off" if name.endswith("off") else "cache_on")
        warm_by = how["warm_by"].plan
        assert warm_by.describe()["texts"] not in texts
        assert set(warm_by.requests.output) == {100}
        primed = state(name) in ("warm", "throughput-on")
        assert (how["prime"] is not None) == primed
        if primed:
            assert how["prime"].plan.describe()["texts"] == load.plan.describe()["texts"]


def test_a_cache_that_is_not_off_and_one_that_is_not_cold_are_told(tmp_path: Path) -> None:
    result = run(planted(tmp_path, lambda name, row, random: 960), tmp_path, concurrency=0, repeats=1)
    message = " ".join(result.deviations)
    assert "with the cache disabled, 96.0% of prefix tokens came from it" in message
    assert "1 prefixes were in the cache before the cold run" in message
    assert "1 independent runs" in message


def test_throughput_is_of_closed_loops(tmp_path: Path) -> None:
    """Slots make a request after the other: 120 ms each, or 24 ms: five times as many."""

    def answer(name: str, load: Load) -> Measurement:
        if load.slots is None:
            return served(by_state)(name, load)
        rows: list[dict[str, Any]] = []
        each = 0.12 if name.endswith("off") else 0.024
        for row in range(len(load.plan.requests)):
            at = (row // load.slots + row % load.slots / load.slots) * each
            rows.append(answered(at, 1e-9, each, row=row, output_tokens=10))
        return measured(name, rows)

    session = Planted(tmp_path, answer, "prefix-cache")
    session.arms = ARMS
    result = run(session, tmp_path, concurrency=4, throughput_requests=80)
    report = result.measurements_to_dict()["throughput"]
    assert report["unit"] == "output tokens/s"
    assert report["off"]["mean"] == pytest.approx(4 / 0.120 * 10, rel=0.05)
    assert report["improvement"]["value"] == pytest.approx(4.0, rel=0.05)


CONTEXTS = [0, 1, NO_CONTEXT, 0, 1, 0]
LENGTHS = [100, 200]


def repeat(cold: list[int | None], ttft_ms: int = 30) -> PrefixRun:
    """Off takes 100 ms; cold and warm `ttft_ms`; the cold run tells so many cached tokens."""
    states = {
        state: measured(
            state,
            [
                {
                    "row": row,
                    "ttft_ns": (100 if state == "off" else ttft_ms) * 1_000_000,
                    "e2e_ns": S // 5,
                    "cached_tokens": {"cold": cold[row], "warm": 96 * (1 + context), "off": None}[state],
                }
                for row, context in enumerate(CONTEXTS)
            ],
        )
        for state in ("off", "cold", "warm")
    }
    return PrefixRun(CONTEXTS, LENGTHS, states)


def test_hits_are_of_the_prefix_s_tokens_and_never_more() -> None:
    """700 tokens of prefixes; what the server has of a message behind one does not count."""
    report = msgspec.to_builtins(
        prefix_figures([repeat([None, None, 0, 96, 192, 500])], 2.0, None, None).hit_rate
    )
    assert report["off"] is None
    # 96 of 100, 192 of 200, and all 100 of the one that tells 500.
    assert report["cold"]["value"] == pytest.approx((96 + 192 + 100) / 700)
    assert report["cold"]["answers_that_tell"] == 4
    assert report["warm"]["value"] == pytest.approx((3 * 96 + 2 * 192) / 700)


def test_a_first_request_that_finds_its_prefix_was_not_cold() -> None:
    assert hot_prefix_count([repeat([None, None, None, 96, 192, 96])]) == 0
    assert hot_prefix_count([repeat([96, 48, None, 96, 192, 96])]) == 1
    assert hot_prefix_count([repeat([96, 192, None, 0, 0, 0]), repeat([0, 192, None, 0, 0, 0])]) == 3
