"""The simulated engine's server with gRPC, on a real socket."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from llmtap.sim.server.options import EngineOptions, SimOptions
from llmtap.sim.server.server import SimServer
from tests.support.servers.sim_engine import QUICK
from tests.support.waiting import wait_until


class GrpcEngine:
    """A server that runs."""

    def __init__(self, server: SimServer) -> None:
        self.server = server
        assert server.grpc_port
        self.address = f"127.0.0.1:{server.grpc_port}"

    async def truths(self, count: int = 1) -> list[Any]:
        """The truths, once so many calls have ended: gRPC tells the client before the server."""
        await wait_until(lambda: len(self._truths()) >= count)
        return self._truths()

    def _truths(self) -> list[Any]:
        return list(self.server.reception.truths.page_since(0).truths)


@asynccontextmanager
async def grpc_engine(
    options: SimOptions = QUICK,
    behind: EngineOptions | None = None,
    tls: tuple[bytes, bytes] | None = None,
) -> AsyncIterator[GrpcEngine]:
    """A server of gRPC alone; `behind` it an engine, or a fixed schedule."""
    server = SimServer(options, engine=behind)
    server.serve_grpc("127.0.0.1", 0, tls)
    runner = web.AppRunner(server.app)
    await runner.setup()
    try:
        yield GrpcEngine(server)
    finally:
        await runner.cleanup()
        # gRPC's queue of events belongs to the process and goes with the last server and channel.
        # What gRPC keeps in cycles after an aborted call would leave the queue for the next test,
        # with events of a closed loop.
        gc.collect()
