"""The `openai` Python client, as its documentation has it used, asking what a plan says.

Reads a plan (JSON: a list of asks, as `client_plan.py` makes them) and writes what happened (JSON: the
client's version, and a record for each ask). Runs in the gateway's environment, in a process of its own.

A record repeats the ask's `id` and has

    texts, refusals   by choice, what was said
    finish            by choice, how it ended, None where nothing said so
    usage             `[input tokens, output tokens]`, None where none came
    arrivals_ns       by choice, when each piece of text was handed over
    start_ns, end_ns  just before the call, and after its end
    error             `[class, status, message]` of what was raised, None if nothing was
    misshapen         what the client's own types, validated strictly, say of an object; None if nothing

Times are ns of the monotonic clock, which the server's truth is in as well.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import pydantic

TIMEOUT_S = 60


class Record:
    """What happened with one ask."""

    def __init__(self, ask: dict[str, Any]) -> None:
        self.id = ask["id"]
        self.texts: dict[int, str] = defaultdict(str)
        self.refusals: dict[int, str] = defaultdict(str)
        self.finish: dict[int, str | None] = {}
        self.arrivals_ns: dict[int, list[int]] = defaultdict(list)
        self.usage: list[int] | None = None
        self.error: list[Any] | None = None
        self.things: list[Any] = []
        self.start_ns = time.monotonic_ns()
        self.end_ns = 0

    def look_at(self, thing: Any) -> None:
        """Keep an object to be validated when nothing is measured any more."""
        self.things.append(thing)

    def misshapen(self) -> str | None:
        """Validated strictly: the client itself takes what comes, complete or not."""
        for thing in self.things:
            try:
                type(thing).model_validate(thing.to_dict(mode="python"))
            except pydantic.ValidationError as error:
                return f"{type(thing).__name__}: {error}"
        return None

    def hear(self, choice: int, text: str | None, refusal: str | None = None) -> None:
        if text or refusal:
            self.arrivals_ns[choice].append(time.monotonic_ns())
            self.texts[choice] += text or ""
            self.refusals[choice] += refusal or ""

    def as_json(self) -> dict[str, Any]:
        count = max((*self.finish, *self.arrivals_ns, 0)) + 1
        return {
            "id": self.id,
            "texts": [self.texts[i] for i in range(count)],
            "refusals": [self.refusals[i] for i in range(count)],
            "finish": [self.finish.get(i) for i in range(count)],
            "arrivals_ns": [self.arrivals_ns[i] for i in range(count)],
            "usage": self.usage,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "error": self.error,
            "misshapen": self.misshapen(),
        }


def arguments_of(ask: dict[str, Any]) -> dict[str, Any]:
    """What the call is made with, in the terms of its API."""
    limit = "max_output_tokens" if ask["call"].startswith("responses") else "max_tokens"
    arguments = {
        "model": ask["model"],
        "extra_headers": {"X-Request-Id": ask["id"], **ask.get("headers", {})},
        **{name: ask[name] for name in ("seed", "n", "stop") if name in ask},
    }
    if "max_tokens" in ask:
        arguments[limit] = ask["max_tokens"]
    if ask["call"].startswith("chat"):
        arguments["messages"] = [{"role": "user", "content": ask["prompt"]}]
    elif ask["call"].startswith("responses"):
        arguments["input"] = ask["prompt"]
    else:
        arguments["prompt"] = ask["prompt"]
    if ask.get("usage"):
        arguments["stream_options"] = {"include_usage": True}
    return arguments


def read_chunk(record: Record, chunk: Any) -> None:
    """A chunk of chat or of completions."""
    if chunk.object != "text_completion":  # whose type has no streams: there it wants a finish reason
        record.look_at(chunk)
    if chunk.usage is not None:
        record.usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]
    for choice in chunk.choices:
        if hasattr(choice, "delta"):
            record.hear(choice.index, choice.delta.content, choice.delta.refusal)
        else:
            record.hear(choice.index, choice.text)
        record.finish[choice.index] = choice.finish_reason or record.finish.get(choice.index)


def read_event(record: Record, event: Any) -> None:
    """An event of Responses."""
    match event.type:
        case "response.output_text.delta":
            record.hear(0, event.delta)
        case "response.refusal.delta":
            record.hear(0, None, event.delta)
        case "response.completed" | "response.incomplete":
            read_response(record, event.response, told_before=True)


def read_response(record: Record, response: Any, *, told_before: bool = False) -> None:
    """A whole answer of Responses; `told_before`: its text came by events."""
    record.look_at(response)
    record.finish[0] = response.incomplete_details.reason if response.incomplete_details else response.status
    record.usage = [response.usage.input_tokens, response.usage.output_tokens]
    if told_before:
        assert response.output_text == record.texts[0], "the answer at the end is not what the events said"
    else:
        parts = [part for item in response.output for part in item.content]
        record.hear(0, response.output_text, "".join(getattr(part, "refusal", "") for part in parts))


def read_completion(record: Record, completion: Any) -> None:
    """A whole answer of chat or of completions."""
    record.look_at(completion)
    record.usage = [completion.usage.prompt_tokens, completion.usage.completion_tokens]
    for choice in completion.choices:
        record.finish[choice.index] = choice.finish_reason
        if hasattr(choice, "message"):
            record.hear(choice.index, choice.message.content, choice.message.refusal)
        else:
            record.hear(choice.index, choice.text)


def call(client: openai.OpenAI, ask: dict[str, Any], record: Record) -> None:
    """One ask, with the plain client."""
    arguments = arguments_of(ask)
    match ask["call"], ask["stream"]:
        case "chat", False:
            read_completion(record, client.chat.completions.create(**arguments))
        case "chat", True:
            for chunk in client.chat.completions.create(**arguments, stream=True):
                read_chunk(record, chunk)
        case "chat.helper", _:
            with client.chat.completions.stream(**arguments) as stream:
                for event in stream:
                    if event.type == "chunk":
                        read_chunk(record, event.chunk)
                whole = stream.get_final_completion()
            said = [choice.message.content for choice in whole.choices]
            assert said == list(record.texts.values()), "the helper's answer is not what its chunks said"
        case "completions", False:
            read_completion(record, client.completions.create(**arguments))
        case "completions", True:
            for chunk in client.completions.create(**arguments, stream=True):
                read_chunk(record, chunk)
        case "responses", False:
            read_response(record, client.responses.create(**arguments))
        case "responses", True:
            for event in client.responses.create(**arguments, stream=True):
                record.look_at(event)
                read_event(record, event)
        case "responses.helper", _:
            with client.responses.stream(**arguments) as events:
                for event in events:
                    read_event(record, event)
                assert events.get_final_response().output_text == record.texts[0]
        case "models", _:
            models = client.models.list(extra_headers=arguments["extra_headers"])
            record.look_at(models)
            record.texts[0] = " ".join(model.id for model in models)
        case other:
            raise ValueError(f"there is no call {other}")


def told(error: Exception) -> list[Any]:
    """An exception as a record has it, under the package whose it is."""
    kind = type(error)
    status = getattr(error, "status_code", None)
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}", status, str(error)]


def ask_one(client: openai.OpenAI, ask: dict[str, Any]) -> dict[str, Any]:
    record = Record(ask)
    try:
        call(client.with_options(max_retries=ask.get("retries", 0)), ask, record)
    except Exception as error:
        record.error = told(error)
    record.end_ns = time.monotonic_ns()
    return record.as_json()


async def ask_at_once(client: openai.AsyncOpenAI, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Streams of chat, all at once, with the asynchronous client."""

    async def one(ask: dict[str, Any]) -> Record:
        record = Record(ask)
        try:
            async for chunk in await client.chat.completions.create(**arguments_of(ask), stream=True):
                read_chunk(record, chunk)
        except Exception as error:
            record.error = told(error)
        record.end_ns = time.monotonic_ns()
        return record

    async with client:
        records = await asyncio.gather(*map(one, asks))
    return [record.as_json() for record in records]


def main() -> None:
    base_url, plan_file, records_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    plan = json.loads(plan_file.read_text())
    how = {"base_url": f"{base_url}/v1", "api_key": "none", "timeout": TIMEOUT_S}
    with openai.OpenAI(**how) as client:
        records = [ask_one(client, ask) for ask in plan if not ask.get("at_once")]
    at_once = [ask for ask in plan if ask.get("at_once")]
    records += asyncio.run(ask_at_once(openai.AsyncOpenAI(max_retries=0, **how), at_once))
    records_file.write_text(json.dumps({"version": openai.__version__, "records": records}))


if __name__ == "__main__":
    main()
