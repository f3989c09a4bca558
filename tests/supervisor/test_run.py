"""What a reload makes of the meter at work, by what it changes."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llmtap.config import Settings, load_settings
from llmtap.supervisor.run import ProxyRun

BASE = {"relay.upstream": "http://gateway:80"}
ARMS = '[{"name": "a"}, {"name": "b", "upstream": "http://other:80"}]'


def settings_of(more: dict[str, str]) -> Settings:
    return load_settings(None, {}, BASE | more)


@pytest.fixture
def run() -> Iterator[ProxyRun]:
    run = ProxyRun.begin(settings_of({}))
    run.capture_met = True
    yield run
    Path(run.folder).rmdir()


@pytest.mark.parametrize(
    ("before", "change", "serves"),
    [
        ({}, {"relay.upstream": "http://other:80"}, True),
        ({}, {"relay.drain_timeout": "300s"}, True),
        ({}, {"relay.via": "true"}, True),
        ({}, {"relay.workers": "4"}, True),
        ({}, {"log.level": "warning"}, True),
        ({}, {"meter.admin": "127.0.0.1:9999"}, True),
        ({"capture.to": "kept"}, {"relay.upstream": "http://other:80"}, True),
        ({"otlp.endpoint": "http://collector:4318"}, {"relay.workers": "4"}, True),
        ({"otlp.endpoint": "http://collector:4318"}, {"relay.upstream": "http://other:80"}, False),
        ({}, {"otlp.endpoint": "http://collector:4318"}, False),
        ({}, {"meter.models_max": "7"}, False),
        ({}, {"meter.socket": "/tmp/tap.sock"}, False),
        ({}, {"tenants.salt": "pepper"}, False),
        ({}, {"cost.gpus": "1"}, False),
        ({}, {"capture.to": "kept"}, False),
        ({}, {"experiment.arms": ARMS}, False),
    ],
)
def test_a_reload_takes_another_meter_only_for_what_no_word_can_change(
    run: ProxyRun, before: dict[str, str], change: dict[str, str], serves: bool
) -> None:
    run.follow(settings_of(before))
    old = run.meter_setup(settings_of(before), 3)
    changed = settings_of(before | change)
    run.follow(changed)
    new = run.meter_setup(changed, 3)
    assert old.serves(new) is serves
    assert new.changeable != old.changeable, "the fingerprint at least"
    assert new.changeable.drain_s == changed.relay.drain_timeout / 1e9
    assert new.changeable.log == changed.log


def test_the_first_meter_of_a_capture_is_told_which_relays_were_there_before(run: ProxyRun) -> None:
    settings = settings_of({"capture.to": "kept"})
    run.relays = 4
    run.follow(settings)
    assert run.meter_setup(settings, 3).capture_after == 4
    assert run.meter_setup(settings, 3).capture_after == 4, "asking changes nothing"
    run.capture_met = True
    assert run.meter_setup(settings, 3).capture_after == 0


def test_a_copy_catches_up_with_what_was_started_meanwhile(run: ProxyRun) -> None:
    run.capture_met = False
    same, other = msgspec.structs.replace(run), msgspec.structs.replace(run)
    other.follow(settings_of({"capture.to": "elsewhere"}))
    run.relays, run.capture_met = 4, True
    for copy in (same, other):
        copy.catch_up(run)
    assert (same.relays, same.capture_met) == (4, True)
    assert (other.relays, other.capture_met) == (4, False), "its capture begins with its first meter"
