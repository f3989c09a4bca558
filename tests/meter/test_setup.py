"""Which settings another meter takes, and which a running one can be told."""

from typing import Any

import msgspec
import pytest

from llmtap.log import LogSetup
from llmtap.meter.options import CostOptions, MeterOptions
from llmtap.meter.setup import Changeable, MeterSetup
from llmtap.units import decode_special, encode_special

SETUP = MeterSetup(
    options=MeterOptions(), socket="/run/tap.sock", admin_fd=3, servers={"": ("gateway", 80)}, capture_after=7
)


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"changeable": Changeable(log=LogSetup(level="error"), config="other", drain_s=300.0)}, True),
        ({"takes_over": True, "capture_after": 0}, True),
        ({"options": MeterOptions(admin="127.0.0.1:1")}, True),
        ({"options": MeterOptions(models_max=7)}, False),
        ({"cost": CostOptions(gpus=1)}, False),
        ({"servers": {"": ("another", 80)}}, False),
    ],
)
def test_a_meter_serves_as_long_as_nothing_that_it_was_started_with_changes(
    change: dict[str, Any], serves: bool
) -> None:
    assert SETUP.serves(msgspec.structs.replace(SETUP, **change)) is serves


def test_it_comes_out_of_its_line_as_it_went_in() -> None:
    line = msgspec.json.encode(SETUP, enc_hook=encode_special)
    assert msgspec.json.decode(line, type=MeterSetup, dec_hook=decode_special) == SETUP
