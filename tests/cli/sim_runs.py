"""`llmtap sim run` in this process, and a small trace for it."""

import sys
from pathlib import Path

import pytest

from llmtap.cli.main import main

__all__ = ["HEADER", "sim_run", "small_trace"]

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def small_trace(path: Path) -> Path:
    """60 rows, one every 2 s."""
    rows = [(i * 2, 10 + i, i % 30) for i in range(60)]
    path.write_text(HEADER + "".join(f"{t},GPT-4,{n},{m},{n + m},API log\n" for t, n, m in rows))
    return path


def sim_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    """Its exit status, and what it wrote."""
    monkeypatch.setattr(sys, "argv", ["llmtap", "sim", "run", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err
