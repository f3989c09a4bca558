"""An app under uvicorn with the tap in it, a proxy before it, and one meter for both.

Each exchange is then measured twice, at the proxy and at the app's edge, and the two accounts have to agree
in all that is no time.
"""

import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.servers.live_proxy import READY_S, LiveProxy, live_proxy
from tests.support.servers.peer import play
from tests.support.servers.served import HOUSE, served, standalone_meter
from tests.support.waiting import wait_until

SAME = (
    "tenant",
    "model",
    "endpoint",
    "dialect",
    "method",
    "path",
    "request_id",
    "status",
    "stream",
    "outcome",
    "tokens",
    "finish_reason",
    "refusal",
    "guardrail",
    "retries",
    "no_token_reason",
    "usage",
    "server_timing",
)
CHAT_APP = "tests.vantage.middleware.chat_app:app"

Exchange = dict[str, Any]


def ask(name: str, key: str = "sk-a", **more: Any) -> dict[str, Any]:
    """A request by name: its key, and its body."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **more}
    return {"name": name, "key": key, "body": body}


ASKS = [
    ask("stream", stream=True),
    ask("plain"),
    ask("refused", how="refuse"),
    ask("broken", stream=True, how="break"),
    ask("other-tenant", "sk-b", stream=True),
    ask("raised", how="raise"),
]
"""The last one ends with uvicorn closing a connection that it has just promised to keep: a race for whoever
sends on it next, and no business of ours."""
OUTCOMES = {
    "stream": "complete",
    "plain": "complete",
    "refused": "upstream_error",
    "raised": "upstream_error",
    "broken": "truncated",
    "other-tenant": "complete",
    "left": "client_cancelled",
}


@pytest.fixture
def path() -> Iterator[str]:
    """Where a meter listens and the app's middleware looks for it; short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:
        yield f"{folder}/tap.sock"


async def send(session: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> bytes:
    headers = {"Authorization": f"Bearer {asked['key']}", "X-Request-Id": asked["name"]}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=asked["body"], headers=headers) as answer:
            return await answer.read()
    except aiohttp.ClientError:
        return b""  # cut short, where that was asked for


async def leave_midway(session: aiohttp.ClientSession, url: str) -> None:
    body = ask("left", stream=True, how="for ever")["body"]
    headers = {"X-Request-Id": "left"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.content.readuntil(b"\n\n")
        answer.close()


async def chats(seen: LiveProxy, n: int) -> list[Exchange]:
    """The chat exchanges, once there are `n`; looks at health are others."""

    async def all_of_them() -> list[Exchange]:
        told = await seen.told("/api/v1/exchanges?limit=1000&events=1&endpoint=chat.completions")
        found: list[Exchange] = told["exchanges"] if told else []
        return found if len(found) >= n else []

    found: list[Exchange] = await wait_until(all_of_them, READY_S)
    assert len(found) == n
    return found


async def guests(seen: LiveProxy, n: int) -> dict[str, Any]:
    """The apps that speak to a meter, once there are `n` and each has told its counts."""

    async def connected() -> dict[str, Any]:
        relays = (await seen.told("/api/v1/summary?window=all") or {"relays": {}})["relays"]
        apps = {k: r for k, r in relays.items() if k.startswith("app-") and r["connected"] and "opened" in r}
        return apps if len(apps) >= n else {}

    apps: dict[str, Any] = await wait_until(connected, READY_S)
    return apps


# ---------------------------------------------------------------- beside the proxy's account


def in_two(found: list[Exchange]) -> list[tuple[Exchange, Exchange]]:
    """The proxy's account of each exchange, and the middleware's."""
    at_app = {x["request_id"]: x for x in found if x["relay"].startswith("app-")}
    at_proxy = {x["request_id"]: x for x in found if not x["relay"].startswith("app-")}
    assert set(at_app) == set(at_proxy)
    return [(x, at_app[name]) for name, x in at_proxy.items()]


def agree(at_proxy: Exchange, at_app: Exchange) -> None:
    """In all that is no time."""
    name = at_proxy["request_id"]
    same = set(SAME)
    if name == "left":
        same -= {"tokens"}  # how many had passed when the client's leaving was noticed, here and there
    if name == "raised":
        same -= {"dialect"}  # the framework's own answer may pass outside of the middleware
    differ = {key: (at_proxy[key], at_app[key]) for key in same if at_proxy[key] != at_app[key]}
    assert not differ, f"{name}: {differ}"
    if name == "raised":
        return
    reached, reached_too = (
        {k for k, v in x["timeline"].items() if v is not None} for x in (at_proxy, at_app)
    )
    assert reached == reached_too, name
    if name != "left":
        bare, bare_too = (
            [(e["class"], e["bytes"], e["tokens"]) for e in x["events"]] for x in (at_proxy, at_app)
        )
        assert bare == bare_too, name
    # Of times only that they are there: on a busy machine a relay may be held up after its send, stamp its
    # submit late, and have next to no TTFT, and events may come to it in one read.
    for metric, point in (("ttft", "first_content"), ("e2e", "response_end")):
        found = at_app["metrics"][metric]
        assert (found is not None and found > 0) == (point in reached_too), f"{name}: {metric}"


@asynccontextmanager
async def joint_proxy(port: int, path: str) -> AsyncIterator[LiveProxy]:
    """A proxy whose meter listens where the app's middleware looks for it, and has found it."""
    settings = (f"meter.socket={path}", 'tenants.rules=[{"api_key": true}]')
    async with live_proxy(f"http://127.0.0.1:{port}", *settings) as proxy:
        await guests(proxy, 1)
        yield proxy


async def compare(app: AbstractAsyncContextManager[int], path: str) -> None:
    """One app's exchanges through a proxy, told twice."""
    async with app as port, joint_proxy(port, path) as proxy, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{proxy.listen}"
        await leave_midway(session, url)
        for asked in ASKS:
            await send(session, url, asked)
        pairs = in_two(await chats(proxy, 2 * (len(ASKS) + 1)))
        for at_proxy, at_app in pairs:
            agree(at_proxy, at_app)
        by_name = {x["request_id"]: x for _, x in pairs}
        assert {name: x["outcome"] for name, x in by_name.items()} == OUTCOMES
        assert by_name["stream"]["tokens"]["output"] == 6
        assert by_name["stream"]["tenant"].startswith("key-")
        assert by_name["stream"]["tenant"] != by_name["other-tenant"]["tenant"]


def test_a_fastapi_app_and_the_proxy_before_it_give_the_same_account(path: str) -> None:
    play(compare(served(CHAT_APP, LLMTAP_TEST_SOCKET=path), path))


# ---------------------------------------------------------------- a meter on its own


PAGE = HOUSE / "docs" / "howto" / "middleware.md"


async def test_the_example_of_the_documentation_works(tmp_path: Path, path: str) -> None:
    (example,) = re.findall(r"```python title=\"app.py\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "/run/llmtap/tap.sock" in example
    (tmp_path / "shown_in_readme.py").write_text(example.replace("/run/llmtap/tap.sock", path))
    async with (
        standalone_meter(path) as (seen, _),
        served("shown_in_readme:app", "/docs", PYTHONPATH=f"{HOUSE}:{tmp_path}") as port,
        aiohttp.ClientSession() as session,
    ):
        await guests(seen, 1)
        assert await send(session, f"http://127.0.0.1:{port}", ask("nobody"))
        (x,) = await chats(seen, 1)
        assert (x["status"], x["request_id"]) == (404, "nobody")
