"""What a server told of its own work during one exchange: in the head, in events, in trailers.

Source: shared/dialects/dialects.md section 6; IETF seed 000, 4.6.3 option C.
"""

from array import array
from collections.abc import Iterable
from typing import Final

from llmtap.protocol.delta import Delta, ServerTime
from llmtap.protocol.server_times import header_times, trailer_times

__all__ = ["ServerTiming"]

_ENTRIES_MAX: Final = 64
"""Kept of one exchange, from each place; the most talkative server known tells five."""
_BURST_TOKENS_MAX: Final = 1_024
"""Tokens between two stamps of a server's clock. Speculation gives a handful; more is no clock of tokens."""
_GAPS_MAX: Final = 1 << 18
"""Of one exchange, as many as events are logged of it; 8 bytes each. Later ones are left out."""


class ServerTiming:
    """Collects it. The same duration told again from the same place replaces the earlier one."""

    __slots__ = ("_by_event", "_by_head", "_by_trailer", "_clock_ns", "_gaps_ns")

    def __init__(self) -> None:
        self._by_head: list[ServerTime] = []
        self._by_event: dict[tuple[str, str], tuple[int, ServerTime]] = {}
        self._by_trailer: list[ServerTime] = []
        self._clock_ns = -1
        self._gaps_ns: array[int] = array("q")

    def read_head(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The fields of the response's head."""
        self._by_head = header_times(headers)

    def read_trailers(self, lines: Iterable[bytes]) -> None:
        """The trailer lines of a chunked body."""
        self._by_trailer = trailer_times(lines)

    def read_event(self, event: int, delta: Delta) -> None:
        """An event with times of the server, by its index."""
        for told in delta.server_times:
            key = (told.name, told.where)
            if key in self._by_event or len(self._by_event) < _ENTRIES_MAX:
                self._by_event[key] = (event, told)
        clock_ns = delta.server_clock_ns
        if clock_ns < 0:
            return
        gap_ns, tokens = clock_ns - self._clock_ns, max(1, delta.tokens)
        # A clock that goes back was set anew, by another attempt say.
        known = self._clock_ns >= 0 and gap_ns >= 0 and tokens <= _BURST_TOKENS_MAX
        if known and len(self._gaps_ns) + tokens <= _GAPS_MAX:
            share_ns, left = divmod(gap_ns, tokens)
            self._gaps_ns.extend([share_ns] * (tokens - left) + [share_ns + 1] * left)
        self._clock_ns = clock_ns

    def entries(self) -> list[dict[str, object]] | None:
        """All of it as public JSON, in the order told; None if there is nothing."""
        events = [_public(told) | {"event": i, "path": told.path} for i, told in self._by_event.values()]
        head, trailer = (map(_public, part[:_ENTRIES_MAX]) for part in (self._by_head, self._by_trailer))
        return [*head, *events, *trailer] or None

    def gaps_ns(self) -> "array[int] | None":
        """Gaps between tokens by the server's own clock, a gap of several tokens shared among them."""
        return self._gaps_ns or None


def _public(told: ServerTime) -> dict[str, object]:
    return {"name": told.name, "ms": told.ms, "where": told.where, "unit": told.unit}
