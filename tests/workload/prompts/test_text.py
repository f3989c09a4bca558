"""A text's bytes are its tokens: two rows share as many as they share blocks, and differ in what follows.

Whatever the seed, and in whatever process.
"""

import json
from array import array
from itertools import pairwise, takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.workload.prompts.text import (
    COMMON,
    NAME_BYTES,
    NumberedBytes,
    RowText,
    answer_tokens,
    count_tokens,
    pieces_of,
    token_ids,
    tokenizer_json,
)
from llmtap.workload.requests import Requests
from llmtap.workload.trace import load_trace
from tests.support.workloads.trace_files import TRACES

GOLDEN_BLOCK = "was fish foot form thing white week low name even fire world"
GOLDEN_ROW = "full end late he year this do hold most off here state"


def shared(a: bytes, b: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def rows_of(inputs: list[int], blocks: list[tuple[int, ...]], block_tokens: int) -> Requests:
    n = len(inputs)
    return Requests(
        array("q", range(n)),
        array("q", inputs),
        array("q", [1] * n),
        blocks=blocks,
        block_tokens=block_tokens,
    )


def test_the_common_words_are_256_and_a_token_each_by_our_own_tokenizer() -> None:
    assert len(set(COMMON.table)) == 256
    assert count_tokens(COMMON.text(bytes(range(256)))) == 256
    assert all(count_tokens(word) == 1 for word in COMMON.table)


def test_one_version_sends_the_texts_of_the_versions_before() -> None:
    assert COMMON.text(NumberedBytes(0).block(7, 12)) == GOLDEN_BLOCK
    assert COMMON.text(NumberedBytes(42).row(7, 12)) == GOLDEN_ROW


@given(st.integers(0, 1 << 40), st.integers(0, 255), st.integers(0, 100))
def test_neighbours_differ_in_their_first_word(number: int, more: int, seed: int) -> None:
    numbers = NumberedBytes(seed)
    assert (numbers.row(number, 1) == numbers.row(number + more, 1)) == (more % 128 == 0)
    assert (numbers.row(number, 2) == numbers.row(number + more, 2)) == (more == 0)


@given(*[st.integers(-(1 << 63), (1 << 63) - 1)] * 2, st.integers(), st.booleans())
def test_two_numbers_never_have_the_same_name(a: int, b: int, seed: int, both_blocks: bool) -> None:
    numbers = NumberedBytes(seed)
    other = numbers.block(b, NAME_BYTES) if both_blocks else numbers.row(abs(b), NAME_BYTES)
    assert (numbers.block(a, NAME_BYTES) == other) == (both_blocks and a == b)
    if not both_blocks:
        assert numbers.block(a, 1) != numbers.row(abs(b), 1)


def chained() -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Prompts of a trace: each goes on from a place in an earlier one with blocks that nobody had."""

    def grow(plan: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        new = iter(range(10**9, 2 * 10**9))
        for parent, kept, more in plan:
            begun = rows[parent % len(rows)][: kept % 8] if rows else ()
            rows.append((*begun, *(next(new) for _ in range(more))))
        return rows

    return st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 8), st.integers(0, 4)), min_size=2, max_size=20
    ).map(grow)


@given(chained(), st.integers(0, 40), st.sampled_from([16, 64]), st.integers(0, 9))
def test_rows_share_just_as_many_blocks_as_their_numbers_do(
    blocks: list[tuple[int, ...]], tail: int, size: int, seed: int
) -> None:
    tail %= size
    inputs = [len(ids) * size + tail for ids in blocks]
    text = RowText(rows_of(inputs, blocks, size), seed)
    keys = [text.key(row, n) for row, n in enumerate(inputs)]
    assert [len(key) for key in keys] == inputs
    for (a, one), (b, other) in pairwise(zip(blocks, keys, strict=True)):
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        assert alike * size <= shared(one, other) < alike * size + NAME_BYTES


def test_the_template_in_front_counts_for_the_first_block() -> None:
    """The server sees 20 tokens, then the text: its blocks of 64 end where the trace's do."""
    requests = rows_of([200, 170, 300], [(1, 2, 3), (1, 2), (1, 2, 3, 4)], 64)
    text = RowText(requests)
    a, b, c = (text.key(row, requests.input[row] - 20 - 3, before=20) for row in range(3))
    assert [len(key) for key in (a, b, c)] == [177, 147, 277]
    assert 2 * 64 <= 20 + shared(a, b) < 2 * 64 + NAME_BYTES
    assert 3 * 64 <= 20 + shared(a, c) < 3 * 64 + NAME_BYTES


def test_mooncake_keeps_its_sharing_to_the_block() -> None:
    """All rows by their text: as many distinct prefixes of whole blocks as there are by the trace's ids."""
    requests = load_trace(
        str(TRACES / "mooncake" / "conversation_trace.rows_1_8000.jsonl.gz"), count=600
    ).requests
    size = requests.block_tokens
    assert size == 512
    text = RowText(requests, 1)
    by_ids, by_text = set(), {}
    for row, ids in enumerate(requests.blocks):
        key = text.key(row, requests.input[row])
        assert len(key) == requests.input[row]
        for end in range(1, len(ids) + 1):
            by_ids.add(ids[:end])
            assert by_text.setdefault(key[: end * size], ids[:end]) == ids[:end]
    assert len(by_ids) == len(by_text)
    shares = sum(len(ids) for ids in requests.blocks) - len(by_ids)
    assert shares > 500, "and there is something to share"


tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")


@pytest.fixture(scope="module")
def judge() -> Any:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json()))


@given(st.one_of(st.text(), st.text(alphabet="the and AZ09 ,.'\n\té漢😀", max_size=60)))
def test_any_text_has_the_same_tokens_in_both_and_comes_back(judge: Any, text: str) -> None:
    encoded = judge.encode(text)
    assert token_ids(text) == encoded.ids
    assert count_tokens(text) == len(encoded.ids)
    assert "".join(pieces_of(text)) == text
    assert judge.decode(encoded.ids) == text


@settings(max_examples=25)
@given(st.integers(0, 9_000), st.text(max_size=5))
def test_what_is_said_has_exactly_the_tokens_it_was_to_have(judge: Any, count: int, key: str) -> None:
    message = answer_tokens(count, key)
    assert len(message) == count
    assert judge.encode("".join(message)).ids == [i for token in message for i in token_ids(token)]
    assert len(judge.encode("".join(message)).ids) == count
    assert answer_tokens(count, key) == message
    assert list(answer_tokens(count // 2, key)) == list(message[: count // 2]), (
        "a shorter answer begins alike"
    )
