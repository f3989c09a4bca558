"""What the clients are asked to ask of `llmtap sim serve`, and what has to come of it.

An ask is JSON for a client: what is called, with what, and by which headers the server is told what is to
befall the request. What has to come of it stands under `expected`:

    outcome   as the server's truth has it; None where nothing is generated
    raises    names of exceptions, or exit codes of curl, of which the client raises one; empty: it must not
    attempts  requests that the server gets for it; None: as many as it takes
    tokens    of the answer, by choice; None: as many as the truth says
    pieces    in which each choice comes, when streamed; None: any number
    finish    how each choice ends, in the words of the API; None: nothing says so

Asks with the same prompt and seed get the same text, whatever API and client they come by, or its beginning
where they end early.
"""

from __future__ import annotations

from typing import Any

MODEL = "sim"
PROMPT = "Please tell me of the river, the mill and the wind. ¿Qué? 你好 🙂"
SEED = 7
TOKENS = 32  # of every answer without a limit of its own
LIMIT = 9
FAULT_AFTER = 5  # tokens before a fault in a stream
REFUSAL_TOKENS = 16  # of the sentence by which the server refuses
RETRY_AFTER_S = 1
AT_ONCE = 20
SERVE = [
    "--ttft",
    "60ms",
    "--itl",
    "5ms",
    "--spread",
    "0.3",
    "--tokens",
    str(TOKENS),
    "--set",
    f"faults.fault_after={FAULT_AFTER}",
]
"""What the server is started with."""

Ask = dict[str, Any]

RAISED = {
    "400": ["BadRequestError"],
    "429": ["RateLimitError", "exit 22"],
    "503": ["InternalServerError"],
    "error": ["APIError", "MidStreamFallbackError"],
    "reset": ["ReadError", "TypeError", "MidStreamFallbackError", "exit 56"],
    "truncate": ["RemoteProtocolError", "exit 18"],
    "unfinished": [],
}
"""By status or fault, what the clients call it. httpx and Node's fetch speak for themselves midway."""

FINISH = {"responses": ("completed", "max_output_tokens"), "messages": ("end_turn", "max_tokens")}
"""Where the words for an answer that is through, and for one at its limit, are not chat's."""


def ask(row: str, call: str, *, stream: bool = False, expected: Ask | None = None, **more: Any) -> Ask:
    """One ask in the table's line `row`, with what is expected of most."""
    choices = more.get("n", 1)
    through, limited = FINISH.get(call.partition(".")[0], ("stop", "length"))
    tokens, finish = (more["max_tokens"], limited) if "max_tokens" in more else (TOKENS, through)
    wanted = {
        "outcome": "complete",
        "raises": [],
        "attempts": 1,
        "tokens": [tokens] * choices,
        "pieces": tokens if stream else 1,
        "finish": [finish] * choices,
    }
    return {
        "row": row,
        "call": call,
        "model": MODEL,
        "prompt": PROMPT,
        "stream": stream,
        "expected": wanted | (expected or {}),
        **more,
    }


def both(row: str, call: str, **more: Any) -> list[Ask]:
    """Streamed and whole."""
    return [ask(row, call, stream=stream, **more) for stream in (True, False)]


def models() -> Ask:
    nothing = {"outcome": None, "attempts": 0, "tokens": None, "pieces": None, "finish": None}
    return ask("models", "models", expected=nothing)


def refusals(row: str, calls: list[str]) -> list[Ask]:
    """The four ways of the server to refuse, each streamed and whole."""
    asks = []
    for call in calls:
        said = {"outcome": "refused", "tokens": [REFUSAL_TOKENS]}
        for stream in (True, False):
            pieces = REFUSAL_TOKENS if stream else 1
            asks += [
                ask(
                    row,
                    call,
                    stream=stream,
                    headers={"x-sim-refusal": how},
                    expected=said | {"pieces": pieces},
                )
                for how in ("text", "field")
            ]
            silent = {"outcome": "refused", "tokens": [0], "pieces": 0, "finish": ["content_filter"]}
            asks.append(
                ask(row, call, stream=stream, headers={"x-sim-refusal": "content_filter"}, expected=silent)
            )
            turned = {
                "outcome": "refused",
                "raises": RAISED["400"],
                "tokens": None,
                "pieces": 0,
                "finish": None,
            }
            asks.append(ask(row, call, stream=stream, headers={"x-sim-refusal": "error"}, expected=turned))
    return asks


def turned_away(row: str, status: str, *, retries: int, **more: Any) -> Ask:
    """429 or 503, however often it is tried."""
    expected = {
        "outcome": status,
        "raises": RAISED[status],
        "attempts": retries + 1,
        "tokens": None,
        "pieces": 0,
        "finish": None,
    }
    return ask(row, "chat", headers={"x-sim-fault": status}, retries=retries, expected=expected, **more)


def half_turned_away(row: str, asks: int) -> list[Ask]:
    """429 every other time, drawn anew for each try since there is no seed: the client comes through."""
    return [
        ask(
            row,
            "chat",
            stream=True,
            headers={"x-sim-busy-rate": "0.5"},
            retries=8,
            expected={"attempts": None},
        )
        for _ in range(asks)
    ]


def midway(row: str, fault: str, calls: list[str]) -> list[Ask]:
    """A stream that breaks off after some tokens."""
    broken = {
        "outcome": fault,
        "raises": RAISED[fault],
        "tokens": [FAULT_AFTER],
        "pieces": FAULT_AFTER,
        "finish": [None],
    }
    return [ask(row, call, stream=True, headers={"x-sim-fault": fault}, expected=broken) for call in calls]


def paced(row: str) -> list[Ask]:
    """Several tokens to a piece, comments in between, and all held to the end."""
    return [
        ask(
            row,
            "chat",
            stream=True,
            headers={"x-sim-tokens-per-chunk": "4"},
            expected={"pieces": TOKENS // 4},
        ),
        ask(row, "chat", stream=True, headers={"x-sim-keepalive-ms": "15"}),
        ask(row, "chat", stream=True, headers={"x-sim-output-hold": "all"}),
    ]


def numbered(client: str, asks: list[Ask], *, cold: bool = True) -> list[Ask]:
    """The asks with their ids; if `cold`, before them the first of each kind, which pays for the imports."""
    if cold:
        kinds: dict[Any, Ask] = {}
        for one in asks:
            if one["expected"]["outcome"] == "complete":
                kind = (one["call"], one.get("provider"), one["stream"])
                kinds.setdefault(kind, one | {"row": "the first of each kind, cold"})
        asks = [*kinds.values(), *asks]
    return [{"id": f"{client}-{i}", **one} for i, one in enumerate(asks)]


def of_python() -> list[Ask]:
    """Everything there is."""
    vllm = {"headers": {"x-sim-dialect": "vllm"}}
    return numbered(
        "python",
        [
            *both("chat", "chat"),
            *both("chat, seed", "chat", seed=SEED),
            ask("chat, usage at the end", "chat", stream=True, seed=SEED, usage=True),
            *both("chat, max_tokens", "chat", seed=SEED, max_tokens=LIMIT),
            *both("chat, n = 2", "chat", seed=SEED, n=2),
            *both("chat, stop", "chat", seed=SEED, stop=["."], expected={"tokens": None, "pieces": None}),
            ask("chat, .stream() helper", "chat.helper", stream=True, seed=SEED, usage=True),
            *both("chat, as vLLM", "chat", seed=SEED, **vllm),
            *paced("chat, 4 a piece; comments; held"),
            *both("completions", "completions", seed=SEED),
            *both("completions, as vLLM", "completions", seed=SEED, **vllm),
            *both("Responses", "responses"),
            *both("Responses, max_output_tokens", "responses", max_tokens=LIMIT),
            ask("Responses, .stream() helper", "responses.helper", stream=True),
            models(),
            *refusals("refused in four ways", ["chat", "responses"]),
            turned_away("429, given up", "429", retries=2),
            turned_away("503, given up", "503", retries=1, stream=True),
            *half_turned_away("429 half the time, retried", 4),
            *midway("error midway", "error", ["chat", "completions", "responses"]),
            *midway("reset midway", "reset", ["chat", "completions", "responses"]),
            *midway("cut off within an event", "truncate", ["chat", "completions", "responses"]),
            *midway("ends without a word", "unfinished", ["chat", "completions", "responses"]),
            *at_once(),
        ],
    )


def at_once() -> list[Ask]:
    row = f"chat, {AT_ONCE} streams at once"
    return [ask(row, "chat", stream=True, seed=i, usage=True, at_once=True) for i in range(AT_ONCE)]


def of_node() -> list[Ask]:
    return numbered(
        "node",
        [
            *both("chat", "chat"),
            *both("chat, seed", "chat", seed=SEED),
            ask("chat, usage at the end", "chat", stream=True, seed=SEED, usage=True),
            *both("chat, n = 2", "chat", seed=SEED, n=2),
            ask("chat, .stream() helper", "chat.helper", stream=True, seed=SEED, usage=True),
            *both("completions", "completions", seed=SEED),
            *both("Responses", "responses"),
            ask("Responses, .stream() helper", "responses.helper", stream=True),
            models(),
            turned_away("429, given up", "429", retries=1),
            *midway("error midway", "error", ["chat", "responses"]),
            *midway("reset midway", "reset", ["chat", "responses"]),
            *at_once(),
        ],
    )


def of_curl() -> list[Ask]:
    return numbered(
        "curl",
        cold=False,
        asks=[
            *both("chat", "chat", seed=SEED, usage=True),
            ask("chat, --raw: the chunks of HTTP", "chat", stream=True, seed=SEED, usage=True, raw=True),
            *both("completions", "completions", seed=SEED),
            *both("Responses", "responses"),
            *both("Messages (Anthropic)", "messages", max_tokens=LIMIT),
            *both("/api/chat (Ollama)", "ollama.chat", seed=SEED),
            *both("/api/generate (Ollama)", "ollama.generate", seed=SEED),
            models(),
            turned_away("429, --retry 1", "429", retries=1),
            *midway("reset midway", "reset", ["chat"]),
            *midway("cut off within an event", "truncate", ["chat"]),
        ],
    )


def of_litellm() -> list[Ask]:
    text = {"provider": "text-completion-openai"}
    vllm = {"provider": "hosted_vllm", "headers": {"x-sim-dialect": "vllm"}}
    return numbered(
        "litellm",
        [
            *both("openai/, chat", "chat", provider="openai", seed=SEED, usage=True),
            *both("hosted_vllm/, chat", "chat", seed=SEED, usage=True, **vllm),
            *both("text-completion-openai/", "completions", seed=SEED, usage=True, **text),
            *both("openai/, Responses", "responses", provider="openai"),
            *both("anthropic/, /v1/messages", "chat", provider="anthropic", usage=True),
            *both("ollama_chat/, /api/chat", "chat", provider="ollama_chat", seed=SEED, usage=True),
            turned_away("openai/, 429", "429", retries=0, provider="openai"),
            *midway("openai/, error midway", "error", ["chat"]),
            *midway("openai/, reset midway", "reset", ["chat"]),
        ],
    )
