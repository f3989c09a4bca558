"""The pacer: everybody is called, in the order they are due, and nobody early."""

import asyncio
import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.clock import ManualClock, SystemClock
from llmtap.net.pacing import Pacer, Waker
from llmtap.units import NEVER
from tests.support.waiting import wait_until

MS = 1_000_000


@settings(max_examples=30)
@given(st.lists(st.integers(-5, 30), min_size=1, max_size=40))
def test_nobody_is_called_early_and_the_earlier_go_first(offsets: list[int]) -> None:
    async def run() -> None:
        pacer = Pacer(SystemClock())
        now_ns = SystemClock.mono_ns()
        called: list[tuple[int, int]] = []
        done = asyncio.Event()

        def make(due_ns: int):  # type: ignore[no-untyped-def]
            def act(now_ns: int) -> int:
                assert now_ns >= due_ns
                called.append((due_ns, SystemClock.mono_ns()))
                if len(called) == len(offsets):
                    done.set()
                return NEVER

            return act

        dues = [now_ns + offset * MS // 10 for offset in offsets]
        for due_ns in dues:
            Waker(pacer, make(due_ns)).call_at(due_ns)
        await done.wait()
        pacer.close()
        assert sorted(due for due, _ in called) == sorted(dues)
        assert all(at >= due for due, at in called)
        assert [due for due, _ in called] == sorted(dues)

    asyncio.run(run())


async def test_after_the_end_nobody_is_called() -> None:
    pacer = Pacer(SystemClock())
    called: list[int] = []

    def act(now_ns: int) -> int:
        called.append(now_ns)
        return NEVER

    Waker(pacer, act).call_at(SystemClock.mono_ns() + 2 * MS)
    pacer.close()
    Waker(pacer, act).call_at(0)
    other = Pacer(SystemClock())
    await other.wait_until(SystemClock.mono_ns() + 4 * MS)
    other.close()
    assert called == []


async def test_a_turn_that_fails_does_not_stop_the_others() -> None:
    pacer = Pacer(SystemClock())
    failed: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failed.append(str(context["exception"]))
    )

    def fail(now_ns: int) -> int:
        raise AssertionError("ours")

    Waker(pacer, fail).call_at(SystemClock.mono_ns())
    await wait_until(lambda: failed)
    await pacer.wait_until(SystemClock.mono_ns() + MS)
    pacer.close()
    assert failed == ["ours"]


class Steered:
    """A clock that somebody else sets, and a pacer whose turns he takes."""

    def __init__(self) -> None:
        self.clock = ManualClock(1)
        self.pacer = Pacer(self.clock)
        self.pacer._set_timer = lambda at_ns: None  # type: ignore[method-assign]

    def until(self, at_ns: int) -> None:
        """Calls all who are due until then, each at his moment."""
        heap = self.pacer._heap
        while heap and heap[0][0] <= at_ns:
            self.clock.now_ns = max(self.clock.now_ns, heap[0][0])
            self.pacer._run_turn()
        self.clock.now_ns = at_ns


async def test_a_waiter_that_is_cancelled_harms_nobody() -> None:
    steered = Steered()
    waiter = asyncio.create_task(steered.pacer.wait_until(10))
    await asyncio.sleep(0)
    waiter.cancel()
    steered.until(20)
    await asyncio.wait([waiter])
    assert waiter.cancelled()


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 50)), max_size=30), st.lists(st.integers(1, 40)))
def test_who_may_be_wanted_sooner_is_called_by_then_and_not_forgotten(
    wanted: list[tuple[int, int]], agains: list[int]
) -> None:
    """`wanted`: after so long, by then from there. `agains`: what the one who is called answers, in turn."""
    steered = Steered()
    due: list[int] = []
    told = iter(agains)

    def act(now_ns: int) -> int:
        while due and due[0] <= now_ns:
            assert heapq.heappop(due) == now_ns, "late"
        again = next(told, None)
        if again is not None:
            heapq.heappush(due, now_ns + again)
        return due[0] if due else NEVER

    waker = Waker(steered.pacer, act)
    for after, within in wanted:
        steered.until(steered.clock.now_ns + after)
        heapq.heappush(due, steered.clock.now_ns + within)
        waker.call_at(steered.clock.now_ns + within)
        assert len(steered.pacer._heap) == len(set(waker.waiting_ns)), "each moment once"
    steered.until(steered.clock.now_ns + 5_000)
    assert not due
    waker.call_at(NEVER)
    assert not steered.pacer._heap and not waker.waiting_ns


def test_the_same_moment_is_asked_for_once_and_no_later_one_besides() -> None:
    steered = Steered()
    waker = Waker(steered.pacer, lambda now_ns: NEVER)
    for due_ns in (70, 70, 80, 50, 60, 50):
        waker.call_at(due_ns)
    assert sorted(due_ns for due_ns, _, _ in steered.pacer._heap) == [50, 70]
