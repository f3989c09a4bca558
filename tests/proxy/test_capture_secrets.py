"""Secrets planted all over a run, at each privacy level, and looked for wherever the tap writes.

Invariant: authorization, cookies and keys appear nowhere at any level; no text of a prompt or an answer below
`full`; nothing that a redaction rule covers at `full`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import llmtap
from tests.proxy.capturing import Process
from tests.support.servers.peer import play
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Call, Script, upstream
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
# Each is unlike anything else, so that finding it means that it leaked.
KEYS = {
    "authorization": "sk-proj-Zq8vKwTr2mXy7LpNd4Hs",
    "x-api-key": "sk-ant-api03-Hh5tRw9cVb2nMk8jQz",
    "cookie": "c00kieValueGq7Zr3",
    "set-cookie": "s3tCookieValueWm8Lx",
    "query": "AIzaSyQu3ryK3yAbCdEfGhIjKlMnOpQrStUvW",
    "path": "sk-pathKey9Zx8Cv7Bn6Mq5Wp4Lr3",
    "body field": "sk-bodyKey1Aq2Sw3De4Fr5Gt6Hy7",
    "prompt key": "AKIAIOSFODNN7PLANTED",
}
PROMPT = "quokkaprompt"
ANSWER = "wombatanswer"
PRIVATE = {"email": "grace.hopper@navy.example", "card": "4111 1111 1111 1111", "phone": "+1 202 555 0143"}


def script() -> Script:
    async def play_it(call: Call) -> str | None:
        await call.body()
        text = f"{ANSWER} {PRIVATE['email']} {KEYS['prompt key']}"
        value = {"model": "m", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
        data = b"data: " + json.dumps(value).encode() + b"\n\ndata: [DONE]\n\n"
        cookie = f"Set-Cookie: s={KEYS['set-cookie']}\r\n".encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n" % len(data)
        await call.say(head + cookie + b"\r\n" + data)
        return None

    return play_it


def bodies() -> dict[str, bytes]:
    private = " ".join(f"{name} {secret}" for name, secret in PRIVATE.items())
    text = f"{PROMPT} {private} {KEYS['prompt key']}"
    messages = [{"role": "user", "content": text}]
    chat = {"model": "m", "stream": True, "messages": messages, "api_key": KEYS["body field"]}
    return {
        f"{CHAT}?key={KEYS['query']}": json.dumps(chat).encode(),
        f"/k/{KEYS['path']}{CHAT}": json.dumps(chat).encode(),
        f"{CHAT}#": f'{{"model": "m", "messages": [{{"role": "{PROMPT}", "content": "{PROMPT}'.encode(),
    }


async def run(folder: Path, *settings: str) -> dict[str, str]:
    """Everything the tap wrote or said, by place."""
    async with upstream() as gateway:
        gateway.at(CHAT, script())
        gateway.at(f"/k/{KEYS['path']}{CHAT}", script())
        gateway.at(f"{CHAT}#", script())
        process = Process(gateway.url, str(folder), "log.level=debug", *settings)
        try:
            await process.start()
            for path, body in bodies().items():
                client = await RawClient.connect(process.ports.listen)
                raw = request(
                    "POST",
                    path,
                    f"Authorization: Bearer {KEYS['authorization']}",
                    f"X-Api-Key: {KEYS['x-api-key']}",
                    f"Cookie: session={KEYS['cookie']}",
                    body=body,
                )
                await client.ask(raw)
                client.close()
            await process.ports.measured(len(bodies()))
            told = {
                place: json.dumps(await process.ports.told(place))
                for place in ("/api/v1/exchanges?events=1", "/api/v1/summary?window=all")
            }
            told["/metrics"] = await text_of(process.ports.admin, "/metrics")
            told["process list"] = command_lines(process)
            await wait_until(lambda: captured(process, len(bodies())))
            told["spool"] = "\n".join(
                p.read_bytes().decode("latin-1") for p in (folder / ".spool").iterdir() if p.is_file()
            )
            assert await process.stop() == 0
            told["log"] = process.log()
        finally:
            process.close()
    return told


async def captured(process: Process, n: int) -> bool:
    summary = await process.ports.told("/api/v1/summary?window=all")
    return bool(summary["capture"]["exchanges"] == n)


async def text_of(port: int, path: str) -> str:
    client = await RawClient.connect(port)
    try:
        return (await client.ask(request("GET", path, "Connection: close", host="localhost"))).data.decode()
    finally:
        client.close()


def command_lines(process: Process) -> str:
    pids = [process.pid, *process.children("meter"), *process.children("relay")]
    return "\n".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


def leaks(places: dict[str, str], secrets: dict[str, str]) -> list[str]:
    return [
        f"{name} in {place}" for place, text in places.items() for name, s in secrets.items() if s in text
    ]


def files_of(folder: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    rows = llmtap.read(folder).table().to_pylist()
    told = {"rows": json.dumps(rows, default=str)}
    for file in folder.glob("*.parquet"):
        told[file.name] = file.read_bytes().decode("latin-1")
    return told, rows


@dataclass(slots=True)
class Written:
    """What one run at a level wrote."""

    told: dict[str, str]
    files: dict[str, str]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    found = {}
    for level, more in (("none", ()), ("shape", ()), ("full", ('capture.full_tenants=["*"]',))):
        folder = tmp_path_factory.mktemp(level) / "capture"
        told = dict(play(run(folder, f"capture.level={level}", *more), limit_s=250))
        found[level] = Written(told, *files_of(folder))
    return found


@pytest.mark.parametrize("level", ["none", "shape"])
def test_below_full_nothing_that_was_said_is_written(written: dict[str, Written], level: str) -> None:
    told, rows = written[level].told | written[level].files, written[level].rows
    assert len(rows) == len(bodies())
    assert leaks(told, {**KEYS, **PRIVATE, "prompt": PROMPT, "answer": ANSWER}) == []
    asked = [row for row in rows if row["prompt_bytes"]]
    assert len(asked) == 2
    if level == "none":
        assert not any(row["blocks"] or row["message_roles"] for row in rows)
    else:
        assert all(row["blocks"] and row["message_roles"] == ["user"] for row in asked)


def test_at_full_what_the_rules_cover_is_not_written(written: dict[str, Written]) -> None:
    full = written["full"]
    assert leaks(full.told | full.files, {**KEYS, **PRIVATE}) == []
    assert leaks(full.told, {"prompt": PROMPT, "answer": ANSWER}) == [], "only files hold bodies"
    said = [row for row in full.rows if row["request_body"]]
    assert len(said) == 2
    for row in said:
        assert PROMPT in row["request_body"] and row["response_text"] == f"{ANSWER} [email] [key]"
        assert row["redactions"] >= 6


def test_hashes_of_two_captures_cannot_be_compared(written: dict[str, Written]) -> None:
    """The same requests were sent in both."""
    found = []
    for level in ("shape", "full"):
        rows = written[level].rows
        found.append({block for row in rows for block in row["blocks"] or ()})
        assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{6}", rows[0]["capture"])
    assert found[0] and found[1] and not found[0] & found[1]
