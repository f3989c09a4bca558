"""What can be set about the simulated engine: its schedule. A request may ask for another by header."""

from typing import Annotated

import msgspec

from llmtap.units import Duration

__all__ = ["SimOptions"]

MS = 1_000_000


class SimOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The schedule of every answer, unless its request says otherwise."""

    ttft: Annotated[Duration, msgspec.Meta(description="from the request to the first token")] = Duration(
        150 * MS
    )
    itl: Annotated[Duration, msgspec.Meta(description="between tokens")] = Duration(20 * MS)
    tokens: Annotated[int, msgspec.Meta(description="tokens per answer, unless max_tokens is less", ge=1)] = (
        40
    )
    spread: Annotated[
        float, msgspec.Meta(description="TTFT and ITL of each answer vary by up to this share", ge=0, le=0.9)
    ] = 0.0
    seed: Annotated[int, msgspec.Meta(description="of the spread")] = 0
