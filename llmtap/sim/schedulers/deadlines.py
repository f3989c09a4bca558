"""Until when each request is to have its next token, for schedulers that give up on late ones (001, 4.1)."""

from collections.abc import Iterable, Mapping

__all__ = ["Deadlines"]


class Deadlines:
    """By the bounds of an SLO with a TTFT and a TBT: what the goodput of seed 001's eq. 5 counts."""

    def __init__(self, ttft_ns: int, tbt_ns: int) -> None:
        self._ttft_ns = ttft_ns
        self._tbt_ns = tbt_ns
        self._next_ns: dict[int, int] = {}
        self._missed: set[int] = set()

    def arrived(self, now_ns: int, request: int) -> None:
        """Its first token is waited for."""
        self._next_ns[request] = now_ns + self._ttft_ns

    def made(self, now_ns: int, requests: Iterable[int]) -> None:
        """Each has a token now, and the next one is waited for."""
        deadlines, next_ns = self._next_ns, now_ns + self._tbt_ns
        for request in requests:
            if deadlines[request] < now_ns:
                self._missed.add(request)
            deadlines[request] = next_ns

    def delayed(self, due_ns: Mapping[int, int]) -> None:
        """The newest token of each leaves then: the next one is waited for from then on."""
        for request, leaves_ns in due_ns.items():
            if request in self._next_ns:
                self._next_ns[request] = leaves_ns + self._tbt_ns

    def over(self, request: int) -> None:
        """Nothing of it is waited for."""
        del self._next_ns[request]
        self._missed.discard(request)

    def missed(self, now_ns: int) -> list[int]:
        """Requests of which some token was or is late, in the order in which they arrived."""
        missed = self._missed
        return [r for r, next_ns in self._next_ns.items() if next_ns < now_ns or r in missed]
