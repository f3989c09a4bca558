"""What a run needs of whoever sends for it: `sender.py` over HTTP, `asking.py` over anything else."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from llmtap.exchange.exchange import Exchange
from llmtap.load.deferred import Later
from llmtap.load.lateness import Lateness

__all__ = ["Done", "OnAnswer", "Sending", "Underway"]


class Underway(Protocol):
    """A request on its way."""

    row: int

    def cancel(self, why: str) -> None:
        """We want no more of it; its Exchange comes, now or in a moment."""
        ...


Done = Callable[[Underway, Exchange], None]
OnAnswer = Callable[[Underway, int], None]


class _Calls(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Underway]: ...


class Sending(Protocol):
    """Sends to one target from one loop."""

    loop: asyncio.AbstractEventLoop
    sent: int
    """Requests begun."""
    retries: Counter[str]
    lateness: Lateness
    later: Later
    """Where work is put that can wait, and who sees to it that no request does."""

    @property
    def calls(self) -> _Calls:
        """Those under way."""
        ...

    @property
    def connects(self) -> int: ...

    @property
    def reuses(self) -> int: ...

    def send(
        self,
        body: bytes,
        done: Done,
        *,
        row: int = 0,
        scheduled_ns: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        on_answer: OnAnswer | None = None,
    ) -> Underway:
        """Begin a request now.

        `done` is called with its Exchange, once, and never before this returns. `on_answer` may be called
        before, with the time (mono), when all of an answer is there and nobody has read what it says.
        """
        ...

    async def open(self, connections: int) -> int:
        """Open so many connections beforehand; how many there are now."""
        ...

    def stop_retrying(self) -> None: ...
