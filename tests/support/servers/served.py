"""Apps under uvicorn and meters on their own, as real processes on loopback; ended by their ids."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.servers.live_proxy import READY_S, STOP_S, LiveProxy, port_free
from tests.support.waiting import wait_until

HOUSE = Path(__file__).parents[3]


@asynccontextmanager
async def process(*argv: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process of ours: `python -P -m ARGV`. Its last words are shown when the block fails."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LLMTAP_")}
    with tempfile.TemporaryFile() as said:
        running = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            *argv,
            env={**env, "PYTHONPATH": str(HOUSE), **environ},
            stdout=said,
            stderr=said,
            cwd=HOUSE,
        )
        try:
            yield running
        except BaseException:
            said.seek(0)
            print(said.read().decode(errors="replace")[-4_000:])
            raise
        finally:
            if running.returncode is None:
                running.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await running.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    running.kill()
                await running.wait()


async def answers(seen: LiveProxy, path: str, running: asyncio.subprocess.Process) -> None:
    """Wait until a process answers 200 at a path."""

    async def answered() -> bool:
        assert running.returncode is None, f"it ended with {running.returncode}"
        return bool(await seen.told(path) == 200)

    await wait_until(answered, READY_S)


@asynccontextmanager
async def served(app: str, health: str = "/health", **environ: str) -> AsyncIterator[int]:
    """An ASGI app under uvicorn; gives its port. Ended in order, so its lifespan ends, too."""
    port = port_free()
    argv = ["uvicorn", app, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    async with process(*argv, "--timeout-graceful-shutdown", "2", **environ) as running:
        await answers(LiveProxy(port, port), health, running)
        yield port


@asynccontextmanager
async def standalone_meter(
    path: Path | str, *args: str
) -> AsyncIterator[tuple[LiveProxy, asyncio.subprocess.Process]]:
    """`llmtap meter` at this socket; its admin port answers."""
    admin = port_free()
    argv = ["llmtap.cli", "meter", "--listen-socket", str(path), "--admin", f"127.0.0.1:{admin}"]
    async with process(*argv, "--set", "log.level=warning", *args) as running:
        seen: Any = LiveProxy(admin, admin)
        await answers(seen, "/healthz", running)
        yield seen, running
