"""Options as `NAME=VALUE`: read and explained by the fields of a struct."""

import difflib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.inspect import FloatType, IntType, Metadata, type_info

from llmtap.units import Duration, format_ns, parse_duration_ns

__all__ = ["explained", "read_options"]

S = TypeVar("S", bound=msgspec.Struct)

_BOOLS = {"true": True, "on": True, "false": False, "off": False}


def read_options(kind: type[S], settings: Mapping[str, str], noun: str) -> S:
    """Return the options, some of them set from text; `noun` is the word for an option.

    Raises ValueError, which names the option, or the nearest to an unknown one.
    """
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for given, text in settings.items():
        name = given.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"no {noun} is called {name!r}{meant}")
        try:
            values[name] = _value(known[name].type, text)
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from None
    return kind(**values)


def explained(kind: type[msgspec.Struct]) -> Iterator[tuple[str, Any, str]]:
    """Yield each option's name, default as text (None for None), and meaning with its choices."""
    for field in msgspec.structs.fields(kind):
        info = type_info(field.type)
        assert isinstance(info, Metadata)
        assert info.extra_json_schema is not None
        meaning = info.extra_json_schema["description"]
        choices = _choices(_inner(field.type))
        if choices:
            meaning += f" ({' | '.join(choices)})"
        yield field.name, _text(field.default), meaning


def _text(default: Any) -> str | None:
    if default is None:
        return None
    if isinstance(default, Duration):
        return format_ns(default)
    if isinstance(default, bool):
        return str(default).lower()
    return "-" if default == () else str(default)


def _inner(kind: object) -> Any:
    """Return the type in `Annotated`, without None."""
    inner = get_args(kind)[0]
    if get_origin(inner) in (Union, UnionType):
        [inner] = [one for one in get_args(inner) if one is not type(None)]
    return inner


def _choices(inner: object) -> list[str]:
    """Return the values of a Literal, else nothing."""
    return list(get_args(inner)) if get_origin(inner) is Literal else []


def _value(kind: object, text: str) -> object:
    inner = _inner(kind)
    if inner is Duration:
        return Duration(parse_duration_ns(text))
    if choices := _choices(inner):
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
        return text
    if inner is bool:
        if text.lower() not in _BOOLS:
            raise ValueError(f"expected true or false, got {text!r}")
        return _BOOLS[text.lower()]
    raw: object = [one.strip() for one in text.split(",")] if get_origin(inner) is tuple else text
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"expected {_wanted(kind)}, got {text!r}") from None


def _wanted(kind: object) -> str:
    info = type_info(kind)
    number = info.type if isinstance(info, Metadata) else info
    if not isinstance(number, IntType | FloatType):
        return "whole numbers, apart by commas"
    what = "a whole number" if isinstance(number, IntType) else "a number"
    if number.ge is not None and number.le is not None:
        return f"{what} from {number.ge:,} to {number.le:,}"
    if number.ge is not None:
        return f"{what} of at least {number.ge:,}"
    return what if number.gt is None else f"{what} above {number.gt:,}"
