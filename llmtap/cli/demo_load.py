"""What the demo sends: a drawn workload like BurstGPT's, or a trace that was given; and who sends it."""

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from llmtap.errors import ConfigError

if TYPE_CHECKING:
    from llmtap.load.replay.plan import ReplayPlan

__all__ = ["RATE_RPS", "TOKENS_MAX", "burst_workload", "demo_plan"]

RATE_RPS: Final = 0.27
"""Of BurstGPT's trace in its own time (seed 004, 3.1)."""
TOKENS_MAX: Final = 512
"""Answers are cut there, so that the demo ends: of what is drawn, one in twenty is longer."""
SEED: Final = 280
"""With it the drawn bursts are of a size that a demo's half minute shows: at a CV of 13 most half minutes of
this rate are empty, or one flood."""
TRACE_ROWS: Final = 1_000
"""Of a trace, where nobody says how many: more than a demo's time has room for."""
MORE: Final = 6
"""Requests drawn, by those that the mean rate gives: bursts come together. What is not due in time is not
sent."""
TENANTS: Final = {"acme": 6, "globex": 3, "initech": 1}
"""Names and their shares, where a trace has no tenants."""

_WORKLOAD: Final = f"""
name = "burstgpt"
about = "seed 004, 3.1: prompts of median 251 and mean 611 tokens, answers of 34 and 123, a CV of 13.28"
arrivals = "gamma:cv=13.28"
[input]                     # lognormal: mu = ln median, sigma = sqrt(2 ln(mean / median))
distribution = "lognormal"
mu = 5.52545
sigma = 1.33402
min = 1
max = 8192
[output]
distribution = "lognormal"
mu = 3.52636
sigma = 1.60359
min = 1
max = {TOKENS_MAX}
"""


def burst_workload(folder: Path) -> Path:
    """The file of the drawn workload, written into the folder."""
    place = folder / "burstgpt.toml"
    place.write_text(_WORKLOAD, encoding="utf-8")
    return place


def demo_plan(
    source: str, *, speed: float, seconds: float, requests: int | None, source_format: str | None = None
) -> "ReplayPlan":
    """What is due, for as long as the demo lasts. Raises ConfigError.

    Args:
        source: a trace, a capture, or a workload, whose rate is then RATE_RPS times the speed.
        source_format: of a trace whose content does not tell.
        speed: times as fast.
        requests: at most; None: as many as there is time for.
    """
    from llmtap.load.replay.plan import ReplayQuestion, make_plan
    from llmtap.workload.registry import is_workload
    from llmtap.workload.trace_rows import NO_TIMES

    if is_workload(source):
        rate = RATE_RPS * speed
        count = requests or max(MORE, round(MORE * rate * seconds))
        asked = ReplayQuestion(source=source, requests=count, rate_rps=rate, seed=SEED)
    else:
        rows = requests or TRACE_ROWS
        asked = ReplayQuestion(
            source=source, source_format=source_format, requests=rows, speed=speed, seed=SEED
        )
    try:
        plan = make_plan(asked)
    except ConfigError as exc:
        if exc.problem == NO_TIMES:
            hint = "the demo plays a trace in its own times; `llmtap replay` can give it others"
            raise ConfigError(exc.place, exc.problem, hint) from None
        raise
    if not any(plan.requests.tenants):
        shares = Random(SEED).choices(list(TENANTS), list(TENANTS.values()), k=len(plan.requests))
        plan.requests.tenants = shares
    return plan
