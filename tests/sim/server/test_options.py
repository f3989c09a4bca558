"""The options of the simulated server: by key from the command line, by header from a request."""

import re
from typing import Any

import msgspec
import pytest

from llmtap.errors import ConfigError
from llmtap.sim.model_options import ModelOptions, Serving
from llmtap.sim.schedulers.registry import ALL_OPTIONS, SCHEDULERS
from llmtap.sim.server.options import (
    FaultOptions,
    GuardrailOptions,
    PacingOptions,
    SimOptions,
    check_effects,
    for_request,
    keys,
    load_engine,
    load_options,
    options_looked_at,
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


def test_every_header_that_is_listed_is_taken_with_what_is_its_default() -> None:
    """And no header is taken that is not listed."""
    listed = {one.header.removesuffix("[-ms]"): one for one in keys() if one.header}
    for header, one in listed.items():
        if one.key:
            for_request(SimOptions(), {header: one.default})
        if one.header.endswith("[-ms]"):
            for_request(SimOptions(), {header + "-ms": "7.5"})
    for key in names():
        header = "x-sim-" + key.rpartition(".")[2].replace("_", "-")
        if header not in listed:
            with pytest.raises(ValueError, match=f"there is no header {header}"):
                for_request(SimOptions(), {header: "1"})
    for kind in listed["x-sim-fault"].meaning.removesuffix(".").split(": ")[1].split(", "):
        assert sum(rate for _, rate in for_request(SimOptions(), {"x-sim-fault": kind}).faults.rates()) == 1


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
        ("guardrails.refusal", "rude", "expected one of content_filter, "),
        ("guardrails.output_hold", "-1", "a whole number of at least 0 or all, got '-1'"),
        ("guardrails.input_beside", "maybe", "expected true or false, got 'maybe'"),
        ("dialect", "klingon", "dialect: expected one of openai, vllm, got 'klingon'"),
        ("tokens", "0", "tokens: expected a whole number from 1 to 131072, got '0'"),
        ("seed", "1.5", "seed: expected a whole number, got '1.5'"),
        ("pacing.jitter", "9", "pacing.jitter: expected a number from 0 to 3, got '9'"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        load_options({key: value})
    with pytest.raises(ConfigError) as raised:
        load_options({key: value}, {key: "--as-typed"})
    assert raised.value.place == "--as-typed"


def test_what_fits_alone_and_not_together_is_named_with_all_of_it() -> None:
    values = {"faults.stall_rate": "0.6", "ttft": "1s", "faults.slow_rate": "0.6"}
    with pytest.raises(ConfigError, match=r"faults.stall_rate, faults.slow_rate: .* together"):
        load_options(values)


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


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"x-sim-seed": "1"}, "there is no header x-sim-seed"),
        ({"x-sim-fault": "no"}, "x-sim-fault: there is no fault 'no'; there are stall, "),
        ({"x-sim-pacing": "{}"}, "there is no header x-sim-pacing"),
        ({"x-sim-stall-rate": "2"}, "x-sim-stall-rate: expected a number from 0 to 1, got '2'"),
        ({"x-sim-": "1"}, "there is no header x-sim-"),
        ({"X-Sim-Ttft": "soon"}, "X-Sim-Ttft: expected a duration"),
        ({"x-sim-itl-ms": "x"}, "x-sim-itl-ms: expected a duration"),
        ({"x-sim-tokens": "0"}, "x-sim-tokens: expected a whole number from 1 to 131072, got '0'"),
        ({"x-sim-refusal": "rude"}, "x-sim-refusal: expected one of content_filter, "),
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
    with pytest.raises(ValueError, match=f"{header}: here an engine decides"):
        for_request(SimOptions(), {header: "1"}, fixed=False)
    assert for_request(SimOptions(), {"x-sim-tokens": "3"}, fixed=False).tokens == 3


def test_an_engine_is_named_by_its_scheduler() -> None:
    engine = load_engine(
        "shortest_predicted_first", {}, serving={"kv-tokens": "100"}, readings={}, predictor="prompt"
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
        ("continuous_batching", {"serving": {"seqs_max": "0"}}, "--serving: seqs_max: .*at least 1, got '0'"),
        ("continuous_batching", {"serving": {"preemption": "x"}}, "preemption: .*recompute, swap, got 'x'"),
        ("continuous_batching", {"readings": {"bins": "4"}}, "--reading bins: has no effect on continuous_b"),
        ("continuous_batching", {"serving": {"chunk": "4"}}, "--serving chunk: has no effect"),
        ("continuous_batching", {"serving": {"ttft": "1s"}}, "(?s)--serving ttft: .*while give_up is"),
        (
            "continuous_batching",
            {"predictor": "perfect"},
            "--predictor: has no effect on continuous_batching",
        ),
        ("static_fifo", {"serving": {"seqs_max": "4"}}, "--serving seqs_max: has no effect on static_fifo"),
        ("static_fifo", {"readings": {"request-sla": "4s"}}, "--reading request_sla: has no effect"),
        (
            "static_fifo",
            {"readings": {"predictor": "noisy"}, "predictor": "perfect"},
            "--predictor: is given by --reading predictor, too",
        ),
        (
            "static_fifo",
            {"values": {"itl": "1s"}, "places": {"itl": "--itl"}},
            "--itl: belongs to --scheduler fixed",
        ),
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


BINNED = ModelOptions(bin_edges=(1, 30))


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_whatever_is_given_is_looked_at_or_refused(scheduler: str) -> None:
    known = options_looked_at(scheduler, BINNED, Serving())
    assert {"same_instant", "tie"} < known, "the driver's"
    assert not known & {"request_sla", "percentile", "window", "bins"}
    for name in ALL_OPTIONS:
        places = {name: f"--some {name}"}
        if name in known:
            check_effects(scheduler, places, BINNED, Serving())
            continue
        with pytest.raises(ConfigError, match=f"--some {name}: has no effect"):
            check_effects(scheduler, places, BINNED, Serving())


def test_what_needs_another_option_says_which() -> None:
    places = {"tbt": "--serving tbt"}
    check_effects("chunked_prefill", places, BINNED, Serving(give_up="late"))
    with pytest.raises(ConfigError, match=r"(?s)--serving tbt: has no effect\n.*give_up"):
        check_effects("chunked_prefill", places, BINNED, Serving())
