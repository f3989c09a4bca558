"""The client's vantage: chat completions with the `openai` package, every chunk stamped as it is handed over.

Reads a plan (JSON: a list of requests) and writes what happened (JSON: a list of records), in the same order.
Runs in the gateway's environment, in a process of its own, so that nothing else delays its stamps.

A request is `{"id", "kind", "prompt", "max_tokens"}`; its kind is one of

    stream      a streamed answer, read to its end
    usage       the same, with `stream_options.include_usage`
    plain       an answer in one piece
    cancelled   a streamed answer the client leaves after a few chunks
    idle        a streamed answer, asked for after a pause longer than servers keep idle connections

A record repeats `id` and `kind` and adds `text`, `finish_reason`, `usage`, `chunks`, `start_ns` (the
monotonic clock just before the call), `content_ns` (when each chunk with content arrived), `first_ns` (the
first content that is not empty or white space), `end_ns`, and `error`, null if all went well. All times but
`start_ns` are nanoseconds since just before the call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai

CHUNKS_BEFORE_LEAVING = 5


async def streamed(client: openai.AsyncOpenAI, arguments: dict[str, Any], record: dict[str, Any]) -> None:
    """Reads one stream; for the kind `cancelled`, closes it after a few chunks with content."""
    if record["kind"] == "usage":
        arguments = {**arguments, "stream_options": {"include_usage": True}}
    text: list[str] = []
    stamps: list[int] = record["content_ns"]
    start = record["start_ns"] = time.monotonic_ns()
    stream = await client.chat.completions.create(**arguments, stream=True)
    async for chunk in stream:
        now = time.monotonic_ns() - start
        record["chunks"] += 1
        if chunk.usage is not None:
            record["usage"] = chunk.usage.model_dump(include={"prompt_tokens", "completion_tokens"})
        if not chunk.choices:
            continue
        choice = chunk.choices[0]
        record["finish_reason"] = choice.finish_reason or record["finish_reason"]
        if choice.delta.content:
            stamps.append(now)
            text.append(choice.delta.content)
            if record["first_ns"] is None and not choice.delta.content.isspace():
                record["first_ns"] = now
            if record["kind"] == "cancelled" and len(stamps) == CHUNKS_BEFORE_LEAVING:
                await stream.close()
                break
    record["end_ns"] = time.monotonic_ns() - start
    record["text"] = "".join(text)


async def plain(client: openai.AsyncOpenAI, arguments: dict[str, Any], record: dict[str, Any]) -> None:
    """Asks for one answer in one piece."""
    start = record["start_ns"] = time.monotonic_ns()
    completion = await client.chat.completions.create(**arguments)
    record["end_ns"] = time.monotonic_ns() - start
    record["text"] = completion.choices[0].message.content
    record["finish_reason"] = completion.choices[0].finish_reason
    if completion.usage is not None:
        record["usage"] = completion.usage.model_dump(include={"prompt_tokens", "completion_tokens"})


async def ask(client: openai.AsyncOpenAI, model: str, request: dict[str, Any]) -> dict[str, Any]:
    """Makes one request and returns its record."""
    record: dict[str, Any] = {
        "id": request["id"],
        "kind": request["kind"],
        "text": "",
        "finish_reason": None,
        "usage": None,
        "chunks": 0,
        "start_ns": None,
        "content_ns": [],
        "first_ns": None,
        "end_ns": None,
        "error": None,
    }
    arguments = {
        "model": model,
        "messages": [{"role": "user", "content": request["prompt"]}],
        "max_tokens": request["max_tokens"],
        "temperature": 0,
        "extra_headers": {"X-Request-Id": request["id"]},
    }
    try:
        await (plain if request["kind"] == "plain" else streamed)(client, arguments, record)
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
    return record


async def warm_up(options: argparse.Namespace) -> None:
    """One stream straight from the engine, unmeasured: the first costs half a second of imports in `openai`.

    The client that measures is another object, and starts without a connection.
    """
    headers = dict(options.header)
    async with openai.AsyncOpenAI(
        base_url=options.warm_up_url, api_key=options.key, max_retries=0, default_headers=headers
    ) as client:
        request = {"id": f"warm-up-{time.time_ns()}", "kind": "stream", "prompt": "hello", "max_tokens": 2}
        record = await ask(client, options.warm_up_model, request)
        if record["error"]:
            raise SystemExit(f"warm-up at {options.warm_up_url}: {record['error']}")


async def follow(plan: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Makes the plan's requests in order, a few at a time; the idle ones last, each after its pause."""
    await warm_up(options)
    client = openai.AsyncOpenAI(
        base_url=options.base_url,
        api_key=options.key,
        max_retries=0,
        timeout=options.timeout_s,
        default_headers=dict(options.header),
    )
    gate = asyncio.Semaphore(options.concurrency)

    async def gated(request: dict[str, Any]) -> dict[str, Any]:
        async with gate:
            return await ask(client, options.model, request)

    at_once = [r for r in plan if r["kind"] != "idle"]
    records = list(await asyncio.gather(*map(gated, at_once)))
    for request in plan:
        if request["kind"] == "idle":
            await asyncio.sleep(options.idle_s)
            records.append(await ask(client, options.model, request))
    await client.close()
    order = {r["id"]: i for i, r in enumerate(plan)}
    return sorted(records, key=lambda record: order[record["id"]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--warm-up-url", required=True, help="where the first request goes, unmeasured")
    parser.add_argument("--warm-up-model", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--header", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=60)
    parser.add_argument("--idle-s", type=float, default=6)
    options = parser.parse_args()
    records = asyncio.run(follow(json.loads(options.plan.read_text()), options))
    options.records.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
