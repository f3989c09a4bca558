"""Choose between the compiled extension and its Python twins: `compiled` is the extension module, or None.

Users of this choice, which have both implementations: `channel/frames.py` (`make_frame_batch`,
`make_frame_rows`), `net/lag.py` (`make_lag_meter`), `net/stream.py` (`open_stream`), `protocol/repetition.py`
(`make_token_run`), `protocol/http1.py` and `vantage/relay/heads.py` (plain heads), `vantage/relay/flow.py`
(base class of `Flow`), `metrics/latency.py` (`measure`), `metrics/histogram.py` (`Histogram.fold`),
`export/buckets.py` (`Buckets.record_many`). The Python implementation is the reference. The forwarding thread
(`vantage/relay/forwarding.py`) has no Python implementation: without it, the event loop does its work.

`LLMTAP_NATIVE=0` in the environment selects Python, and so does a value other than 0 and 1.
"""

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Final

from llmtap.native.fingerprint import fingerprint

__all__ = ["NAME", "REASON", "compiled", "describe", "missing_build"]

VARIABLE: Final = "LLMTAP_NATIVE"


def _load() -> tuple[ModuleType | None, str]:
    """Return the compiled module, or None and why it is not used."""
    wanted = os.environ.get(VARIABLE, "1")
    if wanted == "0":
        return None, f"{VARIABLE}=0"
    if wanted not in ("", "1"):
        # Use Python, because a value such as `off` most likely means that.
        return None, f"{VARIABLE}: expected 0 or 1, got {wanted!r}"
    try:
        # Import by name: `from ... import` reports a missing module and a failed load alike.
        module = importlib.import_module("llmtap.native._native")
    except ModuleNotFoundError:
        return (None, "the extension was not built")
    except ImportError as error:
        return None, f"the extension cannot be loaded: {error}"
    sources = fingerprint(Path(__file__).parent)
    if sources and sources != getattr(module, "FINGERPRINT", ""):
        return None, "the extension was built from other sources"
    return module, ""


compiled, REASON = _load()
"""The extension module; None: the Python implementations run, for `REASON`."""
NAME: Final = "python" if compiled is None else "native"
"""Name of the implementation that runs, for `--version`, the log, the admin API and `/metrics`."""


def describe() -> str:
    """Return the name, and for Python the reason: `native`, or `python: LLMTAP_NATIVE=0`."""
    return f"{NAME}: {REASON}" if REASON else NAME


def missing_build() -> str:
    """Return one line about compiled code that cannot run: its cost and the remedy; else an empty text.

    Source of the cost: benchmarks/meter/README.md, "Compiled".
    """
    if not REASON or REASON.startswith(VARIABLE):
        return ""
    import shutil
    import sysconfig

    packages = [
        package
        for package, present in (
            ("gcc", shutil.which("cc") or shutil.which("gcc")),
            ("python3-dev", (Path(sysconfig.get_path("include")) / "Python.h").exists()),
        )
        if not present
    ]
    remedy = f"install {' and '.join(packages)}, then llmtap again" if packages else "install llmtap again"
    return (
        f"the compiled code is not used, which costs about twice the CPU per event ({REASON}). Hint: {remedy}"
    )
