"""Does `llmtap sim serve` with an engine do what the same engine does in virtual time?

    .venv/bin/python benchmarks/sim/agreement.py [--scheduler NAME,...] [--requests 200] [--fifo]

For each scheduler a server is started and sent a small workload over HTTP, streamed, so many requests at a
time. Its truth log says when each request arrived at the engine. These arrivals are played through the
virtual driver, and each token's due time is compared with the one of the server: they have to be equal to the
ns, however late the server was. How late it sent, against them, is the other figure. PACING.md has figures.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from started import cpu_of, wait_ready

from llmtap.sim.engine import Engine, run_virtual
from llmtap.sim.model_options import ServingSetup, read_model_options, read_serving
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.server.reception import prefix_blocks
from llmtap.workload.prompts.text import answer_tokens
from llmtap.workload.requests import Requests

BINS = "1,20,50"
CHAT = "/v1/chat/completions"


class Times:
    """When each token of the virtual engine leaves."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        self.tokens[request] = list(token_ns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheduler", default=",".join(SCHEDULERS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt on average")
    parser.add_argument("--output", type=int, default=40, help="tokens of an answer on average")
    parser.add_argument("--serving", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--server-cpu", type=int, default=0)
    parser.add_argument("--client-cpu", type=int, default=1)
    parser.add_argument(
        "--fifo",
        action="store_true",
        help="run the server at real-time priority: others on its CPU wait (root)",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.client_cpu})
    rows = []
    for name in args.scheduler.split(","):
        row = _one(name, args)
        rows.append(row)
        late = "  ".join(f"{q} {us:>6.0f}" for q, us in row["late_us"].items())
        print(
            f"{name:26} {row['tokens']:>6} tokens  {row['equal']:>6} equal  late {late} us"
            f"  CPU {row['cpu_us_per_token']:.0f} us a token",
            flush=True,
        )
    result = {
        "rows": rows,
        "fifo": args.fifo,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load_average": os.getloadavg()[0],
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["tokens"] == row["equal"] > 0 for row in rows) else 1


def _one(name: str, args: argparse.Namespace) -> dict[str, Any]:
    serving = args.serving if SCHEDULERS[name].iterates else []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder) / "truth.jsonl"
        command = [
            sys.executable,
            "-P",
            "-m",
            "llmtap.cli",
            "sim",
            "serve",
            "--listen",
            f"127.0.0.1:{port}",
            "--scheduler",
            name,
            "--truth",
            str(truth),
            *(("--reading", f"bin_edges={BINS}") if "bin_edges" in SCHEDULERS[name].options_read else ()),
            *(part for item in serving for part in ("--serving", item)),
        ]

        def settle() -> None:
            os.sched_setaffinity(0, {args.server_cpu})
            if args.fifo:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))

        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=settle)
        try:
            wait_ready(f"http://127.0.0.1:{port}/health", server)
            began_s = cpu_of(server.pid)
            prompts = uvloop.run(_send(port, args))
            cpu_s = cpu_of(server.pid) - began_s
        finally:
            server.terminate()
            server.wait(10)
        truths = [json.loads(line) for line in truth.read_text().splitlines()][1:]
    setup = ServingSetup(
        readings=read_model_options({"bin_edges": BINS}),
        serving=read_serving(dict(item.split("=", 1) for item in serving)),
    )
    tokens, equal = _compare(name, setup, truths, prompts)
    late = sorted(
        sent - due
        for t in truths
        for dues, sents in zip(t["due_ns"], t["sent_ns"], strict=True)
        for due, sent in zip(dues, sents, strict=True)
    )
    assert late[0] >= 0, "a token was sent before it was due"
    return {
        "scheduler": name,
        "requests": len(truths),
        "tokens": tokens,
        "equal": equal,
        "late_us": {
            "p50": late[len(late) // 2] / 1e3,
            "p99": late[int(len(late) * 0.99)] / 1e3,
            "max": late[-1] / 1e3,
        },
        "cpu_us_per_token": 1e6 * cpu_s / tokens,
    }


async def _send(port: int, args: argparse.Namespace) -> dict[str, str]:
    """The prompt of each request, by its id."""
    chance = random.Random(7)
    shared = "".join(answer_tokens(args.prompt // 2, "shared"))
    prompts: dict[str, str] = {}
    lengths: dict[str, int] = {}
    for i in range(args.requests):
        own = "".join(answer_tokens(chance.randint(1, args.prompt), f"own {i}"))
        prompts[f"r{i}"] = f"{shared} {own}"
        lengths[f"r{i}"] = chance.randint(1, 2 * args.output)
    free = asyncio.Semaphore(args.at_once)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:

        async def one(name: str) -> None:
            async with free:
                await asyncio.sleep(chance.random() * 0.02)
                body = {
                    "messages": [{"role": "user", "content": prompts[name]}],
                    "stream": True,
                    "max_tokens": lengths[name],
                    "ignore_eos": True,
                }
                async with session.post(CHAT, json=body, headers={"x-request-id": name}) as response:
                    answer = await response.read()
                    assert response.status == 503 or answer.endswith(b"data: [DONE]\n\n"), answer[-200:]

        await asyncio.gather(*(one(name) for name in prompts))
    return prompts


def _compare(
    name: str, setup: ServingSetup, truths: list[dict[str, Any]], prompts: dict[str, str]
) -> tuple[int, int]:
    """Tokens that either made, and how many of them at the same ns."""
    asked = sorted(
        (submitted["number"], submitted, t["id"], t["due_ns"][submitted["choice"]])
        for t in truths
        for submitted in t["submitted"]
    )
    assert [number for number, *_ in asked] == list(range(len(asked)))
    arrivals, given, made, told = (
        array("q", [one[field] for _, one, _, _ in asked])
        for field in ("arrival_ns", "input", "output", "predicted")
    )
    size = setup.serving.block if SCHEDULERS[name].iterates and setup.serving.prefix_cache else 0
    blocks = [prefix_blocks(prompts[request], size) for _, _, request, _ in asked] if size else []
    requests = Requests(arrivals, given, made, told, blocks, size)
    times = Times()
    run_virtual(requests, Engine(SCHEDULERS[name].build(requests, setup)), watch=times)
    tokens = equal = 0
    for number, _, _, real in asked:
        virtual = times.tokens[number]
        tokens += max(len(real), len(virtual))
        equal += sum(a == b for a, b in zip(real, virtual, strict=False))
    return tokens, equal


if __name__ == "__main__":
    sys.exit(main())
