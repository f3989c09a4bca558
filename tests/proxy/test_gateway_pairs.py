"""Two proxies with captures around a gateway of our own, which notes its own times."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import llmtap
from llmtap.pairing.alignment import TextRelation
from llmtap.pairing.clock import use_monotonic_clock
from llmtap.pairing.figures import MeasuredPair, figures_of
from llmtap.pairing.matching import Evidence, match
from tests.proxy.capturing import chat_body, streams
from tests.support.servers.live_proxy import LiveProxy, live_proxy
from tests.support.servers.peer import chunk, play
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Call, Script, upstream

pytestmark = pytest.mark.realtime

CHAT = "/v1/chat/completions"
KEY = "capture.pair_key=0123456789abcdef"
TOKENS, GROUP, N = 24, 4, 20
REQUEST_S, DELAY_S, REFUSAL_S = 0.02, 0.005, 0.03
FAILS_EVERY = 5
"""One request in so many is refused at first, and tried again."""


@dataclass(slots=True)
class Passage:
    """Times of one request in the gateway, monotonic ns."""

    read_ns: int = 0
    sent_ns: int = 0
    """Begin of the first attempt."""
    answered_ns: int | None = None
    """Arrival of the head of the second attempt's response; None if the first one succeeded."""
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """Of each token: when the gateway had it, and when it wrote it."""


def failing_engine() -> Script:
    """Refuses requests that say so in their head after REFUSAL_S, and streams tokens otherwise."""
    answer = streams(TOKENS, 0.01)

    async def script(call: Call) -> str | None:
        if call.head.get("x-fail") is None:
            return await answer(call)
        await call.body()
        await asyncio.sleep(REFUSAL_S)
        await call.say(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        return None

    return script


def gateway(port: int, passages: list[Passage]) -> Script:
    """Waits before it forwards a request, tries it again, and sends GROUP tokens at a time, later."""

    async def script(call: Call) -> str | None:
        passage = Passage()
        body = await call.body()
        passage.read_ns = time.monotonic_ns()
        passages.append(passage)
        await asyncio.sleep(REQUEST_S)
        client = await RawClient.connect(port)
        fails = len(passages) % FAILS_EVERY == 0
        passage.sent_ns = time.monotonic_ns()
        if fails:
            await client.post(CHAT, body, "X-Fail: 1")
        await client.send(request("POST", CHAT, body=body))
        head = await client.head()
        if fails:
            passage.answered_ns = time.monotonic_ns()
        await call.say(head.raw)
        waiting: list[tuple[int, bytes]] = []
        while data := await client.chunk():
            waiting.append((time.monotonic_ns(), data))
            if len(waiting) == GROUP or not data.count(b'"content"'):
                await asyncio.sleep(DELAY_S)
                now_ns = time.monotonic_ns()
                passage.tokens += [(had_ns, now_ns) for had_ns, one in waiting if b'"content"' in one]
                await call.say(chunk(b"".join(one for _, one in waiting)))
                waiting.clear()
        await call.say(b"0\r\n\r\n")
        client.close()
        return None

    return script


async def run(folder: Path) -> list[Passage]:
    passages: list[Passage] = []
    async with upstream() as engine, upstream() as between:
        engine.at(CHAT, failing_engine())
        async with live_proxy(engine.url, KEY, f"capture.to={folder / 'back'}") as back:
            between.at(CHAT, gateway(back.listen, passages))
            async with live_proxy(between.url, KEY, f"capture.to={folder / 'front'}") as front:
                for i in range(N):
                    await ask(front, f"question {i % 16}")
                await front.measured(N)
                await back.measured(N + N // FAILS_EVERY)
    return passages


async def ask(front: LiveProxy, prompt: str) -> None:
    client = await RawClient.connect(front.listen)
    answer = await client.post(CHAT, chat_body(prompt))
    assert answer.status == 200 and answer.whole
    client.close()


def test_figures_agree_with_the_gateways_own_times(tmp_path: Path) -> None:
    passages = play(run(tmp_path))
    fronts, backs = (list(llmtap.read(tmp_path / side).exchanges()) for side in ("front", "back"))
    assert use_monotonic_clock(fronts, backs)
    matching = match(fronts, backs)
    assert len(matching.pairs) == N
    assert not matching.ambiguous_back and not matching.unpaired_back
    assert {one.evidence[0] for pair in matching.pairs for one in pair.matches} == {Evidence.PROMPT}
    matching.pairs.sort(key=lambda pair: pair.front.timeline.arrival_ns)
    for pair, passage in zip(matching.pairs, passages, strict=True):
        check(figures_of(pair), passage)


def check(figures: MeasuredPair, passage: Passage) -> None:
    """The gateway's own times lie within those of the two sides, which also contain the network."""
    assert figures.text is TextRelation.EQUAL
    (asked,) = figures.values["request"]
    assert asked.high >= passage.sent_ns - passage.read_ns >= REQUEST_S * 1e9
    delays_ns, (_, above_ns) = figures.token_delays_ns, figures.token_range_ns
    assert delays_ns is not None and len(delays_ns) == len(passage.tokens) == TOKENS
    for delay_ns, (had_ns, wrote_ns) in zip(delays_ns.tolist(), passage.tokens, strict=True):
        assert delay_ns + above_ns >= wrote_ns - had_ns
    (held,) = figures.values["tokens_held"]
    assert held.value >= GROUP
    (per_event,) = figures.values["tokens_per_event_back"]
    assert per_event.value == 1
    assert ("retries" in figures.values) == (passage.answered_ns is not None)
    if passage.answered_ns is not None:
        (lost,) = figures.values["retries"]
        assert lost.high >= REFUSAL_S * 1e9
        assert lost.low <= passage.answered_ns - passage.sent_ns
