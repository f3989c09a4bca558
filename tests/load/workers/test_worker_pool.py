"""One schedule, sent once by any number of processes; and nobody hangs, whoever dies."""

import asyncio
import json
import os
import pickle
import signal
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.load.workers.worker_handle import Progress
from llmtap.load.workers.worker_pool import LoadResult, WorkerPool
from llmtap.workload.requests import Requests
from tests.support.servers.loading import alive, bodies, sockets, streamed_answer
from tests.support.servers.peer import play, wait_until
from tests.support.servers.upstream import Call, Script, Upstream, says, unanswered_port, upstream
from tests.support.traffic.streams import streamed

MS = 1_000_000
ANSWER = says(*streamed_answer(2))
HOUR_MS = 3_600_000


def requests(
    arrivals_ms: Sequence[int], tenants: Sequence[str] = (), labels: Sequence[str | None] = ()
) -> Requests:
    return Requests(array("q", [ms * MS for ms in arrivals_ms]), tenants=list(tenants), labels=list(labels))


def rows_of(server: Upstream) -> list[int]:
    said = [call.payload.data for call in server.calls if call.payload is not None]
    return [int(body.partition(b"row-")[2].partition(b'"')[0]) for body in said]


class Load:
    """A crew against a scripted server, in one scene."""

    def __init__(self, script: Script, r: Requests, *, processes: int = 1, **more: Any) -> None:
        self.script, self.r, self.processes, self.more = script, r, processes, more
        self.told: list[Progress] = []
        self.exchanges: list[tuple[int, Exchange]] = []

    async def run(self, meanwhile: Any = None) -> LoadResult:
        async with upstream() as self.server:
            url = self.server.url + self.server.on(self.script)
            with (
                bodies(url, len(self.r), **self.more) as (setup, begins, ends),
                WorkerPool(setup, self.r, (begins, ends), processes=self.processes, keep=True) as self.crew,
            ):
                self.running = asyncio.ensure_future(self.crew.run(self.told.append))
                try:
                    if meanwhile is not None:
                        await meanwhile(self)
                finally:
                    out = await self.running
                self.exchanges = list(self.crew.exchanges())
        return out

    def outcomes(self) -> Counter[str]:
        return Counter(x.outcome.value for _, x in self.exchanges)


async def held(call: Call) -> None:
    await call.body()
    await call.left()


def plan(out: LoadResult) -> dict[str, Any]:
    return out.tally.plan_dict()


def test_each_row_once_at_its_time() -> None:
    n, processes = 60, 3
    arrivals = [3 * i for i in range(n)]
    r = requests(arrivals, tenants=["a", "b", "c"] * 20, labels=["should-refuse", None] * 30)
    load = Load(ANSWER, r, processes=processes, tenant_header="X-Tenant", label_header="x-llmtap-label")
    out = play(load.run())
    assert len(load.crew.pids) == len(out.reports) == processes
    assert sorted(rows_of(load.server)) == list(range(n))
    assert sorted(row for row, _ in load.exchanges) == list(range(n))
    assert load.outcomes() == {"complete": n}
    for row, x in load.exchanges:
        assert x.scheduled_ns == out.began_ns + arrivals[row] * MS, "one start for all"
        assert x.timeline.arrival_ns - x.scheduled_ns == x.dispatch_late_ns >= 0
        assert x.tenant == "abc"[row % 3]
        assert x.label == ("should-refuse", None)[row % 2]
    labels = Counter(call.head.get("x-llmtap-label") for call in load.server.calls)
    assert labels == {b"should-refuse": n // 2, None: n // 2}
    assert len({x.id for _, x in load.exchanges}) == n
    assert sorted((call.head.get("x-tenant") or b"").decode() for call in load.server.calls) == sorted(
        "abc" * 20
    )
    assert (out.stopped, out.lost_statuses, out.lost_rows) == (None, [], 0)
    assert sorted(out.tally.sent_ns) == sorted(x.timeline.arrival_ns for _, x in load.exchanges)
    assert plan(out) | {"lateness": None} == {
        "planned": n,
        "sent": n,
        "dropped": 0,
        "unsent": 0,
        "retries": {"n": 0, "reasons": {}},
        "lateness": None,
    }
    assert load.told[-1].ended == load.told[-1].sent == n
    assert load.told[-1].left == 0


def test_a_process_that_is_killed_is_lost_and_nobody_waits_for_it() -> None:
    async def meanwhile(load: Load) -> None:
        # Rows 0, 2, 4 are of the one that will be killed.
        await wait_until(lambda: len(load.server.calls) == 4)
        os.kill(load.crew.pids[0], signal.SIGKILL)
        await wait_until(lambda: load.server.open == 2)
        load.crew.stop()
        load.crew.stop()

    load = Load(held, requests([0, 0, 0, 0, HOUR_MS, HOUR_MS]), processes=2)
    out = play(load.run(meanwhile))
    assert (out.lost_statuses, out.lost_rows, len(out.reports)) == ([-signal.SIGKILL], 3, 1)
    assert load.outcomes() == {"client_cancelled": 2}
    assert (plan(out)["planned"], plan(out)["sent"]) == (6, 2)


@pytest.mark.parametrize("torn", [1, 59])
def test_a_torn_record_ends_what_a_lost_process_had_put_aside(torn: int) -> None:
    x = streamed(100, 120)
    whole = b"".join(pickle.dumps((row, x), pickle.HIGHEST_PROTOCOL) for row in (3, 1))
    with (
        bodies("http://127.0.0.1:1", 1) as (setup, begins, ends),
        WorkerPool(setup, requests([0]), (begins, ends), keep=True) as crew,
    ):
        crew._spills[0].write(whole + whole[:torn])
        assert [row for row, _ in crew.exchanges()] == [3, 1]


def test_a_process_that_dies_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LlmtapError, match="ended right after its start, with status 1"):
        play(Load(ANSWER, requests([0, 0]), processes=2).run())


def test_whoever_waits_is_cancelled_and_nobody_is_left() -> None:
    async def meanwhile(load: Load) -> None:
        await wait_until(lambda: load.server.calls)
        load.running.cancel()

    load = Load(held, requests([0, HOUR_MS]), processes=2)
    with pytest.raises(asyncio.CancelledError):
        play(load.run(meanwhile))
    for pid in load.crew.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


PARENT = """
import asyncio, json, sys
from array import array
from llmtap.load.workers.worker_handle import WorkerSetup
from llmtap.load.workers.worker_pool import WorkerPool
from llmtap.load.options import LoadPlan, TargetOptions
from llmtap.workload.requests import Requests
import tempfile

async def main():
    with tempfile.TemporaryFile() as file:
        file.write(b"{}")
        file.flush()
        setup = WorkerSetup(load=LoadPlan(target=TargetOptions(url=sys.argv[1])),
                      bodies_fd=file.fileno(), spill_fd=None, open=int(sys.argv[2]))
        plan = Requests(array("q", [0, 0, 3_600_000_000_000]))
        with WorkerPool(setup, plan, (array("q", [0] * 3), array("q", [2] * 3)), processes=2) as crew:
            running = asyncio.ensure_future(crew.run())
            while len(crew.pids) < 2:
                await asyncio.sleep(0.01)
            print(json.dumps(crew.pids), flush=True)
            await running

asyncio.run(main())
"""


FILLERS = 8
"""Of `unanswered_port`."""


@pytest.mark.parametrize("when", ["sending", "connecting"])
async def test_a_parent_that_dies_takes_its_processes_along(when: str) -> None:
    async with upstream() as server, unanswered_port() as port:
        url, connections = server.url + server.on(held), "0"
        if when == "connecting":
            url, connections = f"http://127.0.0.1:{port}", "4"
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT, url, connections, stdout=asyncio.subprocess.PIPE
        )
        pids = json.loads(await parent.stdout.readline())
        if when == "sending":
            await wait_until(lambda: len(server.calls) == 2)
        else:
            await wait_until(lambda: sockets(port) >= FILLERS + 4)
        parent.kill()
        await parent.wait()
        await wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"url": "gw.test"}, "--target"),
        ({"url": "https://gw.test", "ca": "/no/such/file.pem"}, "--ca"),
        ({"slo": "no"}, "objectives"),
    ],
)
def test_settings_that_no_process_could_use(more: dict[str, Any], place: str) -> None:
    async def work() -> None:
        with (
            bodies(**{"url": "http://127.0.0.1:1", "count": 1, **more}) as (setup, begins, ends),
            WorkerPool(setup, requests([0]), (begins, ends)) as crew,
        ):
            await crew.run()

    with pytest.raises(ConfigError) as refused:
        play(work())
    assert refused.value.place == place
