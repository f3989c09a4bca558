"""Warm is what was warmed as seed 000, 4.5 wants it, and has settled; what is not, is said."""

import asyncio
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from llmtap.clock import SystemClock
from llmtap.load.warmup import (
    PROBES_COMPARED,
    Probe,
    WarmUp,
    WarmUpOptions,
    WarmUpProgress,
    _missing_requests,
    warm_up,
)
from llmtap.workload.requests import Requests
from tests.support.servers.loading import bodies, streamed_answer
from tests.support.servers.peer import play
from tests.support.servers.upstream import Call, Script, Upstream, answers, says, upstream

NO = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"


class Timed:
    """Answers each request after the delay of its number, in ms; the last delay holds for all others."""

    def __init__(self, delays_ms: Callable[[int], float], tokens: int = 3) -> None:
        self.delays_ms = delays_ms
        self.tokens = tokens
        self.n = 0
        self.under_way: list[int] = [0]
        """How many there were at each arrival."""
        self.took_ns: list[int] = []
        """From each request to its response. The loop's timers may be 1 ms early."""
        self._now = 0

    async def __call__(self, call: Call) -> str | None:
        await call.body()
        began_ns = SystemClock.mono_ns()
        number, self.n = self.n, self.n + 1
        self._now += 1
        self.under_way.append(self._now)
        await asyncio.sleep(self.delays_ms(number) / 1e3)
        self.took_ns.append(SystemClock.mono_ns() - began_ns)
        await call.say(*streamed_answer(self.tokens))
        self._now -= 1
        return None


def warmed(
    script: Script, options: WarmUpOptions, progress: WarmUpProgress = lambda done, of, what: None
) -> tuple[WarmUp, Upstream]:
    """The server waits on the monotonic clock, so the sender measures on it, too. The kernel's timestamps are
    on the wall clock, whose rate may differ by 0.05 % while it is corrected."""

    rows = 4

    async def work() -> tuple[WarmUp, Upstream]:
        async with upstream() as server:
            with bodies(server.url + server.on(script), rows, clock="mono") as (setup, begins, ends):
                r = Requests(array("q", [3_600_000_000_000] * rows), tenants=["t"] * rows)
                return await warm_up(setup, r, (begins, ends), options, progress), server

    found: tuple[WarmUp, Upstream] = play(work(), 60)
    return found


def rows_of(server: Upstream) -> list[int]:
    said = [call.payload.data for call in server.calls if call.payload is not None]
    return [int(body.partition(b"row-")[2].partition(b'"')[0]) for body in said]


def variation(probes: list[Probe], name: str) -> float:
    values = [getattr(probe, name) for probe in probes]
    return (max(values) - min(values)) / (sum(values) / len(values))


def quick(**more: Any) -> WarmUpOptions:
    return WarmUpOptions(**({"requests": 10, "tokens": 10, "slots": 2, "probes_max": 12} | more))


def test_a_server_that_gets_faster_is_waited_for() -> None:
    """Request 0 is the probe before, 1 to 10 the warm-up, then come probes."""
    falls = [200, *[1] * 10, 250, 200, 150, 100]
    script = Timed(lambda n: falls[n] if n < len(falls) else 60)
    found, server = warmed(script, quick())
    assert (found.requests, found.failed, found.tokens, found.enough) == (10, 0, 30, True)
    assert max(script.under_way[2:12]) <= 2
    assert max(script.under_way[12:]) == 1, "probes are alone: the queue was drained before"
    assert found.before.ttft_ns >= script.took_ns[0]
    # The first window of probes that vary by less than 10 % ends it, however long they took on this machine.
    ends = range(PROBES_COMPARED, len(found.probes) + 1)
    windows = [found.probes[end - PROBES_COMPARED : end] for end in ends]
    varied = [[variation(window, name) for name in ("ttft_ns", "e2e_ns")] for window in windows]
    assert varied[-1] == pytest.approx([found.variation_ttft, found.variation_e2e])
    stable = [max(each) < 0.1 for each in varied]
    assert not any(stable[:-1])
    assert (found.stable, found.problem is None) == (stable[-1], stable[-1])
    assert found.stable or len(found.probes) == 12
    assert server.connections <= 2 + 1 + len(found.probes)
    said = json.loads(json.dumps(found.to_dict()))
    assert said["before"]["ttft"] == found.before.ttft_ns / 1e9
    assert (said["stable"], said["skipped"], said["problem"]) == (found.stable, None, found.problem)
    assert set(rows_of(server)[11:]) == {0}, "the same request each time"


def test_a_server_that_never_settles_is_given_up() -> None:
    told: list[tuple[int, int, str]] = []
    script = Timed(lambda n: (1, 100)[n % 2])
    found, _ = warmed(script, quick(probes_max=4), lambda *step: told.append(step))
    assert [step for step in told if step[2] == "probes"] == [(0, 4, "probes"), (3, 4, "probes")]
    assert told[-3] == (10, 10, "requests")
    assert (found.enough, found.stable, len(found.probes)) == (True, False, 4)
    assert found.problem == "latency still varies after 4 probes"
    assert found.variation_ttft > 0.1


def test_both_requests_and_tokens_and_rows_come_again() -> None:
    """5 requests bring 15 tokens; 100 tokens take 34. There are 4 rows."""
    found, server = warmed(Timed(lambda n: 1), quick(requests=5, tokens=100, probes_max=0))
    assert (found.requests, found.tokens, found.enough) == (34, 102, True)
    sent = rows_of(server)[1:]
    assert sorted(sent) == sorted(n % 4 for n in range(34))


@pytest.mark.parametrize(
    ("script", "options", "calls", "figures", "problem"),
    [
        (says(NO), quick(requests=3), 4, (0, 3, 0), "none of 3 requests succeeded"),
        (
            answers(b""),
            quick(requests=3, requests_max=5, probes_max=0),
            6,
            (5, 0, 0),
            "5 answers (minimum 3) and 0 output tokens (minimum 10) after 5 requests",
        ),
        (says(NO), WarmUpOptions(cold=True), 0, (0, 0, 0), None),
    ],
    ids=["only fails", "says nothing of tokens", "cold start"],
)
def test_a_server_that_cannot_be_warmed(
    script: Script, options: WarmUpOptions, calls: int, figures: tuple[int, int, int], problem: str | None
) -> None:
    found, server = warmed(script, options)
    assert (found.requests, found.failed, found.tokens) == figures
    assert (found.enough, found.stable, found.probes, found.problem) == (False, False, [], problem)
    assert found.to_dict()["skipped"] == ("cold start" if options.cold else None)
    assert len(server.calls) == calls
    if found.failed:
        assert (found.before.outcome, found.before.ttft_ns) == ("upstream_error", None)


@pytest.mark.parametrize(
    ("requests", "tokens", "missing"),
    [
        (0, 0, 100),  # nothing is known of lengths: first the requests
        (100, 10_000, 0),
        (99, 20_000, 1),
        (100, 9_999, 1),
        (60, 600, 940),  # 10 each
        (100, 0, 100),
    ],
)
def test_missing(requests: int, tokens: int, missing: int) -> None:
    """As the seed has it: 100 requests or 10,000 tokens, whichever is greater."""
    assert _missing_requests(WarmUp(requests=requests, tokens=tokens), WarmUpOptions()) == missing
