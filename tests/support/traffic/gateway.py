"""A gateway in virtual time between two vantages: what both observe of it is known to the nanosecond.

`Crossing` plays one request through the gateway. The bytes pass real observers with given timestamps, and
prompts and texts are hashed as the recorder of a capture hashes them.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from llmtap.capture.privacy.sessions import BlockHasher
from llmtap.capture.privacy.text_blocks import text_block_hashes
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.prompt import read_prompt
from llmtap.protocol.http1 import RequestHead

MS: Final = 1_000_000
US: Final = 1_000
KEY: Final = b"k" * 32
WALL_NS: Final = 1_700_000_000_000_000_000
SEND_NS: Final = 20 * US
"""A relay takes so long to write what it has read."""
_HASHER: Final = BlockHasher(KEY, block_size=16, unit="bytes")
_OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
_DONE: Final = b"data: [DONE]\n\n"


def _sse(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    value = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}
    return b"data: %b\n\n" % json.dumps(value).encode()


def content(text: str) -> bytes:
    return _sse({"content": text})


def usage(tokens: int) -> bytes:
    counts = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return _sse({}, "stop", usage=counts)


def _hash_prompt(x: Exchange, head: RequestHead, body: bytes) -> bool:
    prompt = read_prompt(body, x.endpoint)
    if prompt is not None:
        x.shape = prompt.shape
        blocks = _HASHER.blocks(prompt)
        assert blocks is not None
        x.shape.blocks, x.shape.block_size, x.shape.block_unit = blocks.ids, _HASHER.block_size, _HASHER.unit
    return True


def observed(
    relay: str,
    seq: int,
    arrival_ns: int,
    prompt: str,
    reads: Sequence[tuple[int, bytes]],
    end_ns: int,
    *,
    model: str = "m",
    fields: Sequence[str] = (),
    status: int = 200,
    outcome: str = "complete",
    uncertainty_ns: int = 0,
    clock_ns: int = 0,
) -> Exchange:
    """The exchange of a streamed answer; `reads`: time and bytes. The vantage's clock is `clock_ns` ahead."""
    at: Callable[[int], int] = lambda ns: ns + clock_ns  # noqa: E731
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": model, "stream": True, "messages": messages}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: g", f"Content-Length: {len(body)}", *fields]
    head = "\r\n".join([*lines, "", ""]).encode()
    observer = Observer(relay, seq, at(arrival_ns), WALL_NS + at(arrival_ns), head, on_request=_hash_prompt)
    observer.request_data(body, at(arrival_ns))
    observer.request_end(at(arrival_ns))
    observer.on_submit(at(arrival_ns + SEND_NS), SEND_NS)
    answer = _OK if status == 200 else b"HTTP/1.1 %d Failed\r\nContent-Length: 0\r\n\r\n" % status
    observer.response_head(answer, at(reads[0][0] if reads else end_ns), 1)
    for t_ns, data in reads:
        observer.response_data(data, at(t_ns), 0)
    if outcome != "client_cancelled":
        observer.response_end(at(end_ns))
    x = observer.finish(at(end_ns), outcome, status, None, 0, uncertainty_ns, len(body), 1)
    x.text_blocks = text_block_hashes((x.text and x.text.response_text) or "", KEY)
    x.text = None
    return x


def words(n: int, start: int = 0) -> list[str]:
    """Tokens of different lengths."""
    return [f"w{start + i}{'.' * ((start + i) % 5)} " for i in range(n)]


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt of the gateway that fails, after some tokens or with a status."""

    model: str = "m"
    tokens: int = 0
    status: int = 503
    lasts_ns: int = 30 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One request, the engine that answers it, and what the gateway does."""

    prompt: str = "hi"
    at_ns: int = 1_000 * MS
    tokens: Sequence[str] = field(default_factory=lambda: words(12))
    engine_ttft_ns: int = 50 * MS
    engine_gap_ns: int = 10 * MS
    request_ns: int = 8 * MS
    """From the last byte of the request to the first byte of the gateway's own."""
    first_ns: int = 5 * MS
    """Delay of the first event on the way back; `delay_ns`: that of the others."""
    delay_ns: int = 400 * US
    group: int = 1
    """Tokens that the gateway collects for an event."""
    spread_ns: int | None = None
    """Time between the events of one token that the gateway sends instead of an event with all of them."""
    failed: Sequence[Failed] = ()
    side_prompt: str = ""
    """Prompt of a guardrail, which the gateway asks first, for 15 ms."""
    deliver: Callable[[Sequence[str]], Sequence[str]] = lambda tokens: tokens
    """The tokens that the client gets instead."""
    front_fields: Sequence[str] = ()
    back_fields: Sequence[str] = ()
    uncertainty_ns: int = 0
    back_clock_ns: int = 0
    front_outcome: str = "complete"

    def play(self, seq: int) -> tuple[Exchange, list[Exchange]]:
        """What the front and the back observe."""
        backs: list[Exchange] = []
        common = {"uncertainty_ns": self.uncertainty_ns}
        back = {**common, "clock_ns": self.back_clock_ns, "fields": self.back_fields}
        now_ns = self.at_ns + SEND_NS + self.request_ns

        def name() -> int:
            return 100 * seq + len(backs)

        if self.side_prompt:
            reads = [(now_ns + 15 * MS, content("safe") + usage(1) + _DONE)]
            backs.append(observed("back", name(), now_ns, self.side_prompt, reads, reads[0][0], **back))
            now_ns += 15 * MS
        for one in self.failed:
            end_ns = now_ns + one.lasts_ns
            reads = [(now_ns + (i + 1) * MS, content(f"lost{i} ")) for i in range(one.tokens)]
            outcome = "upstream_reset" if one.tokens else "complete"
            status = 200 if one.tokens else one.status
            backs.append(
                observed(
                    "back",
                    name(),
                    now_ns,
                    self.prompt,
                    reads,
                    end_ns,
                    model=one.model,
                    status=status,
                    outcome=outcome,
                    **back,
                )
            )
            now_ns = end_ns
        first_ns = now_ns + SEND_NS + self.engine_ttft_ns
        times = [first_ns + i * self.engine_gap_ns for i in range(len(self.tokens))]
        reads = [(t_ns, content(token)) for t_ns, token in zip(times, self.tokens, strict=True)]
        last_ns = (times or [first_ns])[-1] + MS
        reads.append((last_ns, usage(len(self.tokens)) + _DONE))
        backs.append(observed("back", name(), now_ns, self.prompt, reads, last_ns, **back))
        front = observed(
            "front",
            seq,
            self.at_ns,
            self.prompt,
            *self._delivery(times, last_ns),
            fields=self.front_fields,
            outcome=self.front_outcome,
            **common,
        )
        return front, backs

    def _delivery(self, times: Sequence[int], last_ns: int) -> tuple[list[tuple[int, bytes]], int]:
        delivered = list(self.deliver(self.tokens))
        reads = []
        for start in range(0, len(delivered), self.group):
            event = delivered[start : start + self.group]
            ready_ns = times[min(start + len(event), len(times)) - 1]
            t_ns = ready_ns + (self.delay_ns if start else self.first_ns)
            t_ns = max(t_ns, reads[-1][0] if reads else 0)
            if self.spread_ns is None:
                event = ["".join(event)]
            reads += [(t_ns + i * (self.spread_ns or 0), content(text)) for i, text in enumerate(event)]
        end_ns = max(last_ns, reads[-1][0] if reads else 0) + self.delay_ns
        if self.front_outcome != "client_cancelled":
            reads.append((end_ns, usage(len(delivered)) + _DONE))
        return reads, end_ns

    def with_(self, **changes: Any) -> "Crossing":
        return replace(self, **changes)


def played(*crossings: Crossing) -> tuple[list[Exchange], list[Exchange], dict[str, str]]:
    """Both sides of all crossings, and the id of the front by that of the back."""
    fronts, backs, truth = [], [], {}
    for seq, crossing in enumerate(crossings, 1):
        front, own = crossing.play(seq)
        fronts.append(front)
        backs += own
        truth |= {back.id: front.id for back in own}
    return fronts, backs, truth


def traffic(n: int, seed: int, *, faults: bool = False) -> Sequence[Crossing]:
    """`n` requests of which 200 at most are under way; a fifth have the prompt of another one. `faults`: 1 %
    are tried again, and 2 % of the texts are changed."""
    rng = random.Random(seed)
    crossings = []
    for i in range(n):
        prompt = f"common question {rng.randrange(5)}" if i % 5 == 0 else f"question {i} {rng.random()}"
        begin = rng.randrange(5) * 1_000  # answers to equal prompts often begin alike
        tokens = [*words(rng.randrange(8), begin), *words(rng.randrange(20, 60), 10_000 + 100 * i)]
        failed = [Failed()] if faults and rng.random() < 0.01 else []
        changed = faults and rng.random() < 0.02
        crossings.append(
            Crossing(
                failed=failed,
                deliver=_change if changed else _keep,
                prompt=prompt,
                tokens=tokens,
                at_ns=1_000 * MS + i * 3 * MS,
                request_ns=rng.randrange(20 * MS),
                group=rng.choice((1, 1, 3)),
            )
        )
    return crossings


def _keep(tokens: Sequence[str]) -> Sequence[str]:
    return tokens


def _change(tokens: Sequence[str]) -> Sequence[str]:
    return [*tokens[:12], "[redacted] ", *tokens[13:]]
