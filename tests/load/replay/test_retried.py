"""A replay whose requests are refused and sent again: late as the first time, long as all of them."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from llmtap.load.bodies import BodyOptions
from llmtap.load.replay.options import ReplayOptions
from llmtap.load.replay.perform import Replay
from llmtap.load.replay.plan import ReplayQuestion, make_plan
from llmtap.load.workers.worker_handle import Progress
from llmtap.units import NS_PER_S, Duration
from tests.support.loading import events
from tests.support.peer import scene

N = 8
WAIT_S = 1


class Silent:
    """Nobody watches."""

    def preparing(self, done: int, of: int) -> None: ...

    def warming(self, how: str) -> None: ...

    def sending(self, progress: Progress, planned: int) -> None: ...

    def comparing(self, done: int, of: int | None) -> None: ...

    def writing(self, done: int, of: int) -> None: ...


@asynccontextmanager
async def busy_server() -> AsyncIterator[tuple[str, Counter[str]]]:
    """Each request is asked to come again once; the URL, and how often each came."""
    came: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/v1/chat/completions":
            return web.Response(status=404)
        await request.read()
        name = request.headers["X-Request-Id"]
        came[name] += 1
        if came[name] == 1:
            return web.Response(status=429, headers={"Retry-After": str(WAIT_S)})
        return web.Response(body=b"".join(events(3)), content_type="text/event-stream")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", came
    finally:
        await runner.cleanup()


@scene
async def test_the_wait_is_in_no_lateness_and_in_what_counts_from_the_schedule() -> None:
    second, minute = Duration(NS_PER_S), Duration(60 * NS_PER_S)
    async with busy_server() as (url, came):
        plan = make_plan(ReplayQuestion(source="conversation", requests=N, rate_rps=N, arrivals="uniform"))
        options = ReplayOptions(
            target=url, model="m", timeout=minute, connect_timeout=minute, retries=3,
            retry_wait=Duration(10 * second), scrape="none",
        )  # fmt: skip
        result = await Replay(plan, options, BodyOptions(model="m", temperature=0.0), Silent()).run()
    assert set(came.values()) == {2} and len(came) == N
    load = result["load"]
    assert (load["sent"], load["retries"]) == (N, {"n": N, "reasons": {"429": N}})
    assert result["outcomes"] == {"complete": N}
    lateness, corrected = result["dispatch_lateness"], result["corrected"]
    assert lateness["n"] == corrected["ttft"]["n"] == N
    # However slow this machine is: from the schedule = lateness + wait + TTFT, for each of them. A timer may
    # be 1 ms early, and histograms are right within 0.1 %.
    assert corrected["ttft"]["min"] >= 0.99 * WAIT_S
    assert corrected["ttft"]["max"] >= 0.99 * (lateness["max"] + WAIT_S)
    assert corrected["ttft"]["mean"] >= 0.99 * (lateness["mean"] + WAIT_S)
    assert load["due"] == N
