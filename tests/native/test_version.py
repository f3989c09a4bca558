"""`llmtap --version` says which implementation runs."""

import os
import subprocess
import sys

import pytest

from llmtap import __version__, native


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
