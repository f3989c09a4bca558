"""Commands are called in the process of the test."""

import sys

import pytest

from llmtap.cli.main import main
from tests.cli.traces import Call


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call a command with arguments; return its exit code, standard output and standard error."""

    def called(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llmtap", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return called
