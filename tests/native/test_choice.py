"""Which implementation runs, the reason that is given for Python, and what `llmtap --version` says."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmtap import __version__, native
from llmtap.native import _load
from llmtap.native.fingerprint import fingerprint

SOURCES = fingerprint(Path(native.__file__).parent)


def refuse(name: str) -> ModuleType:
    raise ImportError(f"{name}: undefined symbol: x")


@pytest.mark.parametrize(
    ("value", "built_of", "reason"),
    [
        (None, SOURCES, ""),
        ("", SOURCES, ""),
        ("1", SOURCES, ""),
        ("0", SOURCES, "LLMTAP_NATIVE=0"),
        ("off", SOURCES, "'off'"),
        (" 0", SOURCES, "' 0'"),
        (None, "", "not built"),
        (None, "0" * 16, "other sources"),
        (None, None, "other sources"),
        (None, refuse, "undefined symbol"),
    ],
)
def test_the_compiled_code_runs_if_it_was_built_of_these_sources_and_nothing_selects_python(
    value: str | None, built_of: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("llmtap.native._native")
    module.FINGERPRINT = built_of  # type: ignore[attr-defined]
    found_module: Any = None if built_of == "" else module
    monkeypatch.setitem(sys.modules, module.__name__, found_module)
    if built_of is refuse:
        monkeypatch.setattr("importlib.import_module", refuse)
    if value is None:
        monkeypatch.delenv("LLMTAP_NATIVE", raising=False)
    else:
        monkeypatch.setenv("LLMTAP_NATIVE", value)
    found, told = _load()
    assert found is (None if reason else module)
    assert reason in told if reason else told == ""


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("headers", [True, False])
def test_missing_compiled_code_is_reported_with_its_cost_and_the_missing_packages(
    compiler: bool, headers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(native, "REASON", "the extension was not built")
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/cc" if compiler else None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path if headers else tmp_path / "no"))
    line = native.missing_build()
    assert line.count("\n") == 0 and "twice the CPU" in line
    assert [package in line for package in ("gcc", "python3-dev")] == [not compiler, not headers]


@pytest.mark.parametrize("reason", ["", "LLMTAP_NATIVE=0", "LLMTAP_NATIVE: expected 0 or 1, got 'off'"])
def test_compiled_code_that_runs_or_is_deselected_is_not_reported(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "REASON", reason)
    assert native.missing_build() == ""


def test_every_source_counts_in_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("x = 1\n")
    assert fingerprint(tmp_path) == ""
    seen = {""}
    for name in ("a.pyx", "b.pxi", "c.c", "d.h"):
        for text in ("", "x", "y"):
            (tmp_path / name).write_text(text)
            seen.add(fingerprint(tmp_path))
    assert len(seen) == 1 + 4 * 3


@pytest.mark.parametrize("value", [None, "0"])
def test_the_version_names_the_implementation(value: str | None) -> None:
    environ = {key: text for key, text in os.environ.items() if key != "LLMTAP_NATIVE"}
    if value is not None:
        environ["LLMTAP_NATIVE"] = value
    elif os.environ.get("LLMTAP_NATIVE") == "0":
        pytest.skip("the expected name is unknown in this process")
    expected = native.describe() if value is None else "python: LLMTAP_NATIVE=0"
    command = [sys.executable, "-m", "llmtap.cli", "--version"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"llmtap {__version__} ({expected})\n"), done.stderr
