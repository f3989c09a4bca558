"""Who waits, and who of them is next."""

from collections.abc import Sequence
from heapq import heappop, heappush

__all__ = ["Waiting"]


class Waiting:
    """A queue in the order of a rank, and of arrival among equals. Requests are numbered as they arrive."""

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: of each request, 0 or more; None: all are equal."""
        self._ranks = ranks
        self._heap: list[tuple[int, int]] = []
        self._here: set[int] = set()
        """Who leaves stays in the heap until it would be next."""

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, request: int) -> bool:
        return request in self._here

    def add(self, request: int, *, again: bool = False) -> None:
        """It waits, or waits `again`: before all that never did anything else."""
        rank = -1 if again else self._ranks[request] if self._ranks is not None else 0
        heappush(self._heap, (rank, request))
        self._here.add(request)

    def remove(self, request: int) -> None:
        """It waits no longer."""
        self._here.remove(request)
        heap, here = self._heap, self._here
        while heap and heap[0][1] not in here:
            heappop(heap)

    def head(self) -> int | None:
        """Who is next; None where nobody waits."""
        return self._heap[0][1] if self._heap else None
