"""A child process that burns CPU when told to, and says by its own clock how much it has used so far."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["BusyChild", "busy_child"]

_PROGRAM = """
import subprocess, sys, time
for line in sys.stdin:
    what, *seconds = line.split()
    if what == "burn":
        end = time.process_time() + float(seconds[0])
        while time.process_time() < end:
            pass
    elif what == "breed":  # a child of its own burns, ends and is waited for
        program = f"import time\\nwhile time.process_time() < {seconds[0]}: pass"
        subprocess.run([sys.executable, "-c", program], check=True)
    print(time.process_time_ns(), flush=True)
"""


class BusyChild:
    """Does nothing but what it is told to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def burn(self, cpu_s: float) -> int:
        """Use so much CPU time."""
        return self._tell(f"burn {cpu_s}")

    def breed(self, cpu_s: float) -> int:
        """Have a child use so much."""
        return self._tell(f"breed {cpu_s}")

    def used_ns(self) -> int:
        """CPU time it has used since it began, by its own clock; between two words it uses none."""
        return self._tell("say")

    def _tell(self, word: str) -> int:
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def busy_child() -> Iterator[BusyChild]:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield BusyChild(process)
        finally:
            process.kill()
