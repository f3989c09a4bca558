"""Build one event of each type that the models of an SDK declare, from the types alone.

An SDK declares the events of a stream as a union of pydantic models. `examples` returns a JSON value for
every member of the union, and for every form of a part that a member requires (`step.delta` of Gemini
Interactions has one for each kind of delta).
"""

import base64
import datetime
import enum
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import TypeAliasType

DEPTH_MAX = 6
"""Levels of optional members that are built; models may refer to themselves."""
_PLAIN: tuple[tuple[type, Any], ...] = (
    (bool, True),
    (int, 1),
    (float, 0.5),
    (bytes, base64.b64encode(b"data").decode()),
    (str, "text"),
    (datetime.datetime, "2026-01-01T00:00:00Z"),
)
_NAMES = ("type", "event_type", "event", "kind", "object")
"""Members that name an event or a part of one."""


class Example(NamedTuple):
    name: str
    """Name of the event, with the name of its part behind a slash where the part has several forms."""
    value: Any


def load(place: str) -> Any:
    """Return the type at `package.module:Name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def examples(union: Any, *, optional: bool) -> Iterator[Example]:
    """Yield an example of each member of a union; `optional` adds members that a model does not require."""
    for model in _members(union):
        value = _build(model, optional)
        name = _name(value) or model.__name__
        parts = _forms(model)
        if parts is None:
            yield Example(name, value)
            continue
        key, forms = parts
        for form in forms:
            part = _build(form, optional, depth=1)
            yield Example(f"{name}/{_name(part) or form.__name__}", value | {key: part})


def _name(value: Any) -> str | None:
    return next((str(value[key]) for key in _NAMES if isinstance(value.get(key), str)), None)


def _plain(type_: Any) -> Any:
    while True:
        if get_origin(type_) is Annotated:
            type_ = get_args(type_)[0]
        elif isinstance(type_, TypeAliasType):
            type_ = type_.__value__
        else:
            return type_


def _members(type_: Any) -> list[Any]:
    type_ = _plain(type_)
    if get_origin(type_) not in (Union, types.UnionType):
        return [type_]
    return [member for arg in get_args(type_) if arg is not type(None) for member in _members(arg)]


def _is_model(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, BaseModel)


def _forms(model: Any) -> tuple[str, list[Any]] | None:
    """Return the first required member with several named forms, and these forms."""
    for name, field in model.model_fields.items() if _is_model(model) else ():
        forms = [form for form in _members(field.annotation) if _is_model(form)]
        if field.is_required() and len(forms) > 1 and all(map(_is_named, forms)):
            return field.serialization_alias or field.alias or name, forms
    return None


def _is_named(model: Any) -> bool:
    return not model.model_fields.keys().isdisjoint(_NAMES)


def _build(type_: Any, optional: bool, depth: int = 0) -> Any:
    members = _members(type_)
    type_ = members[0] if members else None
    origin, args = get_origin(type_), get_args(type_)
    if origin is Literal:  # of the speakers of a text, the model
        return "assistant" if "assistant" in args else args[0]
    if origin in (list, set, tuple):  # one element of each form
        return [_build(form, optional, depth + 1) for form in _members(args[0])]
    if origin is dict or not isinstance(type_, type):
        return {}
    if _is_model(type_) and "root" in type_.model_fields:  # stands for its only member
        return _build(type_.model_fields["root"].annotation, optional, depth)
    if _is_model(type_):
        return {
            field.serialization_alias or field.alias or name: _build(field.annotation, optional, depth + 1)
            for name, field in type_.model_fields.items()
            if field.is_required() or _is_name(field.annotation) or (optional and depth < DEPTH_MAX)
        }
    if issubclass(type_, enum.Enum):
        return next(iter(type_)).value
    return next((value for plain, value in _PLAIN if issubclass(type_, plain)), {})


def _is_name(annotation: Any) -> bool:
    """A member with one fixed value names the model, also where the model has it as a default."""
    return get_origin(_members(annotation)[0]) is Literal
