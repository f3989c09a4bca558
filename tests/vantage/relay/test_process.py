"""The relay as a real process: ready by one line, ended in order by SIGTERM, and at once where it broke."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from llmtap import native
from llmtap.log import LogSetup
from llmtap.units import encode_special
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.relay import RelaySetup

AS_IT_IS = "import sys; from llmtap.vantage.relay.relay import main; sys.exit(main())"
BROKEN = """
import sys
from llmtap.vantage.relay.relay import main
from llmtap.vantage.relay.relay import Relay

Relay._counters = None  # not to be called: so the task that reports fails
sys.exit(main())
"""


@contextmanager
def relay_of(program: str, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A relay process that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        setup = RelaySetup(
            options=RelayOptions(upstream="http://127.0.0.1:9"), name="test.0.1",
            listen_fds=[sock.fileno()], tap_path=str(tmp_path / "tap.sock"), log=LogSetup(),
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            pass_fds=[sock.fileno()], cwd=Path(__file__).parents[3],
        )  # fmt: skip
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(setup, enc_hook=encode_special) + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=60)


def log_of(process: "subprocess.Popen[bytes]") -> str:
    """All that it logged, once it has ended by itself."""
    assert process.stderr is not None
    process.wait(timeout=60)
    return process.stderr.read().decode()


def test_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    with relay_of(AS_IT_IS, tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        log = log_of(process)
        assert process.returncode == 0, log
        assert "event=relay_ready" in log
        assert f"implementation={native.describe()!r}" in log


def test_a_broken_relay_ends_so_that_another_one_takes_its_place(tmp_path: Path) -> None:
    with relay_of(BROKEN, tmp_path) as process:
        log = log_of(process)
        assert process.returncode == 1, log
        assert "level=critical" in log
        assert "event=relay_broken relay=test.0.1 task=_report_for_ever" in log
        assert "TypeError" in log
