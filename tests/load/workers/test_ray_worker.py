"""A crew on a local Ray of two workers: one schedule, sent once, in our time; and nobody hangs."""

import asyncio
import contextlib
import warnings
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.load.workers import ray_worker as ray_member
from llmtap.load.workers.ray_worker import RayMember
from llmtap.load.workers.worker_handle import (
    ClockReading,
    Progress,
    read_clocks,
)
from llmtap.load.workers.worker_pool import LoadResult, WorkerPool
from llmtap.net.cluster import ray_cluster
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.requests import Requests
from tests.support.servers.loading import alive, bodies
from tests.support.servers.peer import play, wait_until
from tests.support.servers.sim_engine import engine
from tests.support.servers.upstream import Call, upstream
from tests.support.waiting import block_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make setup"),
    # Ray takes 6 s to start here, a minute where others are busy; and the first one waits for other modules.
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]
MS = 1_000_000
HOUR_NS = 3_600_000_000_000
BOUND_S = 250


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("default")
        try:
            module = stack.enter_context(ray_cluster("local", 2))
        except ConfigError as exc:
            if "did not start on this machine" not in exc.problem:
                raise
            pytest.skip(f"no time for Ray here: {exc}")
        yield module


def requests(arrivals_ms: list[float], tenants: list[str] | None = None) -> Requests:
    return Requests(array("q", [int(ms * MS) for ms in arrivals_ms]), tenants=tenants or [])


@dataclass
class Sent:
    """What a crew of two came to."""

    out: LoadResult
    exchanges: list[tuple[int, Exchange]]
    told: list[Progress]


async def sent(
    ray: Any,
    url: str,
    r: Requests,
    meanwhile: Callable[[WorkerPool, list[Progress]], Awaitable[None]] | None = None,
    *,
    processes: int = 2,
    clock: Any = None,
    **more: Any,
) -> Sent:
    told: list[Progress] = []
    with (
        bodies(url, len(r), **more) as (setup, begins, ends),
        WorkerPool(
            setup,
            r,
            (begins, ends),
            processes=processes,
            keep=True,
            clock=clock,
            create_member=lambda: RayMember(ray, clock),
        ) as crew,
    ):
        running = asyncio.ensure_future(crew.run(told.append))
        try:
            if meanwhile is not None:
                await meanwhile(crew, told)
        finally:
            out = await running
        return Sent(out, list(crew.exchanges()), told)


async def held(call: Call) -> None:
    await call.body()
    await call.left()


def test_two_workers_send_one_schedule_once_and_figures_are_the_sum(ray: Any) -> None:
    n = 80

    async def work() -> tuple[Sent, list[dict[str, Any]]]:
        async with engine(SimOptions(ttft=Duration(20 * MS), itl=Duration(2 * MS), tokens=7)) as e:
            r = requests([5.0 * i for i in range(n)], ["a", "b"] * (n // 2))
            found = await sent(ray, e.url, r, request_ids="run", slo="ttft:1s", open=4)
            return found, await e.truths()

    found, truths = play(work(), BOUND_S)
    out, exchanges = found.out, found.exchanges
    assert (len(out.reports), out.lost_statuses, out.stopped) == (2, [], None)
    # The server's own books: each row came once.
    assert Counter(truth["id"] for truth in truths) == Counter(f"run-{row}" for row in range(n))
    assert Counter(x.relay for _, x in exchanges) == {"load0": n // 2, "load1": n // 2}
    # One start, on the clock that this host's processes share.
    assert [clock.shared for clock in out.clocks] == [True, True]
    assert {row: (x.scheduled_ns, x.tenant) for row, x in exchanges} == {
        row: (out.began_ns + 5 * MS * row, "ab"[row % 2]) for row in range(n)
    }
    assert (out.tally.summary.n, out.tally.lateness.n, out.tally.planned) == (n, n, n)
    assert (found.told[-1].sent, found.told[-1].ended, found.told[-1].left) == (n, n, 0)
    assert all(done.cpu_ns > 0 and done.rss_bytes > 1 << 20 for done in out.reports)
    assert sum(done.connects + done.reuses for done in out.reports) >= n


class Ahead:
    """A host whose monotonic clock is an hour ahead of everybody's, and its wall clock three seconds."""

    def mono_ns(self) -> int:
        return SystemClock.mono_ns() + HOUR_NS

    def wall_ns(self) -> int:
        return SystemClock.wall_ns() + 3_000 * MS


def test_hosts_with_other_clocks_start_together_and_come_back_in_our_time(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We are the host that has another clock: to us, the workers' hosts do."""
    boot = read_clocks()

    def ours(clock: Any = None) -> ClockReading:
        return ClockReading("us", "another", clock.mono_ns(), clock.wall_ns())

    monkeypatch.setattr(ray_member, "read_clocks", ours)
    n = 40

    async def work() -> tuple[Sent, list[dict[str, Any]], int, int]:
        async with engine(SimOptions(ttft=Duration(20 * MS), itl=Duration(2 * MS), tokens=7)) as e:
            before_ns = SystemClock.mono_ns()
            found = await sent(
                ray, e.url, requests([5.0 * i for i in range(n)]), clock=Ahead(), request_ids="run"
            )
            return found, await e.truths(), before_ns, SystemClock.mono_ns()

    found, truths, before_ns, after_ns = play(work(), BOUND_S)
    out = found.out
    assert [clock.shared for clock in out.clocks] == [False, False]
    assert [clock.host for clock in out.clocks] == [boot.host] * 2
    rtt_ns = max(clock.rtt_ns for clock in out.clocks)
    assert before_ns < out.began_ns - HOUR_NS < out.ended_ns - HOUR_NS < after_ns
    # The plan of both workers has one start, as well as their clocks were compared.
    for row, x in found.exchanges:
        assert abs(x.scheduled_ns - (out.began_ns + 5 * MS * row)) <= rtt_ns
        assert x.timeline.arrival_ns == x.scheduled_ns + x.dispatch_late_ns
    # Against the books of a server on our host: true within the comparison, and what stamps are unsure of.
    books = {truth["id"]: truth for truth in truths}
    assert len(books) == n
    for row, x in found.exchanges:
        sent_ns = books[f"run-{row}"]["sent_ns"][0]
        log = x.timeline.events
        stamps = [t for t, flags in zip(log.t_ns, log.flags, strict=True) if flags & OUTPUT]
        assert len(stamps) == len(sent_ns) == 7
        for ours_ns, true_ns in zip(stamps, sent_ns, strict=True):
            assert ours_ns >= true_ns + HOUR_NS - rtt_ns - x.uncertainty_ns
        assert x.timeline.arrival_ns <= books[f"run-{row}"]["accepted_ns"] + HOUR_NS + rtt_ns
    assert all(before_ns <= t - HOUR_NS <= after_ns for t in out.tally.sent_ns)
    for clock in out.clocks:
        told = clock.to_dict()
        assert told["offset"] == pytest.approx(-3.0, abs=told["rtt"])


def wait_gone(pids: list[int]) -> None:
    block_until(lambda: not any(map(alive, pids)), BOUND_S)


def test_who_is_lost_is_told_and_nobody_waits(ray: Any) -> None:
    pids: list[int] = []

    async def work() -> Sent:
        async with upstream() as server:

            async def meanwhile(crew: WorkerPool, told: list[Progress]) -> None:
                await wait_until(lambda: len(server.calls) == 4, BOUND_S)
                pids.extend(crew.pids)
                member = crew._members[0]
                assert isinstance(member, RayMember)
                ray.kill(member._actor)
                await wait_until(lambda: server.open == 2, BOUND_S)
                crew.stop()
                crew.stop()

            r = requests([0, 0, 0, 0, HOUR_NS, HOUR_NS])
            return await sent(ray, server.url + server.on(held), r, meanwhile)

    found = play(work(), BOUND_S)
    out = found.out
    assert (out.lost_statuses, out.lost_rows, len(out.reports)) == ([None], 3, 1)
    assert Counter(x.outcome.value for _, x in found.exchanges) == {"client_cancelled": 2}
    plan = out.tally.plan_dict()
    assert (plan["planned"], plan["sent"]) == (6, 2)
    wait_gone(pids)


@pytest.fixture
def remote() -> Iterator[ray_member.RemoteProcess]:
    """What an actor is, in this process."""
    one = ray_member.RemoteProcess()
    yield one
    one.kill()
    proc, files = one._process, [one._bodies, one._spill]
    for file in (*files, *(() if proc is None else (proc.stdin, proc.stdout))):
        if file is not None:
            file.close()


def test_words_that_overtake_each_other_are_said_in_order(
    remote: ray_member.RemoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bytes] = []
    monkeypatch.setattr(remote, "_write_line", said.append)
    remote.send_commands(["go 1", "stop x"])
    remote.send_commands(["go 1"])
    remote.send_commands(["go 1", "stop x", "cut x"])
    assert said == [b"go 1", b"stop x", b"cut x"]
