"""Experiments on the way: what each arm does to a request, and that nothing else changes anything."""

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
import pytest

from llmtap.channel.experiment import Assigner, request_unit
from llmtap.channel.frames import Assigned, Closing, FrameKind
from tests.support.servers.peer import chunked, scene, wait_until
from tests.support.servers.proxy import Tapped, ms, stage, tapped
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Upstream, answers, upstream
from tests.support.traffic.experiments import an_experiment

CONTROL = {"name": "control"}
ALL = 1e9
"""Weight of the arm that a test is about: the other one gets nothing."""
MARKED = {"name": "marked", "weight": ALL, "headers": {"X-Arm": "b", "X-Repeat": "one"}}
SET = {"name": "set", "weight": ALL, "body": {"guard": ["pii"], "temperature": 0}}


async def closing(tap: Tapped, seq: int) -> Closing:
    return (await tap.meter.closed(seq)).closing


async def posted(up: Upstream, tap: Tapped, raw: bytes, path: str) -> tuple[bytes, bytes]:
    """Head and body as they reached the upstream."""
    client = await tap.client()
    answer = await client.ask(raw)
    assert (answer.status, answer.data) == (200, b"ok")
    call = up.calls_to(path)[-1]
    assert call.payload is not None
    return call.head.raw, call.payload.raw


def room_of(tap: Tapped) -> int:
    """Return what is left of the room for held bodies, in bytes."""
    assert tap.relay.context.router is not None
    return tap.relay.context.router.room.left


def plain(up: Upstream, raw: bytes) -> bytes:
    """What reaches the upstream without an experiment: the same, under the upstream's name."""
    return raw.replace(b"Host: client.test", b"Host: 127.0.0.1:%d" % up.port)


# ---------------------------------------------------------------- off


@scene
async def test_while_it_is_off_nothing_is_changed_or_noted() -> None:
    async with stage(experiment=an_experiment(CONTROL, MARKED, enabled=False)) as (up, tap):
        path = up.on(answers())
        raw = request("POST", path, body=b'{"a":1}')
        head, body = await posted(up, tap, raw, path)
        assert head + body == plain(up, raw)
        recorded = await tap.meter.closed(1)
        assert FrameKind.ARM not in recorded.kinds
        assert (recorded.closing.arm, recorded.closing.unit) == (None, None)


@pytest.mark.parametrize("raw", [b"GET %s HTTP/1.1\r\nHost: client.test\r\n\r\n"])
@scene
async def test_what_is_no_post_takes_no_part(raw: bytes) -> None:
    async with stage(experiment=an_experiment(CONTROL, MARKED)) as (up, tap):
        path = up.on(answers())
        assert (await posted(up, tap, raw % path.encode(), path))[0] == plain(up, raw % path.encode())
        assert (await closing(tap, 1)).arm is None


# ---------------------------------------------------------------- arms


BODIES = [
    b"{}", b'{"a": 1,  "b" : [ 1.0, 1e400, "\\u00e9\xc3\xa9" ] }', b"not json", b"", b"\x1f\x8b gz", b"[1]",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("unit", ["request", "conversation", "tenant"])
@pytest.mark.parametrize("pieces", [1, 3])
@scene
async def test_a_control_passes_byte_for_byte(body: bytes, unit: str, pieces: int) -> None:
    """With every unit, whole or in pieces, framed by length or in chunks."""
    experiment = an_experiment({**CONTROL, "weight": ALL}, {**SET, "weight": 1}, unit=unit)
    async with stage(experiment=experiment) as (up, tap):
        path = up.on(answers())
        framed = [
            request("POST", path, "X-Odd:  a", "x-odd: b", body=body),
            request("POST", path, "Transfer-Encoding: chunked") + chunked(body[:2], body[2:]),
        ]
        for i, raw in enumerate(framed):
            client = await tap.client()
            step = -(-len(raw) // pieces)
            for at in range(0, len(raw), step):
                await client.send(raw[at : at + step])
                await asyncio.sleep(0.002 if pieces > 1 else 0)
            assert (await client.answer(b"POST")).status == 200
            call = up.calls_to(path)[-1]
            assert call.payload is not None
            sent = raw.replace(b"X-Odd:  a", b"X-Odd: a")  # white space around a value is no part of it
            assert call.head.raw + call.payload.raw == plain(up, sent)
            recorded = await tap.meter.closed(i + 1)
            assert recorded.request == raw
            assert (recorded.closing.arm, recorded.closing.route) == ("control", None)
            assert recorded.closing.excluded is None


@scene
async def test_a_headers_arm_sets_fields_and_changes_nothing_else() -> None:
    async with stage(experiment=an_experiment(CONTROL, MARKED)) as (up, tap):
        path = up.on(answers())
        body = b'{"a" : 1}'
        raw = request("POST", path, "x-repeat: two", "Keep: me", "X-REPEAT: three", body=body)
        head, sent = await posted(up, tap, raw, path)
        expected = plain(up, request("POST", path, "Keep: me", body=body))
        expected = expected.replace(b"\r\n\r\n", b"\r\nX-Arm: b\r\nX-Repeat: one\r\n\r\n")
        assert head + sent == expected
        recorded = await tap.meter.closed(1)
        assert recorded.request == raw, "the meter is shown what the client sent"
        assert recorded.closing.route == "headers X-Arm,X-Repeat"


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("coding", ["length", "chunked"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@scene
async def test_a_body_arm_sets_fields_and_keeps_the_bytes_of_all_others(
    pieces: int, coding: str, version: str
) -> None:
    if (coding, version) == ("chunked", "1.0"):
        return  # HTTP/1.0 has no chunks
    async with stage(experiment=an_experiment(CONTROL, SET)) as (up, tap):
        path = up.on(answers())
        body = b'{ "n": 1.10, "temperature" : 0.7, "s": "\\u0041\xc3\xa9", "deep": { "x" :[1 ,2]}, "m": 1e2 }'
        expected = (
            b'{"n":1.10,"temperature":0,"s":"\\u0041\xc3\xa9","deep":{ "x" :[1 ,2]},"m":1e2,"guard":["pii"]}'
        )
        if coding == "chunked":
            raw = request("POST", path, "Transfer-Encoding: chunked", "Trailer: X", "Z: z") + chunked(
                body[:30], body[30:]
            )
        else:
            raw = request("POST", path, "Z: z", body=body, version=version)
        client = await tap.client()
        step = -(-len(raw) // pieces)
        for at in range(0, len(raw), step):
            await client.send(raw[at : at + step])
            await asyncio.sleep(0.002 if pieces > 1 else 0)
        assert (await client.answer(b"POST")).data == b"ok"
        call = up.call(path)
        assert call.payload is not None
        assert call.payload.data == expected
        assert call.head.all("content-length") == [b"%d" % len(expected)]
        assert call.head.all("transfer-encoding") == call.head.all("trailer") == []
        assert call.head.get("z") == b"z"
        recorded = await tap.meter.closed(1)
        assert recorded.request == raw
        assert recorded.closing.route == "body guard,temperature"
        assert recorded.closing.excluded is None
        assert recorded.closing.request_bytes == len(raw)
        assert recorded.of(FrameKind.SUBMIT)


@pytest.mark.parametrize(
    ("reason", "fields", "body"),
    [
        ("not_json", [], b"hello"), ("not_json", [], b"[1]"), ("not_json", [], b'{"a":}'),
        ("not_json", [], b'{"a":' + b"[" * 5_000), ("no_body", [], b""),
        ("encoded", ["Content-Encoding: gzip"], b"{}"), ("digest", ["Content-Digest: sha-256=:x:"], b"{}"),
        ("too_long", [], b'{"a":"%s"}' % (b"x" * 3_000)),
    ],
)  # fmt: skip
@scene
async def test_a_body_that_cannot_be_changed_goes_as_it_came(
    reason: str, fields: list[str], body: bytes
) -> None:
    limit = 10_000 if reason == "not_json" else 2_000
    async with stage(experiment=an_experiment(CONTROL, SET, body_bytes=limit)) as (up, tap):
        path = up.on(answers())
        raw = request("POST", path, *fields, body=body)
        head, sent = await posted(up, tap, raw, path)
        assert head + sent == plain(up, raw)
        told = await closing(tap, 1)
        assert (told.arm, told.excluded, told.route) == ("set", reason, None)


@scene
async def test_a_chunked_body_that_grows_too_long_is_let_go_on_the_way() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET, body_bytes=2_000)) as (up, tap):
        path = up.on(answers())
        raw = request("POST", path, "Transfer-Encoding: chunked") + chunked(*[b"x" * 500] * 20)
        client = await tap.client()
        for at in range(0, len(raw), 700):
            await client.send(raw[at : at + 700])
            await asyncio.sleep(0.001)
        assert (await client.answer(b"POST")).data == b"ok"
        payload = up.call(path).payload
        assert payload is not None
        assert up.call(path).head.raw + payload.raw == plain(up, raw)
        assert (await closing(tap, 1)).excluded == "too_long"


@pytest.mark.parametrize("unit", ["request", "conversation"])
@pytest.mark.parametrize("framing", ["Content-Length: 1600", "Transfer-Encoding: chunked"])
@scene
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
        told = [await closing(tap, seq) for seq in range(1, 11)]
        assert Counter((one.arm, one.excluded) for one in told) == {
            ("set", None): 4, ("control", "no_room"): 6,
        }  # fmt: skip
        sent = Counter(call.payload.data == whole for call in up.calls_to(path) if call.payload is not None)
        assert sent == {True: 6, False: 4}
        await wait_until(lambda: not tap.relay.flows)
        assert room_of(tap) == 4_500


@pytest.mark.parametrize("end", ["the client leaves", "the framing breaks", "the upstream refuses"])
@scene
async def test_room_is_given_back_however_a_held_request_ends(end: str) -> None:
    async with stage(experiment=an_experiment(CONTROL, SET, held_bytes=4_500)) as (up, tap):
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
        assert room_of(tap) == 4_500


@scene
async def test_trailers_and_expectations_are_not_held_back() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET, unit="conversation")) as (up, tap):
        path = up.on(answers())
        raw = request("POST", path, "Transfer-Encoding: chunked") + chunked(b"{}", trailers=b"X: y\r\n")
        head, body = await posted(up, tap, raw, path)
        assert head + body == plain(up, raw)
        assert (await closing(tap, 1)).excluded == "trailers"

        async def continues(call: Any) -> None:
            await call.say(b"HTTP/1.1 100 Continue\r\n\r\n")
            await call.body()
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        client = await tap.client()
        raw = request("POST", up.on(continues), "Expect: 100-continue", "Content-Length: 2")
        await client.send(raw)
        assert (await client.head()).line == b"HTTP/1.1 100 Continue"
        await client.send(b"{}")
        assert (await client.answer(b"POST")).data == b"ok"
        assert (await closing(tap, 2)).excluded == "expect_continue"


@scene
async def test_an_upstream_arm_goes_elsewhere_on_connections_of_its_own() -> None:
    async with upstream() as other:
        there = other.on(answers(b"there"))
        experiment = an_experiment(CONTROL, {"name": "new", "upstream": other.url + "/v2"})
        async with stage(experiment=experiment) as (up, tap):
            assert up.on(answers(b"here")) == there
            client = await tap.client()
            for seq in range(1, 61):
                answer = await client.post(there, b"{}")
                told = await closing(tap, seq)
                assert answer.data == {"control": b"here", "new": b"there"}[told.arm or ""]
            assert {c.head.get("host") for c in other.calls} == {b"127.0.0.1:%d" % other.port}
            assert {c.target for c in other.calls} == {b"/v2" + there.encode()}
            assert (up.connections, other.connections) == (1, 1)
            assert 15 < len(other.calls) < 45
            status = tap.relay.reporter.status()
            assert (status.upstream_connects, status.upstream_reuses, status.upstream_idle) == (2, 58, 2)


@scene
async def test_an_arm_whose_upstream_is_away_fails_and_says_which_arm() -> None:
    async with upstream() as gone:
        url = gone.url
    async with stage(experiment=an_experiment(CONTROL, {"name": "new", "weight": ALL, "upstream": url})) as (
        up,
        tap,
    ):
        client = await tap.client()
        assert (await client.post(up.on(answers()), b"{}")).status == 502
        recorded = await tap.meter.closed(1)
        assert (recorded.closing.arm, recorded.closing.outcome) == ("new", "upstream_error")
        assert recorded.kinds.count(FrameKind.ARM) == 1, "a dead arm's requests count as dealt"


@scene
async def test_in_aa_mode_arms_are_dealt_and_nothing_is_changed() -> None:
    async with upstream() as other:
        arms = [CONTROL, MARKED | {"weight": 1}, SET | {"weight": 1}, {"name": "new", "upstream": other.url}]
        async with stage(experiment=an_experiment(*arms, aa=True)) as (up, tap):
            path = up.on(answers())
            raw = request("POST", path, body=b'{"a" : 1}')
            seen: Counter[str | None] = Counter()
            for seq in range(1, 81):
                head, body = await posted(up, tap, raw, path)
                assert head + body == plain(up, raw)
                told = await closing(tap, seq)
                seen[told.arm] += 1
                assert (told.route, told.excluded) == (None, None)
            assert set(seen) == {"control", "marked", "set", "new"}
            assert not other.calls


# ---------------------------------------------------------------- units


async def arms_of(tap: Tapped, raws: list[bytes], first: int) -> list[Closing]:
    """Ask each on a connection of its own; how each was closed."""
    for raw in raws:
        client = await RawClient.connect(tap.port)
        assert (await client.ask(raw)).status == 200
        client.close()
    return [await closing(tap, first + i) for i in range(len(raws))]


@scene
async def test_a_request_can_be_dealt_again_by_its_id() -> None:
    experiment = an_experiment({**CONTROL, "weight": 2}, {**MARKED, "weight": 1})
    async with stage(experiment=experiment) as (up, tap):
        path = up.on(answers())
        told = await arms_of(tap, [request("POST", path, body=b"{}")] * 60, 1)
        assigner = Assigner("pepper", "test", [2, 1])
        for seq, one in enumerate(told, 1):
            place, unit = assigner.assign(request_unit("test.0.1", seq))
            assert (one.arm, one.unit) == (("control", "marked")[place], unit)
        recorded = tap.meter.exchange(3)
        assert recorded.kinds.index(FrameKind.ARM) < recorded.kinds.index(FrameKind.RESPONSE_HEAD)
        said = msgspec.json.decode(recorded.one(FrameKind.ARM).data, type=Assigned)
        assert said == Assigned(arm=told[2].arm or "", unit=told[2].unit or "")


def chat(*contents: str, **fields: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return json.dumps({"messages": messages, **fields}).encode()


@scene
async def test_a_conversation_stays_in_its_arm_over_connections_relays_and_restarts() -> None:
    experiment = an_experiment(CONTROL, {**MARKED, "weight": 1}, unit="conversation")
    async with upstream() as up:
        path = up.on(answers())
        turns = [
            [
                request("POST", path, body=chat(f"hello {i}")),
                request("POST", path, body=chat(f"hello {i}", "yes?", "more", model="x")),
                request("POST", path, "Transfer-Encoding: chunked")
                + chunked(chat(f"hello {i}", "yes?", "more", "still", "on")),
            ]
            for i in range(20)
        ]
        found: list[set[tuple[str | None, str | None]]] = [set() for _ in turns]
        for name in ("one.0.1", "one.1.2", "again.0.1"):
            async with tapped(up.url, experiment=experiment, name=name) as tap:
                told = await arms_of(tap, [raw for talk in turns for raw in talk], 1)
                for i, one in enumerate(told):
                    found[i // 3].add((one.arm, one.unit))
        assert all(len(kinds) == 1 for kinds in found)
        assert len({unit for kinds in found for _, unit in kinds}) == 20
        assert len({arm for kinds in found for arm, _ in kinds}) == 2


@pytest.mark.parametrize(
    ("unit", "same", "other"),
    [
        (
            "conversation",
            (["X-Session-Id: s1"], ["x-session-id: s1", "Authorization: new"]),
            ["X-Session-Id: s2"],
        ),
        ("tenant", (["Authorization: k"], ["authorization: k", "X-Session-Id: 1"]), ["Authorization: l"]),
        ("tenant", (["X-Api-Key: k"], ["x-api-key: k"]), ["X-Api-Key: l"]),
    ],
)
@scene
async def test_a_header_names_the_unit(
    unit: str, same: tuple[list[str], list[str]], other: list[str]
) -> None:
    async with stage(experiment=an_experiment(unit=unit)) as (up, tap):
        path = up.on(answers())
        raws = [request("POST", path, *fields, body=b'{"messages":[]}') for fields in (*same, other)]
        a, b, c = await arms_of(tap, raws, 1)
        assert a.unit == b.unit != c.unit
        for frame in (f for f in tap.meter.frames if f.kind is FrameKind.ARM):
            assert not msgspec.json.decode(frame.data, type=Assigned).single


@pytest.mark.parametrize(
    ("unit", "raw"),
    [
        ("conversation", request("POST", "%s", body=b"nonsense")),
        ("conversation", request("POST", "%s", body=b'{"messages":[{"role":"assistant","content":"x"}]}')),
        ("conversation", request("POST", "%s", "Content-Encoding: br", body=b"xx")),
        ("conversation", request("POST", "%s", body=chat("x" * 4_000))),
        ("conversation", request("POST", "%s")),
        ("tenant", request("POST", "%s", body=chat("hello"))),
    ],
)
@scene
async def test_without_a_unit_to_be_found_a_request_is_one_by_itself_and_counted(
    unit: str, raw: bytes
) -> None:
    async with stage(experiment=an_experiment(unit=unit, body_bytes=2_000)) as (up, tap):
        path = up.on(answers()).encode()
        told = await arms_of(tap, [raw.replace(b"%s", path)] * 2, 1)
        for seq, one in enumerate(told, 1):
            assert one.unit == Assigner("pepper", "test", [1, 1]).assign(request_unit("test.0.1", seq))[1]
        said = [
            msgspec.json.decode(f.data, type=Assigned) for f in tap.meter.frames if f.kind is FrameKind.ARM
        ]
        assert [one.single for one in said] == [True, True]


# ---------------------------------------------------------------- ends


@scene
async def test_a_client_that_leaves_while_its_request_is_held_back() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET, unit="conversation")) as (up, tap):
        client = await tap.client()
        await client.send(request("POST", up.on(answers()), "Content-Length: 100") + b'{"a":')
        await wait_until(lambda: tap.relay.flows)
        client.close()
        told = await closing(tap, 1)
        assert (told.outcome, told.arm) == ("client_cancelled", None)
        assert up.connections == 0


@scene
async def test_what_is_pipelined_behind_a_held_request_is_answered_in_order() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET)) as (up, tap):
        paths = [up.on(answers(b"%d" % i)) for i in range(4)]
        client = await tap.client()
        await client.send(
            b"".join(request("POST", path, body=b'{"a":%d}' % i) for i, path in enumerate(paths))
        )
        for i in range(4):
            assert (await client.answer(b"POST")).data == b"%d" % i
        sent = [up.call(path).payload for path in paths]
        assert [p.data for p in sent if p] == [
            b'{"a":%d,"guard":["pii"],"temperature":0}' % i for i in range(4)
        ]


@scene
async def test_a_body_that_never_comes_is_given_up() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET), idle_timeout=ms(300)) as (up, tap):
        client = await tap.client()
        answer = await client.ask(request("POST", up.on(answers()), "Content-Length: 100") + b'{"a":')
        assert answer.status == 408
        assert (await closing(tap, 1)).arm == "set"


@scene
async def test_a_malformed_body_is_refused_while_it_is_held_back() -> None:
    async with stage(experiment=an_experiment(CONTROL, SET)) as (up, tap):
        client = await tap.client()
        raw = request("POST", up.on(answers()), "Transfer-Encoding: chunked") + b"5\r\nhelloXX"
        assert (await client.ask(raw)).status == 400
        assert up.connections == 0
