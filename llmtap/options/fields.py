"""Declare options as fields of structs (`opt`), and describe them (`options_of`).

    rate: Annotated[float | None, opt("Mean request rate.", "RPS")] = None

The description is a noun phrase. Bounds of a number are in the type: `Annotated[int, Meta(ge=1)]`.
"""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from llmtap.units import NS_PER_S, Bytes, Duration, encode_special, format_ns, parse_duration_ns

_MINUTE_NS: Final = 60 * NS_PER_S
_SIZES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


_BOUNDS: Final = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")


def opt(text: str, metavar: str | None = None, *flags: str, **more: Any) -> Meta:
    """Declare an option: its description, and all properties that its name and type do not show.

    `metavar`: word for the value in the help of a command; None: the type. `flags`: flags, if not `--name`.
    `more`: bounds of a number or a length (`ge`, `max_length`), and:

    - `at_least`, `at_most`: bounds of a duration (ns) or of a size (bytes). `hint`: hint of their error.
    - `secret=True`: no message shows the value.
    - `parse`: function that converts the text of a flag (a list of texts, if the flag can be repeated) to the
      value, or raises ConfigError. `shown`: text of the default in the help; `parse` also converts it if the
      flag is absent. Without `shown`, the value of an absent flag is the default of the field.
    - `argument=True`: an argument of the command. `hidden=True`: not in the help. `envvar`: environment
      variable that also sets the option.
    - `key`: key of the configuration that the flag sets (`keys_given`). It is appended to the description.
    """
    if "key" in more:
        text += f" [key: {more['key']}]"
    bounds = {name: more.pop(name) for name in _BOUNDS if name in more}
    return Meta(description=text, extra={"metavar": metavar, "flags": flags, **more}, **bounds)


class Option(NamedTuple):
    """Description of an option, which is a field of a struct."""

    name: str
    kind: Any
    """Type of the value, as annotated."""
    default: Any
    """Default of the field; NODEFAULT if the option is required."""
    meaning: str
    extra: dict[str, Any]
    """Arguments of `opt`, except the description and the bounds of a number or a length."""

    @property
    def flag(self) -> str:
        """The first flag, such as `--rate`; for an argument of a command, its metavar."""
        if self.extra.get("argument"):
            return str(self.extra["metavar"])
        flags = self.extra.get("flags") or (f"--{self.name.replace('_', '-')}",)
        return str(flags[0]).partition("/")[0]

    @property
    def default_text(self) -> str | None:
        """Default of the option, in the form in which a user writes a value; None if there is no default."""
        return None if self.default in (None, NODEFAULT) else value_text(self.default)

    @property
    def meaning_with_choices(self) -> str:
        """The meaning, followed by the allowed words of a `Literal`, unless the meaning contains them."""
        choices = choices_of(self.kind)
        if not choices or all(choice in self.meaning for choice in choices):
            return self.meaning
        end = "." * self.meaning.endswith(".")
        return f"{self.meaning.removesuffix('.')} ({' | '.join(choices)}){end}"


def options_of(kind: type[msgspec.Struct]) -> Iterator[Option]:
    """Yield every option of a struct."""
    for field in msgspec.structs.fields(kind):
        made = field.default_factory is not NODEFAULT
        yield option_of(field.name, field.type, field.default_factory() if made else field.default)


def option_of(name: str, kind: Any, default: Any) -> Option:
    """Return the option of a field with this annotated type."""
    metas = [one for one in get_args(kind)[1:] if isinstance(one, Meta)]
    meta = metas[-1] if metas else Meta()
    return Option(name, kind, default, meta.description or "", meta.extra or {})


def flags_given(*structs: msgspec.Struct) -> list[str]:
    """Return the flags of those options in `structs` whose values differ from the defaults, in order."""
    options = ((struct, option) for struct in structs for option in options_of(type(struct)))
    return [o.flag for struct, o in options if o.meaning and getattr(struct, o.name) != o.default]


def keys_given(*structs: msgspec.Struct) -> dict[str, Any]:
    """Return by key of the configuration the value of the option that sets it; None if it is not given."""
    options = ((struct, option) for struct in structs for option in options_of(type(struct)))
    return {key: getattr(struct, o.name) for struct, o in options if (key := o.extra.get("key"))}


def parts_of(kind: Any) -> list[Any]:
    """Return the types that a value can have: of a union its members except None, else the type itself."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        return [part for one in get_args(kind) for part in parts_of(one)]
    return [] if kind is type(None) else [kind]


def allows_none(kind: Any) -> bool:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def choices_of(kind: Any) -> list[str]:
    """Return the allowed words of a `Literal`, without the empty one."""
    words = [word for part in parts_of(kind) if get_origin(part) is Literal for word in get_args(part)]
    return [word for word in words if word]


def value_text(value: Any) -> str:
    """Return a value as text that `read_text` converts to the same value."""
    if isinstance(value, Duration):
        for unit, scale in (("h", 60 * _MINUTE_NS), ("m", _MINUTE_NS)):
            if value and value % scale == 0:
                return f"{value // scale}{unit}"
        text = format_ns(value).replace(" ", "")
        return text if parse_duration_ns(text) == value else f"{value:d}ns"
    if isinstance(value, Bytes):
        unit, scale = next(((unit, scale) for unit, scale in _SIZES if value % scale == 0), ("", 1))
        return f"{value // scale}{unit}"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple) and not any(isinstance(one, msgspec.Struct) for one in value):
        return ",".join(map(value_text, value))
    if isinstance(value, msgspec.Struct | list | tuple | dict):
        return msgspec.json.encode(value, enc_hook=encode_special).decode()
    short = f"{value:g}" if isinstance(value, float) else ""
    return short if short and float(short) == value else str(value)
