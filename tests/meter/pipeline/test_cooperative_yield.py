"""The meter's turns on the CPU: short while it keeps up, as long as it takes when it is behind."""

from itertools import pairwise

from llmtap.meter.pipeline.cooperative_yield import (
    BEHIND_NS,
    CPU_EVERY_NS,
    LONG_YIELD_NS,
    LOOP_TURN_NS,
    NO_YIELD_NS,
    TURN_NS,
    CooperativeYield,
)


class Bench:
    """A clock that each frame's work moves on, and a count of how often the CPU was given away."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self.now_ns = start_ns
        self.given: list[int] = []
        self.away_ns = 0
        self.turns = CooperativeYield(lambda: self.now_ns, self.give)

    def give(self) -> None:
        self.given.append(self.now_ns)
        self.now_ns += self.away_ns

    def digest(self, frames: int, work_ns: int, age_ns: int = 0) -> list[int]:
        batch = [(8, 1, self.now_ns - age_ns, 0, b"%d" % i) for i in range(frames)]
        seen = []
        for frame in self.turns.pace(batch, batch[-1][2]):
            seen.append(frame)
            self.now_ns += work_ns
        assert seen == batch
        return self.given


def test_the_cpu_is_offered_whenever_a_turn_is_over() -> None:
    bench = Bench()
    given = bench.digest(frames=20, work_ns=TURN_NS // 4)
    assert len(given) == 4  # after every fifth frame: a turn is over when it is longer than TURN_NS
    assert all(b - a > TURN_NS for a, b in pairwise(given))


def test_who_is_behind_gives_nothing_away_until_it_has_caught_up() -> None:
    bench = Bench()
    assert bench.digest(frames=20, work_ns=TURN_NS, age_ns=2 * BEHIND_NS) == []
    assert bench.turns.is_behind
    assert bench.digest(frames=4, work_ns=2 * TURN_NS) == []
    assert not bench.turns.is_behind
    bench.now_ns += NO_YIELD_NS
    assert len(bench.digest(frames=4, work_ns=2 * TURN_NS)) == 4


def test_who_gets_the_cpu_back_late_keeps_it_for_a_while() -> None:
    bench = Bench()
    bench.away_ns = 2 * LONG_YIELD_NS
    assert len(bench.digest(frames=4, work_ns=2 * TURN_NS)) == 1
    bench.away_ns = LONG_YIELD_NS // 2
    bench.now_ns += NO_YIELD_NS
    assert len(bench.digest(frames=4, work_ns=2 * TURN_NS)) == 1 + 4


def test_a_frame_that_takes_long_is_charged_with_the_cpu_time_that_it_used() -> None:
    now_ns, charged = [1_000_000_000], []
    # Half of the time belongs to other processes.
    turns = CooperativeYield(lambda: now_ns[0], lambda: None, lambda: now_ns[0] // 2)
    work_ns = {2: 8 * CPU_EVERY_NS, 5: 4 * CPU_EVERY_NS}
    frames = [(8, seq, now_ns[0], 0, b"") for seq in range(8)]
    for _, seq, *_ in turns.pace(frames, now_ns[0], lambda frame, cpu_ns: charged.append((frame[1], cpu_ns))):
        now_ns[0] += work_ns.get(seq, 0)
    assert charged == [(2, 4 * CPU_EVERY_NS), (5, 2 * CPU_EVERY_NS)]


def test_the_event_loop_is_due_after_its_share_of_work() -> None:
    bench = Bench()
    bench.turns.begin_turn()
    bench.digest(frames=4, work_ns=LOOP_TURN_NS // 5)
    assert not bench.turns.loop_is_due
    bench.digest(frames=4, work_ns=LOOP_TURN_NS // 5)
    assert bench.turns.loop_is_due
    bench.turns.begin_turn()
    assert not bench.turns.loop_is_due
