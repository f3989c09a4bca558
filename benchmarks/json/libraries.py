"""Compare orjson with msgspec on events and documents of llmtap. See README.md."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

ROOT: Final = Path(__file__).resolve().parents[2]
CHAT_EVENT: Final = (
    b'{"id":"chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT","object":"chat.completion.chunk","created":1741569952,'
    b'"model":"gpt-4.1-2025-04-14","service_tier":"default","system_fingerprint":"fp_b376dfbbd5","choices":'
    b'[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}'
)
ROUNDS: Final = 15
SECONDS: Final = 0.1


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    index: int = 0
    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """The fields of a chat event that the meter needs; the others are skipped."""

    choices: list[Choice] = []
    model: str | None = None


def time_ns(call: Callable[[], Any]) -> float:
    """Return the CPU time of one call in ns, over about `SECONDS`."""
    calls, began = 0, time.process_time_ns()
    while (used := time.process_time_ns() - began) < SECONDS * 1e9:
        for _ in range(20):
            call()
        calls += 20
    return used / calls


def cases() -> dict[str, dict[str, Callable[[], Any]]]:
    summary = Path(sys.argv[1]).read_bytes()
    document = json.loads(summary)
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    typed = msgspec.json.Decoder(Chunk).decode
    size = f"{len(summary) / 1e3:.0f} kB"
    return {
        f"chat event ({len(CHAT_EVENT)} bytes) to a dict": {
            "msgspec": lambda: decode(CHAT_EVENT),
            "orjson": lambda: orjson.loads(CHAT_EVENT),
        },
        "chat event, the needed fields": {
            "msgspec": lambda: typed(CHAT_EVENT),
            "orjson": lambda: orjson.loads(CHAT_EVENT),
        },
        f"answer of the admin API ({size}), encoded": {
            "msgspec": lambda: encode(document),
            "orjson": lambda: orjson.dumps(document),
        },
        f"the same ({size}), decoded": {
            "msgspec": lambda: decode(summary),
            "orjson": lambda: orjson.loads(summary),
        },
    }


def main() -> None:
    print(f"msgspec {msgspec.__version__}, orjson {orjson.__version__}, Python {sys.version.split()[0]}\n")
    print("| | msgspec | orjson | msgspec / orjson |\n|---|---:|---:|---:|")
    for name, calls in cases().items():
        times: dict[str, list[float]] = {library: [] for library in calls}
        for _ in range(ROUNDS):
            for library, call in calls.items():
                times[library].append(time_ns(call))
        ours, theirs = (statistics.median(times[library]) / 1e3 for library in ("msgspec", "orjson"))
        ratio = statistics.median(a / b for a, b in zip(times["msgspec"], times["orjson"], strict=True))
        print(f"| {name} | {ours:,.2f} us | {theirs:,.2f} us | {ratio:.2f} |")


if __name__ == "__main__":
    main()
