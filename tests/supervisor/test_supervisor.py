"""A proxy that starts, drains, reloads and ends: the signals of its users."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.supervisor.own_program import OwnProgram
from tests.supervisor.running import (
    CLEAN,
    LONG_S,
    READY_S,
    ROOT,
    all_whole,
    gone,
    proxy,
    replaced,
    under_way,
    write_config,
)
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import wait_until
from tests.support.servers.upstream import answers, upstream


async def test_sigterm_twice_means_now() -> None:
    async with upstream() as up, proxy(up, "--set", "relay.drain_timeout=1h") as tap:
        await under_way(tap, up, 1)
        idle = await tap.client()
        assert (await idle.get(up.on(answers()))).status == 200
        os.kill(tap.pid, signal.SIGTERM)
        await idle.to_end()  # the first signal has been handled: two at once would be one
        assert tap.process.returncode is None
        os.kill(tap.pid, signal.SIGTERM)
        await tap.ended()


@pytest.mark.parametrize("change", [signal.SIGHUP, signal.SIGUSR2], ids=["reload", "upgrade"])
async def test_the_upstream_changes_without_a_failed_request(tmp_path: Path, change: signal.Signals) -> None:
    """Half of the clients keep their connection until a response says `Connection: close`."""
    file = tmp_path / "llmtap.toml"
    async with upstream() as old, upstream() as new:
        path = old.on(answers(b"old"))
        assert new.on(answers(b"new")) == path
        write_config(file, old.url, 'drain_timeout = "200s"')
        async with proxy(None, config=file) as tap:
            stop = asyncio.Event()
            seen: list[bytes] = []

            async def ask_on_and_on(keep: bool) -> None:
                client = await tap.client()
                while not stop.is_set():
                    answer = await client.get(path)
                    assert answer.status == 200, answer.data
                    seen.append(answer.data)
                    if not keep or answer.head.get("connection") == b"close":
                        client.close()
                        client = await tap.client()
                    await asyncio.sleep(0.01)
                client.close()

            load = [asyncio.ensure_future(ask_on_and_on(i % 2 == 0)) for i in range(6)]
            held, asking = await under_way(tap, old, 1)
            await wait_until(lambda: len(seen) > 50)
            before = tap.relays()
            write_config(file, new.url, 'drain_timeout = "200s"')
            os.kill(tap.pid, change)
            await wait_until(lambda: b"new" in seen, READY_S)
            held.go.set()
            await all_whole(asking)
            await gone(before)
            request = len(seen)
            await wait_until(lambda: len(seen) > request + 100)
            stop.set()
            await asyncio.gather(*load)
            assert set(seen) == {b"old", b"new"}
            assert seen[-50:] == [b"new"] * 50


async def test_a_configuration_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    """SIGHUP and SIGUSR2 refuse it by name: wrong keys, wrong values, and a mistake of the check itself."""
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    program.change(
        "supervisor/checks.py",
        "    relay = settings.relay\n",
        "    relay = settings.relay\n    assert not relay.via, 'a mistake'\n",
    )
    async with upstream() as up:
        path = up.on(answers(b"here"))
        write_config(file, up.url)
        async with proxy(None, config=file, log=log, program=program.folder) as tap:
            family = tap.family()
            refusals = [
                (signal.SIGHUP, "[relay]\nupstrem = 'x'\n", b"event=reload_refused"),
                (signal.SIGHUP, "[relay\n", b"event=reload_refused"),
                (signal.SIGHUP, "[relay]\nupstream = 'nonsense'\n", b"event=reload_refused"),
                (signal.SIGHUP, f'[relay]\nupstream = "{up.url}"\nvia = true\n', b"event=reload_refused"),
                (signal.SIGUSR2, "[relay]\nupstrem = 'x'\n", b"event=restart_refused"),
            ]
            for sent, text, event in refusals:
                message = len(log.read_bytes())
                file.write_text(text)
                os.kill(tap.pid, sent)
                await wait_until(
                    lambda message=message, event=event: event in log.read_bytes()[message:], LONG_S
                )
                assert tap.process.returncode is None
                assert tap.family() == family
            assert await tap.get(path) == b"here"
            assert b"upstrem" in log.read_bytes()
            assert b"AssertionError: a mistake" in log.read_bytes()
            write_config(file, up.url)
            os.kill(tap.pid, signal.SIGHUP)
            await replaced(tap.relays, family)
            assert await tap.get(path) == b"here"


async def test_sighup_to_more_workers_and_back(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    async with upstream() as up:
        path = up.on(answers(b"here"))
        write_config(file, up.url, "workers = 2")
        async with proxy(None, config=file, workers=2) as tap:
            for workers in (3, 1):
                before = tap.relays()
                write_config(file, up.url, f"workers = {workers}")
                os.kill(tap.pid, signal.SIGHUP)
                await replaced(tap.relays, before, workers)
                # Each connection may land on any of the listening sockets: all of them must be served.
                for _ in range(20):
                    assert await tap.get(path) == b"here"


# ---------------------------------------------------------------- mistakes


async def started(*args: str) -> tuple[int | None, str, str]:
    """Run `llmtap proxy` to its end; return its status, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "llmtap.cli",
        "proxy",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=CLEAN,
        cwd=ROOT,
    )
    out, err = await asyncio.wait_for(process.communicate(), READY_S)
    return process.returncode, out.decode(), err.decode()


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        free = f"127.0.0.1:{port_free()}"
        up = ("--upstream", "http://127.0.0.1:1")
        for listen, admin, key, option in (
            (address, free, "relay.listen", "--listen"),
            (free, address, "meter.admin", "--admin"),
        ):
            status, out, err = await started(*up, "--listen", listen, "--admin", admin)
            assert (status, out) == (2, "")
            assert f"{key} ({option})" in err and address in err
            assert "Traceback" not in err


async def test_check_starts_nothing(tmp_path: Path) -> None:
    status, out, err = await started("--upstream", "http://127.0.0.1:1", "--check")
    assert (status, out[:4], err) == (0, "ok (", "")
    status, out, err = await started("--upstream", "http://127.0.0.1:1/v1", "--check")
    assert (status, err) == (0, "") and "warning: relay.upstream ends in /v1" in out
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[relay]\nupstream = 'http://caf\xe9'\n")
    status, out, err = await started("--config", str(latin), "--check")
    assert (status, out) == (2, "")
    assert "latin.toml" in err and "TOML" in err
