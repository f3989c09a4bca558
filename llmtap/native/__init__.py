"""The compiled per-chunk path: where it was built, whether it runs, and why not.

`compiled` is the extension module, or None. A constructor of which there is a compiled and a Python
implementation chooses by it: `net/stream.py` `open_stream`, `net/lag.py` `lag_meter`, `tap/channel.py`
`make_rows`, `wire/repetition.py` `matcher_for`. No other code asks. The Python implementation is the
reference.

The environment variable `LLMTAP_NATIVE=0` selects Python.
"""

import os
from types import ModuleType
from typing import Final

__all__ = ["NAME", "REASON", "compiled"]


def _load() -> tuple[ModuleType | None, str]:
    """Return the compiled module, or None and why it is not used."""
    if os.environ.get("LLMTAP_NATIVE", "1") == "0":
        return None, "LLMTAP_NATIVE=0"
    try:
        from llmtap.native import _native
    except ImportError:
        return None, "not built: no C compiler when llmtap was installed"
    return _native, ""


compiled, REASON = _load()
"""The extension module; None: the Python implementations run, for `REASON`."""
NAME: Final = "python" if compiled is None else "native"
"""Name of the implementation that runs, for `--version`, the log, the admin API and `/metrics`."""
