"""How the open points of seed 004 are read: an option each.

The seed describes three schedulers and leaves two dozen points open; which way they are read decides which
scheduler looks best. The defaults are those of the project's list of readings (its numbers stand beside the
fields); every other one can be run, so that a ranking is told with the readings it holds under.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from llmtap.settings import explained, read_options
from llmtap.sim.latency import SEED_ITERATIONS, SEED_MODEL, IterationModel, LatencyModel
from llmtap.units import Duration, format_ns
from llmtap.workload.requests import Requests

__all__ = [
    "OUTPUT_DELAYS", "PREDICTORS", "SEEDED", "ModelOptions", "Serving", "ServingSetup",
    "explain_model_options", "explain_serving", "predict", "read_model_options", "read_serving", "settled",
]  # fmt: skip


_MS: Final = 1_000_000
_S: Final = 1_000_000_000


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to read seed 004. Each field's number is that of the point in the list of readings."""

    eps: Annotated[Duration, Meta(description="1: half width of the band around the token SLA")] = Duration(
        5 * _MS
    )
    token_sla: Annotated[Duration, Meta(description="2: longest time between tokens")] = Duration(10 * _MS)
    request_sla: Annotated[Duration, Meta(description="2: longest time from arrival to completion")] = (
        Duration(20 * _S)
    )
    predictor: Annotated[
        Literal["perfect", "prompt", "noisy", "shuffled"],
        Meta(description="3: the true output; 1.5 prompt^0.7; that with noise of 0.1; true ones shuffled"),
    ] = "perfect"
    bin_limit: Annotated[
        Literal["7gb", "8gb", "none"],
        Meta(description="4: KV memory that limits a bin's batches, with a margin or without"),
    ] = "7gb"
    controller_limit: Annotated[
        Literal["global", "bin"],
        Meta(description="4, 10: B_max of a bin's controller: the GPU's, or the bin's"),
    ] = "global"
    length: Annotated[
        Literal["prompt+output", "output"], Meta(description="5: a batch's length is the longest of")
    ] = "prompt+output"
    window: Annotated[
        Literal["completion", "arrivals"],
        Meta(description="6: throughput is up to the last completion, or the last arrival"),
    ] = "completion"
    tokens: Annotated[
        Literal["prompt+output", "output"], Meta(description="7: tokens that count as throughput")
    ] = "prompt+output"
    bins: Annotated[int, Meta(description="8: K, how many bins", ge=1, le=1_024)] = 8
    bin_choice: Annotated[
        Literal["round-robin", "longest-queue", "oldest-head"],
        Meta(description="9: which bin is next; empty ones are passed over"),
    ] = "round-robin"
    b_start: Annotated[
        Literal["middle", "one", "first-batch"],
        Meta(description="10: average batch size to begin with: half of B_max, 1, or the first one"),
    ] = "middle"
    band: Annotated[
        Literal["alpha", "delta"],
        Meta(description="11: half width of case 3: alpha / 2 = 2, or delta / 2 = 1"),
    ] = "alpha"
    tau_start: Annotated[
        Literal["zero", "beta"], Meta(description="12: average time between tokens to begin with")
    ] = "zero"
    guards: Annotated[
        Literal["none", "authors"],
        Meta(description="13: whole averages, intervals that only shrink or rise, warm-up"),
    ] = "none"
    memory_check: Annotated[
        Literal["none", "hard"],
        Meta(description="14: take requests off a formed batch until its KV fits 7 GB"),
    ] = "none"
    lengths_start: Annotated[
        Literal["500", "limit"],
        Meta(description="15: before the first batch, 300 + 200 tokens are expected, or memory is no limit"),
    ] = "500"
    candidates: Annotated[int, Meta(description="16: M, requests looked at for a batch", ge=1)] = 128
    failed: Annotated[Literal["kept", "dropped"], Meta(description="17: requests without output tokens")] = (
        "kept"
    )
    same_instant: Annotated[
        Literal["one-by-one", "all-first"],
        Meta(description="18: arrivals of one instant: dispatched after each, or after all"),
    ] = "one-by-one"
    tie: Annotated[
        Literal["arrival-first", "gpu-first"],
        Meta(description="19: which comes first when both are at one time"),
    ] = "arrival-first"
    sla_step: Annotated[
        Literal["batch", "update"],
        Meta(description="20: the interval moves when a batch is formed, or when it is done"),
    ] = "batch"
    partial: Annotated[
        Literal["run", "wait"],
        Meta(description="21: static FIFO with fewer requests than its batch: run, or wait"),
    ] = "run"
    bin_edges: Annotated[
        tuple[int, ...],
        Meta(description="8: lower edge of each bin, such as 1,30,117, instead of bins of equal mass"),
    ] = ()
    edges: Annotated[
        Literal["workload", "first-1000"],
        Meta(description="22: what bin edges are quantiles of"),
    ] = "workload"
    below_first: Annotated[
        Literal["last", "first"], Meta(description="22: bin of what is shorter than the first bin's edge")
    ] = "last"
    percentile: Annotated[
        Literal[
            "linear", "nearest_rank", "hazen", "weibull", "median_unbiased", "lower", "higher", "nearest"
        ],
        Meta(description="23: rule for percentiles"),
    ] = "linear"
    static_batch: Annotated[int, Meta(description="batch size of static FIFO", ge=1)] = 8
    b_max: Annotated[int, Meta(description="largest batch", ge=1)] = 128
    memory_gb: Annotated[float, Meta(description="of the GPU", gt=0)] = 12.0
    model_gb: Annotated[float, Meta(description="taken by the model", ge=0)] = 4.0
    margin_gb: Annotated[float, Meta(description="kept free, where 7 GB are spoken of", ge=0)] = 1.0
    kv_gb_per_token: Annotated[float, Meta(description="KV cache per token", gt=0)] = 1.875e-4

    @property
    def free_gb(self) -> float:
        """For KV: 8 GB of the seed's GPU."""
        return self.memory_gb - self.model_gb

    @property
    def safe_gb(self) -> float:
        """The same less a margin: 7 GB of the seed's GPU."""
        return self.free_gb - self.margin_gb


def read_model_options(settings: Mapping[str, str]) -> ModelOptions:
    """Readings with some of them set, by name, from text. Raises ValueError, which names the nearest."""
    readings = read_options(ModelOptions, settings, "reading")
    if readings.safe_gb <= 0:
        raise ValueError("memory_gb: nothing is left of it for the KV cache")
    edges = readings.bin_edges
    if edges and (edges[0] < 0 or any(low >= high for low, high in pairwise(edges))):
        raise ValueError(f"bin_edges: expected rising whole numbers, got {','.join(map(str, edges))!r}")
    return readings


def explain_model_options() -> list[tuple[str, str, str]]:
    """Each reading's name, default and meaning, with the values it may have."""
    return list(explained(ModelOptions))


_MS_SERVING: Final = 1_000_000

OUTPUT_DELAYS: Final[Mapping[str, Duration]] = {"output_delay": Duration(50 * _MS_SERVING)}
"""By scheduler, where nobody sets it; 0 for all others. 50 ms: of who reads 20 tokens a second (001, 5.1)."""


class Serving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the iteration-level schedulers."""

    seqs_max: Annotated[int, Meta(ge=1, description="requests that run at a time (vLLM's max_num_seqs)")] = (
        256
    )
    tokens_max: Annotated[
        int,
        Meta(ge=1, description="tokens of prompts taken in by one iteration (vLLM's max_num_batched_tokens)"),
    ] = 2_048
    chunk: Annotated[
        int,
        Meta(ge=1, description="tokens of one iteration, decodes included, with chunked prefill (Sarathi)"),
    ] = 512
    kv_tokens: Annotated[int, Meta(ge=1, description="tokens that the KV memory holds")] = 37_333
    block: Annotated[int, Meta(ge=1, description="tokens of a block of KV memory")] = 16
    preemption: Annotated[
        Literal["recompute", "swap"],
        Meta(description="when the memory is full, the newest is thrown out and taken in again, or swapped"),
    ] = "recompute"
    swap_token: Annotated[Duration, Meta(description="swapping, per token and direction")] = Duration(7_500)
    prefix_cache: Annotated[
        bool, Meta(description="blocks that prompts share are kept and not taken in again")
    ] = False
    attention: Annotated[
        Duration,
        Meta(
            description="what a prompt of 1,000 tokens takes more, and others as the square of their length"
        ),
    ] = Duration(0)
    prepone: Annotated[
        int, Meta(ge=1, description="tokens that decode_prepone makes ahead of a prefill (seed 001, 3.3)")
    ] = 2
    output_delay: Annotated[
        Duration | None,
        Meta(description="each token leaves so long after the one before at the earliest (seed 001, 3.4)"),
    ] = None
    """None: as `OUTPUT_DELAYS` has it."""
    queue_max: Annotated[
        int, Meta(ge=0, description="requests that may wait; others are turned away; 0: no limit")
    ] = 0
    give_up: Annotated[
        Literal["never", "late"],
        Meta(description="late: a request that has missed ttft or tbt is served no further (seed 001, 4.1)"),
    ] = "never"
    ttft: Annotated[Duration, Meta(description="what give_up takes for late: the first token")] = Duration(
        1_000 * _MS_SERVING
    )
    tbt: Annotated[Duration, Meta(description="what give_up takes for late: a gap between tokens")] = (
        Duration(200 * _MS_SERVING)
    )


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """All that a scheduler is made from, besides the requests."""

    model: LatencyModel = SEED_MODEL
    readings: ModelOptions = field(default_factory=ModelOptions)
    iterations: IterationModel = SEED_ITERATIONS
    serving: Serving = field(default_factory=Serving)


def read_serving(settings: Mapping[str, str]) -> Serving:
    """Options with some of them set, by name, from text. Raises ValueError, which names the nearest."""
    return read_options(Serving, settings, "option of serving")


def settled(serving: Serving, scheduler: str) -> Serving:
    """The same, with what a scheduler takes where nobody says otherwise."""
    if serving.output_delay is not None:
        return serving
    delay = OUTPUT_DELAYS.get(scheduler, Duration(0))
    return msgspec.structs.replace(serving, output_delay=delay)


def explain_serving() -> list[tuple[str, str, str]]:
    """Each option's name, default and meaning, with the values it may have."""
    own = "".join(f"; {format_ns(delay)} with {name}" for name, delay in OUTPUT_DELAYS.items())
    return [
        (name, f"{format_ns(0)}{own}" if default is None else default, meaning)
        for name, default, meaning in explained(Serving)
    ]


SEEDED: Final = frozenset(("noisy", "shuffled"))
"""Those that draw."""

_LENGTH_MAX: Final = 4_096
_SIGMA: Final = 0.1


def predict(requests: Requests, predictor: str, seed: int | None) -> "array[int]":
    """A column of predicted output tokens. Those of SEEDED want a seed."""
    assert seed is not None or predictor not in SEEDED
    return PREDICTORS[predictor](requests, Random(seed or 0))


def _perfect(requests: Requests, random: Random) -> "array[int]":
    return array("q", requests.output)


def _prompt(requests: Requests, random: Random) -> "array[int]":
    return array("q", [_clamped(1.5 * n**0.7) for n in requests.input])


def _noisy(requests: Requests, random: Random) -> "array[int]":
    noise = random.lognormvariate
    return array("q", [_clamped(1.5 * n**0.7 * noise(0, _SIGMA)) for n in requests.input])


def _shuffled(requests: Requests, random: Random) -> "array[int]":
    told = list(requests.output)
    random.shuffle(told)
    return array("q", told)


def _clamped(length: float) -> int:
    return max(1, min(int(length), _LENGTH_MAX))


PREDICTORS: Final[dict[str, Callable[[Requests, Random], "array[int]"]]] = {
    "perfect": _perfect,
    "prompt": _prompt,
    "noisy": _noisy,
    "shuffled": _shuffled,
}
