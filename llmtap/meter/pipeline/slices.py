"""Rolling windows of several lengths over one row of slices: fine while young, coarser with age.

Time is cut into slices as long as the step of the shortest window; only the newest is written. When slices
are too old for a window, they are merged into one as long as the step of the next longer window. So every
value is recorded once and held once, however many windows there are, and each window forgets in whole
steps: at any moment it holds everything of its length less one step, and nothing older than its length.

Merging is cut into small pieces, of which the owner does a few whenever something happens: nothing ever waits
for a big one. Until a merge is done its slices stay, and all windows are right all the same.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

__all__ = ["Merging", "SliceLevel", "Slices"]

SLICES_MAX: Final = 512
"""Slices that may wait to be merged; beyond it the one who makes a new one does all the work."""

T = TypeVar("T")
Merging = Generator[None, None, T]
"""Yields after each small piece of work, and returns the merged slice."""


@dataclass(frozen=True, slots=True)
class SliceLevel:
    """A window, and the step in which it moves: a divisor of its length and of every longer level's step."""

    window_ns: int
    step_ns: int


@dataclass(slots=True)
class _Slice(Generic[T]):
    start_ns: int
    """Since the beginning, in whole steps of its level."""
    level: int
    data: T


class Slices(Generic[T]):
    """The row.

    Args:
        levels: ascending.
        now_ns: the beginning.
        make: an empty slice.
        merge: of slices, to one of the level given; the level after the last is the past: what left the
            longest window, all in one.
        past: keep the past, or forget it.
    """

    def __init__(
        self,
        levels: Sequence[SliceLevel],
        now_ns: int,
        make: Callable[[], T],
        merge: Callable[[Sequence[T], int], Merging[T]],
        *,
        past: bool,
    ) -> None:
        for short, long in zip(levels, (*levels[1:], levels[-1]), strict=True):
            assert short.window_ns % short.step_ns == 0
            assert long.step_ns % short.step_ns == 0
        self._levels = tuple(levels)
        self._begin_ns = now_ns
        self._make = make
        self._merge = merge
        self._open: _Slice[T] = _Slice(0, 0, make())
        self._sealed: list[_Slice[T]] = []
        self._past: T | None = make() if past else None
        self._job: tuple[int, int, int, int, Merging[T]] | None = None
        """From and to (in `_sealed`), start and level of what it makes, and the work."""
        self._idle_at_ns = -1
        """The open slice's start when there was last nothing to merge."""

    def __len__(self) -> int:
        """Slices there are now."""
        return len(self._sealed) + 1

    def current(self, now_ns: int) -> T:
        """The slice that is written at this moment."""
        since_ns = now_ns - self._begin_ns
        open_ = self._open
        step_ns = self._levels[0].step_ns
        if since_ns - open_.start_ns >= step_ns:
            self._sealed.append(open_)
            self._open = open_ = _Slice(since_ns // step_ns * step_ns, 0, self._make())
            while len(self._sealed) > SLICES_MAX and self.tidy():
                pass
        return open_.data

    def seal(self, now_ns: int) -> None:
        """Makes what the current slice holds final, for a reader in another thread; a new one takes over."""
        self.current(now_ns)
        self._sealed.append(self._open)
        self._open = _Slice(self._open.start_ns, 0, self._make())
        self._idle_at_ns = -1

    def window(self, level: int, now_ns: int) -> list[T]:
        """The slices of a window, oldest first; all but the last are final."""
        self.current(now_ns)
        first_ns = self._first_ns(level, now_ns - self._begin_ns)
        return [s.data for s in self._sealed if s.start_ns >= first_ns] + [self._open.data]

    def window_start_ns(self, level: int, now_ns: int) -> int:
        """Since when a window holds everything."""
        return self._begin_ns + max(0, self._first_ns(level, now_ns - self._begin_ns))

    def everything(self, now_ns: int) -> list[T]:
        """All slices and the past, which comes first."""
        self.current(now_ns)
        past = [] if self._past is None else [self._past]
        return past + [s.data for s in self._sealed] + [self._open.data]

    def tidy(self) -> bool:
        """One small piece of merging; False when there was nothing to do."""
        if self._job is None:
            if self._idle_at_ns == self._open.start_ns:
                return False
            self._job = self._next_job()
            if self._job is None:
                self._idle_at_ns = self._open.start_ns
                return False
        begin, end, start_ns, level, work = self._job
        try:
            next(work)
        except StopIteration as done:
            self._job = None
            if level == len(self._levels):
                self._past = done.value
                del self._sealed[begin:end]
            else:
                self._sealed[begin:end] = [_Slice(start_ns, level, done.value)]
        return True

    def _first_ns(self, level: int, since_ns: int) -> int:
        """The start of the oldest slice that the window holds; below 0 while it is not yet full."""
        step_ns = self._levels[level].step_ns
        return since_ns // step_ns * step_ns - self._levels[level].window_ns + step_ns

    def _level_of(self, start_ns: int) -> int:
        """The coarsest level that a slice of this start may be merged to: no shorter window holds it."""
        since_ns = self._open.start_ns
        if start_ns < self._first_ns(len(self._levels) - 1, since_ns):
            return len(self._levels)
        found = 0
        for level in range(1, len(self._levels)):
            step_ns = self._levels[level].step_ns
            if start_ns // step_ns * step_ns + step_ns > self._first_ns(level - 1, since_ns):
                break
            found = level
        return found

    def _next_job(self) -> tuple[int, int, int, int, Merging[T]] | None:
        sealed = self._sealed
        begin = 0
        while begin < len(sealed):
            start_ns = sealed[begin].start_ns
            level = self._level_of(start_ns)
            end = begin + 1
            if level == len(self._levels):
                while end < len(sealed) and self._level_of(sealed[end].start_ns) == level:
                    end += 1
                if self._past is None:
                    del sealed[begin:end]
                    continue
                data = [self._past, *(s.data for s in sealed[begin:end])]
                return begin, end, 0, level, self._merge(data, level)
            step_ns = self._levels[level].step_ns
            start_ns = start_ns // step_ns * step_ns
            while end < len(sealed) and sealed[end].start_ns < start_ns + step_ns:
                end += 1
            whole = level > 0 or start_ns != self._open.start_ns
            if whole and (end - begin > 1 or sealed[begin].level < level):
                data = [s.data for s in sealed[begin:end]]
                return begin, end, start_ns, level, self._merge(data, level)
            begin = end
        return None
