"""Shared by tests of commands: a trace, the type of the fixture `call`, a command with more progress."""

from collections.abc import Callable
from pathlib import Path

FREQUENT_PROGRESS = """
from llmtap.cli import progress
from llmtap.cli.main import main
progress.LINE_INTERVAL_NS = 500_000_000
main()
"""
"""Python code of the command `llmtap` that prints its progress twice a second."""
Call = Callable[..., tuple[int, str, str]]
HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def small_trace(path: Path) -> Path:
    """60 rows, one every 2 s."""
    rows = [(i * 2, 10 + i, i % 30) for i in range(60)]
    path.write_text(HEADER + "".join(f"{t},GPT-4,{n},{m},{n + m},API log\n" for t, n, m in rows))
    return path
