"""Latency models and options of the simulated engine: open points of the multi-bin paper, limits, predictors.

A `LatencyModel` computes the duration of a batch from its size and the tokens of its longest request (the
option `length` decides whether the prompt counts). An `IterationModel` computes the duration of an iteration
from the prompt tokens, the number of decoding requests and their context. The schedulers call both models.
`sweep/batch_grid.py` and `sweep/fitting.py` fit them to measurements.

A batch of b requests, the longest of L tokens: T(b, L) = alpha + beta L h(b), h(b) = 1 + gamma (b - 1) / b
(multi-bin paper). alpha is a constant per batch, beta the time per token of a batch of one, beta h(b) the
time between two tokens. The default constants are the paper's (4.2: Qwen3-1.7B in FP16 on an RTX 4080).
T is computed in double precision and rounded once to whole ns, so that starts and ends of batches add up
exactly.

`read_model_options` and `read_serving` parse texts of the command line into `ModelOptions` and `Serving`,
which the schedulers read. `predict` returns the predicted output tokens of each request, for schedulers that
need them. Options that only the simulated server has are in `server/options.py`.

The paper leaves two dozen points open. All of them are options ("readings" of the paper), because they decide
which scheduler is best. The defaults of `Serving` are the defaults of vLLM and Sarathi, and the memory of the
paper's GPU: 7 GB of KV memory at 0.1875 MB per token.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Annotated, Final, Literal

import msgspec

from llmtap.options.fields import opt
from llmtap.options.values import read_options
from llmtap.units import Duration, to_seconds
from llmtap.workload.requests import Requests

_MS: Final = 1_000_000
_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Duration of a batch of b requests, the longest of L tokens: alpha + beta L (1 + gamma (b - 1) / b)."""

    alpha_ns: float
    """Fixed time of a batch."""
    beta_ns: float
    """Time per output token of a batch with one request."""
    gamma: float
    """How much a batch slows each token, from 0 to 1."""

    def step_ns(self, size: int) -> float:
        """Return the time between two tokens of a batch of this size: beta h(b)."""
        return self.beta_ns * (1 + self.gamma * (size - 1) / size)

    def batch_ns(self, size: int, length: int) -> int:
        return round(self.alpha_ns + length * self.step_ns(size))

    def to_dict(self) -> dict[str, float]:
        return {"alpha": to_seconds(self.alpha_ns), "beta": to_seconds(self.beta_ns), "gamma": self.gamma}


SEED_MODEL: Final = LatencyModel(alpha_ns=59_653_000, beta_ns=5_742_000, gamma=0.316)
"""Constants of the multi-bin paper."""


@dataclass(frozen=True, slots=True)
class IterationModel:
    """Duration of one iteration in which some requests prefill and others decode.

    T(p, d, c) = step(max(d, 1)) + prefill p + context c, where p is the number of prompt tokens processed, d
    the number of decoding requests, and c the number of their tokens in KV memory. step(d) is beta h(d), as
    in `LatencyModel`; `prefill_ns` and `context_ns` are the times per token.
    """

    beta_ns: float
    """Time of an iteration with one decoding request."""
    gamma: float
    """Relative slowdown of a step with a very large batch (in h of the multi-bin paper)."""
    prefill_ns: float
    """Time per prompt token."""
    context_ns: float = 0.0
    """Time per token in the memory of the decoding requests."""

    def duration_ns(self, prefill: int, decodes: int, context: int = 0) -> int:
        size = max(decodes, 1)
        step_ns = self.beta_ns * (1 + self.gamma * (size - 1) / size)
        return round(step_ns + self.prefill_ns * prefill + self.context_ns * context)

    def to_dict(self) -> dict[str, float]:
        return {
            "beta": to_seconds(self.beta_ns),
            "gamma": self.gamma,
            "prefill": to_seconds(self.prefill_ns),
            "context": to_seconds(self.context_ns),
        }


SEED_ITERATIONS: Final = IterationModel(
    beta_ns=SEED_MODEL.beta_ns,
    gamma=SEED_MODEL.gamma,
    prefill_ns=(SEED_MODEL.alpha_ns - SEED_MODEL.beta_ns) / 611,
)
"""Constants of the multi-bin paper, for separate phases. In the paper, any prompt takes the time alpha (4.3).
With these constants, a prompt of the mean length in the paper's data (611 tokens, 3.1) takes this time; the
time of another prompt is proportional to its length."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for the points that the multi-bin paper leaves open (`--reading`).

    A number at the start of a help text is that of the point; options of one point have the same number.
    """

    eps: Annotated[Duration, opt("1: tolerance around the token SLA")] = Duration(5 * _MS)
    token_sla: Annotated[Duration, opt("2: maximum time between tokens")] = Duration(10 * _MS)
    request_sla: Annotated[Duration, opt("2: maximum time from arrival to completion")] = Duration(20 * _S)
    predictor: Annotated[
        Literal["perfect", "prompt", "noisy", "shuffled"],
        opt(
            "3: predicted output length: true; 1.5 prompt^0.7; the "
            "same with noise of 0.1; true lengths shuffled"
        ),
    ] = "perfect"
    bin_limit: Annotated[
        Literal["7gb", "8gb", "none"],
        opt("4: KV memory limit of a bin's batches, with the margin (7gb) or without (8gb)"),
    ] = "7gb"
    controller_limit: Annotated[
        Literal["global", "bin"], opt("4, 10: B_max of a bin's controller: of the GPU, or of the bin")
    ] = "global"
    controllers: Annotated[
        Literal["bin", "global"],
        opt("controller of batch sizes (algorithms 1 and 2): one of each bin, or one of all bins (H2)"),
    ] = "bin"
    length: Annotated[
        Literal["prompt+output", "output"],
        opt("5: length of a batch: the maximum of these over its requests"),
    ] = "prompt+output"
    window: Annotated[
        Literal["completion", "arrivals"],
        opt("6: end of the throughput period: the last completion, or the last arrival"),
    ] = "completion"
    tokens: Annotated[Literal["prompt+output", "output"], opt("7: tokens that count as throughput")] = (
        "prompt+output"
    )
    bins: Annotated[int, opt("8: K, number of bins", ge=1, le=1_024)] = 8
    bin_choice: Annotated[
        Literal["round-robin", "longest-queue", "oldest-head"],
        opt("9: choice of the next bin; empty bins are skipped"),
    ] = "round-robin"
    b_start: Annotated[
        Literal["middle", "one", "first-batch"],
        opt("10: initial average batch size: (b_min + b_max) / 2, 1, or the size of the first batch"),
    ] = "middle"
    band: Annotated[
        Literal["alpha", "delta"], opt("11: half width of case 3: alpha_step / 2 = 2, or delta_step / 2 = 1")
    ] = "alpha"
    tau_start: Annotated[Literal["zero", "beta"], opt("12: initial average time between tokens")] = "zero"
    guards: Annotated[
        Literal["none", "authors"],
        opt("13: guards of the authors' scripts: whole averages, monotonic intervals, warm-up"),
    ] = "none"
    memory_check: Annotated[
        Literal["none", "hard"],
        opt("14: hard: remove requests from a formed batch until its KV cache fits 7 GB"),
    ] = "none"
    lengths_start: Annotated[
        Literal["500", "limit"],
        opt("15: expected tokens before the first batch: 300 + 200 (500), or no memory limit (limit)"),
    ] = "500"
    candidates: Annotated[int, opt("16: M, number of candidate requests for a batch", ge=1)] = 128
    failed: Annotated[Literal["kept", "dropped"], opt("17: requests without output tokens")] = "kept"
    same_instant: Annotated[
        Literal["one-by-one", "all-first"],
        opt("18: dispatch of simultaneous arrivals: after each one, or after all"),
    ] = "one-by-one"
    tie: Annotated[
        Literal["arrival-first", "gpu-first"], opt("19: order of an arrival and a free GPU at the same time")
    ] = "arrival-first"
    sla_step: Annotated[
        Literal["batch", "update"],
        opt("20: time at which the interval moves: when a batch is formed, or when it is complete"),
    ] = "batch"
    partial: Annotated[
        Literal["run", "wait"], opt("21: static FIFO with fewer requests than the batch size: run, or wait")
    ] = "run"
    bin_edges: Annotated[
        tuple[int, ...], opt("8: lower edge of each bin, for example 1,30,117 (default: bins of equal mass)")
    ] = ()
    edges: Annotated[
        Literal["workload", "first-1000"], opt("22: requests whose length quantiles are the bin edges")
    ] = "workload"
    below_first: Annotated[
        Literal["last", "first"], opt("22: bin of requests that are shorter than the first edge")
    ] = "last"
    percentile: Annotated[
        Literal[
            "linear", "nearest_rank", "hazen", "weibull", "median_unbiased", "lower", "higher", "nearest"
        ],
        opt("23: rule for percentiles"),
    ] = "linear"
    alpha_step: Annotated[
        int, opt("alpha of algorithm 2: step by which the interval of batch sizes moves", ge=1)
    ] = 4
    delta_step: Annotated[int, opt("delta of algorithm 2: step of a correction", ge=1)] = 2
    alpha_ema: Annotated[
        float, opt("weight of the newest batch in the moving averages of 5.3", gt=0, le=1)
    ] = 0.2
    rho: Annotated[float, opt("share of the token capacity that algorithm 1 keeps free", ge=0, lt=1)] = 0.1
    static_batch: Annotated[int, opt("batch size of static FIFO", ge=1)] = 8
    b_min: Annotated[int, opt("minimum batch size, unless b_max or the limit of a bin is less", ge=1)] = 1
    b_max: Annotated[int, opt("maximum batch size", ge=1)] = 128
    memory_gb: Annotated[float, opt("memory of the GPU in GB", gt=0)] = 12.0
    model_gb: Annotated[float, opt("memory of the model in GB", ge=0)] = 4.0
    margin_gb: Annotated[
        float,
        opt(
            "GB of the KV cache's memory to keep free; with the defaults, 12 - 4 - 1 = 7 GB can be used", ge=0
        ),
    ] = 1.0
    kv_gb_per_token: Annotated[float, opt("KV cache per token in GB", gt=0)] = 1.875e-4

    @property
    def free_gb(self) -> float:
        """Memory for the KV cache in GB: 8 GB on the GPU of the multi-bin paper."""
        return self.memory_gb - self.model_gb

    @property
    def safe_gb(self) -> float:
        """`free_gb` less a margin: 7 GB on the GPU of the multi-bin paper."""
        return self.free_gb - self.margin_gb


def read_model_options(settings: Mapping[str, str]) -> ModelOptions:
    """Parse options, given as texts by name. Raises ValueError for an unknown name or invalid text."""
    readings = read_options(ModelOptions, settings, "reading")
    if readings.safe_gb <= 0:
        raise ValueError(
            "memory_gb: expected more than model_gb + margin_gb"
            f" ({readings.model_gb + readings.margin_gb:g}), for a KV cache, got {readings.memory_gb:g}"
        )
    edges = readings.bin_edges
    if edges and (edges[0] < 0 or any(low >= high for low, high in pairwise(edges))):
        raise ValueError(f"bin_edges: expected ascending numbers >= 0, got {','.join(map(str, edges))!r}")
    return readings


class Serving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of schedulers that iterate, and of their servers (`--serving`)."""

    seqs_max: Annotated[int, opt("maximum number of running requests (vLLM's max_num_seqs)", ge=1)] = 256
    tokens_max: Annotated[
        int, opt("maximum prompt tokens per iteration (vLLM's max_num_batched_tokens)", ge=1)
    ] = 2_048
    chunk: Annotated[
        int, opt("maximum tokens per iteration, including decodes, with chunked prefill (Sarathi)", ge=1)
    ] = 512
    kv_tokens: Annotated[int, opt("capacity of the KV memory in tokens", ge=1)] = 37_333
    block: Annotated[int, opt("tokens per block of KV memory", ge=1)] = 16
    preemption: Annotated[
        Literal["recompute", "swap"],
        opt("handling of the newest request when the memory is full: evict and recompute it, or swap it"),
    ] = "recompute"
    swap_token: Annotated[Duration, opt("duration of swapping per token and direction")] = Duration(7_500)
    prefix_cache: Annotated[bool, opt("keep blocks that prompts share, and skip their prefill")] = False
    attention: Annotated[
        Duration,
        opt("additional prefill time of a prompt of 1,000 tokens; it grows with the square of the length"),
    ] = Duration(0)
    prepone: Annotated[int, opt("tokens that decode_prepone generates before a prefill", ge=1)] = 2
    output_delay: Annotated[
        Duration, opt("minimum time between two tokens of a response; 50 ms: a reader of 20 tokens a second")
    ] = Duration(50 * _MS)
    give_up: Annotated[
        Literal["never", "late"], opt("late: stop serving a request that has missed ttft or tbt")
    ] = "never"
    ttft: Annotated[Duration, opt("TTFT limit of give_up")] = Duration(1_000 * _MS)
    tbt: Annotated[Duration, opt("limit of the time between tokens for give_up")] = Duration(200 * _MS)


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """Latency models and options with which a scheduler is built; whole batches need only the first two."""

    model: LatencyModel = SEED_MODEL
    readings: ModelOptions = field(default_factory=ModelOptions)
    """Choices for open points of a paper."""
    iterations: IterationModel = SEED_ITERATIONS
    serving: Serving = field(default_factory=Serving)


def read_serving(settings: Mapping[str, str]) -> Serving:
    """Parse options, given as texts by name. Raises ValueError for an unknown name or invalid text."""
    return read_options(Serving, settings, "option of serving")


SEEDED: Final = frozenset(("noisy", "shuffled"))
"""Predictors that need a random seed."""

_LENGTH_MAX: Final = 4_096
"""Maximum predicted number of output tokens; a higher prediction is reduced to it."""
_SIGMA: Final = 0.1
"""Sigma of the lognormal noise of the predictor `noisy`."""


def predict(requests: Requests, predictor: str, seed: int | None) -> "array[int]":
    """Return the predicted number of output tokens of each request. Predictors in SEEDED need a seed."""
    assert seed is not None or predictor not in SEEDED
    return PREDICTORS[predictor](requests, Random(seed or 0))


def _predict_from_prompts(requests: Requests, factor: Callable[[], float]) -> "array[int]":
    lengths = (1.5 * n**0.7 * factor() for n in requests.input)
    return array("q", [max(1, min(int(length), _LENGTH_MAX)) for length in lengths])


def _shuffled_outputs(requests: Requests, random: Random) -> "array[int]":
    """Return the true lengths in random order: predictions that are right only in their distribution."""
    lengths = list(requests.output)
    random.shuffle(lengths)
    return array("q", lengths)


PREDICTORS: Final[dict[str, Callable[[Requests, Random], "array[int]"]]] = {
    "perfect": lambda requests, random: array("q", requests.output),
    "prompt": lambda requests, random: _predict_from_prompts(requests, lambda: 1.0),
    "noisy": lambda requests, random: _predict_from_prompts(
        requests, lambda: random.lognormvariate(0, _SIGMA)
    ),
    "shuffled": _shuffled_outputs,
}
