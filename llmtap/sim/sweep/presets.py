"""Sweeps that have a name: those of the seeds.

An option on the command line takes the place of a preset's axis of that name; what a variant fixes is fixed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["BEST", "PRESETS", "Preset"]

BEST: Final = "best"
"""A value that runs of another preset tell (`Preset.best_of`)."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A sweep."""

    about: str
    source: str
    axes: Mapping[str, tuple[Any, ...]]
    """Values by name, as `grid.Axes` has them."""
    variants: tuple[Mapping[str, Any], ...] = field(default_factory=lambda: ({},))
    """What is compared at each point: settings that go together."""
    best_of: str = ""
    """The preset whose axes are searched for what is BEST."""
    share_of: Mapping[str, Any] = field(default_factory=dict)
    """Where loads are a `share`: of what this scheduler, set up so, completes when all come at once."""
    objectives: str = ""
    """Unless told otherwise; with them runs are measured."""


_SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
_BINS: Final = "multi_bin_dynamic"

PRESETS: Final[Mapping[str, Preset]] = {
    "grid": Preset(
        "which number of GPUs and bins is enough, by size: 192 runs at one load",
        "seed 004, 7.1, step 1",
        {
            "requests": _SIZES,
            "scale": (100.0,),
            "servers": (1, 2, 4, 8, 16, 32, 64, 100),
            "bins": ("1", "2", "4", "8", "16", "32"),
            "scheduler": (_BINS,),
        },
    ),
    "methods": Preset(
        "the seed's four methods, by size: one GPU each, and the fewest that are as good as the grid's best",
        "seed 004, 7.1, step 2",
        {"requests": _SIZES, "scale": (100.0,)},
        (
            {"scheduler": "static_fifo", "servers": 1},
            {"scheduler": "dynamic_no_bins", "servers": 1},
            {"scheduler": _BINS, "servers": 1, "bins": "8"},
            {"scheduler": _BINS, "servers": BEST, "bins": BEST},
        ),
        best_of="grid",
    ),
    "goodput": Preset(
        "goodput and smooth goodput against the rate, up to twice what the engine can do; of chat, for one",
        "seed 001, 5.2, figure 5",
        {
            "requests": (2_000,),
            "share": (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
            "scheduler": ("continuous_batching", "chunked_prefill"),
        },
        share_of={"scheduler": "continuous_batching"},
        objectives="ttft:1s tbc_max:200ms",
    ),
}  # fmt: skip
