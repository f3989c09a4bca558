"""The options of the simulated server: by key from the command line, by header from a request."""

from typing import Any

import msgspec
import pytest

from llmtap.errors import ConfigError
from llmtap.sim.gateway.options import (
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


@pytest.mark.parametrize(
    "header", ["x-sim-ttft", "x-sim-ttft-ms", "X-Sim-Itl", "x-sim-spread", "x-sim-jitter"]
)
def test_where_an_engine_decides_a_request_cannot_ask_for_a_schedule(header: str) -> None:
    assert for_request(SimOptions(), {header: "0"}) is not None
    with pytest.raises(ValueError, match=f"{header}: here an engine decides"):
        for_request(SimOptions(), {header: "1"}, fixed=False)
    assert for_request(SimOptions(), {"x-sim-tokens": "3"}, fixed=False).tokens == 3


def test_a_fixed_schedule_is_no_engine() -> None:
    assert load_engine("fixed", {"ttft": "1s"}, serving={}, readings={}) is None


def test_an_engine_is_named_by_its_scheduler() -> None:
    engine = load_engine(
        "continuous_batching", {"tokens": "3"}, serving={"kv-tokens": "100"}, readings={}, predictor="prompt"
    )
    assert engine is not None and engine.iterates
    assert (engine.setup.serving.kv_tokens, engine.setup.readings.predictor) == (100, "prompt")
    assert engine.tokens_max == 96, "whole blocks"
    assert engine.block_tokens == 0
    shared = load_engine("continuous_batching", {}, serving={"prefix_cache": "true"}, readings={})
    assert shared is not None and shared.block_tokens == 16
    batches = load_engine("multi_bin_dynamic", {}, serving={}, readings={"bin_edges": "1,9"}, servers=3)
    assert batches is not None and not batches.iterates
    assert (batches.servers, batches.tokens_max, batches.block_tokens) == (3, None, 0)


@pytest.mark.parametrize(
    ("scheduler", "given", "says"),
    [
        ("continuos_batching", {}, r"(?s)--scheduler: .*did you mean continuous_batching\?"),
        ("x", {}, "(?s)--scheduler: .*there are fixed, static_fifo"),
        ("continuous_batching", {"values": {"ttft": "1s"}}, "ttft: belongs to --scheduler fixed"),
        ("static_fifo", {"values": {"itl": "1s"}}, "itl: belongs to --scheduler fixed"),
        ("static_fifo", {"values": {"pacing.jitter": "0.1"}}, "pacing.jitter: belongs to --scheduler fixed"),
        ("continuous_batching", {"serving": {"seq_max": "1"}}, r"(?s)--serving: .*did you mean seqs_max\?"),
        ("continuous_batching", {"serving": {"seqs_max": "0"}}, "--serving: seqs_max: "),
        ("static_fifo", {"readings": {"static_batch": "0"}}, "--reading: static_batch"),
        ("static_fifo", {"readings": {"predictor": "oracle"}}, "--reading: predictor"),
        ("static_fifo", {"predictor": "oracle"}, "--predictor: 'oracle' is none of perfect, "),
        ("shortest_predicted_first", {"predictor": "shuffled"}, "--predictor: shuffled needs"),
        ("multi_bin_dynamic", {}, "--reading: bin_edges is missing"),
        ("continuous_batching", {"servers": 2}, "--servers: continuous_batching is one server"),
        ("fixed", {"serving": {"seqs_max": "1"}}, "--serving: belongs to an engine"),
        ("fixed", {"readings": {"bins": "1"}}, "--reading: belongs to an engine"),
        ("fixed", {"predictor": "perfect"}, "--predictor: belongs to an engine"),
        ("fixed", {"servers": 2}, "--servers: belongs to an engine"),
    ],
)
def test_an_engine_that_cannot_be_is_told_why(scheduler: str, given: dict[str, Any], says: str) -> None:
    given = {"values": {}, "serving": {}, "readings": {}, **given}
    with pytest.raises(ConfigError, match=says):
        load_engine(scheduler, **given)
