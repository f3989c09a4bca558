"""Limits of what an Exchange holds: lengths of its strings, no keys in them, its memory, and that of open
bodies.

`bounded` cuts a string where it enters, `bound` all of a complete exchange, `memory_bytes` measures one.
Names and words chosen by clients and upstreams are cut KEY_CHARS behind their bound and searched for keys
before they are cut at it; tenants and captured texts are only cut. SECURITY.md shows BOUNDS as a table, which
a test compares. `Budget` limits the bytes of bodies that all open exchanges keep; each takes a `Share`.

Of a path (`clean_path`) a segment stays only if it reads like words: API words, versions, names of models.
All else becomes `*`. Plain letters stay (`/pass/swordfish/`), unless the segment before says what they are
(`/key/swordfish/`). `clean_name` replaces a name with a key (`holds_key`) as a whole by `*`; KEY_PATTERN, the
forms of keys that their issuers publish for secret scanning, also serves the redaction of captures.
"""

import re
from array import array
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from sys import getsizeof
from typing import Any, Final, NamedTuple, get_args
from urllib.parse import unquote

from llmtap.exchange.exchange import Exchange
from llmtap.protocol.http1 import METHOD_CHARS_MAX

PATH_CHARS_MAX: Final = 256
_SEGMENT_CHARS_MAX: Final = 80
"""Names of models on the hubs have up to 96 characters, those in use half of that."""
NAME_CHARS_MAX: Final = 256
KEY_CHARS: Final = 320
"""A key is recognised by its first 308 characters at most (a JWT), and most keys by their first 20."""
_DECODINGS_MAX: Final = 4

KEY_PATTERN: Final = (
    r"(?a:"
    r"(?:sk|pk|rk|ak|csk|gsk|ssk)[-_](?=[\w-]{8})(?=[a-z_-]{0,64}[A-Z0-9]|[\w-]{20})[\w-]++"
    r"|gh[pousr]_\w{20,}+|github_pat_\w{20,}+|gl[a-z]{2,5}-[\w-]{16,}+"
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}+|AIza[\w-]{30,}+|ya29\.[\w-]{16,}+"
    r"|xox[a-z]-[\w-]{8,}+|xapp-[\w-]{8,}+|whsec_[\w+/=-]{16,}+|SK[0-9a-f]{32}|key-[0-9a-f]{32}"
    r"|(?:hf|npm|r8|tgp|fw|nvapi|xai|pplx|pypi|dop_v1|lin_api|shpat)[-_](?=[a-zA-Z_-]{0,64}[0-9])[\w-]{16,}+"
    r"|eyJ[\w-]{8,300}+\.[\w-]{4,}+(?:\.[\w-]++)*+"
    r")"
)
"""Keys of OpenAI, Anthropic, Stripe, Groq, Cerebras, GitHub, GitLab, AWS, Google, Slack, Twilio, Mailgun,
Hugging Face, npm, Replicate, Together, Fireworks, NVIDIA, xAI, Perplexity, PyPI, DigitalOcean, Linear,
Shopify; JWT. Every part is bounded, so time is linear."""

_keys_in = re.compile(rf"(?<![A-Za-z0-9]){KEY_PATTERN}")
_key_in = _keys_in.search
# Behind a letter or digit `sk-` may end a word (`task-`), so more is asked of what follows.
_key_behind_a_word = re.compile(
    r"(?a:(?:[spr]k-(?:proj-|live_|test_|or-v1-|ant-[a-z0-9]{1,16}-)?(?=[A-Za-z_]{0,64}[0-9])\w{20,}+)"
    r"|gh[pousr]_\w{30,}+|github_pat_\w{20,}+|AIza[\w-]{30,}+)"
).search
_begins_as_names_do = re.compile(
    r"(?:sk|pk|rk|ak|csk|gsk|ssk|hf|npm|r8|tgp|fw|nvapi|xai|pplx|pypi|gl(?!pat-)[a-z]{2,5})[-_]"
).match
"""`hf-mistral-7b-instruct-v0.2`, `global-llama-3-70b-instruct`, `gemma-2-sk-9b-it-v2` (for Slovak)."""
_is_random = re.compile(r"[A-Za-z0-9]{16}|(?=[A-Za-z]*[0-9])[A-Za-z0-9]{10}").search
_uuid_in = re.compile(r"[0-9A-Fa-f]{8}-?(?:[0-9A-Fa-f]{4}-?){3}[0-9A-Fa-f]{12}").search
_plain = re.compile(r"[\w.~:@+,()-]*", re.ASCII).fullmatch
_pieces = re.compile(r"[A-Za-z0-9]+").findall
_hex = re.compile(r"(?=[0-9]*[a-fA-F])(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}").fullmatch
_edges = re.compile(r"[0-9](?=[A-Za-z])|[A-Za-z](?=[0-9])").findall
_humps = re.compile(r"[a-z](?=[A-Z])").findall
_snapshot = re.compile(r"[^@]+@(?:[0-9]{1,8}|latest|default)(?::[A-Za-z]+)?").fullmatch
_announces = re.compile(
    r"(?i)(?:(?:api|access|auth|secret|private|session)?[-_]?)"
    r"(?:keys?|tokens?|secrets?|passwords?|auth|sessions?)|users?"
).fullmatch
_WORDS_AFTER: Final = frozenset(
    {"v1", "v2", "v3", "api", "openai", "chat", "completions", "messages", "models"}
)


def looks_secret(word: str) -> bool:
    """Whether a name without spaces looks like a key or an id rather than like words and versions."""
    if _key_in(word) or _uuid_in(word):
        return True
    edges = 0
    for piece in _pieces(word):
        size, turns = len(piece), len(_edges(piece))
        edges += turns
        if _hex(piece) or (piece.isdigit() and size > 8):  # 8 digits are a date
            return True
        if size >= 12 and (turns >= 4 or len(_humps(piece)) >= 5):
            return True
        if size >= 20 and turns and not piece.islower() and not piece.isupper() and len(_humps(piece)) >= 3:
            return True
        if size > 32:
            return True
    # Keys in groups: a1b2-c3d4-e5f6-a7b8. `Qwen2.5-Coder-32B-Instruct-AWQ-w4a16` has 5.
    return edges >= 8


def clean_name(name: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """Return the first `chars_max` characters of a name, or `*` where a key begins in them or within
    KEY_CHARS behind."""
    name = name[: chars_max + KEY_CHARS]
    return "*" if holds_key(name) else name[:chars_max]


@lru_cache(maxsize=512)
def holds_key(name: str) -> bool:
    """Return whether a key is in the name of a model or tenant, by its issuer's form or by a long run of
    letters and digits. The caller cuts `name`: results are cached."""
    if _key_behind_a_word(name):
        return True
    found = (key[0] for key in _keys_in.finditer(name))
    return any(not _begins_as_names_do(key) or _is_random(key) for key in found)


def clean_path(path: str) -> str:
    return _clean_known(path) if len(path) <= PATH_CHARS_MAX else _clean(path)


def _clean(path: str) -> str:
    kept: list[str] = []
    size = 0
    announced = False
    for segment in path.split("/"):
        text = _decoded(segment)
        told = announced and segment and segment.lower() not in _WORDS_AFTER
        shown = "*" if told or not _may_stay(segment, text) else segment
        announced = text is not None and bool(_announces(text))
        size += len(shown) + 1
        if size > PATH_CHARS_MAX - 2:
            kept.append("*")
            break
        kept.append(shown)
    return "/".join(kept)


# Clients ask for the same few paths over and over, and a path takes 60 us.
_clean_known = lru_cache(maxsize=512)(_clean)


def _may_stay(segment: str, text: str | None) -> bool:
    if segment == "*":
        return True
    if text is None or len(segment) > _SEGMENT_CHARS_MAX:
        return False
    # An encoded slash joins the names of a model and its owner: meta-llama%2FLlama-3.1-8B.
    return all(_is_name(name) for name in text.split("/"))


def _is_name(name: str) -> bool:
    if not _plain(name):
        return False
    # Numbers are ids, but for those of a version, a year or a port.
    if name.isdigit() and len(name) > 4:
        return False
    at = name.find("@", 1)  # Cloudflare's models begin with @
    if at > 0 and not _snapshot(name):
        return False
    return not looks_secret(name)


def _decoded(segment: str) -> str | None:
    """Without percent-encoding, however often it was applied; None where that does not end."""
    for _ in range(_DECODINGS_MAX):
        if "%" not in segment:
            return segment
        segment = unquote(segment, errors="replace")
    return None if "%" in segment else segment


_WORD_CHARS_MAX: Final = 64
"""Of a reason, a code or a category, as programs write them."""
_NUMBER_BYTES: Final = 32
_HEADER_BYTES: Final = 16
"""Of the garbage collector, before each object."""
_SEEN_MAX: Final = 1_024
_SEEN_CHARS_MAX: Final = 64
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_FIXED_BYTES: Final = {type(None): 0, bool: 0, int: _NUMBER_BYTES, float: _NUMBER_BYTES, type: 0}
_FLAT: Final = frozenset({str, bytes, bytearray, array})


def _cut(text: str, chars_max: int) -> str:
    return text[:chars_max]


def _cut_path(path: str, chars_max: int) -> str:
    return clean_path(path)[:chars_max]


class Bound(NamedTuple):
    """Limits of one field; of each string in it where the field is a list or an object."""

    chars: int
    chosen_by: str
    """`client`, `upstream`, `operator` or `llmtap`."""
    fit: Callable[[str, int], str] = _cut
    members: int = 1
    """Maximum number of members, those of nested lists and objects included."""


BOUNDS: Final = {
    "relay": Bound(64, "llmtap"),
    "method": Bound(METHOD_CHARS_MAX, "client", clean_name),
    "path": Bound(PATH_CHARS_MAX, "client", _cut_path),
    "endpoint": Bound(32, "llmtap"),
    "dialect": Bound(32, "llmtap"),
    "call": Bound(160, "client", clean_name),
    "model": Bound(NAME_CHARS_MAX, "client", clean_name),
    "response_model": Bound(NAME_CHARS_MAX, "upstream", clean_name),
    # `meter/tenants.py` replaces a key by its hash; the operator's names stay as they are.
    "tenant": Bound(64, "client"),
    "route": Bound(256, "operator"),
    "arm": Bound(64, "operator"),
    "unit": Bound(64, "llmtap"),
    "excluded": Bound(64, "llmtap"),
    "trace_parent": Bound(256, "client", clean_name),
    "request_id": Bound(256, "client", clean_name),
    "finish_reason": Bound(_WORD_CHARS_MAX, "upstream", clean_name),
    "refusal": Bound(128, "upstream", clean_name, 32),
    "guardrail": Bound(128, "upstream", clean_name, 32),
    "no_token_reason": Bound(32, "llmtap"),
    "usage": Bound(_WORD_CHARS_MAX, "upstream", clean_name, 256),
    "server_timing": Bound(64, "llmtap", members=2_048),
    "invalid_values": Bound(32, "llmtap", members=16),
    "error": Bound(512, "llmtap"),
    "clock": Bound(16, "llmtap"),
    # Set while a capture runs, each where it is read.
    "asked.response_format": Bound(32, "client", clean_name),
    "asked.roles": Bound(32, "client", clean_name, 10_016),
    "asked.block_unit": Bound(16, "llmtap"),
    "turn.session": Bound(64, "llmtap"),
    "turn.source": Bound(16, "llmtap"),
    "turn.parent": Bound(128, "llmtap"),
    "turn.by": Bound(16, "llmtap"),
    # At level `full` alone, redacted, until the row is written.
    "said.request_body": Bound(8 << 20, "client"),
    "said.response_text": Bound(4 << 20, "upstream"),
}

_WHOLE: Final = {name: limits for name, limits in BOUNDS.items() if "." not in name}
_read_whole: Final = attrgetter(*_WHOLE)
_seen: Final[dict[str, set[str]]] = {name: set() for name in BOUNDS}
"""By field: short strings that need no change. Most come again, and the search for keys takes 1 us."""
_readers: dict[type, tuple[int, Callable[[object], Any]]] = {}


def bounded(field: str, text: str) -> str:
    seen = _seen[field]
    if text in seen:
        return text
    limits = BOUNDS[field]
    fitted = limits.fit(text, limits.chars)
    if fitted == text and len(text) <= _SEEN_CHARS_MAX:
        if len(seen) >= _SEEN_MAX:
            seen.clear()
        seen.add(text)
    return fitted


def bound(x: Exchange) -> None:
    """Bound the exchange's own strings, also those in lists and objects; not those that a capture adds."""
    for (name, limits), value in zip(_WHOLE.items(), _read_whole(x), strict=True):
        if type(value) is str:
            fitted = bounded(name, value)
            if fitted is not value:
                setattr(x, name, fitted)
        elif value is not None:
            setattr(x, name, _fitted(name, value, [limits.members]))


def _fitted(field: str, value: Any, room: list[int]) -> Any:
    if isinstance(value, str):
        return bounded(field, value)
    if isinstance(value, dict):
        kept = {}
        for name, one in value.items():
            if not room[0]:
                break
            room[0] -= 1
            kept[bounded(field, name)] = _fitted(field, one, room)
        return kept
    if isinstance(value, list):
        listed = []
        for one in value:
            if not room[0]:
                break
            room[0] -= 1
            listed.append(_fitted(field, one, room))
        return listed
    return value


def memory_bytes(value: object) -> int:
    """Return the bytes that an Exchange, or any value in one, takes with all that it holds. Shared values
    count twice."""
    kind = type(value)
    fixed = _FIXED_BYTES.get(kind)
    if fixed is not None:
        return fixed
    size = getsizeof(value)
    if kind in _FLAT or isinstance(value, Enum):
        return size
    if isinstance(value, dict):
        return size + sum(map(memory_bytes, value)) + sum(map(memory_bytes, value.values()))
    if isinstance(value, list):
        return size + sum(map(memory_bytes, value))
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = _reader_of(kind)
    fixed_bytes, read = reader
    size += fixed_bytes
    for one in read(value):
        if one is not None:
            size += getsizeof(one) if type(one) in _FLAT else memory_bytes(one)
    return size


def _reader_of(kind: type) -> tuple[int, Callable[[object], Any]]:
    """Return the bytes of a class's fixed parts, and a reader of all else (and of the class, twice:
    attrgetter makes a tuple only of two names and more)."""
    fixed_bytes, names = _parts_of(kind, "")
    return fixed_bytes, attrgetter("__class__", "__class__", *names)


def _parts_of(kind: type, prefix: str) -> tuple[int, list[str]]:
    fixed_bytes, names = 0, list[str]()
    for name, field in getattr(kind, "__dataclass_fields__", {}).items():
        if is_dataclass(field.type) and isinstance(field.type, type):
            within_bytes, within = _parts_of(field.type, f"{prefix}{name}.")
            fixed_bytes += field.type.__basicsize__ + _HEADER_BYTES + within_bytes
            names += within
        elif set(get_args(field.type) or [field.type]) <= _NUMBERS:
            fixed_bytes += _NUMBER_BYTES
        else:
            names.append(prefix + name)
    return fixed_bytes, names


class Budget:
    """Bytes that all exchanges may keep together; `left` of `bytes_max` can still be taken. `short` is called
    for each body that finds no room."""

    __slots__ = ("_short", "left")

    def __init__(self, bytes_max: int, short: Callable[[], None]) -> None:
        self.left = bytes_max
        self._short = short

    def take(self, n: int) -> bool:
        if n > self.left:
            self._short()
            return False
        self.left -= n
        return True

    def give(self, n: int) -> None:
        self.left += n


class Share:
    """What one exchange has taken of a budget; without a budget there is always room."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, n: int) -> bool:
        if self._budget is not None and not self._budget.take(n):
            return False
        self._taken += n
        return True

    def give(self, n: int) -> None:
        if self._budget is not None:
            self._budget.give(n)
        self._taken -= n

    def close(self) -> None:
        """Gives back what is left: the exchange is over. A second call does nothing."""
        self.give(self._taken)
