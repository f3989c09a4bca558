"""Malformed bytes that any proxy can be sent, and the answers of nginx and HAProxy beside ours.

    .venv/bin/python -m tests.vantage.relay.fault_cases        # measure again; needs nginx and haproxy

The answers are recorded in `fault_cases.json`; `test_hardening.py` compares ours with them, and the table
in docs/peers.md with the record.
"""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.servers.proxy import tapped

RECORD: Final = Path(__file__).with_suffix(".json")
OURS: Final = "llmtap"
QUIET_S: Final = 0.4
"""Nothing more is expected after this long without a byte."""
_PLAIN: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_POST: Final = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
_CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Case(NamedTuple):
    """Bytes of one side, and the sign that what is wrong in them reached the other side."""

    name: str
    fault: bytes
    """Pattern of the fault in what the other side receives."""
    request: bytes
    answer: bytes = _PLAIN
    by_upstream: bool = False
    """The upstream sends the fault."""
    late: bytes = b""
    """Sent by the upstream 50 ms after its answer; the client then asks again."""


def _get(before: bytes = b"", method: bytes = b"GET", fields: bytes = b"") -> bytes:
    return before + method + b" / HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n"


_UNASKED: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nunasked"
_NUL_CHUNK: Final = b"2;a=\x00\r\nhi\r\n0\r\n\r\n"
_NUL_TRAILER: Final = b"2\r\nhi\r\n0\r\nX: \x00\r\n\r\n"
_NUL_REASON: Final = b"HTTP/1.1 200 \x00\r\nContent-Length: 0\r\n\r\n"
_KEY_TRAILER: Final = b"0\r\nAuthorization: x\r\n\r\n"
_LENGTH_TRAILER: Final = b"0\r\nContent-Length: 7\r\n\r\n"

CASES: Final = (
    Case("one empty line before a request", rb"\A(?!GET / )", _get(b"\r\n")),
    Case("two empty lines before a request", rb"\A(?!GET / )", _get(b"\r\n\r\n")),
    Case("a line feed before a request", rb"\A(?!GET / )", _get(b"\n")),
    Case("CR CR LF before a request", rb"\A(?!GET / )", _get(b"\r\r\n")),
    Case("5,000 line feeds before a request", rb"\A(?!GET / )", _get(b"\n" * 5_000)),
    Case("method of 33 characters", rb"\AM{33} ", _get(method=b"M" * 33)),
    Case("method of 6,000 characters", rb"\AM{6000} ", _get(method=b"M" * 6_000)),
    Case("method that is no token: `G(T`", rb"\AG\(T ", _get(method=b"G(T")),
    Case("field named in Connection", rb"(?i)x-g:", _get(fields=b"Connection: X-Guard\r\nX-Guard: 1\r\n")),
    Case("TE three times", rb"(?is)(?:\nconnection:[^\n]*TE\b.*){2}", _get(fields=b"TE: trailers\r\n" * 3)),
    Case("NUL in a chunk extension of a request", rb"\x00", _POST + _NUL_CHUNK),
    Case("bare CR in a chunk extension of a request", rb";a=\r[^\n]", _POST + b"2;a=\rb\r\nhi\r\n0\r\n\r\n"),
    Case("NUL in a part of a chunk-size line", rb"\x00", _POST + b"2;a=\x00"),
    Case("NUL in a request trailer", rb"\x00", _POST + _NUL_TRAILER),
    Case("Content-Length as a request trailer", rb"(?i)content-length: 7", _POST + _LENGTH_TRAILER),
    Case("Authorization as a request trailer", rb"(?i)authorization: x", _POST + _KEY_TRAILER),
    Case("Content-Length as a response trailer", rb"(?i)length: 7", _get(), _CHUNKED + _LENGTH_TRAILER, True),
    Case("status 000", rb"HTTP/1.. 000", _get(), b"HTTP/1.1 000 x\r\n\r\n" + _PLAIN, True),
    Case("status 099", rb"HTTP/1.. 099", _get(), b"HTTP/1.1 099 x\r\n\r\n" + _PLAIN, True),
    Case(
        "103 with Content-Length",
        rb"(?is)HTTP/1.. 103.*content-length: 9",
        _get(),
        b"HTTP/1.1 103 x\r\nContent-Length: 9\r\n\r\n" + _PLAIN,
        True,
    ),
    Case("NUL in the reason of a status line", rb"\x00", _get(), _NUL_REASON, True),
    Case("NUL in a chunk extension of an answer", rb"\x00", _get(), _CHUNKED + _NUL_CHUNK, True),
    Case("NUL in an answer's trailer", rb"\x00", _get(), _CHUNKED + _NUL_TRAILER, True),
    Case("a second answer with the first", rb"unasked", _get(), _PLAIN + _UNASKED, True),
    Case("a second answer 50 ms after the first", rb"unasked", _get(), _PLAIN, True, _UNASKED),
)


async def _read_all(
    reader: asyncio.StreamReader, upto: Callable[[bytes], bool] = lambda data: False
) -> bytes:
    data = b""
    with suppress(TimeoutError, ConnectionError):
        while more := await asyncio.wait_for(reader.read(65_536), QUIET_S):
            data += more
            if upto(data):
                break
    return data


@asynccontextmanager
async def _upstream(case: Case, listener: socket.socket, received: list[bytes]) -> AsyncIterator[None]:
    """Serve the case's answer to each complete head, until the client is gone."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending = b""
        number = 0
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                received.append(data)
                pending += data
                # A chunked body is answered when its last chunk came, as servers do that read it.
                while (end := pending.find(b"\r\n\r\n") + 4) > 3:
                    head, pending = pending[:end], pending[end:]
                    if b"chunked" in head.lower():
                        while not pending.endswith(b"\r\n\r\n") and (data := await reader.read(65_536)):
                            received.append(data)
                            pending += data
                        pending = b""
                    writer.write(case.answer if number == 0 or not case.by_upstream else _PLAIN)
                    number += 1
                    if number == 1 and case.late:
                        await writer.drain()
                        await asyncio.sleep(0.05)
                        writer.write(case.late)
        writer.close()

    server = await asyncio.start_server(serve, sock=listener)
    try:
        yield
    finally:
        server.close()


async def outcome_of(case: Case, proxy_port: int, listener: socket.socket) -> str:
    """Return the status that the client gets (`-`: none), and what became of the fault.

    Args:
        listener: where the proxy finds its upstream; it is closed at the end.
    """
    received: list[bytes] = []
    async with _upstream(case, listener, received):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy_port)
        with suppress(ConnectionError):
            writer.write(case.request)
            await writer.drain()
        heard = await _read_all(reader, lambda data: case.by_upstream and data.endswith(b"ok"))
        if case.by_upstream and (case.late or b"unasked" in case.answer):
            await asyncio.sleep(0.1)  # the unasked answer is there before the next request
            with suppress(ConnectionError):
                writer.write(_get())
                await writer.drain()
            heard += await _read_all(reader)
        writer.close()
    sent = b"".join(received)
    statuses = re.findall(rb"HTTP/1\.[01] (\d{3})", heard)
    status = next((s.decode() for s in statuses if s >= b"200" or s < b"100"), "-")
    if not sent:
        return f"{status}, not forwarded"
    passed = re.search(case.fault, heard if case.by_upstream else sent)
    return f"{status}, {'forwarded' if passed else 'removed'}"


# ---------------------------------------------------------------- nginx and HAProxy

_NGINX: Final = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/log;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 8; }}
  server {{
    listen 127.0.0.1:{listen};
    location / {{
      proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""
_HAPROXY: Final = """
defaults
  mode http
  timeout connect 2s
  timeout client 5s
  timeout server 5s
listen front
  bind 127.0.0.1:{listen}
  http-reuse always
  server up 127.0.0.1:{upstream}
"""


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


async def _answers(program: str, config: str, argv: list[str]) -> dict[str, str]:
    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
            with socket.create_server(("127.0.0.1", 0)) as spare:
                port = _port_of(spare)
            file = Path(folder) / "config"
            file.write_text(config.format(folder=folder, listen=port, upstream=_port_of(listener)))
            process = await asyncio.create_subprocess_exec(
                program, *argv, str(file), stderr=subprocess.DEVNULL
            )
            try:
                for _ in range(50):
                    await asyncio.sleep(0.1)
                    with suppress(ConnectionError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        break
                found[case.name] = await outcome_of(case, port, listener)
            finally:
                process.terminate()
                await process.wait()
            print(f"{Path(program).name:8} {case.name}: {found[case.name]}", file=sys.stderr)
    return found


def _version(argv: list[str]) -> str:
    said = subprocess.run(argv, capture_output=True, text=True, check=True)
    found = re.search(r"\d+\.\d+\.\d+", said.stdout + said.stderr)
    assert found is not None
    return found[0]


def table(record: dict[str, dict[str, str]]) -> list[str]:
    """Rows of the Markdown table."""
    heads = ["case", *record]
    rows = [heads, ["---"] * len(heads)]
    rows += [[case.name, *(answers[case.name] for answers in record.values())] for case in CASES]
    return [f"| {' | '.join(row)} |" for row in rows]


async def _own_answers() -> dict[str, str]:
    found = {}
    for case in CASES:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with tapped(f"http://127.0.0.1:{_port_of(listener)}") as tap:
                found[case.name] = await outcome_of(case, tap.port, listener)
    return found


def main() -> None:
    nginx, haproxy = shutil.which("nginx"), shutil.which("haproxy")
    if nginx is None or haproxy is None:
        raise SystemExit("nginx and haproxy are needed: install the packages nginx-light and haproxy")
    record = {OURS: asyncio.run(_own_answers())}
    record[f"nginx {_version([nginx, '-v'])}"] = asyncio.run(_answers(nginx, _NGINX, ["-c"]))
    record[f"HAProxy {_version([haproxy, '-v'])}"] = asyncio.run(_answers(haproxy, _HAPROXY, ["-f"]))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(table(record)))


if __name__ == "__main__":
    main()
