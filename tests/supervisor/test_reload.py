"""SIGHUP that changes relays alone, and reloads that fail: who stays, and what is tried again."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from llmtap import native
from tests.supervisor.own_program import OwnProgram
from tests.supervisor.running import (
    HEAD,
    LONG_S,
    WORD,
    Proxy,
    all_whole,
    counters,
    gone,
    is_alive,
    proxy,
    replaced,
    under_way,
    write_config,
)
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import chunk, wait_until
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import Call, answers, upstream


async def test_new_relays_that_fail_leave_the_old_ones_with_their_settings_and_their_port(
    tmp_path: Path,
) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    async with upstream() as up, upstream() as other:
        path, there = up.on(answers(b"here")), other.on(answers(b"there"))
        ports = port_free(), port_free()
        listens = [f'listen = "127.0.0.1:{port}"' for port in ports]
        write_config(file, up.url, listens[0])
        async with proxy(None, config=file, log=log, program=program.folder, listen=ports[0]) as tap:
            moved = Proxy(tap.process, ports[1], tap.admin)
            family = tap.family()
            program.relays_fail()
            write_config(file, other.url, listens[1], "workers = 2")
            os.kill(tap.pid, signal.SIGHUP)
            await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
            await wait_until(lambda: tap.family() == family, LONG_S)
            assert await tap.get(path) == b"here"
            assert await moved.refuses()

            # A relay that dies comes back as it was.
            program.relays_work()
            before = tap.relays()
            os.kill(before[0], signal.SIGKILL)
            await replaced(tap.relays, before)
            assert await tap.get(path) == b"here"

            # And what was wrong can be put right.
            before = tap.relays()
            os.kill(tap.pid, signal.SIGHUP)
            await replaced(tap.relays, before, 2)
            for _ in range(4):
                assert await moved.get(there) == b"there"
            await wait_until(tap.refuses)


async def test_a_keeper_that_fails_ends_the_proxy_after_its_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    program.change("supervisor/child.py", "    return BACKOFF_S[", "    return BACKOFS[")
    async with upstream() as up, proxy(up, log=log, program=program.folder) as tap:
        held, asking = await under_way(tap, up, 5)
        family = tap.family()
        os.kill(tap.meters()[0], signal.SIGKILL)
        await wait_until(tap.refuses)
        held.go.set()
        await all_whole(asking)
        assert await tap.ended() == 1
        assert not any(is_alive(pid) for pid in family)
    text = log.read_text()
    assert text.count("event=supervisor_failed") == 1
    assert "Traceback" in text
    assert "NameError" in text
    assert "never retrieved" not in text


@pytest.mark.skipif(
    native.compiled is None, reason=f"the forwarding thread is compiled code: {native.REASON}"
)
@pytest.mark.parametrize("change", [signal.SIGHUP, signal.SIGTERM], ids=["reload", "stop"])
async def test_a_stream_of_the_forwarding_thread_ends_whole(change: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    lines: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(call: Call) -> None:
        await call.body()
        await call.say(HEAD)
        while line := await lines.get():
            await call.say(line)

    async with upstream() as up:
        write_config(file, up.url, "thread = true", 'drain_timeout = "200s"')
        async with proxy(None, config=file) as tap:
            client = await tap.client()
            await client.send(request("POST", up.on(script), body=b'{"stream":true}'))
            assert (await client.head()).line.startswith(b"HTTP/1.1 200")

            async def pass_events(n: int) -> None:
                for _ in range(n):
                    lines.put_nowait(chunk(WORD))
                    assert await client.chunk() == WORD

            async def is_lent() -> bool:
                loans = await counters(tap, "llmtap_relay_thread_loans_total")
                return sum(loans.values()) == 1

            await pass_events(20)
            await wait_until(is_lent)
            before = tap.relays()
            os.kill(tap.pid, change)
            if change is signal.SIGHUP:
                await wait_until(lambda: set(tap.relays()) - set(before), LONG_S)
            await pass_events(20)
            lines.put_nowait(b"0\r\n\r\n")
            lines.put_nowait(b"")
            assert await client.chunk() == b""
            await gone(before)
