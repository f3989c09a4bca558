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

_CAPTURE_NAMES: Final = frozenset({"Capture", "CaptureError", "read"})


def __getattr__(name: str) -> object:
    # Import the API only when it is used: it imports Arrow, which takes 200 ms and 40 MB. The relay also
    # imports this package, but does not need the API.
    if name in __all__:
        module = "llmtap.capture.read.reader" if name in _CAPTURE_NAMES else "llmtap.api"
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; `llmtap.__all__` lists its names")
