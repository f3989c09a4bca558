"""Several servers of an iteration-level scheduler, with a router in front of them.

Each server has its own scheduler, batch and KV memory. `RoutedEngine` has the interface of `Engine`
(`engine.py`). A router assigns each request to a server when it arrives; the request stays on this server.
Like a real router, it knows the server of each request and whether the request has ended, but neither the
lengths of answers nor the memory of the servers.

`ROUTERS` has the routers by name, for `llmtap sim run --router`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from llmtap.sim.engine import Engine, EngineRun, GivenUp, Iterating, IterationState, Step
from llmtap.workload.requests import Requests

IMBALANCE_MAX: Final = 32
"""Limit of the router `prefix-aware`: it sends no request to a server that has this number of open requests
more than the least loaded server, even if the server has received the prefix of the prompt. Without this
limit, a prefix that all prompts share would overload one server, while the others are idle."""


class Router(Protocol):
    """Chooses the server of each arriving request."""

    def server(self, request: int, open_requests: Sequence[int]) -> int:
        """Return the server for a request; `open_requests`: number of open requests of each server."""


class RoundRobin:
    """Sends the requests to the servers in turn."""

    def __init__(self, requests: Requests, servers: int, kv_tokens: int) -> None:
        self._previous_server = -1
        self._servers = servers

    def server(self, request: int, open_requests: Sequence[int]) -> int:
        self._previous_server = (self._previous_server + 1) % self._servers
        return self._previous_server


class LeastLoaded:
    """Sends each request to the server with the fewest open requests; of equal servers, to the first."""

    def __init__(self, requests: Requests, servers: int, kv_tokens: int) -> None:
        pass

    def server(self, request: int, open_requests: Sequence[int]) -> int:
        return least_loaded(open_requests)


class PrefixAware:
    """Sends each request to the server that has received the longest prefix of its prompt.

    If there are several such servers, the one with the fewest open requests gets the request. If no server
    has received a whole block of the prompt, or if this server is overloaded (`IMBALANCE_MAX`), the request
    goes to the server with the fewest open requests of all. For each server, the router stores the most
    recently sent blocks, as many as fit into the server's KV memory."""

    def __init__(self, requests: Requests, servers: int, kv_tokens: int) -> None:
        self._requests = requests
        self._blocks_max = kv_tokens // requests.block_tokens if requests.block_tokens else 0
        """Number of blocks that a server's memory holds; 0: the requests have no blocks."""
        self._sent_blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(servers)]
        """Blocks sent to each server; the least recently sent block is first, and is removed first."""

    def server(self, request: int, open_requests: Sequence[int]) -> int:
        """Return the server that was sent the longest prefix of the request, unless it is far busier than
        others."""
        requests = self._requests
        if not self._blocks_max:
            return least_loaded(open_requests)
        blocks = requests.blocks[request][: requests.input[request] // requests.block_tokens]
        matches = [_leading_blocks_sent(blocks, sent) for sent in self._sent_blocks]
        longest = max(matches)
        candidates = [server for server, match in enumerate(matches) if match == longest]
        best = min(candidates, key=open_requests.__getitem__)
        if open_requests[best] - min(open_requests) >= IMBALANCE_MAX:
            best = least_loaded(open_requests)
        sent = self._sent_blocks[best]
        # Add the blocks in reverse order, so that later blocks of a prompt are removed before earlier blocks.
        for block in reversed(blocks):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._blocks_max:
            sent.popitem(last=False)
        return best


def least_loaded(open_requests: Sequence[int]) -> int:
    return min(range(len(open_requests)), key=open_requests.__getitem__)


def _leading_blocks_sent(blocks: Sequence[int], sent: OrderedDict[int, None]) -> int:
    """Return the number of blocks at the start of a prompt that are all in `sent`."""
    count = 0
    for block in blocks:
        if block not in sent:
            break
        count += 1
    return count


ROUTERS: Final[dict[str, Callable[[Requests, int, int], Router]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
"""Constructors of routers by name; arguments: requests, number of servers, KV tokens of a server."""
DEFAULT_ROUTER: Final = "round-robin"


class RoutedEngine:
    """Engines of one server each behind a router, with the interface of an `Engine`."""

    def __init__(self, schedulers: Sequence[Iterating], router: Router) -> None:
        self._engines = [Engine(scheduler, first=server) for server, scheduler in enumerate(schedulers)]
        self._schedulers = schedulers
        self._router = router
        """Chooses the server of each request."""
        self._open_requests = [0] * len(schedulers)
        """Number of open requests of each server."""
        self._server_of: dict[int, int] = {}
        """Server of each open request."""
        self._waiting_servers: set[int] = set()
        """Servers that start no work before the last of several arrivals at the current time (`arrive`)."""

    @property
    def state(self) -> IterationState:
        """Sums of the counts of all servers; of the shares of KV memory in use, the maximum."""
        total = IterationState()
        for scheduler in self._schedulers:
            state = scheduler.state
            for name in IterationState.__slots__:
                values = getattr(total, name), getattr(state, name)
                setattr(total, name, max(values) if name.startswith("kv_") else sum(values))
        return total

    def arrive(self, now_ns: int, request: int, *, more: bool = False) -> Step:
        """Pass a request to the engine of its server. `more`: others arrive at the same time."""
        server = self._router.server(request, self._open_requests)
        self._server_of[request] = server
        self._open_requests[server] += 1
        step = self._engines[server].arrive(now_ns, request, more=more)
        if more:
            self._waiting_servers.add(server)
            return step
        others, self._waiting_servers = self._waiting_servers - {server}, set()
        steps = [step, *(self._engines[other].dispatch(now_ns) for other in sorted(others))]
        return self._merge_steps(steps)

    def on_done(self, now_ns: int, run: EngineRun) -> Step:
        return self._merge_steps([self._engines[run.server].on_done(now_ns, run)])

    def leave(self, now_ns: int, request: int) -> Step:
        """End a request whose client has left."""
        server = self._server_of[request]
        self._close_request(request)
        return self._merge_steps([self._engines[server].leave(now_ns, request)])

    def close(self, now_ns: int) -> Step:
        """No further request arrives, so batches need not wait for more."""
        return self._merge_steps([engine.close(now_ns) for engine in self._engines])

    def _merge_steps(self, steps: Sequence[Step]) -> Step:
        """Combine the steps of several engines into one, and close the requests that ended in it."""
        step = steps[0]
        if len(steps) > 1:
            given_up: dict[int, GivenUp] = {}
            for engine_step in steps:
                given_up.update(engine_step.given_up)
            step = replace(step, started=[run for one in steps for run in one.started], given_up=given_up)
        for request in (*step.output.finished, *step.given_up):
            self._close_request(request)
        return step

    def _close_request(self, request: int) -> None:
        """Count a request of a server as ended."""
        self._open_requests[self._server_of.pop(request)] -= 1
