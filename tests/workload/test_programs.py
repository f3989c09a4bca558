"""Generated code is code: Python's own parser reads it, and brackets of the others close."""

import ast
from itertools import islice

import pytest

from llmtap.workload.programs import LANGUAGES, program


def said(key: str, language: str, parts: int) -> str:
    return "".join(text for text, _ in islice(program(key, language), parts))


@pytest.mark.parametrize("key", ["a", "b", "42/7", ""])
def test_python_is_python(key: str) -> None:
    tree = ast.parse(said(key, "python", 40))
    assert len(tree.body) == 39, "a comment, and a function or class each"


@pytest.mark.parametrize("language", LANGUAGES)
def test_brackets_close_and_files_differ(language: str) -> None:
    texts = [said(f"{i}", language, 12) for i in range(50)]
    for text in texts:
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing)
    assert len({text.partition("\n")[0] for text in texts}) == 50
