"""`llmtap proxy` as its users start it: real processes, on loopback ports of their own."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from llmtap.net.listener import keep_port
from tests.support.servers.peer import Gone
from tests.support.servers.raw_client import RawClient, request

READY_S = 120.0
"""Deadlines: they cost time only where something is broken."""
STOP_S = 60.0
ANSWER_S = 60.0

_KEPT: list[socket.socket] = []


class LiveProxy:
    """A running proxy."""

    def __init__(self, listen: int, admin: int) -> None:
        self.listen = listen
        self.admin = admin

    async def told(self, path: str) -> Any:
        """The JSON that the admin port answers, or None while it does not."""
        try:
            client = await RawClient.connect(self.admin)
        except OSError:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await client.ask(request("GET", path, "Connection: close", host="localhost"))
        except (Gone, ConnectionError, TimeoutError):
            return None
        finally:
            client.close()
        return json.loads(answer.data) if answer.status == 200 and path.startswith("/api") else answer.status

    async def measured(self, n: int, seconds: float = READY_S) -> None:
        """Until the meter has seen `n` exchanges."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            summary = await self.told("/api/v1/summary?window=all")
            if isinstance(summary, dict) and summary["n"] >= n:
                return
            assert loop.time() < end, f"fewer than {n} exchanges after {seconds} s"
            await asyncio.sleep(0.05)


@asynccontextmanager
async def live_proxy(upstream: str, *settings: str) -> AsyncIterator[LiveProxy]:
    """A proxy in front of `upstream`, ready; `settings` are KEY=VALUE. Stopped at the end."""
    running = LiveProxy(port_free(), port_free())
    args = ["--upstream", upstream, "--listen", f"127.0.0.1:{running.listen}"]
    args += ["--admin", f"127.0.0.1:{running.admin}"]
    for setting in ("log.level=warning", *settings):
        args += ["--set", setting]
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "llmtap.cli", "proxy", *args,
            env={k: v for k, v in os.environ.items() if not k.startswith("LLMTAP_")},
            stderr=said, cwd=Path(__file__).parents[3], start_new_session=True,
        )  # fmt: skip
        try:
            await _ready(running, process, said)
            yield running
        finally:
            await _stop(process)


async def _ready(running: LiveProxy, process: asyncio.subprocess.Process, said: IO[bytes]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + READY_S
    while await running.told("/readyz") != 200:
        if process.returncode is not None or loop.time() > end:
            said.seek(0)
            raise AssertionError(f"the proxy was not ready:\n{said.read().decode(errors='replace')[-2_000:]}")
        await asyncio.sleep(0.05)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def port_free() -> int:
    """A port of the loopback for a process that is yet to start; it stays kept (`keep_port`)."""
    kept = keep_port()
    _KEPT.append(kept)
    port: int = kept.getsockname()[1]
    return port
