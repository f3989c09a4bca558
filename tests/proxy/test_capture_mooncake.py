"""Prefix sharing survives: a Mooncake trace as real prompts, through the tap at the level `shape`, and back.

Invariant: exported block ids make the same tree as the trace's own, id for id once both are numbered in order
of first use; no text is needed for it.
"""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.proxy.capturing import capturing
from tests.support.data import TRACES
from tests.support.servers.peer import play
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Call, upstream

TRACE = TRACES / "mooncake" / "conversation_trace.rows_1_8000.jsonl.gz"

CHAT = "/v1/chat/completions"
ROWS = 250
BLOCK = 2_048


def rows_of_trace() -> list[dict[str, Any]]:
    with gzip.open(TRACE, "rt") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(ROWS), strict=False)]


def text_of(block: int) -> str:
    """2 KiB that stand for one block, the same whenever it comes."""
    return random.Random(block).randbytes(BLOCK // 2).hex()


def renumbered(lists: list[list[int]]) -> list[list[int]]:
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(block, len(numbers)) for block in blocks] for blocks in lists]


async def answer(call: Call, rows: list[dict[str, Any]]) -> str | None:
    row = rows[int(call.head.get("x-request-id") or b"0")]
    await call.body()
    usage = {"prompt_tokens": row["input_length"], "completion_tokens": row["output_length"]}
    message = {"role": "assistant", "content": "ok"}
    body = json.dumps({"model": "m", "choices": [{"index": 0, "message": message}], "usage": usage}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    await call.say(head + body)
    return None


async def capture(folder: Path, rows: list[dict[str, Any]]) -> None:
    async with upstream() as gateway:
        gateway.at(CHAT, lambda call: answer(call, rows))
        async with capturing(gateway.url, str(folder)) as proxy:
            client = await RawClient.connect(proxy.ports.listen)
            for number, row in enumerate(rows):
                text = "".join(map(text_of, row["hash_ids"]))
                body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
                asked = request("POST", CHAT, f"X-Request-Id: {number}", body=body)
                assert (await client.ask(asked)).status == 200
            client.close()
            await proxy.ports.measured(ROWS)


def test_an_export_has_the_tree_of_the_trace(tmp_path: Path) -> None:
    rows = rows_of_trace()
    play(capture(tmp_path / "capture", rows), limit_s=250)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-P", "-m", "llmtap.cli", "convert", str(tmp_path / "capture"), str(out)]
    done = subprocess.run(
        [*command, "--to", "mooncake", "--json"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    exported = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(exported) == ROWS
    assert [row["hash_ids"] for row in exported] == renumbered([row["hash_ids"] for row in rows])
    for name in ("input_length", "output_length"):
        assert [row[name] for row in exported] == [row[name] for row in rows]
    stamps = [row["timestamp"] for row in exported]
    assert stamps[0] == 0 and stamps == sorted(stamps)
