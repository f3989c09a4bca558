"""A proxy that captures and of which any process may be killed, and a load that notes what it saw."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.servers.live_proxy import ANSWER_S, READY_S, LiveProxy, port_free
from tests.support.servers.peer import Gone
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Call, Script
from tests.support.waiting import wait_until


def chat_body(text: str = "hello", **more: object) -> bytes:
    """A chat request."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "stream": True, "messages": messages, **more}).encode()


def streams(tokens: int = 5, gap_s: float = 0.02) -> Script:
    """An event stream of so many tokens, one every `gap_s`."""

    async def script(call: Call) -> str | None:
        await call.body()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        await call.say(head)
        for i in range(tokens):
            await asyncio.sleep(gap_s)
            choice = b'{"index":0,"delta":{"content":"word%d "},"finish_reason":null}' % i
            await call.say(_chunk(b'data: {"model":"m","choices":[%s]}\n\n' % choice))
        stop = b'data: {"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        await call.say(_chunk(stop), _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return None

    return script


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(slots=True)
class Asked:
    """One request as its client saw it; monotonic seconds."""

    id: str
    began: float
    ended: float
    whole: bool


@dataclass(slots=True)
class Load:
    """Clients that ask again and again, each after its own answer, until they are told to stop."""

    port: int
    prefix: str
    asked: list[Asked] = field(default_factory=list)
    stopping: bool = False
    running: int = 0
    """Clients that have not ended."""
    begun: int = 0
    """Requests, numbered from 1."""

    async def client(self) -> None:
        self.running += 1
        try:
            await self._ask_on_and_on()
        finally:
            self.running -= 1

    async def _ask_on_and_on(self) -> None:
        connection: RawClient | None = None
        while not self.stopping:
            self.begun += 1
            asked = Asked(f"{self.prefix}-{self.begun}", time.monotonic(), 0.0, False)
            raw = request("POST", "/v1/chat/completions", f"X-Request-Id: {asked.id}", body=chat_body())
            try:
                if connection is None:
                    connection = await RawClient.connect(self.port)
                async with asyncio.timeout(ANSWER_S):
                    answer = await connection.ask(raw)
                asked.whole = answer.whole and answer.status == 200
            except (Gone, OSError, TimeoutError):
                if connection is not None:
                    connection.close()
                connection = None
                await asyncio.sleep(0.02)
            asked.ended = time.monotonic()
            self.asked.append(asked)
        if connection is not None:
            connection.close()


class Process:
    """`llmtap proxy` with a capture."""

    def __init__(self, upstream: str, capture: str, *settings: str) -> None:
        self.ports = LiveProxy(port_free(), port_free())
        self._args = ["--upstream", upstream, "--listen", f"127.0.0.1:{self.ports.listen}"]
        self._args += ["--admin", f"127.0.0.1:{self.ports.admin}", "--capture", capture]
        for setting in ("log.level=info", *settings):
            self._args += ["--set", setting]
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the object
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """The supervisor is there."""
        return self._process is not None and self._process.returncode is None

    async def start(self, relays: int = 1) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "llmtap.cli",
            "proxy",
            *self._args,
            env={k: v for k, v in os.environ.items() if not k.startswith("LLMTAP_")},
            stderr=self.said,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        await self.ready(relays)

    async def ready(self, relays: int = 1) -> None:
        """Until the meter says that so many relays speak to it."""

        async def connected() -> bool:
            assert self.running, self.log()
            summary = await self.ports.told("/api/v1/summary")
            if not isinstance(summary, dict):
                return False
            return sum(r["connected"] and "opened" in r for r in summary["relays"].values()) >= relays

        await wait_until(connected, READY_S, hint=self.log)

    def children(self, role: str) -> list[int]:
        """Pids of the processes of a role: `meter` or `relay`."""
        found: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                children = (task / "children").read_text().split()
                found += [int(child) for child in children if _is_of(role, child)]
        return found

    def kill(self, role: str) -> list[int]:
        """SIGKILL the meter, the first relay, or the supervisor; and which pid that was."""
        pids = [self.pid] if role == "supervisor" else self.children(role)[:1]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    async def without(self, pids: list[int]) -> None:
        """Until the meter does not count on these relays any more."""

        async def disconnected() -> bool:
            summary = await self.ports.told("/api/v1/summary")
            relays = summary["relays"].values() if isinstance(summary, dict) else ()
            return bool(relays) and not any(r["connected"] and r["pid"] in pids for r in relays)

        await wait_until(disconnected, READY_S, hint=self.log)

    async def gone(self) -> None:
        """Until the supervisor has ended."""
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> int:
        """SIGTERM, and its exit status."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(READY_S):
            return await self._process.wait()

    def log(self) -> str:
        """The end of what it said."""
        if self.said.closed:
            return ""
        self.said.seek(0)
        return self.said.read().decode(errors="replace")[-8_000:]

    def close(self) -> None:
        """Nothing of it is left behind, whatever the test did."""
        self.said.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _is_of(role: str, pid: str) -> bool:
    try:
        return f".{role}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
