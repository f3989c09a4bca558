"""`make size` counts what its docstring says, on a small tree."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.size import (
    cycles,
    import_graph,
    read_tree,
    report,
    single_importers,
)

SOURCES = {
    "llmtap/__init__.py": "",
    "llmtap/a/__init__.py": '"""A package."""\n',
    "llmtap/a/first.py": '''
        """Two lines of docstring
        and the second."""

        import os  # the first line of code

        from . import second
        from .second import Thing

        # A comment is no code.
        TEXT = """
        # within a string a line is code

        """
        """An attribute's docstring."""


        class Shared:
            """Counts no lines."""

            class Inner: ...


        class _Private: ...
        ''',
    "llmtap/a/second.py": """
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from llmtap.b.third import Shared
        else:
            import llmtap.alone

        class Thing: ...
        """,
    "llmtap/b/third.py": """
        import llmtap.a.first

        class Shared: ...
        class _Private: ...
        """,
    "llmtap/b/fourth.py": """
        def use():
            try:
                from llmtap.b import fifth
            finally:
                pass
        """,
    "llmtap/b/fifth.py": "from llmtap.b.fourth import use\n",
    "llmtap/alone.py": "WIDE = 'x" + "x" * 110 + "'\n",
    "tests/test_long.py": "x = 1\n" * 501,
    "tests/test_explained.py": '"""All cases.\n\nLong\nbecause: one table."""\n' + "x = 1\n" * 501,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).removeprefix("\n"), encoding="utf-8")
    return tmp_path


def test_lines_and_code_are_counted_without_docstrings_comments_and_blanks(root: Path) -> None:
    modules = read_tree(root / "llmtap")
    assert len(modules) == 8
    first = modules["llmtap.a.first"]
    # Imports 3, TEXT 4, and a line for each of the three classes.
    assert (first.lines, first.code) == (23, 10)
    assert (modules["llmtap"].lines, modules["llmtap"].code) == (0, 0)
    assert (modules["llmtap.a"].lines, modules["llmtap.a"].code) == (1, 0)
    assert (modules["llmtap.a.second"].lines, modules["llmtap.a.second"].code) == (8, 6)


def test_imports_are_of_modules_and_those_for_types_are_counted_apart(root: Path) -> None:
    modules = read_tree(root / "llmtap")
    graph = import_graph(modules)
    assert graph["llmtap.a.first"] == {"llmtap.a.second"}
    assert graph["llmtap.a.second"] == {"llmtap.alone"}
    assert graph["llmtap.b.third"] == {"llmtap.a.first"}
    assert cycles(graph) == [["llmtap.b.fifth", "llmtap.b.fourth"]]
    assert cycles(import_graph(modules, with_types=True)) == [
        ["llmtap.a.first", "llmtap.a.second", "llmtap.b.third"],
        ["llmtap.b.fifth", "llmtap.b.fourth"],
    ]
    assert single_importers(graph) == {
        "llmtap.a.first": "llmtap.b.third", "llmtap.a.second": "llmtap.a.first",
        "llmtap.alone": "llmtap.a.second", "llmtap.b.fifth": "llmtap.b.fourth",
        "llmtap.b.fourth": "llmtap.b.fifth",
    }  # fmt: skip


def test_the_report_has_every_figure_beside_its_limit(root: Path) -> None:
    lines = report(root, name_single=True).splitlines()
    table = {line[:12].strip(): line.split()[-4:] for line in lines[:6]}
    assert table["llmtap/a/"] == ["3", "32", "16", "2"]
    assert table["llmtap/*.py"] == ["2", "1", "1", "1"]
    assert table["tests/"] == ["tests/", "2", "1,006", "1,002"]
    found = {what: [now, limit] for what, now, limit in (line.rsplit(None, 2) for line in lines[8:18])}
    assert found["lines of llmtap/"] == ["43", "60,000"]
    assert found["public class names of several modules"] == ["1", "0"]
    assert found["import cycles"] == ["1", "0"]
    assert found["import cycles with imports for types"] == ["2", "0"]
    assert found["lines over 110 columns"] == ["1", "0"]
    assert "  llmtap/alone.py:1" in lines
    assert "  tests/test_long.py 501" in lines
    assert "  llmtap.a.first: llmtap.b.third" in lines
