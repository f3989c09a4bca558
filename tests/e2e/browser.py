"""The dashboard's tests in a real browser: Debian's chromium, installed where it is missing and we may.

    .venv/bin/python tests/e2e/browser.py                             all tests that need a browser
    .venv/bin/python tests/e2e/browser.py --screenshots docs/images   and the pictures of the docs, made anew

`make test` leaves these tests out. Without a chromium they are skipped, which here is a failure. Only root
can install the package: it comes with some 150 others, which cannot be unpacked and run. Exits 1, naming what
is wrong.
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
SKIPPED = "there is no chromium"


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def complaints(screenshots: str | None) -> Iterator[str]:
    """What is wrong with the tests that need a browser."""
    log = LOGS / "browser-tests.log"
    argv = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-n", "auto"]
    argv += ["--dist", "loadfile", "-m", "browser", "tests/meter/web", "tests/docs"]
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
    if SKIPPED in said:
        yield f"tests were skipped: {SKIPPED}"


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
    with phase("the dashboard's tests in a browser"):
        return list(complaints(screenshots))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--screenshots", metavar="DIR", help="where the pictures go: docs/images")
    options = parser.parse_args()
    return carry_out("browser", lambda: run(options.screenshots))


if __name__ == "__main__":
    sys.exit(main())
