"""The options of the simulated server: by key from the command line, by header from a request."""

import msgspec
import pytest

from llmtap.errors import ConfigError
from llmtap.sim.options import (
    FaultOptions,
    GuardrailOptions,
    PacingOptions,
    SimOptions,
    for_request,
    keys,
    load_options,
)
from llmtap.units import Duration

MS = 1_000_000


def test_every_key_has_its_help_and_can_be_set_to_its_default() -> None:
    assert all(text.endswith(".") for text in keys().values())
    values = {}
    for key in keys():
        table, _, name = key.rpartition(".")
        value = getattr(getattr(SimOptions(), table) if table else SimOptions(), name)
        values[key] = f"{value}ns" if isinstance(value, Duration) else str(value).lower()
    assert load_options(values) == SimOptions()


def test_keys_become_options() -> None:
    found = load_options(
        {"ttft": "200ms", "pacing.jitter": "0.5", "guardrails.output_hold": "all", "seed": "-3"}
    )
    assert found == SimOptions(
        ttft=Duration(200 * MS), seed=-3, pacing=PacingOptions(jitter=0.5),
        guardrails=GuardrailOptions(output_hold="all"),
    )  # fmt: skip
    assert load_options({"guardrails.output_hold": "8"}).guardrails.output_hold == 8


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("ttft", "soon", "ttft: "),
        ("pacing.jiter", "1", "did you mean 'pacing.jitter'?"),
        ("pacing", "1", "there is no key 'pacing'"),
        ("pacing.jitter", "-1", "pacing.jitter: "),
        ("faults.stall_rate", "1.5", "faults.stall_rate: "),
        ("guardrails.output_hold", "-1", "output_hold"),
        ("guardrails.refusal", "rude", "guardrails.refusal: "),
        ("dialect", "klingon", "dialect: "),
        ("tokens", "0", "tokens: "),
    ],
)
def test_what_does_not_fit_is_named(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        load_options({key: value})


def test_faults_cannot_be_more_than_all() -> None:
    with pytest.raises(ValueError, match="together"):
        FaultOptions(stall_rate=0.6, slow_rate=0.6)


@pytest.mark.parametrize(
    ("headers", "changed"),
    [
        ({}, {}),
        ({"accept": "*/*"}, {}),
        ({"x-sim-ttft-ms": "1.5"}, {"ttft": Duration(1_500_000), "spread": 0.0}),
        ({"X-Sim-ITL": "2s"}, {"itl": Duration(2_000 * MS), "spread": 0.0}),
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
        ({"x-sim-dialect": "vllm"}, {"dialect": "vllm"}),
    ],
)
def test_a_request_asks_by_header(headers: dict[str, str], changed: dict[str, object]) -> None:
    options = SimOptions(
        spread=0.3, faults=FaultOptions(reset_rate=0.1) if "faults" not in changed else FaultOptions()
    )
    expected = msgspec.structs.replace(options, **changed)
    assert for_request(options, headers) == expected


def test_a_fault_by_header_takes_the_place_of_the_servers() -> None:
    options = SimOptions(faults=FaultOptions(reset_rate=1.0))
    assert for_request(options, {"x-sim-fault": "slow"}).faults == FaultOptions(slow_rate=1.0)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-sim-seed": "1"},
        {"x-sim-fault": "no"},
        {"x-sim-pacing": "{}"},
        {"x-sim-stall-rate": "2"},
        {"x-sim-": "1"},
    ],
)
def test_a_header_that_does_not_fit_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"x-sim-|\d"):
        for_request(SimOptions(), headers)
