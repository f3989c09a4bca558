"""The vendors' own packages through the tap: openai, anthropic, google-genai and boto3.

    .venv/bin/python tests/e2e/sdks.py               half a minute, once its environment is made

A local server plays the fixtures of `tests/data/dialects`, and two WebSocket sessions of two responses each.
Each answer is told twice, by the package that read it and by the tap: both must have the same pieces of text,
tokens and finish reason, and the package has each piece after the tap has read it. boto3 parses Bedrock's
messages by the service's own model. Exits 1, naming what is wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from aiohttp import WSMsgType, web
from parts import environments
from parts.script import LLMTAP, PROGRAMS, REPOSITORY, ROOT, carry_out, phase
from parts.servers import get_exchanges, get_json, port_free, proxy_argv, run_to_end
from run import LOGS, OFFLINE, READY_S_MAX, running

RUN_S_MAX = 900  # with the environment made on a slow machine
CLIENT_S_MAX = 200
SETTLE_S_MAX = 60
GAP_S = 0.01
CORPUS = REPOSITORY / "tests/data/dialects"
PLAYED = {
    "/v1/responses": "responses_reasoning_summary",
    "/v1/messages": "anthropic_thinking_tool",
    ":streamGenerateContent": "gemini_native_sse",
    "/converse-stream": "bedrock_converse_stream",
    "/invoke-with-response-stream": "bedrock_invoke_anthropic",
}
"""Fixtures by the end of the path."""
WORDS = ("Slate", " roofs", " gleam", ".")

Json = dict[str, Any]


# ---------------------------------------------------------------- the server


async def play(request: web.Request) -> web.StreamResponse:
    """One fixture, an event at a time."""
    await request.read()
    name = next((name for end, name in PLAYED.items() if request.path.endswith(end)), None)
    if name is None:
        raise web.HTTPNotFound
    doc, body = json.loads((CORPUS / f"{name}.json").read_text()), (CORPUS / f"{name}.sse").read_bytes()
    answer = web.StreamResponse(headers=dict(doc["response"]["headers"]))
    await answer.prepare(request)
    for event in doc["expect"]["events"]:
        await answer.write(body[event["start"] : event["end"]])
        await asyncio.sleep(GAP_S)
    return answer


async def converse(request: web.Request) -> web.StreamResponse:
    """A session: a response for each `response.create`."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        return await play(request)
    realtime = request.path.endswith("/realtime")
    session = web.WebSocketResponse()
    await session.prepare(request)
    responses = 0
    async for message in session:
        if message.type is not WSMsgType.TEXT or json.loads(message.data)["type"] != "response.create":
            continue
        responses += 1
        usage = {"input_tokens": 5, "output_tokens": 6 + responses, "total_tokens": 11 + responses}
        response = {"id": f"resp_{responses}", "object": "response", "model": "gpt-6", "output": []}
        events: list[Json] = [{"type": "response.created", "response": {**response, "status": "in_progress"}}]
        item = {"response_id": response["id"], "item_id": "m", "output_index": 0, "content_index": 0}
        kind = "response.output_text.delta"
        events += [{"type": kind, **item, "delta": word} for word in WORDS]
        end = "response.done" if realtime else "response.completed"
        events.append({"type": end, "response": {**response, "status": "completed", "usage": usage}})
        for number, event in enumerate(events):
            await session.send_json({**event, "event_id": f"e{number}", "sequence_number": number})
            await asyncio.sleep(GAP_S)
    return session


def serve(port: int) -> None:
    app = web.Application()
    app.router.add_get("/health", lambda _: _ok())
    app.router.add_get("/v1/{name}", converse)
    app.router.add_post("/{path:.*}", play)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


async def _ok() -> web.Response:
    return web.Response(text="ok")


# ---------------------------------------------------------------- both accounts


def read_tap(admin: int, wanted: int) -> list[Json]:
    """The tap's exchanges, once there are so many or time is up."""
    base = f"http://127.0.0.1:{admin}/api/v1"
    give_up_at = time.monotonic() + SETTLE_S_MAX
    while True:
        relays = get_json(f"{base}/summary?window=all")["relays"]
        found = get_exchanges(base)
        settled = not any(relay.get("unsettled", 1) for relay in relays.values())
        if (len(found) >= wanted and settled) or time.monotonic() > give_up_at:
            return found
        time.sleep(0.1)


def check(record: Json, x: Json) -> list[str]:
    """What the two accounts of one answer differ in."""
    submit = x["timeline"]["submit"]
    seen_ns = [round((e["t"] - submit) * 1e9) for e in x["events"] if e["class"] == "content"]
    wrong = []
    if len(seen_ns) != len(record["content_ns"]):
        wrong.append(f"{len(record['content_ns'])} pieces of text, {len(seen_ns)} at the tap")
    # Since just before the call, and since the request had left the tap: the latter is never the longer one.
    elif early := [c - t for c, t in zip(record["content_ns"], seen_ns, strict=True) if c < t]:
        wrong.append(f"{len(early)} pieces before the tap had them, by up to {-min(early) / 1e6:.2f} ms")
    told = (x["tokens"]["output"], x["finish_reason"], x["outcome"])
    refused = x["refusal"] is not None
    if told != (record["tokens"], record["finish"], "refused" if refused else "complete"):
        wrong.append(f"the tap says {told}, the package {record['tokens'], record['finish']}")
    if not record["text"]:
        wrong.append("no text came")
    return [f"{record['package']}, {record['id']}: {sentence}" for sentence in wrong]


def compare(records: list[Json], exchanges: list[Json]) -> list[str]:
    left = sorted(exchanges, key=lambda x: x["arrival"])
    wrong = []
    for record in records:
        name = record["id"]
        key = "path" if name.startswith("/") else "request_id"
        x = next((x for x in left if x[key] == name and (key != "path" or "." in x["id"])), None)
        if x is None:
            wrong.append(f"{record['package']}, {name}: the tap has no exchange of it")
            continue
        left.remove(x)
        wrong += check(record, x)
        first, seen = record["content_ns"][0] / 1e6, (x["metrics"]["ttft"] or 0) * 1e3
        print(f"{record['package']:13} {name:20} {first:9.1f} {seen:9.1f} {x['dialect']}", flush=True)
    return wrong + [f"the tap has an exchange that nobody asked for: {x['path']}" for x in left]


def run() -> list[str]:
    """Everything; returns what is wrong."""
    environments.prepare("sdks")
    wrong: list[str] = []
    upstream, listen, admin = port_free(), port_free(), port_free()
    file = ROOT / "sdk-records.json"
    with (
        running("sdk-server", [sys.executable, __file__, str(upstream)], wrong) as server,
        running("tap-sdks", proxy_argv(LLMTAP, upstream, listen, admin), wrong) as tap,
    ):
        server.wait_ready(f"http://127.0.0.1:{upstream}/health", limit_s=READY_S_MAX)
        tap.wait_ready(f"http://127.0.0.1:{admin}/readyz", limit_s=READY_S_MAX)
        with phase("the packages"):
            argv = [str(ROOT / "sdks/bin/python"), str(PROGRAMS / "sdk_client.py")]
            argv += [f"http://127.0.0.1:{listen}", str(file)]
            run_to_end("sdk-client", argv, logs=LOGS, env=OFFLINE, cwd=ROOT, limit_s=CLIENT_S_MAX)
        records = json.loads(file.read_text())
        exchanges = read_tap(admin, len(records))
    print(f"\n{'TTFT in ms':34} {'package':>9} {'tap':>9}", flush=True)
    return wrong + compare(records, exchanges)


if __name__ == "__main__":
    if sys.argv[1:]:  # started by `run`: play the fixtures on this port
        serve(int(sys.argv[1]))
    else:
        sys.exit(carry_out("sdks", run, limit_s=RUN_S_MAX))
