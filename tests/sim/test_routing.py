"""Servers behind a router; times are worked out by hand, in ms (see `schedulers/iterating.py` of the tests).

An iteration takes 20 ms and 1 ms for each token of a prompt in it.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from llmtap.sim.engine import Engine, RunRecord, run_virtual
from llmtap.sim.model_options import ModelOptions, ServingSetup, read_serving
from llmtap.sim.routing import IMBALANCE_MAX, ROUTERS, PrefixAware, RoutedEngine
from llmtap.sim.sweep.simulate import simulate
from llmtap.workload.requests import Requests
from tests.sim.schedulers.iterating import MODEL, MS, build, workload


class Tokens:
    """Times of the tokens of each request, in ms."""

    def __init__(self, requests: Requests) -> None:
        self.times: list[list[float]] = [[] for _ in range(len(requests))]

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        self.times[request] = [t / MS for t in token_ns]


def routed(
    router: str, requests: Requests, servers: int = 2, scheduler: str = "continuous_batching", **options: str
) -> tuple[list[list[float]], RunRecord, RoutedEngine]:
    schedulers = [build(scheduler, requests, **options) for _ in range(servers)]
    kv_tokens = read_serving(options).kv_tokens
    engine = RoutedEngine(schedulers, ROUTERS[router](requests, servers, kv_tokens))
    tokens = Tokens(requests)
    record = run_virtual(requests, engine, servers=servers, watch=tokens)
    return tokens.times, record, engine


def test_round_robin_sends_requests_in_turn_and_each_server_has_its_own_batch() -> None:
    requests = workload([(0, 10, 2), (0, 10, 2), (0, 10, 1)])
    times, record, _ = routed("round-robin", requests)
    # Server 0: prompt of 0 until 30, prompt of 2 until 60, second token of 0 at 80. Server 1: 30, 50.
    assert times == [[30, 80], [30, 50], [60]]
    assert list(record.server) == [0, 1, 0]
    assert record.busy_ns == [80 * MS, 50 * MS]


def test_the_least_loaded_server_has_the_fewest_open_requests() -> None:
    # Request 1 is over at 30; at 35 server 0 has one open request and server 1 none, at 36 both have one.
    requests = workload([(0, 10, 5), (0, 10, 1), (35, 10, 1), (36, 10, 1)])
    times, record, _ = routed("least-loaded", requests)
    assert list(record.server) == [0, 1, 1, 0]
    assert times[1:3] == [[30], [65]]
    assert times[0][:2] == [30, 50]
    # The prompt of request 3 waits for the iteration that ends at 50.
    assert times[3] == [80]
    assert list(routed("round-robin", requests)[1].server) == [0, 1, 0, 1]


def test_a_prompt_goes_where_its_beginning_went_and_finds_it_in_the_cache() -> None:
    rows = [(0, 20, 5), (0, 20, 1), (200, 30, 1), (200, 30, 1), (300, 20, 1)]
    blocks = [(1, 2), (3, 4), (3, 4, 5), (1, 2, 6), (1, 9)]
    requests = workload(rows, blocks, 10)
    times, record, engine = routed("prefix-aware", requests, prefix_cache="true", block="10")
    assert list(record.server) == [0, 1, 1, 0, 0]
    # 20 of the 30 tokens are cached: 20 + 10 ms; of the last one 10 of 20.
    assert times[2:] == [[230], [230], [330]]
    assert (engine.state.prefix_hits, engine.state.prefix_queries) == (20 + 20 + 10, 20 + 20 + 30 + 30 + 20)
    _, _, unaware = routed("round-robin", requests, prefix_cache="true", block="10")
    assert unaware.state.prefix_hits < engine.state.prefix_hits


def test_a_prefix_of_all_prompts_does_not_fill_one_server() -> None:
    n = 2 * IMBALANCE_MAX + 2
    requests = workload([(0, 10, 50)] * n, [(1,)] * n, 10)
    _, record, _ = routed("prefix-aware", requests)
    # The first 32 go to server 0. Then server 1 has the prefix, too, and fewer requests, until both have 32.
    assert list(record.server) == [0] * IMBALANCE_MAX + [1] * IMBALANCE_MAX + [0, 1]


def test_a_router_forgets_the_blocks_that_no_memory_can_hold() -> None:
    requests = workload([(0, 20, 1)] * 4, [(1, 2), (3, 4), (5, 6), (1, 2)], 10)
    router = PrefixAware(requests, 2, kv_tokens=30)
    # Server 0 holds three blocks: 5, 6 push out 2, the later block of the first prompt, not 1.
    assert [router.server(0, (0, 0)), router.server(2, (0, 1))] == [0, 0]
    assert router.server(3, (5, 0)) == 0
    small = PrefixAware(requests, 2, kv_tokens=20)
    assert [small.server(0, (0, 0)), small.server(2, (0, 1)), small.server(3, (5, 0))] == [0, 0, 1]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("scheduler", ["chunked_prefill", "decode_prepone", "output_delay"])
def test_one_server_behind_a_router_is_the_engine_itself(router: str, scheduler: str) -> None:
    rows = [(7 * i, 5 + 13 * i % 40, 1 + 7 * i % 9) for i in range(30)]
    requests = workload(rows, [(i % 3, 100 + i) for i in range(30)], 5)
    alone = Tokens(requests)
    run_virtual(requests, Engine(build(scheduler, requests)), watch=alone)
    assert routed(router, requests, 1, scheduler)[0] == alone.times


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("same_instant", ["one-by-one", "all-first"])
def test_every_request_is_served_or_given_up_by_one_server(router: str, same_instant: Any) -> None:
    rows = [(20 * (i // 4), 5 + 13 * i % 90, 1 + 7 * i % 30) for i in range(200)]
    requests = workload(rows, [(i % 3, 100 + i) for i in range(200)], 8)
    setup = ServingSetup(
        readings=ModelOptions(same_instant=same_instant),
        iterations=MODEL,
        serving=read_serving({"kv_tokens": "112", "give_up": "late", "ttft": "2s"}),
    )
    result = simulate("continuous_batching", requests, setup, servers=3, router=router).to_dict()
    assert sum(result["outcomes"].values()) == 200
    assert result["unserved"]["too_large"] == sum(max(1, p) + o > 112 for _, p, o in rows)
    assert sum(result["by_server"]["requests"]) <= 200
    assert all(0 < share <= 1 for share in result["by_server"]["utilization"])
    assert result["utilization"] == pytest.approx(sum(result["by_server"]["utilization"]) / 3)


def test_a_request_whose_client_leaves_is_no_load() -> None:
    requests = workload([(0, 10, 50), (1, 10, 50), (2, 10, 50)])
    schedulers = [build("continuous_batching", requests) for _ in range(2)]
    engine = RoutedEngine(schedulers, ROUTERS["least-loaded"](requests, 2, 1_000))
    [first] = engine.arrive(0, 0).started
    assert first.server == 0
    [second] = engine.arrive(1 * MS, 1).started
    engine.leave(2 * MS, 1)
    assert not engine.arrive(2 * MS, 2).started  # Server 1 still runs the iteration of the request that left.
    [run] = engine.on_done(second.end_ns, second).started
    assert (run.server, [request for request, _ in run.work.prefill]) == (1, [2])
