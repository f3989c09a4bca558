"""Options of the capture (`[capture]`), with the descriptions that `--help` and the reference show.

`config.py` reads the options. They set place, privacy level and limits for the meter's recorder, and
the redaction rules also for `llmtap convert`. `redact_url` hides credentials in the URL of a place.
"""

import difflib
import re
import secrets
from hashlib import blake2b
from typing import Annotated, Final, Literal
from urllib.parse import parse_qsl, urlencode

from msgspec import Struct

from llmtap.errors import ConfigError
from llmtap.options.fields import opt
from llmtap.units import Bytes, Duration

LEVELS: Final = ("none", "coarse", "shape", "full")
"""Privacy levels, from the one that stores least to the one that stores most."""
PATTERN_PREFIX: Final = "re:"
"""Prefix of a rule in `redact` which shows that the rest is the operator's own regular expression."""
_PATTERN_HINT: Final = "write re: and a regular expression of Python, such as re:[0-9]{8}"
FLUSH_NS_MAX: Final = 10_000_000_000
"""Maximum of `flush`: with a longer interval, a meter that is killed would lose too many rows."""
PAIR_KEY_CHARS_MIN: Final = 16
_RULES: Final = ("email", "card", "phone", "key")
PUBLIC_URL_FIELDS: Final = frozenset(
    ("region", "scheme", "endpoint_override", "project_id", "retry_limit_seconds")
)
"""Names of URL query fields whose values are not secret."""
_MIB: Final = 1 << 20
_S: Final = 1_000_000_000


class CaptureOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the table `[capture]`. The constructor raises ConfigError for invalid values."""

    to: Annotated[
        str | None, opt("Folder or URL (s3://bucket/prefix) for Parquet files; none: no capture.")
    ] = None
    level: Annotated[
        Literal["none", "coarse", "shape", "full"],
        opt(
            "Privacy level; `none`: no text and no hashes; `shape`: salted "
            "hashes of prompt blocks; `coarse`: the same with padded sizes and coarse times; `full`: also "
            "bodies of full_tenants."
        ),
    ] = "shape"
    full_tenants: Annotated[
        tuple[str, ...],
        opt("Tenants (patterns with * and ?) whose redacted bodies are stored at the level `full`."),
    ] = ()
    full_share: Annotated[
        float,
        opt(
            "Fraction of the conversations of full_tenants whose "
            "bodies are stored; always complete conversations.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    redact: Annotated[
        tuple[str, ...],
        opt("Redaction rules for bodies: email, card, phone, key, or re:PATTERN for a regular expression."),
    ] = _RULES
    session_headers: Annotated[
        tuple[str, ...], opt("Header fields with the conversation ID; the first one present is used.")
    ] = (
        "x-dynamo-session-id",
        "x-claude-code-agent-id",
        "x-claude-code-session-id",
        "thread-id",
        "x-session-id",
        "x-conversation-id",
    )
    parent_headers: Annotated[
        tuple[str, ...],
        opt(
            "Header fields with the ID of the conversation that started this one, as subagents "
            "send them; the first one present is used."
        ),
    ] = (
        "x-dynamo-parent-session-id",
        "x-claude-code-parent-agent-id",
        "x-claude-code-session-id",
        "x-codex-parent-thread-id",
        "x-parent-session-id",
    )
    session_fields: Annotated[
        tuple[str, ...],
        opt("Body fields with the conversation ID, as paths; used if no header field is present."),
    ] = ("session_id", "conversation", "conversation.id", "metadata.session_id", "metadata.conversation_id")
    pair_key: Annotated[
        str | None,
        opt(
            "Secret text of at least 16 characters that the captures on both sides of a gateway "
            "share, so that `llmtap report --pair` can compare them: it is the key of the hashes (default: a "
            "random key for each capture), and lengths and hashes of answers are stored, too.",
            secret=True,
        ),
    ] = None
    block_tokens: Annotated[
        int, opt("Tokens per hashed block, if meter.tokenizer is set.", ge=1, le=65_536)
    ] = 512
    block_bytes: Annotated[
        Bytes, opt("Bytes per hashed block, if meter.tokenizer is not set.", at_least=16)
    ] = Bytes(2048)
    spool: Annotated[
        str | None,
        opt(
            "Local folder for exchanges that are not yet in a Parquet file "
            "(default: .spool in the capture folder; for a URL: "
            "~/.local/state/llmtap/spool-..., see $XDG_STATE_HOME)."
        ),
    ] = None
    flush: Annotated[
        Duration,
        opt(
            "Maximum time until an exchange is written to the spool, at most 10 s.",
            at_least=_S // 1_000,
            at_most=FLUSH_NS_MAX,
            hint="a crash loses exchanges since the last flush; for fewer files, set capture.rotate_every",
        ),
    ] = Duration(_S // 2)
    fsync: Annotated[
        Literal["batch", "rotate", "never"],
        opt(
            "When to sync the spool to disk: after every batch, after "
            "every file, or never (left to the operating system)."
        ),
    ] = "batch"
    rotate_bytes: Annotated[
        Bytes, opt("Spool size at which it is converted to a Parquet file.", at_least=64 << 10)
    ] = Bytes(64 * _MIB)
    rotate_every: Annotated[
        Duration, opt("Spool age at which it is converted to a Parquet file.", at_least=_S)
    ] = Duration(300 * _S)
    total_bytes: Annotated[Bytes, opt("Maximum total size of the spool and local Parquet files.")] = Bytes(
        10 * 1024 * _MIB
    )
    when_full: Annotated[
        Literal["oldest", "pause"],
        opt("Action at total_bytes: delete the oldest local files, or keep them and pause the capture."),
    ] = "pause"
    memory_bytes: Annotated[
        Bytes,
        opt(
            "Maximum size of the write queue in the meter's memory; "
            "exchanges above it are dropped and counted.",
            at_least=_MIB,
        ),
    ] = Bytes(64 * _MIB)

    def __post_init__(self) -> None:
        if self.full_tenants and self.level != "full":
            raise ConfigError(
                "capture.full_tenants",
                f"names tenants, but capture.level is {self.level}",
                'set capture.level = "full", or leave out capture.full_tenants',
            )
        if self.level == "full" and not self.full_tenants:
            raise ConfigError(
                "capture.full_tenants",
                "is empty, but capture.level is full, which stores the bodies of these tenants only",
                'name the tenants who agreed, or ["*"] for all tenants',
            )
        if self.pair_key is not None:
            self._check_pair_key(self.pair_key)
        for i, rule in enumerate(self.redact):
            _check_rule(f"capture.redact[{i}]", rule)
        if self.to is not None and not self.to.strip():
            raise ConfigError(
                "capture.to", "is empty", "set capture.to to a folder or a URL, or leave it out"
            )
        if self.total_bytes < 2 * self.rotate_bytes:
            raise ConfigError(
                "capture.total_bytes",
                f"is {self.total_bytes:,}, less than twice capture.rotate_bytes ({self.rotate_bytes:,})",
                "increase capture.total_bytes, or reduce capture.rotate_bytes",
            )

    def _check_pair_key(self, key: str) -> None:
        if len(key) < PAIR_KEY_CHARS_MIN:
            raise ConfigError(
                "capture.pair_key",
                f"must have at least {PAIR_KEY_CHARS_MIN} characters, got {len(key)}",
                "use a random text (openssl rand -hex 16), the same on both sides of the gateway",
            )
        if self.level in ("none", "coarse"):
            raise ConfigError(
                "capture.pair_key",
                f"has no effect if capture.level is {self.level}: pairs need hashes and exact token times",
                'set capture.level = "shape", or leave out capture.pair_key',
            )


def _check_rule(place: str, rule: str) -> None:
    """Raise ConfigError for a rule that is neither a known name nor `re:PATTERN`. Another text is not used as
    a pattern, because a misspelt name would then redact nothing."""
    if rule in _RULES:
        return
    if not rule.startswith(PATTERN_PREFIX):
        near = difflib.get_close_matches(rule.lower(), _RULES, 1, 0.5)
        raise ConfigError(
            place,
            f"expected one of {', '.join(_RULES)}, got {rule!r}",
            f"did you mean {near[0]!r}?"
            if near
            else f"for a regular expression, write {PATTERN_PREFIX + rule!r}",
        )
    pattern = rule.removeprefix(PATTERN_PREFIX)
    if not pattern:
        raise ConfigError(
            place,
            f"{rule!r} has no regular expression after {PATTERN_PREFIX!r}",
            _PATTERN_HINT,
        )
    try:
        re.compile(pattern)
    except re.error as exc:
        raise ConfigError(
            place, f"{pattern!r} is not a valid regular expression: {exc}", _PATTERN_HINT
        ) from None


def salt_of(pair_key: str | None) -> bytes:
    """Return the key with which a capture hashes texts: derived from `pair_key`, or random without it."""
    if pair_key is None:
        return secrets.token_bytes(32)
    return blake2b(pair_key.encode(), digest_size=32, person=b"llmtap pair key").digest()


def key_id_of(pair_key: str | None) -> str:
    """Return the public id of a `pair_key`: captures with one id have comparable hashes. Empty if None."""
    if pair_key is None:
        return ""
    return blake2b(pair_key.encode(), digest_size=6, person=b"llmtap key id").hexdigest()


def redact_url(url: str) -> str:
    """Return the URL without user, password (up to the last @) and possibly secret query fields."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    rest, _, query = rest.partition("?")
    if "@" in rest:
        rest = "***@" + rest.rpartition("@")[2]
    if not query:
        return f"{scheme}://{rest}"
    fields = [
        (name, _without_user(value) if name in PUBLIC_URL_FIELDS else "***")
        for name, value in parse_qsl(query, keep_blank_values=True)
    ]
    return f"{scheme}://{rest}?{urlencode(fields, safe='*/:@')}"


def _without_user(value: str) -> str:
    """Return a URL with its user name and password replaced."""
    return re.sub(r"[^/]*@", "***@", value)
