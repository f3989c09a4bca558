"""The bill of materials names what a user installs, with its version and a licence that goes with ours."""

import json
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_WORK = {"dev", "test", "docs", "audit"}
"""Extras that nobody needs who only runs it."""
AGAIN = "make sbom"

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
    # Weak copyleft, file by file: of those we change nothing, and ship nothing.
    "MPL-2.0",
    # What the runtime library of a compiler is under.
    "GPL-3.0-or-later WITH GCC-exception-3.1",
}
"""SPDX ids of licences under which something may be installed beside a work under Apache-2.0."""
NAMED = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "MIT License": "MIT",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""SPDX ids of what packages call their licence otherwise."""


@pytest.fixture(scope="module")
def components() -> dict[str, dict[str, Any]]:
    """By name."""
    bill = json.loads((ROOT / "deploy" / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == (
        PROJECT["name"],
        PROJECT["version"],
    )
    return {str(canonicalize_name(one["name"])): one for one in bill["components"]}


def pinned() -> dict[str, str]:
    """Version by name, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pairs = (line.split("==") for line in lines)
    return {str(canonicalize_name(name)): version for name, version in pairs}


def runtime() -> set[str]:
    """All that has to be there where every extra for users is: what is asked for, and what that asks for."""
    wanted = list(PROJECT["dependencies"])
    for extra in EXTRAS.keys() - FOR_WORK:
        wanted += EXTRAS[extra]
    asked = [(Requirement(text), "") for text in wanted]
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while asked:
        requirement, extra = asked.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = str(canonicalize_name(requirement.name))
        found.add(name)
        for part in ("", *requirement.extras):
            if (name, part) not in seen:
                seen.add((name, part))
                asked += [(Requirement(text), part) for text in distribution(name).requires or []]
    return found


def extras_in(extra: str) -> set[str]:
    """Return the extras that an extra contains, also through others."""
    found: set[str] = set()
    for one in map(Requirement, EXTRAS[extra]):
        if one.name == PROJECT["name"]:
            found |= one.extras.union(*map(extras_in, one.extras))
    return found


def test_the_extras_for_users_are_those_that_are_tested_and_billed() -> None:
    told = re.search(r"^RUNTIME := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert told is not None
    assert set(told[1].split(",")) == EXTRAS.keys() - FOR_WORK
    assert extras_in("dev") - FOR_WORK == EXTRAS.keys() - FOR_WORK


def test_every_runtime_dependency_is_there_as_pinned(components: dict[str, dict[str, Any]]) -> None:
    assert runtime() - components.keys() == set(), f"not in the bill: {AGAIN}"
    versions = {name: one["version"] for name, one in components.items()}
    known = pinned()
    wrong = {name: (told, known.get(name)) for name, told in versions.items() if told != known.get(name)}
    assert wrong == {}, f"not as in constraints.txt: {AGAIN}"


def test_every_licence_goes_with_ours(components: dict[str, dict[str, Any]]) -> None:
    for name, one in components.items():
        told = licences(one)
        assert told, f"{name} names no licence"
        # Several are several claims about the same: its own field, its classifiers. All have to hold.
        for text in told:
            assert is_allowed(text), f"{name}: {text}"


def test_nothing_of_a_machine_is_in_it() -> None:
    text = (ROOT / "deploy" / "sbom.cdx.json").read_text(encoding="utf-8")
    assert "file:" not in text
    assert not re.search(r'"/(?:home|root|work|tmp|usr|opt)\b', text)
    bill = json.loads(text)
    assert "timestamp" not in bill["metadata"], "made twice, it is the same"


def licences(component: dict[str, Any]) -> list[str]:
    """SPDX expressions, or names, that the component is said to be under."""
    return [
        told.get("expression") or told["license"].get("id") or told["license"]["name"]
        for told in component.get("licenses", [])
    ]


def is_allowed(text: str) -> bool:
    """Whether an SPDX expression (2.3, annex D) can be met by licences that are allowed."""
    text = NAMED.get(text, text)
    known = {"(": "(", ")": ")", "AND": "and", "OR": "or"}
    tokens = re.findall(r"[()]|[^\s()]+ WITH [^\s()]+|[^\s()]+", text)
    # AND binds closer than OR, there as in Python.
    return bool(eval(" ".join(known.get(token, str(token in ALLOWED)) for token in tokens), {}))
