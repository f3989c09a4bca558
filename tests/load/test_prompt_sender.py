"""A crew against the simulated engine over Realtime and gRPC: rows once, on time, exact; stopped as ever."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.load.bodies import prepare
from llmtap.load.options import LoadPlan
from llmtap.load.prompt_sender import PromptMaker
from llmtap.load.sending import protocol_of
from llmtap.load.workers import worker_pool as crews
from llmtap.load.workers.worker_handle import WorkerSetup
from llmtap.load.workers.worker_pool import LoadResult, WorkerPool
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import answer_tokens, count_tokens
from llmtap.workload.requests import Requests
from tests.support.servers.loading import sockets
from tests.support.servers.peer import wait_until
from tests.support.servers.sim_engine import engine
from tests.support.servers.sim_grpc import grpc_engine
from tests.support.servers.upstream import unanswered_port

MS = 1_000_000
ENDLESS = SimOptions(ttft=Duration(60_000 * MS))


@asynccontextmanager
async def serving(spoken: str, options: SimOptions) -> AsyncIterator[str]:
    """The URL of a simulated engine."""
    if spoken == "grpc":
        async with grpc_engine(options) as e:
            yield f"grpc://{e.address}"
    else:
        async with engine(options) as e:
            yield e.url.replace("http", "ws")


def said(tokens: int) -> str:
    return "".join(answer_tokens(tokens, "test"))


class Words:
    """Prompts of so many tokens as their requests say, by the simulated engine's own count."""

    def __init__(self, r: Requests) -> None:
        self._r = r

    def prompt(self, row: int) -> Prompt:
        return Prompt(text=said(self._r.input[row]))


def requests(arrivals_ms: Sequence[float], tenants: list[str] | None = None) -> Requests:
    n = len(arrivals_ms)
    return Requests(
        array("q", [int(ms * MS) for ms in arrivals_ms]),
        array("q", [3 + row % 5 for row in range(n)]),
        array("q", [1 + row % 9 for row in range(n)]),
        tenants=tenants or [],
    )


async def sent(
    url: str,
    r: Requests,
    meanwhile: Callable[[WorkerPool], Awaitable[None]] | None = None,
    *,
    timeout_ms: int = 60_000,
    open: int = 0,
    **more: Any,
) -> tuple[LoadResult, list[tuple[int, Exchange]]]:
    maker = PromptMaker(protocol_of(url), model="m", exact_output=True)
    with prepare(r, Words(r), maker) as prepared:
        load = LoadPlan.of(
            url=url,
            model="m",
            timeout=Duration(timeout_ms * MS),
            connect_timeout=Duration(30_000 * MS),
            **more,
        )
        setup = WorkerSetup(load=load, bodies_fd=prepared.fd, spill_fd=None, exact_output=True, open=open)
        with WorkerPool(setup, r, (prepared.begins, prepared.ends), keep=True) as crew:
            running = asyncio.ensure_future(crew.run())
            try:
                if meanwhile is not None:
                    await meanwhile(crew)
            finally:
                out = await running
            return out, list(crew.exchanges())


@pytest.mark.parametrize("spoken", ["realtime", "grpc"])
async def test_a_closed_loop_goes_on_after_time_outs_and_tenants_go_with_their_rows(spoken: str) -> None:
    r = requests([0] * 6, ["a", "b", "", "a", "c", "c"])
    async with serving(spoken, ENDLESS) as url:
        _, exchanges = await sent(url, r, closed=2, timeout_ms=100)
    assert {row: x.tenant for row, x in exchanges} == dict(enumerate(r.tenants))
    assert {(x.outcome.value, x.scheduled_ns) for _, x in exchanges} == {("upstream_timeout", None)}


@pytest.mark.parametrize("scheme", ["ws", "grpc"])
async def test_nobody_answers_and_a_cut_ends_it_before_and_after_the_start(scheme: str) -> None:
    """Connections are neither taken nor refused."""
    async with unanswered_port() as port:
        url = f"{scheme}://127.0.0.1:{port}"

        async def meanwhile(crew: WorkerPool) -> None:
            await wait_until(lambda: sockets(port) > 8 and crew.pids)
            crew.stop()
            crew.stop()

        out, exchanges = await sent(url, requests([0, 0]), meanwhile, open=2)
        assert (out.stopped, exchanges) == (crews.STOPPED, [])
        _, exchanges = await sent(url, requests([0, 0]), drain=Duration(100 * MS))
        assert [x.outcome.value for _, x in exchanges] == ["client_cancelled"] * 2


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
    with pytest.raises(ConfigError, match="HTTP request bodies"):
        grpc.adapt_recorded(b"{}")
