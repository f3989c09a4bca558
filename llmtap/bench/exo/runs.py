"""Runs of an exo benchmark made of what came back, batch by batch, in the order of their sending."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llmtap.bench.exo.power import Power
from llmtap.bench.exo.prompts import Made
from llmtap.bench.exo.result import (
    BatchEnergy,
    ExoBatch,
    ExoRun,
    Stats,
    Timing,
    batch_of,
    generation_tps,
    prefill_tps,
    prefix_hit,
    timing_of,
)
from llmtap.bench.exo.server import ExoServed
from llmtap.exchange.exchange import Exchange, Timeline
from llmtap.exchange.outcome import Outcome as Ended
from llmtap.load.workers.worker_pool import LoadResult
from llmtap.metrics.cost import average_power_w
from llmtap.metrics.latency import ttft_any_ns
from llmtap.metrics.summary import ENDED_WELL
from llmtap.units import NS_PER_S

__all__ = ["ExoCell", "Sent", "Telling"]

PREVIEW_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class ExoCell:
    """A point of the grid. Tokens, tokens, requests at a time."""

    pp: int
    tg: int
    concurrency: int

    def __str__(self) -> str:
        return f"pp {self.pp:,} tg {self.tg:,} x {self.concurrency:,}"


@dataclass(slots=True)
class Sent:
    """A batch that was sent."""

    cell: ExoCell
    repeat: int
    prompts: Sequence[Made]
    known: bool
    """The very same prompt was sent before, or is in this batch several times."""
    began_ns: int = 0
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    """By row."""
    findings: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, outcome: LoadResult) -> Callable[[int, Exchange], None]:
        """As `Replay.keeping`."""
        self.began_ns = outcome.began_ns
        return self.exchanges.__setitem__

    @property
    def window_ns(self) -> tuple[int, int]:
        """From the common start to the last that was seen of an answer."""
        points = (x.timeline for x in self.exchanges.values())
        ends = [t.response_end_ns or t.last_token_ns for t in points]
        return self.began_ns, max((end for end in ends if end is not None), default=self.began_ns)


class Telling:
    """Makes runs of batches. What was sent to warm up has to pass, too: its prompts are in the cache."""

    def __init__(self, served: ExoServed, power: Power, *, start_ns: int) -> None:
        self._served = served
        self._power = power
        self._start_ns = start_ns
        self._stored: dict[int, float] = {}
        """By pp: the rate at which a prompt was prefilled that has been in the cache since."""

    def runs(self, sent: Sent) -> Iterator[ExoRun]:
        """In the order of their index."""
        energy = self._power.energy(*sent.window_ns)
        memory = self._power.peak_memory(*sent.window_ns)
        exchanges = [sent.exchanges.get(row) or _lost() for row in range(sent.cell.concurrency)]
        timings = [timing_of(x) for x in exchanges]
        rates = [
            generation_tps(x.tokens.output, timing.decode_s) if x.outcome in ENDED_WELL else None
            for x, timing in zip(exchanges, timings, strict=True)
        ]
        batch = batch_of(
            exchanges, rates, began_ns=sent.began_ns, start_s=(sent.began_ns - self._start_ns) / NS_PER_S,
            energy=None if energy is None else BatchEnergy(
                joules=energy.joules, seconds=energy.known_ns / NS_PER_S,
                seconds_missing=energy.missing_ns / NS_PER_S, average_power_w=average_power_w([energy]),
            ),
            findings=sent.findings,
        )  # fmt: skip
        for index, (x, timing, rate) in enumerate(zip(exchanges, timings, rates, strict=True)):
            yield self._run(sent, index, x, timing, rate, batch, memory)

    def _run(
        self, sent: Sent, index: int, x: Exchange, timing: Timing, rate: float | None, batch: ExoBatch,
        memory: tuple[int, str] | None,
    ) -> ExoRun:  # fmt: skip
        served, cell, tokens = self._served, sent.cell, x.tokens
        pp_tokens = sent.prompts[index][1].tokens
        prompt = pp_tokens if tokens.input is None else tokens.input
        hit = prefix_hit(prompt, tokens.cached, known=sent.known)
        prompt_tps = prefill_tps(prompt, tokens.cached, timing.prefill_s)
        if hit == "exact":
            prompt_tps = self._stored.get(cell.pp)
        elif prompt_tps is not None:
            self._stored[cell.pp] = prompt_tps
        ttft_ns = ttft_any_ns(x.timeline) if x.stream else None
        end_ns = x.timeline.response_end_ns
        text = None if x.said is None else x.said.response_text
        return ExoRun(
            elapsed_s=None if end_ns is None else (end_ns - sent.began_ns) / NS_PER_S,
            output_text_preview=None if text is None else text[:PREVIEW_CHARS],
            stats=Stats(
                prompt_tps=prompt_tps, generation_tps=rate, prompt_tokens=prompt,
                generation_tokens=tokens.output,
                peak_memory_usage=None if memory is None else {"inBytes": memory[0]},
            ),
            model_id=served.model, placement_sharding=served.placement.sharding,
            placement_instance_meta=served.placement.instance_meta, placement_nodes=served.placement.nodes,
            pp_tokens=pp_tokens, tg=cell.tg, repeat_index=sent.repeat, concurrency=cell.concurrency,
            concurrent_index=index, prefix_cache_hit=hit, pp=cell.pp, cached_tokens=tokens.cached,
            prompt_tps_stored=hit == "exact" and prompt_tps is not None, timing=timing.by,
            timing_source=timing.source, ttft_s=_seconds(ttft_ns),
            dispatch_late_s=_seconds(x.dispatch_late_ns), uncertainty_s=x.uncertainty_ns / NS_PER_S,
            eos_banned=served.bans_eos is not None, peak_memory_source=None if memory is None else memory[1],
            outcome=x.outcome.value, finish_reason=x.finish_reason, error=x.error, batch=batch,
        )  # fmt: skip


def _lost() -> Exchange:
    """In place of one that nothing is known of."""
    error = "its sending process was lost"
    return Exchange("", 0, 0, Timeline(0), outcome=Ended.TAP_ERROR, error=error)


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / NS_PER_S
