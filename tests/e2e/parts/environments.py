"""The heavy environments: made once under `.e2e/`, and again only when their requirements change.

And programs of Debian that are missing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parts.script import HERE, LOGS, ROOT, phase
from parts.servers import Failure, run_to_end, tail

INSTALL_S_MAX = (
    900  # torch is 180 MB to fetch and 700 MB to unpack: 23 s on two quick cores, minutes elsewhere
)

DEBIAN_S_MAX = 300  # chromium: 81 MB, and what it needs; 42 s were seen
NPM_S_MAX = 400
NODE_MIN = 20


class Skip(Exception):
    """A program that this machine does not have; the text says what is missing."""


def prepare(*names: str) -> None:
    """Makes `.e2e/NAME` from `requirements-NAME.txt` for every name that needs it, side by side."""
    with phase("environments"), ThreadPoolExecutor(len(names)) as pool:
        for job in [pool.submit(_prepare_one, ROOT / n, HERE / f"requirements-{n}.txt") for n in names]:
            job.result()


def _prepare_one(folder: Path, requirements: Path) -> None:
    wanted = hashlib.sha256(f"{sys.version}\n{requirements.read_text()}".encode()).hexdigest()
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        print(f"  {folder.name}: as it was", flush=True)
        return
    start = time.monotonic()
    print(f"  {folder.name}: installing {requirements.name} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    log = LOGS / f"install-{folder.name}.log"
    # Compiling all of torch to bytecode takes longer than unpacking it; what is imported is compiled then.
    pip = [str(folder / "bin/pip"), "install", "--no-compile", "--disable-pip-version-check"]
    with log.open("wb") as out:
        for command in [[sys.executable, "-m", "venv", str(folder)], [*pip, "-r", str(requirements)]]:
            try:
                done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=INSTALL_S_MAX)
            except subprocess.TimeoutExpired:
                raise Failure(f"{folder.name}: not installed in {INSTALL_S_MAX} s\n{tail(log)}") from None
            if done.returncode:
                raise Failure(f"{folder.name}: '{' '.join(command)}' failed\n{tail(log)}")
    stamp.write_text(wanted)
    print(f"  {folder.name}: installed in {time.monotonic() - start:.0f} s", flush=True)


def prepare_node(folder: Path, package: Path) -> tuple[str, str]:
    """Installs the packages of a package.json into `folder`, again only when the file or Node change.

    Returns Node's path and version. Raises Skip.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Skip("there is no node" if node is None else "there is node, and no npm")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < NODE_MIN:
        raise Skip(f"node is {version}, and {NODE_MIN} or newer is needed")
    wanted, stamp = f"{version}\n{package.read_text()}", folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return node, version
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(package, folder / "package.json")
    argv = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    run_to_end(f"install-{package.stem}", argv, logs=LOGS, env={}, cwd=folder, limit_s=NPM_S_MAX)
    stamp.write_text(wanted)
    return node, version


def install(package: str, *names: str) -> None:
    """Installs Debian's package if none of its programs is in PATH. Raises Failure with apt-get's words."""
    if any(map(shutil.which, names)):
        return
    missing = f"none of {', '.join(names)} in PATH"
    if not shutil.which("apt-get"):
        raise Failure(f"{missing}, and no apt-get to get Debian's: install it")
    if os.geteuid() != 0:
        raise Failure(f"{missing}, and only root can install it: apt-get install {package}")
    get = ["apt-get", "install", "-y", "--no-install-recommends", package]
    log = LOGS / f"{package}-install.log"
    with phase(f"Debian's {package}"), log.open("wb") as out:
        signal.alarm(DEBIAN_S_MAX)
        # The system's package lists do where they are there and fresh.
        for command in (get, ["apt-get", "update"], get):
            env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env)
            if any(map(shutil.which, names)):
                signal.alarm(0)
                return
            if command[1] == "update" and done.returncode:
                break
    raise Failure(f"Debian's package `{package}` could not be installed\n{tail(log)}")
