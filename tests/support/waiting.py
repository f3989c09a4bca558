"""Wait for a condition: the one way in which a test waits for what it asserts.

Both functions return the first true value of the condition, so that a test asserts on the reading that met it
and not on a later one. The limit only passes where something is broken, also on a busy machine.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

PATIENCE_S = 90.0
"""For something that takes milliseconds: a process on a busy machine may stand still for seconds."""
PAUSE_S = 0.005


async def wait_until(
    condition: Callable[[], Any | Awaitable[Any]],
    seconds: float = PATIENCE_S,
    hint: Callable[[], Any] | None = None,
) -> Any:
    """Call a function or a coroutine function until its result is true, and return this result.

    Raises AssertionError with the last result, and with `hint()`, if that takes too long.
    """
    end = time.monotonic() + seconds
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        assert time.monotonic() < end, _describe(result, seconds, hint)
        await asyncio.sleep(PAUSE_S)


def block_until(
    condition: Callable[[], Any], seconds: float = PATIENCE_S, hint: Callable[[], Any] | None = None
) -> Any:
    """Do the same without an event loop."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, _describe(result, seconds, hint)
        time.sleep(PAUSE_S)
    return result


def _describe(result: Any, seconds: float, hint: Callable[[], Any] | None) -> str:
    more = "" if hint is None else f": {hint()}"
    return f"the condition was still {result!r} after {seconds:g} s{more}"
