"""Figures of a simulated run: the public JSON of `llmtap sim run`. Durations are in seconds."""

import msgspec


class ExactFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of exact times, in seconds; None without values."""

    n: int
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None
    marks: list[str]
    """Names of the percentiles with too few values, which reports mark."""


class SimulatedWindow(msgspec.Struct, frozen=True):
    """Time window of the throughput: a description, and its length."""

    name: str
    seconds: float


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of arriving and of ended requests. `mode` is `open`: arrivals do not depend on answers."""

    mode: str = "open"
    offered_rps: float | None
    """Arrivals per second."""
    achieved_rps: float | None
    """Served requests per second."""


class SimulatedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens and output tokens of all requests with output."""

    input: int
    output: int
    output_per_second: float | None


class ServerShares(msgspec.Struct, frozen=True):
    """For each server behind a router: number of its requests, and share of the time in which it worked."""

    requests: list[int]
    utilization: list[float | None]


class BatchOutputs(msgspec.Struct, frozen=True):
    """Mean number of tokens of a batch's longest answer: E[max] of the multi-bin paper, 5.5 and H1."""

    batches: int
    """Number of batches."""
    mean: float | None
    """Mean over the batches; None: there are none."""
    expected: float | None
    """Expected value of `mean`, if the requests of each batch were drawn at random from all requests."""


class LongestOutputs(BatchOutputs, frozen=True):
    """Longest answers of all batches, and of the batches of each bin."""

    by_bin: list[BatchOutputs] | None


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Preemption and prefix cache of an engine (IETF draft, 5.7.4, 5.8.4), from its `IterationState`."""

    preemptions: int
    """How often a request was interrupted to free memory."""
    preempted: int
    """Number of requests that were interrupted at least once."""
    preempted_share: float
    """Share of the requests that were preempted at least once."""
    recovery: float | None
    """Share of the preempted requests that were served to the end."""
    preempted_tokens: int
    """Number of tokens that had to be computed again."""
    preemption_loss: float | None
    """Mean number of tokens whose KV a preemption discarded."""
    kv_peak: float
    """Largest share of the KV memory in use."""
    prefix_queries: int
    """Number of prompt tokens that were searched in the prefix cache."""
    prefix_hits: int
    """Number of prompt tokens that were found in the prefix cache."""
    prefix_hit_rate: float | None
    """`prefix_hits` / `prefix_queries`; None without a cache."""


class FollowedRequest(msgspec.Struct, frozen=True):
    """The request that the user selected with `--follow`; its row counts from 1."""

    row: int
    input: int | None
    output: int | None
    token_seconds: list[float]
    """Time of each token since the arrival of the request."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run. The JSON of a measured run also has the fields of a `Summary`."""

    scheduler: str
    n: int
    """Number of requests."""
    window: SimulatedWindow
    load: SimulatedLoad
    metrics: dict[str, ExactFigures]
    outcomes: dict[str, int]
    unserved: dict[str, int]
    """Number of requests that were given up, by reason."""
    tokens: SimulatedTokens
    throughput_rps: float | None
    throughput_tps: float | None
    """Output tokens per second."""
    latency: ExactFigures
    """Times from arrival to end of all requests."""
    request_sla_violation: float
    """Share of the requests outside the request SLA; `token_sla_violation`: outside the token SLA."""
    token_sla_violation: float | None
    """Share of the requests outside the token SLA."""
    utilization: float | None
    """Share of the time in which the servers worked."""
    batch_mean: float | None
    """Mean number of requests in a batch or iteration; `batches`: number of batches or iterations."""
    batches: int
    """Number of batches; 0 for schedulers that iterate."""
    batch_sizes: dict[str, int]
    """Number of batches or iterations, by the number of their requests."""
    queueing: ExactFigures
    """Time from the arrival of a request until a server begins to process it."""
    decode_tbt: ExactFigures | None
    """Time between tokens of each request; None, like `longest_output`, for a scheduler that iterates."""
    longest_output: LongestOutputs | None
    """Longest answers of the batches; None for schedulers that iterate."""
    seconds_per_output_token: float | None
    """Time in which the servers worked / number of output tokens."""
    decode_step_mean: float | None
    """Mean duration of a decode step; for a scheduler that iterates, of an iteration."""
    bins: list[tuple[int, int | None]] | None
    """Lower and upper edge of each bin of output lengths; `bin_limits`: maximum batch size of each bin."""
    bin_limits: list[int] | None
    """Largest batch size of each bin; None without bins."""
    servers: int
    router: str | None
    by_server: ServerShares | None
    """Figures of each server; None without a router."""
    seed: int | None
    model: dict[str, float]
    """Parameters of the latency model."""
    readings: dict[str, object]
    """Values of `--reading` options, which decide open points of a paper."""
    serving: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    """Values of `--serving` options."""
    engine: EngineFigures | msgspec.UnsetType | None = msgspec.UNSET
    """Absent, like `serving`, for schedulers of whole batches; null if the engine has no state."""
    followed: FollowedRequest | msgspec.UnsetType = msgspec.UNSET
    """The request of `--follow`."""
