"""`llmtap meter` as its users start it: a process on a socket of its own, whose apps are guests."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import llmtap
import llmtap.cli.meter
from llmtap.channel.frames import ACK
from llmtap.cli.main import app
from llmtap.errors import ConfigError
from tests.support.peer import play
from tests.support.relay_status import relay_status
from tests.support.served import standalone_meter
from tests.support.tap_frames import Script

LIMIT_S = 250.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name: a socket's path may not be long."""
    with tempfile.TemporaryDirectory(prefix="tap-") as name:
        yield Path(name)


async def guest(path: Path, name: str, *, running: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An app with the middleware, one exchange measured; one more under way if `running`."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    script = Script().hello(name, guest=True).status(relay_status(opened=1 + running)).stream(1)
    writer.write((script.request(2) if running else script).pack(1))
    assert await reader.readexactly(ACK.size) == ACK.pack(1)
    return reader, writer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_at_once_and_in_order_whatever_its_guests_do(folder: Path, number: signal.Signals) -> None:
    path = folder / "tap.sock"

    async def run() -> None:
        async with standalone_meter(path) as (seen, process):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == 0o600, "frames hold keys: the owner only"
            guests = [await guest(path, f"app-{i}", running=True) for i in range(3)]
            await seen.measured(3)
            assert await seen.told("/readyz") == 200
            process.send_signal(number)
            assert await asyncio.wait_for(process.wait(), 120) == 0, "guests are not waited for"
            assert not path.exists()
            for reader, writer in guests:
                assert await reader.read() == b""
                writer.close()

    play(run(), LIMIT_S)


def test_what_a_dead_meter_left_is_replaced(folder: Path) -> None:
    path = folder / "tap.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def run() -> None:
        async with standalone_meter(path) as (seen, _):
            _, writer = await guest(path, "app-1", running=False)
            await seen.measured(1)
            writer.close()

    play(run(), LIMIT_S)


def test_a_path_that_is_in_use_is_not_taken(folder: Path) -> None:
    path = folder / "tap.sock"

    async def run() -> None:
        async with standalone_meter(path) as (seen, _):
            for args in (
                ("meter", "--listen-socket", str(path), "--admin", "127.0.0.1:0"),
                ("proxy", "--upstream", "http://127.0.0.1:9", "--listen", "127.0.0.1:0", "--admin",
                 "127.0.0.1:0", "--set", f"meter.socket={path}"),
            ):  # fmt: skip
                second = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-P", "-m", "llmtap.cli", *args],
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                assert (second.returncode, second.stdout) == (2, "")
                assert f"another meter listens at {path}" in second.stderr
            _, writer = await guest(path, "app-1", running=False)
            await seen.measured(1)
            writer.close()

    play(run(), LIMIT_S)


def test_it_captures(folder: Path) -> None:
    async def run() -> None:
        to = folder / "capture"
        async with standalone_meter(folder / "tap.sock", "--capture", str(to)) as (seen, process):
            _, writer = await guest(folder / "tap.sock", "app-1", running=False)
            await seen.measured(1)
            process.terminate()
            await process.wait()
            writer.close()
        assert llmtap.read(str(to)).table()["relay"].to_pylist() == ["app-1"]

    play(run(), LIMIT_S)


def refused(*args: str) -> ConfigError:
    done: Any = CliRunner().invoke(app, ["meter", *args], env={"LLMTAP_CONFIG": None})
    assert isinstance(done.exception, ConfigError), done.output
    return done.exception


def test_what_cannot_be_is_told_before_anything_starts(folder: Path) -> None:
    file = folder / "file"
    file.touch()
    assert refused().place == "meter.socket"
    assert refused("--listen-socket", str(folder / "none/tap.sock")).place == "meter.socket"
    assert refused("--listen-socket", str(file)).problem == f"{file} is there, and is no socket"
    assert refused("--listen-socket", str(folder / ("x" * 120))).place == "meter.socket"
    path = ("--listen-socket", str(folder / "tap.sock"))
    assert refused(*path, "--set", "nonsense").place == "--set"
    arms = 'experiment.arms=[{"name": "a"}, {"name": "b", "headers": {"x-a": "b"}}]'
    experiment = refused(*path, "--set", arms, "--set", "experiment.enabled=true")
    assert experiment.place == "experiment.enabled"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = f"127.0.0.1:{taken.getsockname()[1]}"
        assert refused(*path, "--admin", admin).place == "meter.admin"
    assert not os.path.exists(folder / "tap.sock"), "nothing is left behind"


def test_a_check_starts_nothing(folder: Path) -> None:
    args = ["meter", "--listen-socket", str(folder / "tap.sock"), "--check"]
    done = CliRunner().invoke(app, args, env={"LLMTAP_CONFIG": None})
    assert (done.exit_code, done.output.startswith("ok (config ")) == (0, True), done.output
    assert not (folder / "tap.sock").exists()
