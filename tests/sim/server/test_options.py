"""The options of the simulated server: by key from the command line, by header from a request."""

import re
from typing import Any

import msgspec
import pytest

from llmtap.errors import ConfigError
from llmtap.sim.server.options import (
    FaultOptions,
    GuardrailOptions,
    PacingOptions,
    SimOptions,
    for_request,
    keys,
    load_engine,
    load_options,
)
from llmtap.units import Duration

MS = 1_000_000


def names() -> list[str]:
    return [one.key for one in keys() if one.key]


def test_every_key_has_its_help_and_can_be_set_to_its_default() -> None:
    assert all(one.meaning.endswith(".") for one in keys())
    assert load_options({one.key: one.default for one in keys() if one.key}) == SimOptions()
    values = {}
    for key in names():
        table, _, name = key.rpartition(".")
        value = getattr(getattr(SimOptions(), table) if table else SimOptions(), name)
        values[key] = f"{value}ns" if isinstance(value, Duration) else str(value).lower()
    assert load_options(values) == SimOptions()


def test_what_fits_alone_and_not_together_is_named_with_all_of_it() -> None:
    values = {"faults.stall_rate": "0.6", "ttft": "1s", "faults.slow_rate": "0.6"}
    with pytest.raises(
        ConfigError, match=r"faults.stall_rate, faults.slow_rate: the rates of all faults add up to"
    ):
        load_options(values)


@pytest.mark.parametrize(
    ("headers", "changed"),
    [
        ({}, {}),
        ({"x-sim-ttft-ms": "1.5"}, {"ttft": Duration(1_500_000), "spread": 0.0}),
        ({"x-sim-itl": "2s", "x-sim-spread": "0.1"}, {"itl": Duration(2_000 * MS), "spread": 0.1}),
        ({"x-sim-tokens-per-chunk": "3"}, {"pacing": PacingOptions(tokens_per_chunk=3)}),
        ({"x-sim-refusal": "text"}, {"guardrails": GuardrailOptions(refusal="text", refusal_rate=1.0)}),
        (
            {"x-sim-refusal": "text", "x-sim-refusal-rate": "0.5"},
            {"guardrails": GuardrailOptions(refusal="text", refusal_rate=0.5)},
        ),
        ({"x-sim-block-after": "2"}, {"guardrails": GuardrailOptions(block_after=2, block_rate=1.0)}),
        (
            {"x-sim-fault": "stall", "x-sim-fault-after": "2"},
            {"faults": FaultOptions(stall_rate=1, fault_after=2)},
        ),
        ({"x-sim-fault": "429"}, {"faults": FaultOptions(busy_rate=1.0)}),
    ],
)
def test_a_request_asks_by_header(headers: dict[str, str], changed: dict[str, object]) -> None:
    options = SimOptions(
        spread=0.3, faults=FaultOptions(reset_rate=0.1) if "faults" not in changed else FaultOptions()
    )
    expected = msgspec.structs.replace(options, **changed)
    assert for_request(options, headers) == expected


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"x-sim-seed": "1"}, "unknown header x-sim-seed"),
        ({"x-sim-fault": "no"}, "x-sim-fault: expected one of stall, "),
        ({"x-sim-stall-rate": "2"}, "x-sim-stall-rate: expected a number from 0 to 1, got '2'"),
        ({"x-sim-itl-ms": "x"}, "x-sim-itl-ms: expected a duration"),
        ({"x-sim-slow-rate": "0.6", "x-sim-stall-rate": "0.6"}, "x-sim-slow-rate, x-sim-stall-rate: "),
    ],
)
def test_a_header_that_does_not_fit_is_named(headers: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        for_request(SimOptions(), headers)


@pytest.mark.parametrize(
    "header", ["x-sim-ttft", "x-sim-ttft-ms", "X-Sim-Itl", "x-sim-spread", "x-sim-jitter"]
)
def test_where_an_engine_decides_a_request_cannot_ask_for_a_schedule(header: str) -> None:
    assert for_request(SimOptions(), {header: "0"}) is not None
    with pytest.raises(ValueError, match=f"{header}: has an effect only with --scheduler fixed"):
        for_request(SimOptions(), {header: "1"}, fixed=False)
    assert for_request(SimOptions(), {"x-sim-tokens": "3"}, fixed=False).tokens == 3


@pytest.mark.parametrize(
    ("scheduler", "given", "place"),
    [
        ("continuous_batching", {"values": {"ttft": "1s"}}, "ttft"),
        ("static_fifo", {"values": {"itl": "1s"}, "places": {"itl": "--itl"}}, "--itl"),
        ("continuous_batching", {"serving": {"seqs_max": "0"}}, "--serving"),
        ("continuous_batching", {"serving": {"prepone": "1"}}, "--serving prepone"),
        ("continuous_batching", {"readings": {"predictor": "perfect"}}, "--reading predictor"),
        ("static_fifo", {"readings": {"request-sla": "4s"}}, "--reading request_sla"),
        ("static_fifo", {"readings": {"predictor": "oracle"}}, "--reading"),
        ("shortest_predicted_first", {"readings": {"predictor": "shuffled"}}, "--reading"),
        ("continuous_batching", {"servers": 2}, "--servers"),
        ("fixed", {"serving": {"seqs_max": "1"}}, "--serving"),
        ("fixed", {"readings": {"bins": "1"}}, "--reading"),
        ("fixed", {"servers": 2}, "--servers"),
    ],
)
def test_an_engine_that_cannot_be_is_told_by_its_option(
    scheduler: str, given: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_engine(scheduler, **{"values": {}, "serving": {}, "readings": {}, **given})
    assert raised.value.place == place
