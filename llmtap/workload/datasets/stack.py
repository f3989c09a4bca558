"""Stack-shaped files: source code, a file a line, of which functions are to be completed (seed 000, A.4.1).

JSON lines with `content`, and `language` (or `lang`) where there is one. A function is an item: the prompt is
its file up to and including its signature (in Python its docstring, too), whole lines, as many of the last
ones as fit into 1,024 tokens; the completion is its body. Functions are found by how they are indented and by
their braces, not by a parser.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from llmtap.errors import ConfigError
from llmtap.traces.format import FormatError
from llmtap.traces.text import read_lines
from llmtap.workload.datasets.recorded import Pair, file_described, reading
from llmtap.workload.programs import LANGUAGES
from llmtap.workload.prompts.prose import fitted_text
from llmtap.workload.prompts.words import count_tokens

__all__ = ["CONTENT", "PROMPT_TOKENS_MAX", "Stack", "functions", "read_stack"]

CONTENT: Final = {"kind": "data", "domain": "code", "language": list(LANGUAGES)}
PROMPT_TOKENS_MAX: Final = 1_024
"""Of what stands before a function's body; a longer signature is kept whole."""
_SHORT: Final = {
    "py": "python",
    "js": "javascript",
    "ts": "typescript",
    "tsx": "typescript",
    "jsx": "javascript",
}

_PYTHON: Final = re.compile(
    r"^([ \t]*)(?:async[ \t]+)?def[ \t]+\w+[ \t]*\([^)]*\)[^:\n]*:[ \t]*\n"
    r'(?:[ \t]+(?:"""(?:(?!""")[\s\S])*"""|\'\'\'(?:(?!\'\'\')[\s\S])*\'\'\')[ \t]*\n)?',
    re.MULTILINE,
)
"""A signature, and the docstring if there is one."""
_SCRIPT: Final = re.compile(
    r"^([ \t]*)(?:export[ \t]+)?(?:default[ \t]+)?(?:async[ \t]+)?"
    r"(?:function\b[^{;\n]*|"
    r"(?:const|let|var)[ \t]+\w+[^=\n]*=[ \t]*(?:async[ \t]*)?\([^)]*\)[^={\n]*=>[ \t]*)\{[ \t]*\n",
    re.MULTILINE,
)


class _File(msgspec.Struct):
    content: str
    language: str | None = None
    lang: str | None = None


_decode: Final = msgspec.json.Decoder(_File).decode


@dataclass(frozen=True, slots=True)
class Stack:
    """Functions of source files."""

    files: list[str]
    places: list[tuple[int, int, int]]
    """File, and where in it a function's body begins and ends."""
    items: Sequence[range]
    about: Mapping[str, Any] = field(default_factory=dict)

    def pair(self, number: int) -> Pair:
        file, begin, end = self.places[number]
        text = self.files[file]
        return _last_lines(text[:begin]), text[begin:end]

    def context(self, number: int, tokens: int, seed: int) -> str:
        """The beginning of a file of the seed's choice, and of those after it until it is long enough."""
        order = Random(f"{seed}/context files").sample(range(len(self.files)), len(self.files))
        text, k = "", number
        while count_tokens(text) <= tokens and k < number + len(order):
            text += self.files[order[k % len(order)]] + "\n"
            k += 1
        # Too few files for K contexts of other texts: a first line of its own tells them apart.
        head = f"# context {number}\n" if number >= len(order) else ""
        return fitted_text(head + text, tokens, "#")

    def describe(self) -> Mapping[str, Any]:
        return self.about


def read_stack(path: Path, place: str) -> Stack:
    """All functions of a file's Python, JavaScript and TypeScript. Raises ConfigError of the place."""
    files: list[str] = []
    places: list[tuple[int, int, int]] = []
    seen = other = bare = 0
    with reading(path, place) as lines:
        for number, line in read_lines(lines):
            try:
                given = _decode(line)
            except (ValueError, RecursionError) as exc:
                raise FormatError(f"line {number}: {exc}") from None
            seen += 1
            language = (given.language or given.lang or "").lower()
            language = _SHORT.get(language, language)
            if language and language not in LANGUAGES:
                other += 1
                continue
            text = given.content.replace("\r\n", "\n")
            found = list(functions(text, language))
            if not found:
                bare += 1
                continue
            places += [(len(files), begin, end) for begin, end in found]
            files.append(text)
    if not files:
        raise ConfigError(place, f"{path} has no function in {', '.join(LANGUAGES)}")
    told = ((other, "files are in other languages"), (bare, "files have no function"))
    about = {
        **file_described(path),
        "dataset": "Stack-shaped",
        "version": "the file's sha256; A.4.1 names The Stack without a version",
        "preprocessing": "function-level completions: the prompt is a function's file up to its signature"
        f" (and docstring), the last whole lines of it that fit into {PROMPT_TOKENS_MAX:,} tokens;"
        " its body is the completion; CRLF became LF",
        "files": seen,
        "functions": len(places),
        "notes": [f"{n:,} {what}, and were left out" for n, what in told if n],
    }
    return Stack(files, places, [range(i, i + 1) for i in range(len(places))], about)


def functions(text: str, language: str) -> Iterator[tuple[int, int]]:
    """Where the bodies of a text's functions begin and end; `language` is "" where nobody knows."""
    if language in ("python", ""):
        for found in _PYTHON.finditer(text):
            if end := _end_of_block(text, found.end(), len(found[1].expandtabs())):
                yield found.end(), end
    if language != "python":
        for found in _SCRIPT.finditer(text):
            close = re.compile(rf"^{found[1]}\}}", re.MULTILINE).search(text, found.end())
            if close is not None and text[found.end() : close.start()].strip():
                yield found.end(), close.end()


def _end_of_block(text: str, begin: int, indent: int) -> int | None:
    """The end of the last line that is indented more; None where there is none."""
    end, at = None, begin
    while at < len(text):
        stop = text.find("\n", at) + 1 or len(text)
        line = text[at:stop].expandtabs()
        if line.strip():
            if len(line) - len(line.lstrip()) <= indent:
                break
            end = at + len(text[at:stop].rstrip("\n"))
        at = stop
    return end


def _last_lines(text: str) -> str:
    """As many whole lines from the end as have PROMPT_TOKENS_MAX tokens; one at least."""
    lines = text.splitlines(keepends=True)
    kept, tokens = len(lines), 0
    while kept:
        # White space at the ends of two lines may become one piece: the sum is never less than the whole.
        tokens += count_tokens(lines[kept - 1])
        if tokens > PROMPT_TOKENS_MAX and kept < len(lines):
            break
        kept -= 1
    return "".join(lines[kept:])
