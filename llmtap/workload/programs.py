"""Generate source code as prompts: functions in Python, JavaScript and TypeScript.

A file begins with a comment unique to its key, and is cut at its length, mostly within a function.
"""

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from zlib import crc32

from llmtap.workload.prompts.prose import WORDS, fitted_text
from llmtap.workload.prompts.text import count_tokens

__all__ = ["LANGUAGES", "Code", "program"]

LANGUAGES: Final = ("python", "javascript", "typescript")
"""Those of the IETF draft, 4.3.2.4."""
_FUNCTIONS: Final = 600
"""Of each language: more than 80,000 tokens."""
_FILLERS: Final = {"python": "#", "javascript": "/", "typescript": "/"}


class Code:
    """Files of functions; messages of one topic have one language."""

    def text(self, tokens: int, key: str, topic: str) -> str:
        language = LANGUAGES[crc32(topic.encode()) % len(LANGUAGES)]
        parts: list[str] = []
        left = tokens
        for part, n in program(key, language):
            if n >= left:
                parts.append(fitted_text(part, left, _FILLERS[language]))
                break
            parts.append(part)
            left -= n
        return "".join(parts)

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "code", "domain": "code", "language": list(LANGUAGES)}


def program(key: str, language: str) -> Iterator[tuple[str, int]]:
    """Yield an endless file's parts with their tokens: a unique comment, then functions."""
    chance = random.Random(key)
    names = _Names(chance)
    comment = "#" if language == "python" else "//"
    head = f"{comment} {names.path()}: {' '.join(names.words(5))}\n\n"
    yield head, count_tokens(head)
    known = _functions(language)
    while True:
        yield chance.choice(known)


@functools.cache
def _functions(language: str) -> list[tuple[str, int]]:
    names = _Names(random.Random(language))
    shapes = _PYTHON if language == "python" else _SCRIPT
    made = [shapes[i % len(shapes)](names, language == "typescript") for i in range(_FUNCTIONS)]
    return [(text, count_tokens(text)) for text in made]


class _Names:
    """Random names of two words, so never a keyword."""

    def __init__(self, chance: random.Random) -> None:
        self.random = chance

    def words(self, count: int) -> list[str]:
        return self.random.choices(WORDS, k=count)

    def path(self) -> str:
        return "/".join(self.words(3))

    def snake(self) -> str:
        return "_".join(self.words(2))

    def camel(self) -> str:
        first, second = self.words(2)
        return first + second.capitalize()

    def number(self) -> int:
        return self.random.randint(2, 999)


def _py_filter(n: _Names, _: bool) -> str:
    items, limit, found, item, field = (n.snake() for _ in range(5))
    return (
        f"def {n.snake()}({items}, {limit}={n.number()}):\n"
        f'    """{" ".join(n.words(7)).capitalize()}."""\n'
        f"    {found} = []\n"
        f"    for {item} in {items}:\n"
        f"        if {item}.{field} > {limit}:\n"
        f"            {found}.append({item}.{n.snake()})\n"
        f"    return {found}\n\n\n"
    )


def _py_lookup(n: _Names, _: bool) -> str:
    table, key, value = n.snake(), n.snake(), n.snake()
    return (
        f"def {n.snake()}({table}, {key}, default=None):\n"
        f"    # {' '.join(n.words(6))}\n"
        f"    {value} = {table}.get({key})\n"
        f"    if {value} is None:\n"
        f"        return default\n"
        f"    return {value} * {n.number()} + len({table})\n\n\n"
    )


def _py_class(n: _Names, _: bool) -> str:
    state, part = n.snake(), n.snake()
    name = "".join(word.capitalize() for word in n.words(2))
    return (
        f"class {name}:\n"
        f"    def __init__(self, {state}):\n"
        f"        self.{state} = {state}\n"
        f"        self.{part} = {n.number()}\n\n"
        f"    def {n.snake()}(self):\n"
        f"        while self.{part} > {n.number()}:\n"
        f"            self.{part} -= self.{state}\n"
        f"        return self.{part}\n\n\n"
    )


def _js_map(n: _Names, typed: bool) -> str:
    items, item, field = n.camel(), n.camel(), n.camel()
    given, made = (": Record<string, number>[]", ": number[]") if typed else ("", "")
    return (
        f"export function {n.camel()}({items}{given}){made} {{\n"
        f"  // {' '.join(n.words(6))}\n"
        f"  return {items}\n"
        f"    .filter(({item}) => {item}.{field} > {n.number()})\n"
        f"    .map(({item}) => {item}.{n.camel()});\n"
        f"}}\n\n"
    )


def _js_fetch(n: _Names, typed: bool) -> str:
    url, answer, value = n.camel(), n.camel(), n.camel()
    given, made = (": string", ": Promise<number>") if typed else ("", "")
    return (
        f"export async function {n.camel()}({url}{given}){made} {{\n"
        f"  const {answer} = await fetch(`${{{url}}}/{n.path()}`);\n"
        f"  if (!{answer}.ok) {{\n"
        f'    throw new Error("{" ".join(n.words(5))}");\n'
        f"  }}\n"
        f"  const {value} = await {answer}.json();\n"
        f"  return {value}.{n.camel()} ?? {n.number()};\n"
        f"}}\n\n"
    )


def _js_class(n: _Names, typed: bool) -> str:
    state = n.camel()
    kind, made = (": number", ": number") if typed else ("", "")
    name = "".join(word.capitalize() for word in n.words(2))
    field = f"  private {state}{kind} = {n.number()};\n\n" if typed else f"  {state} = {n.number()};\n\n"
    step = n.camel()
    return (
        f"export class {name} {{\n"
        f"{field}"
        f"  {n.camel()}({step}{kind}){made} {{\n"
        f"    while (this.{state} < {n.number()}) {{\n"
        f"      this.{state} += {step};\n"
        f"    }}\n"
        f"    return this.{state};\n"
        f"  }}\n"
        f"}}\n\n"
    )


_Shape = Callable[[_Names, bool], str]
_PYTHON: Final[tuple[_Shape, ...]] = (_py_filter, _py_lookup, _py_class)
_SCRIPT: Final[tuple[_Shape, ...]] = (_js_map, _js_fetch, _js_class)
