import resource
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.clock import WallAnchor, resident_bytes


@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_an_anchor_turns_stamps_into_dates(mono: int, wall: int) -> None:
    anchor = WallAnchor(mono_ns=mono, wall_ns=wall, width_ns=0)
    assert anchor.to_wall_ns(mono) == wall
    for delta in (-1, 0, 1, 10**12):
        assert anchor.to_wall_ns(mono + delta) == wall + delta


@dataclass
class Interrupted:
    """A clock whose readings take as long as told: (before the wall's, after it), one pair for each try."""

    pauses: list[tuple[int, int]]
    now_ns: int = 0
    reads: int = field(default=0, init=False)

    def mono_ns(self) -> int:
        self.reads += 1
        return self.now_ns

    def wall_ns(self) -> int:
        before, after = self.pauses.pop(0)
        wall = self.now_ns + before + 1_000_000
        self.now_ns += before + after
        return wall


def test_an_anchor_is_the_tightest_of_its_readings() -> None:
    clock = Interrupted([(500, 500), (3, 5), (900, 0)])
    anchor = WallAnchor.sample(clock, tries=3)
    assert anchor.width_ns == 8
    # In the middle of its bracket: wrong by half of it at most.
    assert anchor.mono_ns == 1_000 + 4
    assert abs(anchor.wall_ns - 1_000_000 - anchor.mono_ns) <= anchor.width_ns / 2


def test_memory_is_the_peak_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", no_file)
    assert resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
