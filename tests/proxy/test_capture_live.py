"""A capture by a real proxy, from the clients' requests to the files.

Invariant: the files hold every exchange that was measured, with what was sent where it is exact, and within
the exchange's own uncertainty where it is measured.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import llmtap
from tests.proxy.capturing import Load, capturing, chat_body, streams
from tests.support.servers.peer import play
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import upstream

CHAT = "/v1/chat/completions"
LIMIT_S = 250


def rows_of(folder: Path) -> list[dict[str, Any]]:
    table = llmtap.read(folder).table()
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


async def ask(port: int, *fields: str, body: bytes) -> int:
    client = await RawClient.connect(port)
    try:
        return (await client.ask(request("POST", CHAT, *fields, body=body))).status
    finally:
        client.close()


def test_what_passes_is_in_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "capture"

    async def run() -> list[Any]:
        async with upstream() as gateway:
            gateway.at(CHAT, streams(tokens=4))
            async with capturing(gateway.url, str(folder), "relay.workers=2") as proxy:
                load = Load(proxy.ports.listen, "a")
                clients = [asyncio.create_task(load.client()) for _ in range(4)]
                await asyncio.sleep(1)
                load.stopping = True
                await asyncio.gather(*clients)
                await proxy.ports.measured(len(load.asked))
                summary = await proxy.ports.told("/api/v1/summary?window=all")
                assert summary["capture"]["dropped"] == {}
        return load.asked

    asked = play(run(), limit_s=LIMIT_S)
    assert len(asked) > 20 and all(a.whole for a in asked)
    rows = rows_of(folder)
    assert sorted(row["request_id"] for row in rows) == sorted(a.id for a in asked)
    for row in rows:
        assert (row["outcome"], row["status"], row["model"], row["stream"]) == ("complete", 200, "m", True)
        assert (row["endpoint"], row["level"], row["message_roles"]) == (
            "chat.completions",
            "shape",
            ["user"],
        )
        assert len(row["blocks"]) == 1 and row["message_bytes"] == [5]
        assert len(row["event_us"]) == len(row["event_class"]) == 6
        assert row["event_class"][:4] == ["content"] * 4 and row["event_class"][5] == "done"
        assert row["event_us"] == sorted(row["event_us"])
        assert row["request_body"] is None and row["response_text"] is None
    assert [p.name for p in folder.iterdir() if p.suffix != ".parquet"] == [".spool"]
    assert not list((folder / ".spool").glob("*.spool")), "a spool is left"


def test_turns_of_a_conversation_are_linked(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two and two?"}]
    second = [*first, {"role": "assistant", "content": "four"}, {"role": "user", "content": "and three?"}]
    result = [
        *second,
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "7"},
    ]

    asked: list[tuple[float, float]] = []

    async def run() -> None:
        async with upstream() as gateway:
            gateway.at(CHAT, streams(tokens=2))
            async with capturing(gateway.url, str(folder)) as proxy:
                for messages in (first, second, result):
                    body = json.dumps({"model": "m", "stream": True, "messages": messages}).encode()
                    began = time.monotonic()
                    assert await ask(proxy.ports.listen, body=body) == 200
                    asked.append((began, time.monotonic()))
                    await asyncio.sleep(0.2)
                for _ in range(2):
                    body = chat_body("elsewhere")
                    assert await ask(proxy.ports.listen, "X-Session-Id: chat-7", body=body) == 200

    play(run(), limit_s=LIMIT_S)
    rows = sorted(rows_of(folder), key=lambda row: row["seq"])
    chain, named = rows[:3], rows[3:]
    assert [row["turn"] for row in chain] == [0, 1, 2] and len({row["session"] for row in chain}) == 1
    assert [row["parent"] for row in chain] == [None, chain[0]["id"], chain[1]["id"]]
    assert [row["turn_by"] for row in chain] == ["human", "human", "tool"]
    assert chain[0]["think_us"] is None
    for row, (began, ended), (began_next, ended_next) in zip(chain[1:], asked, asked[1:], strict=False):
        # From the end of one answer to the next request, both between what their client did.
        assert (began_next - ended) * 1e6 - 1_000 <= row["think_us"] <= (ended_next - began) * 1e6
    assert [row["session_source"] for row in chain][1:] == ["prefix"] * 2
    assert [row["session_source"] for row in named] == ["explicit"] * 2
    assert len({row["session"] for row in named}) == 1 and "chat-7" not in named[0]["session"]
    assert [row["turn"] for row in named] == [0, 1]


def test_bodies_are_kept_of_whom_it_was_agreed_with_only(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    rule = '[{"header": "x-team"}]'

    async def run() -> None:
        async with upstream() as gateway:
            gateway.at(CHAT, streams(tokens=3))
            settings = ("capture.level=full", 'capture.full_tenants=["gold*"]', f"tenants.rules={rule}")
            async with capturing(gateway.url, str(folder), *settings) as proxy:
                for team in ("golden", "silver"):
                    body = chat_body("write to ada@example.org", user="u")
                    assert await ask(proxy.ports.listen, f"X-Team: {team}", body=body) == 200

    play(run(), limit_s=LIMIT_S)
    rows = {row["tenant"]: row for row in rows_of(folder)}
    assert rows["silver"]["level"] == "shape" and rows["silver"]["request_body"] is None
    assert rows["silver"]["response_text"] is None
    kept = rows["golden"]
    assert kept["level"] == "full" and kept["response_text"] == "word0 word1 word2 "
    assert json.loads(kept["request_body"])["messages"][0]["content"] == "write to [email]"
    assert kept["redactions"] == 1
