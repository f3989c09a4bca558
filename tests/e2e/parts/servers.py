"""Servers of this run: started in a process group of their own, logged, waited for, and stopped by id."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAST_MOMENT_S = 20.0  # from the end of a process to the end of its children, as far as we put up with it
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through the user's own proxy
STREAM_S_MAX = 120
_KEPT: list[socket.socket] = []


class Failure(Exception):
    """The run cannot go on; the text says why, for the person reading the log."""


class Server:
    """One started process and whatever it starts itself."""

    def __init__(self, name: str, argv: list[str], *, logs: Path, env: Mapping[str, str], cwd: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=cwd,
                start_new_session=True,
            )

    def wait_ready(self, url: str, *, limit_s: float) -> float:
        """Asks `url` until it answers 200; returns the seconds since the call."""
        start = time.monotonic()
        last = ""
        while time.monotonic() - start < limit_s:
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with {self.process.returncode}\n{tail(self.log)}")
            try:
                with LOCAL.open(url, timeout=5) as response:
                    if response.status == 200:
                        return time.monotonic() - start
            except (OSError, urllib.error.URLError) as error:
                last = str(error)
            time.sleep(0.1)
        raise Failure(f"{self.name} not ready at {url} within {limit_s:.0f} s ({last})\n{tail(self.log)}")

    def stop(self, limit_s: float = 60) -> str | None:
        """Asks the process to end; returns what was wrong with how it did, None if nothing was.

        What is left of its group a moment later is killed, and counts as wrong.
        """
        wrong = None
        early = self.process.poll()
        if early is not None:
            wrong = f"{self.name} had ended before it was told to, with {early}"
        else:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                wrong = f"{self.name} was still there {limit_s:.0f} s after SIGTERM"
            else:
                if self.process.returncode not in (0, -signal.SIGTERM):
                    wrong = f"{self.name} ended with {self.process.returncode} on SIGTERM"
        if self._group_lives(LAST_MOMENT_S):
            os.killpg(self.process.pid, signal.SIGKILL)
            wrong = wrong or f"{self.name} left processes behind"
        self.process.wait()
        return wrong

    def _group_lives(self, limit_s: float) -> bool:
        """Whether any process of the group is still there after at most `limit_s`."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            self.process.poll()
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.02)
        return True


def run_to_end(
    name: str, argv: list[str], *, logs: Path, env: Mapping[str, str], cwd: Path, limit_s: float
) -> None:
    """Runs a program that ends by itself. Raises Failure when it does not in that time, or not with 0."""
    program = Server(name, argv, logs=logs, env=env, cwd=cwd)
    try:
        returned = program.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise Failure(f"{name} took over {limit_s:.0f} s\n{tail(program.log)}") from None
    finally:
        program.stop(5)
    if returned:
        raise Failure(f"{name} ended with {returned}\n{tail(program.log)}")


def proxy_argv(llmtap: Path, upstream: int, listen: int, admin: int, *more: str) -> list[str]:
    """The tap between loopback ports."""
    argv = [str(llmtap), "proxy", "--upstream", f"http://127.0.0.1:{upstream}"]
    argv += ["--set", "relay.skip=[]"]  # model lists are checked, too
    return [*argv, "--listen", f"127.0.0.1:{listen}", "--admin", f"127.0.0.1:{admin}", *more]


def port_free() -> int:
    """A loopback port for a server that is yet to start.

    It stays bound here, and never listens: nobody else is given it, and a server that sets SO_REUSEADDR, as
    servers do, can listen on it all the same.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    _KEPT.append(kept)
    return kept.getsockname()[1]


def get_json(url: str, *, timeout_s: float = 60) -> Any:
    with LOCAL.open(url, timeout=timeout_s) as response:
        return json.load(response)


def get_exchanges(base: str) -> list[Any]:
    """The newest 1,000 exchanges with their events; `base` is the URL of the admin API's version."""
    out: list[Any] = []
    cursor = ""
    while True:
        told = get_json(f"{base}/exchanges?limit=1000&events=1{cursor}")
        for x in told["exchanges"]:
            if x.pop("events_start", 0):
                out[-1]["events"] += x["events"]
            else:
                out.append(x)
        if told["next"] is None or len(out) >= 1_000:
            return out
        cursor = f"&next={told['next']}"


def post_json(url: str, body: Mapping[str, Any], *, key: str, timeout_s: float) -> bytes:
    """Sends a JSON body and returns the answer's body, whole."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with LOCAL.open(request, timeout=timeout_s) as response:
        return response.read()


def stream_once(port: int, *, tokens: int, prompt: str, headers: Mapping[str, str]) -> None:
    """Reads one stream of the simulated engine to its end.

    Raises Failure when it is not whole, and OSError and HTTPException as `http.client` does.
    """
    body = {
        "model": "sim",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": prompt}],
    }
    fields = {"Content-Type": "application/json", **headers}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STREAM_S_MAX)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), fields)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200 or not answer.endswith(b"data: [DONE]\n\n"):
        raise Failure(f"a stream ({prompt!r}) came to status {response.status}, {len(answer)} bytes")


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log, indented, under its name."""
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"--- the last lines of {log}", *(f"    {line}" for line in text)])
