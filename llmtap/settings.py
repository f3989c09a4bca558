"""Convert texts of options by name to the fields of a struct, and list its fields with their meaning.

`read_options` and `explained` are for options that are fields of a msgspec struct, such as `--reading` and
`--serving` of `llmtap sim run`, and for the list of parameters that `llmtap bench list` prints. `read_value`
reads one value, for example of an `x-sim-*` header of the simulated server. `in_words` words an error of
msgspec, for the settings of the configuration file (`config.py`).
"""

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    Type,
    UnionType,
    type_info,
)

from llmtap.units import Duration, format_ns, parse_duration_ns

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
            values[name] = read_value(known[name].type, text)
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
        if choices := choices_of(field.type):
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


def _parts(kind: object) -> list[Any]:
    """Return the type in `Annotated`, or those of a union, without None."""
    inner = get_args(kind)[0]
    parts = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
    return [part for part in parts if part is not type(None)]


def choices_of(kind: object) -> list[str]:
    """Return the words that a value may be."""
    return [word for part in _parts(kind) if get_origin(part) is Literal for word in get_args(part)]


def read_value(kind: object, text: str) -> object:
    """Return the value of an option. Raises ValueError, which says what is expected."""
    parts, choices = _parts(kind), choices_of(kind)
    if text in choices:
        return text
    if choices and len(parts) == 1:
        raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
    if parts == [Duration]:
        return Duration(parse_duration_ns(text))
    if parts == [bool] and text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    raw: object = [one.strip() for one in text.split(",")] if get_origin(parts[0]) is tuple else text
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"expected {wanted(type_info(kind))}, got {text!r}") from None


def wanted(info: Type) -> str:
    """Return what a value of a type is, in words."""
    match info:
        case Metadata():
            return wanted(info.type)
        case UnionType():
            return " or ".join(wanted(one) for one in info.types if not isinstance(one, NoneType))
        case LiteralType():
            return ", ".join(map(str, info.values))
        case BoolType():
            return "true or false"
        case StrType():
            return "a text"
        case IntType() | FloatType() as number:
            what = "a whole number" if isinstance(number, IntType) else "a number"
            if number.ge is not None and number.le is not None:
                return f"{what} from {number.ge:,} to {number.le:,}"
            if number.ge is not None:
                return f"{what} of at least {number.ge:,}"
            return what if number.gt is None else f"{what} above {number.gt:,}"
    return "whole numbers, apart by commas"


_KINDS: Final = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing",
}  # fmt: skip
_BOUNDS: Final = {" >= ": " of at least ", " <= ": " of at most ", " > ": " above ", " < ": " below "}


def in_words(error: msgspec.ValidationError) -> str:
    """Return msgspec's message in words of this project, without the path."""
    text = re.sub(r"\s*- at `.*`$", "", str(error))
    text = text.replace("Invalid enum value ", "unknown value ")
    for bound, words in _BOUNDS.items():
        text = text.replace(bound, words)
    if text.startswith("Expected"):
        text = text.replace(" | null`", "`")  # a key that can be left out
        text = re.sub(
            r"`([a-z |]+)`", lambda m: " or ".join(_KINDS.get(kind, kind) for kind in m[1].split(" | ")), text
        )
    return text[0].lower() + text[1:]
