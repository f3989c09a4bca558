"""CSV of exchanges: every column of a capture, and the phases of a request."""

import csv
import json
from pathlib import Path

import pyarrow as pa

from llmtap.capture.csv_file import PHASES, write_csv
from llmtap.capture.schema import SCHEMA


def test_a_row_has_every_column_and_the_phases(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "submit_us": 900, "connect_us": 700, "first_byte_us": 1_900, "response_end_us": 5_000},
        {"id": 'quoted "b", with a comma', "submit_us": 40, "message_roles": ["user", "assistant"]},
        {"id": "c"},
    ]
    file = tmp_path / "requests.csv"
    assert write_csv(file, [pa.RecordBatch.from_pylist(rows, SCHEMA)]) == 3
    with file.open(newline="") as text:
        first, second, third = csv.DictReader(text)
    assert list(first) == [*SCHEMA.names, *PHASES]
    assert [first[name] for name in PHASES] == ["200", "1000", "3100"]
    assert [second[name] for name in PHASES] == ["40", "", ""]
    assert second["id"] == rows[1]["id"]
    assert json.loads(second["message_roles"]) == ["user", "assistant"]
    assert [third[name] for name in PHASES] == ["", "", ""]
