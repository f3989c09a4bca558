"""The documents and messages are plain technical English: short lines, easy sentences, standard terms."""

import re
from pathlib import Path

import pytest
from pyphen import Pyphen

ROOT = Path(__file__).parents[2]
README_LINES_MAX = 150
COLUMNS_MAX = 120
GRADE_MAX = 9
"""Years of school that a reader needs."""
HYPHENATION = Pyphen(lang="en_US")
PAGES = [
    ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md")),
    *sorted((ROOT / "llmtap").rglob("*.md")), *sorted((ROOT / "tests" / "e2e").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *(page for page in sorted((ROOT / "benchmarks").glob("*/*.md")) if page.parent.name != "reports"),
]  # fmt: skip
READ = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]
SOURCES = [*PAGES, *sorted((ROOT / "llmtap").rglob("*.py")), *sorted((ROOT / "config").glob("*.toml"))]
FORBIDDEN = {
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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", READ)
def test_lines_are_at_most_120_columns_wide_outside_tables_and_code(page: Path) -> None:
    wide, code = [], False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        code ^= line.lstrip().startswith(("```", "~~~"))
        if len(line) > COLUMNS_MAX and not code and not line.lstrip().startswith(("|", "!", "<")):
            wide.append(number)
    assert wide == []


@pytest.mark.parametrize("page", READ)
def test_sentences_are_easy(page: Path) -> None:
    text = prose(page.read_text())
    if len(text.split()) >= 50:
        assert grade(text) <= GRADE_MAX


def test_phrases_that_readers_had_to_read_twice_are_gone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()} -> {better}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for phrase, better in FORBIDDEN.items()
        if re.search(phrase, line)
    ]
    assert found == []
