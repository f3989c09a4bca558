"""A wrong value in the place of a right one, for code that is broken on purpose."""

import dataclasses
import enum
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import wraps
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa


def broken(value: Any) -> Any:
    """Return another value of the same type; the value itself if no other can be made of it."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        members = list(type(value))
        return members[(members.index(value) + 1) % len(members)]
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 + 1
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, bytes):
        return value + b"?"
    if isinstance(value, np.ndarray | array):
        return value[:-1]
    if isinstance(value, pa.Table):
        return value.slice(0, max(0, value.num_rows - 1))
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        return _with_broken_fields(value)
    return _broken_container(value)


def _broken_container(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(list(value.items())[:-1]) if value else {"?": None}
    if isinstance(value, tuple) and hasattr(value, "_replace"):
        return value._replace(**{value._fields[0]: broken(value[0])})
    if isinstance(value, list | tuple):
        return value[:-1] if value else type(value)((None,))
    if isinstance(value, set | frozenset):
        return type(value)(list(value)[:-1]) if value else type(value)({None})
    if isinstance(value, AsyncIterator):
        return _broken_async_items(value)
    if isinstance(value, Iterator):
        # Some iterators never end, so each item is broken when it is read.
        return map(broken, value)
    if isinstance(value, Awaitable):
        return _broken_later(value)
    if callable(value) and not isinstance(value, type):
        return _broken_call(value)
    return value


def _with_broken_fields(value: Any) -> Any:
    names = (
        value.__struct_fields__
        if isinstance(value, msgspec.Struct)
        else [f.name for f in dataclasses.fields(value)]
    )
    replace = msgspec.structs.replace if isinstance(value, msgspec.Struct) else dataclasses.replace
    # Some types refuse a value, so a field that cannot be broken keeps its value.
    for name in names:
        with suppress(TypeError, ValueError, AssertionError):
            value = replace(value, **{name: broken(getattr(value, name))})
    return value


async def _broken_async_items(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for item in items:
        yield broken(item)


async def _broken_later(value: Awaitable[Any]) -> Any:
    return broken(await value)


def _broken_call(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return broken(function(*args, **options))

    return call
