"""A crew against the simulated engine over Realtime and gRPC: rows once, on time, exact; stopped as ever."""

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.outcome import TokenSource
from llmtap.load.bodies import prepare
from llmtap.load.http import SenderOptions
from llmtap.load.sessions.prompt_sender import PromptMaker
from llmtap.load.target import protocol_of
from llmtap.load.workers import worker_pool as crews
from llmtap.load.workers.worker_handle import Progress, WorkerSetup
from llmtap.load.workers.worker_pool import LoadResult, WorkerPool
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import count_tokens, say
from llmtap.workload.requests import Requests
from tests.support.servers.loading import sockets
from tests.support.servers.peer import play, scene, wait_until
from tests.support.servers.sim_engine import engine
from tests.support.servers.sim_grpc import grpc_engine
from tests.support.servers.upstream import unanswered_port

MS = 1_000_000
TIMED = SimOptions(ttft=Duration(12 * MS), itl=Duration(3 * MS), tokens=5)
ENDLESS = SimOptions(ttft=Duration(60_000 * MS))
SPOKEN = ["realtime", "grpc"]


@dataclass
class Server:
    url: str
    spoken: str
    truths: Callable[[], list[Any]]
    under_way: Callable[[], int]


@asynccontextmanager
async def serving(spoken: str, options: SimOptions = TIMED) -> AsyncIterator[Server]:
    if spoken == "grpc":
        async with grpc_engine(options) as e:
            log = e.server.reception.truths
            yield Server(
                f"grpc://{e.address}", spoken, lambda: log.since(0)["truths"], lambda: e.server.gauges._open
            )
    else:
        async with engine(options) as e:
            log = e.server.reception.truths
            url = e.url.replace("http", "ws")
            yield Server(url, spoken, lambda: log.since(0)["truths"], lambda: e.server.gauges._open)


def said(tokens: int) -> str:
    return "".join(say(tokens, "test"))


class Words:
    """Prompts of so many tokens as their requests say, by the simulated engine's own count."""

    def __init__(self, r: Requests) -> None:
        self._r = r

    def prompt(self, row: int) -> Prompt:
        return Prompt(text=said(self._r.input[row]))


def requests(arrivals_ms: Sequence[float], tenants: list[str] | None = None) -> Requests:
    n = len(arrivals_ms)
    return Requests(
        array("q", [int(ms * MS) for ms in arrivals_ms]), array("q", [3 + row % 5 for row in range(n)]),
        array("q", [1 + row % 9 for row in range(n)]), tenants=tenants or [],
    )  # fmt: skip


@dataclass
class Sent:
    out: LoadResult
    exchanges: list[tuple[int, Exchange]]
    told: list[Progress]


async def sent(
    server: Server,
    r: Requests,
    meanwhile: Callable[[WorkerPool], Awaitable[None]] | None = None,
    *,
    processes: int = 1,
    timeout_ms: int = 60_000,
    connect_timeout_ms: int = 50_000,
    **more: Any,
) -> Sent:
    maker = PromptMaker(protocol_of(server.url), model="m", exact_output=True)
    told: list[Progress] = []
    with prepare(r, Words(r), maker) as prepared:
        options = SenderOptions(
            model="m", timeout=Duration(timeout_ms * MS), connect_timeout=Duration(connect_timeout_ms * MS)
        )
        setup = WorkerSetup(
            sender=options, url=server.url, endpoint="", script_fd=-1, bodies_fd=prepared.fd, spill_fd=None,
            exact_output=True, **more,
        )  # fmt: skip
        with WorkerPool(setup, r, prepared.begins, prepared.ends, processes=processes, keep=True) as crew:
            running = asyncio.ensure_future(crew.run(told.append))
            try:
                if meanwhile is not None:
                    await meanwhile(crew)
            finally:
                out = await running
            return Sent(out, list(crew.exchanges()), told)


@pytest.mark.parametrize("spoken", SPOKEN)
@pytest.mark.parametrize("processes", [1, 2])
def test_each_row_once_at_its_time_with_its_tokens(spoken: str, processes: int) -> None:
    n = 20
    r = requests([10 * row for row in range(n)])

    async def work() -> tuple[Sent, list[Any]]:
        async with serving(spoken) as server:
            found = await sent(server, r, processes=processes, request_ids="run", open=4)
            await wait_until(lambda: len(server.truths()) == n)
            return found, server.truths()

    found, truths = play(work())
    out = found.out
    assert Counter(truth.id for truth in truths) == Counter(f"run-{row}" for row in range(n))
    assert sorted(row for row, _ in found.exchanges) == list(range(n))
    assert len({x.id for _, x in found.exchanges}) == n
    books = {truth.id: truth for truth in truths}
    for row, x in found.exchanges:
        truth = books[x.request_id or ""]
        assert (x.request_id, x.outcome.value, x.error) == (f"run-{row}", "complete", None)
        assert (x.tokens.input, x.tokens.output, x.tokens.source) == (
            r.input[row], r.output[row], TokenSource.USAGE,
        )  # fmt: skip
        assert x.scheduled_ns == out.began_ns + r.arrival_ns[row]
        assert x.dispatch_late_ns == x.timeline.arrival_ns - x.scheduled_ns >= 0
        assert x.uncertainty_ns > 0
        # TTFT is the engine's, as its books have it, but for what stamps are unsure of on either side: we
        # submit no later than it accepts, and read no earlier than it has sent.
        t, log = x.timeline, x.timeline.events
        assert t.submit_ns is not None and t.first_content_ns is not None
        assert truth.accepted_ns >= t.arrival_ns
        stamps = [at for at, flags in zip(log.t_ns, log.flags, strict=True) if flags & OUTPUT]
        assert len(stamps) == len(truth.sent_ns[0]) == r.output[row]
        for at, one in zip(stamps, truth.sent_ns[0], strict=True):
            assert at >= one - x.uncertainty_ns
        # From above by its own measure: the server's, and what lies between its send and our read.
        true_ns = truth.sent_ns[0][0] - truth.accepted_ns
        assert t.first_content_ns - t.submit_ns >= true_ns - x.uncertainty_ns
    plan = out.tally.plan_dict()
    assert (plan["planned"], plan["sent"], plan["unsent"]) == (n, n, 0)
    lateness = plan["lateness"]
    assert isinstance(lateness, dict) and lateness["n"] == n
    assert (out.lost, out.stopped, len(out.done)) == ([], None, processes)
    assert all(done.cpu_ns > 0 for done in out.done)
    assert sum(done.connects + done.reuses for done in out.done) >= n
    assert (found.told[-1].ended, found.told[-1].tokens) == (n, sum(r.output))


@pytest.mark.parametrize("spoken", SPOKEN)
def test_what_takes_too_long_times_out_and_a_closed_loop_goes_on(spoken: str) -> None:
    async def work() -> Sent:
        async with serving(spoken, ENDLESS) as server:
            return await sent(server, requests([0] * 6), slots=2, timeout_ms=100)

    found = play(work())
    assert Counter(x.outcome.value for _, x in found.exchanges) == {"upstream_timeout": 6}
    assert all(x.scheduled_ns is None for _, x in found.exchanges)


@pytest.mark.parametrize("spoken", SPOKEN)
def test_tenants_go_with_their_rows(spoken: str) -> None:
    r = requests([0, 5, 10, 15], ["a", "b", "", "a"])

    async def work() -> Sent:
        async with serving(spoken) as server:
            return await sent(server, r, tenant_header="X-Tenant", open=2)

    found = play(work())
    assert {row: x.tenant for row, x in found.exchanges} == dict(enumerate(r.tenants))
    assert {x.outcome.value for _, x in found.exchanges} == {"complete"}


@pytest.mark.parametrize("scheme", ["ws", "grpc"])
@scene
async def test_nobody_answers_and_a_cut_ends_it_before_and_after_the_start(scheme: str) -> None:
    """Connections are neither taken nor refused."""
    async with unanswered_port() as port:
        server = Server(f"{scheme}://127.0.0.1:{port}", scheme, list, lambda: 0)

        async def meanwhile(crew: WorkerPool) -> None:
            await wait_until(lambda: sockets(port) > 8 and crew.pids)
            crew.stop()
            crew.stop()

        found = await sent(server, requests([0, 0]), meanwhile, open=2, connect_timeout_ms=30_000)
        assert found.out.stopped == crews.STOPPED
        assert found.exchanges == []
        found = await sent(server, requests([0, 0]), drain_ns=100 * MS, connect_timeout_ms=30_000)
        assert Counter(x.outcome.value for _, x in found.exchanges) == {"client_cancelled": 2}


# ---------------------------------------------------------------- what is prepared


def test_ids_go_to_grpc_as_ids_and_to_realtime_as_text() -> None:
    ids = Prompt(ids=(5, 6, 7))
    grpc = PromptMaker("grpc", model=None, exact_output=True)
    assert b"\x93\x05\x06\x07" in grpc.body(ids, 4)
    realtime = PromptMaker("realtime", model=None, exact_output=False, decode=lambda ids: said(len(ids)))
    assert said(3).encode() in realtime.body(ids, 4)
    assert count_tokens(said(3)) == 3
    for decode in (None, lambda ids: None):
        with pytest.raises(ConfigError, match="--target: the prompts are token ids"):
            PromptMaker("realtime", model=None, exact_output=False, decode=decode).body(ids, 4)
    with pytest.raises(ConfigError, match="bodies of its own"):
        grpc.captured(b"{}")
