"""llmtap measures LLM traffic (proxy, middleware, packets), and generates, simulates and benchmarks it.

The root of the package has the version and the Python API. `llmtap.read(path_or_url)` returns a Capture,
whose rows are available as an Arrow table or as Exchanges. `llmtap.replay`, `llmtap.compare` and
`llmtap.simulate` return typed results with `to_pandas()` (`llmtap/api.py`). ARCHITECTURE.md describes the
packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from llmtap.version import __version__

if TYPE_CHECKING:
    from llmtap.api import (
        ComparisonResult,
        FigureValue,
        ReplayOptions,
        ReplayResult,
        RequirementState,
        Result,
        SimulationOptions,
        SimulationResults,
        compare,
        replay,
        simulate,
    )
    from llmtap.capture.read.reader import Capture, CaptureError, read
    from llmtap.report.gates import Change, JudgedChange

__all__ = [
    "Capture",
    "CaptureError",
    "Change",
    "ComparisonResult",
    "FigureValue",
    "JudgedChange",
    "ReplayOptions",
    "ReplayResult",
    "RequirementState",
    "Result",
    "SimulationOptions",
    "SimulationResults",
    "__version__",
    "compare",
    "read",
    "replay",
    "simulate",
]

_READER: Final = frozenset({"Capture", "CaptureError", "read"})


def __getattr__(name: str) -> object:
    # Import the API on first use: it needs Arrow (200 ms, 40 MB), and the relay, which does not need the API,
    # also imports this package.
    if name in __all__:
        return getattr(import_module("llmtap.capture.read.reader" if name in _READER else "llmtap.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
