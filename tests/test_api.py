"""The Python API: replays, comparisons and simulations as typed results."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

import llmtap
from llmtap.capture.schema import SCHEMA
from llmtap.errors import ConfigError
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.support.results.replay_results import replay_result
from tests.support.servers.sim_engine import engine


def replayed(times: int = 1, **options: Any) -> list[llmtap.ReplayResult]:
    async def run() -> list[llmtap.ReplayResult]:
        async with engine(SimOptions(ttft=Duration(5_000_000), itl=Duration(1_000_000))) as server:
            return [
                await asyncio.to_thread(
                    llmtap.replay, "conversation", server.url, rate=50, requests=20, slo="ttft:10s", **options
                )
                for _ in range(times)
            ]

    return asyncio.run(run())


def test_a_replay_returns_its_figures_and_a_row_for_each_request(tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    (result,) = replayed(capture=capture)
    assert result.requests.num_rows == 20
    assert result.requests.schema.names == SCHEMA.names
    assert result["attainment"].value == 1
    assert result["ttft_p50"].value == result.json["metrics"]["ttft"]["p50"]
    assert result["ttft_p50"].n == 20
    judged = result.require("requests>=20 error_rate<=0%", "refusal_rate>=1")
    assert [one.state for one in judged] == ["met", "met", "missed"]
    assert result.verdict == result.json["verdict"]["says"]
    assert pq.read_table(capture).num_rows == 20, "a capture is one dataset"


def test_two_replays_are_compared() -> None:
    first, second = replayed(2)
    found = llmtap.compare(first, second, labels=["before", "after"], fail_if_worse="all")
    assert found.same_load
    changes = {change.figure: change for change in found.changes}
    assert changes["ttft_p50"].of == "after"
    assert changes["ttft_p50"].a == first["ttft_p50"].value
    assert {one.figure for one in found.judged} >= {"error_rate", "attainment"}
    assert {one.figure for one in found.worse} <= {one.figure for one in found.judged}
    with pytest.raises(ConfigError, match=r"for each of 2 results, got \['a', 'a'\]"):
        llmtap.compare(first, second, labels=["a", "a"])


def test_tolerances_are_one_text_or_several() -> None:
    results = replay_result(400), replay_result(400)
    several = ["ttft_p50:5%", "e2e_p50:10%"]
    for given in (several, tuple(several), iter(several), " ".join(several)):
        judged = llmtap.compare(*results, fail_if_worse=given).judged
        assert {one.figure: one.tolerance for one in judged} == {"ttft_p50": 0.05, "e2e_p50": 0.1}
    with pytest.raises(ConfigError, match="fail_if_worse: expected FIGURE:PERCENT, got 'ttft'"):
        llmtap.compare(*results, fail_if_worse=["ttft"])


def test_a_result_with_a_wrong_type_is_named_with_its_field(tmp_path: Path) -> None:
    good, wrong = replay_result(20), replay_result(20)
    wrong["load"]["achieved_rps"] = "13"
    file = tmp_path / "wrong.json"
    file.write_bytes(msgspec.json.encode(wrong))
    for result, place in ((file, str(file)), (wrong, "result 2")):
        with pytest.raises(ConfigError) as caught:
            llmtap.compare(good, result)
        assert caught.value.place == place
        assert "$.load.achieved_rps" in caught.value.problem


def test_a_replay_runs_also_in_a_running_loop() -> None:
    async def run() -> None:
        async with engine(SimOptions(ttft=Duration(0), itl=Duration(1_000_000))) as server:
            url = server.url
            await asyncio.to_thread(asyncio.run, notebook(url))

    async def notebook(url: str) -> None:
        assert llmtap.replay("conversation", url, rate=50, requests=3)["requests"].value == 3

    asyncio.run(run())


def test_runs_are_simulated_in_the_order_of_the_sweep() -> None:
    runs = llmtap.simulate("chat", ["continuous_batching", "static_fifo"], scale=[1, 10], requests=20)
    assert [(run.json["scheduler"], run.json["scale"]) for run in runs] == [
        ("continuous_batching", 1),
        ("static_fifo", 1),
        ("continuous_batching", 10),
        ("static_fifo", 10),
    ]
    assert runs[0]["requests"].value == 20
    assert len(runs) == 4


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        llmtap.replay("chat", "http://127.0.0.1:9", endpoint="chats")
    with pytest.raises(TypeError, match="'colour'"):
        llmtap.replay("chat", "http://127.0.0.1:9", colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'colour'"):
        llmtap.simulate("chat", colour="red")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="two results"):
        llmtap.compare({})
    with pytest.raises(ConfigError, match="--scheduler"):
        llmtap.simulate("chat", "nothing")


def test_tables_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    runs = llmtap.simulate("chat", requests=20, scale=[1, 2])
    assert len(runs.to_pandas()) == 2
    (result,) = replayed()
    assert list(result.to_pandas().columns) == SCHEMA.names
    changes = llmtap.compare(result, result.json, labels="ab").to_pandas()
    assert isinstance(changes, pandas.DataFrame)
    assert list(changes.columns) == list(llmtap.Change.__struct_fields__)
