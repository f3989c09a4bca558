"""Paths of an app that the meter is told nothing of: probes, scrapes, the pages of an admin.

They are named as clients ask for them: without the query, decoded, and with the prefix under which an app is
mounted.
"""

from collections.abc import Collection

from llmtap.errors import ConfigError

__all__ = ["Paths"]


class Paths:
    """Those named, and all below them: `/health` holds `/health/live`, too, and not `/healthz`; `/` holds
    itself alone."""

    __slots__ = ("_below", "_exact")

    def __init__(self, named: Collection[str]) -> None:
        """Raises ConfigError."""
        if isinstance(named, str):  # a collection as well, of its letters
            raise ConfigError("skip", "is text, and wants a collection of paths", f"skip=({named!r},)")
        for path in named:
            if not path.startswith("/"):
                raise ConfigError("skip", f"{path!r} does not begin with /")
            if "*" in path or "?" in path:
                raise ConfigError(
                    "skip", f"{path!r} is a pattern or has a query", "a path holds all below it"
                )
        bare = [path.rstrip("/") for path in named]
        self._exact = frozenset(path or "/" for path in bare)
        self._below = tuple(f"{path}/" for path in bare if path)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and (path in self._exact or path.startswith(self._below))
