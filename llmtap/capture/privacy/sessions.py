"""Hash prompts: blocks that show what prompts share, and the conversation that a request belongs to.

The meter's recorder passes parsed prompts to `BlockHasher`, whose ids become a column of the capture, and
asks `Sessions` for the turn of each exchange at its end.

The id of a block is a keyed BLAKE2b of the block and of the id before it: two prompts have the same first n
ids exactly when their first n blocks agree in text, roles, pictures and tools. Roles and other marks
(`exchange/prompt.py`) are hashed with the block that begins at or after them. With tokens as unit, each
message is tokenised alone, so that a longer conversation keeps the ids of its beginning.

A conversation is `explicit` if the request names it, in a header or a field of its body; or `prefix` if the
request's first k messages are all the messages of an earlier one, for the longest such k. Tenants are never
mixed. A request without messages and name has no session.

- A branch (the same request again, or with another last message) stays in the session of its parent. The
  number of a turn is its depth in the conversation, not a count. A first message that is sent again begins
  another session, because it may be from another person.
- Among earlier exchanges with the same messages, one is preferred that has no follower and that had ended
  when the request arrived; then one with a follower after the same answer; then the latest.
- With an explicit id the parent is found in the same way among the session's exchanges, else (the server
  keeps the history) it is the latest that had ended.
- A `previous_response_id` names the parent. If that exchange was not seen, there is no parent.
- The first exchange of a conversation that names the conversation which started it (as a subagent's does) has
  as its parent the latest exchange there that had ended. Its number is 0 all the same.
- Think time runs from the end of the parent's answer to the arrival; None where that end is unknown or
  later. Between the last token and that end it is 0: a fast agent may ask before our last write has returned.
  Times of one relay are compared by its monotonic clock, others by the wall clock.

Memory holds digests, ids and times of at most `exchanges_max` exchanges, 0.6 KB each, for at most `idle_ns`.

Source: Mooncake's trace (a hash id stands for a block and all before it); RFC 7693; Bailian's trace numbers
turns by depth under a parent, too.
"""

import secrets
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

from llmtap.exchange.exchange import Exchange, Turn
from llmtap.exchange.prompt import ID_BYTES, PromptMessage, PromptShape
from llmtap.protocol.http1 import Headers, header_value

CHAIN_BYTES: Final = 16
"""Length of a conversation's digest: among 10^9 conversations two agree by chance with probability 10^-21."""
_ID_BYTES: Final = 8
"""Length of a block's id, which is stored in a signed 64-bit column. Among 10^8 blocks two agree by chance
with probability 3 in 10,000."""
_TOKENISE_CHARS_MAX: Final = 1 << 20
"""Maximum length of a text for the tokenizer: a longer text takes a second or more, and fits no context."""

Tokenize = Callable[[str], Sequence[int]]


class Blocks(NamedTuple):
    """Blocks of one prompt."""

    ids: "array[int]"
    tokens: int | None
    """Tokens of the prompt; None if the unit is bytes."""


class BlockHasher:
    """Cuts prompts into blocks of `size` in `unit` (`tokens` need `tokenize`), and hashes them."""

    __slots__ = ("_salt", "_size", "_tokenize", "size", "skipped", "unit")

    def __init__(
        self, salt: bytes, *, size: int, unit: Literal["bytes", "tokens"], tokenize: Tokenize | None = None
    ) -> None:
        assert tokenize is not None or unit == "bytes", "tokens come from a tokenizer"
        self.size = size
        self.unit = unit
        self.skipped = 0
        """Prompts without blocks, because a text was too long for the tokenizer, or the tokenizer failed."""
        self._salt = salt
        self._tokenize = tokenize if unit == "tokens" else None
        self._size = size * (1 if unit == "bytes" else ID_BYTES)

    def blocks(self, prompt: PromptShape) -> Blocks | None:
        """Return the blocks of a prompt; None, and count it, if the tokenizer fails."""
        try:
            content, marks = self._lay_out(prompt)
        except Exception:  # The tokenizer is third-party code and may raise any exception.
            self.skipped += 1
            return None
        tokens = None if self._tokenize is None else len(content) // ID_BYTES
        return Blocks(self._block_hashes(content, marks), tokens)

    def _lay_out(self, prompt: PromptShape) -> tuple[bytearray, list[tuple[int, bytes]]]:
        """Return all text as bytes, and the marks with their places in it."""
        content = bytearray()
        marks = [(0, b"tools" + prompt.tools)] if prompt.tools else []
        for message in prompt.messages:
            marks.append((len(content), b"role" + message.role.encode()))
            if message.thinking:
                marks.append((len(content), b"thinking"))
                content += self._text_bytes(message.thinking)
                # The word `said` is part of the hash: another word would change the ids of all such blocks.
                marks.append((len(content), b"said"))
            for part in message.parts:
                if isinstance(part, str):
                    content += self._text_bytes(part)
                elif isinstance(part, bytes):
                    marks.append((len(content), part))
                else:
                    if self._tokenize is None:
                        # Mark token ids, so that their hash differs from that of a text with the same bytes.
                        marks.append((len(content), b"ids"))
                    content += part.tobytes()
        return content, marks

    def _text_bytes(self, text: str) -> bytes:
        if self._tokenize is None:
            return text.encode()
        if len(text) > _TOKENISE_CHARS_MAX:
            raise ValueError(
                f"the text has more than {_TOKENISE_CHARS_MAX:,} characters, too many for a tokenizer"
            )
        return array("I", self._tokenize(text)).tobytes()

    def _block_hashes(self, content: bytearray, marks: list[tuple[int, bytes]]) -> "array[int]":
        ids = array("q")
        size, salt = self._size, self._salt
        last = bytes(_ID_BYTES)
        waiting = iter(marks)
        mark = next(waiting, None)
        for start in range(0, len(content), size):
            block = content[start : start + size]
            # Put the length before each piece, so that no text can be taken for a mark.
            pieces: list[bytes | bytearray] = [last, len(block).to_bytes(4), block]
            while mark is not None and mark[0] < start + size:
                pieces += ((mark[0] - start).to_bytes(4), len(mark[1]).to_bytes(4), mark[1])
                mark = next(waiting, None)
            last = blake2b(b"".join(pieces), digest_size=_ID_BYTES, key=salt, person=b"llmtap block").digest()
            ids.append(int.from_bytes(last, "little", signed=True))
        return ids


def chain(prompt: PromptShape, salt: bytes) -> list[bytes]:
    """Return the digests of the conversation up to each message, without thinking: clients drop it later."""
    state = blake2b(digest_size=CHAIN_BYTES, key=salt, person=b"llmtap chain")
    digests = []
    for message in prompt.messages:
        if message.parts or not message.thinking:
            state.update(_message_bytes(message))
        digests.append(state.copy().digest())
    return digests


def _message_bytes(message: PromptMessage) -> bytes:
    """Encode a message as bytes that differ from those of any other message."""
    role = message.role.encode()
    pieces = [len(role).to_bytes(4), role, len(message.parts).to_bytes(4)]
    for part in message.parts:
        if isinstance(part, str):
            kind, data = b"t", part.encode()
        elif isinstance(part, bytes):
            kind, data = b"m", part
        else:
            kind, data = b"i", part.tobytes()
        pieces += (kind, len(data).to_bytes(8), data)
    return b"".join(pieces)


_IDLE_NS: Final = 3_600_000_000_000
"""Time after which an exchange is forgotten: one hour. The server has then dropped its cache, and a request
begins a new session."""
_EXCHANGES_MAX: Final = 100_000
"""Maximum number of exchanges remembered: an hour of 28 requests a second, in some 60 MB."""
_SAME_MAX: Final = 256
"""Maximum number of exchanges remembered for one key (a search of 0.1 ms): a health probe may send the same
request all day."""
_TAG_BYTES: Final = 8
_NAME_BYTES: Final = 8


@dataclass(slots=True)
class Keys:
    """Digests by which the conversation of a request is found."""

    named: bytes | None = None
    """Digest of the id by which the request names its conversation."""
    starter: bytes | None = None
    """Digest of the id of the conversation that started this one, for example of a subagent's caller."""
    previous_answer: bytes | None = None
    """Digest of the `previous_response_id`: the messages continue the conversation after that response."""
    chain: list[bytes] = field(default_factory=list)
    """Digests of its messages (`chain`); empty if it has no conversation."""
    by: str | None = None
    """`tool` if all messages after the last answer are results of tools, else `human`."""


@dataclass(slots=True, eq=False)
class _PastExchange:
    """An exchange that a later one may follow."""

    keys: tuple[bytes, ...]
    session: str
    turn: int
    id: str
    relay: str
    ended_ns: int | None
    ended_wall_ns: int
    """End, or arrival if the end is unknown."""
    closing_ns: int
    """Time before the end in which the client may already have had the whole answer."""
    answered: bool
    """Whether the server answered with a status below 400."""
    followed: bytes | None = None
    """Digest of the conversation up to this answer, as sent by the first request that follows the answer."""


class Sessions:
    """Finds the session of each exchange.

    Args:
        named: call explicit sessions by a keyed hash of their name, and not by a random name.
        headers, fields: header fields and then body fields (dotted paths) that name a conversation.
        parents: header fields that name the conversation which started this one.
    """

    __slots__ = (
        "_by_key", "_exchanges_max", "_fields", "_headers", "_idle_ns", "_named", "_order", "_parents",
        "_salt",
    )  # fmt: skip

    def __init__(
        self,
        salt: bytes,
        *,
        named: bool,
        headers: Sequence[str] = (),
        fields: Sequence[str] = (),
        parents: Sequence[str] = (),
        exchanges_max: int = _EXCHANGES_MAX,
        idle_ns: int = _IDLE_NS,
    ) -> None:
        self._salt = salt
        self._named = named
        self._headers = [name.lower().encode() for name in headers]
        self._parents = [name.lower().encode() for name in parents]
        self._fields = [path.split(".") for path in fields]
        self._exchanges_max = exchanges_max
        self._idle_ns = idle_ns
        self._by_key: dict[bytes, list[_PastExchange]] = {}
        self._order: deque[_PastExchange] = deque()
        """All exchanges that are remembered, in the order in which they ended."""

    def __len__(self) -> int:
        return len(self._order)

    def keys(self, headers: Headers, prompt: PromptShape | None) -> Keys:
        """Return the digests of a request, at its end, while its text is available."""
        keys = Keys(self._name_in(headers, prompt), self._digest_of(headers, self._parents))
        if prompt is not None and prompt.chat:
            before = prompt.value.get("previous_response_id")
            if isinstance(before, str) and before:
                keys.previous_answer = self._digest_id(before.encode("utf-8", "surrogatepass"))
            keys.chain = chain(prompt, self._salt) if keys.previous_answer is None else []
            keys.by = _author_of(prompt.messages)
        return keys

    def turn(self, x: Exchange, keys: Keys) -> Turn | None:
        """Return the place of an exchange at its end, and remember the exchange; None if it has no
        session."""
        if keys.named is None and keys.previous_answer is None and not keys.chain:
            return None
        tag = self._digest(x.tenant.encode("utf-8", "surrogatepass"), _TAG_BYTES)
        named_key = None if keys.named is None else tag + keys.named
        ended_ns = _end_ns(x)
        ended_wall_ns = x.arrival_wall_ns + ((ended_ns or x.timeline.arrival_ns) - x.timeline.arrival_ns)
        self._forget(ended_wall_ns - self._idle_ns)
        siblings = None if named_key is None else self._by_key.get(named_key, [])
        if keys.previous_answer is not None:
            parent = max(self._by_key.get(tag + keys.previous_answer, ()), key=_ended_wall_ns, default=None)
        else:
            parent = self._parent(x, keys.chain, tag, siblings)
        known = siblings[0] if siblings else parent if named_key is None else None
        if known is not None:
            session = known.session
        elif named_key is not None and self._named:
            session = self._digest(named_key, _NAME_BYTES).hex()
        else:
            session = secrets.token_hex(_NAME_BYTES)
        number = 0 if parent is None else parent.turn + 1
        if parent is None and not siblings and keys.starter not in (None, keys.named):
            parent = _latest_ended(self._by_key.get(tag + keys.starter, ()), x)
        chained = tag + keys.chain[-1] if keys.chain else None
        answered = tag + self._digest_id(x.answer_id) if x.answer_id else None
        past = _PastExchange(
            tuple(filter(None, (named_key, chained, answered))),
            session,
            number,
            x.id,
            x.relay,
            ended_ns,
            ended_wall_ns,
            _closing_ns(x, ended_ns),
            answered=x.status is not None and x.status < 400,
        )
        self._remember(past)
        return Turn(
            session=session,
            source="explicit" if named_key or keys.previous_answer else "prefix",
            number=number,
            parent=None if parent is None else parent.id,
            think_ns=None if parent is None else _think_ns(parent, x),
            by=keys.by,
        )

    def _parent(
        self, x: Exchange, links: list[bytes], tag: bytes, own: list[_PastExchange] | None
    ) -> _PastExchange | None:
        """Return the exchange that this one follows; `own`: exchanges of the session that it names."""
        for k in range(len(links) - 2, -1, -1):
            candidates = self._by_key.get(tag + links[k])
            if candidates and own is not None:
                candidates = [past for past in candidates if own and past.session == own[0].session]
            if candidates:
                answer = links[k + 1]  # The answer of the parent follows the parent's messages.
                parent = max(candidates, key=lambda past: _parent_preference(past, answer, x))
                parent.followed = parent.followed or answer
                return parent
        return _latest_ended(own or (), x)

    def _remember(self, past: _PastExchange) -> None:
        for key in past.keys:
            same = self._by_key.setdefault(key, [])
            if len(same) == _SAME_MAX:
                del same[0]
            same.append(past)
        self._order.append(past)

    def _forget(self, until_wall_ns: int) -> None:
        """Forget exchanges that ended before this time, and one more if the limit is reached."""
        while self._order:
            past = self._order[0]
            if len(self._order) < self._exchanges_max and past.ended_wall_ns >= until_wall_ns:
                return
            self._order.popleft()
            for key in past.keys:
                same = self._by_key.get(key, [])
                if past in same:
                    same.remove(past)
                if not same:
                    self._by_key.pop(key, None)

    def _name_in(self, headers: Headers, prompt: PromptShape | None) -> bytes | None:
        """Return the digest of the id by which the request names its conversation."""
        if (name := self._digest_of(headers, self._headers)) is not None:
            return name
        for steps in self._fields if prompt is not None else ():
            value: Any = prompt.value if prompt is not None else None
            for step in steps:
                value = value.get(step) if isinstance(value, dict) else None
            if isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            if isinstance(value, str) and value:
                return self._digest(value.encode("utf-8", "surrogatepass"), CHAIN_BYTES)
        return None

    def _digest_of(self, headers: Headers, names: list[bytes]) -> bytes | None:
        """Return the digest of the first of these fields that the request has."""
        values = filter(None, (header_value(headers, name) for name in names))
        return next((self._digest(value, CHAIN_BYTES) for value in values), None)

    def _digest_id(self, answer_id: bytes) -> bytes:
        """Return the digest of an answer's id; it differs from the digest of a conversation whose name has
        the same text."""
        return self._digest(b"answer " + answer_id, CHAIN_BYTES)

    def _digest(self, data: bytes, size: int) -> bytes:
        return blake2b(data, digest_size=size, key=self._salt, person=b"llmtap session").digest()


def _ended_wall_ns(past: _PastExchange) -> int:
    return past.ended_wall_ns


def _latest_ended(candidates: Sequence[_PastExchange], x: Exchange) -> _PastExchange | None:
    """Return the latest candidate that had ended when the exchange arrived."""
    ended = [past for past in candidates if _think_ns(past, x) is not None]
    return max(ended, key=_ended_wall_ns, default=None)


def _parent_preference(past: _PastExchange, answer: bytes, x: Exchange) -> tuple[int, int]:
    if past.followed is None:
        rank = 3 if past.answered and _think_ns(past, x) is not None else 1
    else:
        rank = 2 if past.followed == answer else 0
    return rank, past.ended_wall_ns


def _end_ns(x: Exchange) -> int | None:
    """Return the time when the client had received the answer, or the part of the answer that it received
    before it disconnected."""
    t = x.timeline
    for end_ns in (t.delivered_ns, t.response_end_ns, t.last_token_ns):
        if end_ns is not None:
            return end_ns
    return None


def _closing_ns(x: Exchange, ended_ns: int | None) -> int:
    """Return the time from the last token (or byte) to the end of a complete answer."""
    t = x.timeline
    if ended_ns is None or t.response_end_ns is None:
        return 0
    had_ns = t.response_end_ns if t.last_token_ns is None else t.last_token_ns
    return max(0, ended_ns - had_ns)


def _think_ns(parent: _PastExchange, x: Exchange) -> int | None:
    """Return the think time before an exchange; None if the parent's end is unknown or later."""
    if parent.ended_ns is None:
        return None
    if parent.relay == x.relay:  # The monotonic clock is correct even if the wall clock was set in between.
        elapsed_ns = x.timeline.arrival_ns - parent.ended_ns
    else:
        elapsed_ns = x.arrival_wall_ns - parent.ended_wall_ns
    return max(0, elapsed_ns) if elapsed_ns >= -parent.closing_ns else None


def _author_of(messages: list[PromptMessage]) -> str | None:
    """Return the author of the last messages, `tool` or `human`; messages that the operator's program added
    do not count."""
    last = None
    for message in reversed(messages):
        if message.role == "assistant":
            break
        if message.role in ("system", "developer"):
            continue
        if not message.result:
            return "human"
        last = "tool"
    return last or ("human" if messages else None)
