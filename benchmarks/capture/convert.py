"""How fast a long trace is converted, and in how much memory.

Makes a CSV like BurstGPT's (seeded: gamma gaps between arrivals with a CV of 13, log-normal lengths, 80 %
ChatGPT), and converts it to a capture, to Mooncake's form, and the capture to Mooncake's form. Each
conversion runs in a process of its own, whose peak of resident memory is read at its end.

    .venv/bin/python benchmarks/capture/convert.py [--rows 5000000] [--json FILE]
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROWS_MAX = 50_000_000
"""Some 2 GB of CSV."""
SHAPE = 1 / 13.28**2
"""Of the gamma distribution of gaps: its CV is that of BurstGPT (multi-bin batching paper, 3.1)."""
RATE_RPS = 0.27
PROGRAM = """
import json, resource, sys
from llmtap.traces.convert import convert
report = convert(sys.argv[1], sys.argv[2], target_format=sys.argv[3]).to_dict()
report["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
report["cpu_seconds"] = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
print(json.dumps(report))
"""


def make(path: Path, rows: int, seed: int) -> None:
    """A CSV of so many rows."""
    rng = random.Random(seed)
    gap, length = rng.gammavariate, rng.lognormvariate
    at_s = 0.0
    with path.open("w", encoding="ascii") as out:
        out.write("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
        for _ in range(rows):
            at_s += gap(SHAPE, 1 / (SHAPE * RATE_RPS))
            asked, said = 1 + int(length(5.5, 1.3)), int(length(3.5, 1.6))
            model = "ChatGPT" if rng.random() < 0.8 else "GPT-4"
            out.write(f"{at_s:.0f},{model},{asked},{said},{asked + said},API log\n")


def measure(source: Path, target: Path, name: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, str(source), str(target), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not 0 < args.rows <= ROWS_MAX:
        parser.error(f"--rows: expected 1 to {ROWS_MAX:,}")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        csv, capture, jsonl = (Path(folder) / name for name in ("trace.csv", "trace.parquet", "trace.jsonl"))
        make(csv, args.rows, args.seed)
        reports = [measure(csv, capture, "llmtap")]
        reports.append(measure(csv, jsonl, "mooncake"))
        jsonl.unlink()
        reports.append(measure(capture, jsonl, "mooncake"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("from", "to", "rows", "rows/s", "CPU us/row", "peak MB", "bytes/row in", "bytes/row out"):
        table.add_column(column, justify="left" if column in ("from", "to") else "right")
    for r in reports:
        n = r["rows_read"]
        table.add_row(
            r["source_format"],
            r["target_format"],
            f"{n:,}",
            f"{n / r['seconds']:,.0f}",
            f"{r['cpu_seconds'] / n * 1e6:.1f}",
            f"{r['peak_bytes'] / 1e6:.0f}",
            f"{r['bytes_in'] / n:.1f}",
            f"{r['bytes_out'] / n:.1f}",
        )
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
