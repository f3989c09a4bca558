"""Derive the flags of a command from the structs of options that its function takes.

    @command(app, epilog=EPILOG)
    def replay(load: LoadPlan, outputs: OutputOptions) -> None: ...

Each field with a description is a flag or an argument, also in structs inside these structs. The type of the
field, or its `parse`, decides how the text is converted. Other parameters of the function are declared as in
typer.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, get_origin, get_type_hints

import msgspec
import typer
from msgspec import NODEFAULT
from msgspec.inspect import FloatType, IntType, Metadata, UnionType, type_info

from llmtap.errors import ConfigError
from llmtap.options.fields import Option, is_struct, option_of, options_of, parts_of
from llmtap.options.values import convert, from_text, mistakes_in
from llmtap.units import NS_PER_S, Duration

_TYPER_TYPES: Final = (bool, int, float, str, Path)
"""Types to which typer converts a text itself."""
_DURATION_NS_MAX: Final = 1_000 * 86_400 * NS_PER_S
"""Maximum of a flag that takes a duration: 1,000 days, so that timestamps do not overflow."""


def command(group: typer.Typer, name: str | None = None, **settings: Any) -> Callable[..., Any]:
    """Return a decorator that adds a function to a group of commands, with the flags of its structs."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        group.command(name, **settings)(with_flags(function))
        return function

    return add


def with_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a parameter for each flag instead of its structs, as typer needs it."""
    hints = get_type_hints(function, include_extras=True)
    signature_parameters = inspect.signature(function).parameters
    structs = {name: hints[name] for name in signature_parameters if is_struct(hints[name])}
    options = {
        name: option_of(name, hints[name], NODEFAULT if one.default is one.empty else one.default)
        for name, one in signature_parameters.items()
        if any(isinstance(meta, msgspec.Meta) for meta in getattr(hints[name], "__metadata__", ()))
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature_parameters.items():
        if name in structs:
            parameters += map(_parameter, _flags_of(structs[name]))
        elif name in options:
            parameters.append(_parameter(options[name]))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        arguments = {name: _make_struct(kind, values) for name, kind in structs.items()}
        arguments |= {name: _value_or_default(option, values[name]) for name, option in options.items()}
        others = {name: values[name] for name in signature_parameters if name not in arguments}
        return function(**arguments, **others)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _flags_of(kind: type[msgspec.Struct]) -> Iterator[Option]:
    """Yield the options of a struct that are flags, including those of the structs inside it."""
    for option in options_of(kind):
        if is_struct(option.kind):
            yield from _flags_of(option.kind)
        elif option.meaning:
            yield option


def _make_struct(kind: type[msgspec.Struct], values: dict[str, Any]) -> Any:
    """Return a struct with the values of flags. Raises ConfigError that names the flag."""
    fields: dict[str, Any] = {}
    for option in options_of(kind):
        if is_struct(option.kind):
            fields[option.name] = _make_struct(option.kind, values)
        elif option.meaning:
            fields[option.name] = _value_or_default(option, values[option.name])
    return kind(**fields)


def _value_or_default(option: Option, flag_value: Any) -> Any:
    """Return the value of a flag, or its default. `flag_value`: None or [] if the flag is absent."""
    if flag_value in (None, []):
        return option.default
    if parse := option.extra.get("parse"):
        return parse(flag_value)
    if isinstance(flag_value, Path):
        return flag_value
    value = from_text(option.kind, flag_value) if isinstance(flag_value, str) else flag_value
    text = flag_value if isinstance(flag_value, str) else None
    for error in mistakes_in(value, option.kind, option.flag, given=text):
        raise ConfigError(option.flag, error.problem, error.hint)
    value = convert(option.kind, value)
    if isinstance(value, Duration) and value > _DURATION_NS_MAX:
        raise ConfigError(
            option.flag, f"{flag_value!r} is longer than the maximum of 1,000 days", "such as 1h"
        )
    return value


def _parameter(option: Option) -> inspect.Parameter:
    """Return a function parameter from which typer makes the option's flag."""
    extra, (kind, default) = option.extra, _typer_type(option)
    if extra.get("argument"):
        info = typer.Argument(metavar=extra["metavar"], help=option.meaning)
    else:
        number = next(_number_types(type_info(option.kind)), None) if kind in (int, int | None) else None
        more: dict[str, Any] = {name: extra[name] for name in ("hidden", "envvar") if name in extra}
        if number is not None:
            more |= {"min": number.ge, "max": number.le}
        names = extra["flags"] or (option.flag,)
        info = typer.Option(*names, metavar=extra["metavar"], help=option.meaning, **more)
    default = inspect.Parameter.empty if default is NODEFAULT else default
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option.name, keyword, default=default, annotation=Annotated[kind, info])


def _typer_type(option: Option) -> tuple[Any, Any]:
    """Return the type and the default of an option's flag, as typer must know them."""
    part, *others = parts_of(option.kind)
    if "shown" in option.extra:
        return str, option.extra["shown"]
    if (get_origin(part) or part) in (list, tuple, dict):
        return (list[str], NODEFAULT) if option.default is NODEFAULT else (list[str] | None, None)
    if "parse" in option.extra:
        return str | None, None
    if part in _TYPER_TYPES and not others:
        return (part | None, None) if option.default is None else (part, option.default)
    return (str | None, None) if option.default is None else (str, option.default_text)


def _number_types(info: Any) -> Iterator[Any]:
    """Yield the number types inside a type (such as a union), because these have the number's bounds."""
    if isinstance(info, Metadata):
        yield from _number_types(info.type)
    elif isinstance(info, UnionType):
        for member in info.types:
            yield from _number_types(member)
    elif isinstance(info, IntType | FloatType):
        yield info
