"""An exo benchmark of a server, as the command runs it."""

from typing import Any

from llmtap.bench.exo.mode import ExoBench, ExoGrid, ExoOptions
from llmtap.bench.exo.result import ExoResult
from tests.bench.support import Silent

__all__ = ["LIMIT_S", "bench"]

SEED = 11
LIMIT_S = 280.0
"""For a scene: a batch takes a second, since its sending process has to be started."""


async def bench(url: str, grid: ExoGrid, *, nvml: Any = None, **more: Any) -> ExoResult:
    """The result; `more` are options."""
    options = ExoOptions(target=url, seed=SEED, metrics="none", **more)
    return await ExoBench(options, grid, Silent(), nvml=nvml).run()
