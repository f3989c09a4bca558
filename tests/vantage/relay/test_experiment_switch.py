"""An experiment goes on and off: by the meter's word, by its end, and never at a request's cost."""

import asyncio
import json

import msgspec

from llmtap import native
from llmtap.channel.experiment import switch_word
from llmtap.clock import SystemClock
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.proxy import Tapped, stage
from tests.support.servers.upstream import answers
from tests.support.traffic.experiments import an_experiment

BODY_ARM = {"name": "set", "body": {"guard": ["pii"], "temperature": 0}}


def is_on(tap: Tapped) -> bool:
    """Requests are assigned to arms."""
    assert tap.relay.context.router is not None
    return tap.relay.context.router.on


def chat(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


@scene
async def test_it_is_switched_under_traffic_and_no_request_fails() -> None:
    experiment = an_experiment({"name": "control"}, BODY_ARM, enabled=False, unit="conversation")
    async with stage(experiment=experiment) as (up, tap):
        path = up.on(answers(b"x" * 2_000, chunks=4))
        stop = False
        asked = 0

        async def ask(i: int) -> None:
            nonlocal asked
            client = await tap.client()
            while not stop:
                answer = await client.post(path, chat(f"{i} {asked}"))
                assert (answer.status, answer.data, answer.whole) == (200, b"x" * 2_000, True)
                asked += 1

        asking = [asyncio.ensure_future(ask(i)) for i in range(8)]
        for on in (True, False, True, False):
            before = asked
            tap.meter.say(switch_word(experiment.id, on))
            await wait_until(lambda old=before: asked > old + 40)
            recorded = await tap.meter.closed(tap.relay.tap.ledger.opened - 8)
            assert (recorded.closing.arm is not None) is on
        stop = True
        await asyncio.gather(*asking)


@scene
async def test_a_word_about_another_experiment_changes_nothing() -> None:
    experiment = an_experiment(enabled=False)
    async with stage(experiment=experiment) as (_, tap):
        tap.meter.say(switch_word(experiment.id ^ 1, True))
        await tap.relay.briefed()
        assert (is_on(tap), tap.relay.reporter.switch) == (False, 0)


@scene
async def test_a_returning_meter_is_told_the_last_word() -> None:
    experiment = an_experiment(enabled=True)
    async with stage(experiment=experiment) as (_, tap):
        word = switch_word(experiment.id, False)
        tap.meter.say(word)
        await wait_until(lambda: not is_on(tap))
        tap.meter.stop()
        await wait_until(lambda: not tap.relay.tap.connected)
        await tap.meter.start()
        await wait_until(lambda: len(tap.meter.hellos) == 2)
        assert [hello.switch for hello in tap.meter.hellos] == [0, word]
        assert {hello.implementation for hello in tap.meter.hellos} == {native.NAME}
        assert not is_on(tap), "a meter's death switches nothing"


@scene
async def test_it_switches_itself_off_at_its_end() -> None:
    now_ns = SystemClock.wall_ns()
    for until_ns, takes_part in ((now_ns + 3_600 * 10**9, True), (now_ns - 1, False)):
        experiment = msgspec.structs.replace(an_experiment(), until_wall_ns=until_ns)
        async with stage(experiment=experiment) as (up, tap):
            assert (await (await tap.client()).post(up.on(answers()), b"{}")).status == 200
            told = (await tap.meter.closed(1)).closing
            assert (told.arm is not None) is takes_part
            assert is_on(tap) is takes_part
            tap.meter.say(switch_word(experiment.id, True))
            await wait_until(lambda t=tap: t.relay.reporter.switch)
            assert is_on(tap) is takes_part, "what is over does not begin again"


@scene
async def test_its_end_comes_while_it_runs() -> None:
    for lasts_s in (0.3, 1.5, 7.5):  # or it is over before this machine has come to the first request
        until_ns = SystemClock.wall_ns() + int(lasts_s * 1e9)
        experiment = msgspec.structs.replace(an_experiment(), until_wall_ns=until_ns)
        async with stage(experiment=experiment) as (up, tap):
            path = up.on(answers())
            client = await tap.client()
            seen = []
            while not seen or seen[-1] is not None:
                assert (await client.post(path, b"{}")).status == 200
                seen.append((await tap.meter.closed(len(seen) + 1)).closing.arm)
            assert not is_on(tap)
        if len(seen) > 1:
            return
    raise AssertionError("it never took part")


@scene
async def test_a_fresh_relay_waits_for_a_word_but_not_for_long() -> None:
    experiment = an_experiment(enabled=True)
    async with stage(experiment=experiment) as (_, tap):
        waiting = asyncio.ensure_future(tap.relay.briefed())
        await asyncio.sleep(0)
        assert not waiting.done()
        tap.meter.say(switch_word(experiment.id, False))
        await waiting
        assert not is_on(tap)
    async with stage(experiment=experiment, with_meter=False) as (up, tap):
        await tap.relay.briefed()
        assert (await (await tap.client()).post(up.on(answers()), b"{}")).status == 200
