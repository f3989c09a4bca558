"""Units of an experiment, the header fields of its arms, and its switch.

Invariant: the upstream gets an arm's header fields as configured, each once, whatever the client sends.
"""

import asyncio
import json
import logging
import re
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap import native
from llmtap.channel.experiment import switch_word
from llmtap.clock import SystemClock
from llmtap.protocol.http1 import parse_request_head
from llmtap.vantage.relay.experiment_router import (
    body_with,
    headers_with_length,
    named_unit,
    opening_unit,
    set_fields,
)
from tests.support.servers.peer import chunked, wait_until
from tests.support.servers.proxy import Tapped, stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import Call, answers
from tests.support.traffic.experiments import an_experiment

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}
SYSTEM = {"role": "system", "content": "be kind"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}


def opened(body: dict[str, Any], sender: bytes = b"") -> bytes | None:
    return opening_unit(json.dumps(body).encode(), sender)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"messages": [USER]}, {"messages": [USER, ANSWER, {"role": "user", "content": "more"}]}),
        ({"messages": [SYSTEM, USER], "model": "a"}, {"messages": [SYSTEM, USER, ANSWER], "stream": True}),
        ({"messages": [PARTS]}, {"messages": [PARTS, ANSWER]}),
        ({"system": "be kind", "messages": [USER]}, {"system": "be kind", "messages": [USER, ANSWER]}),
        ({"input": [USER]}, {"input": [USER, ANSWER]}),
        ({"instructions": "x", "input": "hello"}, {"instructions": "x", "input": "hello", "n": 1}),
        ({"prompt": "hello"}, {"prompt": "hello", "max_tokens": 1}),
    ],
)
def test_later_requests_of_a_conversation_are_known_by_its_opening(
    first: dict[str, Any], later: dict[str, Any]
) -> None:
    assert opened(first) == opened(later) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [USER]}, {"messages": [{"role": "user", "content": "hallo"}]}),
        ({"messages": [SYSTEM, USER]}, {"messages": [USER]}),
        ({"system": "a", "messages": [USER]}, {"system": "b", "messages": [USER]}),
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"input": "a"}, {"input": "b"}),
        ({"instructions": "a", "input": "x"}, {"instructions": "b", "input": "x"}),
    ],
)
def test_other_openings_are_other_conversations(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert opened(one) != opened(other)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"{}",
        b'{"messages":[]}',
        b'{"messages":{}}',
        b'{"messages":[1]}',
        b'{"messages":[{"role":"assistant","content":"x"}]}',
        b'{"messages":' + b"[" * 50_000,
        b'{"input":[]}',
        b'{"input":""}',
        b'{"prompt":null}',
        b'{"input":[' + b"[" * 50_000,
        b"\xff",
    ],
)
def test_where_there_is_no_telling_there_is_none(body: bytes) -> None:
    assert opening_unit(body, b"s") is None


def test_a_named_unit_is_the_first_name_that_is_there() -> None:
    headers = [(b"Host", b"x"), (b"X-B", b" 2 "), (b"x-a", b""), (b"X-C", b"3")]
    assert named_unit(headers, ["x-a", "x-b", "x-c"]) == b"x-b\x002"
    assert named_unit(headers, ["x-c", "x-b"]) == b"x-c\x003"
    assert named_unit(headers, ["x-d"]) is None
    assert named_unit([(b"X-Aa", b"b")], ["x-aa"]) != named_unit([(b"X-A", b"ab")], ["x-a"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SPACE = st.text(" \t\r\n", max_size=2)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.dictionaries(st.text(), JSON, max_size=3), st.data())
def test_other_fields_keep_the_bytes_of_their_values(
    asked: dict[str, Any], fields: dict[str, Any], data: st.DataObject
) -> None:
    raws = {}
    pieces = []
    for name, value in asked.items():
        raw = json.dumps(
            value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
        )
        raws[name] = raw.encode("utf-8", "surrogatepass")
        pieces.append(json.dumps(name) + data.draw(SPACE) + ":" + data.draw(SPACE) + raw)
    try:
        body = ("{" + ",".join(pieces) + "}").encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is no text
    try:
        set_to = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
        changed = body_with(body, set_to)
        assert changed is not None
        found = msgspec.json.decode(changed, type=dict[str, msgspec.Raw])
    except UnicodeEncodeError:
        return
    assert list(found) == [*asked, *(name for name in fields if name not in asked)]
    for name, raw in found.items():
        assert bytes(raw) == bytes(set_to[name]) if name in set_to else raws[name]


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"null", b'{"a":1', b'{"a":1}x', b"{'a':1}", b"\xff{}"])
def test_what_is_no_object_is_not_changed(body: bytes) -> None:
    assert body_with(body, {"a": msgspec.Raw(b"1")}) is None


def test_of_a_field_that_came_twice_the_last_value_counts() -> None:
    assert body_with(b'{"a":1,"b":2,"a":3}', {"c": msgspec.Raw(b"4")}) == b'{"a":3,"b":2,"c":4}'


def test_header_fields_are_set_whatever_their_case() -> None:
    lines = b"A: 1\r\nx-arm: 2\r\nX-ARM: 4\r\nA: 5\r\nx_arm: 6\r\nX_Other: 7\r\n"
    head = parse_request_head(b"GET / HTTP/1.1\r\nHost: h\r\n" + lines + b"\r\n")
    set_fields(head, [(b"X-Arm", b"b")])
    assert head.headers == [(b"Host", b"h"), (b"A", b"1"), (b"A", b"5"), (b"X_Other", b"7"), (b"X-Arm", b"b")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(b"A", b"1"), (b"content-LENGTH", b"9")], [(b"A", b"1"), (b"content-LENGTH", b"7")]),
        ([(b"Content-Length", b"9"), (b"B", b"2")], [(b"Content-Length", b"7"), (b"B", b"2")]),
        ([(b"Trailer", b"X"), (b"transfer-encoding", b"chunked")], [(b"Content-Length", b"7")]),
    ],
)
def test_the_length_takes_the_place_of_the_old_framing(
    before: list[tuple[bytes, bytes]], after: list[tuple[bytes, bytes]]
) -> None:
    assert headers_with_length(before, 7) == after


CONTROL = {"name": "control"}
GUARD = {"name": "guarded", "weight": 1e9, "headers": {"X-Guard": "on", "Authorization": "Bearer ours"}}
OWN = ("x-guard: off", "X-GUARD: none", "X_Guard: under", "authorization: Bearer theirs")


@pytest.mark.parametrize(
    "naming",
    [
        ["connection: x-guard", "CONNECTION: aUTHORIZATION"],
        ["Connection: close , \t x-GUARD\t ,, authorization,"],
        ["Connection: keep-alive", "Connection: te, X-Guard", "TE: trailers", "Connection: Authorization"],
        [],
    ],
)
@pytest.mark.parametrize("own", [(), OWN])
@pytest.mark.parametrize("options", [{}, {"via": True, "forwarded_for": True, "request_id": "make"}])
async def test_no_client_names_an_arms_fields_away(
    naming: list[str], own: tuple[str, ...], options: dict[str, Any]
) -> None:
    async with stage(experiment=an_experiment(CONTROL, GUARD), **options) as (up, tap):
        path = up.on(answers())
        for version in ("1.1", "1.0"):
            raw = request("POST", path, *own, *naming, "X-Last: 1", body=b"{}", version=version)
            assert (await tap.ask(raw)).status == 200
            head = up.calls_to(path)[-1].head
            assert (head.all("x-guard"), head.all("authorization")) == ([b"on"], [b"Bearer ours"])
            assert head.all("x_guard") == []  # CGI and WSGI read it as the same name
            assert head.get("x-last") == b"1"
            assert head.all("connection") == ([b"TE"] if "TE: trailers" in naming else [])
        closing = await tap.closing()
        assert (closing.arm, closing.excluded) == ("guarded", None)


async def test_fields_of_the_relay_itself_cannot_be_named_away() -> None:
    async with stage(via=True, forwarded_for=True, request_id="make") as (up, tap):
        path = up.on(answers())
        client = await tap.client()
        raw = request(
            "POST",
            path,
            "X-Request-Id: theirs",
            "X-Forwarded-For: 9.9.9.9",
            "Via: 1.1 other",
            "Connection: Host, x-request-ID",
            "connection: Via,X-FORWARDED-FOR",
            body=b"{}",
        )
        assert (await client.ask(raw)).status == 200
        head = up.call(path).head
        assert head.get("host") == b"127.0.0.1:%d" % up.port
        assert (head.get("via"), head.get("x-forwarded-for")) == (b"1.1 llmtap", b"127.0.0.1")
        made = head.get("x-request-id")
        assert made is not None and made != b"theirs"


async def test_a_request_id_that_an_arm_sets_is_not_made_anew() -> None:
    arm = {"name": "named", "weight": 1e9, "headers": {"X-Request-Id": "ours"}}
    async with stage(experiment=an_experiment(CONTROL, arm), request_id="make") as (up, tap):
        path = up.on(answers())
        client = await tap.client()
        raw = request("POST", path, "X-Request-Id: theirs", "Connection: X-Request-Id", body=b"{}")
        assert (await client.ask(raw)).status == 200
        assert up.call(path).head.all("x-request-id") == [b"ours"]


@pytest.mark.parametrize("unit", ["request", "conversation"])
@pytest.mark.parametrize("arms", [(CONTROL, GUARD), ({**CONTROL, "weight": 1e9}, {**GUARD, "weight": 1})])
@pytest.mark.parametrize("in_parts", [False, True])
async def test_no_trailer_repeats_an_arms_field(
    unit: str, arms: tuple[dict[str, Any], ...], in_parts: bool
) -> None:
    """In no arm: a refusal in one arm only would be a difference that the guardrail did not make."""
    async with stage(experiment=an_experiment(*arms, unit=unit)) as (up, tap):
        got: list[bytes] = []

        async def script(call: Call) -> None:
            while data := await call.peer.read():
                got.append(data)
                if b"".join(got).endswith(b"\r\n\r\n"):
                    await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        client = await tap.client()
        body = chunked(b"{}", trailers=b"X-Fine: 1\r\nx-GUARD: off\r\n")
        await client.send(request("POST", up.on(script), "Transfer-Encoding: chunked"))
        try:
            await client.send(*([body[i : i + 1] for i in range(len(body))] if in_parts else [body]))
        except ConnectionError:
            pass
        assert (await client.head()).line.startswith(b"HTTP/1.1 400 ")
        assert b"x-GUARD" not in b"".join(got)
        await wait_until(lambda: not tap.relay.flows)


@pytest.mark.parametrize("aa", [False, True])
async def test_such_a_trailer_passes_outside_the_experiment(aa: bool) -> None:
    """In A/A mode no arm sets the field; a PUT takes no part."""
    async with stage(experiment=an_experiment(CONTROL, GUARD, aa=aa)) as (up, tap):
        path = up.on(answers())
        body = chunked(b"{}", trailers=b"X-Guard: 1\r\n")
        client = await tap.client()
        for method in ("PUT", "POST") if aa else ("PUT",):
            raw = request(method, path, "Transfer-Encoding: chunked") + body
            assert (await client.ask(raw)).status == 200
            payload = up.calls_to(path)[-1].payload
            assert payload is not None and payload.raw == body


BODY_ARM = {"name": "set", "body": {"guard": ["pii"], "temperature": 0}}


def is_on(tap: Tapped) -> bool:
    """Requests are assigned to arms."""
    assert tap.relay.context.router is not None
    return tap.relay.context.router.is_on


def chat(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


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


async def test_a_word_about_another_experiment_changes_nothing() -> None:
    experiment = an_experiment(enabled=False)
    async with stage(experiment=experiment) as (_, tap):
        tap.meter.say(switch_word(experiment.id ^ 1, True))
        await tap.relay.wait_for_briefing()
        assert (is_on(tap), tap.relay.reporter.switch) == (False, 0)


async def test_a_word_changes_the_stage_of_a_ramp(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    experiment = an_experiment(schedule="1%, 99%", stop_worse=("failed",), key="k")
    async with stage(experiment=experiment) as (up, tap):
        path = up.on(answers(b"x"))
        client = await tap.client()
        for number, usual in ((0, "control"), (1, "marked")):
            word = switch_word(experiment.id + number, True)
            tap.meter.say(word)
            await wait_until(lambda word=word: tap.relay.reporter.switch == word)
            arms = Counter[str | None]()
            for _ in range(20):
                await client.post(path, b"{}")
                recorded = await tap.meter.closed(tap.relay.tap.ledger.opened)
                arms[recorded.closing.arm] += 1
            assert arms[usual] >= 17, arms
        tap.meter.say(switch_word(experiment.id + 2, False))
        tap.meter.say(word := switch_word(experiment.id, True))
        await wait_until(lambda: tap.relay.reporter.switch == word)
        switches = re.findall(r"event=experiment_switched .* on=(\w+) stage=(\d)", caplog.text)
        assert switches == [("True", "1"), ("True", "2"), ("True", "1")], "there is no third stage"


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


async def test_it_switches_itself_off_at_its_end() -> None:
    now_ns = SystemClock.wall_ns()
    for until_ns, takes_part in ((now_ns + 3_600 * 10**9, True), (now_ns - 1, False)):
        experiment = msgspec.structs.replace(an_experiment(), until_wall_ns=until_ns)
        async with stage(experiment=experiment) as (up, tap):
            assert (await tap.post(up.on(answers()), b"{}")).status == 200
            told = await tap.closing()
            assert (told.arm is not None) is takes_part
            assert is_on(tap) is takes_part
            tap.meter.say(switch_word(experiment.id, True))
            await wait_until(lambda t=tap: t.relay.reporter.switch)
            assert is_on(tap) is takes_part, "what is over does not begin again"


async def test_a_fresh_relay_waits_for_a_word_but_not_for_long() -> None:
    experiment = an_experiment(enabled=True)
    async with stage(experiment=experiment) as (_, tap):
        waiting = asyncio.ensure_future(tap.relay.wait_for_briefing())
        await asyncio.sleep(0)
        assert not waiting.done()
        tap.meter.say(switch_word(experiment.id, False))
        await waiting
        assert not is_on(tap)
    async with stage(experiment=experiment, with_meter=False) as (up, tap):
        await tap.relay.wait_for_briefing()
        assert (await tap.post(up.on(answers()), b"{}")).status == 200
