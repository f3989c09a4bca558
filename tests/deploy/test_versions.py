"""The supported versions of Python: every place that names them names the same ones."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def versions() -> list[int]:
    """Minor versions of Python 3, from `requires-python`."""
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"])
    assert bounds is not None
    return list(range(int(bounds[1]), int(bounds[2])))


def test_metadata_and_wheels_name_the_supported_versions() -> None:
    label = "Programming Language :: Python :: 3."
    classifiers = [text for text in PROJECT["project"]["classifiers"] if text.startswith(label)]
    assert classifiers == [f"{label}{minor}" for minor in versions()]
    wheels = PROJECT["tool"]["cibuildwheel"]["build"]
    assert wheels == [f"cp3{minor}-manylinux_*" for minor in versions()]


def test_ci_runs_every_supported_version() -> None:
    """The oldest one is the system's own, of the ordinary and the bare run."""
    script = (ROOT / ".ci" / "run").read_text()
    loop = re.search(r"^ *for version in (.+); do$", script, re.MULTILINE)
    assert loop is not None
    assert loop[1].split() == [f"3.{minor}" for minor in versions()[1:]]


def test_make_and_the_readme_name_the_supported_versions() -> None:
    oldest, newest = versions()[0], versions()[-1]
    assert f"(3, {oldest}) <= sys.version_info < (3, {newest + 1})" in (ROOT / "Makefile").read_text()
    assert "Python 3.11, 3.12 or 3.13, git and make" in (ROOT / "README.md").read_text()
    assert [oldest, newest] == [11, 13], "change the sentences of README.md and of the Makefile, too"
