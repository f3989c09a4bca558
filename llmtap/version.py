"""Version of llmtap, for modules that must not import the root of the package, because it
has the Python API."""

from typing import Final

__version__: Final = "0.1.0"
