"""The pacer: everybody is called, in the order they are due, and nobody early."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.clock import SystemClock
from llmtap.sim.pacing import Pacer
from tests.support.peer import scene

MS = 1_000_000


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-5, 30), min_size=1, max_size=40))
def test_nobody_is_called_early_and_the_earlier_go_first(offsets: list[int]) -> None:
    async def run() -> None:
        pacer = Pacer(SystemClock())
        now_ns = SystemClock.mono_ns()
        called: list[tuple[int, int]] = []
        done = asyncio.Event()

        def make(due_ns: int):  # type: ignore[no-untyped-def]
            def act() -> None:
                called.append((due_ns, SystemClock.mono_ns()))
                if len(called) == len(offsets):
                    done.set()

            return act

        dues = [now_ns + offset * MS // 10 for offset in offsets]
        for due_ns in dues:
            pacer.add(due_ns, make(due_ns))
        await done.wait()
        pacer.close()
        assert sorted(due for due, _ in called) == sorted(dues)
        assert all(at >= due for due, at in called)
        assert [due for due, _ in called] == sorted(dues)

    asyncio.run(run())


@scene
async def test_who_answers_a_time_is_called_again_then() -> None:
    pacer = Pacer(SystemClock())
    began_ns = SystemClock.mono_ns()
    calls: list[int] = []
    done = asyncio.Event()

    def act() -> int | None:
        calls.append(SystemClock.mono_ns())
        if len(calls) < 5:
            return began_ns + len(calls) * MS
        done.set()
        return None

    pacer.add(began_ns, act)
    await done.wait()
    pacer.close()
    assert all(at >= began_ns + i * MS for i, at in enumerate(calls))


@scene
async def test_an_earlier_one_moves_the_alarm_forward() -> None:
    pacer = Pacer(SystemClock())
    now_ns = SystemClock.mono_ns()
    pacer.add(now_ns + 3_600_000 * MS, lambda: None)
    await pacer.wait_until(now_ns + MS)
    assert SystemClock.mono_ns() >= now_ns + MS
    pacer.close()


@scene
async def test_after_the_end_nobody_is_called() -> None:
    pacer = Pacer(SystemClock())
    called: list[int] = []
    pacer.add(SystemClock.mono_ns() + 2 * MS, lambda: called.append(1))
    pacer.close()
    pacer.add(0, lambda: called.append(2))
    other = Pacer(SystemClock())
    await other.wait_until(SystemClock.mono_ns() + 4 * MS)
    other.close()
    assert called == []


@scene
async def test_a_waiter_that_is_cancelled_harms_nobody() -> None:
    pacer = Pacer(SystemClock())
    waiter = asyncio.create_task(pacer.wait_until(SystemClock.mono_ns() + 2 * MS))
    await asyncio.sleep(0)
    waiter.cancel()
    await pacer.wait_until(SystemClock.mono_ns() + 4 * MS)
    assert waiter.cancelled()
    pacer.close()
