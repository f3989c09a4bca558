"""Both sides of a real gateway: LiteLLM and Portkey between the two relays of one proxy with `[pair]`.

    .venv/bin/python tests/e2e/pairs.py              about 3 minutes, with the gateway's environment made

The `openai` client asks through the front relay, the gateway asks the simulated engine through the back
relay. The client notes when it had each token, the engine when it sent it. The difference is what both
relays, the gateway, and the work of client and engine add, so no delay of a pair may be longer. The same
requests without a gateway show what client, engine and relays add alone. Exits 1, and names what is wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, floor, sqrt
from statistics import median
from typing import Any

from parts import environments
from parts.script import LLMTAP, PROGRAMS, ROOT, carry_out, phase
from parts.servers import get_exchanges, get_json, port_free
from run import READY_S_MAX, Way, run_client, running

RUN_S_MAX = 1_500  # with the environments made on a slow machine
SETTLE_S_MAX = 120  # from the client's last byte to the last pair
MODEL = "tiny-qwen2"  # what run.py's client warms up with; the simulated engine takes any name
ENGINE = ("--ttft", "80ms", "--itl", "10ms", "--tokens", "1000")
REQUESTS = 100
TOKENS_MIN = 20
AT_ONCE = 4
Z = 1.96
LATER_MS = 2.0
"""A client that shares its CPUs with a gateway reads later, by up to this time in the median."""
FIGURES = {"ttft": "first token", "token": "each token"}
"""Figures of the pairs that both clients measure, too, and their titles."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway between both relays."""

    name: str
    argv: list[str]
    ready: str
    """Path that answers with 200 when it is ready."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header fields with its configuration, which the client sends."""


def litellm(port: int, back: int) -> Gateway:
    address = {"api_base": f"http://127.0.0.1:{back}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", **address}}],
        "litellm_settings": {"num_retries": 0, "telemetry": False},
        "general_settings": {"forward_client_headers_to_llm_api": True},
    }
    file = ROOT / "litellm-pairs.yaml"
    file.write_text(json.dumps(config, indent=2))  # JSON is YAML enough
    argv = [str(ROOT / "gateway/bin/litellm"), "--config", str(file)]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    pip = [str(ROOT / "gateway/bin/pip"), "show", "litellm"]
    shown = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    release = shown.partition("Version: ")[2].partition("\n")[0]
    return Gateway(f"LiteLLM {release}", argv, "/health/readiness")


def portkey(port: int, back: int) -> Gateway:
    """Raises Skip without Node."""
    folder = ROOT / "portkey"
    node, version = environments.prepare_node(folder, PROGRAMS / "portkey.json")
    package = folder / "node_modules/@portkey-ai/gateway"
    release = json.loads((package / "package.json").read_text())["version"]
    # The client sends the configuration, as Portkey's own package does.
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"http://127.0.0.1:{back}/v1"}
    argv = [node, str(package / "build/start-server.js"), f"--port={port}", "--headless"]
    return Gateway(f"Portkey {release}, Node {version}", argv, "/", headers)


GATEWAYS = (litellm, portkey)


def make_plan(name: str) -> list[Json]:
    """Streams, each of another length: the length is the same for client, pair and engine."""
    return [
        {
            "id": f"e2e-pairs-{name}-{i}",
            "kind": "usage",
            "prompt": f"Please tell me ({i}): what does a gateway add?",
            "max_tokens": TOKENS_MIN + i,
        }
        for i in range(REQUESTS)
    ]


@contextmanager
def proxy_around(name: str, upstream: int, ports: dict[str, int], wrong: list[str]) -> Iterator[str]:
    """A proxy with both relays; yields the URL of its API."""
    file = ROOT / f"pairs-{name}.toml"
    file.write_text(
        f"""
[relay]
listen = "127.0.0.1:{ports["tap"]}"
upstream = "http://127.0.0.1:{upstream}"

[pair]
listen = "127.0.0.1:{ports["back"]}"
upstream = "http://127.0.0.1:{ports["sim"]}"
pairs_kept = {2 * REQUESTS}

[meter]
admin = "127.0.0.1:{ports["admin"]}"
"""
    )
    base = f"http://127.0.0.1:{ports['admin']}"
    with running(f"tap-pairs-{name}", [str(LLMTAP), "proxy", "--config", str(file)], wrong) as tap:
        tap.wait_ready(f"{base}/readyz", limit_s=READY_S_MAX)
        yield f"{base}/api/v1"


def read_pairs(base: str) -> Json:
    """The pairs, once nothing waits for its partner or time is up."""
    give_up_at = time.monotonic() + SETTLE_S_MAX
    while True:
        pairs = get_json(f"{base}/pairs?limit=1000")
        settled = pairs["counts"]["front"] > REQUESTS and not pairs["waiting"]
        if settled or time.monotonic() > give_up_at:
            return pairs
        time.sleep(0.2)


@dataclass(slots=True)
class Run:
    """All requests through one gateway, in the order of the plan; times in ms."""

    name: str
    pairs: Json
    by_pairs: dict[str, list[Json]] = field(default_factory=dict)
    """Figures of the pairs with their ranges, by name (FIGURES)."""
    by_clients: dict[str, list[float]] = field(default_factory=dict)
    """The same times by the clock of the client, minus those of the engine's log."""

    def own_ms(self, figure: str) -> list[float]:
        """Times that client and engine add to what the pairs show."""
        pairs = self.by_pairs[figure]
        return [whole - pair["value"] for whole, pair in zip(self.by_clients[figure], pairs, strict=True)]


def measure(
    name: str, gateway: Gateway | None, ports: dict[str, int], wrong: list[str]
) -> tuple[Run, list[str]]:
    """One run of the plan: its times, and what is wrong with its pairs."""
    plan = make_plan(name)
    way = Way(f"pairs-{name}", name, "tap", model=MODEL)
    upstream = ports["gateway"] if gateway else ports["back"]
    # The first request goes the same way and is not measured: it imports half of a gateway.
    client_ports = {"tap": ports["tap"], "engine": ports["tap"]}
    truths_url = f"http://127.0.0.1:{ports['sim']}/sim/truth?since="
    since = get_json(f"{truths_url}0")["next"]
    with proxy_around(name, upstream, ports, wrong) as base:
        records = run_client(way, client_ports, plan, AT_ONCE, gateway.headers if gateway else {})
        pairs = read_pairs(base)
        exchanges = get_exchanges(base)
    truths = get_json(f"{truths_url}{since}")["truths"]
    (ROOT / f"pairs-{name}.json").write_text(json.dumps([records, pairs, exchanges, truths]))
    result = Run(gateway.name if gateway else "none", pairs)
    return result, check_counts(pairs) + read_times(result, plan, records, exchanges, truths)


def check_counts(pairs: Json) -> list[str]:
    """All requests, and the unmeasured one, must be in a pair by their id, with one request of the gateway
    each."""
    n = REQUESTS + 1
    expected = {
        "counts": {"front": n, "back": n, "pairs": n},
        "evidence": {"request_id": n},
        "attempts": {"delivered": n},
        "text": {"equal": n},
    }
    shown = {name: {k: v for k, v in pairs[name].items() if v} for name in expected}
    return [] if shown == expected else [f"the pairs are {shown}, expected {expected}"]


def read_times(
    result: Run, plan: list[Json], records: list[Json], exchanges: list[Json], truths: list[Json]
) -> list[str]:
    """Reads the times of every request by its pair and by both clients; returns what is wrong."""
    wrong = []
    by_id = {x["id"]: x for x in exchanges}
    pairs = {by_id[pair["front"]]["request_id"]: pair for pair in result.pairs["recent"]}
    sent_by_length = {len(truth["sent_ns"][0]): truth for truth in truths}
    for request, record in zip(plan, records, strict=True):
        pair, truth = pairs.get(request["id"]), sent_by_length.get(request["max_tokens"])
        if record["error"] or pair is None or truth is None:
            wrong.append(f"{request['id']}: {record['error']}, pair {pair}, engine {truth is not None}")
            continue
        lengths = [by_id[back["id"]]["tokens"]["output"] for back in pair["back"]]
        sent_ns, came_ns = truth["sent_ns"][0], record["content_ns"]
        if lengths != [request["max_tokens"]] or len(came_ns) != len(sent_ns):
            wrong.append(f"{request['id']}: {len(sent_ns)} tokens, {len(came_ns)} chunks, pairs {lengths}")
            continue
        delays_ns = [record["start_ns"] + b - a for a, b in zip(sent_ns, came_ns, strict=True)]
        by_clients_ns = {
            "ttft": record["first_ns"] - (sent_ns[0] - truth["accepted_ns"]),
            "token": median(delays_ns),
        }
        for name, ns in by_clients_ns.items():
            (figure,) = pair["figures"][name]
            figure = {key: seconds * 1e3 for key, seconds in figure.items()}
            result.by_pairs.setdefault(name, []).append(figure)
            result.by_clients.setdefault(name, []).append(ns / 1e6)
            if figure["low"] > ns / 1e6:
                wrong.append(f"{request['id']}: {name} {figure} by the pair, {ns / 1e6} by the clients")
    return wrong


def median_range(values: list[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % interval by ranks (binomial)."""
    ordered, n = sorted(values), len(values)
    reach = Z * sqrt(n) / 2
    low, high = floor((n - 1) / 2 - reach), ceil((n - 1) / 2 + reach)
    return median(ordered), ordered[max(0, low)], ordered[min(n - 1, high)]


def median_by_clients(run: Run, alone: Run, figure: str) -> tuple[float, float, float]:
    """What the gateway adds by both clients, with its range: their median difference, without the time that
    client and engine need themselves, which the run without a gateway shows."""
    whole, own = median_range(run.by_clients[figure]), median_range(alone.own_ms(figure))
    return whole[0] - own[0], whole[1] - own[2], whole[2] - own[1]


def compare(run: Run, alone: Run) -> list[str]:
    """What is wrong: the median by the pairs must agree with that by the clients, within both ranges and
    LATER_MS."""
    wrong = []
    for figure in FIGURES:
        shown = {key: seconds * 1e3 for key, seconds in run.pairs["figures"][figure]["p50"].items()}
        _, low, high = expected = median_by_clients(run, alone, figure)
        if shown["low"] > high or shown["high"] < low - LATER_MS:
            wrong.append(f"{figure} p50 {shown} by the pairs, {expected} by the clients")
    return wrong


def table(runs: list[Run]) -> str:
    """Markdown: the medians in ms with their ranges, by the pairs and by both clients."""
    heads = ["gateway", "in pairs"]
    for title in FIGURES.values():
        heads += [f"{title}, pairs", f"{title}, clients"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for run in runs:
        counts = run.pairs["counts"]
        cells = [run.name, f"{counts['pairs']} of {counts['front']}"]
        for figure in FIGURES:
            p50 = run.pairs["figures"][figure]["p50"]
            ends = [p50[key] * 1e3 for key in ("value", "low", "high")]
            cells += [
                "{:.2f} ({:.2f} to {:.2f})".format(*e)
                for e in (ends, median_by_clients(run, runs[0], figure))
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run() -> list[str]:
    """Everything; returns what is wrong."""
    environments.prepare("gateway")
    wrong: list[str] = []
    ports = {name: port_free() for name in ("sim", "gateway", "tap", "back", "admin")}
    at = f"127.0.0.1:{ports['sim']}"
    runs = []
    with running("sim-pairs", [str(LLMTAP), "sim", "serve", "--listen", at, *ENGINE], wrong) as engine:
        engine.wait_ready(f"http://{at}/health", limit_s=READY_S_MAX)
        with phase("without a gateway"):
            alone, complaints = measure("none", None, ports, wrong)
        runs.append(alone)
        wrong += [f"without a gateway: {c}" for c in complaints]
        for make in GATEWAYS:
            name = make.__name__
            try:
                gateway = make(ports["gateway"], ports["back"])
            except environments.Skip as reason:
                print(f"[e2e] {name}: SKIPPED, {reason}", flush=True)
                continue
            with phase(gateway.name), running(f"gateway-{name}", gateway.argv, wrong) as server:
                server.wait_ready(f"http://127.0.0.1:{ports['gateway']}{gateway.ready}", limit_s=READY_S_MAX)
                through, complaints = measure(name, gateway, ports, wrong)
            runs.append(through)
            wrong += [f"{name}: {c}" for c in complaints or compare(through, alone)]
    if not wrong:
        print(f"\nAdded time, p50 in ms; {REQUESTS} streams, {AT_ONCE} at once, engine {' '.join(ENGINE)}\n")
        print(table(runs), flush=True)
        own = ", ".join(f"{title} {median(alone.own_ms(name)):.2f} ms" for name, title in FIGURES.items())
        print(f"\nClient and engine alone: {own}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("pairs", run, limit_s=RUN_S_MAX))
