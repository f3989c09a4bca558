"""Experiments on the way: what each arm does to a request, and that nothing else changes anything."""

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
import pytest

from llmtap.channel.experiment import Assigner, request_unit
from llmtap.channel.frames import Assigned, Closing, FrameKind
from tests.support.servers.peer import chunked, wait_until
from tests.support.servers.proxy import Tapped, ms, stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import OK, Upstream, answers, says, upstream
from tests.support.traffic.experiments import an_experiment

CONTROL = {"name": "control"}
ALL = 1e9
"""Weight of the arm that a test is about: the other one gets nothing."""
MARKED = {"name": "marked", "weight": ALL, "headers": {"X-Arm": "b", "X-Repeat": "one"}}
SET = {"name": "set", "weight": ALL, "body": {"guard": ["pii"], "temperature": 0}}


async def sent(up: Upstream, tap: Tapped, raw: bytes, path: str, pieces: int = 1) -> bytes:
    """Send a request in so many pieces; return it as it reached the upstream."""
    client = await tap.client()
    step = -(-len(raw) // pieces)
    for at in range(0, len(raw), step):
        await client.send(raw[at : at + step])
        await asyncio.sleep(0.002 if pieces > 1 else 0)
    answer = await client.answer(raw.split(b" ")[0])
    assert (answer.status, answer.data) == (200, b"ok")
    call = up.calls_to(path)[-1]
    assert call.payload is not None
    return call.head.raw + call.payload.raw


def room_of(tap: Tapped) -> int:
    """Return what is left of the room for held bodies, in bytes."""
    assert tap.relay.context.router is not None
    return tap.relay.context.router.held_budget.free_bytes


def plain(up: Upstream, raw: bytes) -> bytes:
    """What reaches the upstream without an experiment: the same, under the upstream's name."""
    return raw.replace(b"Host: client.test", b"Host: 127.0.0.1:%d" % up.port)


@pytest.mark.parametrize(("method", "enabled"), [("POST", False), ("GET", True)])
async def test_while_it_is_off_and_in_other_methods_nothing_is_changed_or_noted(
    method: str, enabled: bool
) -> None:
    async with stage(experiment=an_experiment(CONTROL, MARKED, enabled=enabled)) as (up, tap):
        path = up.on(answers())
        raw = request(method, path, body=b'{"a":1}')
        assert await sent(up, tap, raw, path) == plain(up, raw)
        recorded = await tap.meter.closed(1)
        assert FrameKind.ARM not in recorded.kinds
        assert (recorded.closing.arm, recorded.closing.unit) == (None, None)


# ---------------------------------------------------------------- arms

BODIES = [b'{"a": 1,  "b" : [ 1.0, 1e400, "\\u00e9\xc3\xa9" ] }', b"not json", b""]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("unit", ["request", "conversation", "tenant"])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_control_passes_byte_for_byte(body: bytes, unit: str, pieces: int) -> None:
    """With every unit, whole or in pieces, framed by length or in chunks."""
    experiment = an_experiment({**CONTROL, "weight": ALL}, {**SET, "weight": 1}, unit=unit)
    async with stage(experiment=experiment) as (up, tap):
        path = up.on(answers())
        framed = [
            request("POST", path, "X-Odd: a", "x-odd: b", body=body),
            request("POST", path, "Transfer-Encoding: chunked") + chunked(body[:2], body[2:]),
        ]
        for seq, raw in enumerate(framed, 1):
            assert await sent(up, tap, raw, path, pieces) == plain(up, raw)
            recorded = await tap.meter.closed(seq)
            assert recorded.request == raw
            closing = recorded.closing
            assert (closing.arm, closing.route, closing.excluded) == ("control", None, None)


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("unit", ["request", "conversation"])
async def test_a_control_whose_client_sends_the_arms_header_itself_is_noted_and_cleaned_on_request(
    strip: bool, unit: str
) -> None:
    arms = {**CONTROL, "weight": ALL}, {**MARKED, "weight": 1}
    async with stage(experiment=an_experiment(*arms, unit=unit, strip_headers=strip)) as (up, tap):
        path, notes, marks = up.on(answers()), [], []
        for seq, own in enumerate((("X-Arm: mine", "x_repeat: too"), ()), 1):
            raw = request("POST", path, *own, body=b'{"prompt": "hello"}')
            kept = request("POST", path, body=b'{"prompt": "hello"}') if strip else raw
            assert await sent(up, tap, raw, path) == plain(up, kept)
            recorded = await tap.meter.closed(seq)
            frames = recorded.of(FrameKind.ARM)
            marks.append(recorded.closing.excluded)
            notes += [msgspec.json.decode(frame.data, type=Assigned).own_headers for frame in frames]
        assert notes == [True, False]
        assert marks == [None if strip else "own_header", None]


async def test_the_arm_that_sets_a_header_is_not_noted_for_it() -> None:
    async with stage(experiment=an_experiment(CONTROL, MARKED, strip_headers=True)) as (up, tap):
        path = up.on(answers())
        raw = await sent(up, tap, request("POST", path, "x-arm: mine", body=b"{}"), path)
        assert b"X-Arm: b" in raw and b"mine" not in raw
        (frame,) = (await tap.meter.closed(1)).of(FrameKind.ARM)
        assert not msgspec.json.decode(frame.data, type=Assigned).own_headers


async def test_a_headers_arm_sets_fields_and_changes_nothing_else() -> None:
    async with stage(experiment=an_experiment(CONTROL, MARKED)) as (up, tap):
        path = up.on(answers())
        body = b'{"a" : 1}'
        raw = request("POST", path, "x-repeat: two", "Keep: me", "X-REPEAT: three", body=body)
        expected = plain(up, request("POST", path, "Keep: me", body=body))
        expected = expected.replace(b"\r\n\r\n", b"\r\nX-Arm: b\r\nX-Repeat: one\r\n\r\n")
        assert await sent(up, tap, raw, path) == expected
        recorded = await tap.meter.closed(1)
        assert recorded.request == raw, "the meter is shown what the client sent"
        assert recorded.closing.route == "headers X-Arm,X-Repeat"


@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("framing", ["length", "chunked", "http10"])
async def test_a_body_arm_sets_fields_and_keeps_the_bytes_of_all_others(pieces: int, framing: str) -> None:
    body = b'{ "n": 1.10, "temperature" : 0.7, "s": "\\u0041\xc3\xa9", "deep": { "x" :[1 ,2]}, "m": 1e2 }'
    changed = (
        b'{"n":1.10,"temperature":0,"s":"\\u0041\xc3\xa9","deep":{ "x" :[1 ,2]},"m":1e2,"guard":["pii"]}'
    )
    async with stage(experiment=an_experiment(CONTROL, SET)) as (up, tap):
        path = up.on(answers())
        if framing == "chunked":
            raw = request("POST", path, "Transfer-Encoding: chunked", "Trailer: X", "Z: z")
            raw += chunked(body[:30], body[30:])
        else:
            raw = request("POST", path, "Z: z", body=body, version="1.0" if framing == "http10" else "1.1")
        assert (await sent(up, tap, raw, path, pieces)).endswith(b"\r\n\r\n" + changed)
        head = up.call(path).head
        assert head.all("content-length") == [b"%d" % len(changed)]
        assert head.all("transfer-encoding") == head.all("trailer") == []
        assert head.get("z") == b"z"
        recorded = await tap.meter.closed(1)
        assert recorded.request == raw
        closing = recorded.closing
        assert (closing.route, closing.excluded) == ("body guard,temperature", None)
        assert closing.request_bytes == len(raw)
        assert recorded.of(FrameKind.SUBMIT)


LONG = b'{"a":"%s"}' % (b"x" * 3_000)


@pytest.mark.parametrize(
    ("reason", "fields", "body"),
    [
        ("not_json", [], b"hello"),
        ("not_json", [], b"[1]"),
        ("not_json", [], b'{"a":' + b"[" * 1_900),
        ("no_body", [], b""),
        ("encoded", ["Content-Encoding: gzip"], b"{}"),
        ("digest", ["Content-Digest: sha-256=:x:"], b"{}"),
        ("too_long", [], LONG),
        ("too_long", ["Transfer-Encoding: chunked"], chunked(*[b"x" * 500] * 20)),
        ("trailers", ["Transfer-Encoding: chunked"], chunked(b"{}", trailers=b"X: y\r\n")),
    ],
)
async def test_a_body_that_cannot_be_changed_goes_as_it_came(
    reason: str, fields: list[str], body: bytes
) -> None:
    async with stage(experiment=an_experiment(CONTROL, SET, body_bytes=2_000)) as (up, tap):
        path = up.on(answers())
        if "Transfer-Encoding: chunked" in fields:
            raw = request("POST", path, *fields) + body
        else:
            raw = request("POST", path, *fields, body=body)
        assert await sent(up, tap, raw, path, pieces=15 if reason == "too_long" else 1) == plain(up, raw)
        closing = await tap.closing()
        assert (closing.arm, closing.excluded, closing.route) == ("set", reason, None)


async def test_a_request_with_an_expectation_is_not_held_back() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET, unit="conversation")) as (up, tap):

        async def continues(call: Any) -> None:
            await call.say(b"HTTP/1.1 100 Continue\r\n\r\n")
            await says(OK)(call)

        client = await tap.client()
        await client.send(request("POST", up.on(continues), "Expect: 100-continue", "Content-Length: 2"))
        assert (await client.head()).line == b"HTTP/1.1 100 Continue"
        await client.send(b"{}")
        assert (await client.answer(b"POST")).data == b"ok"
        assert (await tap.closing()).excluded == "expect_continue"


@pytest.mark.parametrize("unit", ["request", "conversation"])
@pytest.mark.parametrize("framing", ["Content-Length: 1600", "Transfer-Encoding: chunked"])
async def test_bodies_without_room_go_the_control_arms_way_and_are_excluded(framing: str, unit: str) -> None:
    """Ten uploads under way hold 1,000 bytes each, of 4,500 for all together."""
    experiment = an_experiment(CONTROL, SET, unit=unit, held_bytes=4_500)
    async with stage(experiment=experiment) as (up, tap):
        path = up.on(answers())
        whole = b'{"a":"' + b"x" * 1_592 + b'"}'
        body = chunked(whole) if framing.endswith("chunked") else whole
        clients = [await tap.client() for _ in range(10)]
        for client in clients:
            await client.send(request("POST", path, framing) + body[:1_000])
        await wait_until(lambda: len(up.calls_to(path)) == 6)
        for client in clients:
            await client.send(body[1_000:])
            assert (await client.answer(b"POST")).data == b"ok"
        told = [await tap.closing(seq) for seq in range(1, 11)]
        assert Counter((one.arm, one.excluded) for one in told) == {
            ("set", None): 4,
            ("control", "no_room"): 6,
        }
        same = Counter(call.payload.data == whole for call in up.calls_to(path) if call.payload is not None)
        assert same == {True: 6, False: 4}
        await wait_until(lambda: not tap.relay.flows)
        assert room_of(tap) == 4_500


async def test_unfinished_bodies_do_not_keep_others_out() -> None:
    """Four uploads that never end hold all the room; a fifth one takes that of the oldest."""
    async with stage(experiment=an_experiment(CONTROL, SET, held_bytes=4_500)) as (up, tap):
        path, whole = up.on(answers()), b'{"a":"' + b"x" * 1_592 + b'"}'
        stalled = [await tap.client() for _ in range(4)]
        for client in stalled:
            await client.send(request("POST", path, "Content-Length: 1600") + whole[:1_100])
        await wait_until(lambda: room_of(tap) == 100)
        assert up.calls == []
        client = await tap.client()
        await client.send(request("POST", path, "Content-Length: 1600") + whole[:1_000])
        await wait_until(lambda: len(up.calls) == 1)  # the oldest one's, without its end
        await client.send(whole[1_000:])
        assert (await client.answer(b"POST")).data == b"ok"
        closing = await tap.closing(5)
        assert (closing.arm, closing.excluded) == ("set", None)
        await stalled[0].send(whole[1_100:])
        assert (await stalled[0].answer(b"POST")).data == b"ok"
        closing = await tap.closing(1)
        assert (closing.arm, closing.excluded) == ("control", "no_room")
        for one in stalled:
            one.close()
        await wait_until(lambda: not tap.relay.flows)
        assert room_of(tap) == 4_500


@pytest.mark.parametrize(
    ("end", "outcome", "arm"),
    [
        ("the client leaves", "client_cancelled", None),
        ("the framing breaks", "client_error", "set"),
        ("the upstream refuses", "upstream_error", "set"),
    ],
)
async def test_room_is_given_back_however_a_held_request_ends(
    end: str, outcome: str, arm: str | None
) -> None:
    unit = "conversation" if end == "the client leaves" else "request"
    async with stage(experiment=an_experiment(CONTROL, SET, unit=unit, held_bytes=4_500)) as (up, tap):
        client = await tap.client()
        await client.send(request("POST", up.on(answers()), "Transfer-Encoding: chunked") + b"400\r\n{")
        await wait_until(lambda: room_of(tap) < 4_500)
        if end == "the client leaves":
            client.close()
        elif end == "the framing breaks":
            await client.send(b"x" * 1_023 + b"??")
        else:
            await up.stop()
            await client.send(b"x" * 1_023 + b"\r\n0\r\n\r\n")
        await wait_until(lambda: not tap.relay.flows)
        assert (room_of(tap), up.connections) == (4_500, 0)
        recorded = await tap.meter.closed(1)
        assert (recorded.closing.outcome, recorded.closing.arm) == (outcome, arm)
        assert recorded.kinds.count(FrameKind.ARM) == int(arm is not None), "a dead arm's requests count"


async def test_an_upstream_arm_goes_elsewhere_on_connections_of_its_own() -> None:
    async with upstream() as other:
        there = other.on(answers(b"there"))
        experiment = an_experiment(CONTROL, {"name": "new", "upstream": other.url + "/v2"})
        async with stage(experiment=experiment) as (up, tap):
            assert up.on(answers(b"here")) == there
            client = await tap.client()
            for seq in range(1, 61):
                answer = await client.post(there, b"{}")
                closing = await tap.closing(seq)
                assert answer.data == {"control": b"here", "new": b"there"}[closing.arm or ""]
            assert {c.head.get("host") for c in other.calls} == {b"127.0.0.1:%d" % other.port}
            assert {c.target for c in other.calls} == {b"/v2" + there.encode()}
            assert (up.connections, other.connections) == (1, 1)
            assert 15 < len(other.calls) < 45
            status = tap.relay.reporter.status()
            assert (status.upstream_connects, status.upstream_reuses, status.upstream_idle) == (2, 58, 2)


async def test_in_aa_mode_arms_are_dealt_and_nothing_is_changed() -> None:
    async with upstream() as other:
        arms = [CONTROL, MARKED | {"weight": 1}, SET | {"weight": 1}, {"name": "new", "upstream": other.url}]
        async with stage(experiment=an_experiment(*arms, aa=True)) as (up, tap):
            path = up.on(answers())
            raw = request("POST", path, body=b'{"a" : 1}')
            seen: Counter[str | None] = Counter()
            for seq in range(1, 41):
                assert await sent(up, tap, raw, path) == plain(up, raw)
                closing = await tap.closing(seq)
                seen[closing.arm] += 1
                assert (closing.route, closing.excluded) == (None, None)
            assert set(seen) == {"control", "marked", "set", "new"}
            assert not other.calls


async def test_what_is_pipelined_behind_a_held_request_is_answered_in_order() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET)) as (up, tap):
        paths = [up.on(answers(b"%d" % i)) for i in range(4)]
        client = await tap.client()
        await client.send(
            b"".join(request("POST", path, body=b'{"a":%d}' % i) for i, path in enumerate(paths))
        )
        assert [(await client.answer(b"POST")).data for _ in paths] == [b"0", b"1", b"2", b"3"]
        payloads = [up.call(path).payload for path in paths]
        assert [p.data for p in payloads if p] == [
            b'{"a":%d,"guard":["pii"],"temperature":0}' % i for i in range(4)
        ]


async def test_a_body_that_never_comes_is_given_up() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET), idle_timeout=ms(300)) as (up, tap):
        answer = await tap.ask(request("POST", up.on(answers()), "Content-Length: 100") + b'{"a":')
        assert answer.status == 408
        assert (await tap.closing()).arm == "set"


# ---------------------------------------------------------------- units


async def dealt(tap: Tapped, raws: list[bytes]) -> tuple[list[Closing], list[Assigned]]:
    """Ask each on a connection of its own; how each was closed, and what the meter was told of its arm."""
    for raw in raws:
        assert (await tap.ask(raw)).status == 200
    closings = [await tap.closing(seq) for seq in range(1, len(raws) + 1)]
    told = [f.data for f in tap.meter.frames if f.kind is FrameKind.ARM]
    return closings, [msgspec.json.decode(data, type=Assigned) for data in told]


async def test_a_request_can_be_dealt_again_by_its_id() -> None:
    experiment = an_experiment({**CONTROL, "weight": 2}, {**MARKED, "weight": 1})
    async with stage(experiment=experiment) as (up, tap):
        closings, told = await dealt(tap, [request("POST", up.on(answers()), body=b"{}")] * 30)
        assigner = Assigner("pepper", "test", [2, 1])
        for seq, closing in enumerate(closings, 1):
            place, unit = assigner.assign(request_unit("test.0.1", seq))
            assert (closing.arm, closing.unit) == (("control", "marked")[place], unit)
        assert told == [Assigned(arm=c.arm or "", unit=c.unit or "") for c in closings]
        kinds = tap.meter.exchange(3).kinds
        assert kinds.index(FrameKind.ARM) < kinds.index(FrameKind.RESPONSE_HEAD)


def chat(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return json.dumps({"messages": messages, **fields}).encode()


POST = request("POST", "%s", "Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("unit", "same", "other"),
    [
        (
            "conversation",
            (request("POST", "%s", body=chat("hello")), POST + chunked(chat("hello", "yes?", "more", n=1))),
            request("POST", "%s", body=chat("hallo")),
        ),
        (
            "conversation",
            tuple(
                request("POST", "%s", *fields, body=chat())
                for fields in (["X-Session-Id: s1"], ["x-session-id: s1", "Authorization: new"])
            ),
            request("POST", "%s", "X-Session-Id: s2", body=chat()),
        ),
        (
            "tenant",
            tuple(
                request("POST", "%s", *fields, body=chat())
                for fields in (["X-Api-Key: k"], ["x-api-key: k", "X-Session-Id: 1"])
            ),
            request("POST", "%s", "X-Api-Key: l", body=chat()),
        ),
    ],
)
async def test_requests_of_one_unit_are_dealt_alike(
    unit: str, same: tuple[bytes, bytes], other: bytes
) -> None:
    async with stage(experiment=an_experiment(unit=unit)) as (up, tap):
        path = up.on(answers()).encode()
        closings, told = await dealt(tap, [raw.replace(b"%s", path) for raw in (*same, other)])
        a, b, c = (closing.unit for closing in closings)
        assert a == b != c
        assert not any(one.single for one in told)


@pytest.mark.parametrize(
    ("unit", "raw"),
    [
        ("conversation", request("POST", "%s", body=b"nonsense")),
        ("conversation", request("POST", "%s", "Content-Encoding: br", body=b"xx")),
        ("conversation", request("POST", "%s", body=chat("x" * 4_000))),
        ("conversation", request("POST", "%s")),
        ("tenant", request("POST", "%s", body=chat("hello"))),
    ],
)
async def test_without_a_unit_to_be_found_a_request_is_one_by_itself_and_counted(
    unit: str, raw: bytes
) -> None:
    async with stage(experiment=an_experiment(unit=unit, body_bytes=2_000)) as (up, tap):
        closings, told = await dealt(tap, [raw.replace(b"%s", up.on(answers()).encode())] * 2)
        for seq, closing in enumerate(closings, 1):
            assert closing.unit == Assigner("pepper", "test", [1, 1]).assign(request_unit("test.0.1", seq))[1]
        assert [one.single for one in told] == [True, True]
