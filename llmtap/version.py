"""Version of llmtap, for modules that must not import the root of the package, which names the Python API."""

from typing import Final

__version__: Final = "0.1.0"
