"""Convert and check one value of an option by its type: a text, or a value of decoded TOML or JSON.

A text is a value of a flag, of the environment, of `--set` or of a request header. The type decides whether
it is a number, a duration (`500ms`) or a size (`64KiB`). `on` and `off` are true and false; `none` means no
value, unless the type allows any text. Lists and tables are JSON; a list can also be words between commas.
"""

import difflib
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec.inspect import (
    BoolType,
    CollectionType,
    DictType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    TupleType,
    Type,
    UnionType,
    type_info,
)

from llmtap.errors import ConfigError
from llmtap.options.fields import allows_none, choices_of, is_struct, options_of, parts_of, value_text
from llmtap.units import Bytes, Duration, format_bytes, format_ns, read_special, short_repr
from llmtap.user_files import decode_json

S = TypeVar("S", bound=msgspec.Struct)
_BOOLS: Final = {"true": True, "on": True, "false": False, "off": False}
_WORDS: Final = re.compile(r"[^\[\]{}()\"'\\|]*")
"""Matches a list that is split at commas: it has no brackets and quotes, unlike most regular expressions."""
_HINT_NAMES_MAX: Final = 12
"""Maximum number of known names that a hint lists if none of them is similar to the wrong name."""
_LIST_CHARS_MAX: Final = 200
"""Maximum length of the list of known options in an error of `read_options`."""


def read_options(kind: type[S], texts: Mapping[str, str], noun: str) -> S:
    """Return a struct of options with values from texts; `noun` is the word for an option in messages.

    Raises ValueError, which names the wrong option, and for an unknown option also a similar one, or all
    known ones if their names are short enough for one message.
    """
    known = {option.name: option for option in options_of(kind)}
    values: dict[str, Any] = {}
    for word, text in texts.items():
        name = word.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            all_names = ", ".join(known)
            listed = f"; expected one of {all_names}" if len(all_names) <= _LIST_CHARS_MAX else ""
            meant = f"; did you mean {near[0]}?" if near else listed
            raise ValueError(f"no {noun} is called {name!r}{meant}")
        try:
            values[name] = read_text(known[name].kind, text)
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from None
    return kind(**values)


def read_text(kind: Any, text: str) -> Any:
    """Return the value of a text. Raises ValueError, whose message names the expected form."""
    value = from_text(kind, text)
    for error in mistakes_in(value, kind, "", given=text):
        raise ValueError(error.problem)
    return convert(kind, value)


def from_text(kind: Any, text: str) -> Any:
    """Convert a text to a value as decoded from TOML; numbers, durations and sizes stay texts."""
    parts = parts_of(kind)
    origins = [get_origin(part) or part for part in parts]
    if text in choices_of(kind):
        return text
    if msgspec.Raw in parts or (text.startswith(("[", "{")) and origins != [str]):
        try:
            return decode_json(text)
        except msgspec.DecodeError:
            return text
    if text == "none" and allows_none(kind) and str not in parts:
        return None
    if parts == [bool]:
        return _BOOLS.get(text.lower(), text)
    if origins[0] in (list, tuple) and _WORDS.fullmatch(text):
        item = get_args(parts[0])[0]
        if not any(is_struct(part) or get_origin(part) is dict for part in parts_of(item)):
            return [word.strip() for word in text.split(",") if word.strip()]
    return text


def convert(kind: Any, value: Any, *, strict: bool = False) -> Any:
    """Convert a value to its type, after `mistakes_in` found no mistake in it."""
    return msgspec.convert(_encode_raw_parts(kind, value), kind, strict=strict, dec_hook=read_special)


def _encode_raw_parts(kind: Any, value: Any) -> Any:
    """Return the value, in which each part of the type `msgspec.Raw` is encoded as JSON."""
    inner = parts_of(kind)[0] if parts_of(kind) else kind
    if inner is msgspec.Raw:
        return value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(value))
    if isinstance(value, dict) and get_origin(inner) is dict:
        return {name: _encode_raw_parts(get_args(inner)[1], one) for name, one in value.items()}
    if isinstance(value, dict) and is_struct(inner):
        members, _ = _table_members(inner)
        return {name: _encode_raw_parts(members.get(name), one) for name, one in value.items()}
    return value


def mistakes_in(
    content: Any, kind: Any, place: str, *, strict: bool = False, secret: bool = False, given: Any = None
) -> Iterator[ConfigError]:
    """Yield the mistakes in a value: in each item of a list and in each key of a table.

    `strict`: refuse a number that is written as a text (`"5"`). `secret`: show no value in a message.
    `given`: text that the user wrote, for messages; None: show the content.
    """
    secret = secret or _is_secret(kind)
    inside = list(_values_inside(content, kind, place))
    unknown: list[ConfigError] = []
    parts = parts_of(kind)
    if isinstance(content, dict) and len(parts) == 1 and is_struct(parts[0]):
        members, required = _table_members(parts[0])
        unknown = [
            ConfigError(place, f"there is no key `{key}`", nearest_hint(key, members))
            for key in content
            if key not in members
        ]
        unknown += [missing_key_error(place, name) for name in required if name not in content]
    inner = (mistakes_in(*one, strict=strict, secret=secret) for one in inside)
    mistakes = [*unknown, *(error for errors in inner for error in errors)]
    if mistakes:
        yield from mistakes
        return
    try:
        if not _is_finite(content, kind):
            raise ValueError(
                f"expected a finite number, got {short_repr(content if given is None else given)}"
            )
        _check_bounds(convert(kind, content, strict=strict), kind, place)
    except msgspec.ValidationError as exc:
        text, _, path = str(exc).partition(" - at `$")
        if text.startswith(("Expected", "Invalid")):
            number = isinstance(content, float) and given is None
            got = f", got {value_text(content) if number else short_repr(given or content)}"
            got = "" if secret or isinstance(content, dict) else got
            words = choices_of(kind) if all(get_origin(part) is Literal for part in parts) else []
            one_of = "one of " * (len(words) > 1)
            text = f"expected {one_of}{', '.join(words) or type_text(type_info(kind))}{got}"
        yield ConfigError(place + path.rstrip("`"), text[0].lower() + text[1:])
    except ValueError as exc:
        yield ConfigError(place, str(exc))
    except ConfigError as exc:
        yield from exc.all_errors()


def _values_inside(content: Any, kind: Any, place: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield the items of a list and the known values of a table, with their types and places."""
    parts = parts_of(kind)
    if len(parts) != 1:
        return
    if isinstance(content, list | tuple) and get_origin(parts[0]) in (list, tuple):
        kinds = [one for one in get_args(parts[0]) if one is not Ellipsis]
        for i, item in enumerate(content):
            yield item, kinds[min(i, len(kinds) - 1)], f"{place}[{i}]"
    elif isinstance(content, dict) and get_origin(parts[0]) is dict:
        for key, value in content.items():
            yield value, get_args(parts[0])[1], f"{place}.{key}"
    elif isinstance(content, dict) and is_struct(parts[0]):
        members, _ = _table_members(parts[0])
        yield from (
            (value, members[key], f"{place}.{key}") for key, value in content.items() if key in members
        )


@functools.cache
def _table_members(kind: type[msgspec.Struct]) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a table's keys, and its required keys.

    Cached, because every meter checks its tables of dialects with it when it starts.
    """
    types = get_type_hints(kind, include_extras=True)
    return types, [field.name for field in msgspec.structs.fields(kind) if field.required]


def _check_bounds(value: Any, kind: Any, place: str) -> None:
    """Raise ConfigError for a duration or a size beyond the bounds of its option."""
    if not isinstance(value, Duration | Bytes):
        return
    for extra in _extras_of(kind):
        least, most = extra.get("at_least", value), extra.get("at_most", value)
        if not least <= value <= most:
            text = format_ns if isinstance(value, Duration) else format_bytes
            bound = f"at least {text(least)}" if value < least else f"at most {text(most)}"
            raise ConfigError(place, f"must be {bound}, got {text(value)}", extra.get("hint"))


def _is_secret(kind: Any) -> bool:
    return any(extra.get("secret") for extra in _extras_of(kind))


def _extras_of(kind: Any) -> list[dict[str, Any]]:
    """Return the own attributes of a type's annotations."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return [one.extra for one in metas if isinstance(one, msgspec.Meta) and one.extra]


def _is_finite(value: Any, kind: Any) -> bool:
    """Return False for infinity and NaN, also in the form of a text; return True for all other values."""
    if isinstance(value, str) and not any(part in (int, float) for part in parts_of(kind)):
        return True
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):  # Not a number, or an integer too large for a float.
        return True


def type_text(info: Type) -> str:
    """Return a description of the values of a type, such as "a whole number from 1 to 5"."""
    match info:
        case Metadata():
            return type_text(info.type)
        case UnionType():
            return " or ".join(type_text(one) for one in info.types if not isinstance(one, NoneType))
        case LiteralType():
            return ", ".join(map(str, info.values))
        case BoolType():
            return "true or false"
        case StrType():
            return "a text" if info.pattern is None else f"a text of the form {info.pattern}"
        case IntType() | FloatType() as number:
            number_text = "a whole number" if isinstance(number, IntType) else "a number"
            if number.ge is not None and number.le is not None:
                return f"{number_text} from {_limit_text(number.ge)} to {_limit_text(number.le)}"
            if number.ge is not None:
                number_text += f" of at least {_limit_text(number.ge)}"
            elif number.gt is not None:
                number_text += f" above {_limit_text(number.gt)}"
            limits = {"at most": number.le, "below": number.lt}
            return number_text + "".join(
                f", {word} {_limit_text(n)}" for word, n in limits.items() if n is not None
            )
        case CollectionType():
            return "a list" if info.min_length is None else f"a list with at least {info.min_length:,} values"
        case TupleType():
            return f"a list of {len(info.item_types):,} values"
        case StructType() | DictType():
            return "a table"
    return "a value of another type"


def _limit_text(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,g}"


def nearest_hint(
    name: str, known: Collection[str], prefix: str = "", *, list_known: bool = True
) -> str | None:
    """Return a hint with the most similar name in `known`; else with all, if few and if `list_known`."""
    near = difflib.get_close_matches(name, known, 1, 0.7)
    if near:
        return f"did you mean '{prefix}{near[0]}'?"
    return f"expected one of {', '.join(known)}" if list_known and 0 < len(known) <= _HINT_NAMES_MAX else None


def missing_key_error(table: str, name: str) -> ConfigError:
    return ConfigError(table, f"the key `{name}` is missing", f"add a line {name} = VALUE")


def is_http_url(text: str) -> bool:
    """Return whether a text is a URL of http or https with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
