"""A trace replayed against a real engine, and the replay's own record beside that of a tap on the way.

    .venv/bin/python tests/e2e/replay.py

`llmtap replay` sends the first 40 requests of the Azure trace (azure_conv_200.csv; see README.md) through
`llmtap proxy` to `transformers serve`, with prompts of exact length by the model's own tokenizer and chat
template. Then three things are checked:

- the engine's own usage says of each request as many prompt tokens as the trace does;
- every request left on time, and was answered;
- the tap's exchanges are the replay's: joined by X-Request-Id, the points of the timeline and the events
  agree within what both say of their own uncertainty.

Exits 1, naming what is wrong.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import run
from parts import environments
from parts.script import HERE, LLMTAP, ROOT, carry_out, phase
from parts.servers import Failure, port_free, proxy_argv, tail
from run import MODEL, make_model, running, warm_up

TRACE = HERE / "azure_conv_200.csv"
REQUESTS = 40  # of 200
RATE = "1.5"  # per second
READY_S_MAX = 180
REPLAY_S_MAX = 900
HAND_OVER_S = 0.002
"""A point is stamped on two sides of one socket: between them lie a system call of each, and the kernel."""
HELD_UP_SHARE_MAX = 0.03
"""Of the exchanges: between a system call and its stamp a process may lose the CPU, for longer than it knows.
An error of ours would be in all of them."""
SAME = ("status", "outcome", "finish_reason", "input_tokens", "output_tokens", "event_class", "event_bytes")
TEMPLATE_TOKENS = 12
"""What the model's chat template takes, and one for the text: no prompt is shorter."""
POINTS = ("submit", "first_token", "first_content", "last_token", "response_end")


def engine_argv(port: int) -> list[str]:
    """As in run.py, with a cache in which the trace's prompts fit."""
    argv = run.engine_argv(port)
    for option, value in (("--cb-num-blocks", "256"), ("--cb-max-batch-tokens", "512")):
        argv[argv.index(option) + 1] = value
    return argv


def replay(target: int) -> dict[str, Any]:
    """The result of the command."""
    kept, result = ROOT / "replayed", ROOT / "replay.json"
    shutil.rmtree(kept, ignore_errors=True)
    result.unlink(missing_ok=True)
    argv = [
        str(LLMTAP),
        "replay",
        str(TRACE),
        "--target",
        f"http://127.0.0.1:{target}",
        "--rate",
        RATE,
        "--requests",
        str(REQUESTS),
        "--model",
        MODEL,
        "--tokenizer",
        str(ROOT / MODEL),
        "--capture",
        str(kept),
        "--json",
        str(result),
    ]
    done = subprocess.run(argv, timeout=REPLAY_S_MAX)
    if not result.exists():
        raise Failure(f"llmtap replay ended with {done.returncode} and no result")
    return json.loads(result.read_text())  # type: ignore[no-any-return]


def exchanges(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of a capture by request id."""
    code = (
        "import json, sys, llmtap\n"
        "for row in llmtap.read(sys.argv[1]).table().to_pylist():\n"
        "    print(json.dumps(row, default=str))"
    )
    argv = [str(LLMTAP.parent / "python"), "-c", code, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Failure(f"the capture cannot be read: {done.stderr[-500:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["request_id"]: row for row in rows}


def check_result(result: dict[str, Any]) -> Iterator[str]:
    lengths, n = result["lengths"], REQUESTS
    with TRACE.open() as file:
        rows = [int(line.split(",")[1]) for line in file.readlines()[1 : n + 1]]
    possible = sum(tokens >= TEMPLATE_TOKENS for tokens in rows)
    if result["outcomes"] != {"complete": n}:
        yield f"of {n} requests came {result['outcomes']}"
    told = (lengths["input_told"], lengths["input_as_counted"], lengths["input_exact"])
    if told != (n, n, possible):
        yield f"prompts by the engine's usage, of which {possible} can be exact: {lengths}"
    if result["plan"]["prompts"]["exact"] != possible:
        yield f"prompts by our own count, of which {possible} can be exact: {result['plan']['prompts']}"


def check_rows(ours: dict[str, Any], tap: dict[str, Any]) -> Iterator[str]:
    """What differs between two rows of one exchange in all that is no time."""
    for name in (*SAME, *(f"{point}_us" for point in POINTS)):
        a, b = ours[name], tap[name]
        if (a is None) != (b is None) or (name in SAME and a != b):
            yield f"{name}: {a} and {b}"


def check_times(ours: dict[str, Any], tap: dict[str, Any]) -> Iterator[str]:
    """What lies further apart between them than both allow, and than the tap says that it added."""
    # Both count from 1970 by one host's clocks, each with an anchor of its own.
    moved = (tap["arrival_ns"] - ours["arrival_ns"]) / 1e3
    allowed = ours["uncertainty_us"] + tap["uncertainty_us"] + HAND_OVER_S * 1e6
    apart = {
        point: ours[f"{point}_us"] - tap[f"{point}_us"] - moved
        for point in POINTS
        if ours[f"{point}_us"] is not None and tap[f"{point}_us"] is not None
    }
    pairs = zip(ours["event_us"], tap["event_us"], strict=False)
    apart["an event"] = max((a - b - moved for a, b in pairs), key=abs, default=0.0)
    for what, us in apart.items():
        added_us = tap["added_request_us" if what == "submit" else "added_chunk_max_us"] or 0
        if abs(us) > allowed + added_us:
            yield f"{what}: {us / 1e3:.2f} ms apart, {(allowed + added_us) / 1e3:.2f} are allowed"


def compare(ours: dict[str, Any], tap: dict[str, Any]) -> list[str]:
    wrong, far = [], []
    if ours.keys() != tap.keys():
        wrong.append(f"{len(ours.keys() - tap.keys())} requests are not in the tap's capture")
    both = sorted(ours.keys() & tap.keys())
    for key in both:
        wrong += [f"{key}: {complaint}" for complaint in check_rows(ours[key], tap[key])]
        if complaints := list(check_times(ours[key], tap[key])):
            far.append(f"{key}: {'; '.join(complaints)}")
    print("".join(f"\n  held up: {one}" for one in far), flush=True)
    return wrong + (far if len(far) > HELD_UP_SHARE_MAX * len(both) else [])


def table(ours: dict[str, Any], tap: dict[str, Any]) -> str:
    """TTFT as each side has it, and how far apart."""
    pairs = [(ours[key], tap[key]) for key in ours.keys() & tap.keys()]
    lines = ["                 p50        p99   (ms)"]
    for name, rows in (("replay", [a for a, _ in pairs]), ("tap", [b for _, b in pairs])):
        ttft = sorted((row["first_content_us"] - row["submit_us"]) / 1e3 for row in rows)
        lines.append(f"TTFT {name:9} {ttft[len(ttft) // 2]:8.2f}   {ttft[int(len(ttft) * 0.99)]:8.2f}")
    return "\n".join(lines)


def perform() -> list[str]:
    environments.prepare("engine")
    with phase("model"):
        make_model()
    wrong: list[str] = []
    engine_at, tap_at, admin = port_free(), port_free(), port_free()
    seen = ROOT / "capture-replay"
    shutil.rmtree(seen, ignore_errors=True)
    with running("engine", engine_argv(engine_at), []) as engine:
        with phase("engine ready"):
            engine.wait_ready(f"http://127.0.0.1:{engine_at}/health", limit_s=READY_S_MAX)
        with phase("first answers"):
            warm_up(engine_at)
        argv = proxy_argv(LLMTAP, engine_at, tap_at, admin, "--capture", str(seen))
        with running("tap-replay", argv, wrong) as tap:
            tap.wait_ready(f"http://127.0.0.1:{admin}/readyz", limit_s=READY_S_MAX)
            with phase(f"replay of {REQUESTS} requests"):
                result = replay(tap_at)
        if engine.process.poll() is not None:
            wrong.append(f"the engine ended on the way\n{tail(engine.log)}")
    wrong += check_result(result)
    ours = exchanges(ROOT / "replayed")
    tapped = {key: row for key, row in exchanges(seen).items() if key in ours}
    wrong += compare(ours, tapped)
    print("\n" + table(ours, tapped), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("replay", perform, limit_s=run.RUN_S_MAX))
