"""A small trace for `llmtap sim run`, and the type of the fixture `call`."""

from collections.abc import Callable
from pathlib import Path

Call = Callable[..., tuple[int, str, str]]
HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def small_trace(path: Path) -> Path:
    """60 rows, one every 2 s."""
    rows = [(i * 2, 10 + i, i % 30) for i in range(60)]
    path.write_text(HEADER + "".join(f"{t},GPT-4,{n},{m},{n + m},API log\n" for t, n, m in rows))
    return path
