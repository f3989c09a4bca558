"""Two prompts share leading ids exactly as far as their leading whole blocks agree, marks included."""

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.privacy.sessions import CHAIN_BYTES, BlockHasher, chain
from llmtap.exchange.exchange import RequestShape
from llmtap.exchange.prompt import PromptMessage, PromptShape, read_prompt

SALT = b"s" * 32
SIZE = 8


def words(text: str) -> list[int]:
    """A tokenizer: one id a word."""
    return [sum(word.encode()) for word in text.split()]


def by_bytes(size: int = SIZE, salt: bytes = SALT) -> BlockHasher:
    return BlockHasher(salt, size=size, unit="bytes")


def prompt(*messages: tuple[str, Any], tools: bytes = b"") -> PromptShape:
    made = [PromptMessage(role, parts if isinstance(parts, list) else [parts]) for role, parts in messages]
    return PromptShape(made, RequestShape(), {}, True, tools)


def ids(asked: PromptShape, size: int = SIZE) -> list[int]:
    blocks = by_bytes(size).blocks(asked)
    return list(blocks.ids)


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


_PARTS = st.lists(
    st.text("ab", max_size=20) | st.text(max_size=9) | st.sampled_from([b"media1", b"media2", b"call"])
    | st.lists(st.integers(0, 9), max_size=5).map(lambda x: array("I", x)),
    max_size=3,
)  # fmt: skip
_MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), _PARTS), max_size=5)


def laid_out(asked: PromptShape) -> list[Any]:
    """The oracle: the text byte by byte, each with the marks before it."""
    row: list[Any] = []
    marks: list[Any] = [("tools", asked.tools)] if asked.tools else []
    for message in asked.messages:
        marks.append(("role", message.role))
        for part in message.parts:
            if isinstance(part, bytes):
                marks.append(("mark", part))
                continue
            if isinstance(part, array):
                marks.append("ids")
            for byte in part.encode() if isinstance(part, str) else part.tobytes():
                row.append((tuple(marks), byte))
                marks = []
    if marks and len(row) % SIZE:
        row.append((tuple(marks), None))  # after the last text: in its partial block
    return row


@given(_MESSAGES, _MESSAGES, st.integers(0, 5))
def test_ids_agree_exactly_as_far_as_whole_blocks_do(a: Any, b: Any, common: int) -> None:
    one, other = prompt(*a), prompt(*a[:common], *b)
    rows = [laid_out(one), laid_out(other)]
    cut = [[tuple(row[i : i + SIZE]) for i in range(0, len(row), SIZE)] for row in rows]
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*cut, strict=False))))
    assert shared(ids(one), ids(other)) == expected


def test_tokens_are_cut_and_counted_and_ids_need_no_tokenizer() -> None:
    hasher = BlockHasher(SALT, size=2, unit="tokens", tokenize=words)
    text = hasher.blocks(prompt(("user", "a b c"), ("assistant", "d e")))
    given_ids = hasher.blocks(prompt(("user", array("I", words("a b c"))), ("assistant", "d e")))
    assert text is not None and text == given_ids
    assert (len(text.ids), text.tokens) == (3, 5)
    by_byte = by_bytes().blocks(prompt(("user", "a b c")))
    assert by_byte is not None and by_byte.tokens is None


@pytest.mark.parametrize("broken", ["raises", "negative", "long"])
def test_a_tokenizer_that_cannot_is_counted_and_nothing_is_hashed(broken: str) -> None:
    def tokenize(text: str) -> list[int]:
        if broken == "raises":
            raise RuntimeError("no such piece")
        return [-1] if broken == "negative" else [1]

    hasher = BlockHasher(SALT, size=2, unit="tokens", tokenize=tokenize)
    assert hasher.blocks(prompt(("user", "a" * ((1 << 20) + 1) if broken == "long" else "a"))) is None
    assert hasher.skipped == 1


def test_another_salt_shares_nothing_and_no_salt_is_shown() -> None:
    salt = b"t" * 32
    asked = prompt(("user", "x" * 64))
    mine, yours = by_bytes(salt=salt).blocks(asked), by_bytes().blocks(asked)
    assert mine is not None and yours is not None and not set(mine.ids) & set(yours.ids)
    assert salt.hex() not in repr(by_bytes(salt=salt)) and repr(salt) not in repr(by_bytes(salt=salt))


def test_an_id_is_the_keyed_hash_of_the_one_before_and_of_lengths_content_and_marks() -> None:
    def keyed(data: bytes) -> bytes:
        return blake2b(data, key=SALT, digest_size=8, person=b"llmtap block").digest()

    first = keyed(
        bytes(8) + b"\0\0\0\x08" + b"x" * 8
        + b"\0\0\0\0" + b"\0\0\0\x06" + b"toolst" + b"\0\0\0\0" + b"\0\0\0\x08" + b"roleuser"
        + b"\0\0\0\x03" + b"\0\0\0\x06" + b"media1"
    )  # fmt: skip
    second = keyed(first + b"\0\0\0\x01" + b"x")
    expected = [int.from_bytes(digest, "little", signed=True) for digest in (first, second)]
    assert ids(prompt(("user", ["xxx", b"media1", "x" * 6]), tools=b"t")) == expected


@given(_MESSAGES, _MESSAGES)
def test_a_conversations_chain_begins_with_that_of_its_beginning(messages: Any, more: Any) -> None:
    short, long = chain(prompt(*messages), SALT), chain(prompt(*messages, *more), SALT)
    assert long[: len(short)] == short
    assert len(long) == len(messages) + len(more)
    assert all(len(digest) == CHAIN_BYTES for digest in long)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (prompt(("user", "x")), prompt(("system", "x"))),
        (prompt(("user", "xy")), prompt(("user", "x"), ("user", "y"))),
        (prompt(("user", ["x", b"call", "y"])), prompt(("user", "xcally"))),
        (prompt(("user", array("I", b"xxxx"))), prompt(("user", "xxxx"))),
    ],
)
def test_another_conversation_has_another_chain(a: PromptShape, b: PromptShape) -> None:
    assert chain(a, SALT)[-1] != chain(b, SALT)[-1]


def test_thinking_that_a_client_drops_later_changes_no_chain() -> None:
    def conversation(*messages: Any) -> list[bytes]:
        read = read_prompt(json.dumps({"messages": messages}).encode(), "chat.completions")
        assert read is not None
        return chain(read, SALT)

    user = {"role": "user", "content": "hi"}
    kept = conversation(user, {"role": "assistant", "content": "ho", "reasoning_content": "hm"}, user)
    assert conversation(user, {"role": "assistant", "content": "ho"}, user) == kept
    assert conversation(user, {"role": "assistant", "reasoning_content": "hm"})[1] == conversation(user)[0]
    assert conversation(user, {"role": "assistant", "content": "ha"}, user)[1:] != kept[1:]
