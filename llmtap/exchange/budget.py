"""Memory for bodies under way: so much for all exchanges together, however many there are.

A request's body, and an answer of one piece, can be understood only when they are whole. Each has a bound of
its own; but how many there are at once is decided by whoever sends them, and how slowly. What finds no room
is not kept: its exchange is measured by what else is known of it.
"""

from collections.abc import Callable

__all__ = ["Budget", "Share"]


class Budget:
    """What all exchanges may take together.

    Args:
        bytes_max: of all of them.
        short: told of each body that is not kept for want of room.

    Attributes:
        left: bytes that can still be taken.
    """

    __slots__ = ("_short", "left")

    def __init__(self, bytes_max: int, short: Callable[[], None]) -> None:
        self.left = bytes_max
        self._short = short

    def take(self, n: int) -> bool:
        """Takes `n` bytes, or none: then there is no room for them."""
        if n > self.left:
            self._short()
            return False
        self.left -= n
        return True

    def give(self, n: int) -> None:
        """Gives back what was taken."""
        self.left += n


class Share:
    """What one exchange has taken of a budget; without a budget there is always room."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, n: int) -> bool:
        """As `Budget.take`."""
        if self._budget is not None and not self._budget.take(n):
            return False
        self._taken += n
        return True

    def give(self, n: int) -> None:
        """Gives back some of it."""
        if self._budget is not None:
            self._budget.give(n)
        self._taken -= n

    def close(self) -> None:
        """Gives back what is left: the exchange is over. A second call does nothing."""
        self.give(self._taken)
