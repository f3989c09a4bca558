"""What a machine withheld from processes: time in which they were ready to run, and did not.

Where a promise is about time ("within a second"), a busy machine breaks it, and not the program. The kernel's
own figures tell the two apart: see "schedstat" in its Documentation/scheduler/sched-stats.rst.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

EVERY_S = 0.1
KEPT_S = 3.0


class Starving:
    """Looks at some processes again and again."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        """`pids` is asked each time: processes come and go."""
        self._pids = pids
        self._looks: deque[tuple[float, float, dict[int, float]]] = deque()

    async def watch(self) -> None:
        """For ever; cancel it."""
        while True:
            self._look()
            await asyncio.sleep(EVERY_S)

    def lately_s(self) -> float:
        """How long, in the latest seconds, all of them together waited for a CPU, or the machine for its own.

        It counts how late this very look comes, too: whoever looks waits like everybody else.
        """
        late_s = time.monotonic() - self._looks[-1][0] - EVERY_S if self._looks else 0.0
        self._look()
        _, stolen_s, before = self._looks[0]
        _, stolen_now_s, now = self._looks[-1]
        waited_s = sum(now[pid] - before.get(pid, 0.0) for pid in now)
        return waited_s + stolen_now_s - stolen_s + max(late_s, 0.0)

    def _look(self) -> None:
        now = time.monotonic()
        self._looks.append((now, _stolen_s(), {pid: _waited_s(pid) for pid in self._pids()}))
        while now - self._looks[0][0] > KEPT_S and len(self._looks) > 2:
            self._looks.popleft()


def _waited_s(pid: int) -> float:
    """Of all its threads; 0 where the kernel does not count it."""
    waited_ns = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def _stolen_s() -> float:
    """What the host of this virtual machine gave to others."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")
