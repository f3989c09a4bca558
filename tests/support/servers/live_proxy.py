"""`llmtap proxy` as its users start it: real processes, on loopback ports of their own."""

import asyncio
import atexit
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Final

from llmtap.net.listener import keep_port
from tests.support.servers.peer import Gone
from tests.support.servers.proxy import THREADED
from tests.support.servers.raw_client import RawClient, request
from tests.support.waiting import wait_until

READY_S = 120.0
"""Deadlines: they cost time only where something is broken."""
STOP_S = 60.0
ANSWER_S = 60.0

_KEPT: Final = contextlib.ExitStack()
atexit.register(_KEPT.close)


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
        """Wait until the meter has measured `n` exchanges."""

        async def enough() -> bool:
            summary = await self.told("/api/v1/summary?window=all")
            return isinstance(summary, dict) and summary["n"] >= n

        await wait_until(enough, seconds)


@asynccontextmanager
async def live_proxy(upstream: str, *settings: str, config: Path | None = None) -> AsyncIterator[LiveProxy]:
    """A proxy in front of `upstream`, ready; `settings` are KEY=VALUE. Stopped at the end."""
    running = LiveProxy(port_free(), port_free())
    args = ["--upstream", upstream, "--listen", f"127.0.0.1:{running.listen}"]
    args += ["--admin", f"127.0.0.1:{running.admin}"]
    if config is not None:
        args += ["--config", str(config)]
    thread = ("relay.thread=true",) if THREADED else ()
    for setting in ("log.level=warning", *thread, *settings):
        args += ["--set", setting]
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "llmtap.cli",
            "proxy",
            *args,
            env={k: v for k, v in os.environ.items() if not k.startswith("LLMTAP_")},
            stderr=said,
            cwd=Path(__file__).parents[3],
            start_new_session=True,
        )
        try:
            await _ready(running, process, said)
            yield running
        finally:
            await _stop(process)


async def _ready(running: LiveProxy, process: asyncio.subprocess.Process, said: IO[bytes]) -> None:
    def log() -> str:
        said.seek(0)
        return said.read().decode(errors="replace")[-2_000:]

    async def is_ready() -> bool:
        assert process.returncode is None, f"the proxy ended with {process.returncode}:\n{log()}"
        return bool(await running.told("/readyz") == 200)

    await wait_until(is_ready, READY_S, hint=log)


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
    _KEPT.enter_context(kept)
    port: int = kept.getsockname()[1]
    return port
