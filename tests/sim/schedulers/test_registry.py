"""Invariant: what a scheduler is said not to read changes none of its figures, and it looks at the rest."""

from array import array
from dataclasses import replace
from typing import Any, cast

import pytest

from llmtap.sim.engine import Engine, run_virtual
from llmtap.sim.model_options import (
    ModelOptions,
    Serving,
    ServingSetup,
    read_model_options,
    read_serving,
)
from llmtap.sim.schedulers.registry import ALL_OPTIONS, SCHEDULERS
from llmtap.sim.sweep.simulate import simulate
from llmtap.workload.requests import Requests

OTHER = {
    "eps": "100ms",
    "token_sla": "1ms",
    "request_sla": "1s",
    "predictor": "prompt",
    "bin_limit": "none",
    "controller_limit": "bin",
    "controllers": "global",
    "length": "output",
    "window": "arrivals",
    "tokens": "output",
    "bins": "2",
    "bin_choice": "longest-queue",
    "b_start": "one",
    "band": "delta",
    "tau_start": "beta",
    "guards": "authors",
    "memory_check": "hard",
    "lengths_start": "limit",
    "candidates": "2",
    "failed": "dropped",
    "same_instant": "all-first",
    "tie": "gpu-first",
    "sla_step": "update",
    "partial": "wait",
    "bin_edges": "0,9",
    "edges": "first-1000",
    "below_first": "first",
    "percentile": "higher",
    "alpha_step": "8",
    "delta_step": "4",
    "alpha_ema": "0.5",
    "rho": "0.5",
    "b_min": "4",
    "static_batch": "3",
    "b_max": "2",
    "memory_gb": "9.5",
    "model_gb": "5",
    "margin_gb": "2",
    "kv_gb_per_token": "3e-3",
    "seqs_max": "2",
    "tokens_max": "40",
    "chunk": "16",
    "kv_tokens": "150",
    "block": "4",
    "preemption": "swap",
    "swap_token": "1ms",
    "prefix_cache": "true",
    "prepone": "5",
    "attention": "5s",
    "output_delay": "31ms",
    "give_up": "late",
    "ttft": "30ms",
    "tbt": "11ms",
}
SERVED = (
    {"give_up": "late", "kv_tokens": "160"},
    {"preemption": "swap", "kv_tokens": "160", "prefix_cache": "true"},
)
"""Settings under which others are read."""


def bursts() -> Requests:
    """Bursts of prompts that begin alike; some fail, some are too large."""
    n = 90
    arrivals = array("q", [i // 6 * 200_000_000 + i % 6 // 2 * 1_000_000 for i in range(n)])
    given, made = ([(i * step) % 61 + 1 for i in range(n)] for step in (13, 7))
    blocks = [tuple(range(k // 8)) for k in given]
    lengths = [0 if i % 11 == 5 else k for i, k in enumerate(made)]
    return Requests(arrivals, array("q", given), array("q", lengths), array("q"), blocks, 8)


def options_of(settings: dict[str, str]) -> tuple[ModelOptions, Serving]:
    return (
        read_model_options({k: v for k, v in settings.items() if k in ModelOptions.__struct_fields__}),
        read_serving({k: v for k, v in settings.items() if k in Serving.__struct_fields__}),
    )


def figures(name: str, settings: dict[str, str]) -> dict[str, Any]:
    readings, serving = options_of(settings)
    result = simulate(name, bursts(), ServingSetup(readings=readings, serving=serving)).to_dict()
    return {key: value for key, value in result.items() if key not in ("readings", "serving")}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_is_not_read_changes_nothing(name: str) -> None:
    unread = ALL_OPTIONS - SCHEDULERS[name].options_read
    assert unread
    assert figures(name, {option: OTHER[option] for option in unread}) == figures(name, {})


def test_every_option_has_another_value() -> None:
    assert OTHER.keys() == ALL_OPTIONS
    usual = options_of({})
    assert all(options_of({name: value}) != usual for name, value in OTHER.items())


class Watched:
    """Options, and which of them somebody looked at."""

    PARTS = {"free_gb": ("memory_gb", "model_gb"), "safe_gb": ("memory_gb", "model_gb", "margin_gb")}

    def __init__(self, options: Any) -> None:
        self.options = options
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.seen.update(self.PARTS.get(name, (name,)))
        return getattr(self.options, name)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_is_read_is_looked_at(name: str) -> None:
    kind = SCHEDULERS[name]
    seen: set[str] = set()
    for base in ({}, {"memory_check": "hard"}, {"bin_edges": "3,9,20"}, *SERVED):
        readings, serving = (Watched(one) for one in options_of(base))
        requests = bursts()
        requests = replace(requests, predicted=requests.output)
        setup = ServingSetup(readings=cast(ModelOptions, readings), serving=cast(Serving, serving))
        run_virtual(requests, Engine(kind.build(requests, setup)))
        seen |= readings.seen | serving.seen
    # These are looked at by who drives the run and sums it up, and the predictor by who predicts.
    driven = {"token_sla", "request_sla", "window", "tokens", "failed", "same_instant", "tie", "percentile"}
    assert kind.options_read - driven - {"predictor"} <= seen
    assert driven <= kind.options_read
