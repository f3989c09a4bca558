"""Determine the tenant (customer or user) of a request, and bound the label values of all exchanges.

`Tenants.identify` applies the operator's rules in order: the first that finds a value names the tenant. A
header field with several different values counts as missing, because gateways differ in the value that they
use. Values come from clients: characters that cannot be shown become `_`, and long values end in `~` and a
hash. Of an API key, only a keyed hash (32 bits of BLAKE2b) leaves this module. `Labels` bounds the number of
tenants, models and series: further names become `other`.
"""

import hmac
import re
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from llmtap.exchange.strings import KEY_CHARS, holds_key
from llmtap.meter.options import TENANT_CHARS_MAX, TenantOptions, TenantRule
from llmtap.protocol.http1 import RequestHead, sole_value

DEFAULT: Final = "default"
OTHER: Final = "other"
UNKNOWN: Final = "unknown"
MODEL_CHARS_MAX: Final = 128
REFUSED_PLACES_MAX: Final = 8
"""Maximum number of names that get a place by a request that a guardrail refused with an error status."""


class Labels:
    """Bounded sets of the tenants, models and arms that metrics name. `reserved` tenants always have a place.

    A name gets a place with its first `trusted` request, one that the gateway accepted. Earlier requests, and
    names for which there is no place, are counted as `other`. `refused` requests, which a guardrail refused
    with an error status, give places to a few names: the gateway possibly did not check their names.
    """

    def __init__(
        self, tenants_max: int, models_max: int, series_max: int, reserved: Iterable[str] = ()
    ) -> None:
        self._tenants = {OTHER, DEFAULT, *reserved}
        self._models = {OTHER}
        self._series: set[tuple[str, str, str]] = set()
        """Tenant, model and arm of each series so far."""
        self._free_refused_places = REFUSED_PLACES_MAX
        """Number of names that refused requests can still add."""
        self._free_tenant_places = tenants_max - (len(self._tenants) - 2)
        """Number of tenants that can still get a series of their own."""
        self._models_max = models_max
        self._series_max = series_max
        self.overflow = {"tenant": 0, "model": 0, "series": 0}
        """By kind of name: how often a name got no place, and was counted as `other`."""

    def tenant(self, name: str, *, trusted: bool = True, refused: bool = False) -> str:
        """Return the label value of a tenant: its name or, if it has no place, `other`."""
        if name in self._tenants:
            return name
        if not trusted and not (refused and self._take_refused_place()):
            return OTHER
        if self._free_tenant_places > 0:
            self._free_tenant_places -= 1
            self._tenants.add(name)
            return name
        self.overflow["tenant"] += 1
        return OTHER

    def fold(
        self,
        tenant: str,
        model: str | None,
        arm: str | None = None,
        *,
        trusted: bool = True,
        refused: bool = False,
    ) -> tuple[str, str, str]:
        """Return the label values (tenant, model, arm) of an exchange. `tenant`: result of `tenant()`."""
        model = UNKNOWN if model is None else _visible_text(model)
        key = (tenant, model, arm or "")
        if key in self._series:
            return key
        if refused and not trusted and model != UNKNOWN:
            trusted = model in self._models or self._take_refused_place()
        if not trusted:
            return tenant, model if model == UNKNOWN else OTHER, key[2]
        return self._give_place((tenant, self.model(model), key[2]))

    def model(self, name: str) -> str:
        """Return the label value of a model: its name or, if it has no place, `other`."""
        if name not in self._models:
            if len(self._models) > self._models_max:
                self.overflow["model"] += 1
                return OTHER
            self._models.add(name)
        return name

    def _take_refused_place(self) -> bool:
        self._free_refused_places -= 1
        return self._free_refused_places >= 0

    def _give_place(self, key: tuple[str, str, str]) -> tuple[str, str, str]:
        """Give a series a place if the limit allows it. Return the label values under which it is counted."""
        if key in self._series or len(self._series) < self._series_max:
            self._series.add(key)
            return key
        # Use the model `other`: a tenant and arm get at most two series above the limit (`other`, `unknown`).
        self.overflow["series"] += 1
        return key[0], OTHER, key[2]


def _visible_text(name: str) -> str:
    if len(name) > MODEL_CHARS_MAX:
        name = name[:MODEL_CHARS_MAX]
    return name if name.isprintable() else "".join(c if c.isprintable() else "_" for c in name)


_TAIL_DIGITS: Final = 8
_CUT_CHARS: Final = TENANT_CHARS_MAX - 1 - _TAIL_DIGITS
_match_own_name: Final = re.compile(
    rf"(?:key-|id-|.{{{_CUT_CHARS}}}~)[0-9a-f]{{{_TAIL_DIGITS}}}", re.DOTALL
).fullmatch
"""Matches names of the forms that this module makes from hashes. If a client sends such a value, it is hashed
too: its requests would otherwise be counted for the owner of a key."""
_KEY_HEADERS: Final = (b"authorization", b"x-api-key", b"api-key")
_MACHINE_ID: Final = Path("/etc/machine-id")

ReadBody = Callable[[], Any]
"""Function that returns the parsed JSON body of a request."""
Finder = Callable[[RequestHead, str, ReadBody], str | None]


class Tenants:
    """Finds the tenant of each request by the rules."""

    def __init__(self, options: TenantOptions, salt: str) -> None:
        self._names = options.names
        """Display names, by value that a rule found."""
        self._salt = blake2b(salt.encode(), digest_size=32).digest()
        self._finders = [self._compile_rule(rule) for rule in options.rules]
        """One function for each rule, in order: returns the tenant of a request, or None."""

    def identify(self, head: RequestHead, path: str, body: ReadBody) -> str:
        """Return the tenant of a request. Never raises."""
        for find in self._finders:
            value = find(head, path, body)
            if value is not None:
                named = self._names.get(value)
                return self._without_key(value) if named is None else named
        return DEFAULT

    def _without_key(self, name: str) -> str:
        """Return a name, or its hash if it contains a key: some clients send their key as the tenant."""
        return self.name_of_key(name.encode()) if holds_key(name) else name

    def hash_of(self, value: bytes) -> str:
        """Return the hash that stands for a secret: 8 hex digits, equal for equal secrets and salts."""
        return blake2b(value, key=self._salt, digest_size=_TAIL_DIGITS // 2).hexdigest()

    def name_of_key(self, key: bytes) -> str:
        """Return the name of an API key: `key-0f1e2d3c`."""
        return f"key-{self.hash_of(key)}"

    def _compile_rule(self, rule: TenantRule) -> Finder:
        find = self._value_finder(rule)
        if rule.name is not None:
            return _named_finder(find, rule.name)
        return self._hashed_finder(find) if rule.hashed else find

    def _value_finder(self, rule: TenantRule) -> Finder:
        """Return the function that reads the value of a rule from a request."""
        if rule.header is not None:
            name = rule.header.lower().encode()
            return lambda head, path, body: self._decode_name(sole_value(head.headers, name))
        if rule.api_key:
            return lambda head, path, body: self._name_of_request_key(head)
        if rule.body is not None:
            steps = rule.body.split(".")
            return lambda head, path, body: self._clean_name(_value_at(body(), steps))
        assert rule.path is not None
        match = re.compile(rule.path).match
        return lambda head, path, body: self._path_value(match(path))

    def _hashed_finder(self, find: Finder) -> Finder:
        def find_hashed(head: RequestHead, path: str, body: ReadBody) -> str | None:
            value = find(head, path, body)
            return None if value is None else f"id-{self.hash_of(value.encode())}"

        return find_hashed

    def _name_of_request_key(self, head: RequestHead) -> str | None:
        for name in _KEY_HEADERS:
            value = (sole_value(head.headers, name) or b"").strip()
            key = without_bearer(value) if name == b"authorization" else value
            if key:
                return self.name_of_key(key)
        return None

    def _path_value(self, match: "re.Match[str] | None") -> str | None:
        if match is None:
            return None
        return self._clean_name(match[1]) if match.re.groups else DEFAULT

    def _decode_name(self, value: bytes | None) -> str | None:
        return None if value is None else self._clean_name(value.decode("utf-8", "replace"))

    def _clean_name(self, value: object) -> str | None:
        """Return a value as the name of a tenant, without characters that cannot be shown; None: it is
        none."""
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            return None
        text = value[: 4 * TENANT_CHARS_MAX].strip()
        if not text.isprintable():
            text = "".join(c if c.isprintable() else "_" for c in text)
        if _match_own_name(text):
            return f"id-{self.hash_of(text.encode())}"
        if len(text) <= TENANT_CHARS_MAX:
            return text or None
        # The hash distinguishes long names with the same beginning.
        tail = self.hash_of(value.encode("utf-8", "replace"))
        if holds_key(value[: 4 * TENANT_CHARS_MAX + KEY_CHARS]):
            return f"key-{tail}"
        return f"{text[:_CUT_CHARS]}~{tail}"


def without_bearer(value: bytes) -> bytes:
    """Return the API key in a value of Authorization: TOKEN of `Bearer TOKEN`, else the whole value.

    RFC 9110 11.1: schemes are case-insensitive.
    """
    scheme, _, rest = value.partition(b" ")
    return rest.strip() if scheme.lower() == b"bearer" else value


def host_salt() -> str | None:
    """Return a salt that only this host has and that stays the same: a hash of its machine id.

    None if the host has no machine id, as in many containers. Source: machine-id(5), which requires that the
    id is hashed with an application's own key before it is used.
    """
    try:
        machine = _MACHINE_ID.read_bytes().strip()
    except OSError:
        return None
    return hmac.digest(machine, b"llmtap tenants", "sha256").hex() if machine else None


def _named_finder(find: Finder, name: str) -> Finder:
    return lambda head, path, body: None if find(head, path, body) is None else name


def _value_at(value: Any, steps: list[str]) -> object:
    for step in steps:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    node: object = value
    return node
