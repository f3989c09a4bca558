"""Real traffic: a real engine, a real gateway and the `openai` client, with llmtap between them.

    .venv/bin/python tests/e2e/run.py            all of it
    .venv/bin/python tests/e2e/run.py --no-tap   the engine and the gateway alone, as the client sees them

Every path asks for the same answers: streams, streams with usage, answers in one piece, one stream the client
leaves midway, and one after a pause in which the server closes the idle connection. Greedy decoding makes the
texts comparable: what came through the tap must be what came without it.

Then an experiment on the same engine and gateway: what LiteLLM's content filter costs, A/B and A/A.

Exits 1, naming what is wrong, if an answer differs, a stream fails, the tap's account differs from what the
client did, or the two vantage points contradict each other. README.md in this folder explains the table.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parts import environments, guardrail, vantages
from parts.script import HERE, LLMTAP, LOGS, PROGRAMS, ROOT, carry_out, phase
from parts.servers import (
    Failure,
    Server,
    get_exchanges,
    get_json,
    port_free,
    post_json,
    proxy_argv,
    run_to_end,
    tail,
)

MODEL = "tiny-qwen2"  # the folder below ROOT, and the name the engine knows it by
TAPPED = "tiny-qwen2-behind-tap"  # what LiteLLM calls the same model when it goes there through a tap
KEY = "sk-e2e-on-loopback-only"  # LiteLLM starts with no empty key

RUN_S_MAX = 1_500  # everything, a cold install on a slow machine included
READY_S_MAX = 180
WARM_UP_S_MAX = 240  # the first answer of an engine may take half a minute
CLIENT_S_MAX = 400
CONCURRENCY = 4  # requests at once
EXPERIMENT_REQUESTS = 240
SETTLE_S_MAX = 60  # from the client's last byte to the last exchange in the tap's API

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HOME": str(ROOT / "hf"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MASTER_KEY": KEY,
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "OMP_NUM_THREADS": "1",  # the model is far too small for more, and the other core belongs to the rest
    "PYTHONUNBUFFERED": "1",
}


@dataclass(slots=True, frozen=True)
class Way:
    """One way from the client to the engine."""

    key: str
    name: str
    first: str
    """Whom the client talks to: `engine`, `gateway` or `tap`."""
    upstream: str | None = None
    """Whom the tap talks to; None without a tap."""
    model: str = MODEL

    @property
    def through_gateway(self) -> bool:
        return "gateway" in (self.first, self.upstream)


WAYS = [
    Way("engine", "client - engine", "engine"),
    Way("a", "client - TAP - engine", "tap", "engine"),
    Way("gateway", "client - LiteLLM - engine", "gateway"),
    Way("b", "client - TAP - LiteLLM - engine", "tap", "gateway"),
    Way("c", "client - LiteLLM - TAP - engine", "gateway", "engine", TAPPED),
]


def make_plan(way: Way) -> list[dict[str, Any]]:
    """The requests of one path; the same prompts and lengths on each, under names of its own."""
    counts = {"stream": 20, "usage": 4, "plain": 4, "cancelled": 1, "idle": 1}
    return [
        {
            "id": f"e2e-{way.key}-{kind}-{i}",
            "kind": kind,
            "prompt": f"Please tell me ({kind} {i}): what passes through a tap? ¿Qué? 你好 🙂",
            # Long enough that the client can leave midway; otherwise of different lengths.
            "max_tokens": 600 if kind == "cancelled" else 24 + 8 * (i % 5),
        }
        for kind, count in counts.items()
        for i in range(count)
    ]


@contextlib.contextmanager
def running(
    name: str, argv: list[str], wrong: list[str], env: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server for the length of a block; how it ended is added to `wrong`."""
    server = Server(name, argv, logs=LOGS, env=OFFLINE | (env or {}), cwd=ROOT)
    try:
        yield server
    except BaseException:
        server.stop(5)
        raise
    if complaint := server.stop():
        wrong.append(f"{complaint}\n{tail(server.log)}")


def make_model() -> None:
    """The model's folder, if it is not there or what makes it has changed."""
    folder, script = ROOT / MODEL, PROGRAMS / "tiny_model.py"
    made, recipe = folder / ".made", script.read_text() + (HERE / "requirements-engine.txt").read_text()
    if made.exists() and made.read_text() == recipe:
        print("  as it was", flush=True)
        return
    argv = [str(ROOT / "engine/bin/python"), str(script), str(folder)]
    run_to_end("tiny_model", argv, logs=LOGS, env={}, cwd=ROOT, limit_s=WARM_UP_S_MAX)
    made.write_text(recipe)


def engine_argv(port: int) -> list[str]:
    # Without the two limits the engine takes 4 GB of memory for its cache, and seconds to fill it.
    limits = ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "256"]
    serve = [str(ROOT / "engine/bin/transformers"), "serve", MODEL, "--continuous-batching", *limits]
    return [*serve, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]


def gateway_argv(port: int, engine: int, tap: int) -> list[str]:
    """LiteLLM with the engine under two names: as it is, and behind a tap. JSON is YAML enough."""

    def model(name: str, upstream: int) -> dict[str, Any]:
        address = {"api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
        return {"model_name": name, "litellm_params": {"model": f"openai/{MODEL}", **address}}

    config = {
        "model_list": [model(MODEL, engine), model(TAPPED, tap)],
        "litellm_settings": {"num_retries": 0, "telemetry": False},
        # X-Request-Id goes on to the engine, so that a tap behind the gateway can be matched as well.
        "guardrails": guardrail.GUARDRAILS,
        "general_settings": {"forward_client_headers_to_llm_api": True},
    }
    file = ROOT / "litellm.yaml"
    file.write_text(json.dumps(config, indent=2))
    argv = [str(ROOT / "gateway/bin/litellm"), "--config", str(file)]
    return [*argv, "--host", "127.0.0.1", "--port", str(port)]


def warm_up(port: int) -> None:
    """One answer whole, one streamed. The engine takes its sampling, greedy, from the first for good."""
    body = {
        "model": MODEL,
        "max_tokens": 4,
        "temperature": 0,
        "messages": [{"role": "user", "content": "hello"}],
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    try:
        for stream in (False, True):
            post_json(url, {**body, "stream": stream}, key=KEY, timeout_s=WARM_UP_S_MAX)
    except OSError as error:
        raise Failure(f"the first answer from {url}: {error}") from error


def run_client(
    way: Way,
    ports: dict[str, int],
    plan: list[dict[str, Any]],
    at_once: int = CONCURRENCY,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """The client's records, from a process of its own."""
    plan_file, records_file = ROOT / f"plan-{way.key}.json", ROOT / f"records-{way.key}.json"
    plan_file.write_text(json.dumps(plan))
    records_file.unlink(missing_ok=True)
    argv = [
        str(ROOT / "gateway/bin/python"),
        str(PROGRAMS / "vantage_client.py"),
        str(plan_file),
        str(records_file),
    ]
    argv += ["--base-url", f"http://127.0.0.1:{ports[way.first]}/v1", "--model", way.model, "--key", KEY]
    argv += ["--warm-up-url", f"http://127.0.0.1:{ports['engine']}/v1", "--warm-up-model", MODEL]
    argv += ["--concurrency", str(at_once)]
    for header in headers.items():
        argv += ["--header", *header]
    run_to_end(f"client-{way.key}", argv, logs=LOGS, env=OFFLINE, cwd=ROOT, limit_s=CLIENT_S_MAX)
    return json.loads(records_file.read_text())


def read_tap(admin: int, expected: int) -> tuple[list[Any], dict[str, Any]]:
    """The tap's exchanges and summary, once it shows the expected number or time is up.

    One more look a moment later: what comes on top of the expected would be wrong as well.
    """
    base = f"http://127.0.0.1:{admin}/api/v1"
    give_up = time.monotonic() + SETTLE_S_MAX
    while get_json(f"{base}/summary")["n"] < expected and time.monotonic() < give_up:
        time.sleep(0.1)
    time.sleep(0.5)
    return get_exchanges(base), get_json(f"{base}/summary")


def check_capture(kept: Path, expected: int) -> list[str]:
    """What is wrong with the files that the tap, which has ended, left of what it measured."""
    argv = [str(LLMTAP), "report", str(kept), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    if done.returncode:
        return [f"the capture cannot be read: {done.stderr.strip()}"]
    told = json.loads(done.stdout)
    if told["n"] != expected or not told["integrity"]["ok"]:
        return [f"the capture holds {told['n']} of {expected} exchanges: {told['integrity']}"]
    return []


def run_path(
    way: Way, ports: dict[str, int], reference: dict[str, str]
) -> tuple[list[Any], list[Any] | None, list[str]]:
    """One path from start to end: the client's records, the tap's exchanges, and what is wrong with them."""
    plan = make_plan(way)
    wrong: list[str] = []
    exchanges = None
    if way.upstream is None:
        records = run_client(way, ports, plan)
    else:
        admin, kept = port_free(), ROOT / f"capture-{way.key}"
        shutil.rmtree(kept, ignore_errors=True)
        argv = proxy_argv(LLMTAP, ports[way.upstream], ports["tap"], admin, "--capture", str(kept))
        with running(f"tap-{way.key}", argv, wrong) as tap:
            tap.wait_ready(f"http://127.0.0.1:{admin}/readyz", limit_s=READY_S_MAX)
            records = run_client(way, ports, plan)
            exchanges, summary = read_tap(admin, len(plan))
            (ROOT / f"exchanges-{way.key}.json").write_text(json.dumps(exchanges))
            (ROOT / f"summary-{way.key}.json").write_text(json.dumps(summary))
            # A gateway may read an answer to its end though nobody waits for it any more.
            left = ["client_cancelled"] if way.first == "tap" else ["client_cancelled", "complete"]
            wrong += vantages.check_tap(
                records, exchanges, summary, left=left, same_chunks=way.first == "tap"
            )
        wrong += check_capture(kept, len(exchanges))
    # The engine says usage unasked in its last chunk; LiteLLM hands it on only to those who ask.
    usage_kinds = ("usage", "plain") if way.through_gateway else ("usage", "plain", "stream", "idle")
    if not reference:  # the first path is the one without anyone between
        reference |= {p["prompt"]: r["text"] for p, r in zip(plan, records, strict=True) if not r["error"]}
    wrong += vantages.check_client(plan, records, reference, usage_kinds=usage_kinds)
    return records, exchanges, wrong


def run_experiment(ports: dict[str, int], *, aa: bool) -> list[str]:
    """One experiment on the tap in front of LiteLLM; prints its table and returns what is wrong."""
    way = Way("aa" if aa else "ab", "experiment", "tap", "gateway")
    wrong: list[str] = []
    requests = guardrail.plan(EXPERIMENT_REQUESTS, way.key)
    file, admin = ROOT / f"experiment-{way.key}.toml", port_free()
    guardrail.config(file, aa=aa)
    argv = proxy_argv(LLMTAP, ports["gateway"], ports["tap"], admin, "--config", str(file))
    with running(f"tap-{way.key}", argv, wrong) as tap:
        tap.wait_ready(f"http://127.0.0.1:{admin}/readyz", limit_s=READY_S_MAX)
        records = run_client(way, ports, requests, at_once=2)
        exchanges, _ = read_tap(admin, len(requests))
        found = get_json(f"http://127.0.0.1:{admin}/api/v1/experiment")
        (ROOT / f"experiment-{way.key}.json").write_text(json.dumps(found, indent=1))
    print(guardrail.table(found), flush=True)
    return wrong + guardrail.check(requests, records, exchanges, found, aa=aa)


def describe(way: Way, records: list[Any], exchanges: list[Any] | None) -> str:
    kinds = Counter(r["kind"] for r in records)
    line = "  client: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    if exchanges is not None:
        outcomes = Counter(e["outcome"] for e in exchanges)
        line += "; tap: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
        sources = Counter(e["tokens"]["source"] for e in exchanges)
        line += "; tokens from " + ", ".join(f"{source} ({n})" for source, n in sorted(sources.items()))
    return line


def run() -> list[str]:
    """Everything; returns what is wrong, path by path."""
    environments.prepare("engine", "gateway")
    with phase("model"):
        make_model()

    wrong: list[str] = []
    rows: list[tuple[str, list[Any], list[Any] | None]] = []
    reference: dict[str, str] = {}
    ports = {name: port_free() for name in ("engine", "gateway", "tap")}
    gateway_at = gateway_argv(ports["gateway"], ports["engine"], ports["tap"])
    with (
        running("engine", engine_argv(ports["engine"]), []) as engine,
        running("gateway", gateway_at, []) as gateway,
    ):
        with phase("engine and gateway ready"):
            engine.wait_ready(f"http://127.0.0.1:{ports['engine']}/health", limit_s=READY_S_MAX)
            gateway.wait_ready(f"http://127.0.0.1:{ports['gateway']}/health/readiness", limit_s=READY_S_MAX)
        with phase("first answers"):
            warm_up(ports["engine"])
            warm_up(ports["gateway"])
        for way in WAYS:
            with phase(f"path {way.key}: {way.name}"):
                records, exchanges, complaints = run_path(way, ports, reference)
                print(describe(way, records, exchanges), flush=True)
            rows.append((way.name, records, exchanges))
            wrong += [f"path {way.key} ({way.name}): {c}" for c in complaints]
        for aa in (False, True):
            with phase(
                f"experiment: the content filter {'against itself, A/A' if aa else 'on and off, A/B'}"
            ):
                wrong += [f"experiment: {c}" for c in run_experiment(ports, aa=aa)]
        for server in (engine, gateway):
            if server.process.poll() is not None:
                wrong.append(f"{server.name} ended on the way\n{tail(server.log)}")
    print(f"\nTwo vantage points, {CONCURRENCY} requests at once (~: fewer than 1,000 samples)\n")
    print(vantages.table(rows), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("run", run, limit_s=RUN_S_MAX))
