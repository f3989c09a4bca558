"""LiteLLM as a client library, as its documentation has it used, asking what a plan says.

    python litellm_client.py BASE_URL PLAN RECORDS

The plan is made by `client_plan.py`; what a record holds is told in `openai_client.py`. An ask's `provider`
is the word before the slash of LiteLLM's model names, and decides which API of the server is spoken.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import litellm
from openai_client import TIMEOUT_S, Record, told

BARE = ("anthropic", "ollama_chat")
"""Providers whose address has no /v1: LiteLLM adds the whole path."""
MODELS = {"openai/sim": {"litellm_provider": "openai", "mode": "chat", "supports_native_streaming": True}}
"""What LiteLLM has to be told of the model: it fakes the stream of Responses of one that it does not know."""


def arguments_of(base_url: str, ask: dict[str, Any]) -> dict[str, Any]:
    provider = ask.get("provider", "openai")
    return {
        "model": f"{provider}/{ask['model']}",
        "api_base": base_url if provider in BARE else f"{base_url}/v1",
        "api_key": "none",
        "timeout": TIMEOUT_S,
        "extra_headers": {"X-Request-Id": ask["id"], **ask.get("headers", {})},
        "num_retries": ask.get("retries", 0),
        "max_retries": ask.get("retries", 0),
        "stream": ask["stream"],
        **{name: ask[name] for name in ("seed", "n", "stop", "max_tokens") if name in ask},
        **({"stream_options": {"include_usage": True}} if ask.get("usage") and ask["stream"] else {}),
    }


def read(record: Record, answer: Any, *, asked: bool) -> None:
    """A chunk, or the whole answer, of chat or of completions."""
    # Unasked, LiteLLM puts counts of its own making, or zeros, on the last chunk.
    if asked and (usage := getattr(answer, "usage", None)):
        record.usage = [usage.prompt_tokens, usage.completion_tokens]
    for choice in answer.choices:
        said = getattr(choice, "delta", None) or getattr(choice, "message", None)
        record.hear(choice.index, said.content if said else choice.text)
        record.finish[choice.index] = choice.finish_reason or record.finish.get(choice.index)


def read_response(record: Record, response: Any, *, whole: bool) -> None:
    reason = response.incomplete_details
    record.finish[0] = reason.reason if reason else response.status
    record.usage = [response.usage.input_tokens, response.usage.output_tokens]
    if whole:
        record.hear(0, "".join(part.text for item in response.output for part in item.content))


def call(base_url: str, ask: dict[str, Any], record: Record) -> None:
    arguments = arguments_of(base_url, ask)
    match ask["call"]:
        case "chat":
            messages = [{"role": "user", "content": ask["prompt"]}]
            answer = litellm.completion(messages=messages, **arguments)
        case "completions":
            answer = litellm.text_completion(prompt=ask["prompt"], **arguments)
        case "responses":
            answer = litellm.responses(input=ask["prompt"], **arguments)
            for event in answer if ask["stream"] else ():
                if event.type == "response.output_text.delta":
                    record.hear(0, event.delta)
                elif event.type == "response.completed":
                    read_response(record, event.response, whole=False)
            if not ask["stream"]:
                read_response(record, answer, whole=True)
            return
        case other:
            raise ValueError(f"there is no call {other}")
    for part in answer if ask["stream"] else [answer]:
        read(record, part, asked=ask.get("usage") or not ask["stream"])


def main() -> None:
    base_url, plan_file, records_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    litellm.register_model(MODELS)
    records = []
    for ask in json.loads(plan_file.read_text()):
        record = Record(ask)
        try:
            call(base_url, ask, record)
        except Exception as error:
            record.error = told(error)
        record.end_ns = time.monotonic_ns()
        records.append(record.as_json())
    records_file.write_text(json.dumps({"version": version("litellm"), "records": records}))


if __name__ == "__main__":
    main()
