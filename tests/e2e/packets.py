"""Real traffic from its packets: the engine and the gateway of run.py, the `openai` client, and no proxy.

    .venv/bin/python tests/e2e/packets.py

`llmtap watch` reads the packets of a server's port as they pass, and Debian's `tcpdump` writes the same ones
to a file, which `llmtap watch --read` measures afterwards. Once at the engine, and once at LiteLLM. Then

- the tap's account is held against the client's, as in run.py;
- the two captures are equal in all that is no time, and their times differ by what the kernel takes between
  two stamps of a packet.

Packets need root or CAP_NET_RAW: without, it says so and ends well. Exits 1, naming what is wrong.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from parts import environments, vantages
from parts.script import LLMTAP, LOGS, ROOT, carry_out, phase
from parts.servers import Failure, get_json, port_free, tail
from replay import check_rows, exchanges
from run import (
    READY_S_MAX,
    RUN_S_MAX,
    WAYS,
    Way,
    engine_argv,
    gateway_argv,
    make_model,
    make_plan,
    read_tap,
    run_client,
    running,
    warm_up,
)

STAMPS_APART_US = 5
"""Median of what two stamps of one packet differ by: each packet socket takes its own."""
HELD_UP_US, HELD_UP_SHARE_MAX = 1_000, 0.01
"""More lies between the stamps of few packets: interrupts, on a machine with other work."""
SETTLE_S = 1.2  # tcpdump passes a block that is not full after a second

Json = dict[str, Any]


def permission() -> str:
    """Why no packets can be read here; empty if they can."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except (AttributeError, OSError) as error:
        return str(error)
    return ""


def dump(port: int, file: Path) -> subprocess.Popen[bytes]:
    """A tcpdump that has begun to write."""
    file.unlink(missing_ok=True)
    argv = ["tcpdump", "-i", "lo", "-s", "0", "-U", "-w", str(file), "tcp", "port", str(port)]
    with (LOGS / "tcpdump.log").open("ab") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    while not file.exists() or not file.stat().st_size:
        if process.poll() is not None:
            raise Failure(f"tcpdump ended with {process.returncode}\n{tail(LOGS / 'tcpdump.log')}")
        time.sleep(0.05)
    return process


def observe(way: Way, ports: dict[str, int]) -> list[str]:
    """One way from start to end; returns what is wrong."""
    wrong: list[str] = []
    plan, admin, port = make_plan(way), port_free(), ports[way.first]
    live, file, read = (ROOT / f"{name}-{way.key}" for name in ("live", "packets.pcap", "read"))
    for folder in (live, read):
        shutil.rmtree(folder, ignore_errors=True)
    argv = [str(LLMTAP), "watch", "--interface", "lo", "--port", str(port)]
    argv += ["--admin", f"127.0.0.1:{admin}", "--capture", str(live)]
    with running(f"watch-{way.key}", argv, wrong) as watch:
        watch.wait_ready(f"http://127.0.0.1:{admin}/readyz", limit_s=READY_S_MAX)
        process = dump(port, file)
        records = run_client(way, ports, plan)
        # The client's first request, which is not measured, goes to the engine, too.
        seen, _ = read_tap(admin, len(plan) + (way.first == "engine"))
        time.sleep(SETTLE_S)
        process.send_signal(signal.SIGINT)
        process.wait()
        (relay,) = get_json(f"http://127.0.0.1:{admin}/api/v1/summary?window=all")["relays"].values()
    wanted = {request["id"] for request in plan}
    seen = [x for x in seen if x["request_id"] in wanted]
    summary = {"n": len(seen), "outcomes": Counter(x["outcome"] for x in seen)}
    wrong += vantages.check_tap(records, seen, summary, left=["client_cancelled"], same_chunks=True)
    wrong += [f"{r['id']}: {r['error']}" for r in records if r["error"]]
    if relay["packets"]["lost"] or relay["dropped"]:
        wrong.append(f"packets {relay['packets']}, dropped {relay['dropped']}")
    argv = [str(LLMTAP), "watch", "--read", str(file), "--port", str(port), "--capture", str(read), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return [*wrong, f"the file cannot be read: {done.stderr.strip()}"]
    from_file = json.loads(done.stdout)["relays"]["file"]
    counts = [(r["opened"], r["measured"], r["dropped"]) for r in (relay, from_file)]
    if counts[0] != counts[1]:
        wrong.append(f"opened, measured, dropped: {counts[0]} live, {counts[1]} from the file")
    at = {name: exchanges(folder) for name, folder in (("live", live), ("file", read))}
    return wrong + compare(
        *({key: rows[key] for key in wanted & rows.keys()} for rows in at.values()), wanted
    )


def compare(live: Json, from_file: Json, wanted: set[str]) -> list[str]:
    """What differs between two captures of one traffic."""
    wrong = [
        f"{len(wanted - rows.keys())} exchanges are missing"
        for rows in (live, from_file)
        if wanted - rows.keys()
    ]
    apart: list[float] = []
    for key in live.keys() & from_file.keys():
        a, b = live[key], from_file[key]
        wrong += [f"{key}: {complaint}" for complaint in check_rows(a, b)]
        shift_us = (a["arrival_ns"] - b["arrival_ns"]) / 1e3
        apart += [abs(x - y + shift_us) for x, y in zip(a["event_us"], b["event_us"], strict=False)]
    middle = median(apart) if apart else 0.0
    print(f"  {len(live)} exchanges, {len(apart)} events: {middle:.1f} us apart in the median", flush=True)
    if middle > STAMPS_APART_US:
        wrong.append(f"events are {middle:.1f} us apart in the median, {STAMPS_APART_US} are allowed")
    if sum(us > HELD_UP_US for us in apart) > HELD_UP_SHARE_MAX * len(apart):
        wrong.append(f"events are up to {max(apart):.0f} us apart")
    return wrong


def perform() -> list[str]:
    if reason := permission():
        print(f"  not run: packets need root or CAP_NET_RAW ({reason})", flush=True)
        return []
    environments.install("tcpdump", "tcpdump")
    environments.prepare("engine", "gateway")
    with phase("model"):
        make_model()
    wrong: list[str] = []
    ports = {name: port_free() for name in ("engine", "gateway", "tap")}
    with (
        running("engine", engine_argv(ports["engine"]), []) as engine,
        running("gateway", gateway_argv(ports["gateway"], ports["engine"], ports["tap"]), []) as gateway,
    ):
        with phase("engine and gateway ready"):
            engine.wait_ready(f"http://127.0.0.1:{ports['engine']}/health", limit_s=READY_S_MAX)
            gateway.wait_ready(f"http://127.0.0.1:{ports['gateway']}/health/readiness", limit_s=READY_S_MAX)
            warm_up(ports["engine"])
            warm_up(ports["gateway"])
        for way in WAYS:
            if way.upstream is None:
                with phase(f"packets of {way.name}"):
                    wrong += [f"{way.name}: {complaint}" for complaint in observe(way, ports)]
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("packets", perform, limit_s=RUN_S_MAX))
