"""A value that does not fit its key, in the words of who wrote it.

What msgspec says of one speaks of types; here it is told with the value, and with what may stand there.
"""

import difflib
import math
import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from llmtap.units import shown

__all__ = ["Misfit", "inner_type", "is_finite", "misfit"]

_PATH: Final = re.compile(r"\s*- at `(?:key in )?\$(.*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_EXPECTED: Final = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`| (.+))$")
_NOUNS: Final = {
    "int": "whole number", "float": "number", "str": "text", "array": "list", "object": "table",
}  # fmt: skip
_UNKNOWN: Final = object()
"""A value whose place nobody told."""


class Misfit(NamedTuple):
    """What does not fit, and why."""

    path: str
    """From the value that was read, as keys are written: `hardware.count`, `classes[0].name`; or empty."""
    problem: str
    hint: str | None


def misfit(exc: msgspec.ValidationError, kind: Any, value: Any) -> Misfit:
    """An error of reading `value` as `kind`, in words."""
    said = str(exc)
    found = _PATH.search(said)
    path = found[1] if found else ""
    kind, value = _walked(kind, value, path)
    problem, hint = _told(_PATH.sub("", said), kind, value)
    return Misfit(path.removeprefix("."), problem, hint)


def inner_type(kind: Any) -> Any:
    """What `Annotated` is of; of something that may be None, the rest where that is one type."""
    if get_origin(kind) is Annotated:
        return inner_type(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        rest = [one for one in get_args(kind) if one is not type(None)]
        return inner_type(rest[0]) if len(rest) == 1 else kind
    return kind


def is_finite(value: Any) -> bool:
    """Whether no number in it is infinite or NaN: JSON has neither, and no load can be sent at one."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _walked(kind: Any, value: Any, path: str) -> tuple[Any, Any]:
    """The type and the value at a path."""
    for name, index in _STEP.findall(path):
        kind = inner_type(kind)
        if name:
            kind = {one.encode_name: one.type for one in msgspec.structs.fields(kind)}.get(name)
            value = value.get(name, _UNKNOWN) if isinstance(value, dict) else _UNKNOWN
            continue
        at = int(index) if index.isdigit() else None
        kinds = [one for one in get_args(kind) if one is not Ellipsis]
        if get_origin(kind) is dict:
            kind = kinds[1]
        elif kinds:
            kind = kinds[at if at is not None and at < len(kinds) else -1]
        known = at is not None and isinstance(value, list | tuple) and at < len(value)
        value = value[at] if known else _UNKNOWN
    return inner_type(kind), value


def _told(said: str, kind: Any, value: Any) -> tuple[str, str | None]:
    if said.startswith("Invalid enum value") and get_origin(kind) is Literal:
        allowed = [one for one in get_args(kind) if one]
        return f"{shown(value)} is none of {', '.join(map(repr, allowed))}", _meant(str(value), allowed)
    missing = re.fullmatch(r"Object missing required field `(.+)`", said)
    if missing:
        return f"{missing[1]} is missing", None
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", said)
    if unknown:
        known = [one.encode_name for one in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(unknown[1], known, 1, 0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
        return f"there is no key {unknown[1]!r} in it", hint
    expected = _EXPECTED.fullmatch(said)
    if expected is None:
        return said[:1].lower() + said[1:], None
    types, got, more = expected.groups()
    wanted = [one for one in types.split(" | ") if one != "null"]
    if more:
        given = "" if value is _UNKNOWN else f", got {shown(value)}"
        return f"expected {' or '.join(map(_noun, wanted))} {more}{given}".replace(".0,", ","), None
    given = f"a {_NOUNS.get(got, got)}" if value is _UNKNOWN else shown(value)
    if wanted == ["bool"]:
        return f"{given} is neither true nor false", None
    if wanted == ["str"] and get_origin(kind) is Literal:
        return f"{given} is none of {', '.join(repr(one) for one in get_args(kind) if one)}", None
    nouns = [_NOUNS.get(one, one) for one in wanted]
    return f"{given} is no {' or '.join(nouns)}", _unquoted(value, wanted)


def _noun(name: str) -> str:
    noun = _NOUNS.get(name, name)
    return noun if noun == "text" else f"a {noun}"


def _unquoted(value: Any, wanted: Sequence[str]) -> str | None:
    """Of a number that is written as a text."""
    if isinstance(value, str) and not {"int", "float"}.isdisjoint(wanted):
        try:
            float(value)
        except ValueError:
            return None
        return "without quotation marks" if "float" in wanted or value.lstrip("+-").isdigit() else None
    return "in quotation marks" if wanted == ["str"] and isinstance(value, int | float) else None


def _meant(text: str, allowed: Sequence[str]) -> str | None:
    """The nearest of some values, of which a word alone may have been written."""
    words = {word: one for one in allowed for word in one.split()} | {one: one for one in allowed}
    near = difflib.get_close_matches(text, words, 1, 0.6)
    return f"did you mean {words[near[0]]!r}?" if near else None
