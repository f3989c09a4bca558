"""Real packets of the loopback interface: skipped where root or CAP_NET_RAW is missing."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import pytest

from llmtap.capture.read.reader import read as read_capture
from llmtap.channel.frames import FrameKind
from llmtap.clock import ManualClock, SystemClock
from llmtap.errors import ConfigError
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.passive.ring import PacketRing, open_ring
from llmtap.vantage.passive.watcher import LAST_PACKETS_S, Watcher, local_addresses
from tests.support.servers.live_proxy import READY_S, LiveProxy, live_proxy, port_free
from tests.support.servers.peer import play
from tests.support.servers.proxy import FakeMeter
from tests.support.servers.served import HOUSE, process, served
from tests.vantage.passive.wire import ASK, EVENTS, HEAD, LAST

RING_BYTES = 4 << 20
LIMIT_S = 250.0


def _missing() -> str:
    try:
        open_ring("lo", [9], 512 << 10).close()
    except ConfigError as exc:
        return str(exc).partition("\n")[0]
    return ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=f"no packets on this machine: {_missing()}")


class Server:
    """Answers every request with HEAD, EVENTS `pause_s` apart, and LAST; notes when it sent them."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.sent_ns: list[int] = []
        self._pause_s = pause_s

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readexactly(len(ASK)):
                for data in (HEAD, *EVENTS, LAST):
                    self.sent_ns.append(SystemClock.mono_ns())
                    writer.write(data)
                    await asyncio.sleep(self._pause_s)
        except asyncio.IncompleteReadError:
            writer.close()


@asynccontextmanager
async def watched(
    server: Server, host: str = "127.0.0.1", ring_bytes: int = RING_BYTES
) -> AsyncIterator[tuple[int, FakeMeter, Watcher]]:
    """A server on loopback, and a watcher of its port that reports to a meter."""
    loop = asyncio.get_running_loop()
    listening = await asyncio.start_server(server.answer, host)
    port = listening.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:
        meter = FakeMeter(f"{folder}/tap.sock")
        await meter.start()
        ring_ = PacketRing(open_ring("lo", [port], ring_bytes), ring_bytes)
        watcher = Watcher(
            loop, WatchOptions(ports=(port,)), [ring_], name="w", tap_path=meter.path, local=local_addresses()
        )
        watcher.start()
        try:
            yield port, meter, watcher
        finally:
            await watcher.close()
            meter.stop()
            listening.close()


async def ask(port: int, times: int, host: str = "127.0.0.1") -> None:
    reader, writer = await asyncio.open_connection(host, port)
    for _ in range(times):
        writer.write(ASK)
        await reader.readuntil(LAST)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_packets_have_the_times_at_which_the_server_sent(host: str) -> None:
    server = Server(0.005)

    async def run() -> None:
        async with watched(server, host) as (port, meter, watcher):
            await ask(port, 2, host)
            exchange = await meter.closed(2)
            status = watcher.reporter.status()
        assert exchange.kinds == [
            FrameKind.OPEN, FrameKind.REQUEST_DATA, FrameKind.REQUEST_END, FrameKind.SUBMIT,
            FrameKind.RESPONSE_HEAD, *[FrameKind.RESPONSE_DATA] * 6, FrameKind.RESPONSE_END, FrameKind.CLOSE,
        ]  # fmt: skip
        answer = (FrameKind.RESPONSE_HEAD, FrameKind.RESPONSE_DATA)
        stamps = [f.t_ns for f in exchange.frames if f.kind in answer]
        ends = [*server.sent_ns[8:], 1 << 62]
        for sent_ns, t_ns, next_ns in zip(server.sent_ns[7:], stamps, ends, strict=True):
            assert sent_ns < t_ns < next_ns
        assert 0 < exchange.closing.lag_ns < 100_000
        assert (status.side, status.watched, status.packets["lost"]) == ("host", {"followed": 1}, 0)
        hello = meter.hellos[0]
        assert (hello.clock, hello.vantage, hello.guest) == ("packet", "passive", False)

    play(run(), LIMIT_S)


def test_ring_that_overflows_tells_the_packets_and_measures_nothing_wrong() -> None:
    server = Server(0.001)

    async def run() -> None:
        async with watched(server, ring_bytes=512 << 10) as (port, meter, watcher):
            loop = asyncio.get_running_loop()
            ((ring, table),) = watcher._tables
            asking = asyncio.gather(*(ask(port, 100) for _ in range(4)))
            await asyncio.sleep(0.1)
            loop.remove_reader(ring.fd)  # as if the process were stopped
            await asyncio.sleep(0.4)
            loop.add_reader(ring.fd, watcher._readable, ring, table)
            await asking
            await ask(port, 5)
            await asyncio.sleep(0.3)
            status = watcher.reporter.status()
            assert status.packets["lost"] > 0
        ledger = watcher.reporter.tap.ledger
        assert ledger.opened == ledger.measured + sum(ledger.dropped.values()) <= 405
        assert ledger.dropped["packets_lost"] and ledger.measured
        whole = len(HEAD + b"".join(EVENTS) + LAST)
        complete = 0
        for seq in range(1, ledger.opened + 1):
            exchange = meter.exchange(seq)
            if FrameKind.CLOSE in exchange.kinds:
                assert (exchange.closing.outcome, exchange.closing.response_bytes) == ("complete", whole)
                complete += 1
        assert complete == ledger.measured

    play(run(), LIMIT_S)


def test_clock_that_is_set_does_not_move_a_stamp_out_of_order() -> None:
    server = Server(0.02)

    class Moving(ManualClock):
        """The machine's clocks, the wall clock `wall_offset_ns` ahead."""

        def mono_ns(self) -> int:
            return SystemClock.mono_ns()

        def wall_ns(self) -> int:
            return SystemClock.wall_ns() + self.wall_offset_ns

    async def run() -> None:
        clock = Moving(wall_offset_ns=0)
        async with watched(server) as (port, meter, watcher):
            watcher._clock = watcher.reporter.timebase._clock = clock
            asking = asyncio.create_task(ask(port, 3))
            await asyncio.sleep(0.1)
            clock.wall_offset_ns = 3_600_000_000_000
            await asking
            exchange = await meter.closed(3)
            now_ns = SystemClock.mono_ns()
        times = [f.t_ns for seq in (1, 2, 3) for f in meter.exchange(seq).frames if f.kind < FrameKind.CLOSE]
        assert all(now_ns - 10_000_000_000 < t_ns < now_ns for t_ns in times)
        assert times == sorted(times)
        assert exchange.closing.outcome == "complete"

    play(run(), LIMIT_S)


def test_a_second_reader_of_a_ring_continues_where_the_first_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first = PacketRing(open_ring("lo", [port], RING_BYTES), RING_BYTES)

        def packets(ring: PacketRing) -> int:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(2 * LAST_PACKETS_S)  # the kernel keeps a block that is not full for so long
            return len(list(ring.take()))

        assert packets(first) >= 3
        second = PacketRing(first._sock.dup(), RING_BYTES)
        assert packets(second) >= 3
        second.close()
        first.close()


# ---------------------------------------------------------------- the command, beside a proxy and tcpdump

STAMPS_APART_US = 5
"""Median of what tcpdump's stamps and ours differ by; seen: 1 to 3, on a full machine, too."""
CHAT_APP = "tests.vantage.middleware.chat_app:app"
SAME = (
    "tenant", "model", "endpoint", "dialect", "method", "path", "status", "stream", "outcome", "tokens",
    "finish_reason", "refusal", "guardrail", "retries", "no_token_reason", "usage", "server_timing",
)  # fmt: skip
ROUNDS = 8
HOWS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True}, "plain": {}, "refused": {"how": "refuse"},
    "broken": {"stream": True, "how": "break"},
}  # fmt: skip


@asynccontextmanager
async def watching(port: int, *args: str) -> AsyncIterator[tuple[LiveProxy, asyncio.subprocess.Process]]:
    admin = port_free()
    argv = ["llmtap.cli", "watch", "--interface", "lo", "--port", str(port), "--admin", f"127.0.0.1:{admin}"]
    async with process(*argv, "--set", "log.level=warning", *args) as running:
        seen = LiveProxy(admin, admin)
        loop = asyncio.get_running_loop()
        end = loop.time() + READY_S
        while await seen.told("/readyz") != 200:
            assert running.returncode is None and loop.time() < end
            await asyncio.sleep(0.05)
        yield seen, running


async def exchanges(seen: LiveProxy, n: int) -> dict[str, dict[str, Any]]:
    """The chat exchanges by request id, once there are `n`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + READY_S
    while True:
        told = await seen.told("/api/v1/exchanges?limit=1000&events=1&endpoint=chat.completions")
        if told and len(told["exchanges"]) >= n:
            return {x["request_id"]: x for x in told["exchanges"]}
        assert loop.time() < end, told and len(told["exchanges"])
        await asyncio.sleep(0.05)


async def send_all(url: str) -> list[str]:
    names = []
    async with aiohttp.ClientSession() as session:
        for i in range(ROUNDS):
            for how, more in HOWS.items():
                names.append(f"{how}-{i}")
                body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **more}
                headers = {"X-Request-Id": names[-1]}
                try:
                    async with session.post(
                        f"{url}/v1/chat/completions", json=body, headers=headers
                    ) as answer:
                        await answer.read()
                except aiohttp.ClientError:
                    pass
        body = {"model": "small", "messages": [], "stream": True, "how": "for ever"}
        names.append("left")
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers={"X-Request-Id": "left"}
        ) as answer:
            await answer.content.readuntil(b"\n\n")
            answer.close()
    return names


def test_watch_beside_a_proxy_measures_the_same_live_and_from_a_file_of_tcpdump(tmp_path: Path) -> None:
    file = tmp_path / "beside.pcap"

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        async with (
            served(CHAT_APP) as port,
            live_proxy(f"http://127.0.0.1:{port}") as proxy,
            watching(port, "--capture", str(tmp_path / "capture")) as (seen, running),
        ):
            dump = None
            if shutil.which("tcpdump"):
                argv = ["tcpdump", "-i", "lo", "-s", "0", "-U", "-w", str(file), "tcp", "port", str(port)]
                dump = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.DEVNULL)
                while not file.exists() or not file.stat().st_size:
                    await asyncio.sleep(0.05)
            names = await send_all(f"http://127.0.0.1:{proxy.listen}")
            at_proxy, at_watch = await exchanges(proxy, len(names)), await exchanges(seen, len(names))
            if dump is not None:
                await asyncio.sleep(1.2)
                dump.send_signal(signal.SIGINT)
                await dump.wait()
            status = read(f"/proc/{running.pid}/status")
            assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
            summary = await seen.told("/api/v1/summary?window=all&by=none")
            (relay,) = summary["relays"].values()
            assert relay["vantage"] == "passive" and relay["side"] == "host" and relay["clock"] == "packet"
            assert (
                relay["packets"]["captured"]
                and not relay["packets"]["lost"]
                and relay["measured"] == len(names)
            )
            return at_proxy, at_watch

    at_proxy, at_watch = asyncio.run(run())
    compare(at_proxy, at_watch)
    report = llmtap("report", str(tmp_path / "capture"), "--integrity", "--json")
    (relay,) = report["captures"][0]["relays"]
    assert report["ok"] and relay["present"] == len(at_watch) and relay["packets"]["captured"]
    if not file.exists():
        pytest.skip("tcpdump is not installed: only the live packets were compared")
    summary = llmtap("watch", "--read", str(file), "--json", "--capture", str(tmp_path / "read"))
    assert summary["n"] >= len(at_watch) and summary["relays"]["file"]["dropped"] == {}
    rows = [row for batch in read_capture([str(tmp_path / "read")]).batches() for row in batch.to_pylist()]
    from_file = {row["request_id"]: row for row in rows if row["request_id"]}
    assert set(from_file) == set(at_watch)
    apart_us: list[float] = []
    for name, row in from_file.items():
        x = at_watch[name]
        assert (row["outcome"], row["status"]) == (x["outcome"], x["status"])
        assert row["event_class"] == [e["class"] for e in x["events"]]
        apart_us += [
            abs(at_us - event["t"] * 1e6) for at_us, event in zip(row["event_us"], x["events"], strict=True)
        ]
    # The kernel stamps a packet for each socket anew, with interrupts between: one pair may be far apart.
    assert median(apart_us) <= STAMPS_APART_US


def compare(at_proxy: dict[str, Any], at_watch: dict[str, Any]) -> None:
    """In all that is no time; and times of one exchange, in their order."""
    assert set(at_proxy) == set(at_watch)
    for name, x in at_proxy.items():
        seen = at_watch[name]
        same = [key for key in SAME if name != "left" or key != "tokens"]
        assert {key: x[key] for key in same} == {key: seen[key] for key in same}, name
        if name != "left":
            events, seen_events = (
                [(e["class"], e["bytes"], e["tokens"]) for e in y["events"]] for y in (x, seen)
            )
            assert events == seen_events, name
        assert seen["clock"] == "packet" and seen["uncertainty"] < 1e-4
        assert seen["added"]["request"] == 0
        ttft = seen["metrics"]["ttft"]
        assert ttft is None or ttft > 0


def read(path: str) -> str:
    return Path(path).read_text()


def llmtap(*args: str) -> Any:
    argv = [sys.executable, "-P", "-m", "llmtap.cli", *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=HOUSE, check=True)
    return json.loads(done.stdout)


def test_children_that_die_are_started_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(CHAT_APP) as port, watching(port) as (seen, running):
            for pid in read(f"/proc/{running.pid}/task/{running.pid}/children").split():
                if "vantage.passive" in read(f"/proc/{pid}/cmdline"):
                    os.kill(int(pid), signal.SIGKILL)
            names = await send_all(f"http://127.0.0.1:{port}")
            assert len(await exchanges(seen, len(names))) == len(names)
            running.send_signal(signal.SIGTERM)
            assert await running.wait() == 0

    play(run(), LIMIT_S)
