"""Two meters, of which one replaces the other: it answers all requests, and counts every exchange."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtap.capture.options import CaptureOptions
from llmtap.capture.read.reader import read
from llmtap.channel.frames import ACK
from llmtap.meter.setup import CAPTURE_END_LINE, HANDOVER_LINE
from tests.meter.test_process import Meter, finish, joined
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.tap_frames import Script
from tests.support.waiting import PATIENCE_S, block_until

Make = Callable[..., Meter]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Meter] = []

    def begin(name: str, **more: Any) -> Meter:
        folder = tmp_path / name
        folder.mkdir()
        made.append(Meter(folder, state=str(tmp_path / "state"), **more))
        return made[-1]

    yield begin
    for meter in made:
        if meter.process.poll() is None:
            meter.process.kill()
            meter.stop()
        meter.admin.close()


def hand_over(old: Meter, folder: Path) -> None:
    assert old.process.stdin is not None
    old.process.stdin.write(HANDOVER_LINE + str(folder / "state").encode() + b"\n")
    old.process.stdin.flush()


def both(make: Make) -> tuple[Meter, Meter]:
    """Two meters, of which the second waits to replace the first; its admin port is open at once."""
    old = make("old")
    return old, make("new")


def relays_of(meter: Meter) -> dict[str, Any]:
    return dict(json.loads(meter.get("/api/v1/summary?window=all"))["relays"])


def test_the_old_one_measures_to_the_end_and_the_new_one_counts(make: Make, tmp_path: Path) -> None:
    old, new = both(make)
    with joined(old) as relay:
        hand_over(old, tmp_path)
        block_until(lambda: relays_of(new).get("r0", {}).get("opened") == 1)
        assert relays_of(new)["r0"]["connected"]
        finish(relay)
        relay.sendall(Script().status(relay_status(opened=1, measured=1, draining=True)).pack(3))
        assert relay.recv(ACK.size) == ACK.pack(3)
    status, log = old.stop()
    assert status == 0, log
    assert "event=exchange id=r0-1" in log
    assert os.path.exists(old.path), "it may be the other one's by now"
    block_until(lambda: not relays_of(new)["r0"]["connected"])
    result = relays_of(new)["r0"]
    assert (result["opened"], result["measured"], result["unsettled"], result["dropped"]) == (1, 1, 0, {})
    assert json.loads(new.get("/api/v1/summary?window=all"))["n"] == 1, "its figures have come, too"
    assert b'llmtap_tap_measured_exchanges_total{relay="r0"} 1.0' in new.get("/metrics")


def test_who_is_connected_is_sent_to_the_other_one(make: Make, tmp_path: Path) -> None:
    old = make("old")
    with joined(old) as relay:
        assert old.get("/healthz") == b"ok\n"
        with socket.create_connection(old.admin.getsockname()) as scraper:
            scraper.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b"200 OK" in scraper.recv(1_000)
            hand_over(old, tmp_path)
            scraper.settimeout(PATIENCE_S)
            assert scraper.recv(1_000) == b"", "a connection that is kept would show old figures"
        finish(relay)
    assert old.stop()[0] == 0


def test_a_relay_that_dies_in_the_drain_is_counted_as_lost(make: Make, tmp_path: Path) -> None:
    old, new = both(make)
    with joined(old):
        hand_over(old, tmp_path)
        block_until(lambda: "r0" in relays_of(new))
    assert old.stop()[0] == 0
    block_until(lambda: not relays_of(new)["r0"]["connected"])
    result = relays_of(new)["r0"]
    assert (result["opened"], result["measured"], result["unsettled"]) == (1, 0, 0)
    assert (result["lost"], result["dropped"]) == (1, {})


@pytest.mark.parametrize("ends", [False, True])
def test_a_capture_is_closed_by_the_last_meter_that_writes_it(make: Make, tmp_path: Path, ends: bool) -> None:
    folder = tmp_path / "capture"
    old = make("old", capture=CaptureOptions(to=str(folder)), capture_id="c1")
    with joined(old) as relay:
        if ends:
            assert old.process.stdin is not None
            old.process.stdin.write(CAPTURE_END_LINE + b"\n")
        hand_over(old, tmp_path)
        finish(relay)
        relay.sendall(Script().status(relay_status(opened=1, measured=1, draining=True)).pack(3))
        assert relay.recv(ACK.size) == ACK.pack(3)
    assert old.stop()[0] == 0
    (capture,) = read(folder).integrity().captures
    assert (capture.present, capture.missing, capture.closed) == (1, 0, ends)


def test_a_folder_that_is_not_there_holds_nothing_up(make: Make, tmp_path: Path) -> None:
    old = make("old")
    with joined(old) as relay:
        hand_over(old, tmp_path / "nowhere")
        finish(relay)
    status, log = old.stop()
    assert status == 0
    assert "kind=state_not_written" in log


def test_one_that_takes_over_answers_when_its_relay_is_ready(make: Make) -> None:
    new = make("new", takes_over=True)
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(new.get("/readyz")), daemon=True)
    asking.start()  # it waits at the port, where until then another meter answers
    with socket.socket(socket.AF_UNIX) as relay:
        relay.connect(new.path)
        relay.sendall(Script().hello().status(relay_status()).pack(1))
        assert relay.recv(ACK.size) == ACK.pack(1)
        asking.join(PATIENCE_S)
    assert answers == [b"ready\n"]
