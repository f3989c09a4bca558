"""Every command of the documentation's pages does what it says there; what is not run says why."""

import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtap.cli.main import root_command
from tests.docs.documents import SHELL, blocks, commands, pages
from tests.docs.walkthrough import PAGE_S, walked

RUN = (*SHELL, "python", "toml")
CONNECTIONS = ("|", "&", "&&", "||", ";")
"""Words after which another command begins."""
PAGES = [page for page in pages() if page.parent.name == "docs"]


def to_run(page: Path) -> bool:
    return any(block.language in RUN and block.not_run is None for block in blocks(page.read_text()))


@pytest.mark.realtime
@pytest.mark.timeout(PAGE_S + 120)
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if to_run(page)])
def test_each_command_of_a_page_runs(page: Path) -> None:
    walked(page)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in pages()])
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.not_run is not None:
            print(f"{page.name}, line {block.line}: {block.not_run}")
            assert len(block.not_run.split()) >= 3, f"line {block.line}: why is it not run?"


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in pages()])
def test_each_command_begins_with_a_program_and_has_options_that_there_are(page: Path) -> None:
    for block in blocks(page.read_text()):
        for command in commands(block) if block.language in SHELL else ():
            assert not command.startswith("-"), f"line {block.line}: is a backslash missing?"
            assert list(unknown(command)) == [], command


def unknown(command: str) -> Iterator[str]:
    """Subcommands and options of ours that there are none of."""
    words = shlex.split(command, comments=True)
    while words and "=" in words[0]:
        del words[0]
    if not words or words.pop(0).rpartition("/")[2] != "llmtap":
        return
    here: Any = root_command()
    while inner := getattr(here, "commands", None):
        word = words.pop(0)
        if word not in inner:
            yield word
            return
        here = inner[word]
    words = list(itertools.takewhile(lambda word: word not in CONNECTIONS, words))
    known = {name for one in here.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    yield from (word for word in words if word.startswith("-") and word.partition("=")[0] not in known)
