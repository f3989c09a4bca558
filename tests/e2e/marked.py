"""The tests that `make test` leaves out: those in a real browser, and those that start Ray.

    .venv/bin/python tests/e2e/marked.py                             all of them
    .venv/bin/python tests/e2e/marked.py --screenshots docs/images   and make the pictures of the docs again

Installs Debian's chromium if it is missing. Only root can do this: the package needs some 150 others. A test
that is skipped for want of a chromium or of time for Ray fails here. Exits 1 and names what failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

from parts import environments
from parts.script import LOGS, REPOSITORY, carry_out, phase
from parts.servers import tail

NAMES = ("chromium", "chromium-browser")
TESTS_S_MAX = 900  # 216 to 226 s were seen on two cores
LAST_MOMENT_S = 20
SKIPPED = ("there is no chromium", "no time for Ray here")
FOLDERS = ("meter/web", "docs", "load/workers", "sim/sweep", "cli")


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def complaints(screenshots: str | None) -> Iterator[str]:
    """Yield what failed."""
    log = LOGS / "marked-tests.log"
    argv = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-n", "auto"]
    argv += ["--dist", "loadfile", "-m", "browser or ray", *(f"tests/{folder}" for folder in FOLDERS)]
    if screenshots is not None:
        argv += ["--screenshots", screenshots]
    with log.open("wb") as out:
        tests = subprocess.Popen(
            argv, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = tests.wait(TESTS_S_MAX)
        except subprocess.TimeoutExpired:
            yield f"the tests took longer than {TESTS_S_MAX} s\n{tail(log)}"
            return
        finally:
            end(tests)
    said = log.read_text(errors="replace")
    print("  " + said.strip().splitlines()[-1])
    if code:
        yield f"pytest ended with {code}\n{tail(log, 60)}"
    for line in said.splitlines():
        if line.startswith("SKIPPED") and any(reason in line for reason in SKIPPED):
            yield f"a test was skipped: {line}"


def end(tests: subprocess.Popen[bytes]) -> None:
    """Interrupts them where they still run, so that their browsers go with them."""
    if tests.poll() is None:
        tests.send_signal(signal.SIGINT)
        try:
            tests.wait(LAST_MOMENT_S)
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()


def run(screenshots: str | None) -> list[str]:
    if chromium() is None:
        environments.install("chromium", *NAMES)
    with phase("tests in a browser, and with Ray"):
        return list(complaints(screenshots))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--screenshots", metavar="DIR", help="where the pictures go: docs/images")
    options = parser.parse_args()
    return carry_out("marked", lambda: run(options.screenshots))


if __name__ == "__main__":
    sys.exit(main())
