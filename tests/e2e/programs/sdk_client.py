"""The client's vantage: the package of each vendor reads a stream and stamps each piece of text.

    python sdk_client.py BASE_URL RECORDS

Writes a record of each answer: `id` (as `X-Request-Id`; of a WebSocket session the path), `package`, `text`,
`content_ns` (when each piece of text was handed over, since just before the call), `tokens`, `finish`.
Runs in an environment of its own (`requirements-sdks.txt`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import boto3
import openai
from botocore.config import Config
from google import genai

Said = Iterator[tuple[str, Any]]
"""What a package hands over: `text`, `tokens` or `finish`, and its value."""
PROMPT = "Say something short."
MESSAGES = [{"role": "user", "content": PROMPT}]


def of_response(events: Any) -> Said:
    for event in events:
        if event.type in ("response.output_text.delta", "response.text.delta"):
            yield "text", event.delta
        elif event.type in ("response.completed", "response.done"):
            yield "tokens", event.response.usage.output_tokens
            yield "finish", event.response.status
            return


def openai_responses(base: str, name: str) -> Iterator[Said]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="key", max_retries=0) as client:
        headers = {"X-Request-Id": name}
        yield of_response(
            client.responses.create(model="gpt-6", input=PROMPT, stream=True, extra_headers=headers)
        )


def openai_session(base: str, name: str) -> Iterator[Said]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="key") as client, client.responses.connect() as session:
        for _ in range(2):
            session.response.create(model="gpt-6", input=PROMPT)
            yield of_response(session)


def openai_realtime(base: str, name: str) -> Iterator[Said]:
    with (
        openai.OpenAI(base_url=f"{base}/v1", api_key="key") as client,
        client.realtime.connect(model="gpt-realtime") as session,
    ):
        for _ in range(2):
            session.response.create(response={"output_modalities": ["text"]})
            yield of_response(session)


def of_message(events: Any) -> Said:
    for event in events:
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            yield "text", event.delta.text
        elif event.type == "message_delta":
            yield "tokens", event.usage.output_tokens
            yield "finish", event.delta.stop_reason


def anthropic_messages(base: str, name: str) -> Iterator[Said]:
    with anthropic.Anthropic(base_url=base, api_key="key", max_retries=0) as client:
        headers = {"X-Request-Id": name}
        yield of_message(
            client.messages.create(
                model="claude", max_tokens=50, messages=MESSAGES, stream=True, extra_headers=headers
            )
        )


def google_gemini(base: str, name: str) -> Iterator[Said]:
    options = genai.types.HttpOptions(base_url=base, headers={"X-Request-Id": name})
    client = genai.Client(api_key="key", http_options=options)

    def said() -> Said:
        for chunk in client.models.generate_content_stream(model="gemini-3-flash", contents=PROMPT):
            for part in chunk.candidates[0].content.parts or ():
                if part.text and not part.thought:
                    yield "text", part.text
            yield "tokens", chunk.usage_metadata.candidates_token_count
            reason = chunk.candidates[0].finish_reason
            yield "finish", reason and reason.value

    yield said()


def bedrock(base: str, name: str) -> Any:
    client = boto3.client(
        "bedrock-runtime",
        endpoint_url=base,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}),
    )

    def stamp(params: dict[str, Any], **_: Any) -> None:
        params["headers"]["X-Request-Id"] = name

    client.meta.events.register("before-call.bedrock-runtime", stamp)
    return client


def boto3_converse(base: str, name: str) -> Iterator[Said]:
    messages = [{"role": "user", "content": [{"text": PROMPT}]}]
    answer = bedrock(base, name).converse_stream(modelId="amazon.nova-pro-v2:0", messages=messages)

    def said() -> Said:
        for event in answer["stream"]:  # parsed by the service model: an unknown event has another name
            ((kind, value),) = event.items()
            if kind == "contentBlockDelta" and "text" in value["delta"]:
                yield "text", value["delta"]["text"]
            elif kind == "messageStop":
                yield "finish", value["stopReason"]
            elif kind == "metadata":
                yield "tokens", value["usage"]["outputTokens"]
            elif kind == "SDK_UNKNOWN_MEMBER":
                raise ValueError(f"no event of the service model: {value}")

    yield said()


def boto3_invoke(base: str, name: str) -> Iterator[Said]:
    body = json.dumps({"anthropic_version": "bedrock-2023-05-31", "max_tokens": 50, "messages": MESSAGES})
    answer = bedrock(base, name).invoke_model_with_response_stream(modelId="anthropic.claude", body=body)

    def said() -> Said:
        for event in answer["body"]:
            told = json.loads(event["chunk"]["bytes"])
            if told["type"] == "content_block_delta" and "text" in told["delta"]:
                yield "text", told["delta"]["text"]
            elif told["type"] == "message_delta":
                yield "tokens", told["usage"]["output_tokens"]
                yield "finish", told["delta"]["stop_reason"]

    yield said()


CASES: tuple[tuple[str, Callable[[str, str], Iterator[Said]], str], ...] = (
    ("openai", openai_responses, "openai-responses"),
    ("openai", openai_session, "/v1/responses"),
    ("openai", openai_realtime, "/v1/realtime"),
    ("anthropic", anthropic_messages, "anthropic-messages"),
    ("google-genai", google_gemini, "google-gemini"),
    ("boto3", boto3_converse, "boto3-converse"),
    ("boto3", boto3_invoke, "boto3-invoke"),
)


def main() -> None:
    base, file = sys.argv[1:]
    records = []
    for package, answers, name in CASES:
        start = time.monotonic_ns()
        for said in answers(base, name):
            record: dict[str, Any] = {"id": name, "package": package, "text": "", "content_ns": []}
            for kind, value in said:
                if kind == "text":
                    record["content_ns"].append(time.monotonic_ns() - start)
                    record["text"] += value
                elif value is not None:
                    record[kind] = value
            records.append(record)
            start = time.monotonic_ns()
    Path(file).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
