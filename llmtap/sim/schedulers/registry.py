"""All schedulers by name (`SCHEDULERS`), how each is built, and the options that each of them reads.

`llmtap sim run`, its sweeps and `llmtap sim serve` look schedulers up by name. An option that a scheduler
does not read makes no separate job in its sweep, and is null in its results.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from llmtap.sim.engine import Iterating, Scheduler
from llmtap.sim.model_options import ModelOptions, Serving, ServingSetup
from llmtap.sim.schedulers import iterating
from llmtap.sim.schedulers.batching import DynamicNoBins, MultiBinDynamic, StaticFifo
from llmtap.workload.requests import Requests

ALL_OPTIONS: Final = frozenset((*ModelOptions.__struct_fields__, *Serving.__struct_fields__))

_COMMON_OPTIONS: Final = frozenset(
    ("token_sla", "request_sla", "window", "tokens", "failed", "same_instant", "tie", "percentile")
)
"""Options that the driver and the summary read; they apply to all schedulers."""
_BATCH_OPTIONS: Final = _COMMON_OPTIONS | {
    "length",
    "memory_check",
    "memory_gb",
    "model_gb",
    "margin_gb",
    "kv_gb_per_token",
}
_DYNAMIC_OPTIONS: Final = _BATCH_OPTIONS | {
    "eps",
    "b_start",
    "band",
    "tau_start",
    "guards",
    "lengths_start",
    "candidates",
    "sla_step",
    "b_min",
    "b_max",
    "alpha_step",
    "delta_step",
    "alpha_ema",
    "rho",
}
_ITERATION_OPTIONS: Final = _COMMON_OPTIONS | set(Serving.__struct_fields__) - {
    "tokens_max",
    "chunk",
    "prepone",
    "output_delay",
}


class SchedulerKind(NamedTuple):
    """A scheduler that a user can choose: its constructor and its properties."""

    build: Callable[[Requests, ServingSetup], Scheduler]
    iterates: bool
    """Whether the scheduler composes a batch at every iteration; otherwise it serves whole batches."""
    options_read: frozenset[str] = ALL_OPTIONS
    """Names of the options that the scheduler reads."""


def _batch_kind(
    scheduler: type[StaticFifo] | type[DynamicNoBins] | type[MultiBinDynamic], options_read: frozenset[str]
) -> SchedulerKind:
    return SchedulerKind(
        lambda requests, setup: scheduler(requests, setup.model, setup.readings),
        iterates=False,
        options_read=options_read,
    )


def _iteration_kind(
    scheduler: Callable[[Requests, ServingSetup], Iterating], *own_options: str
) -> SchedulerKind:
    return SchedulerKind(scheduler, iterates=True, options_read=_ITERATION_OPTIONS | set(own_options))


SCHEDULERS: Final[dict[str, SchedulerKind]] = {
    "static_fifo": _batch_kind(StaticFifo, _BATCH_OPTIONS | {"static_batch", "partial"}),
    "dynamic_no_bins": _batch_kind(DynamicNoBins, _DYNAMIC_OPTIONS),
    "multi_bin_dynamic": _batch_kind(
        MultiBinDynamic,
        _DYNAMIC_OPTIONS
        | {
            "bins",
            "bin_edges",
            "edges",
            "below_first",
            "bin_choice",
            "bin_limit",
            "controller_limit",
            "controllers",
            "predictor",
        },
    ),
    "continuous_batching": _iteration_kind(iterating.ContinuousBatching, "tokens_max"),
    "chunked_prefill": _iteration_kind(iterating.ChunkedPrefill, "chunk"),
    "decode_prepone": _iteration_kind(iterating.DecodePrepone, "tokens_max", "prepone"),
    "output_delay": _iteration_kind(
        lambda requests, setup: iterating.OutputDelay(
            iterating.ContinuousBatching(requests, setup), setup.serving.output_delay
        ),
        "tokens_max",
        "output_delay",
    ),
    # The ranks order only requests that wait for the first time: preempted requests are served before them.
    "shortest_predicted_first": _iteration_kind(
        lambda requests, setup: iterating.ContinuousBatching(requests, setup, requests.predicted),
        "tokens_max",
        "predictor",
    ),
}
"""Schedulers by name; the first three have the names of the multi-bin paper."""
