"""A capture by a real proxy, from the clients' requests to the files.

Invariant: the files hold every exchange that was measured, with what was sent where it is exact, and within
the exchange's own uncertainty where it is measured.
"""

import asyncio
from pathlib import Path
from typing import Any

import llmtap
from tests.proxy.capturing import Load, capturing, streams
from tests.support.servers.peer import play
from tests.support.servers.upstream import upstream

CHAT = "/v1/chat/completions"
LIMIT_S = 250


def rows_of(folder: Path) -> list[dict[str, Any]]:
    table = llmtap.read(folder).table()
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


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
