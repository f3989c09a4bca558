"""A calibrated counter says what the server says: exactly, where a word is a token there, else nearly.

The server is a function that counts as no tokenizer of ours does.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.workload.prompts.fitting import (
    Calibration,
    Draft,
    RowPrompts,
    UsageCounter,
    calibrate,
    fit_by_usage,
    input_tokens,
)
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import COMMON, Numbers
from llmtap.workload.requests import Requests

Ask = Callable[[bytes], Awaitable[Mapping[str, Any]]]


def body(prompt: Prompt) -> bytes:
    return msgspec.json.encode({"text": prompt.text})


def server(count: Callable[[str], int], key: str = "prompt_tokens") -> tuple[Ask, list[str]]:
    seen: list[str] = []

    async def ask(sent: bytes) -> Mapping[str, Any]:
        text = msgspec.json.decode(sent)["text"]
        seen.append(text)
        return {key: count(text), "completion_tokens": 1}

    return ask, seen


def one_a_word(overhead: int) -> Callable[[str], int]:
    return lambda text: overhead + len(text.split())


def long_words_are_two(text: str) -> int:
    return 11 + sum(2 if len(word) > 4 else 1 for word in text.split())


@pytest.mark.parametrize("overhead", [0, 7, 31, 800])
@pytest.mark.parametrize("key", ["prompt_tokens", "input_tokens"])
def test_a_token_a_word_is_found_to_be_exact(overhead: int, key: str) -> None:
    ask, seen = server(one_a_word(overhead), key)
    found = asyncio.run(calibrate(ask, body, lengths=[1_000]))
    assert (found.overhead, found.ratio, found.exact) == (overhead, 1, True)
    assert len(seen) == len(set(seen)), "no probe finds itself in a cache"
    assert len(seen) <= 6, "three for the line, then two checks and the length asked for"
    assert one_a_word(overhead)(seen[-1]) == max(1_000, overhead + 1)
    assert found.describe()["missed_max"] == 0


@given(st.lists(st.integers(1, 900), min_size=1, max_size=5))
def test_rows_are_then_what_the_server_counts(inputs: list[int]) -> None:
    count = one_a_word(13)
    counter = UsageCounter(asyncio.run(calibrate(server(count)[0], body)))
    requests = Requests(array("q", [0] * len(inputs)), array("q", inputs), array("q", [1] * len(inputs)))
    for prompt, fitted in RowPrompts(requests, counter).prompts(range(len(inputs))):
        assert count(prompt.text) == fitted.tokens == max(14, fitted.wanted)
        assert fitted.way == "usage of the server"


def test_where_words_differ_the_line_is_told_to_be_one() -> None:
    found = asyncio.run(calibrate(server(long_words_are_two)[0], body))
    assert not found.exact
    assert 1 < found.ratio < 2
    assert 0 < found.missed_max < 25
    assert len(found.samples) > 5, "what the checks saw is in the line"


@pytest.mark.parametrize("wanted", [20, 64, 333, 1_000])
def test_one_prompt_can_be_tried_until_it_is_exact(wanted: int) -> None:
    ask, seen = server(long_words_are_two)
    found = asyncio.run(calibrate(ask, body))
    before = len(seen)
    numbers = Numbers(8)
    draft = Draft(wanted, lambda n: Prompt(text=COMMON.text(numbers.row(0, n))))
    prompt, fitted = asyncio.run(fit_by_usage(ask, body, draft, found))
    assert fitted.exact
    assert long_words_are_two(prompt.text) == wanted
    assert len(seen) - before <= 4


def test_a_prompt_below_the_overhead_says_by_how_much_it_missed() -> None:
    ask, _ = server(one_a_word(40))
    found = asyncio.run(calibrate(ask, body))
    draft = Draft(30, lambda n: Prompt(text=COMMON.text(Numbers().row(0, n))))
    _, fitted = asyncio.run(fit_by_usage(ask, body, draft, found))
    assert (fitted.tokens, fitted.missed, fitted.exact) == (41, 11, False)


@given(st.integers(-5, 500), st.integers(1, 400), st.integers(401, 2_000))
def test_a_line_of_slope_one_is_whole_numbers(overhead: int, a: int, b: int) -> None:
    found = Calibration.of([(a, a + overhead), (b, b + overhead), (a, a + overhead)])
    assert (found.overhead, found.ratio) == (overhead, 1)
    assert found.predicted(77) == 77 + overhead
    assert found.aim(max(77, 78 + overhead)) == max(77, 78 + overhead) - overhead


def test_least_squares_by_hand() -> None:
    """x 0, 10, 20; y 5, 20, 45: slope 2, and the means 10 and 70/3 give 10/3 at 0."""
    found = Calibration.of([(0, 5), (10, 20), (20, 45)])
    assert (found.ratio, found.overhead) == (2, Fraction(10, 3))
    assert found.missed_max == 3
    assert found.aim(43) == 20
    assert found.with_samples([(30, 63)]).samples[-1] == (30, 63)


@pytest.mark.parametrize(
    ("usage", "problem"),
    [
        ({}, "does not say"),
        ({"prompt_tokens": None}, "does not say"),
        ({"prompt_tokens": "12"}, "does not say"),
    ],
)
def test_a_server_without_counts_is_told_of(usage: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^usage: the server {problem}") as told:
        input_tokens(usage)
    assert "tokenizer" in (told.value.hint or "")


def test_a_server_that_counts_nothing_is_told_of() -> None:
    ask, _ = server(lambda text: 5 if len(text) % 2 else 6)

    async def same(sent: bytes) -> Mapping[str, Any]:
        return {"prompt_tokens": 1_000 - len(msgspec.json.decode(sent)["text"].split())}

    with pytest.raises(ConfigError, match="longer texts have no more tokens"):
        asyncio.run(calibrate(same, body))
    with pytest.raises(ValueError, match="two lengths"):
        Calibration.of([(5, 6), (5, 7)])
    assert ask is not same


def test_other_texts_are_probed_where_others_are_sent() -> None:
    ask, seen = server(one_a_word(3))
    asyncio.run(calibrate(ask, body, text=lambda number, count: f"x{number} " * count))
    assert {text.split()[0] for text in seen} == {f"x{n}" for n in range(1, len(seen) + 1)}


def test_probes_warm_no_row() -> None:
    ask, seen = server(one_a_word(3))
    asyncio.run(calibrate(ask, body, seed=1))
    rows = {COMMON.text(Numbers(1).row(row, 3)) for row in range(2_000)}
    assert not {" ".join(text.split()[:3]) for text in seen} & rows
