"""Blocks are the same as far as prompts begin alike, and nowhere else; contexts have the shares told."""

import itertools
import math
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.workload.lengths import UniformLengths
from llmtap.workload.plan import BLOCK_TOKENS, NO_CONTEXT, SharedBlocks, Sharing, zipf_shares


@pytest.mark.parametrize(
    ("fraction", "contexts", "zipf"),
    [(0.5, 1, 0.0), (0.8, 10, 1.5), (1.0, 7, 0.0), (0.0, 3, 1.0), (0.9, 100, 1.0)],
)
def test_shares_are_binomial_around_what_was_told(fraction: float, contexts: int, zipf: float) -> None:
    n = 20_000
    sharing = Sharing(fraction=fraction, tokens=100, contexts=contexts, zipf=zipf)
    chosen = list(itertools.islice(sharing.choices(Random(1)), n))
    for number, share in enumerate(zipf_shares(contexts, zipf)):
        p = fraction * share
        # 5 sigma: a hundred contexts are looked at.
        assert chosen.count(number) == pytest.approx(n * p, abs=5 * math.sqrt(n * p * (1 - p)) + 1e-9)
    assert chosen.count(NO_CONTEXT) == pytest.approx(
        n * (1 - fraction), abs=4 * math.sqrt(n * fraction * (1 - fraction)) + 1e-9
    )


def test_zipf_of_the_draft_has_known_shares() -> None:
    shares = zipf_shares(10, 1.5)
    assert shares[0] == pytest.approx(0.501168601554)
    assert shares[-1] == pytest.approx(0.0158483427267)
    assert sum(shares) == pytest.approx(1)
    assert zipf_shares(4, 0) == [0.25] * 4


def test_lengths_of_contexts_are_the_seeds() -> None:
    sharing = Sharing(fraction=0.8, tokens=UniformLengths(min=512, max=1_024), contexts=10)
    assert sharing.lengths(1) == sharing.lengths(1) != sharing.lengths(2)
    more = Sharing(fraction=0.1, tokens=UniformLengths(min=512, max=1_024), contexts=12, zipf=1.0)
    assert more.lengths(1)[:10] == sharing.lengths(1)
    assert Sharing(fraction=1, tokens=7, contexts=2).lengths(9) == (7, 7)


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 100)), max_size=12),
)
def test_prompts_share_just_the_whole_blocks_of_their_context(
    lengths: list[int], asked: list[tuple[int, int]]
) -> None:
    blocks = SharedBlocks(tuple(lengths))
    rows = [(context, own) for context, own in asked if context < len(lengths)]
    made = []
    for context, own in rows:
        tokens = own + (0 if context == NO_CONTEXT else lengths[context])
        made.append(blocks.of(tokens, context))
        assert len(made[-1]) == tokens // BLOCK_TOKENS
    for (a, one), (b, other) in itertools.combinations(zip(rows, made, strict=True), 2):
        alike = sum(1 for x, y in zip(one, other, strict=False) if x == y)
        expected = lengths[a[0]] // BLOCK_TOKENS if a[0] == b[0] != NO_CONTEXT else 0
        assert alike == expected
        assert len(set(one) & set(other)) == expected


def test_a_later_turn_begins_with_the_blocks_of_the_one_before() -> None:
    blocks = SharedBlocks((40,))
    first = blocks.of(100, 0)
    second = blocks.of(170, 0, first)
    assert second[: len(first)] == first
    assert len(second) == 170 // BLOCK_TOKENS
    assert not set(second[len(first) :]) & set(blocks.of(300, 0))


@pytest.mark.parametrize(
    "told",
    [
        {"fraction": 1.5, "tokens": 3},
        {"fraction": 0.5, "tokens": 0},
        {"fraction": 0.5, "tokens": 9, "contexts": 0},
    ],
)
def test_what_cannot_be_is_refused(told: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(told, Sharing)
