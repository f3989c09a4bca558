"""Code that is broken on purpose gives other values, and the page of claims is read whole."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from tests.support.mutation.broken import broken
from tests.support.mutation.claims import PAGE, Claim, broken_source, claims

SOURCE = '''"""A module."""
def double(n: int) -> int:
    return 2 * n
def numbers():
    yield 1
    yield from (2, 3)
def note(seen: list[int]) -> None:
    seen.append(1)
class Counter:
    step: int = 2
class Reader:
    def __init__(self) -> None:
        self.n = 1
    @property
    def size(self) -> int:
        return self.n
CHECKS = {"1-a": double, "1-b": double, **{f"2-{n}": double for n in range(1, 3)}}
'''


@dataclass(frozen=True)
class Pair:
    name: str
    n: int


def loaded(name: str | None, requirement: str | None = None) -> Any:
    module = ModuleType("m")
    claim = Claim("", requirement, "m.py", name, "t.py", None)
    exec(broken_source(SOURCE, claim), module.__dict__)
    return module


def test_what_is_cited_is_broken_and_nothing_else() -> None:
    seen: list[int] = []
    one = loaded("double")
    assert (one.double(2), list(one.numbers()), one.Counter.step, one.Reader().size) == (5, [1, 2, 3], 2, 1)
    assert list(loaded("numbers").numbers()) == [2, 2]
    loaded("note").note(seen)
    assert not seen
    assert (loaded("Counter").Counter.step, loaded("Reader").Reader().size) == (3, 2)
    assert loaded(None).double(2) == 5 and loaded(None).Reader().size == 2
    for requirement in ("1-b", "2-2"):
        checks = loaded(None, requirement).CHECKS
        wrong = [name for name, check in checks.items() if check(2) != 4]
        assert requirement in wrong and "1-a" not in wrong
    with pytest.raises(LookupError):
        loaded("missing")


@pytest.mark.parametrize(
    "value", [None, True, 0, 1.5, "a", b"a", (), (1,), [], [1], {}, {"a": 1}, set(), {1}, Pair("a", 1)]
)
def test_a_broken_value_is_another_of_its_type(value: object) -> None:
    found = broken(value)
    assert found != value
    assert value is None or type(found) is type(value)


def test_later_values_are_broken_too() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)

    async def later() -> int:
        return 1

    async def wait() -> object:
        return await broken(later())

    assert (list(broken(items())), asyncio.run(wait()), broken(len)("ab")) == ([2, 3], 2, 3)


def test_the_rows_of_the_page_are_found() -> None:
    rows = claims(PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 290
    assert len([row for row in rows if row.requirement is not None and row.name is None]) > 180
