"""Version of llmtap, in a module of its own: the packages of llmtap must not import it from the root, because
the root has the Python API."""

from typing import Final

__version__: Final = "0.1.0"
