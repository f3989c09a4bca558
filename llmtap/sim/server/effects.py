"""Which options of an engine that serves whoever comes have an effect: no other is taken and then ignored."""

from collections.abc import Mapping
from typing import Final

from llmtap.errors import ConfigError
from llmtap.sim.model_options import ModelOptions
from llmtap.sim.schedulers.registry import CONDITIONS, SCHEDULERS, options_read
from llmtap.sim.serving import Serving

__all__ = ["check_effects", "options_looked_at"]

_OF_WHOLE_RUNS: Final = frozenset(
    {"request_sla", "window", "tokens", "failed", "percentile", "bins", "edges"}
)
"""How a run is summed up, and what needs to know all of its requests beforehand."""


def options_looked_at(scheduler: str, readings: ModelOptions, serving: Serving) -> frozenset[str]:
    """Those that change what a server does, while the others are as they are."""
    found = options_read(scheduler, readings, serving) - _OF_WHOLE_RUNS
    # It is the controller's of a dynamic batch, and else only of the summary.
    return found if "eps" in found else found - {"token_sla"}


def check_effects(
    scheduler: str, places: Mapping[str, str], readings: ModelOptions, serving: Serving
) -> None:
    """Raises ConfigError where an option that was given, at its place, has no effect."""
    known = options_looked_at(scheduler, readings, serving)
    for name, place in places.items():
        if name in known:
            continue
        ever = SCHEDULERS[scheduler].reads - _OF_WHOLE_RUNS
        if name in ever and name in CONDITIONS:
            raise ConfigError(place, "has no effect", f"not while {CONDITIONS[name][0]} is what it is")
        raise ConfigError(
            place, f"has no effect on {scheduler}", f"these have: {', '.join(sorted(known)) or 'none'}"
        )
