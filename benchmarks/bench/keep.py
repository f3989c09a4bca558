"""Keep the report of `llmtap bench all` in a small form: the text of the minimum report, and JSON.

    .venv/bin/python benchmarks/bench/keep.py RESULTS STEM

writes STEM.txt and STEM.json from the results folder RESULTS. The JSON has for each test its begin and end,
the verdict, the validity of each requested figure, findings, cautions, the level of compliance, and the
tables.
"""

import argparse
import json
from pathlib import Path


def keep(results: Path, stem: Path) -> None:
    stem.with_suffix(".txt").write_bytes((results / "minimum.txt").read_bytes())
    tests = {}
    for path in sorted(results.glob("*/result.json")):
        result = json.loads(path.read_text())
        verdict = result["verdict"]
        tests[path.parent.name] = {
            "began": result["began"],
            "ended": result["ended"],
            "verdict": verdict["grade"],
            "validity": verdict["says"],
            "figures": {
                name: figure["state"] for name, figure in verdict["figures"].items() if figure["requested"]
            },
            "findings": [finding["says"] for finding in verdict["findings"]],
            "cautions": [caution["says"] for caution in verdict["cautions"]],
            "compliance": result["compliance"]["level"],
            "round_trip": result["round_trip"],
            "tables": result["tables"],
        }
    stem.with_suffix(".json").write_text(json.dumps(tests, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="results folder of `llmtap bench all`")
    parser.add_argument("stem", type=Path, help="files to write, without .txt and .json")
    arguments = parser.parse_args()
    keep(arguments.results, arguments.stem)
