"""Seats, memory, preemption, sharing and giving up, by hand: a pass takes 20 ms, a token of a prompt 1 ms."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.engine import Engine, GivenUp, IterationState
from llmtap.sim.model_options import IterationModel
from llmtap.sim.schedulers.roster import Memory
from tests.sim.schedulers.iterating import MS, Row, build, check_nobody, serve, workload

# Four blocks of four tokens. Both begin with one block, have two each when they have made five tokens, and
# then none is left for the sixth.
_TWO: list[Row] = [(0, 4, 9), (0, 4, 6)]
_SMALL = {"kv_tokens": "16", "block": "4"}


def test_the_newest_is_thrown_out_and_taken_in_again_with_the_tokens_that_it_made() -> None:
    served = serve("continuous_batching", _TWO, **_SMALL)
    assert served.tokens == [
        [28, 48, 68, 88, 108, 128, 148, 168, 188],
        # Nine tokens are taken in, and the sixth is made: none is made twice.
        [28, 48, 68, 88, 108, 217],
    ]
    assert served.iterations[-1] == (188, 217, [(1, 9)], [])
    assert served.state == IterationState(
        kv_peak=1, preemptions=1, preempted=1, recovered=1, preempted_tokens=8
    )


def test_the_newest_is_swapped_out_and_in_again() -> None:
    served = serve("continuous_batching", _TWO, **_SMALL, preemption="swap", swap_token="1ms")
    assert served.tokens == [
        # Eight tokens out: 8 ms.
        [28, 48, 68, 88, 108, 136, 156, 176, 196],
        # And in.
        [28, 48, 68, 88, 108, 224],
    ]
    assert [prompts for _, _, prompts, _ in served.iterations if prompts] == [[(0, 4), (1, 4)]]
    assert served.state == IterationState(
        kv_peak=1, preemptions=1, preempted=1, recovered=1, swapped_tokens=8
    )


def test_nobody_is_seated_who_takes_the_blocks_of_the_next_step() -> None:
    # When the second is there the first has filled its block, and of three two are free: one is the first's.
    served = serve("continuous_batching", [(0, 4, 4), (1, 8, 1)], kv_tokens="12", block="4")
    assert served.iterations[1] == (24, 44, [], [0])
    assert served.state.preemptions == 0
    served = serve("continuous_batching", [(0, 4, 4), (1, 4, 1)], kv_tokens="12", block="4")
    assert served.iterations[1] == (24, 48, [(1, 4)], [])


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ((0, 8, 8), True),
        ((0, 8, 9), False),
        ((0, 16, 0), True),
        ((0, 17, 0), False),
        ((0, 0, 15), True),
        ((0, 0, 16), False),
    ],
)
def test_who_is_larger_than_the_memory_is_given_up_when_it_comes(row: Row, fits: bool) -> None:
    served = serve("continuous_batching", [(0, 1, 1), row], **_SMALL)
    assert served.complete == ({0, 1} if fits else {0})
    if not fits:
        assert served.end_ns[1] == 0
        assert served.played is not None
        assert served.played.reasons == {1: GivenUp.TOO_LARGE}


@pytest.mark.parametrize(
    ("rows", "ttft", "tbt", "tokens", "complete"),
    [
        # At its bound a token is in time.
        ([(0, 80, 3)], "100ms", "20ms", [[100, 120, 140]], {0}),
        # The first tokens of both come late, and nobody makes another.
        ([(0, 80, 3), (0, 300, 2)], "399ms", "200ms", [[400], [400]], set()),
        # Whoever ends with a late token ends.
        ([(0, 80, 1)], "99ms", "200ms", [[100]], {0}),
        # Not taken in until it is late: the second is given up at 420, when the first is done.
        ([(0, 400, 1), (1, 10, 1)], "418ms", "200ms", [[420], []], {0}),
        ([(0, 400, 1), (1, 10, 1)], "419ms", "200ms", [[420], [450]], {0, 1}),
        # Stalled from 100 to 420.
        ([(0, 80, 3), (90, 300, 2)], "500ms", "319ms", [[100], [420, 440]], {1}),
        ([(0, 80, 3), (90, 300, 2)], "500ms", "340ms", [[100, 440, 460], [420, 440]], {0, 1}),
        # Only its second token is late, when it is there: 340 ms after the first.
        ([(0, 80, 3), (90, 300, 2)], "500ms", "339ms", [[100, 440], [420, 440]], {1}),
    ],
)
def test_who_is_late_is_given_up(
    rows: list[Row], ttft: str, tbt: str, tokens: list[list[float]], complete: set[int]
) -> None:
    served = serve("continuous_batching", rows, give_up="late", ttft=ttft, tbt=tbt)
    assert served.tokens == tokens
    assert served.complete == complete
    assert served.played is not None
    everybody = set(range(len(rows)))
    assert served.played.reasons == dict.fromkeys(everybody - complete, GivenUp.LATE)


# Blocks of four tokens have names.
_SHARED = workload([(0, 10, 2), (0, 10, 2), (100, 10, 1), (200, 8, 1)], [(1, 2), (1, 3), (1, 3), (1, 3)], 4)


@pytest.mark.parametrize(
    ("options", "taken", "hits"),
    [
        # The second shares its first block with the first, which is taken in beside it; all but two tokens of
        # the third were the second's; of the fourth there is everything, and something has to be taken in.
        # What need not be taken in does not count for how much an iteration may.
        ({"prefix_cache": "true", "tokens_max": "16"}, [10, 6, 2, 1], 4 + 8 + 7),
        ({"prefix_cache": "false"}, [10, 10, 10, 8], None),
    ],
)
def test_what_prompts_share_is_taken_in_once(
    options: dict[str, str], taken: list[int], hits: int | None
) -> None:
    served = serve("continuous_batching", _SHARED, kv_tokens="64", block="4", **options)
    prompts = dict(pair for _, _, pairs, _ in served.iterations for pair in pairs)
    assert [prompts[r] for r in range(4)] == taken
    first = 20 + taken[0] + taken[1]
    assert served.tokens == [[first, first + 20], [first, first + 20], [120 + taken[2]], [220 + taken[3]]]
    assert served.state.prefix_hits == (hits or 0)
    assert served.state.prefix_queries == (38 if hits else 0)
    # Of each request the same is told, so that its exchange has it.
    assert served.played is not None
    assert list(served.played.cached) == (
        [] if hits is None else [10 - n if r < 3 else 8 - n for r, n in enumerate(taken)]
    )


def test_a_preempted_request_finds_its_own_prompt_and_is_not_counted_again() -> None:
    requests = workload(_TWO, [(1,), (2,)], 4)
    served = serve("continuous_batching", requests, **_SMALL, prefix_cache="true")
    # Of the nine tokens that it has when it comes again, the four of its prompt may be there still.
    assert served.iterations[-1][2] == [(1, 5)]
    assert served.state == IterationState(
        kv_peak=1,
        preemptions=1,
        preempted=1,
        recovered=1,
        preempted_tokens=4,
        prefix_queries=8,
        prefix_hits=0,
    )


def test_attention_reads_what_those_that_decode_have_in_memory() -> None:
    model = IterationModel(beta_ns=20 * MS, gamma=0, prefill_ns=MS, context_ns=MS)
    served = serve("continuous_batching", [(0, 10, 3), (0, 7, 2)], model)
    # 17 tokens are there when the second ones are made, and 11 of the first request before its third.
    assert served.tokens == [[37, 74, 105], [37, 74]]


@pytest.mark.parametrize(
    ("preemption", "times", "waits", "blocks"),
    [
        # In a prefill, in a step, and thrown out: it has one block, two, none.
        ("recompute", [], 0, 1),
        ("recompute", [28, 48], 0, 2),
        ("recompute", [28, 48, 68, 88, 108], 1, 0),
        ("swap", [28, 48, 68, 88, 108], 1, 0),
    ],
)
def test_who_leaves_has_nothing_and_makes_nothing(
    preemption: str, times: list[int], waits: int, blocks: int
) -> None:
    requests = workload(_TWO)
    built = build("continuous_batching", requests, **_SMALL, preemption=preemption)
    engine = Engine(built)
    engine.arrive(0, 0, more=True)
    run = engine.arrive(0, 1).started[0]
    for at in times:
        run = engine.on_done(at * MS, run).started[0]
    assert built.state.waiting == waits
    used = built.state.kv_used
    engine.leave(run.start_ns + 1, 1)
    assert (built.state.running, built.state.waiting) == (1, 0)
    assert built.state.kv_used == used - blocks / 4
    assert list(engine.on_done(run.end_ns, run).output.tokens) == [0]
    engine.leave(run.end_ns + 1, 0)
    check_nobody(built)


@pytest.mark.parametrize(("scheduler", "passes"), [("continuous_batching", 1), ("chunked_prefill", 3)])
def test_attention_is_the_square_of_the_prompt_however_it_is_cut(scheduler: str, passes: int) -> None:
    # 1 s for 1,000 tokens is 10 ms for 100, beside 20 ms a pass and 1 ms a token.
    cut = {} if scheduler == "continuous_batching" else {"chunk": "40"}
    served = serve(scheduler, [(0, 100, 2)], attention="1s", **cut)
    first = 20 * passes + 100 + 10
    assert served.tokens == [[first, first + 20]]


@pytest.mark.parametrize(
    ("tokens", "block", "named_tokens", "request_tokens", "names", "size"),
    [
        (100, 16, 0, 0, (), 0),
        (100, 16, 0, 1, (), 1),
        (100, 16, 0, 16, (), 1),
        (100, 16, 0, 17, (), 2),
        (100, 1, 0, 17, (), 17),
        # 512 tokens with a name are 32 blocks; 100 more begin 7.
        (10_000, 16, 512, 1_124, (7, 8), 71),
        # Names of 16 tokens in blocks of 32: each has a block of its own, half of it empty.
        (10_000, 32, 16, 40, (7, 8), 3),
        (10_000, 16, 24, 48, (7, 8), 4),
    ],
)
def test_sizes(
    tokens: int, block: int, named_tokens: int, request_tokens: int, names: tuple[int, ...], size: int
) -> None:
    memory = Memory(tokens, block, named_tokens)
    assert memory.total_blocks == tokens // block
    assert (
        memory.blocks_without_cache(request_tokens, names)
        == memory.blocks_needed(request_tokens, names)
        == size
    )
    memory.hold(request_tokens, names)
    assert (memory.held_blocks, memory.free_blocks) == (size, memory.total_blocks - size)
    memory.release(request_tokens, names, request_tokens)
    assert (memory.held_blocks, memory.cached_blocks) == (
        0,
        memory.blocks_without_cache(len(names) * named_tokens, names),
    )


def test_what_is_shared_is_held_once() -> None:
    memory = Memory(160, 4, 8)
    memory.hold(20, (1, 2))
    assert memory.held_blocks == 5
    assert memory.cached_prefix((1, 2, 3)) == 2
    assert memory.blocks_needed(30, (1, 2, 3)) == 4
    memory.hold(30, (1, 2, 3))
    assert memory.held_blocks == 9
    memory.release(20, (1, 2), 20)
    assert (memory.held_blocks, memory.cached_blocks) == (8, 0)
    memory.release(30, (1, 2, 3), 30)
    assert (memory.held_blocks, memory.cached_blocks) == (0, 6)


def test_only_a_beginning_is_found() -> None:
    memory = Memory(160, 4, 8)
    memory.hold(16, (1, 2))
    assert [memory.cached_prefix(names) for names in [(), (1,), (1, 3, 2), (2, 1), (3, 1)]] == [0, 1, 1, 2, 0]


_NAMES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(
    st.lists(st.tuples(_NAMES, st.integers(0, 9), st.integers(0, 40), st.booleans()), max_size=40),
    st.sampled_from([(4, 8), (4, 4), (4, 6), (8, 4), (1, 3)]),
)
def test_it_is_as_if_all_were_counted_anew(
    events: list[tuple[tuple[int, ...], int, int, bool]], sizes: tuple[int, int]
) -> None:
    block, named_tokens = sizes
    named = -(-named_tokens // block)
    memory = Memory(30 * block, block, named_tokens)
    holding: list[tuple[int, tuple[int, ...]]] = []
    for names, more, computed, releases in events:
        if releases and holding:
            tokens, held = holding.pop(computed % len(holding))
            before = memory.cached_prefix(held)
            memory.release(tokens, held, computed)
            # The earlier blocks of what was computed outlast the later ones.
            assert memory.cached_prefix(held) >= min(before, computed // named_tokens)
        else:
            tokens = len(names) * named_tokens + more
            if memory.blocks_needed(tokens, names) <= memory.free_blocks:
                memory.hold(tokens, names)
                holding.append((tokens, names))
                assert memory.cached_prefix(names) == len(names)
        own = sum(-(-(tokens - len(held) * named_tokens) // block) for tokens, held in holding)
        shared = Counter(name for _, held in holding for name in held)
        assert memory.held_blocks == own + len(shared) * named
        assert memory.held_blocks + memory.cached_blocks <= memory.total_blocks
