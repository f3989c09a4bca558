"""The tests that `make test` leaves out or skips: markers `browser`, `ray`, `machine`, `realtime`.

    .venv/bin/python tests/e2e/marked.py                             all of them
    .venv/bin/python tests/e2e/marked.py --screenshots docs/images   and make the pictures of the docs again

Installs Debian's chromium and the programs in PROGRAMS if they are missing. Only root can do this. A test
that is skipped without a program or without time for Ray fails here; one that needs more rights is named.
Exits 1 and names what failed.
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
PROGRAMS = {"tcpdump": "tcpdump", "curl": "curl", "mount": "mount", "unshare": "util-linux"}
"""Programs of the tests marked `machine`, with Debian's packages."""
TESTS_S_MAX = 900  # 216 to 226 s were seen on two cores
LAST_MOMENT_S = 20
SKIPPED = ("there is no chromium", "no time for Ray here", "needs the program")
FOLDERS = (
    "meter/web",
    "docs",
    "load/workers",
    "sim/sweep",
    "cli",
    "vantage",
    "capture/store",
    "deploy",
    "proxy",
    "report",
)


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def complaints(screenshots: str | None) -> Iterator[str]:
    """Yield what failed."""
    log = LOGS / "marked-tests.log"
    argv = [sys.executable, "-m", "pytest", "-rsfE", "-p", "no:cacheprovider", "-n", "auto"]
    argv += [
        "--dist",
        "loadfile",
        "-m",
        "browser or ray or machine or realtime",
        *(f"tests/{folder}" for folder in FOLDERS),
    ]
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
        if not line.startswith("SKIPPED"):
            continue
        if any(reason in line for reason in SKIPPED):
            yield f"a test was skipped: {line}"
        else:
            print(f"  {line}")


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
    for program, package in PROGRAMS.items():
        environments.install(package, program)
    with phase("tests in a browser, with Ray, in real time, and with rights or programs"):
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
