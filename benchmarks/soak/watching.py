"""What the proxy's processes hold, second by second: resident and proportional memory, open files, threads.

One thread looks at /proc, another scrapes the admin port, as a Prometheus would, if one that is in a hurry.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

EVERY_S = 1.0
PSS_EVERY = 5
"""Looks: the kernel walks all pages for it."""
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Look:
    """One process at one moment; sizes in KiB, moments in seconds from the start of the load."""

    t_s: float
    pid: int
    role: str
    rss: float
    pss: float | None
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answer of /metrics: sums over all labels."""

    t_s: float
    took_s: float
    bytes: int
    sums: dict[str, float]


@dataclass(frozen=True, slots=True)
class Act:
    """Something that was done to the proxy."""

    t_s: float
    what: str


def role_of(command: str) -> str:
    """What a process of `llmtap proxy` does."""
    for role in ("relay", "meter"):
        if f".{role}" in command:
            return role
    return "supervisor"


def processes(supervisor: int) -> dict[int, str]:
    """The supervisor's children and itself, with their roles."""
    found = {supervisor: "supervisor"}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{supervisor}/task").iterdir():
            for child in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                    if "llmtap." in command:
                        found[int(child)] = role_of(command)
    return found


def look(pid: int, role: str, t_s: float, *, pss: bool) -> Look | None:
    """None where it has ended meanwhile."""
    home = Path(f"/proc/{pid}")
    try:
        resident = int((home / "statm").read_text().split()[1]) * PAGE_KIB
        share = _PSS.search((home / "smaps_rollup").read_text()) if pss else None
        files = len(os.listdir(home / "fd"))
        threads = len(os.listdir(home / "task"))
    except (OSError, IndexError):
        return None
    return Look(t_s, pid, role, resident, None if share is None else float(share[1]), files, threads)


def scraped(admin: int, timeout_s: float = 10.0) -> bytes:
    """The text of /metrics. Raises OSError."""
    with LOCAL.open(f"http://127.0.0.1:{admin}/metrics", timeout=timeout_s) as answer:
        body: bytes = answer.read()
    return body


def sums(body: bytes, *names: str) -> dict[str, float]:
    """Of each metric, the sum of all its series. Found as text: it is megabytes, each second."""
    text = b"\n" + body
    out = {}
    for name in names:
        needle = b"\n" + name.encode()
        total, at = 0.0, text.find(needle)
        while at >= 0:
            end = text.find(b"\n", at + 1)
            line = text[at + len(needle) : end if end >= 0 else len(text)]
            if line[:1] in (b"{", b" "):
                total += float(line.rpartition(b" ")[2])
            at = text.find(needle, at + 1)
        out[name] = total
    return out


@dataclass(slots=True)
class Watch:
    """Looks at all processes of `supervisor` once a second, from `__enter__` to `__exit__`."""

    supervisor: int
    admin: int
    metrics: tuple[str, ...]
    looks: list[Look] = field(default_factory=list)
    scrapes: list[Scrape] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    failed_scrapes: int = 0
    begin_s: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self.begin_s = time.monotonic()
        # Each on its own: a scrape that takes long keeps nobody from looking.
        for work in (self._look, self._scrape):
            thread = threading.Thread(target=self._each_second, args=(work,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def now_s(self) -> float:
        return time.monotonic() - self.begin_s

    def did(self, what: str) -> None:
        self.acts.append(Act(self.now_s(), what))

    def files_at_rest(self) -> dict[str, int]:
        """Open files by role, of the newest process of each, now."""
        found: dict[str, int] = {}
        for pid, role in sorted(processes(self.supervisor).items()):
            seen = look(pid, role, self.now_s(), pss=False)
            if seen is not None:
                found[role] = seen.files
        return found

    def to_dict(self) -> dict[str, object]:
        return {
            "looks": [asdict(one) for one in self.looks],
            "scrapes": [asdict(one) for one in self.scrapes],
            "acts": [asdict(one) for one in self.acts],
            "failed_scrapes": self.failed_scrapes,
        }

    def _each_second(self, work: Callable[[int], None]) -> None:
        number = 0
        while not self._over.is_set():
            work(number)
            number = max(number + 1, int((time.monotonic() - self.begin_s) / EVERY_S) + 1)
            self._over.wait(max(0.0, self.begin_s + number * EVERY_S - time.monotonic()))

    def _look(self, number: int) -> None:
        for pid, role in processes(self.supervisor).items():
            seen = look(pid, role, self.now_s(), pss=number % PSS_EVERY == 0)
            if seen is not None:
                self.looks.append(seen)

    def _scrape(self, _number: int) -> None:
        at_s = self.now_s()
        try:
            body = scraped(self.admin)
        except (OSError, urllib.error.URLError):
            self.failed_scrapes += 1  # a meter that was killed is away for a moment
            return
        self.scrapes.append(Scrape(at_s, self.now_s() - at_s, len(body), sums(body, *self.metrics)))
