"""Every recorded dialect through a real `llmtap proxy`, with its own cuts and timings, read back
from the API.

What an exchange of a recording holds is compared in tests/protocol; here are its bytes, events and times.
Invariant: what the API says of an exchange is what the recording says, and every time lies within the system
call that sent the bytes in question, give or take the uncertainty the exchange itself reports.
"""

import asyncio
import json
import statistics
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from llmtap.clock import SystemClock, WallAnchor
from tests.support.servers.live_proxy import READY_S, live_proxy
from tests.support.servers.peer import play
from tests.support.servers.raw_client import RawClient, request
from tests.support.traffic.corpus import NAMES, Played, Player, Recorded

AT_ONCE = 16
"""Recordings at a time, longest first."""
CLOCKS_NS = 300_000
"""Two processes map wall to monotonic time on their own, and the API rounds the date to a microsecond."""
BUSY_NS = 10_000_000
"""A stall this long says that there is more to do than CPUs."""


TOGETHER_NS = 1_000_000
"""Pieces that went out so close behind each other may come in one read, whose stamp is that of the last one:
the earlier ones then waited longer than the relay can know. Where the relay stalled, even longer."""


@dataclass(slots=True)
class Result:
    recorded: Recorded
    played: Played
    heard: bytes
    """The client's side: head, body and framing."""
    exchange: dict[str, Any]
    arrival_ns: int
    """On the monotonic clock."""
    live: dict[str, Any] | None
    """What `/api/v1/live` told of it."""
    stall_ns: int
    """The relay's worst stall while all of them were played, as it says itself."""


async def ask(port: int, recorded: Recorded) -> bytes:
    client = await RawClient.connect(port)
    try:
        await client.send(recorded.request(f"X-Request-Id: {recorded.name}", "Connection: close"))
        heard, _ = await client.to_end()
        return heard
    finally:
        client.close()


async def listen(admin: int, n: int) -> dict[str, dict[str, Any]]:
    """The next `n` exchanges that the live feed tells, by request id."""
    client = await RawClient.connect(admin)
    told: dict[str, dict[str, Any]] = {}
    try:
        await client.send(request("GET", "/api/v1/live?summary=0", host="localhost"))
        assert b" 200 " in (await client.head()).line
        text = b""
        while len(told) < n and (data := await client.chunk()):
            *events, text = (text + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"event: exchange\ndata: "):
                    x = json.loads(event.partition(b"data: ")[2])
                    told[x["request_id"]] = x
    finally:
        client.close()
    return told


async def play_all() -> dict[str, Result]:
    recordings = {name: Recorded(name) for name in NAMES}
    player = Player(recordings)
    turns = asyncio.Semaphore(AT_ONCE)
    heard: dict[str, bytes] = {}

    async def one(recorded: Recorded) -> None:
        async with turns:
            heard[recorded.name] = await ask(proxy.listen, recorded)

    try:
        async with live_proxy(player.url) as proxy:
            anchor = WallAnchor.sample(SystemClock())
            listening = asyncio.create_task(listen(proxy.admin, len(NAMES)))
            async with asyncio.TaskGroup() as group:
                for recorded in sorted(recordings.values(), key=lambda r: -r.length_ms):
                    group.create_task(one(recorded))
            await proxy.measured(len(NAMES))
            told = await proxy.told("/api/v1/exchanges?limit=1000&events=1")
            summary = await proxy.told("/api/v1/summary?window=all")
            async with asyncio.timeout(READY_S):
                live = await listening
    finally:
        await player.stop()
    assert not player.errors, player.errors
    exchanges = {x["request_id"]: x for x in told["exchanges"]}
    assert len(told["exchanges"]) == len(NAMES)
    results = {}
    for name, recorded in recordings.items():
        x = exchanges[name]
        arrival_ns = anchor.mono_ns + wall_ns(x["arrival"]) - anchor.wall_ns
        results[name] = Result(
            recorded,
            player.played[name],
            heard[name],
            x,
            arrival_ns,
            live.get(name),
            # The relay reports its lag twice a second, and the exchanges with shared reads show it, too.
            round(max(summary["window"]["lag_max"], summary["uncertainty"]) * 1e9),
        )
    return results


def wall_ns(date: str) -> int:
    stamp = datetime.fromisoformat(date)
    return int(stamp.timestamp()) * 1_000_000_000 + stamp.microsecond * 1_000


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return dict(play(play_all(), limit_s=250))


class Complaints(list[str]):
    """What is wrong with one exchange."""

    def compare(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.append(f"{what}: {found!r}, expected {expected!r}")


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_told_as_it_is(results: dict[str, Result], name: str) -> None:
    result = results[name]
    wrong = Complaints()
    check_bytes(result, wrong)
    check_events(result, wrong)
    check_points(result, wrong)
    if wrong:
        pytest.fail("\n".join([f"{name}:", *wrong]), pytrace=False)


def typical(late_ns: list[int], results: dict[str, Result]) -> float:
    """The median; where the relay says that the machine kept it waiting, what a quarter stays below.

    Whoever is preempted between a system call and its stamp is late however right the stamp's place is, and
    on a machine with more to do than CPUs that may be most of them; an error of ours would be in every one.
    """
    busy = next(iter(results.values())).stall_ns > BUSY_NS
    return statistics.quantiles(late_ns, n=4)[0 if busy else 1]


def test_times_are_as_good_as_the_kernels_stamps(results: dict[str, Result]) -> None:
    """Whatever uncertainty is claimed: on a busy machine that is milliseconds, and would hide errors."""
    outside_ns = []
    for result in results.values():
        for e, told in zip(result.recorded.expect["events"], result.exchange["events"], strict=False):
            first_ns, last_ns = result.played.window(result.recorded, e["read"], e["read"])
            t_ns = result.arrival_ns + round(told["t"] * 1e9)
            outside_ns.append(max(first_ns - t_ns, t_ns - last_ns, 0))
    assert typical(outside_ns, results) <= CLOCKS_NS


def test_nearly_all_times_are_within_their_uncertainty(results: dict[str, Result]) -> None:
    offs = [
        off_ns(
            result, told["t"], *result.played.window(result.recorded, e.get("read_min", e["read"]), e["read"])
        )
        for result in results.values()
        for e, told in zip(result.recorded.expect["events"], result.exchange["events"], strict=False)
    ]
    assert sum(off != 0 for off in offs) <= len(offs) / 100, [off for off in offs if off]


def test_submit_is_not_after_the_upstream_had_it(results: dict[str, Result]) -> None:
    late_ns = [
        result.arrival_ns + round(result.exchange["timeline"]["submit"] * 1e9) - result.played.asked_ns
        for result in results.values()
    ]
    assert typical(late_ns, results) <= CLOCKS_NS


def test_the_live_feed_told_of_every_one(results: dict[str, Result]) -> None:
    for name, result in results.items():
        x = {key: value for key, value in result.exchange.items() if key != "events"}
        assert result.live == x, name


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_recording_is_told(results: dict[str, Result], name: str) -> None:
    recorded, told = results[name].recorded, str(results[name].exchange)
    for text in texts_of(recorded.expect):
        assert text not in told


def texts_of(expect: dict[str, Any]) -> list[str]:
    texts: list[str] = []
    for key in ("content_text", "reasoning_text", "refusal_text"):
        value = expect[key]
        texts += value.values() if isinstance(value, dict) else [value or ""]
    texts.append((expect["error"] or {}).get("message") or "")
    known = (expect["refusal_detail"] or {}).get("value")  # a phrase known beforehand
    return [text for text in texts if len(text) >= 12 and text != known]


def check_bytes(result: Result, wrong: Complaints) -> None:
    """The client got every byte of the body with its framing, and every field of the head in its order."""
    sent_head, _, sent = result.recorded.wire.partition(b"\r\n\r\n")
    while sent_head.startswith(b"HTTP/1.1 1"):
        sent_head, _, sent = sent.partition(b"\r\n\r\n")
    head, _, heard = result.heard.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 1"):
        head, _, heard = heard.partition(b"\r\n\r\n")
    if heard != sent:
        wrong.append(f"the client heard {len(heard)} bytes of {len(sent)} that were sent, or others")
    hop_by_hop = (b"connection:", b"keep-alive:", b"proxy-connection:", b"te:", b"upgrade:")
    sent_lines, lines = sent_head.split(b"\r\n"), head.split(b"\r\n")
    wrong.compare("status line", lines[0][8:], sent_lines[0][8:])
    lines = [line for line in lines[1:] if not line.lower().startswith(hop_by_hop)]
    sent_lines = [line for line in sent_lines[1:] if not line.lower().startswith(hop_by_hop)]
    wrong.compare("fields of the head", lines, sent_lines)


def check_events(result: Result, wrong: Complaints) -> None:
    recorded, x = result.recorded, result.exchange
    expected = recorded.expect["events"]
    wrong.compare("classes", [e["class"] for e in x["events"]], [e["class"] for e in expected])
    wrong.compare("bytes", [e["bytes"] for e in x["events"]], [e["end"] - e["start"] for e in expected])
    wrong.compare(
        "tokens", [e["tokens"] or None for e in x["events"]], [e.get("tokens") or None for e in expected]
    )
    wrong.compare("unparsed events", x.get("unparsed_events", 0), 0)
    for e, told in zip(expected, x["events"], strict=False):
        first, last = result.played.window(recorded, e.get("read_min", e["read"]), e["read"])
        check_time(result, f"event {e['i']}", told["t"], first, last, wrong)


def slack_of(result: Result) -> int:
    return round(result.exchange["uncertainty"] * 1e9) + CLOCKS_NS


def off_ns(result: Result, t: float, first_ns: int, last_ns: int) -> int:
    """How far `t` (seconds since arrival) is outside these moments, beyond what the exchange claims."""
    slack_ns = slack_of(result)
    together_ns = max(TOGETHER_NS, result.stall_ns)
    last_ns = max(after for before, after in result.played.sent if before <= last_ns + together_ns)
    if "late_ok" in result.recorded.expect:
        last_ns = result.played.sent[-1][1]
    if "early_ok" in result.recorded.expect:
        first_ns = result.played.sent[0][0]
    t_ns = result.arrival_ns + round(t * 1e9)
    return min(0, t_ns - first_ns + slack_ns) or max(0, t_ns - last_ns - slack_ns)


def check_time(
    result: Result, what: str, t: float | None, first_ns: int, last_ns: int, wrong: Complaints
) -> None:
    """`t` lies between these moments, as exactly as the exchange claims.

    Where the relay waited for a CPU, the kernel's own thread that stamps packets possibly did so, too.
    `test_nearly_all_times_are_within_their_uncertainty` counts such times.
    """
    if t is None:
        wrong.append(f"{what}: has no time")
        return
    late_ns = result.stall_ns if result.stall_ns > BUSY_NS else 0
    off = off_ns(result, t, first_ns, last_ns)
    if not 0 <= off <= late_ns:
        wrong.append(f"{what}: {off / 1e6:+.3f} ms beyond {slack_of(result) / 1e6:.3f} ms")


POINTS = (
    "first_byte",
    "first_any",
    "first_token",
    "first_reasoning",
    "first_tool_call",
    "first_refusal",
    "first_content",
    "last_token",
)


def check_points(result: Result, wrong: Complaints) -> None:
    expect, timeline = result.recorded.expect, result.exchange["timeline"]
    for name in POINTS:
        due_ms = expect[f"{name.removesuffix('_call')}_ms"]
        if due_ms is None:
            wrong.compare(name, timeline[name], None)
        else:
            moment = result.played.moment(result.recorded, due_ms)
            check_time(result, name, timeline[name], *moment, wrong)
    check_time(result, "head", timeline["head"], *result.played.sent[0], wrong)
    submit_ns = result.arrival_ns + round(timeline["submit"] * 1e9)
    # The stamp comes behind the call that sends: a process that is held up between the two stamps late.
    if submit_ns > result.played.asked_ns + CLOCKS_NS + result.stall_ns:
        wrong.append("submit: after the upstream had the whole request")
