"""The relay as a process, and its sweep: time-outs hold whatever one connection does in it."""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from llmtap import native
from llmtap.clock import SystemClock
from llmtap.log import LogSetup
from llmtap.units import encode_special
from llmtap.vantage.relay.connection import ClientConnection
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.relay import RelaySetup
from tests.support.servers.peer import wait_until
from tests.support.servers.proxy import ms, stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import Call, answers
from tests.vantage.relay.test_refusals import check_own

AS_IT_IS = "import sys; from llmtap.vantage.relay.relay import main; sys.exit(main())"
BROKEN = """
import sys
from llmtap.vantage.relay.relay import main
from llmtap.vantage.relay.relay import Relay

Relay._live_counts = None  # not to be called: so the task that reports fails
sys.exit(main())
"""


@contextmanager
def relay_of(program: str, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A relay process that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        setup = RelaySetup(
            options=RelayOptions(upstream="http://127.0.0.1:9"),
            name="test.0.1",
            listen_fds=[sock.fileno()],
            tap_path=str(tmp_path / "tap.sock"),
            log=LogSetup(),
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[sock.fileno()],
            cwd=Path(__file__).parents[3],
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(setup, enc_hook=encode_special) + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=60)


def log_of(process: "subprocess.Popen[bytes]") -> str:
    """All that it logged, once it has ended by itself."""
    assert process.stderr is not None
    process.wait(timeout=60)
    return process.stderr.read().decode()


def test_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    with relay_of(AS_IT_IS, tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        log = log_of(process)
        assert process.returncode == 0, log
        assert "event=relay_ready" in log
        assert f"implementation={native.describe()!r}" in log


def test_a_broken_relay_ends_so_that_another_one_takes_its_place(tmp_path: Path) -> None:
    with relay_of(BROKEN, tmp_path) as process:
        log = log_of(process)
        assert process.returncode == 1, log
        assert "level=critical" in log
        assert "event=relay_broken relay=test.0.1 task=_report_for_ever" in log
        assert "TypeError" in log


LONG_AFTER_NS = 3_600_000_000_000


def fail(*_: object) -> NoReturn:
    raise RuntimeError("a mistake of ours")


class Mistaken(ClientConnection):
    __slots__ = ()

    def check(self, now_ns: int) -> None:
        fail(now_ns)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"no HTTP\r\n\r\n", b"whole"])
async def test_a_connection_that_left_while_a_sweep_went_on_is_passed_over(sent: bytes) -> None:
    """The sweep takes a copy of all connections and yields now and then."""
    async with stage() as (up, tap):
        asked = asyncio.Event()

        async def script(call: Call) -> None:
            asked.set()
            await call.left()

        client = await tap.client()
        await client.send(request("GET", up.on(script)) if sent == b"whole" else sent)
        await wait_until(lambda: len(tap.relay.connections) == 1)
        (connection,) = tap.relay.connections
        if sent == b"whole":
            await asked.wait()
        elif sent == b"GET / HT":
            await client.taken()
        elif sent:
            await client.head()
        client.reset()
        await wait_until(lambda: not tap.relay.connections)
        before = tap.relay.reporter.status()
        connection.check(SystemClock.mono_ns() + LONG_AFTER_NS)
        after = tap.relay.reporter.status()
        assert (after.opened, after.refused) == (before.opened, before.refused)


@pytest.mark.parametrize("whose", ["a connection", "a pool"])
async def test_what_fails_in_the_sweep_costs_nobody_else_a_time_out(
    whose: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(head_timeout=ms(200)) as (up, tap):
        if whose == "a connection":
            tap.relay.connections.add(Mistaken(tap.relay.context, b"", tap.relay.forget))
        else:
            monkeypatch.setattr(tap.relay.pool, "sweep", fail)
        await wait_until(lambda: "check_failed" in caplog.text)
        client = await tap.client()
        await client.send(b"GET / HT")
        assert check_own(await client.answer(), 408) == "head_timeout"
        assert (await tap.get(up.on(answers(b"ok")))).data == b"ok"
    told = [r for r in caplog.records if "event=check_failed" in r.getMessage()]
    assert all(r.levelno == logging.WARNING and r.exc_info is not None for r in told)
    assert "a mistake of ours" in caplog.text
