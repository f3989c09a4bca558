"""Real packets of the loopback interface: skipped where root or CAP_NET_RAW is missing."""

import asyncio
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import pytest

from llmtap.capture.read.reader import read as read_capture
from llmtap.channel.frames import FrameKind
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.vantage.passive import ring as rings
from llmtap.vantage.passive.options import WatchOptions
from llmtap.vantage.passive.ring import PacketRing, open_adapter_clock, open_ring
from llmtap.vantage.passive.watcher import Watcher, local_addresses
from tests.support.clocks import SettableClock
from tests.support.servers.gateway import Gateway
from tests.support.servers.live_proxy import LiveProxy, live_proxy, port_free
from tests.support.servers.peer import play
from tests.support.servers.proxy import FakeMeter
from tests.support.servers.served import HOUSE, answers, process, served
from tests.support.servers.upstream import upstream
from tests.support.waiting import block_until, wait_until
from tests.vantage.passive.wire import ASK, EVENTS, HEAD, LAST

HOST = "127.0.0.1"
RING_BYTES = 4 << 20
LIMIT_S = 250.0


def _missing() -> str:
    try:
        open_ring("lo", [9], 512 << 10).close()
    except ConfigError as exc:
        return str(exc).partition("\n")[0]
    return ""


pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(bool(_missing()), reason=f"needs root or CAP_NET_RAW: {_missing()}"),
]


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
    server: Server,
    host: str = "127.0.0.1",
    ring_bytes: int = RING_BYTES,
    kind: type[PacketRing] = PacketRing,
    **about: Any,
) -> AsyncIterator[tuple[int, FakeMeter, Watcher]]:
    """A server on loopback, and a watcher of its port that reports to a meter."""
    loop = asyncio.get_running_loop()
    listening = await asyncio.start_server(server.answer, host)
    port = listening.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:
        meter = FakeMeter(f"{folder}/tap.sock")
        await meter.start()
        watcher = Watcher(
            loop,
            WatchOptions(ports=(port,)),
            [kind(open_ring("lo", [port], ring_bytes), ring_bytes)],
            name="w",
            tap_path=meter.path,
            local=local_addresses(),
            **about,
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


class OfAdapter(PacketRing):
    """A ring whose packets of odd number have stamps of a clock that is 37 s ahead, as an adapter's is."""

    def take(self) -> Iterator[tuple[int, int, int, int]]:
        for number, (stamp_ns, which, start, stop) in enumerate(super().take()):
            assert which == 0
            odd = number % 2
            yield stamp_ns + 37_000_000_000 * odd, odd, start, stop


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "adapter"])
def test_packets_have_the_times_at_which_the_server_sent(host: str) -> None:
    server = Server(0.005)
    how: dict[str, Any] = {"host": host}
    if host == "adapter":
        host, how = "127.0.0.1", {"kind": OfAdapter, "adapters": [SettableClock(37_000_000_000)]}

    async def run() -> None:
        async with watched(server, **how) as (port, meter, watcher):
            await ask(port, 2, host)
            exchange = await meter.closed(2)
            status = watcher.reporter.status()
        assert exchange.kinds == [
            FrameKind.OPEN,
            FrameKind.REQUEST_DATA,
            FrameKind.REQUEST_END,
            FrameKind.SUBMIT,
            FrameKind.RESPONSE_HEAD,
            *[FrameKind.RESPONSE_DATA] * 6,
            FrameKind.RESPONSE_END,
            FrameKind.CLOSE,
        ]
        answer = (FrameKind.RESPONSE_HEAD, FrameKind.RESPONSE_DATA)
        stamps = [f.t_ns for f in exchange.frames if f.kind in answer]
        ends = [*server.sent_ns[8:], 1 << 62]
        slack_ns = exchange.closing.lag_ns
        assert slack_ns > 0
        for sent_ns, t_ns, next_ns in zip(server.sent_ns[7:], stamps, ends, strict=True):
            assert sent_ns - slack_ns < t_ns < next_ns + slack_ns
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
            await wait_until(lambda: len(server.sent_ns) >= 400)
            loop.remove_reader(ring.fd)  # as if the process were stopped
            await wait_until(lambda: len(server.sent_ns) >= 2_000)
            loop.add_reader(ring.fd, watcher._on_readable, ring, table)
            await asking
            await ask(port, 5)
            await wait_until(lambda: watcher.reporter.status().packets["lost"] > 0)
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


def test_an_interface_without_stamps_of_its_adapter_is_told() -> None:
    with open_ring("lo", [9], 512 << 10) as sock, pytest.raises(ConfigError) as told:
        open_adapter_clock(sock, "lo")
    assert told.value.place == "watch.timestamps" and "--timestamps adapter" in (told.value.hint or "")


def test_an_adapter_that_stamps_is_told_to_stamp_all_packets_that_it_receives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, object]] = []

    def answer(_sock: object, interface: str, request: int, data: Any) -> None:
        if request == rings._SIOCETHTOOL:
            data.raw = rings._TS_INFO.pack(rings._GET_TS_INFO, 0b1000100, 3, 0b11, 0b10)
        elif request == rings._SIOCGHWTSTAMP:
            data.raw = rings._CONFIG.pack(0, 1, 12)
        else:
            asked.append((interface, rings._CONFIG.unpack(data.raw)))

    monkeypatch.setattr(rings, "_interface_request", answer)
    monkeypatch.setattr(rings.os, "open", lambda path, _flags: asked.append((path, "opened")) or 7)
    with open_ring("lo", [9], 512 << 10) as sock:
        assert open_adapter_clock(sock, "eth7") == 7
    assert asked == [("eth7", (0, 1, 1)), ("/dev/ptp3", "opened")]


def test_a_second_reader_of_a_ring_continues_where_the_first_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first = PacketRing(open_ring("lo", [port], RING_BYTES), RING_BYTES)

        def read_handshake(ring: PacketRing) -> None:
            packets: list[object] = []

            def add() -> bool:  # the kernel keeps a block that is not full for a while
                packets.extend(ring.take())
                return len(packets) >= 3

            socket.create_connection(("127.0.0.1", port)).close()
            block_until(add)

        read_handshake(first)
        second = PacketRing(first._sock.dup(), RING_BYTES)
        read_handshake(second)
        second.close()
        first.close()


# ---------------------------------------------------------------- the command, beside a proxy and tcpdump

STAMPS_APART_US = 5
"""Median of what tcpdump's stamps and ours differ by; seen: 1 to 3, on a full machine, too."""
ROUNDING_US = 2
"""Two offsets in a capture are whole microseconds."""
WITHIN = 0.99
"""Share of the relay's times that are at most both uncertainties from a packet's; seen: 7,589 of 7,590."""
CHAT_APP = "tests.vantage.middleware.chat_app:app"
ROUNDS = 40
AT_ONCE = 20
HOWS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "plain": {},
    "refused": {"how": "refuse"},
    "broken": {"stream": True, "how": "break"},
    "gzip": {"stream": True, "how": "gzip"},
    "left": {"stream": True, "how": "for ever"},
}
OWN = frozenset(
    (
        "capture",
        "relay",
        "seq",
        "id",
        "arrival",
        "arrival_ns",
        "arrival_mono_ns",
        "anchor",
        "clock",
        "uncertainty_us",
        "uncertain",
        "request_end_us",
        "connect_us",
        "added_request_us",
        "added_first_chunk_us",
        "added_chunk_max_us",
        "delivered_us",
        "paused_us",
        "reads",
        "error",
        "request_bytes",
        "session",
        "blocks",
        "parent",
    )
)
"""Columns of the vantage: its clocks, its keyed hashes. Upstream, a request has other hop-by-hop fields."""
UNTIL_LEFT = frozenset(
    ("event_class", "event_bytes", "event_tokens", "event_flags", "output_tokens", "response_bytes")
)
"""Columns that grow until an answer is given up: the relay and the network notice that at different times."""


@asynccontextmanager
async def watching(port: int, *args: str) -> AsyncIterator[tuple[LiveProxy, asyncio.subprocess.Process]]:
    admin = port_free()
    argv = ["llmtap.cli", "watch", "--interface", "lo", "--port", str(port), "--admin", f"127.0.0.1:{admin}"]
    async with process(*argv, "--set", "log.level=warning", *args) as running:
        seen = LiveProxy(admin, admin)
        await answers(seen, "/readyz", running)
        yield seen, running


def packet_addresses(port: int) -> bytes:
    """Connect to a port; return the addresses and ports as they are in the header of the packet for it."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        own_port = sock.getsockname()[1]
    return 2 * socket.inet_aton("127.0.0.1") + struct.pack(">HH", own_port, port)


async def send_all(url: str, rounds: int = ROUNDS) -> int:
    """Send `rounds` requests of each kind, AT_ONCE at a time; return their number."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def send(session: aiohttp.ClientSession, how: str, number: int) -> None:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **HOWS[how]}
        headers = {"X-Request-Id": f"{how}-{number}"}
        async with gate:
            try:
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                    if how == "left":
                        await answer.content.readuntil(b"\n\n")
                        answer.close()
                    else:
                        await answer.read()
            except aiohttp.ClientError:
                assert how == "broken"

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(send(session, how, i) for i in range(rounds) for how in HOWS))
    return rounds * len(HOWS)


def rows_of(capture: Path) -> dict[str, dict[str, Any]]:
    """The chat exchanges of a capture, by request id."""
    rows = [row for batch in read_capture([str(capture)]).batches() for row in batch.to_pylist()]
    return {row["request_id"]: row for row in rows if row["request_id"]}


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    left = UNTIL_LEFT if row["outcome"] == "client_cancelled" else frozenset()
    return {
        name: value
        for name, value in row.items()
        if name not in OWN and name not in left and not name.endswith("_us")
    }


def apart_us(row: dict[str, Any], seen: dict[str, Any], name: str) -> list[float]:
    """Times of a row minus those of the same points in another one, in us."""
    shift = (row["arrival_ns"] - seen["arrival_ns"]) / 1_000
    pairs = zip(row[name], seen[name], strict=False) if name == "event_us" else [(row[name], seen[name])]
    return [shift + a - b for a, b in pairs if a is not None and b is not None]


def test_watch_beside_a_proxy_measures_the_same_live_and_from_a_file_of_tcpdump(tmp_path: Path) -> None:
    file = tmp_path / "beside.pcap"
    at = {name: tmp_path / name for name in ("relay", "live", "file")}

    async def run() -> int:
        async with (
            served(CHAT_APP) as port,
            watching(port, "--capture", str(at["live"])) as (seen, running),
            live_proxy(f"http://127.0.0.1:{port}", f"capture.to={at['relay']}") as proxy,
        ):
            dump = None
            if shutil.which("tcpdump"):
                argv = ["tcpdump", "-i", "lo", "-s", "0", "-U", "-B", "65536", "-w", str(file)]
                argv.append("--immediate-mode")
                dump = await asyncio.create_subprocess_exec(
                    *argv, "tcp", "port", str(port), stderr=subprocess.DEVNULL
                )
                await wait_until(lambda: file.exists() and file.stat().st_size)
            n = await send_all(f"http://127.0.0.1:{proxy.listen}")
            await proxy.measured(n)
            await seen.measured(n)
            if dump is not None:
                last = packet_addresses(port)
                await wait_until(lambda: last in file.read_bytes())
                dump.send_signal(signal.SIGINT)
                await dump.wait()
            status = read(f"/proc/{running.pid}/status")
            assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status

            async def reported() -> Any:
                """The report of the vantage, which comes every second, once it has all exchanges."""
                (relay,) = (await seen.told("/api/v1/summary?window=all&by=none"))["relays"].values()
                return relay if relay.get("measured", 0) >= n else None

            relay = await wait_until(reported)
            assert (relay["vantage"], relay["side"], relay["clock"]) == ("passive", "host", "packet")
            assert relay["packets"]["captured"] and not relay["packets"]["lost"]
            return n

    n = asyncio.run(run())
    report = llmtap("report", str(at["live"]), "--integrity", "--json")
    (counts,) = report["captures"][0]["relays"]
    assert report["ok"] and counts["present"] >= n and counts["packets"]["captured"]
    at_relay, live = rows_of(at["relay"]), rows_of(at["live"])
    assert len(at_relay) == n and set(at_relay) == set(live)
    late: list[tuple[float, int]] = []
    for name, row in at_relay.items():
        assert without_times(row) == without_times(live[name]), name
        both_us = row["uncertainty_us"] + live[name]["uncertainty_us"] + ROUNDING_US
        # A relay stamps submit before it sends, and events of several packets with the time of the last one.
        late += [(-us, both_us) for us in apart_us(row, live[name], "submit_us")]
        late += [(us, both_us) for us in apart_us(row, live[name], "event_us")]
        if row["outcome"] == "complete":
            late += [(us, both_us) for us in apart_us(row, live[name], "response_end_us")]
    assert all(us >= -both_us for us, both_us in late)
    assert sum(us <= both_us for us, both_us in late) >= WITHIN * len(late)
    if not file.exists():
        pytest.skip("needs the program tcpdump: only the live packets were compared")
    summary = llmtap("watch", "--read", str(file), "--json", "--capture", str(at["file"]))
    assert summary["n"] >= n and summary["relays"]["file"]["dropped"] == {}
    from_file = rows_of(at["file"])
    assert set(from_file) == set(live)
    stamps: list[float] = []
    for name, row in from_file.items():
        assert without_times(row) == without_times(live[name]), name
        stamps += map(abs, apart_us(row, live[name], "event_us"))
    # The kernel stamps a packet for each socket anew, with interrupts between: one pair may be far apart.
    assert median(stamps) <= STAMPS_APART_US


def read(path: str) -> str:
    return Path(path).read_text()


def llmtap(*args: str) -> Any:
    argv = [sys.executable, "-P", "-m", "llmtap.cli", *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=HOUSE, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("relay", ["", "front", "back"])
def test_both_sides_of_a_gateway_are_paired(relay: str) -> None:
    """By their packets, or with a relay on one side."""
    streams, own = 10, port_free()

    async def run() -> tuple[Any, Any]:
        gateway = Gateway(keeps_ids=False, gap_s=0.02)
        async with upstream() as engine, upstream() as between:
            gateway.serve(engine, between)
            gateway.port = own if relay == "back" else engine.port
            at = own if relay == "front" else between.port
            back_ports = f"pair.back_ports=[{engine.port}]"
            seen, settings = {
                "": (between.port, [back_ports]),
                "front": (
                    engine.port,
                    [back_ports, f"relay.upstream={between.url}", f"relay.listen={HOST}:{own}"],
                ),
                "back": (between.port, [f"pair.upstream={engine.url}", f"pair.listen={HOST}:{own}"]),
            }[relay]
            sides = [word for setting in settings for word in ("--set", setting)]
            if not relay:
                sides += ["--port", str(engine.port)]
            async with watching(seen, *sides) as (meter, _):
                await asyncio.gather(*(gateway.ask(at, n, f"prompt {n}") for n in range(streams)))

                counts: dict[str, int] = {}

                async def paired() -> bool:
                    counts.update((await meter.told("/api/v1/pairs") or {"counts": {}})["counts"])
                    return counts.get("pairs") == streams

                try:
                    await wait_until(paired, LIMIT_S / 2)
                except TimeoutError:
                    pytest.fail(f"not all of {streams} are paired: {counts}")
                relays = (await meter.told("/api/v1/summary"))["relays"].values()
                assert [one["vantage"] for one in relays].count("passive") == (1 if relay else 2)
                assert len(relays) == 2
                return await meter.told("/api/v1/pairs"), await meter.told("/api/v1/exchanges")

    pairs, result = play(run(), LIMIT_S)
    sides = {x["id"]: (x["side"], x["tenant"]) for x in result["exchanges"]}
    for pair in pairs["recent"]:
        side, tenant = sides[pair["front"]]
        assert side == "front"
        assert {sides[back["id"]] for back in pair["back"]} == {("back", tenant)}
        assert pair["figures"]["request"][0]["high"] >= 0.02
