"""Turns of one conversation are linked, nobody else's are, and nothing is invented."""

import json
import random
import re
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.capture.privacy.sessions import (
    DIGEST_BYTES,
    BlockHasher,
    ConversationKeys,
    Sessions,
    conversation_digests,
)
from llmtap.exchange.exchange import Exchange, RequestShape, Timeline, Turn
from llmtap.exchange.prompt import PromptMessage, PromptShape, read_prompt

SALT = b"s" * 32
S = 1_000_000_000
WALL = 1_700_000_000 * S
MONO = 5_000 * S

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def bot(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Client:
    """Sends requests through one Sessions, at the seconds it is told."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("headers", ("X-Session-Id",))
        options.setdefault("fields", ("session_id", "metadata.session_id"))
        options.setdefault("hash_names", True)
        self.sessions = Sessions(SALT, **options)
        self.seq = 0

    def exchange(
        self,
        at_s: float,
        until_s: float | None,
        *,
        tenant: str = "a",
        relay: str = "r0",
        status: int = 200,
        mono_s: float = 0,
    ) -> Exchange:
        self.seq += 1
        arrival_ns = MONO + int((at_s + mono_s) * S)
        t = Timeline(arrival_ns)
        if until_s is not None:
            t.last_token_ns = t.response_end_ns = t.delivered_ns = arrival_ns + int((until_s - at_s) * S)
        x = Exchange(relay, self.seq, WALL + int(at_s * S), t, tenant=tenant)
        x.status = status
        return x

    def keys(self, *messages: Message, header: str | None = None, **body: Any) -> ConversationKeys:
        if messages:
            body["messages"] = list(messages)
        headers = [] if header is None else [(b"x-session-id", header.encode())]
        return self.sessions.request_keys(headers, read_prompt(json.dumps(body).encode(), None))

    def send(
        self,
        at_s: float,
        until_s: float | None,
        *messages: Message,
        header: str | None = None,
        body: dict[str, Any] | None = None,
        **about: Any,
    ) -> Turn:
        turn = self.sessions.turn(
            self.exchange(at_s, until_s, **about), self.keys(*messages, header=header, **(body or {}))
        )
        assert turn is not None
        return turn


HELLO = user("Hello")
LATER = (HELLO, bot("Hi!"), user("What is tin?"))
LATEST = (*LATER, bot("A metal."), user("Why?"))


def test_a_conversation_is_linked_turn_by_turn_with_its_think_times() -> None:
    client = Client()
    one, two, three = client.send(0, 2, HELLO), client.send(5, 8, *LATER), client.send(8.5, 9, *LATEST)
    assert re.fullmatch("[0-9a-f]{16}", one.session)
    assert one == Turn(one.session, "prefix", 0, None, None, "human")
    assert two == Turn(one.session, "prefix", 1, "r0-1", 3 * S, "human")
    assert three == Turn(one.session, "prefix", 2, "r0-2", S // 2, "human")


def test_a_subagents_first_request_follows_the_request_that_started_it() -> None:
    names = ("x-claude-code-agent-id", "x-claude-code-session-id", "thread-id")
    parents = ("x-claude-code-parent-agent-id", "x-claude-code-session-id", "x-codex-parent-thread-id")
    client = Client(headers=names, parents=parents)

    def send(at_s: float, **about: str) -> Turn:
        headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in about.items()]
        prompt = read_prompt(json.dumps({"messages": [user(f"{at_s}")]}).encode(), None)
        turn = client.sessions.turn(
            client.exchange(at_s, at_s + 1), client.sessions.request_keys(headers, prompt)
        )
        assert turn is not None
        return turn

    root = send(0, x_claude_code_session_id="s")
    child = send(2, x_claude_code_session_id="s", x_claude_code_agent_id="a")
    again = send(4, x_claude_code_session_id="s", x_claude_code_agent_id="a")
    inner = send(
        6, x_claude_code_session_id="s", x_claude_code_agent_id="b", x_claude_code_parent_agent_id="a"
    )
    back = send(8, x_claude_code_session_id="s")
    assert [(t.number, t.parent) for t in (root, child, again, inner, back)] == [
        (0, None),
        (0, "r0-1"),
        (1, "r0-2"),
        (0, "r0-3"),
        (1, "r0-1"),
    ]
    assert len({t.session for t in (root, child, inner)}) == 3
    assert (child.session, root.session, child.think_ns) == (again.session, back.session, S)
    lost = send(10, thread_id="c", x_codex_parent_thread_id="nobody")
    assert (lost.number, lost.parent, lost.think_ns) == (0, None, None)


def test_a_previous_response_id_names_the_parent() -> None:
    client = Client()

    def send(
        at_s: float, words: str, answer_id: bytes | None, header: str | None = None, **body: str
    ) -> Turn:
        x = client.exchange(at_s, at_s + 1)
        x.answer_id = answer_id
        turn = client.sessions.turn(x, client.keys(user(words), header=header, **body))
        assert turn is not None
        return turn

    first = send(0, "Hello", b"resp_1")
    other = send(2, "Go on", b"resp_2", previous_response_id="resp_1")
    branch = send(5, "Go on", b"resp_3", previous_response_id="resp_1")
    deep = send(8, "Go on", b"resp_4", previous_response_id="resp_3")
    assert [(t.number, t.parent, t.think_ns) for t in (first, other, branch, deep)] == [
        (0, None, None),
        (1, "r0-1", S),
        (1, "r0-1", 4 * S),
        (2, "r0-3", 2 * S),
    ]
    assert {t.session for t in (other, branch, deep)} == {first.session}
    lost = send(12, "Go on", b"resp_6", previous_response_id="resp_5")
    assert (lost.number, lost.parent, lost.source) == (0, None, "explicit")
    named = send(14, "Go on", None, header="x", previous_response_id="resp_4")
    assert (named.parent, named.number, named.session != first.session) == ("r0-4", 3, True)
    fresh = client.send(20, 21, user("Go on"), bot("Yes."), user("More"))
    assert fresh.parent is None, "what stood behind another answer is no beginning"


def test_the_longest_beginning_is_the_parent() -> None:
    seen, unseen = Client(), Client()
    for client in (seen, unseen):
        client.send(0, 1, HELLO)
    seen.send(2, 3, *LATER)
    assert (seen.send(4, 5, *LATEST).parent, unseen.send(4, 5, *LATEST).parent) == ("r0-2", "r0-1")


@pytest.mark.parametrize("again", [LATER, (*LATER[:2], user("What is lead?"))], ids=["regenerate", "edit"])
def test_a_branch_stays_in_its_session_at_the_number_of_what_it_replaces(again: tuple[Message, ...]) -> None:
    client = Client()
    opened = client.send(0, 1, HELLO)
    first, second = client.send(2, 3, *LATER), client.send(5, 6, *again)
    assert first.session == second.session == opened.session
    assert (second.number, second.parent, second.think_ns) == (1, "r0-1", 4 * S)


def test_people_with_the_same_opening_are_told_apart_as_soon_as_they_differ() -> None:
    client = Client()
    people: dict[str, list[Message]] = {name: [HELLO] for name in ("ann", "bob", "eve")}
    sessions: dict[str, list[str]] = {name: [] for name in people}
    for turn in range(3):
        for i, (name, said) in enumerate(people.items()):
            sessions[name].append(client.send(turn * 10 + i, turn * 10 + i + 0.5, *said).session)
            said += [bot("Hi!"), user(f"{name} says {turn}")]
    opened = {found[0] for found in sessions.values()}
    later = [set(found[1:]) for found in sessions.values()]
    assert [len(found) for found in (opened, *later)] == [3, 1, 1, 1], "one conversation, one session"
    assert set.union(*later) == opened, "each goes on from one of the openings"


def test_of_equals_the_answered_unfollowed_latest_is_taken() -> None:
    client = Client()
    client.send(0, 1, HELLO)
    client.send(2, 3, HELLO)
    client.send(4, 5, HELLO, status=429)
    client.send(4, 60, HELLO)
    assert client.send(10, 11, *LATER).parent == "r0-2"
    assert client.send(12, 13, *LATER).parent == "r0-1"
    # Both are followed now: the one whose answer it repeats, and of these the latest.
    assert client.send(14, 15, *LATER).parent == "r0-2"


def test_tenants_never_meet() -> None:
    client = Client()
    a = client.send(0, 1, HELLO, tenant="a")
    b = client.send(2, 3, *LATER, tenant="b")
    assert (b.number, b.parent) == (0, None) and a.session != b.session
    named = [client.send(4, 5, HELLO, header="x", tenant=tenant).session for tenant in ("a", "b")]
    assert named[0] != named[1]


@pytest.mark.parametrize(
    ("messages", "by"),
    [
        ([user("x")], "human"),
        ([user("x"), bot("y"), {"role": "tool", "content": "3"}], "tool"),
        ([user("x"), bot("y"), {"role": "tool", "content": "3"}, user("stop")], "human"),
        ([user("x"), bot("y"), {"role": "tool", "content": "3"}, {"role": "system", "content": "!"}], "tool"),
        ([{"role": "system", "content": "!"}], "human"),
    ],
)
def test_tools_are_told_from_people(messages: list[Message], by: str) -> None:
    assert Client().keys(*messages).author == by


def test_an_explicit_id_names_its_session_by_a_keyed_hash() -> None:
    client = Client()
    one = client.send(0, 1, HELLO, header="conversation-7")
    two = client.send(3, 4, user("and?"), header="conversation-7")
    assert one.source == two.source == "explicit"
    assert two == Turn(one.session, "explicit", 1, "r0-1", 2 * S, "human")
    assert Client().send(9, 9, header="conversation-7").session == one.session, "the same salt, the same name"
    unnamed = [Client(hash_names=False).send(0, 1, HELLO, header="conversation-7").session for _ in range(2)]
    assert len({one.session, *unnamed}) == 3, "at the level none it tells nothing"


@pytest.mark.parametrize(
    ("header", "body", "same_as"),
    [
        ("x", {}, "x"),
        (None, {"session_id": "x"}, "x"),
        (None, {"metadata": {"session_id": "x"}}, "x"),
        ("x", {"session_id": "y"}, "x"),
        (None, {"session_id": "x", "metadata": {"session_id": "y"}}, "x"),
        (None, {"session_id": 7}, "7"),
        ("", {"session_id": "x"}, "x"),
        (None, {"session_id": "é"}, "é"),
    ],
)
def test_headers_come_before_fields_and_each_in_its_order(header: Any, body: Any, same_as: str) -> None:
    client = Client()
    assert (
        client.keys(HELLO, header=header, **body).session_name
        == client.keys(HELLO, header=same_as).session_name
    )


@pytest.mark.parametrize("value", ["", None, True, {"id": "x"}, ["x"], 1.5])
def test_what_is_no_name_names_nothing(value: Any) -> None:
    assert Client().keys(HELLO, session_id=value, metadata="x").session_name is None


def test_within_a_named_session_the_chain_finds_the_parent_and_else_the_latest_that_ended() -> None:
    client = Client()
    client.send(0, 1, HELLO, header="x")
    client.send(2, 3, user("a helper's own words"), header="x")
    assert client.send(5, 6, *LATER, header="x").parent == "r0-1"
    assert client.send(7, 8, user("more"), header="x").parent == "r0-3"
    # One that was under way at the arrival is no parent of this, nor is another session's.
    assert client.send(7.5, 9, user("aside"), header="x").parent == "r0-3"
    assert client.send(20, 21, *LATER, header="y").parent is None


def test_without_messages_there_is_no_session_unless_it_is_named() -> None:
    client = Client()
    assert client.sessions.turn(client.exchange(0, 1), client.keys(prompt="Once")) is None
    assert client.sessions.turn(client.exchange(0, 1), client.sessions.request_keys([], None)) is None
    assert len(client.sessions) == 0
    named = client.send(0, 1, header="x", body={"prompt": "Once"})
    assert (named.number, named.by) == (0, None)
    assert client.send(2, 3, header="x", body={"prompt": "Once upon"}).number == 1


@pytest.mark.parametrize(
    ("token_s", "end_s", "delivered_s", "arrival_s", "think_ns"),
    [
        (2.0, 2.0, 2.5, 2.5, 0),  # at the very end
        (2.0, 2.0, 2.5, 2.0, 0),  # our write has not returned yet
        (1.5, 2.0, 2.5, 1.75, 0),  # the usage, or the end of the body, is still to come
        (None, 2.0, 2.5, 2.25, 0),  # an answer of no token
        (None, 2.0, 2.5, 1.75, None),
        (1.5, 2.0, 2.5, 1.25, None),  # while tokens come: not of this answer
        (1.5, None, 2.5, 1.75, None),  # it broke off
        (2.0, None, None, 3.0, S),  # its client left
        (None, None, None, 5.0, None),
        (1.5, 2.0, 2.5, 2.75, S // 4),
    ],
)
def test_who_asks_before_the_end_was_stamped_but_has_the_answer_took_no_time_to_think(
    token_s: float | None,
    end_s: float | None,
    delivered_s: float | None,
    arrival_s: float,
    think_ns: int | None,
) -> None:
    client = Client()
    x = client.exchange(0, None)
    t = x.timeline
    t.last_token_ns, t.response_end_ns, t.delivered_ns = (
        None if at_s is None else t.arrival_ns + int(at_s * S) for at_s in (token_s, end_s, delivered_s)
    )
    assert client.sessions.turn(x, client.keys(HELLO)) is not None
    turn = client.send(arrival_s, 9, *LATER)
    assert (turn.number, turn.parent, turn.think_ns) == (1, "r0-1", think_ns)


def test_a_wall_clock_that_was_set_does_not_move_think_times_of_one_relay() -> None:
    client = Client()
    client.send(0, 2, HELLO)
    assert client.send(1805, 1806, *LATER, mono_s=-1800).think_ns == 3 * S
    other = Client()
    other.send(0, 2, HELLO)  # another relay, after a restart of the host
    assert other.send(5, 6, *LATER, relay="r1", mono_s=-4_000).think_ns == 3 * S


def test_memory_is_bounded_by_count_and_by_time() -> None:
    client = Client(exchanges_max=10, idle_ns=100 * S)
    for i in range(50):
        client.send(i, i + 0.5, user(f"question {i}"), header="x")
        assert len(client.sessions) <= 10
    assert client.send(60, 61, user("question 0"), bot("y"), user("z")).parent is None
    assert client.send(62, 63, user("question 45"), bot("y"), user("z")).parent == "r0-46"
    client.send(1000, 1001, user("much later"))
    assert len(client.sessions) == 1
    assert len(client.sessions._by_key) == 1, "nothing is left of what was forgotten"


def test_a_probe_that_asks_the_same_all_day_is_not_remembered_without_end() -> None:
    client = Client()
    for i in range(1000):
        client.send(i / 10, i / 10 + 0.01, user("ping"))
    assert max(map(len, client.sessions._by_key.values())) == 256
    assert client.send(200, 201, user("ping"), bot("pong"), user("really?")).parent == "r0-1000"


def test_nothing_that_was_said_is_in_memory_or_in_what_is_told() -> None:
    client = Client()
    turn = client.send(0, 1, user("planted words"), header="planted id", tenant="planted tenant")
    assert "planted" not in repr(turn) + repr(list(client.sessions._order)) + repr(client.sessions._by_key)
    assert "planted" not in repr(client.keys(user("planted words"), header="planted id"))


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_any_interleaving_of_different_conversations_links_each_to_itself(
    seed: int, people: int, named: bool
) -> None:
    rng = random.Random(seed)
    client = Client()
    talks: list[list[Message]] = [[user(f"I am {i}")] for i in range(people)]
    told: list[list[Turn]] = [[] for _ in talks]
    for step in range(20):
        i = rng.randrange(people)
        header = f"talk {i}" if named else None
        told[i].append(client.send(step, step + 0.5, *talks[i], header=header))
        talks[i] += [bot(rng.choice("xyz")), user(rng.choice("abc"))]
    for turns in told:
        assert [turn.number for turn in turns] == list(range(len(turns)))
        assert len({turn.session for turn in turns}) <= 1
    assert len({turn.session for turns in told for turn in turns}) == sum(1 for turns in told if turns)


SIZE = 8


def words(text: str) -> list[int]:
    """A tokenizer: one id a word."""
    return [sum(word.encode()) for word in text.split()]


def by_bytes(size: int = SIZE, salt: bytes = SALT) -> BlockHasher:
    return BlockHasher(salt, block_size=size, unit="bytes")


def prompt(*messages: tuple[str, Any], tools: bytes = b"") -> PromptShape:
    made = [PromptMessage(role, parts if isinstance(parts, list) else [parts]) for role, parts in messages]
    return PromptShape(made, RequestShape(), {}, True, tools)


def ids(asked: PromptShape, size: int = SIZE) -> list[int]:
    blocks = by_bytes(size).blocks(asked)
    return list(blocks.ids)


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


_PARTS = st.lists(
    st.text("ab", max_size=20)
    | st.text(max_size=9)
    | st.sampled_from([b"media1", b"media2", b"call"])
    | st.lists(st.integers(0, 9), max_size=5).map(lambda x: array("I", x)),
    max_size=3,
)
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
    hasher = BlockHasher(SALT, block_size=2, unit="tokens", tokenize=words)
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

    hasher = BlockHasher(SALT, block_size=2, unit="tokens", tokenize=tokenize)
    assert hasher.blocks(prompt(("user", "a" * ((1 << 20) + 1) if broken == "long" else "a"))) is None
    assert hasher.skipped_prompts == 1


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
        bytes(8)
        + b"\0\0\0\x08"
        + b"x" * 8
        + b"\0\0\0\0"
        + b"\0\0\0\x06"
        + b"toolst"
        + b"\0\0\0\0"
        + b"\0\0\0\x08"
        + b"roleuser"
        + b"\0\0\0\x03"
        + b"\0\0\0\x06"
        + b"media1"
    )
    second = keyed(first + b"\0\0\0\x01" + b"x")
    expected = [int.from_bytes(digest, "little", signed=True) for digest in (first, second)]
    assert ids(prompt(("user", ["xxx", b"media1", "x" * 6]), tools=b"t")) == expected


@given(_MESSAGES, _MESSAGES)
def test_a_conversations_chain_begins_with_that_of_its_beginning(messages: Any, more: Any) -> None:
    short, long = (
        conversation_digests(prompt(*messages), SALT),
        conversation_digests(prompt(*messages, *more), SALT),
    )
    assert long[: len(short)] == short
    assert len(long) == len(messages) + len(more)
    assert all(len(digest) == DIGEST_BYTES for digest in long)


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
    assert conversation_digests(a, SALT)[-1] != conversation_digests(b, SALT)[-1]


def test_thinking_that_a_client_drops_later_changes_no_chain() -> None:
    def conversation(*messages: Any) -> list[bytes]:
        read = read_prompt(json.dumps({"messages": messages}).encode(), "chat.completions")
        assert read is not None
        return conversation_digests(read, SALT)

    user = {"role": "user", "content": "hi"}
    kept = conversation(user, {"role": "assistant", "content": "ho", "reasoning_content": "hm"}, user)
    assert conversation(user, {"role": "assistant", "content": "ho"}, user) == kept
    assert conversation(user, {"role": "assistant", "reasoning_content": "hm"})[1] == conversation(user)[0]
    assert conversation(user, {"role": "assistant", "content": "ha"}, user)[1:] != kept[1:]
