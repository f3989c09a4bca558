"""A process and all it starts: CPU, memory and number, looked at a few times a second.

Beside it, what benchmarks/relay's `idle_spin` got of the same CPU: it runs when nobody else wants to, so what
is left is what processes that have no part in this took from the tool.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 0.2
SPINNER = "(idle_spin)"
SCHED_IDLE = "5"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Tree:
    """Descendants of `pid`, and whatever shares its process group. Use as a context manager, while it lives.

    CPU is that of processes seen: one that lives and ends between two looks is missed, so `cpu_s` of the
    whole life is to be compared with what wait4 says of who was waited for.
    """

    pid: int
    cpu: int
    """Where it is pinned."""
    rss_bytes_max: int = 0
    """Resident pages of all, the shared ones counted as often as they are mapped."""
    processes_max: int = 0
    sessions_max: int = 0
    """Processes in a session other than ours: there the spinner's idle priority counts for nothing, for
    Linux shares a CPU between sessions before it looks at priorities (autogroup)."""
    members: set[int] = field(default_factory=set)
    """When last looked at."""
    _cpu_s: dict[int, float] = field(default_factory=dict)
    _idle_s: dict[int, float] = field(default_factory=dict)
    _looks: list[tuple[int, float, float]] = field(default_factory=list)
    """When, CPU seconds so far, the spinner's."""
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Tree:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        assert self._thread
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        return self._looks[-1][1] if self._looks else 0.0

    def cpu_s_between(self, begin_ns: int, end_ns: int) -> float:
        """Of the time between two moments (mono), by straight lines between looks."""
        return self._at(end_ns)[0] - self._at(begin_ns)[0]

    def others_share(self, begin_ns: int, end_ns: int) -> float | None:
        """Of the CPU in that time, what was neither ours nor left to the spinner; None without a spinner."""
        if not self._idle_s:
            return None
        begin, end = self._at(begin_ns), self._at(end_ns)
        return 1 - (sum(end) - sum(begin)) / ((end_ns - begin_ns) / 1e9)

    def _at(self, t_ns: int) -> tuple[float, float]:
        i = bisect_right(self._looks, t_ns, key=lambda look: look[0])
        if i in (0, len(self._looks)):
            return self._looks[max(0, i - 1)][1:]
        (a_ns, a_s, a_idle_s), (b_ns, b_s, b_idle_s) = self._looks[i - 1 : i + 1]
        part = (t_ns - a_ns) / (b_ns - a_ns)
        return a_s + (b_s - a_s) * part, a_idle_s + (b_idle_s - a_idle_s) * part

    def _watch(self) -> None:
        while not self._over.is_set():
            self._look()
            self._over.wait(EVERY_S)

    def _look(self) -> None:
        found = self._members()
        self.members = set(found)
        rss_bytes = 0
        for pid, (cpu_s, pages) in found.items():
            self._cpu_s[pid] = cpu_s  # of one that is gone, what was seen last stays
            rss_bytes += pages * PAGE_BYTES
        self.rss_bytes_max = max(self.rss_bytes_max, rss_bytes)
        self.processes_max = max(self.processes_max, len(found))
        self._looks.append((time.monotonic_ns(), sum(self._cpu_s.values()), sum(self._idle_s.values())))

    def _members(self) -> dict[int, tuple[float, int]]:
        """CPU seconds and resident pages of each."""
        parents: dict[int, int] = {}
        sessions: dict[int, int] = {}
        seen: dict[int, tuple[float, int]] = {}
        ours = {self.pid}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            # Behind the name, which may hold blanks and parentheses: state, parent, group, session ...
            fields = text[text.rindex(")") + 2 :].split()
            pid, cpu_s = int(entry.name), (int(fields[11]) + int(fields[12])) * TICK_S
            parents[pid] = int(fields[1])
            seen[pid] = (cpu_s, int(fields[21]))
            if SPINNER in text and fields[36] == str(self.cpu) and fields[38] == SCHED_IDLE:
                self._idle_s[pid] = cpu_s
            sessions[pid] = int(fields[3])
            if int(fields[2]) == self.pid:
                ours.add(pid)
        while more := {pid for pid, parent in parents.items() if parent in ours and pid not in ours}:
            ours |= more
        here = os.getsid(0)
        elsewhere = sum(sessions.get(pid, here) != here for pid in ours)
        self.sessions_max = max(self.sessions_max, elsewhere)
        return {pid: seen[pid] for pid in ours if pid in seen}
