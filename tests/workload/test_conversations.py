"""A turn's prompt is all that was said, and a new message; its row follows the row it answers."""

import itertools
import math
from random import Random

import msgspec
import pytest

from llmtap.units import Duration
from llmtap.workload.composed import Composed, RandomIds
from llmtap.workload.lengths import Fixed, LogNormal, UniformLengths
from llmtap.workload.plan import (
    BLOCK_TOKENS,
    NO_CONTEXT,
    Conversations,
    Sharing,
    Think,
    ThinkExponential,
    ThinkFixed,
    ThinkLogNormal,
)
from llmtap.workload.prompts.text import count_tokens

S = 1_000_000_000
TALK = Conversations(
    turns=UniformLengths(min=1, max=5), think=ThinkExponential(mean=Duration(8 * S)), tokens_max=4_000
)
CHATS = Composed(
    "chats", LogNormal(median=90, p95=600), UniformLengths(min=50, max=300),
    sharing=Sharing(fraction=0.7, tokens=200, contexts=3, zipf=1.0), conversations=TALK,
)  # fmt: skip


@pytest.mark.parametrize(
    ("think", "median_s"),
    [
        (ThinkFixed(time=Duration(5 * S)), 5),
        (ThinkExponential(mean=Duration(8 * S)), 8 * math.log(2)),
        (ThinkLogNormal(median=Duration(6 * S), p95=Duration(40 * S)), 6),
    ],
)
def test_think_times_have_their_median(think: Think, median_s: float) -> None:
    n, random = 20_000, Random(3)
    times = [Conversations(turns=2, think=think).think_drawn_ns(random) for _ in range(n)]
    assert think.quantile_ns(0.5) == pytest.approx(median_s * S)
    assert sum(t <= median_s * S for t in times) >= n / 2 - 4 * math.sqrt(n) / 2
    assert sum(t < median_s * S - 1 for t in times) <= n / 2 + 4 * math.sqrt(n) / 2
    assert min(times) >= 0


def test_a_lognormal_thinker_has_its_95th_percentile() -> None:
    think = ThinkLogNormal(median=Duration(6 * S), p95=Duration(40 * S))
    assert think.quantile_ns(0.95) == pytest.approx(40 * S)
    with pytest.raises(msgspec.ValidationError, match="median above 0"):
        msgspec.convert(
            {"distribution": "lognormal", "median": 0, "p95": 1}, ThinkLogNormal, dec_hook=lambda k, v: k(v)
        )


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
            said = requests.input[before] + requests.output[before]
            assert requests.input[row] == said + plan.messages[row] <= 4_000
            assert requests.blocks[row][: len(requests.blocks[before])] == requests.blocks[before]
        assert len(requests.blocks[row]) == requests.input[row] // BLOCK_TOKENS
    assert max(turns) == 4
    assert len(requests.after) == len(requests.think_ns) == 2_000


def test_the_number_of_turns_is_as_told_where_nothing_is_too_long() -> None:
    short = Composed("short", Fixed(tokens=5), Fixed(tokens=5), conversations=TALK)
    n = 15_000
    after = short.requests(n, 1).after
    firsts = [row for row, before in enumerate(after) if before == -1]
    turns = [b - a for a, b in itertools.pairwise(firsts)]
    for k in range(1, 6):
        assert turns.count(k) == pytest.approx(len(turns) / 5, abs=4 * math.sqrt(len(turns) * 0.16))


def test_a_conversation_that_would_be_too_long_is_over() -> None:
    talk = Conversations(turns=10, think=ThinkFixed(time=Duration(0)), tokens_max=100)
    long = Composed("long", Fixed(tokens=30), Fixed(tokens=20), conversations=talk)
    assert list(long.requests(5, 1).input) == [30, 80, 30, 80, 30]


def test_the_history_is_what_the_earlier_rows_said() -> None:
    requests = CHATS.requests(60, 5)
    prompts = CHATS.prompts(requests, 5)
    deep = 0
    for row in reversed(range(60)):
        prompt, before = prompts.prompt(row), requests.after[row]
        said = (prompt.system, *(text for _, text in prompt.history), prompt.text)
        assert sum(map(count_tokens, said)) == requests.input[row]
        if before >= 0:
            earlier = prompts.prompt(before)
            assert prompt.history[:-1] == (*earlier.history, ("user", earlier.text))
            assert prompt.history[-1][0] == "assistant"
            assert count_tokens(prompt.history[-1][1]) == requests.output[before]
            assert prompt.system == earlier.system
            deep = max(deep, len(prompt.history))
    assert deep >= 4


def test_ids_grow_the_same_way() -> None:
    numbers = Composed("ids", CHATS.input, CHATS.output, RandomIds(1_000), CHATS.sharing, TALK)
    requests = numbers.requests(40, 5)
    prompts = numbers.prompts(requests, 5)
    for row, before in enumerate(requests.after):
        ids = list(prompts.prompt(row).ids)
        assert len(ids) == requests.input[row]
        assert 0 <= min(ids) <= max(ids) < 1_000
        if before >= 0:
            assert ids[: requests.input[before]] == list(prompts.prompt(before).ids)
