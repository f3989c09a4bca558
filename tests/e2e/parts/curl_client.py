"""`curl` as a client: what it prints is read as it comes, and its exit code is the exception.

Each API's answers are read here in a few lines of our own, so that neither llmtap's reader nor any client's
stands between the wire and the check. What a record holds is told in `openai_client.py`; `misshapen` is
what is wrong with the framing and the end of an answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama.chat": "/api/chat",
    "ollama.generate": "/api/generate",
    "models": "/v1/models",
}


def curl_version() -> str:
    """Its version; raises FileNotFoundError where there is none."""
    return subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def body_of(ask: dict[str, Any]) -> dict[str, Any]:
    """The request in the terms of its API."""
    call, body = ask["call"], {"model": ask["model"], "stream": ask["stream"]}
    limits = {name: ask[name] for name in ("seed", "max_tokens") if name in ask}
    match call:
        case "chat" | "messages" | "ollama.chat":
            body["messages"] = [{"role": "user", "content": ask["prompt"]}]
        case "responses":
            body["input"] = ask["prompt"]
        case _:
            body["prompt"] = ask["prompt"]
    body |= {"options": limits} if call.startswith("ollama") else limits
    if ask.get("usage") and ask["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


# ---------------------------------------------------------------- what answers say


def read_openai(record: dict[str, Any], answer: dict[str, Any]) -> str | None:
    if usage := answer.get("usage"):
        record["usage"] = [usage["prompt_tokens"], usage["completion_tokens"]]
    if not answer["choices"]:
        return None
    choice = answer["choices"][0]
    record["finish"][0] = choice["finish_reason"] or record["finish"][0]
    said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    return said.get("content")


def read_responses(record: dict[str, Any], answer: dict[str, Any]) -> str | None:
    if answer.get("type") == "response.output_text.delta":
        return answer["delta"]
    whole = answer.get("response", answer)
    if whole.get("usage"):
        record["usage"] = [whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]]
        record["finish"][0] = whole["status"]
        return None if whole is not answer else whole["output"][0]["content"][0]["text"]
    return None


def read_messages(record: dict[str, Any], answer: dict[str, Any]) -> str | None:
    match answer["type"]:
        case "message_start":
            record["usage"] = [answer["message"]["usage"]["input_tokens"], 0]
        case "content_block_delta":
            return answer["delta"]["text"]
        case "message_delta":
            record["usage"][1] = answer["usage"]["output_tokens"]
            record["finish"][0] = answer["delta"]["stop_reason"]
        case "message":
            record["usage"] = [answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]]
            record["finish"][0] = answer["stop_reason"]
            return answer["content"][0]["text"]
    return None


def read_ollama(record: dict[str, Any], answer: dict[str, Any]) -> str | None:
    if answer["done"]:
        record["usage"] = [answer["prompt_eval_count"], answer["eval_count"]]
        record["finish"][0] = answer["done_reason"]
    return answer["message"]["content"] if "message" in answer else answer["response"]


def read_models(record: dict[str, Any], answer: dict[str, Any]) -> str | None:
    record["texts"] = [" ".join(model["id"] for model in answer["data"])]
    return None


READERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str | None]] = {
    "chat": read_openai,
    "completions": read_openai,
    "responses": read_responses,
    "messages": read_messages,
    "ollama.chat": read_ollama,
    "ollama.generate": read_ollama,
    "models": read_models,
}


# ---------------------------------------------------------------- how they are framed


def dechunked(body: bytes) -> tuple[bytes, str | None]:
    """The content of a chunked body, which has to be whole and to end where it says (RFC 9112 7.1)."""
    content, at = b"", 0
    while True:
        line_end = body.find(b"\r\n", at)
        try:
            size = int(body[at : max(at, line_end)], 16)
        except ValueError:
            return content, f"no size of a chunk at byte {at}"
        at, end = line_end + 2, line_end + 2 + size
        if body[end : end + 2] != b"\r\n":
            return content, f"the chunk of {size} bytes at byte {at} does not end with CRLF"
        if size == 0:
            left = len(body) - end - 2
            return content, f"{left} bytes behind the last chunk" if left else None
        content += body[at:end]
        at = end + 2


def last_words(call: str, body: bytes) -> str | None:
    """What is wrong with the end of a stream, None if nothing is."""
    ends = {
        "chat": b"data: [DONE]\n\n",
        "completions": b"data: [DONE]\n\n",
        "messages": b'data: {"type":"message_stop"}\n\n',
        "responses": b"}\n\n",
    }
    end = ends.get(call, b"}\n")
    return None if body.endswith(end) else f"the stream ends with {body[-40:]!r}, not with {end!r}"


def ask_one(base_url: str, ask: dict[str, Any]) -> dict[str, Any]:
    argv = ["curl", "-sS", "-N", "--fail", "--max-time", str(TIMEOUT_S), "--noproxy", "*"]
    argv += ["-i", "--raw"] if ask.get("raw") else []
    argv += ["--retry", str(ask["retries"])] if ask.get("retries") else []
    for name, value in {"X-Request-Id": ask["id"], **ask.get("headers", {})}.items():
        argv += ["-H", f"{name}: {value}"]
    if ask["call"] != "models":
        argv += ["-H", "Content-Type: application/json", "-d", json.dumps(body_of(ask))]
    record: dict[str, Any] = {
        "id": ask["id"],
        "texts": [""],
        "refusals": [""],
        "finish": [None],
        "arrivals_ns": [[]],
        "usage": None,
        "error": None,
        "misshapen": None,
        "start_ns": time.monotonic_ns(),
    }
    curl = subprocess.Popen(
        [*argv, base_url + PATHS[ask["call"]]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert curl.stdout and curl.stderr
    body = begun = b""
    while read := os.read(curl.stdout.fileno(), 1 << 16):
        now_ns = time.monotonic_ns()
        body += read
        if ask["stream"] and not ask.get("raw"):
            *lines, begun = (begun + read).split(b"\n")
            hear(ask["call"], record, lines, now_ns)
    said = curl.stderr.read().decode(errors="replace").strip()
    curl.wait()
    record["end_ns"] = time.monotonic_ns()
    if curl.returncode:
        record["error"] = [f"exit {curl.returncode}", None, said]
    elif ask.get("raw"):
        head, _, rest = body.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            record["misshapen"] = "the answer is not chunked"
        body, wrong = dechunked(rest)
        hear(ask["call"], record, body.split(b"\n"), record["end_ns"])
        record["misshapen"] = record["misshapen"] or wrong or last_words(ask["call"], body)
    elif ask["stream"]:
        record["misshapen"] = last_words(ask["call"], body)
    else:
        hear(ask["call"], record, [body], record["end_ns"])
    return record


def hear(call: str, record: dict[str, Any], lines: list[bytes], now_ns: int) -> None:
    """Whole lines of a body: events, or JSON."""
    for line in lines:
        data = line.removeprefix(b"data: ")
        if data.startswith(b"{") and (text := READERS[call](record, json.loads(data))):
            record["texts"][0] += text
            record["arrivals_ns"][0].append(now_ns)


def ask_all(base_url: str, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [ask_one(base_url, ask) for ask in plan]
