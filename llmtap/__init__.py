"""llmtap measures LLM traffic (proxy, middleware, packets), and generates, simulates and benchmarks it.

The root of the package has the version and the API for captures: `llmtap.read(path_or_url)` returns a
Capture, whose rows are available as an Arrow table or as Exchanges. ARCHITECTURE.md describes the packages.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtap.capture.read.reader import Capture, CaptureError, read

__all__ = ["Capture", "CaptureError", "__version__", "read"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Arrow takes 200 ms and 40 MB, and the relay imports this package, too: only for who reads captures.
    if name in ("Capture", "CaptureError", "read"):
        from llmtap.capture.read import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
