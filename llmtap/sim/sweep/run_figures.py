"""Figures of a simulated run: the public JSON of `llmtap sim run`, in seconds."""

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
    """Names of the percentiles with too few values."""


class SimulatedWindow(msgspec.Struct, frozen=True):
    name: str
    seconds: float


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    mode: str = "open"
    offered_rps: float | None
    achieved_rps: float | None


class SimulatedTokens(msgspec.Struct, frozen=True):
    input: int
    output: int
    output_per_second: float | None


class ServerShares(msgspec.Struct, frozen=True):
    """Values of each server behind a router."""

    requests: list[int]
    utilization: list[float | None]


class BatchOutputs(msgspec.Struct, frozen=True):
    """Mean number of tokens of a batch's longest answer: E[max] of the multi-bin paper, 5.5 and H1."""

    batches: int
    mean: float | None
    expected: float | None
    """Mean for batches of the same sizes, if their requests were drawn at random from all requests."""


class LongestOutputs(BatchOutputs, frozen=True):
    """Means over all batches, and by bin."""

    by_bin: list[BatchOutputs] | None


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Preemption and prefix cache of an engine (IETF draft, 5.7.4, 5.8.4)."""

    preemptions: int
    preempted: int
    preempted_share: float
    recovery: float | None
    preempted_tokens: int
    preemption_loss: float | None
    kv_peak: float
    prefix_queries: int
    prefix_hits: int
    prefix_hit_rate: float | None


class FollowedRequest(msgspec.Struct, frozen=True):
    row: int
    input: int | None
    output: int | None
    token_seconds: list[float]
    """Times of the tokens, from the arrival."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run, in seconds. A measured run also has those of a `Summary`."""

    scheduler: str
    n: int
    window: SimulatedWindow
    load: SimulatedLoad
    metrics: dict[str, ExactFigures]
    outcomes: dict[str, int]
    unserved: dict[str, int]
    tokens: SimulatedTokens
    throughput_rps: float | None
    throughput_tps: float | None
    latency: ExactFigures
    request_sla_violation: float
    token_sla_violation: float | None
    utilization: float | None
    batch_mean: float | None
    batches: int
    batch_sizes: dict[str, int]
    queueing: ExactFigures
    decode_tbt: ExactFigures | None
    """None for a scheduler that iterates, like `longest_output`."""
    longest_output: LongestOutputs | None
    seconds_per_output_token: float | None
    decode_step_mean: float | None
    """Mean time of a decode step; for a scheduler that iterates, of an iteration."""
    bins: list[tuple[int, int | None]] | None
    bin_limits: list[int] | None
    servers: int
    router: str | None
    by_server: ServerShares | None
    seed: int | None
    model: dict[str, float]
    readings: dict[str, object]
    serving: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    engine: EngineFigures | msgspec.UnsetType | None = msgspec.UNSET
    """Absent for schedulers of whole batches, like `serving`."""
    followed: FollowedRequest | msgspec.UnsetType = msgspec.UNSET
