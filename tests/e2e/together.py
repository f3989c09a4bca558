"""Run scripts of this folder at the same time, those of one lane one after another.

    .venv/bin/python tests/e2e/together.py prometheus,fleet environments,browser

Only for scripts whose results do not depend on how busy the machine is: `prometheus.py` spends most of its
time waiting for an alert. `environments` installs the packages that the next scripts need. The output of a
script is printed when it ends. Exits 1 if one of them failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from parts import environments
from parts.script import HERE, TOGETHER, carry_out
from parts.servers import Failure

END_S_MAX = 60
NAMING = ("[e2e] WRONG", "FAILED ", "ERROR ")
"""Beginnings, after the indent, of the lines that say what failed: they are repeated at the end."""


def run_lane(
    names: list[str], wrong: list[str], running: list[subprocess.Popen[str]], printing: threading.Lock
) -> None:
    for name in names:
        if name == "environments":
            try:
                environments.prepare("engine", "gateway")
            except Failure as failure:
                wrong.append(str(failure))
                return
            continue
        script = subprocess.Popen(
            [sys.executable, str(HERE / f"{name}.py")],
            env={**os.environ, TOGETHER: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(script)
        output, _ = script.communicate()
        with printing:
            print(output, end="", flush=True)
        if script.returncode:
            named = [line for line in map(str.strip, output.splitlines()) if line.startswith(NAMING)]
            wrong.append("\n  ".join([f"{name}.py ended with {script.returncode}", *named]))
        if script.returncode < 0:
            return  # ended by a signal: the next one is not started


def run(lanes: list[list[str]]) -> list[str]:
    wrong: list[str] = []
    running: list[subprocess.Popen[str]] = []
    printing = threading.Lock()
    threads = [threading.Thread(target=run_lane, args=(names, wrong, running, printing)) for names in lanes]
    for thread in threads:
        thread.daemon = True
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:  # by a signal: each script ends what it started
        for script in running:
            if script.poll() is None:
                script.terminate()
                script.wait(END_S_MAX)
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("together", lambda: run([lane.split(",") for lane in sys.argv[1:]])))
