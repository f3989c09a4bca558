"""An exo benchmark of a server, as the command runs it, and runs that are made up."""

from functools import partial
from typing import Any

import pytest

from llmtap.bench.exo.mode import ExoBench, ExoGrid, ExoOptions
from llmtap.bench.exo.result import ExoBatch, ExoResult, ExoRun, Stats
from llmtap.metrics.cost import energy_of
from llmtap.units import NS_PER_S
from tests.bench.support import Silent

SEED = 11
LIMIT_S = 280.0
"""For a scene: a batch takes a second, since its sending process has to be started."""


async def bench(url: str, grid: ExoGrid, *, nvml: Any = None, **more: Any) -> ExoResult:
    """The result; `more` are options."""
    options = ExoOptions(target=url, seed=SEED, **more)
    return await ExoBench(options, grid, Silent(), nvml=nvml).run()


def know_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let power be known at each moment of a run, however late a busy machine takes the samples."""
    known_between = partial(energy_of, gap_ns_max=1_000 * NS_PER_S)
    monkeypatch.setattr("llmtap.bench.exo.server.energy_of", known_between)


def exo_run(
    generated: int, prompt_tps: float | None, generation_tps: float, batch: ExoBatch, **fields: Any
) -> ExoRun:
    """A run that completed; `fields` are more of its fields."""
    stats = Stats(
        prompt_tps=prompt_tps,
        generation_tps=generation_tps,
        prompt_tokens=64,
        generation_tokens=generated,
        peak_memory_usage=None,
    )
    usual: dict[str, Any] = {
        "elapsed_s": 1.0,
        "output_text_preview": None,
        "model_id": "m",
        "placement_sharding": None,
        "placement_instance_meta": None,
        "placement_nodes": None,
        "pp_tokens": 64,
        "pp": 64,
        "prefix_cache_hit": "none",
        "cached_tokens": 0,
        "prompt_tps_stored": False,
        "timing": "client",
        "ttft_s": None,
        "dispatch_late_s": 0.0,
        "uncertainty_s": 0.0,
        "outcome": "complete",
        "finish_reason": "length",
        "error": None,
    }
    return ExoRun(**{**usual, "tg": generated, "stats": stats, "batch": batch, **fields})
