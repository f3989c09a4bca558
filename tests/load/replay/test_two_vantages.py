"""One replay, seen twice: by itself, and by a tap that it passes. Both tell the same of every exchange."""

import json
from pathlib import Path
from typing import Any

import llmtap
from llmtap.load.options import BodyOptions, ScheduleOptions
from llmtap.load.replay.plan import make_plan
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.load.replay import support
from tests.support.servers.live_proxy import live_proxy
from tests.support.servers.sim_engine import engine

MS = 1_000_000
N = 24
ROUNDING_US = 2
EQUAL = ("status", "outcome", "finish_reason", "input_tokens", "output_tokens", "event_class", "event_bytes")
POINTS = ("first_byte", "first_token", "first_content", "last_token", "response_end")


async def replayed(url: str, **more: Any) -> dict[str, Any]:
    plan = make_plan(ScheduleOptions(source="synthetic-skewed", requests=N, rate=40.0), chat=False)
    body = BodyOptions(endpoint="completions", temperature=0.0)
    return await support.replayed(plan, url, body=body, endpoint="completions", scrape="none", **more)


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["request_id"]: row for row in llmtap.read(folder).table().to_pylist()}


def apart(ours: dict[str, Any], tap: dict[str, Any]) -> list[str]:
    """What differs by more than both allow. A chunk reaches us between its read and the end of its send."""
    moved_us = (tap["arrival_ns"] - ours["arrival_ns"]) / 1e3
    allowed_us = ours["uncertainty_us"] + tap["uncertainty_us"] + ROUNDING_US
    added_us = max(tap["added_first_chunk_us"], tap["added_chunk_max_us"])
    pairs = [(point, ours[f"{point}_us"], tap[f"{point}_us"]) for point in POINTS]
    pairs += [("event", *both) for both in zip(ours["event_us"], tap["event_us"], strict=True)]
    wrong = [
        f"{name}: {mine - its - moved_us:.0f} us"
        for name, mine, its in pairs
        if not -allowed_us <= mine - its - moved_us <= allowed_us + added_us
    ]
    if ours["submit_us"] > tap["submit_us"] + moved_us + allowed_us:
        wrong.append("the tap sent it before us")
    return wrong + [f"{name}: {ours[name]} and {tap[name]}" for name in EQUAL if ours[name] != tap[name]]


async def test_the_replay_s_own_record_is_the_tap_s(tmp_path: Path) -> None:
    options = SimOptions(ttft=Duration(30 * MS), itl=Duration(5 * MS))
    async with engine(options) as e, live_proxy(e.url, f"capture.to={tmp_path / 'tap'}") as proxy:
        result = await replayed(f"http://127.0.0.1:{proxy.listen}", capture=str(tmp_path / "replay"))
    ours, tap = rows_of(tmp_path / "replay"), rows_of(tmp_path / "tap")
    assert len(ours) == N
    assert ours.keys() <= tap.keys()
    assert {key: wrong for key in ours if (wrong := apart(ours[key], tap[key]))} == {}
    assert result["outcomes"] == {"complete": N}
    lengths = result["lengths"]
    assert (lengths["input_told"], lengths["input_exact"], lengths["output_exact"]) == (N, N, N)
    assert result["load"]["sent"] == N
    assert json.loads(json.dumps(result)) == result
