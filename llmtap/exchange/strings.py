"""Strings that clients and upstreams choose: their `Bound`, and tests for names, words, paths and keys.

Any of these strings can be a text: a gateway can put a sentence into its finish reason, and a client into the
name of its model. No text must be shown or exported, or stored below the capture level `full`. So a string is
kept only if it has the form of an identifier. `clean_name` replaces any other name by `*`, and `clean_word`
any other reason, code or category by `other`.

Names and words are searched for keys (API keys and other secrets) before they are cut at their bound. The
search includes KEY_CHARS characters after the bound, so that it sees a key at the bound as a whole. Tenants
and captured texts are only cut.

`clean_path` keeps a segment of a path only if it looks like words: API words, versions, names of models. It
replaces any other segment by `*`. Plain letters stay (`/pass/swordfish/`), unless the previous segment shows
that they are a key (`/key/swordfish/`). A name or a word with a key (`holds_key`) is replaced as a whole.
KEY_PATTERN has the forms of keys that their issuers publish for secret scanning. The redaction of captures
uses it, too.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

PATH_CHARS_MAX: Final = 256
_SEGMENT_CHARS_MAX: Final = 80
"""Maximum length of a path segment that is kept. The names of models that are in use have up to 48
characters."""
NAME_CHARS_MAX: Final = 256
KEY_CHARS: Final = 320
"""Number of characters that is sufficient to recognise a key: a JWT needs 308, most keys about 20."""
WORD_CHARS_MAX: Final = 64
"""Maximum length of a reason, a code or a category that programs write."""
_DECODINGS_MAX: Final = 4

KEY_PATTERN: Final = (
    r"(?a:"
    r"(?:sk|pk|rk|ak|csk|gsk|ssk)[-_](?=[\w-]{8})(?=[a-z_-]{0,64}[A-Z0-9]|[\w-]{20})[\w-]+"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|gl[a-z]{2,5}-[\w-]{16,}"
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|whsec_[\w+/=-]{16,}|SK[0-9a-f]{32}|key-[0-9a-f]{32}"
    r"|(?:hf|npm|r8|tgp|fw|nvapi|xai|pplx|pypi|dop_v1|lin_api|shpat|lsv2|tvly|pcsk|e2b|ntn|sbp|glsa|dckr_pat)"
    r"[-_](?=[a-zA-Z_-]{0,64}[0-9])[\w-]{16,}|hf_[A-Za-z]{34}(?!\w)"
    r"|SG\.[\w-]{16,64}\.[\w-]{16,}|hvs\.[\w-]{20,}|dapi[0-9a-f]{32}|(?:PMAK|NRAK)-[\w-]{20,}|ATATT3[\w=-]{20,}"
    r"|eyJ[\w-]{8,300}\.[\w-]{4}[\w.-]*(?<!\.)"
    r")"
)
"""Keys of OpenAI, Anthropic, Stripe, Groq, Cerebras, GitHub, GitLab, AWS, Google, Slack, Twilio, Mailgun,
Hugging Face, npm, Replicate, Together, Fireworks, NVIDIA, xAI, Perplexity, PyPI, DigitalOcean, Linear,
Shopify, LangSmith, Tavily, Pinecone, E2B, Notion, Supabase, Grafana, Docker, SendGrid, Vault, Databricks,
Postman, New Relic, Atlassian; JWT. Only the end of each form has no length limit, so that the search takes
linear time. Possessive quantifiers would have the same effect, but `re` of Python 3.11.0 to 3.11.4 matches
them wrongly."""

_keys_in = re.compile(rf"(?<![A-Za-z0-9]){KEY_PATTERN}")
_key_in = _keys_in.search
# After a letter or digit, `sk-` can be the end of a word (`task-`), so fewer forms count as keys there.
_key_after_letters = re.compile(
    r"(?a:(?:[spr]k-(?:proj-|live_|test_|or-v1-|ant-[a-z0-9]{1,16}-)?(?=[A-Za-z_]{0,64}[0-9])\w{20,})"
    r"|gh[pousr]_\w{30,}|github_pat_\w{20,}|AIza[\w-]{30,})"
).search
_begins_as_names_do = re.compile(
    r"(?:sk|pk|rk|ak|csk|gsk|ssk|hf|npm|r8|tgp|fw|nvapi|xai|pplx|pypi|e2b|gl(?!pat-)[a-z]{2,5})[-_]"
).match
"""Matches a beginning that keys and names have in common: `hf-mistral-7b-instruct-v0.2`,
`global-llama-3-70b-instruct`, `gemma-2-sk-9b-it-v2` (for Slovak)."""
_is_random = re.compile(r"[A-Za-z0-9]{16}|(?=[A-Za-z]*[0-9])[A-Za-z0-9]{10}").search
_uuid_in = re.compile(r"[0-9A-Fa-f]{8}-?(?:[0-9A-Fa-f]{4}-?){3}[0-9A-Fa-f]{12}").search
_is_plain = re.compile(r"[\w.~:@+,()-]*", re.ASCII).fullmatch
_pieces_of = re.compile(r"[A-Za-z0-9]+").findall
_is_hex = re.compile(r"(?=[0-9]*[a-fA-F])(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}").fullmatch
_edges_of = re.compile(r"[0-9](?=[A-Za-z])|[A-Za-z](?=[0-9])").findall
_humps_of = re.compile(r"[a-z](?=[A-Z])").findall
_is_snapshot = re.compile(r"[^@]+@(?:[0-9]{1,8}|latest|default)(?::[A-Za-z]+)?").fullmatch
_announces_key = re.compile(
    r"(?i)(?:(?:api|access|auth|secret|private|session)?[-_]?)"
    r"(?:keys?|tokens?|secrets?|passwords?|auth|sessions?)|users?"
).fullmatch
_NEVER_KEYS: Final = frozenset(
    {"v1", "v2", "v3", "api", "openai", "chat", "completions", "messages", "models"}
)
"""Segments that are shown even after a segment such as `keys` or `users`."""


def looks_secret(word: str) -> bool:
    """Return whether a name without spaces looks like a key or an id, not like words and versions."""
    if _key_in(word) or _uuid_in(word):
        return True
    edges = 0
    for piece in _pieces_of(word):
        size, turns = len(piece), len(_edges_of(piece))
        edges += turns
        if _is_hex(piece) or (piece.isdigit() and size > 8):
            # A number of more than 8 digits is an id; one of 8 digits can be a date.
            return True
        if size >= 12 and (turns >= 4 or len(_humps_of(piece)) >= 5):
            return True
        if (
            size >= 20
            and turns
            and not piece.islower()
            and not piece.isupper()
            and len(_humps_of(piece)) >= 3
        ):
            return True
        if size > 32:
            return True
    # Keys in groups, such as a1b2-c3d4-e5f6-a7b8, change between letters and digits at least 8 times.
    # `Qwen2.5-Coder-32B-Instruct-AWQ-w4a16` has 5 such changes.
    return edges >= 8


_IDENTIFIER: Final = re.compile(r"[\w.~:/@+,;()\[\]{}=|#*$!&-]*", re.ASCII)
"""Characters of names of models, ids and media types. Texts have other characters: blanks, quotes, or letters
of other scripts."""
_EMAIL: Final = re.compile(r"[\w.+-]@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}", re.ASCII)
_WORD: Final = re.compile(rf"[A-Za-z0-9_.:/\-]{{1,{WORD_CHARS_MAX}}}")


def is_word(text: str) -> bool:
    """Return whether a text is a word as programs write for reasons, codes and categories: at most
    WORD_CHARS_MAX characters, and no key in it."""
    return _WORD.fullmatch(text) is not None and not holds_key(text)


def clean_word(text: str, chars_max: int = WORD_CHARS_MAX) -> str:
    """Return a word, or two with a colon (`content_filter: PROHIBITED_CONTENT` of Gemini); "other" for any
    other text."""
    return text if len(text) <= chars_max and is_word(text.replace(": ", ":", 1)) else "other"


def clean_name(name: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """Return the first `chars_max` characters of a name, or "*" if it is not an identifier: a text, an e-mail
    address, or a key.

    The check includes KEY_CHARS characters after the cut, because a key can cross it.
    """
    name = name[: chars_max + KEY_CHARS]
    is_name = _IDENTIFIER.fullmatch(name) and not _EMAIL.search(name) and not holds_key(name)
    return name[:chars_max] if is_name else "*"


def clean_composed(text: str, chars_max: int) -> str:
    """Return the first `chars_max` characters of words that llmtap joined; "*" if they contain a key."""
    text = text[: chars_max + KEY_CHARS]
    return "*" if holds_key(text) else text[:chars_max]


@lru_cache(maxsize=512)
def holds_key(name: str) -> bool:
    """Return whether the name of a model or tenant contains a key, by the form of a key's issuer or by a long
    run of letters and digits. The caller must cut a long `name`, because results are cached."""
    if _key_after_letters(name):
        return True
    keys = (key[0] for key in _keys_in.finditer(name))
    return any(not _begins_as_names_do(key) or _is_random(key) for key in keys)


def clean_path(path: str) -> str:
    """Return a path in which each segment that does not look like words is replaced by `*`."""
    return _clean_known(path) if len(path) <= PATH_CHARS_MAX else _clean_path(path)


def _clean_path(path: str) -> str:
    """Return a path with `*` for each segment that is possibly a key, an id or a name."""
    segments: list[str] = []
    size = 0
    announced = False
    for segment in path.split("/"):
        text = _decode_segment(segment)
        is_value = announced and segment and segment.lower() not in _NEVER_KEYS
        shown = "*" if is_value or not _is_shown(segment, text) else segment
        announced = text is not None and bool(_announces_key(text))
        size += len(shown) + 1
        if size > PATH_CHARS_MAX - 2:
            segments.append("*")
            break
        segments.append(shown)
    return "/".join(segments)


# Cache the results: clients request the same few paths again and again, and cleaning a path takes 60 us.
_clean_known = lru_cache(maxsize=512)(_clean_path)


def _is_shown(segment: str, text: str | None) -> bool:
    """Return whether a segment is kept; `text`: the segment without percent-encoding."""
    if segment == "*":
        return True
    if text is None or len(segment) > _SEGMENT_CHARS_MAX:
        return False
    # An encoded slash joins the owner's and the model's name, so check both: meta-llama%2FLlama-3.1-8B.
    return all(_is_name(name) for name in text.split("/"))


def _is_name(name: str) -> bool:
    """Return whether a text looks like the name of a model, and not like a secret or an id."""
    if not _is_plain(name):
        return False
    # Numbers of more than 4 digits are ids; shorter ones are versions, years and ports.
    if name.isdigit() and len(name) > 4:
        return False
    at = name.find("@", 1)  # search from index 1: Cloudflare's models begin with @
    if at > 0 and not _is_snapshot(name):
        return False
    return not looks_secret(name)


def _decode_segment(segment: str) -> str | None:
    """Return text without percent-encoding, applied any number of times; None if decoding does not end."""
    for _ in range(_DECODINGS_MAX):
        if "%" not in segment:
            return segment
        segment = unquote(segment, errors="replace")
    return None if "%" in segment else segment


def _cut_text(text: str, chars_max: int) -> str:
    return text[:chars_max]


def _cut_path(path: str, chars_max: int) -> str:
    return clean_path(path)[:chars_max]


class Bound(NamedTuple):
    """Limits of a field, or of each string in a list or an object."""

    chars: int
    """Maximum number of characters."""
    chosen_by: str
    """Source of the text: `client`, `upstream`, `operator` or `llmtap`."""
    fit: Callable[[str, int], str] = _cut_text
    """Function that returns a text within a number of characters: cut, or replaced if it must not be kept."""
    members: int = 1
    """Maximum number of members, including those of nested lists and objects."""


PATH: Final = Bound(PATH_CHARS_MAX, "client", _cut_path)
