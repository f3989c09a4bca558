"""The meter as a real process: told by one line, ready by one line, gone when its supervisor is."""

import fcntl
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from llmtap.channel.frames import ACK
from llmtap.log import LogSetup
from llmtap.meter.options import MeterOptions
from llmtap.meter.setup import HANDOVER_LINE, SETTINGS_LINE, Changeable, MeterSetup
from llmtap.units import encode_special
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.tap_frames import Script
from tests.support.waiting import block_until


class Meter:
    def __init__(self, path: Path, **more: Any) -> None:
        self.path = str(path / "tap.sock")
        self.admin = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.admin.getsockname()[1]}"
        setup = MeterSetup(options=MeterOptions(), socket=self.path, admin_fd=self.admin.fileno(), **more)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmtap.meter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self.admin.fileno()],
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(setup, enc_hook=encode_special) + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"ready\n"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            body: bytes = answer.read()
        return body

    def stop(self) -> tuple[int, str]:
        """Waits for its end; the exit status and what it logged."""
        assert self.process.stderr is not None
        _, log = self.process.communicate(timeout=60)
        self.admin.close()
        return self.process.returncode, log.decode()


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[Meter]:
    meter = Meter(tmp_path)
    yield meter
    if meter.process.poll() is None:
        meter.process.kill()
        meter.stop()
    meter.admin.close()


def test_frames_in_metrics_out(meter: Meter) -> None:
    with socket.socket(socket.AF_UNIX) as relay:
        relay.connect(meter.path)
        relay.sendall(Script().hello().status(relay_status(opened=1)).stream(1).pack(1))
        assert relay.recv(ACK.size) == ACK.pack(1)
        assert meter.get("/readyz") == b"ready\n"
        summary = json.loads(meter.get("/api/v1/summary"))
        assert (summary["n"], summary["relays"]["r0"]["opened"]) == (1, 1)
        assert summary["metrics"]["ttft"]["mean"] == 0.1
        ended = b'llmtap_exchanges_total{model="tiny",outcome="complete",tenant="default"} 1.0'
        assert ended in meter.get("/metrics")


MALFORMED = [
    b"GET /metrics?x=" + b"s3cret" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-s3cret\r\n\r\n",
    b"GET /metrics s3cret/1.1\r\nHost: localhost\r\n\r\n",
]


def test_a_malformed_request_to_the_admin_port_leaves_nothing_in_the_log(meter: Meter) -> None:
    for malformed in MALFORMED:
        with socket.create_connection(meter.admin.getsockname()) as client:
            client.sendall(malformed)
            assert client.recv(12) == b"HTTP/1.0 400", malformed[:80]
    meter.process.send_signal(signal.SIGTERM)
    status, log = meter.stop()
    assert status == 0
    assert [word for word in ("s3cret", "Traceback", "aiohttp") if word in log] == []


def joined(meter: Meter) -> socket.socket:
    """A relay that has just begun an exchange."""
    relay = socket.socket(socket.AF_UNIX)
    relay.connect(meter.path)
    relay.sendall(Script().hello().status(relay_status(opened=1)).request(1).pack(1))
    assert relay.recv(ACK.size) == ACK.pack(1)
    return relay


def finish(relay: socket.socket) -> None:
    relay.sendall(Script().head(1, 5).word(1, 6).end(1, 7, 1).close(1, 8).pack(2))
    assert relay.recv(ACK.size) == ACK.pack(2), "it still measures"


def test_its_end_removes_its_socket_and_not_one_that_has_taken_the_place(
    meter: Meter, tmp_path: Path
) -> None:
    os.rename(meter.path, meter.path + ".old")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(meter.path)
        meter.process.send_signal(signal.SIGTERM)
        status, log = meter.stop()
    assert status == 0, log
    assert os.path.exists(meter.path), "this is the other meter's socket"
    os.unlink(meter.path)
    alone = Meter(tmp_path)
    alone.process.send_signal(signal.SIGTERM)
    assert alone.stop()[0] == 0
    assert not os.path.exists(alone.path)


def test_told_to_end_it_outlives_its_relays(meter: Meter) -> None:
    with joined(meter) as relay:
        meter.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            meter.process.wait(timeout=0.5)
        assert meter.get("/healthz") == b"ok\n"
        finish(relay)
    status, log = meter.stop()
    assert status == 0
    assert "event=exchange id=r0-1" in log
    assert "outcome=complete" in log


def test_an_orphan_outlives_its_relays_and_leaves_the_port_to_others(meter: Meter) -> None:
    kept = http.client.HTTPConnection("127.0.0.1", meter.admin.getsockname()[1], timeout=60)
    kept.request("GET", "/healthz")
    assert kept.getresponse().read() == b"ok\n"
    address = meter.admin.getsockname()
    meter.admin.close()
    with joined(meter) as relay:
        assert meter.process.stdin is not None
        meter.process.stdin.close()
        meter.process.stdin = None
        block_until(lambda: can_listen(address))
        finish(relay)
        kept.request("GET", "/api/v1/summary?window=all")
        assert json.loads(kept.getresponse().read())["n"] == 1, "who was connected can still read"
        kept.close()
    status, log = meter.stop()
    assert status == 0
    assert "event=supervisor_lost" in log


def can_listen(address: tuple[str, int]) -> bool:
    try:
        socket.create_server(address).close()
    except OSError:
        return False
    return True


def messages(pid: int, number: signal.Signals) -> bool:
    """The signal is no longer on its way: another of its kind is another one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    pending = (line for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:")))
    return not any(int(line.split()[1], 16) >> number - 1 & 1 for line in pending)


def test_it_can_be_told_to_end_now(meter: Meter) -> None:
    with joined(meter) as relay:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # the first is for relays
            meter.process.send_signal(number)
            block_until(lambda n=number: messages(meter.process.pid, n))  # two of a kind at once are one
        status, log = meter.stop()
        assert (status, relay.recv(1)) == (0, b""), log
    assert "tap_error" not in log, "the relay lives"
    assert not os.path.exists(meter.path)


def result(meter: Meter, *lines: bytes) -> None:
    assert meter.process.stdin is not None
    meter.process.stdin.write(b"".join(line + b"\n" for line in lines))
    meter.process.stdin.flush()


def unread_bytes(pipe: IO[bytes]) -> int:
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


def test_words_that_come_at_once_or_in_pieces_are_heard_one_by_one(meter: Meter) -> None:
    words = [
        SETTINGS_LINE + msgspec.json.encode(Changeable(config=config, log=LogSetup(level=level)))
        for config, level in (("first", "info"), ("second", "warning"), ("third", "info"))
    ]
    result(meter, *words)
    assert meter.process.stdin is not None
    for piece in (HANDOVER_LINE[:9], HANDOVER_LINE[9:] + b"/nowhere/state\n"):
        meter.process.stdin.write(piece)
        meter.process.stdin.flush()
        block_until(lambda: unread_bytes(meter.process.stdin) == 0)  # so that it reads each piece alone
    status, log = meter.stop()
    assert status == 0
    changes = [line for line in log.splitlines() if "event=meter_changed" in line]
    assert [line.rpartition("config=")[2] for line in changes] == ["first", "third"], "warnings only between"
    assert "event=meter_replaced state=/nowhere/state\n" in log
