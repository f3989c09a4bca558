"""Version of llmtap. Packages of llmtap import it from here, not from the root, which has the Python API."""

from typing import Final

__version__: Final = "0.1.0"
