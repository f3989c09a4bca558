"""Blocks are the same as far as prompts begin alike, and nowhere else; contexts have the shares told; a row
depends on the seed and its number alone."""

import itertools
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.units import Duration
from llmtap.workload.lengths import Fixed, LogNormal, UniformLengths
from llmtap.workload.plan import (
    BLOCK_TOKENS,
    NO_CONTEXT,
    ComposedWorkload,
    ConversationPrompts,
    Conversations,
    RandomIds,
    SharedBlocks,
    Sharing,
    Think,
    ThinkExponential,
    ThinkFixed,
    zipf_shares,
)
from llmtap.workload.prompts.prompt import ElasticSource, Workload
from llmtap.workload.prompts.prose import Code, Document, ProseWords
from llmtap.workload.prompts.text import count_tokens


@pytest.mark.parametrize(
    ("fraction", "contexts", "zipf"),
    [(0.8, 10, 1.5), (1.0, 7, 0.0), (0.0, 3, 1.0)],
)
def test_shares_are_binomial_around_what_was_told(fraction: float, contexts: int, zipf: float) -> None:
    n = 20_000
    sharing = Sharing(fraction=fraction, tokens=100, contexts=contexts, zipf=zipf)
    chosen = list(itertools.islice(sharing.context_choices(Random(1)), n))
    for number, share in enumerate(zipf_shares(contexts, zipf)):
        p = fraction * share
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


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 100)), max_size=12),
)
def test_prompts_share_just_the_whole_blocks_of_their_context(
    lengths: list[int], request: list[tuple[int, int]]
) -> None:
    blocks = SharedBlocks(tuple(lengths))
    rows = [(context, own) for context, own in request if context < len(lengths)]
    made = []
    for context, own in rows:
        tokens = own + (0 if context == NO_CONTEXT else lengths[context])
        made.append(blocks.blocks_of(tokens, context))
        assert len(made[-1]) == tokens // BLOCK_TOKENS
    for (a, one), (b, other) in itertools.combinations(zip(rows, made, strict=True), 2):
        alike = sum(1 for x, y in zip(one, other, strict=False) if x == y)
        expected = lengths[a[0]] // BLOCK_TOKENS if a[0] == b[0] != NO_CONTEXT else 0
        assert alike == expected
        assert len(set(one) & set(other)) == expected


S = 1_000_000_000
TALK = Conversations(
    turns=UniformLengths(min=1, max=5), think=ThinkExponential(mean=Duration(8 * S)), tokens_max=4_000
)
CHATS = ComposedWorkload(
    "chats",
    LogNormal(median=90, p95=600),
    UniformLengths(min=50, max=300),
    sharing=Sharing(fraction=0.7, tokens=200, contexts=3, zipf=1.0),
    conversations=TALK,
)


@pytest.mark.parametrize(
    ("think", "median_s"),
    [
        (ThinkFixed(time=Duration(5 * S)), 5),
        (ThinkExponential(mean=Duration(8 * S)), 8 * math.log(2)),
    ],
)
def test_think_times_have_their_median(think: Think, median_s: float) -> None:
    n, random = 20_000, Random(3)
    times = [Conversations(turns=2, think=think).draw_think_ns(random) for _ in range(n)]
    assert think.quantile_ns(0.5) == pytest.approx(median_s * S)
    assert sum(t <= median_s * S for t in times) >= n / 2 - 4 * math.sqrt(n) / 2
    assert sum(t < median_s * S - 1 for t in times) <= n / 2 + 4 * math.sqrt(n) / 2
    assert min(times) >= 0


def test_prompts_grow_by_what_was_said() -> None:
    plan = CHATS.plan(2_000, 11)
    requests = plan.requests
    turns = [0] * len(requests)
    for row, before in enumerate(requests.after):
        context = 0 if plan.contexts[row] == NO_CONTEXT else 200
        if before == -1:
            assert requests.think_ns[row] == 0
            assert requests.input[row] == context + plan.messages[row]
        else:
            turns[row] = turns[before] + 1
            assert before == row - 1
            assert requests.think_ns[row] > 0
            assert plan.contexts[row] == plan.contexts[before]
            message = requests.input[before] + requests.output[before]
            assert requests.input[row] == message + plan.messages[row] <= 4_000
            assert requests.blocks[row][: len(requests.blocks[before])] == requests.blocks[before]
        assert len(requests.blocks[row]) == requests.input[row] // BLOCK_TOKENS
    assert max(turns) == 4
    assert len(requests.after) == len(requests.think_ns) == 2_000


def test_a_conversation_that_would_be_too_long_is_over() -> None:
    talk = Conversations(turns=10, think=ThinkFixed(time=Duration(0)), tokens_max=100)
    long = ComposedWorkload("long", Fixed(tokens=30), Fixed(tokens=20), conversations=talk)
    assert list(long.requests(5, 1).input) == [30, 80, 30, 80, 30]


def test_the_history_is_what_the_earlier_rows_said() -> None:
    requests = CHATS.requests(60, 5)
    prompts = CHATS.prompts(requests, 5)
    deep = 0
    for row in reversed(range(60)):
        prompt, before = prompts.prompt(row), requests.after[row]
        message = (prompt.system, *(text for _, text in prompt.history), prompt.text)
        assert sum(map(count_tokens, message)) == requests.input[row]
        if before >= 0:
            earlier = prompts.prompt(before)
            assert prompt.history[:-1] == (*earlier.history, ("user", earlier.text))
            assert prompt.history[-1][0] == "assistant"
            assert count_tokens(prompt.history[-1][1]) == requests.output[before]
            assert prompt.system == earlier.system
            deep = max(deep, len(prompt.history))
    assert deep >= 4


SHORT_TALK = Conversations(turns=UniformLengths(min=1, max=4), think=ThinkFixed(time=Duration(1_000)))
SHARING = Sharing(fraction=0.6, tokens=UniformLengths(min=20, max=90), contexts=3)
SHORT = LogNormal(median=40, p95=200)
MANY = {
    "plain": ComposedWorkload("plain", SHORT, SHORT),
    "shared": ComposedWorkload("shared", SHORT, SHORT, ProseWords(), SHARING),
    "code": ComposedWorkload("code", SHORT, SHORT, Code(), SHARING),
    "document": ComposedWorkload("document", SHORT, SHORT, Document()),
    "turns": ComposedWorkload("turns", SHORT, SHORT, ProseWords(), SHARING, SHORT_TALK),
    "ids": ComposedWorkload("ids", SHORT, SHORT, RandomIds(), SHARING, SHORT_TALK),
}


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(MANY)), st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 60), st.randoms()
)
def test_rows_are_the_same_whatever_count_and_order(
    name: str, seed: int, a: int, b: int, chance: object
) -> None:
    workload: Workload = MANY[name]
    few, many = sorted((a, b))
    less, more = workload.requests(few, seed), workload.requests(many, seed)
    assert less == more.select_rows(range(few))
    straight = [workload.prompts(less, seed).prompt(row) for row in range(few)]
    source = workload.prompts(more, seed)
    rows = list(range(few))
    chance.shuffle(rows)  # type: ignore[attr-defined]
    assert {row: source.prompt(row) for row in rows} == dict(enumerate(straight))


@pytest.mark.parametrize("name", ["plain", "shared", "code", "document", "turns"])
def test_a_prompt_can_be_asked_for_in_another_size(name: str) -> None:
    requests = MANY[name].requests(30, 3)
    source = MANY[name].prompts(requests, 3)
    assert isinstance(source, ConversationPrompts)
    elastic: ElasticSource = source
    for row in range(30):
        plain = elastic.prompt(row)
        for more in (-3, 0, 5, 300):
            prompt = elastic.resized_prompt(row, requests.input[row] + more)
            assert (prompt.system, prompt.history) == (plain.system, plain.history)
            assert count_tokens(prompt.text) == max(1, count_tokens(plain.text) + more)
        assert count_tokens(elastic.resized_prompt(row, 0).text) == 1
