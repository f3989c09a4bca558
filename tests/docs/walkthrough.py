"""A page's commands, run as its reader would: in order, in one folder, on the ports that they name.

    unshare --net python -m tests.docs.walkthrough README.md

A gateway is there already (`llmtap sim serve` at 127.0.0.1:8000, and by gRPC at 8001), and clients ask
any tap that is started. The ports are those of the page, so all of it happens in a network of its own, which
`walked` makes where that is allowed. Exit 1 at the first command that fails, with what it said.
"""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Final

import pytest

from llmtap.config import Settings
from llmtap.errors import ExitCode
from tests.docs.documents import SHELL, Block, blocks, commands
from tests.docs.servers_named import GATEWAY, Lasting, lasting

ROOT: Final = Path(__file__).parents[2]
COMMAND_S: Final = 300.0
READY_S: Final = 120.0
STOP_S: Final = 60.0
PAGE_S: Final = 1_200.0
SAID_CHARS: Final = 3_000
ASKED: Final = 6
"""Exchanges that pass each tap that is started."""
GRPC: Final = "127.0.0.1:8001"
PLACES: Final = {"https://tap.example.com:9464": "http://127.0.0.1:9464", "/run/llmtap": "{folder}/run"}
"""What stands in a page for a reader's own, and what there is in place of it here."""
DOUBTED: Final = (ExitCode.FAILED, ExitCode.NOT_VALID)
MAY_DOUBT: Final = (" replay ", " bench ", " --compare ")
"""Commands that fail where the machine was too busy for their figures, which is no fault of the page."""
DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1


class Failure(Exception):
    """A command did not do what its page says."""


@functools.cache
def _own_network() -> list[str] | None:
    """The words that run a command in a network of its own; None where that is not allowed."""
    for way in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*way, "true"], capture_output=True).returncode == 0:
                return way
    return None


def walked(page: Path) -> None:
    """Runs a page in a process and a network of its own; fails with what its first failing command said."""
    way = _own_network()
    if way is None:
        pytest.skip("needs root or user name spaces, and the program unshare: a network of its own")
    if shutil.which("curl") is None:
        pytest.skip("needs the program curl")
    with subprocess.Popen(
        [*way, sys.executable, "-P", "-m", "tests.docs.walkthrough", str(page)],
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            said, _ = process.communicate(timeout=PAGE_S)
        finally:
            if process.poll() is None:
                process.terminate()  # it ends what it started
    print(said)
    assert process.returncode == 0, said


class Walk:
    """The folder, and what runs.

    Args:
        folder: a new one; in it lie, as in a clone, `config/` and `.venv/bin/`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[tuple[str, Lasting, subprocess.Popen[bytes]]] = []
        shutil.copytree(ROOT / "config", folder / "config")
        programs = Path(sys.executable).parent
        for name in (".venv", "run"):
            (folder / name).mkdir()
        (folder / ".venv" / "bin").symlink_to(programs)
        # curl's exit code is to say what the server said.
        (folder / ".curlrc").write_text("fail-with-body\nmax-time = 120\n")
        kept = {name: text for name, text in os.environ.items() if not _is_ours(name)}
        self._environ = {
            **kept,
            "HOME": str(folder),
            "PATH": f"{programs}:{kept['PATH']}",
            "NO_COLOR": "1",
            "COLUMNS": "120",
        }

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        early = [command for command, _, process in self._running if process.poll() is not None]
        for _, _, process in reversed(self._running):
            _stop(process)
        if early and kind is None:
            raise Failure(f"ended before its time: {early[0]}")

    def block(self, block: Block) -> None:
        """Raises Failure."""
        block = block._replace(text=self._placed(block.text))
        name = block.title or f"line_{block.line}"
        if block.title is not None or block.language in ("python", "toml"):
            file = self._folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        if block.language in SHELL:
            for command in commands(block):
                self._told(command, self.start if lasting(command) else self._run)
        elif block.language == "python":
            self._told(f"python {name}", self._run)
        elif block.language == "toml" and (tables := {*tomllib.loads(block.text)}) <= {
            *Settings.__struct_fields__
        }:
            command = "watch" if "watch" in tables else f"proxy --upstream http://{GATEWAY}"
            self._told(f"llmtap {command} --check --config {name}", self._run)

    def _placed(self, text: str) -> str:
        for name, place in PLACES.items():
            text = text.replace(name, place.format(folder=self._folder))
        return text

    def _told(self, command: str, do: Callable[[str], None]) -> None:
        began = time.monotonic()
        do(command)
        print(f"{time.monotonic() - began:6.1f} s  {command}", flush=True)

    def start(self, command: str) -> None:
        """Starts what lasts, and waits until it is up. Raises Failure."""
        kind = lasting(command)
        assert kind is not None
        for one in [one for one in self._running if one[1].ports & kind.ports]:
            self._end(*one)
        with tempfile.TemporaryFile() as said:
            process = self._popen(f"exec env {command}", said)
            self._running.append((command, kind, process))
            end = time.monotonic() + READY_S
            while not _is_up(kind, said):
                if process.poll() is not None:
                    raise Failure(f"ended with {process.returncode}: {command}\n{_tail(said)}")
                if time.monotonic() > end:
                    raise Failure(f"not up after {READY_S:g} s: {command}\n{_tail(said)}")
                time.sleep(0.05)
        if kind.watched:
            self._end(command, kind, process)
        if kind.proxy is not None:
            _visit(*kind.proxy)

    def _end(self, command: str, kind: Lasting, process: "subprocess.Popen[bytes]") -> None:
        self._running.remove((command, kind, process))
        early = process.poll()
        _stop(process, signal.SIGINT if kind.watched else signal.SIGTERM)
        if early is not None:
            raise Failure(f"had ended with {early} before its time: {command}")

    def _run(self, command: str) -> None:
        with tempfile.TemporaryFile() as said:
            process = self._popen(command, said)
            try:
                code = process.wait(COMMAND_S)
            except subprocess.TimeoutExpired:
                raise Failure(f"not over after {COMMAND_S:g} s: {command}\n{_tail(said)}") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the session that it leads
                    process.wait()
            may_doubt = code in DOUBTED and any(name in command for name in MAY_DOUBT)
            if code != 0 and not (may_doubt and "NOT VALID" in _said(said)):
                raise Failure(f"exit {code}: {command}\n{_tail(said)}")

    def _popen(self, command: str, said: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _is_ours(name: str) -> bool:
    """Variables of whoever runs the tests, that would change what a reader sees."""
    return (
        name.startswith(("LLMTAP_", "OTEL_", "PYTEST_", "XDG_"))
        or name.lower().endswith("_proxy")
        or name == "PYTHONPATH"
    )


def _stop(process: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the session that it leads
            process.wait()


def _is_up(kind: Lasting, said: IO[bytes]) -> bool:
    if kind.says:
        return kind.says in _said(said)
    try:
        with DIRECT.open(kind.url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _said(said: IO[bytes]) -> str:
    """All that was said so far; the writers keep their place in the file."""
    return os.pread(said.fileno(), os.fstat(said.fileno()).st_size, 0).decode(errors="replace")


def _tail(said: IO[bytes]) -> str:
    return _said(said)[-SAID_CHARS:]


def _visit(listen: str, admin: str) -> None:
    """Clients: of one tenant, streamed, and counted by the gateway. Until the tap has measured them all."""
    for number in range(ASKED):
        body = {
            "model": "sim",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": f"Question {number}: " + "what passes here? " * 20}],
        }
        headers = {"Content-Type": "application/json", "x-llm-d-inference-fairness-id": "acme"}
        asked = urllib.request.Request(
            f"http://{listen}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        with DIRECT.open(asked, timeout=60) as response:
            response.read()
    end = time.monotonic() + READY_S
    while True:
        with DIRECT.open(f"http://{admin}/api/v1/summary?window=all", timeout=60) as response:
            told = json.load(response)
        kept = ASKED if told["capture"] is None else told["capture"]["exchanges"]
        if min(told["n"], kept) >= ASKED:
            return
        if time.monotonic() > end:
            raise Failure(f"the tap has measured {told['n']} of {ASKED} exchanges, and kept {kept}")
        time.sleep(0.1)


def _raise_loopback() -> None:
    """A new network has a loopback interface, and it is down. Source: netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        told = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh22x", b"lo", 0))
        (flags,) = struct.unpack_from("h", told, 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def main() -> int:
    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    page = Path(sys.argv[1])
    to_run = [block for block in blocks(page.read_text()) if block.not_run is None]
    _raise_loopback()
    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        try:
            with Walk(Path(folder)) as walk:
                walk.start(f"llmtap sim serve --listen {GATEWAY} --grpc {GRPC} --ttft 20ms --itl 2ms")
                for block in to_run:
                    walk.block(block)
        except Failure as failure:
            print(f"{page.name}: {failure}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
