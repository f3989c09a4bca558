"""The job for GitHub Actions in docs/howto/ci.md, run against `llmtap sim serve`.

    .venv/bin/python tests/e2e/gates.py

The steps of the job are read from the page and run as the runner does: each by bash, in one folder, with
the variables of the job. The job must pass. Its result becomes the baseline, and with a server whose TTFT is
30 ms longer both gates must fail with exit code 3. A load with exit code 4, on a machine that is too busy to
measure, is repeated, as the page advises; any other wrong code fails at once.

Exits 1, naming what is wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml
from parts.servers import port_free

REPOSITORY: Final = Path(__file__).parent.parent.parent
PAGE: Final = REPOSITORY / "docs" / "howto" / "ci.md"
MISSED: Final = 3
NOT_VALID: Final = 4
RUNS_MAX: Final = 3
"""Runs of the load, if its result is not valid."""
ADDED_MS: Final = 30
STEP_S_MAX: Final = 300
INSTALL: Final = "Install llmtap"
SERVER: Final = "Start the server"
LOAD: Final = "Send the load"
COMPARISON: Final = "Compare with the baseline"


def read_job() -> dict[str, Any]:
    """Return the job of the page's workflow."""
    for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.S):
        workflow = yaml.safe_load(text)
        if "jobs" in workflow:
            (job,) = workflow["jobs"].values()
            return dict(job)
    raise SystemExit(f"{PAGE}: there is no workflow")


def run_job(job: dict[str, Any], folder: Path, ttft: str) -> dict[str, int]:
    """Run the steps in a folder, also after one that fails; return the exit code of each by name."""
    variables = {**job["env"], "TARGET": f"http://127.0.0.1:{port_free()}", "TTFT": ttft}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    codes: dict[str, int] = {}
    groups: list[int] = []
    try:
        for step in job["steps"]:
            name = step.get("name")
            missing = name == COMPARISON and not (folder / "ci" / "baseline.json").exists()
            if "run" not in step or name == INSTALL or missing:
                continue
            for _ in range(RUNS_MAX if name == LOAD else 1):
                process = subprocess.Popen(
                    ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                    cwd=folder,
                    env={**os.environ, **variables, "PATH": path},
                    start_new_session=True,
                )
                groups.append(process.pid)
                codes[name] = process.wait(STEP_S_MAX)
                print(f"{name}: exit code {codes[name]}", flush=True)
                if codes[name] != NOT_VALID:
                    break
    finally:
        for group in groups:
            try:
                os.killpg(group, signal.SIGTERM)
            except ProcessLookupError:
                continue
    return codes


def main() -> int:
    job = read_job()
    ttft_ms = int(job["env"]["TTFT"].removesuffix("ms"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = run_job(job, folder, f"{ttft_ms}ms")
        if good != {SERVER: 0, LOAD: 0}:
            print(f"the job does not pass: {good}")
            return 1
        (folder / "ci").mkdir()
        shutil.copy(folder / "result.json", folder / "ci" / "baseline.json")
        slow = run_job(job, folder, f"{ttft_ms + ADDED_MS}ms")
        if slow != {SERVER: 0, LOAD: MISSED, COMPARISON: MISSED}:
            print(f"{ADDED_MS} ms more are not found: {slow}")
            return 1
    print(f"the job passes, and fails with {ADDED_MS} ms more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
