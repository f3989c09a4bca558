"""Clients that people have, unchanged, on `llmtap sim serve`: is it the server they take it for?

    .venv/bin/python tests/e2e/clients.py           openai (Python, Node), curl, LiteLLM; a minute

Every client asks what `client_plan.py` says, and records what it saw and when. The server's own account of
each token (`/sim/truth`) is what the records are held against, by `client_checks.py`. Exits 1, naming what
is wrong. README.md in this folder explains the table; it is in `.e2e/clients.json` as well.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from typing import Any

from parts import client_checks, client_plan, curl_client, environments
from parts.script import LLMTAP, LOGS, PROGRAMS, ROOT, carry_out, phase
from parts.servers import Failure, get_json, port_free, run_to_end
from run import OFFLINE, running

HOME = ROOT / "clients"
TOKENIZER = HOME / "tokenizer.json"
RUN_S_MAX = 1_500  # with an install of everything on a slow machine
READY_S_MAX = 120
CLIENT_S_MAX = 400  # LiteLLM alone takes 15 s to import here
SETTLE_S_MAX = 60  # from a client's last byte to the last line of the server's account

Json = dict[str, Any]


# ---------------------------------------------------------------- the clients


def run_script(name: str, argv: list[str], base_url: str, plan: list[Json]) -> tuple[str, list[Json]]:
    """A client in a process of its own: its version and its records."""
    plan_file, records_file = HOME / f"{name}-plan.json", HOME / f"{name}-records.json"
    plan_file.write_text(json.dumps(plan))
    records_file.unlink(missing_ok=True)
    argv = [*argv, base_url, str(plan_file), str(records_file)]
    run_to_end(f"client-{name}", argv, logs=LOGS, env=OFFLINE, cwd=HOME, limit_s=CLIENT_S_MAX)
    told = json.loads(records_file.read_text())
    return told["version"], told["records"]


def in_gateway(script: str) -> list[str]:
    return [str(ROOT / "gateway/bin/python"), str(PROGRAMS / script)]


def run_python(base_url: str, plan: list[Json]) -> tuple[str, list[Json]]:
    return run_script("openai-python", in_gateway("openai_client.py"), base_url, plan)


def run_litellm(base_url: str, plan: list[Json]) -> tuple[str, list[Json]]:
    return run_script("litellm", in_gateway("litellm_client.py"), base_url, plan)


def run_curl(base_url: str, plan: list[Json]) -> tuple[str, list[Json]]:
    if shutil.which("curl") is None:
        raise environments.Skip("there is no curl")
    return curl_client.curl_version(), curl_client.ask_all(base_url, plan)


def run_node(base_url: str, plan: list[Json]) -> tuple[str, list[Json]]:
    node, version = environments.prepare_node(HOME / "node", PROGRAMS / "package.json")
    # Node looks for packages beside the script it runs.
    script = shutil.copy(PROGRAMS / "node_client.mjs", HOME / "node")
    client, records = run_script("openai-node", [node, str(script)], base_url, plan)
    return f"{client}, Node {version}", records


CLIENTS = {
    "openai, Python": (run_python, client_plan.of_python),
    "openai, Node": (run_node, client_plan.of_node),
    "curl": (run_curl, client_plan.of_curl),
    "LiteLLM": (run_litellm, client_plan.of_litellm),
}

# ---------------------------------------------------------------- what came of it


def read_truths(port: int, wanted: set[str]) -> dict[str, list[Json]]:
    """The truths by request id, once every wanted one is there or time is up; in the order of their end."""
    give_up_at = time.monotonic() + SETTLE_S_MAX
    found: dict[str, list[Json]] = {}
    since = 0
    while True:
        page = get_json(f"http://127.0.0.1:{port}/sim/truth?since={since}")
        since = page["next"]
        for truth in page["truths"]:
            found.setdefault(truth["id"], []).append(truth)
        if not page["truths"]:
            if wanted <= found.keys() or time.monotonic() > give_up_at:
                return found
            time.sleep(0.1)


def count_tokens(texts: list[str]) -> list[int]:
    """As Hugging Face's `tokenizers` counts with the file that `llmtap sim tokenizer` writes."""
    argv = [*in_gateway("token_counts.py"), str(TOKENIZER)]
    done = subprocess.run(argv, input=json.dumps(texts), capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise Failure(f"the tokens could not be counted: {done.stderr}")
    return json.loads(done.stdout)


def put_together(
    plans: dict[str, list[Json]], records: dict[str, list[Json]], truths: dict[str, list[Json]]
) -> list[client_checks.Seen]:
    """Each ask with its record, its truths and its tokens counted."""
    pairs = []
    for client, plan in plans.items():
        by_id = {record["id"]: record for record in records[client]}
        if missing := [ask["id"] for ask in plan if ask["id"] not in by_id]:
            raise Failure(f"{client} recorded nothing of {', '.join(missing)}")
        pairs += [(client, ask, by_id[ask["id"]]) for ask in plan]
    texts = [text for _, ask, record in pairs for text in (ask["prompt"], *client_checks.said_in(record))]
    counts = iter(count_tokens(texts))
    return [
        client_checks.Seen(
            client,
            ask,
            record,
            truths.get(ask["id"], []),
            next(counts),
            [next(counts) for _ in record["texts"]],
        )
        for client, ask, record in pairs
    ]


def run_all(port: int, told: Json) -> list[str]:
    """All clients, the checks and the table; what is wrong."""
    plans, records, versions, skipped = {}, {}, told["versions"], told["skipped"]
    for client, (ask_all, plan_of) in CLIENTS.items():
        plan = plan_of()
        with phase(f"{client}: {len(plan)} asks"):
            try:
                versions[client], records[client] = ask_all(f"http://127.0.0.1:{port}", plan)
                plans[client] = plan
            except environments.Skip as reason:
                skipped[client] = str(reason)
    asked = {ask["id"] for plan in plans.values() for ask in plan if ask["expected"]["attempts"] != 0}
    rows = client_checks.check(put_together(plans, records, read_truths(port, asked)))
    told["rows"] = [row.as_json() for row in rows]
    print(f"\nClients of `llmtap sim serve {' '.join(client_plan.SERVE)}`; times in ms\n")
    print(client_checks.table(rows, versions), flush=True)
    for client, reason in skipped.items():
        print(f"\n{client}: SKIPPED, {reason}", flush=True)
    return [f"{row.client}: {row.name}: {sentence}" for row in rows for sentence in row.wrong]


def run() -> list[str]:
    """Everything; returns what is wrong."""
    HOME.mkdir(exist_ok=True)
    environments.prepare("gateway")
    subprocess.run([str(LLMTAP), "sim", "tokenizer", str(TOKENIZER)], check=True, timeout=200)
    port = port_free()
    argv = [str(LLMTAP), "sim", "serve", "--listen", f"127.0.0.1:{port}", *client_plan.SERVE]
    wrong: list[str] = []
    told: Json = {"versions": {}, "skipped": {}, "rows": [], "wrong": wrong}
    with running("sim-clients", argv, wrong) as sim:
        sim.wait_ready(f"http://127.0.0.1:{port}/health", limit_s=READY_S_MAX)
        wrong += run_all(port, told)
    (ROOT / "clients.json").write_text(json.dumps(told, indent=1))
    return wrong


if __name__ == "__main__":
    sys.exit(carry_out("clients", run, limit_s=RUN_S_MAX))
