"""A first-time user's path: clone, what the README says, and figures on the dashboard.

    .venv/bin/python tests/e2e/first_time.py             # as on a clean machine: every package is fetched

Clones the repository (its last commit) into a new folder and runs the first command of that README. Tells
the seconds of each step, and exits 1 where the dashboard had no figures within 180 s, or the command failed.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from parts.script import REPOSITORY, carry_out
from parts.servers import LOCAL, Failure, get_json

LIMIT_S = 180.0
GIVE_UP_S = 900.0  # after which nobody waits any more
END_S = 120.0  # from the first figures to the command's end: half a minute of requests, and the last answers
DASHBOARD = re.compile(r"^dashboard\s+(http://\S+?)/\s", re.MULTILINE)
COMMAND = re.compile(r"```sh\n(\S[^#\n]*)")


class Clock:
    """Seconds since the start, told step by step."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def step(self, name: str) -> None:
        now = time.monotonic()
        print(f"{now - self._last:7.1f} s  {name}", flush=True)
        self._last = now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


class Running:
    """The README's command, and what it says. Its whole session is ended at the end."""

    def __init__(self, command: str, folder: Path, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command.split(),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)  # make, and what it runs
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line

    def until(self, done: Callable[[], object], clock: Clock) -> None:
        """Until that is true. Raises Failure."""
        while not done():
            if self._process.poll() is not None:
                raise Failure(f"it ended with {self._process.returncode}\n{self.said[-3_000:]}")
            if clock.seconds > GIVE_UP_S:
                raise Failure(f"nothing after {GIVE_UP_S:g} s\n{self.said[-3_000:]}")
            time.sleep(0.05)

    def end(self) -> int:
        """Its exit code, when it is over. Raises Failure."""
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"not over {END_S:g} s after the first figures\n{self.said[-3_000:]}") from None

    def dashboard(self) -> str | None:
        """Where it says that the dashboard is."""
        found = DASHBOARD.search(self.said)
        return found and found[1]


def shows_figures(admin: str) -> bool:
    """The page is served, and what it asks for has samples of TTFT."""
    try:
        with LOCAL.open(f"{admin}/", timeout=5) as response:
            page = response.read()
        summary = get_json(f"{admin}/api/v1/summary?window=all")
    except (OSError, json.JSONDecodeError):
        return False
    return b"<title>" in page and summary["metrics"]["ttft"]["n"] > 0


def run(folder: Path) -> list[str]:
    """What was wrong."""
    clock = Clock()
    clone = folder / "llmtap"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    clock.step("git clone")
    found = COMMAND.search((clone / "README.md").read_text())
    if found is None:
        raise Failure("the README has no command")
    command = found[1].strip()
    ours = ("LLMTAP_", "VIRTUAL_ENV", "MAKE", "MFLAGS")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    environ["PIP_CACHE_DIR"] = str(folder / "pip")
    with Running(command, clone, environ) as running:
        running.until((clone / ".venv" / "bin" / "llmtap").exists, clock)
        clock.step(f"{command}: installs")
        running.until(running.dashboard, clock)
        clock.step(f"{command}: says where the dashboard is")
        admin = running.dashboard()
        assert admin is not None
        running.until(lambda: shows_figures(admin), clock)
        clock.step("the dashboard has figures")
        seconds = clock.seconds
        print(f"{seconds:7.1f} s  from nothing to figures; {LIMIT_S:g} are allowed", flush=True)
        code = running.end()
        clock.step(f"{command}: ends")
    wrong = []
    if seconds > LIMIT_S:
        wrong.append(f"figures after {seconds:.0f} s, which is more than {LIMIT_S:g}")
    if code:
        wrong.append(f"{command} ended with {code}\n{running.said[-3_000:]}")
    return wrong


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="first-time-") as folder:
        return carry_out("first time", lambda: run(Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
