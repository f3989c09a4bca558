"""Where a request goes: an upstream's origin, the name it is called by, and the connections to it."""

from dataclasses import dataclass

from llmtap.net.pool import Origin, Pool

__all__ = ["Route"]


@dataclass(frozen=True, slots=True)
class Route:
    """One upstream of a relay."""

    origin: Origin
    authority: bytes | None
    """What the Host field becomes; None: it stays the client's."""
    pool: Pool
