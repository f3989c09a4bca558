"""Redaction of e-mail addresses, cards, phone numbers, keys and an operator's own patterns.

A `Redactor` takes a text or a JSON body, and returns it with a mark in place of each hit. The meter's
recorder and `llmtap convert` use it. Only the level `full` stores text, redacted by the rules in
`capture.redact`; without rules, only media is removed. Rules:

- `email`: name@host.tld. Not: hosts without a dot, addresses spelled out ("ann at example dot com").
- `card`: 13 to 19 digits, in groups or not, that satisfy Luhn's check and begin like a card (not with 0, 1 or
  7). Between groups: up to three blanks, tabs, line ends, dots or hyphens. Not: cards with a digit missing,
  expiry dates and security codes.
- `phone`: +49 30 123456 and other international forms; (415) 555-2671, 415-555-2671, 415.555.2671; national
  numbers that begin with 0 and have groups; other numbers after a word such as "call" or "tel". Not: numbers
  without groups and without + or such a word, and groups separated by spaces without 0 or such a word,
  because they are as likely quantities.
- `key`: keys in the forms that issuers publish (exchange/strings.py), private keys in PEM, Authorization and
  Cookie fields, credentials in URLs, values assigned to a name such as password or api_key, and members of a
  JSON body with such a name. Not: a secret that has neither a known form nor such a name; a plain word after
  "password: ", which is as often prose.

Media in base64 of 4,096 characters or more becomes `[media]`. The time is linear in the length of the text,
because each repetition in a pattern is bounded, or the part after it cannot match inside the repetition. An
operator's own pattern (`re:PATTERN`) is not checked for this. No quantifier is possessive, because `re` of
Python 3.11.0 to 3.11.4 matches possessive groups wrongly. A rule replaces each hit before it searches the
next, so the memory does not grow with the number of hits.

Source: ITU-T E.164 (at most 15 digits), ISO/IEC 7812-1 (card numbers, Luhn), RFC 7468 (PEM), RFC 2397 (data
URLs).
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from heapq import merge
from io import StringIO
from typing import Any, Final

import msgspec

from llmtap.capture.options import PATTERN_PREFIX
from llmtap.exchange.strings import KEY_PATTERN
from llmtap.json_types import JsonObject
from llmtap.protocol.json_memory import bounded_decoder

BODY_BYTES_MAX: Final = 8 << 20
"""Maximum size of a JSON body that is redacted; equal to the part of a request that the observer keeps."""
_MEDIA_CHARS_MIN: Final = 4096
"""Minimum length of base64 text that is removed as media. A shorter one is an icon or a short text."""

_CHARS_MIN: Final = 6
"""Length of the shortest possible hit of a built-in rule, `a@b.cd`. Shorter texts are not searched."""

_decode: Final = bounded_decoder()

_Span = tuple[int, int]
"""Start and end of a hit in the text."""
_Rule = Callable[[str], tuple[str, int]]
"""Function that redacts a text, and returns it with the number of hits."""


class Redactor:
    """Redacts text by rules. A rule is a name in BUILT_IN, or `re:` and a regular expression."""

    __slots__ = ("_chars_min", "_redacts_keys", "_rules")

    def __init__(self, rules: tuple[str, ...]) -> None:
        own_rules = [
            _make_own_rule(re.compile(rule.removeprefix(PATTERN_PREFIX)))
            for rule in rules
            if rule not in BUILT_IN
        ]
        # The operator's own patterns come first, because they are the most specific. The rule `key` is next,
        # because a key can contain digits that look like a phone number.
        self._rules = [*own_rules, *(rule for name, rule in BUILT_IN.items() if name in rules)]
        """Functions that replace what they find; each returns the text and the number of hits."""
        self._chars_min = 0 if own_rules else _CHARS_MIN
        """Length below which a text cannot match a built-in rule, so is not searched."""
        self._redacts_keys = "key" in rules
        """Whether keys and passwords are redacted, so also the values of fields such as `api_key`."""

    def text(self, text: str) -> tuple[str, int]:
        """Return the text with a mark in place of each hit, and the number of hits."""
        if len(text) < self._chars_min:
            return text, 0
        text, hits = _redact_media(text)
        for rule in self._rules:
            text, more = rule(text)
            hits += more
        return text, hits

    def body(self, body: bytes) -> tuple[str | None, int]:
        """Redact every string and name of a JSON body, at any depth. Return the body and the number of hits;
        None and 0 if the body is too large or not JSON."""
        if len(body) > BODY_BYTES_MAX:
            return None, 0
        redactor = _JsonRedactor(self.text, secret_names=self._redacts_keys)
        try:
            return msgspec.json.encode(redactor.redact(_decode(body))).decode(), redactor.hits
        except (ValueError, OverflowError, RecursionError):
            return None, 0


class _JsonRedactor:
    """Redactor of all strings and names in one JSON value, with a count of the hits."""

    __slots__ = ("_redact_secret_names", "_rule", "hits")

    def __init__(self, rule: _Rule, *, secret_names: bool) -> None:
        """`secret_names`: redact also the values of members whose names show that they are secret."""
        self._rule = rule
        """Redacts a text; returns it with the number of hits."""
        self._redact_secret_names = secret_names
        """Whether to redact values whose name says that they are secret."""
        self.hits = 0
        """Number of texts that were replaced."""

    def redact(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._redact_text(value)
        if isinstance(value, dict):
            return self._redact_object(value)
        if isinstance(value, list):
            return [self.redact(one) for one in value]
        # A card or phone number can be a JSON number, so search the digits of large numbers.
        if isinstance(value, int) and value > 10**11:
            shown = self._redact_text(str(value))
            return value if shown == str(value) else shown
        return value

    def _redact_object(self, value: JsonObject, *, schema: bool = False) -> JsonObject:
        out: JsonObject = {}
        # In objects such as {"name": "Authorization", "value": "..."}, `name` shows that `value` is secret.
        value_is_secret = self._redact_secret_names and any(
            _is_secret(value.get(key)) for key in ("name", "key")
        )
        for name, inner in value.items():
            shown = self._redact_text(name)
            if shown in out:  # Redacted names can be equal, but keys of an object must differ.
                shown = f"{shown}#{len(out)}"
            if self._redact_secret_names and (_is_secret(name) or (value_is_secret and name == "value")):
                out[shown] = self._secret_mark(inner, schema=schema)
            elif name == "properties" and isinstance(inner, dict):
                out[shown] = self._redact_object(inner, schema=True)
            else:
                out[shown] = self.redact(inner)
        return out

    def _secret_mark(self, value: Any, *, schema: bool) -> Any:
        """Return the mark that replaces a value whose name shows that it is secret.

        `schema`: the value is a member of `properties`. If it is an object, it is the JSON schema of a tool's
        parameter and not a secret, so only its members with values, such as `default`, are replaced.
        """
        if value is None or isinstance(value, bool) or value in ("", [], {}, "[key]"):
            return value
        if schema and isinstance(value, dict):
            return {
                self._redact_text(name): self.redact(inner)
                if name in _SCHEMA_WORDS
                else self._secret_mark(inner, schema=False)
                for name, inner in value.items()
            }
        self.hits += 1
        return "[key]"

    def _redact_text(self, text: str) -> str:
        text, hits = self._rule(text)
        self.hits += hits
        return text


_SECRET_NAMES: Final = frozenset(
    {
        "apikey",
        "authorization",
        "proxyauthorization",
        "auth",
        "password",
        "passwd",
        "pwd",
        "passphrase",
        "token",
        "secret",
        "credential",
        "credentials",
        "cookie",
        "cookies",
        "setcookie",
        "bearer",
        "jwt",
    }
)
_SECRET_ENDS: Final = (
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "password",
    "passphrase",
    "secret",
    "credentials",
    "accesstoken",
    "refreshtoken",
    "idtoken",
    "authtoken",
    "sessiontoken",
    "bearertoken",
    "securitytoken",
    "secretaccesskey",
    "authorization",
    "subscriptionkey",
    "signingkey",
    "encryptionkey",
)
_SCHEMA_WORDS: Final = frozenset({"type", "description", "title", "format", "minLength", "maxLength", "$ref"})


def _is_secret(name: Any) -> bool:
    """Return whether the name of a JSON member shows that its value is secret."""
    if not isinstance(name, str) or len(name) > 64:
        return False
    bare = name.lower().replace("-", "").replace("_", "").replace(".", "").replace(" ", "")
    return bare in _SECRET_NAMES or bare.endswith(_SECRET_ENDS)


# ---------------------------------------------------------------- media (files as base64 or data: URLs)

_data_url = re.compile(
    r"data:[\w.+-]{1,64}/[\w.+-]{1,64}(?:;[\w.+=-]{1,64}){0,4};base64,"
    rf"[A-Za-z0-9+/=_%-]{{{_MEDIA_CHARS_MIN},}}"
).subn
_base64 = re.compile(r"(?=[a-z0-9+/_-]*[A-Z])(?=[A-Z0-9+/_-]*[a-z])[A-Za-z0-9+/_-]+={0,2}").fullmatch


def _redact_media(text: str) -> tuple[str, int]:
    if len(text) < _MEDIA_CHARS_MIN:
        return text, 0
    # `_base64` requires upper-case and lower-case letters, so that it does not match the prompts of load
    # generators that repeat one character.
    return ("[media]", 1) if _base64(text) else _data_url("[media]", text)


# ---------------------------------------------------------------- secrets (API keys, tokens, passwords)

_quote = r"""\\{0,3}["']"""
_bare = r"""[^\s"'\\,;&<>(){}]"""
_marks = r"(?!\[(?:key|email|card|phone|redacted|media)\])"
_authorization = (
    rf"(?i)authorization(?:{_quote})?\s{{0,3}}[:=]\s{{0,3}}(?:{_quote})?"
    r"(?:(?:bearer|basic|token|apikey|digest|negotiate|aws4-hmac-sha256)\s{1,3})?"
    rf"({_marks}(?!(?:bearer|basic)\b){_bare}{{4,}})"
)
_bearer = rf"(?i)\bbearer\s{{1,3}}({_marks}(?=[\w.~+/=-]{{0,64}}[0-9])[\w.~+/=-]{{12,}})"
_in_url = r"(?<=://)([^\s/?#@:\[\]]{0,128}:[^\s/?#@]{1,256})(?=@)"
_in_query = (
    r"(?i)[?&](?:[a-z]{0,12}[_-]?(?:key|token|secret|password)|sig|signature|auth)="
    rf"({_marks}[^\s&#\"'<>]{{4,}})"
)
_pem_begin = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----").finditer
_pem_end = re.compile(r"-----END [A-Z0-9 ]{0,60}-----").match
_cookie = re.compile(
    rf"(?i)\b(?:set-)?cookie(?:{_quote})?\s{{0,3}}[:=]\s{{0,3}}(?:{_quote})?"
    r"""(?!\[key\])([^\s=;,"']{1,128}=[^\s;"'\\]+)"""
).finditer
_cookie_more = re.compile(r""";\s{0,3}[^\s;"'\\]+""").match


def _group_finder(pattern: str) -> Callable[[str], Iterator[_Span]]:
    """Return a function that yields the spans of a pattern's first group in a text."""
    find = re.compile(pattern).finditer
    return lambda text: (m.span(1) for m in find(text))


def _pem_spans(text: str) -> Iterator[_Span]:
    """Yield the spans of private keys in PEM. A key whose end line is missing extends to the text's end."""
    end = 0
    for m in _pem_begin(text):
        if m.start() < end:
            continue
        end = text.find("-----", m.end())
        if end < 0:
            end = len(text)
        elif closing := _pem_end(text, end):
            end = closing.end()
        yield m.start(), end


def _cookie_spans(text: str) -> Iterator[_Span]:
    """Yield the spans of the values of Cookie fields, with all cookies of a field in one span."""
    end = 0
    for m in _cookie(text):
        if m.start() < end:
            continue
        end = m.end()
        while more := _cookie_more(text, end):
            end = more.end()
        yield m.start(1), end


_KEYS: Final = (
    ("private key", _pem_spans),
    ("authorization", _group_finder(_authorization)),
    ("bearer", _group_finder(_bearer)),
    ("cookie", _cookie_spans),
    ("://", _group_finder(_in_url)),
    ("=", _group_finder(_in_query)),
    ("", _group_finder(rf"(?<![A-Za-z0-9])({KEY_PATTERN})")),
)
"""Finders of secrets, each with a substring in lower case. Texts without it are not searched, for speed."""
_assigned = re.compile(
    r"(?i)(pass(?:word|wd|phrase|code)|pwd|secret|(?:api|access|secret|private|auth|account)[_-]?key"
    rf"|token|credentials?)((?:{_quote})?)(\s{{0,3}}(?:=>|:=|[:=]|\bis\b)\s{{0,3}})"
    rf"(?:({_quote})([^\"'\\\n]{{3,1024}})|({_bare}{{4,}}))"
)
_ASSIGNED_NEEDLES: Final = ("pass", "pwd", "secret", "key", "token", "credential")
_is_model_token = re.compile(
    r"(?i)(?:max|min|num|eos|bos|pad|unk|sep|cls|mask|stop|next|new|special|image|first|last|per)[_ -]?$"
).search
"""Matches a word before "token" which shows that this is a token of a model and no secret: max_token."""
_no_value = re.compile(
    r"(?i)(?:none|null|true|false|undefined|\[(?:key|email|card|phone|redacted|media)\])\W*"
)
_digit_or_sign = re.compile(r"[0-9!@#$%^*+/]").search


def _redact_keys(text: str) -> tuple[str, int]:
    """Replace API keys and the values assigned to secret names. Return the text and the number of them."""
    hits = 0
    lower = text.lower()
    for needle, find in _KEYS:
        if needle in lower:
            text, more = _replace_spans(text, "[key]", find(text))
            hits += more
    if not any(name in lower for name in _ASSIGNED_NEEDLES):
        return text, hits
    spans = (m.span(5 if m[5] else 6) for m in _assigned.finditer(text) if _is_assignment(m))
    text, more = _replace_spans(text, "[key]", spans)
    return text, hits + more


def _is_assignment(m: "re.Match[str]") -> bool:
    """Return whether the value in a match of `_assigned` is a secret, and not prose or source code."""
    name, _, sign, _, quoted, bare = m.groups()
    if _no_value.fullmatch(quoted or bare):
        return False
    if name.lower() == "token" and _is_model_token(m.string, max(0, m.start() - 9), m.start()):
        return False
    if quoted:
        return True
    if m.string[m.end() : m.end() + 1] == "(" or bare.endswith("[") or bare.startswith(("http", "$")):
        return False  # No secret: a function call, a subscript, a link or a variable.
    if sign in ("=", ":"):
        return True
    # Signs with blanks and the word "is" also occur in prose, so require a value that is not a plain word.
    bare = bare.rstrip(".!?:*`")
    return len(bare) >= 6 and bool(_digit_or_sign(bare))


# ---------------------------------------------------------------- e-mail addresses

# Match only from the start of a name: a search from each of its characters would take quadratic time.
_emails = _group_finder(r"(?<![\w.%+-])([\w.%+-]+@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24})")


def _redact_emails(text: str) -> tuple[str, int]:
    return _replace_spans(text, "[email]", _emails(text)) if "@" in text else (text, 0)


# ---------------------------------------------------------------- payment cards

# Matches the first group of digits of a possible card, if enough digits follow.
_card_begin = re.compile(r"(?<!\d)(?![017])(?=\d(?:[\s.-]{0,3}\d){12})(\d{3,19})(?!\d)").search
_card_more = re.compile(r"[\s.-]{1,3}(\d{1,19})(?!\d)").match
_CARD_DIGITS: Final = range(13, 20)
_NO_CARD: Final = (0, 1, 7)
_VALUES: Final = bytes.maketrans(b"0123456789", bytes(range(10)))
_DOUBLED: Final = bytes.maketrans(b"0123456789", bytes(sum(divmod(2 * digit, 10)) for digit in range(10)))


def _redact_cards(text: str) -> tuple[str, int]:
    return _replace_spans(text, "[card]", _card_spans(text))


def _card_spans(text: str) -> Iterator[_Span]:
    """Yield the spans of cards in groups of digits: `2024-01-15 4111 1111 1111 1111` has a card after a date.

    Each digit is read once. `even` and `odd` are sums of all digits from the first group on, in which Luhn's
    check doubles the digits at even or at odd places. The sums of a card are differences of such sums.
    """
    end = 0
    while m := _card_begin(text, end):
        # For each group with which a card can begin: its offset, the number of digits and both sums before
        # it, and the end of the longest card that begins with it (0: none).
        starts = deque[list[int]]()
        digits = even = odd = 0
        while m:
            group, end = m[1], m.end()
            if len(group) >= 3 and int(group[0]) not in _NO_CARD:
                starts.append([m.start(1), digits, even, odd, 0])
            if not starts:
                break
            first, second = _short_sums(group) if len(group) <= 4 else _luhn_sums(group)
            if digits % 2:
                first, second = second, first
            even, odd, digits = even + first, odd + second, digits + len(group)
            while starts and starts[0][1] <= digits - _CARD_DIGITS.stop:
                begin, _, _, _, card_end = starts.popleft()
                if card_end:
                    yield begin, card_end
            last, total, place = digits - _CARD_DIGITS.start, odd if digits % 2 else even, 2 + digits % 2
            for start in starts:
                if start[1] > last:
                    break
                if not (total - start[place]) % 10:
                    start[4] = end
            m = _card_more(text, end) if starts else None
        yield from ((start[0], start[4]) for start in starts if start[4])


def _luhn_sums(group: str) -> tuple[int, int]:
    """Return two sums of the digits for Luhn's check, which doubles every second digit: one sum with the
    first digit doubled, and one with the second digit doubled."""
    digits = b"%0*d" % (len(group), int(group))  # Write digits of other scripts as ASCII.
    first, second = digits[::2], digits[1::2]
    return (
        sum(first.translate(_DOUBLED)) + sum(second.translate(_VALUES)),
        sum(first.translate(_VALUES)) + sum(second.translate(_DOUBLED)),
    )


_short_sums: Final = lru_cache(maxsize=4_096)(_luhn_sums)


# ---------------------------------------------------------------- telephone numbers

_NORTH_AMERICA: Final = (
    r"[1-9(](?<![\w.-][1-9(])"
    r"(?:(?<=1)[ .-](?:\([2-9]\d{2}\)[ -]?|[2-9]\d{2}[.-])|(?<=\()[2-9]\d{2}\)[ -]?|(?<=[2-9])\d{2}[.-])"
    r"[2-9]\d{2}[ .-]\d{4}(?![\w]|[.-]\d)"
)
_PHONES: Final = (
    ("+", r"\+(?<![\w+.]\+)[1-9](?:[ ./()\u00a0-]{0,3}\d){6,14}(?![\w])", 8),
    ("00", r"00(?<![\w.-]00)[1-9]\d{0,2}(?:[ ./-]{1,3}\d{2,8}){2,5}(?![\w])", 9),
    ("", _NORTH_AMERICA, 10),
    # Area codes in brackets. Four digits in brackets that do not begin with 0 are a year, and do not match.
    ("(", r"\((?<![\w.-]\()(0\d{1,4}|[1-9]\d{1,2})\) ?\d{2,5}[ .-]?\d{2,5}(?:[ .-]\d{2,4})?(?!\w|[.-]\d)", 9),
    # National numbers that begin with 0: 020 7946 0958, 030/1234567, 01 23 45 67 89, 090-1234-5678.
    ("0", r"0(?<![\w./:-]0)[1-9](?:[ .-]\d{2}){4}(?![\w]|[.-]\d)", 10),
    ("0", r"0(?<![\w./:-]0)[1-9]\d{1,4}(?: ?/ ?| )\d{3,8}(?:[ -]\d{2,5}){0,3}(?![\w]|[./:-]\d)", 9),
    ("0", r"0(?<![\w./:-]0)[1-9]\d{0,3}-\d{2,4}-\d{4}(?![\w]|[./:-]\d)", 10),
    # Chinese mobile numbers: 138-1234-5678.
    ("-", r"1(?<![\w./:-]1)[3-9]\d-\d{4}-\d{4}(?![\w]|[./:-]\d)", 11),
)
"""Forms of phone numbers: a substring that a text must contain, the pattern, and the minimum number of digits
of a hit. A pattern begins with a character and checks the text before it by looking back, because `re` is
faster if it can search for a character."""
_PHONE_FINDERS: Final = tuple((needle, re.compile(form).finditer, digits) for needle, form, digits in _PHONES)
_phone_after_word = re.compile(
    r"[PTMCFWSDptmcfwsd\u017f](?<!\w.)(?i:(?<=p)hone|(?<=t)el(?:ephone)?|(?<=m)obile|(?<=c)ell|(?<=f)ax"
    r"|(?<=w)hatsapp|(?<=s)ms|(?<=d)ial|(?<=c)all(?: (?:me|us|him|her|them))?)\b"
    r"(?i:[ .:#-]|\b(?:at|on|is|number|no|nr)\b){0,8}(\(?\d(?:[ ./()-]{0,2}\d){6,14})(?![\w]|[.,]\d)"
).finditer
_seven_digits = re.compile(r"\d(?:[ ./()\u00a0-]{0,3}\d){6}").search
_DIGITS_MAX: Final = 15


def _redact_phones(text: str) -> tuple[str, int]:
    # Digits without separators are a quantity, unless at least 9 of them follow a word such as "call".
    if text.isdigit() or not _seven_digits(text):
        return text, 0
    after_word = (m.span(1) for m in _phone_after_word(text) if len(m[1]) >= 9 or not m[1].isdigit())
    phones = (_phone_spans(text, find, minimum) for needle, find, minimum in _PHONE_FINDERS if needle in text)
    return _replace_spans(text, "[phone]", merge(after_word, *phones))


def _phone_spans(
    text: str, find: Callable[[str], Iterator["re.Match[str]"]], digits_min: int
) -> Iterator[_Span]:
    return (m.span() for m in find(text) if digits_min <= sum(map(str.isdigit, m[0])) <= _DIGITS_MAX)


def _replace_spans(text: str, mark: str, spans: Iterable[_Span]) -> tuple[str, int]:
    """Return the text with a mark in place of each span, and the number of marks. The spans must be sorted by
    their beginnings; overlapping spans get one mark."""
    out, at, hits = None, 0, 0
    for begin, end in spans:
        if begin >= at:
            if out is None:
                out = StringIO(newline="")
            out.write(text[at:begin])
            out.write(mark)
            hits += 1
        at = max(at, end)
    if out is None:
        return text, 0
    out.write(text[at:])
    return out.getvalue(), hits


def _make_own_rule(pattern: "re.Pattern[str]") -> _Rule:
    def rule(text: str) -> tuple[str, int]:
        # Ignore empty matches: a pattern such as `x*` matches at every place.
        return _replace_spans(text, "[redacted]", (m.span() for m in pattern.finditer(text) if m[0]))

    return rule


BUILT_IN: Final[dict[str, _Rule]] = {
    "key": _redact_keys,
    "email": _redact_emails,
    "card": _redact_cards,
    "phone": _redact_phones,
}
