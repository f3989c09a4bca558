"""Install with pip into this environment, and report progress in plain lines.

    .venv/bin/python tests/support/install.py -c constraints.txt -e '.[bench,top]'
    .venv/bin/python tests/support/install.py -c constraints.txt --extra dev

`--extra NAME` installs the packages of an extra without building llmtap again. The output of pip, warnings
included, is printed only if pip fails. Standard library only.
"""

import re
import subprocess
import sys
import threading
import time
import tomllib
from collections import deque
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LINE_S = 5.0
LINES_MAX = 60
STEPS = {
    "Collecting ": "downloading {}",
    "Downloading ": "downloading {}",
    "Installing build dependencies": "installing the build tools",
    "Building ": "building llmtap",
    "Installing collected packages": "unpacking",
}
"""Beginnings of pip's lines, and their steps; {} is the name of the package."""
NAME = re.compile(r"[\w.]+(?:-[a-z][\w.]*)*")


class Progress:
    """What pip does at the moment, from the lines that it prints."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self.packages = 0
        self.step = "preparing"

    def read(self, line: str) -> None:
        self.lines.append(line.rstrip())
        line = line.strip()
        begin = next((begin for begin in STEPS if line.startswith(begin)), None)
        if begin is None:
            return
        self.packages += begin == "Collecting "
        name = NAME.match(line.removeprefix(begin).rpartition("/")[2])
        self.step = STEPS[begin].format(name[0] if name else "")


def packages_of(extra: str) -> list[str]:
    """Return the requirements of an extra of pyproject.toml; those of llmtap's other extras are expanded."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    packages: list[str] = []
    for text in extras[extra]:
        own = re.fullmatch(r"llmtap\[(.+)\]", text)
        packages += (
            [text] if own is None else [one for name in own[1].split(",") for one in packages_of(name)]
        )
    return packages


def main(args: list[str]) -> int:
    began = time.monotonic()
    print(f"installing {args[-1]} into {sys.prefix}", flush=True)
    if args[-2] == "--extra":
        args = [*args[:-2], *packages_of(args[-1])]
    # Without bytecode, which Python makes when a module is first imported: most of them never are.
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    progress = Progress()
    over = threading.Event()

    def report() -> None:
        while not over.wait(LINE_S):
            seconds = time.monotonic() - began
            print(f"{seconds:4.0f} s  {progress.step} ({progress.packages} packages so far)", flush=True)

    reporter = threading.Thread(target=report)
    with subprocess.Popen(
        [*pip, "--progress-bar", "off", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        reporter.start()
        assert process.stdout is not None
        for line in process.stdout:
            progress.read(line)
    over.set()
    reporter.join()
    if process.returncode:
        print("\n".join(progress.lines), file=sys.stderr, flush=True)
    else:
        print(f"installed in {time.monotonic() - began:.0f} s", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
