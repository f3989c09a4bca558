"""Hash prompts into blocks that show what prompts share, and find the conversation of each request.

The meter's recorder passes parsed prompts to `BlockHasher`, whose ids become a column of the capture. At the
end of each exchange, `Sessions` returns its turn: the place of the exchange in a conversation.

The id of a block is a keyed BLAKE2b of the block and of the id before it: two prompts have the same first n
ids exactly when their first n blocks agree in text, roles, pictures and tools. Roles and other marks
(`exchange/prompt.py`) are hashed with the block that begins at or after them. With tokens as unit, each
message is tokenised alone, so that a longer conversation keeps the ids of its beginning.

The session of a request is `explicit` if the request names its conversation, in a header or a field of its
body. It is `prefix` if the request begins with all messages of an earlier request; the longest such request
counts. Tenants are never mixed. A request without messages and without a name has no session.

- A branch (the same request again, or with another last message) stays in the session of its parent. The
  number of a turn is its depth in the conversation, not a count. If the first message of a conversation is
  sent again, another session begins, because the message can be from another person.
- Several earlier exchanges can have the same messages. The preferred parent has no follower, and had ended
  when the request arrived; otherwise, it has a follower after the same answer; otherwise, it is the latest.
- In an explicit session, the parent is found in the same way among the exchanges of the session. If none has
  the messages (the server keeps the history), it is the latest exchange of the session that had ended.
- A `previous_response_id` names the parent. If that exchange was not seen, there is no parent.
- A conversation can name another conversation that started it, as subagents do. The parent of its first
  exchange is then the latest exchange of the other conversation that had ended. Its turn has the number 0.
- Think time runs from the end of the parent's answer to the arrival. It is None if that end is unknown or
  later than the arrival. It is 0 if the request arrived between the last token and that end, because a fast
  agent can send it before the relay's last write has returned. Times of one relay are compared by its
  monotonic clock, times of different relays by the wall clock.

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

DIGEST_BYTES: Final = 16
"""Length of a conversation's digest. Two of 10^9 conversations agree by chance with probability 10^-21."""
_ID_BYTES: Final = 8
"""Length of a block's id, which is stored in a signed 64-bit column. Among 10^8 blocks, the probability that
any two agree by chance is 3 in 10,000."""
_TOKENISE_CHARS_MAX: Final = 1 << 20
"""Maximum length of a text for the tokenizer. A longer one takes a second or more, and fits no model."""

Tokenize = Callable[[str], Sequence[int]]
"""Function that returns the token ids of a text."""


class Blocks(NamedTuple):
    """Block ids of one prompt, and its number of tokens."""

    ids: "array[int]"
    """Ids of the blocks, in the order of the prompt."""
    tokens: int | None
    """Number of tokens of the prompt; None if the unit is bytes."""


class BlockHasher:
    """Cuts prompts into blocks, and hashes the blocks."""

    __slots__ = ("_block_bytes", "_salt", "_tokenize", "block_size", "skipped_prompts", "unit")

    def __init__(
        self,
        salt: bytes,
        *,
        block_size: int,
        unit: Literal["bytes", "tokens"],
        tokenize: Tokenize | None = None,
    ) -> None:
        """`salt`: key of the hashes. `unit`: unit of `block_size`; `tokens` needs `tokenize`."""
        assert tokenize is not None or unit == "bytes", "the unit tokens needs a tokenizer"
        self.block_size = block_size
        self.unit = unit
        self.skipped_prompts = 0
        """Number of prompts without blocks, because the tokenizer failed or a text was too long for it."""
        self._salt = salt
        """Secret key of all hashes."""
        self._tokenize = tokenize if unit == "tokens" else None
        """Returns the token ids of a text; None: blocks are of bytes."""
        self._block_bytes = block_size * (1 if unit == "bytes" else ID_BYTES)
        """Size of a block in bytes: of text, or of token ids."""

    def blocks(self, prompt: PromptShape) -> Blocks | None:
        """Return the blocks of a prompt. If the tokenizer fails, count the prompt and return None."""
        try:
            content, marks = self._content_and_marks(prompt)
        except Exception:  # The tokenizer is third-party code, which can raise any exception.
            self.skipped_prompts += 1
            return None
        tokens = None if self._tokenize is None else len(content) // ID_BYTES
        return Blocks(self._block_hashes(content, marks), tokens)

    def _content_and_marks(self, prompt: PromptShape) -> tuple[bytearray, list[tuple[int, bytes]]]:
        """Return all text (or token ids) as bytes, and the marks with their offsets in these bytes."""
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
        """Return the bytes of a text that are cut into blocks: token ids, or UTF-8 without a tokenizer."""
        if self._tokenize is None:
            return text.encode()
        if len(text) > _TOKENISE_CHARS_MAX:
            raise ValueError(
                f"the text has {len(text):,} characters; a tokenizer gets at most {_TOKENISE_CHARS_MAX:,}:"
                " the prompt gets no hashes"
            )
        return array("I", self._tokenize(text)).tobytes()

    def _block_hashes(self, content: bytearray, marks: list[tuple[int, bytes]]) -> "array[int]":
        """Return an id for each block; it depends on all blocks before, so equal ids mean equal prefixes."""
        ids = array("q")
        size, salt = self._block_bytes, self._salt
        last = bytes(_ID_BYTES)
        remaining_marks = iter(marks)
        mark = next(remaining_marks, None)
        for start in range(0, len(content), size):
            block = content[start : start + size]
            # Put the length before each piece, so that no text can have the same bytes as a mark.
            pieces: list[bytes | bytearray] = [last, len(block).to_bytes(4), block]
            while mark is not None and mark[0] < start + size:
                pieces += ((mark[0] - start).to_bytes(4), len(mark[1]).to_bytes(4), mark[1])
                mark = next(remaining_marks, None)
            last = blake2b(b"".join(pieces), digest_size=_ID_BYTES, key=salt, person=b"llmtap block").digest()
            ids.append(int.from_bytes(last, "little", signed=True))
        return ids


def conversation_digests(prompt: PromptShape, salt: bytes) -> list[bytes]:
    """Return for each message a digest of the conversation up to it. Thinking is left out, because clients do
    not send it again in later requests."""
    state = blake2b(digest_size=DIGEST_BYTES, key=salt, person=b"llmtap chain")
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
"""Time after which an exchange is forgotten: one hour. A later request begins a new session, because the
server no longer has the conversation in its cache."""
_EXCHANGES_MAX: Final = 100_000
"""Maximum number of exchanges remembered, in some 60 MB. At 28 requests a second, these are of one hour."""
_EXCHANGES_PER_KEY_MAX: Final = 256
"""Maximum number of exchanges remembered with one key: a health probe can send the same request all day. With
this limit, a search among them takes 0.1 ms."""
_TENANT_BYTES: Final = 8
"""Length of a tenant's digest, with which each key begins, so that tenants are never mixed."""
_SESSION_ID_BYTES: Final = 8


@dataclass(slots=True)
class ConversationKeys:
    """Digests by which the conversation of a request is found."""

    session_name: bytes | None = None
    """Digest of the id by which the request names its conversation; None if it names none."""
    starter: bytes | None = None
    """Digest of the id of the conversation that started this one, as the caller of a subagent does."""
    previous_answer: bytes | None = None
    """Digest of the `previous_response_id`, which names the response that the messages continue."""
    conversation: list[bytes] = field(default_factory=list)
    """Digests of the conversation up to each message; empty if the request is not of a conversation."""
    author: str | None = None
    """`tool` if all messages after the last answer are results of tools, else `human`."""


@dataclass(slots=True, eq=False)
class _PastExchange:
    """An exchange that can be the parent of a later exchange."""

    keys: tuple[bytes, ...]
    """Keys by which a later request finds this exchange."""
    session: str
    turn: int
    """Number of the exchange in its session."""
    id: str
    relay: str
    ended_ns: int | None
    """Time of its end; None while it runs."""
    ended_wall_ns: int
    """End of the answer by the wall clock, or arrival if the end is unknown."""
    closing_ns: int
    """Time from the last token to the end: within it, the client possibly had the whole answer already."""
    succeeded: bool
    """Whether the server answered with a status below 400."""
    follower: bytes | None = None
    """Digest of the conversation up to this answer, as the first request after it sent it; else None."""


class Sessions:
    """Finds the session of each exchange, by the exchanges that it remembers.

    Args:
        salt: key of all digests.
        hash_names: the id of an explicit session is a keyed hash of its name; False: it is random.
        headers, fields: header fields, and body fields (dotted paths), that name a conversation. Body fields
            are used if no header field is present.
        parents: header fields that name the conversation which started this one.
        exchanges_max, idle_ns: maximum number of exchanges remembered, and time after which one is forgotten.
    """

    __slots__ = (
        "_by_key",
        "_exchanges_max",
        "_hash_names",
        "_idle_ns",
        "_order",
        "_parent_headers",
        "_salt",
        "_session_fields",
        "_session_headers",
    )

    def __init__(
        self,
        salt: bytes,
        *,
        hash_names: bool,
        headers: Sequence[str] = (),
        fields: Sequence[str] = (),
        parents: Sequence[str] = (),
        exchanges_max: int = _EXCHANGES_MAX,
        idle_ns: int = _IDLE_NS,
    ) -> None:
        self._salt = salt
        """Secret key of all digests."""
        self._hash_names = hash_names
        """Whether names of conversations are stored as hashes."""
        self._session_headers = [name.lower().encode() for name in headers]
        """Header fields that name a conversation."""
        self._parent_headers = [name.lower().encode() for name in parents]
        """Header fields that name the previous exchange."""
        self._session_fields = [path.split(".") for path in fields]
        """Fields of the body that name a conversation, as steps of a path."""
        self._exchanges_max = exchanges_max
        self._idle_ns = idle_ns
        """Time after its end at which an exchange is forgotten."""
        self._by_key: dict[bytes, list[_PastExchange]] = {}
        """By digest of a conversation or of its messages: exchanges that can be parents."""
        self._order: deque[_PastExchange] = deque()
        """All exchanges that are remembered, in the order in which they ended."""

    def __len__(self) -> int:
        return len(self._order)

    def request_keys(self, headers: Headers, prompt: PromptShape | None) -> ConversationKeys:
        """Return the digests of a complete request; call this before the text of the request is discarded."""
        keys = ConversationKeys(
            self._name_digest(headers, prompt), self._field_digest(headers, self._parent_headers)
        )
        if prompt is not None and prompt.chat:
            previous_id = prompt.value.get("previous_response_id")
            if isinstance(previous_id, str) and previous_id:
                keys.previous_answer = self._answer_digest(previous_id.encode("utf-8", "surrogatepass"))
            keys.conversation = (
                conversation_digests(prompt, self._salt) if keys.previous_answer is None else []
            )
            keys.author = _author_of(prompt.messages)
        return keys

    def turn(self, x: Exchange, keys: ConversationKeys) -> Turn | None:
        """Return the turn of an ended exchange, and remember the exchange; None if it has no session."""
        if keys.session_name is None and keys.previous_answer is None and not keys.conversation:
            return None
        tenant = self._digest(x.tenant.encode("utf-8", "surrogatepass"), _TENANT_BYTES)
        named_key = None if keys.session_name is None else tenant + keys.session_name
        ended_ns = _end_ns(x)
        ended_wall_ns = x.arrival_wall_ns + ((ended_ns or x.timeline.arrival_ns) - x.timeline.arrival_ns)
        self._forget(ended_wall_ns - self._idle_ns)
        siblings = None if named_key is None else self._by_key.get(named_key, [])
        if keys.previous_answer is not None:
            candidates = self._by_key.get(tenant + keys.previous_answer, ())
            parent = max(candidates, key=_ended_wall_ns, default=None)
        else:
            parent = self._find_parent(x, keys.conversation, tenant, siblings)
        known = siblings[0] if siblings else parent if named_key is None else None
        if known is not None:
            session = known.session
        elif named_key is not None and self._hash_names:
            session = self._digest(named_key, _SESSION_ID_BYTES).hex()
        else:
            session = secrets.token_hex(_SESSION_ID_BYTES)
        number = 0 if parent is None else parent.turn + 1
        if parent is None and not siblings and keys.starter not in (None, keys.session_name):
            parent = _latest_ended(self._by_key.get(tenant + keys.starter, ()), x)
        messages_key = tenant + keys.conversation[-1] if keys.conversation else None
        answer_key = tenant + self._answer_digest(x.answer_id) if x.answer_id else None
        past = _PastExchange(
            tuple(filter(None, (named_key, messages_key, answer_key))),
            session,
            number,
            x.id,
            x.relay,
            ended_ns,
            ended_wall_ns,
            _closing_ns(x, ended_ns),
            succeeded=x.status is not None and x.status < 400,
        )
        self._remember(past)
        return Turn(
            session=session,
            source="explicit" if named_key or keys.previous_answer else "prefix",
            number=number,
            parent=None if parent is None else parent.id,
            think_ns=None if parent is None else _think_ns(parent, x),
            by=keys.author,
        )

    def _find_parent(
        self, x: Exchange, digests: list[bytes], tenant: bytes, siblings: list[_PastExchange] | None
    ) -> _PastExchange | None:
        """Return the exchange that `x` follows. `digests`: the conversation up to each message. `siblings`:
        exchanges of the session that `x` names, or None if it names none."""
        for k in range(len(digests) - 2, -1, -1):
            candidates = self._by_key.get(tenant + digests[k])
            if candidates and siblings is not None:
                candidates = [past for past in candidates if siblings and past.session == siblings[0].session]
            if candidates:
                answer = digests[k + 1]  # The message after the parent's messages is the parent's answer.
                parent = max(candidates, key=lambda past: _parent_preference(past, answer, x))
                parent.follower = parent.follower or answer
                return parent
        return _latest_ended(siblings or (), x)

    def _remember(self, past: _PastExchange) -> None:
        """Store an exchange as a possible parent of later ones."""
        for key in past.keys:
            same = self._by_key.setdefault(key, [])
            if len(same) == _EXCHANGES_PER_KEY_MAX:
                del same[0]
            same.append(past)
        self._order.append(past)

    def _forget(self, until_wall_ns: int) -> None:
        """Forget exchanges that ended before this time and, if the limit is reached, also the oldest one."""
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

    def _name_digest(self, headers: Headers, prompt: PromptShape | None) -> bytes | None:
        """Return the digest of the id by which the request names its conversation."""
        if (name := self._field_digest(headers, self._session_headers)) is not None:
            return name
        for steps in self._session_fields if prompt is not None else ():
            value: Any = prompt.value if prompt is not None else None
            for step in steps:
                value = value.get(step) if isinstance(value, dict) else None
            if isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            if isinstance(value, str) and value:
                return self._digest(value.encode("utf-8", "surrogatepass"), DIGEST_BYTES)
        return None

    def _field_digest(self, headers: Headers, names: list[bytes]) -> bytes | None:
        """Return the digest of the value of the first header field in `names` that the request has."""
        values = filter(None, (header_value(headers, name) for name in names))
        return next((self._digest(value, DIGEST_BYTES) for value in values), None)

    def _answer_digest(self, answer_id: bytes) -> bytes:
        """Return the digest of an answer's id, which differs from that of a conversation with an equal id."""
        return self._digest(b"answer " + answer_id, DIGEST_BYTES)

    def _digest(self, data: bytes, size: int) -> bytes:
        """Return a hash keyed with the salt, so that nobody without the salt can test guesses."""
        return blake2b(data, digest_size=size, key=self._salt, person=b"llmtap session").digest()


def _ended_wall_ns(past: _PastExchange) -> int:
    return past.ended_wall_ns


def _latest_ended(candidates: Sequence[_PastExchange], x: Exchange) -> _PastExchange | None:
    """Return the candidate that ended last, among those that had ended when `x` arrived."""
    ended = [past for past in candidates if _think_ns(past, x) is not None]
    return max(ended, key=_ended_wall_ns, default=None)


def _parent_preference(past: _PastExchange, answer: bytes, x: Exchange) -> tuple[int, int]:
    """Return a key by which the best of several possible earlier turns is chosen."""
    if past.follower is None:
        rank = 3 if past.succeeded and _think_ns(past, x) is not None else 1
    else:
        rank = 2 if past.follower == answer else 0
    return rank, past.ended_wall_ns


def _end_ns(x: Exchange) -> int | None:
    """Return the time when the client had received the whole answer, or the last part that it received
    before it disconnected; None if it is unknown."""
    t = x.timeline
    for end_ns in (t.delivered_ns, t.response_end_ns, t.last_token_ns):
        if end_ns is not None:
            return end_ns
    return None


def _closing_ns(x: Exchange, ended_ns: int | None) -> int:
    """Return the time from the last token (or byte) to the end of an answer; 0 if it is incomplete."""
    t = x.timeline
    if ended_ns is None or t.response_end_ns is None:
        return 0
    last_ns = t.response_end_ns if t.last_token_ns is None else t.last_token_ns
    return max(0, ended_ns - last_ns)


def _think_ns(parent: _PastExchange, x: Exchange) -> int | None:
    """Return the think time before an exchange; None if the parent's end is unknown or after the arrival."""
    if parent.ended_ns is None:
        return None
    if parent.relay == x.relay:  # One monotonic clock: unlike the wall clock, it cannot be set.
        elapsed_ns = x.timeline.arrival_ns - parent.ended_ns
    else:
        elapsed_ns = x.arrival_wall_ns - parent.ended_wall_ns
    return max(0, elapsed_ns) if elapsed_ns >= -parent.closing_ns else None


def _author_of(messages: list[PromptMessage]) -> str | None:
    """Return the author of the messages after the last answer: `tool` if all are results of tools, else
    `human`. Messages of the application (system, developer) do not count."""
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
