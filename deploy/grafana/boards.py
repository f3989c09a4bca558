"""Writes the four boards for Grafana to `boards/*.json`.

    .venv/bin/python deploy/grafana/boards.py [FOLDER]

Change them in the files beside this one, and run it; a test says when the JSON is not what this makes. A
board that was changed in Grafana is not read back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from guardrails_board import guardrails_board
from slo_board import slo_board
from streams_board import streams_board
from tap_board import tap_board


def main(folder: Path) -> None:
    """Writes a file for each board."""
    boards = (slo_board(), streams_board(), guardrails_board(), tap_board())
    for board in boards:
        text = json.dumps(board.model(boards), indent=2, ensure_ascii=False)
        (folder / f"{board.uid}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "boards")
