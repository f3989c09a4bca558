"""Which implementation runs, the reason that is given for Python, and what `llmtap --version` says."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmtap import __version__, native
from llmtap.native import _load
from llmtap.native.fingerprint import fingerprint

SOURCES = Path(native.__file__).parent


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An extension that was built from the present sources, and nothing that selects Python."""
    module = ModuleType("llmtap.native._native")
    module.FINGERPRINT = fingerprint(SOURCES)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("LLMTAP_NATIVE", raising=False)
    return module


def test_the_built_extension_runs(built: ModuleType) -> None:
    assert _load() == (built, "")


def test_the_environment_selects_python(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTAP_NATIVE", "0")
    assert _load() == (None, "LLMTAP_NATIVE=0")


@pytest.mark.parametrize("value", ["maybe", "off", "false", " 0"])
def test_an_unknown_value_selects_python_and_is_named(
    value: str, built: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTAP_NATIVE", value)
    found, reason = _load()
    assert found is None
    assert repr(value) in reason


@pytest.mark.parametrize("value", ["", "1"])
def test_compiled_code_can_be_asked_for(
    value: str, built: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTAP_NATIVE", value)
    assert _load() == (built, "")


def test_python_runs_without_an_extension(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, built.__name__, None)
    found, reason = _load()
    assert found is None
    assert "not built" in reason


def test_an_extension_that_cannot_be_loaded_is_not_called_missing(
    built: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> ModuleType:
        raise ImportError(f"{name}: undefined symbol: x")

    monkeypatch.setattr("importlib.import_module", refuse)
    found, reason = _load()
    assert found is None
    assert "undefined symbol" in reason


@pytest.mark.parametrize("of", ["0" * 16, None])
def test_an_extension_of_other_sources_does_not_run(built: ModuleType, of: str | None) -> None:
    built.FINGERPRINT = of  # type: ignore[attr-defined]
    found, reason = _load()
    assert found is None
    assert "other sources" in reason


def test_every_source_counts_in_the_fingerprint(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == ""
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
