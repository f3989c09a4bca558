"""Whole outputs are as in the files of `expected/`. `make golden` rewrites them: then read the difference."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.cases import CASES, DATA
from tests.golden.transcript import normalised, transcript
from tests.support.expected import check_expected

CONFIG = Path(__file__).parents[2] / "config"
EXPECTED = Path(__file__).with_name("expected")


def place(name: str) -> Path:
    return EXPECTED / f"{name}.txt"


@pytest.fixture
def utc() -> Iterator[None]:
    """`llmtap top` shows local times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("name", CASES)
def test_output_is_as_in_its_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    if callable(case):
        found = normalised(case())
    else:
        shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
        shutil.copytree(CONFIG, tmp_path / CONFIG.name)
        found = transcript(case, tmp_path, monkeypatch)
    check_expected(place(name), found, request.config)


def test_every_file_is_that_of_a_case(request: pytest.FixtureRequest) -> None:
    unknown = {file for file in EXPECTED.rglob("*") if file.is_file()} - set(map(place, CASES))
    if request.config.getoption("--rewrite-golden"):
        for file in unknown:
            file.unlink()
        return
    assert unknown == set()
