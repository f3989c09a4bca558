"""The tap inside a gateway: LiteLLM's proxy with the middleware, a proxy in front of it, one meter for both.

    .venv/bin/python tests/e2e/middleware.py         half a minute, once the gateway's environment is made

The `openai` client asks through the proxy, LiteLLM asks the simulated engine. Every stream is then told
three times: by the client, by the proxy, and by the middleware at LiteLLM's own edge. All three have to
tell of the same requests, chunks and tokens, and each one's times contain those of the next. Exits 1,
naming what is wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from parts import environments, vantages
from parts.script import LLMTAP, PROGRAMS, REPOSITORY, ROOT, carry_out, phase
from parts.servers import get_exchanges, get_json, port_free, proxy_argv
from run import READY_S_MAX, Way, run_client, running, warm_up

RUN_S_MAX = 1_200  # with the gateway's environment made on a slow machine
SETTLE_S_MAX = 120  # from the client's last byte to the last word of proxy and middleware
MODEL = "tiny-qwen2"  # what run.py's client warms up with; the simulated engine takes any name
WAY = Way(
    "middleware", "client - TAP - LiteLLM with the middleware - simulated engine", "tap", "gateway", MODEL
)
HELD_UP_S_MAX = 0.05
"""What a relay may be held up between its send and its stamp of it, which makes its TTFT too short."""
COUNTS = {"stream": 40, "usage": 10, "plain": 4, "cancelled": 1}
ENGINE = ["--ttft", "80ms", "--itl", "10ms"]

Json = dict[str, Any]


def make_plan() -> list[Json]:
    return [
        {
            "id": f"e2e-middleware-{kind}-{i}",
            "kind": kind,
            "prompt": f"Please tell me ({kind} {i}): what passes through a tap?",
            "max_tokens": 600 if kind == "cancelled" else 24 + 8 * (i % 3),
        }
        for kind, count in COUNTS.items()
        for i in range(count)
    ]


def gateway_config(engine: int) -> Path:
    address = {"api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", **address}}],
        "litellm_settings": {"num_retries": 0, "telemetry": False},
    }
    file = ROOT / "litellm-middleware.yaml"
    file.write_text(json.dumps(config, indent=2))  # JSON is YAML enough
    return file


def read_both(admin: int, plan: list[Json]) -> tuple[list[Json], list[Json], dict[str, Json]]:
    """The proxy's exchanges of the plan, the middleware's, and what each said of its own counts at last."""
    base, wanted = f"http://127.0.0.1:{admin}/api/v1", {request["id"] for request in plan}
    give_up_at = time.monotonic() + SETTLE_S_MAX
    while True:
        relays = get_json(f"{base}/summary?window=all")["relays"]
        told = get_exchanges(base)
        mine = [x for x in told if x["request_id"] in wanted]
        at_app = [x for x in mine if x["relay"].startswith("app-")]
        at_proxy = [x for x in mine if not x["relay"].startswith("app-")]
        settled = not any(relay.get("unsettled", 1) for relay in relays.values())
        whole = len(at_app) >= len(plan) and len(at_proxy) >= len(plan)
        if (whole and settled) or time.monotonic() > give_up_at:
            return at_proxy, at_app, relays
        time.sleep(0.1)


def check(plan: list[Json], records: list[Json], at_proxy: list[Json], at_app: list[Json]) -> list[str]:
    """What is wrong with the two accounts, each beside the client's, and the one beside the other."""
    wrong = []
    for who, seen in (("proxy", at_proxy), ("middleware", at_app)):
        summary = {"n": len(seen), "outcomes": Counter(x["outcome"] for x in seen)}
        # A gateway may read an answer to its end though nobody waits for it any more.
        left = ["client_cancelled"] if who == "proxy" else ["client_cancelled", "complete"]
        wrong += [
            f"{who}: {c}" for c in vantages.check_tap(records, seen, summary, left=left, same_chunks=True)
        ]
    inside = {x["request_id"]: x for x in at_app}
    for x in at_proxy:
        y = inside.get(x["request_id"])
        if y is None or x["outcome"] != "complete":
            continue
        differ = [k for k in ("tenant", "model", "status", "tokens", "usage", "stream") if x[k] != y[k]]
        if differ:
            wrong.append(f"{x['request_id']}: the accounts differ in {differ}")
        width = x["uncertainty"] + y["uncertainty"] + HELD_UP_S_MAX
        for metric in ("ttft", "e2e"):
            outer, inner = x["metrics"][metric], y["metrics"][metric]
            if outer is not None and (inner is None or inner > outer + width):
                wrong.append(f"{x['request_id']}: {metric} {outer} at the proxy, {inner} in the app")
    return wrong


def check_counts(relays: dict[str, Json]) -> list[str]:
    """Nothing may be dropped, and everything opened has to be measured."""
    apps = [name for name in relays if name.startswith("app-")]
    wrong = [] if len(apps) == 1 else [f"one app speaks to the meter, it knows {apps}"]
    for name, said in relays.items():
        if said["opened"] != said["measured"] or said["dropped"]:
            wrong.append(f"{name}: opened {said['opened']}, measured {said['measured']}, {said['dropped']}")
    return wrong


def line(who: str, ttfts: list[float], gaps: list[float]) -> str:
    shown = [f"{vantages.percentile(values, q):9.2f}" for values in (ttfts, gaps) for q in (0.5, 0.9, 0.99)]
    return f"{who:12} {' '.join(shown)}"


def table(records: list[Json], at_proxy: list[Json], at_app: list[Json]) -> str:
    heads = " ".join(f"{head:>9}" for head in ("TTFT p50", "p90", "p99", "gap p50", "p90", "p99"))
    lines = [f"{'ms, seen by':12} {heads}"]
    timed = [r for r in records if r["kind"] in vantages.TIMED]
    lines.append(line("client", vantages.client_ttfts_ms(timed), vantages.client_gaps_ms(timed)))
    for who, seen in (("proxy", at_proxy), ("middleware", at_app)):
        mine = [x for _, x in vantages.timed(records, seen)]
        lines.append(line(who, vantages.tap_ttfts_ms(mine), vantages.tap_gaps_ms(mine)))
    return "\n".join(lines)


def run() -> list[str]:
    """Everything; returns what is wrong."""
    environments.prepare("gateway")
    wrong: list[str] = []
    ports = {name: port_free() for name in ("engine", "gateway", "tap", "admin")}
    at = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    plan = make_plan()
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:  # a socket's path may not be long
        path = f"{folder}/tap.sock"
        engine_argv = [str(LLMTAP), "sim", "serve", "--listen", at["engine"], *ENGINE]
        tap_argv = proxy_argv(
            LLMTAP, ports["gateway"], ports["tap"], ports["admin"], "--set", f"meter.socket={path}"
        )
        python = str(ROOT / "gateway/bin/python")
        gateway_argv = [python, "-P", str(PROGRAMS / "litellm_with_tap.py"), str(ports["gateway"]), path]
        env = {"CONFIG_FILE_PATH": str(gateway_config(ports["engine"])), "PYTHONPATH": str(REPOSITORY)}
        with (
            running("sim-middleware", engine_argv, wrong) as engine,
            running("tap-middleware", tap_argv, wrong) as tap,
            running("gateway-middleware", gateway_argv, wrong, env) as gateway,
        ):
            with phase("engine, tap and LiteLLM ready"):
                engine.wait_ready(f"http://{at['engine']}/health", limit_s=READY_S_MAX)
                tap.wait_ready(f"http://{at['admin']}/readyz", limit_s=READY_S_MAX)
                gateway.wait_ready(f"http://{at['gateway']}/health/readiness", limit_s=READY_S_MAX)
                warm_up(ports["gateway"])
            with phase(f"{len(plan)} requests by the openai client"):
                records = run_client(WAY, ports, plan)
            at_proxy, at_app, relays = read_both(ports["admin"], plan)
            (ROOT / "exchanges-middleware.json").write_text(json.dumps(at_proxy + at_app))
    wrong += [f"{r['id']}: {r['error']}" for r in records if r["error"]]
    wrong += check(plan, records, at_proxy, at_app) + check_counts(relays)
    print(f"\n{WAY.name}\n\n{table(records, at_proxy, at_app)}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("middleware", run, limit_s=RUN_S_MAX))
