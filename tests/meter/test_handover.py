"""Two meters, of which one takes over: who asks is answered by it, and every exchange is counted there."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtap.channel.frames import ACK
from llmtap.meter.setup import HAND_OVER
from tests.meter.test_process import Meter, finish, joined, wait_for
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.tap_frames import Script

Make = Callable[..., Meter]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Meter] = []

    def begin(name: str, **more: Any) -> Meter:
        folder = tmp_path / name
        folder.mkdir()
        made.append(Meter(folder, **more))
        return made[-1]

    yield begin
    for meter in made:
        if meter.process.poll() is None:
            meter.process.kill()
            meter.stop()
        meter.admin.close()


def hand_over(old: Meter, path: str) -> None:
    assert old.process.stdin is not None
    old.process.stdin.write(HAND_OVER + path.encode() + b"\n")
    old.process.stdin.flush()


def relays_of(meter: Meter) -> dict[str, Any]:
    return dict(json.loads(meter.get("/api/v1/summary?window=all"))["relays"])


def test_the_old_one_measures_to_the_end_and_the_new_one_counts(make: Make) -> None:
    old, new = make("old"), make("new")
    with joined(old) as relay:
        hand_over(old, new.path)
        wait_for(lambda: relays_of(new).get("r0", {}).get("opened") == 1)
        assert relays_of(new)["r0"]["connected"]
        finish(relay)
        relay.sendall(Script().status(relay_status(opened=1, measured=1, draining=True)).pack(3))
        assert relay.recv(ACK.size) == ACK.pack(3)
    status, log = old.stop()
    assert status == 0, log
    assert "event=exchange id=r0-1" in log
    assert os.path.exists(old.path), "it may be the other one's by now"
    told = relays_of(new)["r0"]
    assert (told["opened"], told["measured"], told["unsettled"], told["dropped"]) == (1, 1, 0, {})
    assert not told["connected"]
    assert json.loads(new.get("/api/v1/summary?window=all"))["n"] == 0, "measured there"
    assert b'llmtap_tap_measured_exchanges_total{relay="r0"} 1.0' in new.get("/metrics")


def test_a_relay_that_dies_in_the_drain_is_counted_as_lost(make: Make) -> None:
    old, new = make("old"), make("new")
    with joined(old):
        hand_over(old, new.path)
        wait_for(lambda: "r0" in relays_of(new))
    assert old.stop()[0] == 0
    told = relays_of(new)["r0"]
    assert (told["opened"], told["measured"], told["unsettled"]) == (1, 0, 0)
    assert told["dropped"] == {"relay_lost": 1}
