"""A loop that is held up says so: at once, and of each moment since."""

import asyncio
import time

import pytest

from llmtap.clock import SystemClock
from llmtap.load.sending import GRAIN_NS, KERNEL_FLOOR_NS, PROBE_NS, Lateness
from tests.support.peer import scene, wait_until

MS = 1_000_000


@pytest.mark.parametrize("kernel", [False, True])
@scene
async def test_a_stall_is_told_before_its_probe_has_come(kernel: bool) -> None:
    lateness = Lateness(asyncio.get_running_loop(), kernel=kernel)
    floor_ns = KERNEL_FLOOR_NS if kernel else GRAIN_NS
    before_ns = SystemClock.mono_ns()
    assert lateness.worst_since(before_ns) >= floor_ns
    time.sleep(0.08)  # noqa: ASYNC251 (which is what is to be seen)
    held_ns = 80 * MS - PROBE_NS - GRAIN_NS
    assert lateness.worst_since(before_ns) >= held_ns
    await asyncio.sleep(0.03)
    assert lateness.worst_since(before_ns) >= held_ns, "and of all that was under way then, ever after"
    assert lateness.meter.take_max() >= held_ns
    lateness.close()


@scene
async def test_whoever_wants_it_is_called_at_each_probe_until_it_is_closed() -> None:
    seen: list[int] = []
    lateness = Lateness(asyncio.get_running_loop(), kernel=True, each=seen.append)
    await wait_until(lambda: len(seen) >= 3)
    assert seen == sorted(seen)
    lateness.close()
    n = len(seen)
    await asyncio.sleep(0.03)
    assert len(seen) == n
