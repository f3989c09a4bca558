"""The tests and their setup parameters, in words: what `llmtap bench list` prints."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from llmtap.bench.run.registry import TESTS, test_named
from llmtap.settings import explained
from llmtap.units import Duration, format_ns

__all__ = ["tests_said"]

DEFAULT_MAX: Final = 40
"""A default that is longer stands on a line of its own."""


def tests_said(names: Sequence[str] | None = None) -> Iterator[str]:
    """Lines; a test's parameters with their defaults and meanings, and what `--quick` makes of them."""
    for name in TESTS if names is None else names:
        test = test_named(name)
        yield f"{test.name}: {test.title} (IETF {test.section})"
        if test.arms:
            needed = " and ".join(f"[arms.{arm}]" for arm in test.arms)
            optional = ", ".join(f"[arms.{arm}]" for arm in test.arms_any)
            yield f"  needs {needed}" + (f", and one or more of {optional}" if optional else "")
        defaults = test.params()
        rows = [
            (param, _written(getattr(defaults, param)), meaning, _quick(test.quick, param))
            for param, _, meaning in explained(test.params)
        ]
        first = max((len(row[0]) for row in rows), default=0)
        second = max((len(row[1]) for row in rows if len(row[1]) <= DEFAULT_MAX), default=0)
        for param, default, meaning, quick in rows:
            below = len(default) > DEFAULT_MAX
            yield f"  {param:{first}}  {'' if below else default:{second}}  {meaning}{quick}"
            if below:
                yield f"    = {default}"
        yield ""


def _quick(quick: Any, name: str) -> str:
    return f" (--quick: {_written(quick[name])})" if name in quick else ""


def _written(value: Any) -> str:
    """As people write it."""
    if value is None:
        return "-"
    if isinstance(value, Duration):
        return format_ns(value).replace(" ", "")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list | tuple):
        return ",".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
