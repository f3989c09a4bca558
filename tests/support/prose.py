"""`make lint`: check that the documents and messages are plain technical English, in short lines.

`make fmt` calls it with `--fix`: it wraps the paragraphs and items of Markdown that have a line that is too
wide. Prints one line for each problem, and exits 1 if there is one.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyphen import Pyphen

ROOT: Final = Path(__file__).parents[2]
README_LINES_MAX: Final = 150
COLUMNS_MAX: Final = 120
GRADE_MAX: Final = 9
"""Years of school that a reader needs."""
HYPHENATION: Final = Pyphen(lang="en_US")
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
    *sorted((ROOT / "llmtap").rglob("*.md")),
    *sorted((ROOT / "tests" / "e2e").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *(page for page in sorted((ROOT / "benchmarks").glob("*/*.md")) if page.parent.name != "reports"),
]
SOURCES: Final = [*PAGES, *sorted((ROOT / "llmtap").rglob("*.py")), *sorted((ROOT / "config").glob("*.toml"))]
FORBIDDEN: Final = {
    r"not to be believed": "the result is invalid",
    r"in other words": "same length, different text",
    r"\b(be|is|are) had of\b": "is available",
    r"before a word is said": "before it is reported",
    r"\botherwise than\b": "differences from",
    r"\bfor who asks\b": "accepts only",
    r"[Ss]o many of the\b": "fraction of",
    r"\b[Ww]hose fields may be\b": "server type",
    r"\bgone on with\b": "resumed",
    r"\b[Hh]as one called\b": "timer",
    r"\b[Tt]okens for nobody\b": "tokens generated after the client disconnected",
    r"\bthere is nothing of\b": "empty ... are omitted",
    r"\bmind:": "warning:",
    r"\bafter so long\b": "maximum duration",
    r"\b[Oo]f all that is\b": "fraction of",
    r"\bthere (is|are) none of\b": "does not exist",
    r"\bkeep(s)? to itself\b": "does not report",
    r"\bof its own accord\b": "by itself",
    r"\b[Ss]eed 00[0-4]\b": "the name of the paper or draft",
    r"\bno file tells\b": "is not configured",
}
"""Phrases that readers had to read twice, as patterns, and what to write."""
WORDS_MIN: Final = 50
"""Shortest page whose grade is computed."""
ITEM: Final = re.compile(r"\s*(?:[-*+]|\d+\.) +")
MARK: Final = re.compile(r"\s*(?:[-*+#>|!<]|\d+[.)]\s|```|~~~|===)")
"""Begin of a line that is not plain text: a wrapped line must not begin like this."""


def prose(text: str) -> str:
    """Return the sentences of a Markdown page: no code, tables, headings, images or addresses."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = "\n".join("" if re.match(r"\s*[|#!<]", line) else line for line in text.splitlines())
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|https?://\S+", "name", text)
    text = re.sub(r"\n\s*([-*]|\d+\.)\s", "\n\n", text.replace("**", ""))
    paragraphs = [" ".join(one.split()) for one in re.split(r"\n\s*\n", text) if one.strip()]
    return " ".join(one if one.endswith((".", ":", "?", "!")) else one + "." for one in paragraphs)


def grade(text: str) -> float:
    """Return the Flesch-Kincaid grade (Kincaid et al., 1975); syllables are the parts that hyphens make."""
    words = re.findall(r"[A-Za-z']+", text)
    sentences = len(re.findall(r"[.:?!](?=\s|$)", text))
    syllables = sum(len(HYPHENATION.positions(word)) + 1 for word in words)
    return 0.39 * len(words) / sentences + 11.8 * syllables / len(words) - 15.59


def wide_lines(lines: list[str]) -> Iterator[int]:
    """Yield the indices of the lines that are too wide, outside code, tables, images and HTML."""
    code = False
    for i, line in enumerate(lines):
        code ^= line.lstrip().startswith(("```", "~~~"))
        if len(line) > COLUMNS_MAX and not code and not line.lstrip().startswith(("|", "!", "<")):
            yield i


def wrap(lines: list[str], wide: int) -> list[str]:
    """Return the lines of a page, with the paragraph or item of a wide line wrapped."""
    first = last = wide
    while first and not ITEM.match(lines[first]) and _continues(lines[first - 1]):
        first -= 1
    while last + 1 < len(lines) and lines[last + 1].strip() and not MARK.match(lines[last + 1]):
        last += 1
    item = ITEM.match(lines[first])
    margin = item[0] if item else re.match(r"\s*", lines[first])[0]  # type: ignore[index]
    text = " ".join(line.strip() for line in lines[first : last + 1])[len(margin.strip()) :].strip()
    wrapped = textwrap.wrap(
        text,
        COLUMNS_MAX,
        initial_indent=margin,
        subsequent_indent=" " * len(margin),
        break_long_words=False,
        break_on_hyphens=False,
    )
    if any(MARK.match(line) for line in wrapped[1:]):
        return lines
    return [*lines[:first], *wrapped, *lines[last + 1 :]]


def _continues(line: str) -> bool:
    """Whether the next line may belong to the paragraph or item of this one."""
    return bool(line.strip()) and (ITEM.match(line) is not None or MARK.match(line) is None)


def fix(page: Path) -> None:
    lines = page.read_text().splitlines()
    for i in reversed(list(wide_lines(lines))):
        lines = wrap(lines, i)
    text = "".join(f"{line}\n" for line in lines)
    if text != page.read_text():
        page.write_text(text)


def problems() -> Iterator[str]:
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > README_LINES_MAX:
        yield f"README.md: {lines} lines; at most {README_LINES_MAX}"
    for page in PAGES:
        text, name = page.read_text(), page.relative_to(ROOT)
        for i in wide_lines(text.splitlines()):
            yield f"{name}:{i + 1}: wider than {COLUMNS_MAX} columns; `make fmt` wraps paragraphs"
        sentences = prose(text)
        if len(sentences.split()) >= WORDS_MIN and (years := grade(sentences)) > GRADE_MAX:
            yield f"{name}: sentences for {years:.1f} years of school; at most {GRADE_MAX}"
    for path in SOURCES:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for phrase, better in FORBIDDEN.items():
                if re.search(phrase, line):
                    yield f"{path.relative_to(ROOT)}:{number}: {line.strip()!r} is read twice: {better}"


def main() -> int:
    if "--fix" in sys.argv[1:]:
        for page in PAGES:
            fix(page)
    found = list(problems())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
