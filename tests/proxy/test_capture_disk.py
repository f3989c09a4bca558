"""What disks do to a capture, and a capture never to the traffic: full, read-only, gone.

Invariant: every client gets its whole answer; every exchange is in a file or counted; no file is unreadable.
"""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import llmtap
from tests.proxy.capturing import Load, Process, streams
from tests.support.servers.live_proxy import READY_S
from tests.support.servers.peer import play, wait_until
from tests.support.servers.upstream import upstream

CHAT = "/v1/chat/completions"
LIMIT_S = 500
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """8 MiB of tmpfs."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True)
    if made.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {made.stderr.decode().strip()}")
    yield place
    unmount(place)


def unmount(place: Path) -> None:
    """Once nobody has a file there: who was killed takes a moment to go."""
    end = time.monotonic() + READY_S
    while (done := subprocess.run(["umount", place], capture_output=True)).returncode:
        assert time.monotonic() < end, done.stderr
        time.sleep(0.1)


@asynccontextmanager
async def under_load(folder: Path, *settings: str) -> AsyncIterator[tuple[Process, Load]]:
    """A capturing proxy with clients that never stop asking, until the end."""
    async with upstream() as gateway:
        gateway.at(CHAT, streams(tokens=3, gap_s=0.005))
        process = Process(gateway.url, str(folder), "capture.rotate_every=1s", *settings)
        try:
            await process.start()
            load = Load(process.ports.listen, "d")
            clients = [asyncio.create_task(load.client()) for _ in range(8)]
            yield process, load
            load.stopping = True
            await asyncio.gather(*clients)
            await process.ports.measured(len(load.asked))
        finally:
            if process.running:
                with contextlib.suppress(TimeoutError):
                    await process.stop()
            process.close()


async def told(process: Process) -> dict[str, Any]:
    summary = await process.ports.told("/api/v1/summary?window=all")
    found: dict[str, Any] = summary["capture"] if isinstance(summary, dict) else {}
    return found


async def until(process: Process, seconds: float = READY_S, **wanted: object) -> dict[str, Any]:
    """Until the capture says so of itself."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        capture = await told(process)
        if capture and all(capture[name] == value for name, value in wanted.items()):
            return capture
        assert asyncio.get_running_loop().time() < end, f"{capture} {process.log()}"
        await asyncio.sleep(0.1)


async def dropped(process: Process) -> None:
    end = asyncio.get_running_loop().time() + READY_S
    while "disk_full" not in (await told(process)).get("dropped", {}):
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.1)


def check(folder: Path, load: Load, capture: dict[str, Any]) -> None:
    assert all(a.whole for a in load.asked), "traffic was touched"
    rows = llmtap.read(folder).table(columns=["request_id"])["request_id"].to_pylist()
    assert len(rows) == len(set(rows))
    assert len(rows) + sum(capture["dropped"].values()) == len(load.asked)


def test_a_disk_that_fills_pauses_the_capture_and_nothing_else(small_disk: Path) -> None:
    folder = small_disk / "capture"

    async def run() -> tuple[Load, dict[str, Any]]:
        settings = ("capture.memory_bytes=1MiB", "capture.rotate_bytes=256KiB", "capture.total_bytes=1GiB")
        async with under_load(folder, *settings) as (process, load):
            await wait_until(lambda: any(folder.glob("*.parquet")))
            fill(small_disk / "filler")
            await until(process, problem="disk_full")
            await dropped(process)
            (small_disk / "filler").unlink()
            kept = (await until(process, problem=None))["exchanges"]
            while (await told(process)).get("exchanges", 0) <= kept:  # or it did not go on
                await asyncio.sleep(0.1)
            load.stopping = True
            await wait_until(lambda: not load.running)
            await process.ports.measured(len(load.asked))
            capture = await until(process, waiting=0)
        return load, capture

    load, capture = play(run(), limit_s=LIMIT_S)
    # A writer that was starved before it met the full disk drops for want of memory; both are counted below.
    assert {"disk_full"} <= set(capture["dropped"]) <= {"disk_full", "memory"}
    check(folder, load, capture)


def fill(file: Path) -> None:
    with file.open("wb") as out, contextlib.suppress(OSError):
        while True:
            out.write(bytes(64 << 10))
            out.flush()


def test_a_folder_that_goes_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "capture"

    async def run() -> Load:
        async with under_load(folder) as (process, load):
            await wait_until(lambda: any(folder.glob("*.parquet")))
            folder.rename(tmp_path / "taken away")
            await wait_until(lambda: any(folder.glob("*.parquet")))
            before = {a.id for a in load.asked} | {f"{load.prefix}-{n}" for n in range(load.begun + 1)}
            await wait_until(lambda: len(load.asked) > len(before) + 100)
            load.stopping = True
            await wait_until(lambda: not load.running)
            await process.ports.measured(len(load.asked))
            await until(process, waiting=0, problem=None)
            load.asked[:] = [a for a in load.asked if a.id not in before]
        return load

    load = play(run(), limit_s=LIMIT_S)
    rows = llmtap.read(folder).table(columns=["request_id"])["request_id"].to_pylist()
    # What was on its way into the folder when it went may be lost with it; afterwards nothing is.
    assert all(a.whole for a in load.asked), "traffic was touched"
    assert len(load.asked) >= 100
    assert {a.id for a in load.asked} <= set(rows)
