"""Whatever is held and given back, memory is what its holders have, and never more than there is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.schedulers.memory import Memory


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
    assert memory.blocks == tokens // block
    assert memory.whole(request_tokens, names) == memory.needed(request_tokens, names) == size
    memory.hold(request_tokens, names)
    assert (memory.held, memory.free) == (size, memory.blocks - size)
    memory.release(request_tokens, names, request_tokens)
    assert (memory.held, memory.kept) == (0, memory.whole(len(names) * named_tokens, names))


def test_what_is_shared_is_held_once() -> None:
    memory = Memory(160, 4, 8)
    memory.hold(20, (1, 2))
    assert memory.held == 5
    assert memory.found((1, 2, 3)) == 2
    assert memory.needed(30, (1, 2, 3)) == 4
    memory.hold(30, (1, 2, 3))
    assert memory.held == 9
    memory.release(20, (1, 2), 20)
    assert (memory.held, memory.kept) == (8, 0)
    memory.release(30, (1, 2, 3), 30)
    assert (memory.held, memory.kept) == (0, 6)


def test_only_a_beginning_is_found() -> None:
    memory = Memory(160, 4, 8)
    memory.hold(16, (1, 2))
    assert [memory.found(names) for names in [(), (1,), (1, 3, 2), (2, 1), (3, 1)]] == [0, 1, 1, 2, 0]


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
            before = memory.found(held)
            memory.release(tokens, held, computed)
            # The earlier blocks of what was computed outlast the later ones.
            assert memory.found(held) >= min(before, computed // named_tokens)
        else:
            tokens = len(names) * named_tokens + more
            if memory.needed(tokens, names) <= memory.free:
                memory.hold(tokens, names)
                holding.append((tokens, names))
                assert memory.found(names) == len(names)
        own = sum(-(-(tokens - len(held) * named_tokens) // block) for tokens, held in holding)
        shared = Counter(name for _, held in holding for name in held)
        assert memory.held == own + len(shared) * named
        assert memory.held + memory.kept <= memory.blocks
