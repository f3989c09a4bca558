"""A proxy as its users start it, the streams through it, and what its admin port reports."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import Gone, chunk
from tests.support.servers.proxy import THREADED
from tests.support.servers.raw_client import Answer, RawClient, request
from tests.support.servers.upstream import Call, Upstream
from tests.support.waiting import wait_until

READY_S: Final = 60.0
"""A deadline: it costs time only where something is broken."""
LONG_S: Final = 120.0
"""For a check, a new program, a new meter and new relays, on a machine that is busy."""
PATIENT: Final = ("--set", "relay.drain_timeout=200s")
"""For streams that drain to their end, also on a machine that is busy."""
CLEAN: Final = {k: v for k, v in os.environ.items() if not k.startswith("LLMTAP_")} | (
    {"LLMTAP_RELAY_THREAD": "true"} if THREADED else {}
)
ROOT: Final = Path(__file__).parents[2]

HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD: Final = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
BODY: Final = WORD * 10 + DONE

STARTER: Final = """
import os, sys
fds = [int(fd) for fd in sys.argv[1].split(",")]
for i, fd in enumerate(fds):  # as systemd leaves them: 3, 4, ...
    os.dup2(fd, 100 + i)
for i in range(len(fds)):
    os.dup2(100 + i, 3 + i, inheritable=True)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Program that replaces itself with another one, which gets these sockets as from systemd."""


# ---------------------------------------------------------------- processes


def children_of(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pids: list[int]) -> None:
    """Wait until all of these processes have ended."""
    await wait_until(lambda: not any(is_alive(pid) for pid in pids), LONG_S)


class Proxy:
    """A running `llmtap proxy`."""

    def __init__(self, process: asyncio.subprocess.Process, listen: int, admin: int) -> None:
        self.process = process
        self.listen = listen
        self.admin = admin

    @property
    def pid(self) -> int:
        return self.process.pid

    def relays(self) -> list[int]:
        return [p for p in children_of(self.pid) if "llmtap.vantage.relay" in command_of(p) and is_alive(p)]

    def meters(self) -> list[int]:
        return [p for p in children_of(self.pid) if "llmtap.meter" in command_of(p) and is_alive(p)]

    def family(self) -> list[int]:
        return self.relays() + self.meters()

    async def client(self) -> RawClient:
        return await RawClient.connect(self.listen)

    async def get(self, path: str) -> bytes:
        """Send one request on its own connection; it waits while no relay accepts."""
        client = await self.client()
        try:
            answer = await asyncio.wait_for(client.get(path), READY_S)
            assert answer.status == 200
            return answer.data
        finally:
            client.close()

    async def read(self, path: str) -> bytes | None:
        """Return what the admin port answers, or None while it does not."""
        try:
            client = await RawClient.connect(self.admin)
        except OSError:
            return None
        try:
            answer = await client.ask(request("GET", path, "Connection: close", host="localhost"))
        except (Gone, ConnectionError):
            return None
        finally:
            client.close()
        return answer.data if answer.status == 200 else None

    async def ready(self) -> None:
        await wait_until(lambda: self.read("/readyz"))

    async def refuses(self) -> bool:
        """Return whether connections are refused."""
        try:
            (await self.client()).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was in the queue of a listener that closed: ask again
            pass
        return False

    async def connected(self, n: int) -> None:
        """Wait until `n` relays have reported to the meter: what they serve from now on is measured."""

        async def enough() -> bool:
            relays = (await summary(self)).get("relays", {}).values()
            return sum(r["connected"] and "opened" in r for r in relays) >= n

        await wait_until(enough)

    async def measured(self, n: int) -> None:
        """Wait until the meter has measured `n` exchanges."""

        async def enough() -> bool:
            return (await summary(self)).get("n", 0) >= n

        await wait_until(enough)

    async def ended(self, seconds: float = READY_S) -> int:
        return await asyncio.wait_for(self.process.wait(), seconds)


def write_config(file: Path, url: str, *lines: str) -> None:
    """Write a configuration: this upstream, then further lines of [relay] and other tables."""
    file.write_text("\n".join([f'[relay]\nupstream = "{url}"', *lines]) + "\n")


@asynccontextmanager
async def proxy(
    up: Upstream | None,
    *more: str,
    config: Path | None = None,
    log: Path = Path(os.devnull),
    program: Path = ROOT,
    listen: int | None = None,
    level: str | None = "warning",
    workers: int = 1,
) -> AsyncIterator[Proxy]:
    """A proxy that is ready, measures GET requests too, and is killed at the end.

    `log`: its log; `program`: where its package lies.

    `listen`: the port, where `config` names it; `level`: of the log, or None, where `config` does;
    `workers`: number of relays to wait for.
    """
    admin = port_free()
    args = ["--set", "relay.skip=[]", "--admin", f"127.0.0.1:{admin}", *more]
    if level is not None:
        args = ["--set", f"log.level={level}", *args]
    if listen is None:
        listen = port_free()
        args += ["--listen", f"127.0.0.1:{listen}"]
    if up is not None:
        args += ["--upstream", up.url, "--workers", str(workers)]
    if config is not None:
        args += ["--config", str(config)]
    with log.open("wb") as message:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "llmtap.cli",
            "proxy",
            *args,
            stderr=message,
            env=CLEAN | {"PYTHONPATH": str(program)},
            cwd=program,
        )
    running = Proxy(process, listen, admin)
    family: set[int] = set()
    try:
        await running.ready()
        await running.connected(workers)
        family.update(children_of(process.pid))
        yield running
    finally:
        family.update(children_of(process.pid))
        for pid in (process.pid, *family):
            with contextlib.suppress(ProcessLookupError):
                if pid == process.pid or "llmtap" in command_of(pid):
                    os.kill(pid, signal.SIGKILL)
        await process.wait()


# ---------------------------------------------------------------- streams


class Held:
    """Streams of ten words that wait in their middle until `go` is set."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.body()
        await call.say(HEAD, *[chunk(WORD)] * 5)
        self.begun += 1
        await self.go.wait()
        await call.say(*[chunk(WORD)] * 5, chunk(DONE), b"0\r\n\r\n")


async def streams(tap: Proxy, path: str, n: int) -> "list[asyncio.Task[Answer]]":
    """`n` streams, each on its own connection."""

    async def one() -> Answer:
        client = await tap.client()
        try:
            return await client.ask(request("POST", path, body=b'{"stream":true}'))
        finally:
            client.close()

    return [asyncio.create_task(one()) for _ in range(n)]


async def under_way(tap: Proxy, up: Upstream, n: int) -> "tuple[Held, list[asyncio.Task[Answer]]]":
    """`n` streams, all waiting in their middle."""
    held = Held()
    asking = await streams(tap, up.on(held), n)
    await wait_until(lambda: held.begun == n, READY_S)
    return held, asking


async def all_whole(asking: "list[asyncio.Task[Answer]]") -> None:
    """Wait for the streams; each has to be complete."""
    for answer in await asyncio.gather(*asking):
        assert answer.whole
        assert answer.data == BODY


# ---------------------------------------------------------------- what the meter reports


async def summary(tap: Proxy) -> dict[str, Any]:
    result = await tap.read("/api/v1/summary?window=all")
    return {} if result is None else dict(json.loads(result))


async def counters(tap: Proxy, name: str) -> dict[str, float]:
    """Return the samples of a metric: value by its labels, as written."""
    text = (await tap.read("/metrics") or b"").decode()
    return {labels: float(value) for labels, value in re.findall(rf"^{name}(\{{.*\}}) (\S+)$", text, re.M)}


def settled(result: dict[str, Any], opened: int) -> bool:
    """Return whether relays opened `opened` exchanges in all, and each is measured, dropped or lost."""
    relays = result.get("relays", {}).values()
    return (
        sum(r.get("opened", 0) for r in relays) == opened
        and all("opened" in r for r in relays)
        and all(r["opened"] == r["measured"] + sum(r["dropped"].values()) + r["lost"] for r in relays)
    )


async def accounted(tap: Proxy, opened: int) -> dict[str, Any]:
    """Wait until all `opened` exchanges are settled; return the summary."""

    async def all_settled() -> dict[str, Any] | None:
        found = await summary(tap)
        return found if settled(found, opened) else None

    return await wait_until(all_settled)


async def restarted(tap: Proxy, before: list[int]) -> None:
    """Wait until relays that are not in `before` are ready, and known to a meter."""

    async def there() -> bool:
        if not set(tap.relays()) - set(before):
            return False
        result = (await summary(tap)).get("relays", {})
        fresh = {r["pid"] for r in result.values() if r["connected"] and "opened" in r} - set(before)
        return bool(fresh & set(tap.relays()))

    await wait_until(there, LONG_S)


async def replaced(pids: Callable[[], list[int]], before: list[int], n: int = 1) -> None:
    """Wait until the processes that `pids` lists are `n` others."""
    await wait_until(lambda: len(pids()) == n and not set(pids()) & set(before), LONG_S)
