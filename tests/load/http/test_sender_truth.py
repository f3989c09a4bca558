"""What an exchange says is true within the uncertainty that it states: a server logs when it sent.

No bound of our own is set here: on a busy host stamps may be late, and then the exchange has to say so.
"""

import asyncio

import pytest

from llmtap.clock import SystemClock
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.latency import measure
from tests.support.clocks import kernel_stamps
from tests.support.servers.loading import sender_to, streamed_answer
from tests.support.servers.upstream import Call, upstream

TOKENS = 20
mono_ns = SystemClock.mono_ns


class Clocked:
    """Answers with a stream, a pause before each event, and writes down when each was sent."""

    def __init__(self) -> None:
        self.log: dict[int, list[tuple[int, int]]] = {}
        """By connection: before and after the system call that sent the event."""

    async def __call__(self, call: Call) -> str | None:
        await call.body()
        log = self.log[call.connection] = []
        head, *chunks = streamed_answer(TOKENS)
        await call.say(head)
        for chunk in chunks:
            await asyncio.sleep(0.003)
            before_ns = mono_ns()
            call.peer.sock.send(chunk)
            log.append((before_ns, mono_ns()))
        return None


@pytest.mark.parametrize(("clock", "streams"), [("kernel", 8), ("mono", 1)])
async def test_every_stamp_is_true_within_its_uncertainty(clock: str, streams: int) -> None:
    server_script = Clocked()
    async with upstream() as server, sender_to(server.url + server.on(server_script), clock=clock) as to:
        calls = [to.send() for _ in range(streams)]
        for call in calls:
            await to.end_of(call)
        by_connection = dict.fromkeys(server_script.log)
        assert len(by_connection) == streams
        # Connections were opened in the order of the calls, one each.
        for number, call in enumerate(calls, 1):
            x, log = to.of(call), server_script.log[number]
            assert x.outcome is Outcome.COMPLETE
            slack_ns = x.uncertainty_ns
            stamps = list(x.timeline.events.t_ns)
            assert len(stamps) == len(log) - 1 == TOKENS + 2, "every event, and the last chunk"
            for t_ns, (before_ns, after_ns) in zip(stamps, log, strict=False):
                assert before_ns - slack_ns <= t_ns <= after_ns + slack_ns
            m = measure(x)
            assert m.tbc_ns is not None
            submit_ns = x.timeline.submit_ns or 0
            first, second = log[0]
            assert first - submit_ns - slack_ns <= m.ttft_ns <= second - submit_ns + slack_ns
            for gap_ns, earlier, later in zip(m.tbc_ns, log, log[1:], strict=False):
                assert later[0] - earlier[1] - 2 * slack_ns <= gap_ns <= later[1] - earlier[0] + 2 * slack_ns


def held(seconds: float) -> None:
    """Nobody in this loop reads meanwhile."""
    end_ns = mono_ns() + int(seconds * 1e9)
    while mono_ns() < end_ns:
        pass


@pytest.mark.parametrize("shared", [False, True], ids=["a read each", "one read"])
@pytest.mark.parametrize("clock", ["kernel", "mono"])
async def test_a_loop_that_stalls_says_so(clock: str, shared: bool) -> None:
    """The first event was sent before the stall. Alone in its read it has the kernel's stamp; where it shares
    the read with the second, the stamp is that one's, and only the uncertainty tells."""
    sent_ns: list[int] = []

    async def script(call: Call) -> str | None:
        await call.body()
        head, *chunks = streamed_answer(2)
        await call.say(head, chunks[0])
        sent_ns.append(mono_ns())
        held(0.1)
        if not shared:
            await call.peer.taken()
        await call.say(*chunks[1:])
        return None

    with kernel_stamps():
        async with upstream() as server, sender_to(server.url + server.on(script), clock=clock) as to:
            x = await to.ask()
            first_ns = x.timeline.first_token_ns
            late_ns = first_ns - sent_ns[0]
            if clock == "kernel" and not shared:
                assert late_ns < 50_000_000, "it was read late, and has the right stamp"
            else:
                assert 95_000_000 <= late_ns <= x.uncertainty_ns
