"""How an engine that composes anew at every iteration serves: its limits, its memory, its tricks.

The defaults are those of the servers that the schedulers are named after, where they have one, and of seed
004's GPU: 7 GB of KV memory at 0.1875 MB a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from llmtap.settings import explained, read_options
from llmtap.sim.latency import SEED_ITERATIONS, SEED_MODEL, IterationModel, LatencyModel
from llmtap.sim.model_options import ModelOptions
from llmtap.units import Duration, format_ns

__all__ = ["OUTPUT_DELAYS", "Serving", "ServingSetup", "explain_serving", "read_serving", "settled"]

_MS: Final = 1_000_000

OUTPUT_DELAYS: Final[Mapping[str, Duration]] = {"output_delay": Duration(50 * _MS)}
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
        1_000 * _MS
    )
    tbt: Annotated[Duration, Meta(description="what give_up takes for late: a gap between tokens")] = (
        Duration(200 * _MS)
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
