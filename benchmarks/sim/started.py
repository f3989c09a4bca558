"""A `llmtap sim serve` that a benchmark has started: when it is ready, and what CPU it took."""

import subprocess
import time
import urllib.request
from pathlib import Path

READY_S = 20.0


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    # The scheduler's own account, in ns; the ticks of /proc/PID/stat are 10 ms wide.
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def wait_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Until `url` answers. Ends the program where it never does."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the server did not come up")
