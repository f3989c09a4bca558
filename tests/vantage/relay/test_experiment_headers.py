"""Invariant: the upstream gets an arm's header fields as configured, each once, whatever the client sends."""

from typing import Any

import pytest

from tests.support.servers.peer import chunked, scene, wait_until
from tests.support.servers.proxy import stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CLOSE, Call, answers
from tests.support.traffic.experiments import an_experiment

CONTROL = {"name": "control"}
GUARD = {"name": "guarded", "weight": 1e9, "headers": {"X-Guard": "on", "Authorization": "Bearer ours"}}
OWN = ("x-guard: off", "X-GUARD: none", "authorization: Bearer theirs")
NAMINGS = [
    ["Connection: X-Guard, Authorization"],
    ["connection: x-guard", "CONNECTION: aUTHORIZATION"],
    ["Connection: close , \t x-GUARD\t ,, authorization,"],
    ["Connection: keep-alive", "Connection: te, X-Guard", "TE: trailers", "Connection: Authorization"],
    ["Connection: keep-alive"],
    [],
]
WEBSOCKET = ["Upgrade: websocket", "Sec-WebSocket-Version: 13", "Connection: Upgrade, X-Guard, Authorization"]


def assert_guarded(call: Call) -> None:
    assert (call.head.all("x-guard"), call.head.all("authorization")) == ([b"on"], [b"Bearer ours"])


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("own", [(), OWN])
@pytest.mark.parametrize("unit", ["request", "conversation"])
@pytest.mark.parametrize("options", [{}, {"via": True, "forwarded_for": True, "request_id": "make"}])
@scene
async def test_no_client_names_an_arms_fields_away(
    naming: list[str], own: tuple[str, ...], unit: str, options: dict[str, Any]
) -> None:
    async with stage(experiment=an_experiment(CONTROL, GUARD, unit=unit), **options) as (up, tap):
        path = up.on(answers())
        for version in ("1.1", "1.0"):
            client = await tap.client()
            raw = request("POST", path, *own, *naming, "X-Last: 1", body=b"{}", version=version)
            assert (await client.ask(raw)).status == 200
            call = up.calls_to(path)[-1]
            assert_guarded(call)
            assert call.head.get("x-last") == b"1"
            assert call.head.all("connection") == ([b"TE"] if "TE: trailers" in naming else [])
        closing = (await tap.meter.closed(1)).closing
        assert (closing.arm, closing.excluded) == ("guarded", None)


@scene
async def test_no_websocket_names_an_arms_fields_away() -> None:
    async def refuses(call: Call) -> str:
        await call.say(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        return CLOSE

    async with stage(experiment=an_experiment(CONTROL, GUARD)) as (up, tap):
        path = up.on(refuses)
        client = await tap.client()
        assert (await client.ask(request("GET", path, *OWN, *WEBSOCKET))).status == 403
        assert_guarded(up.call(path))
        assert (up.call(path).head.get("connection"), up.call(path).head.get("upgrade")) == (
            b"Upgrade",
            b"websocket",
        )


@scene
async def test_fields_of_the_relay_itself_cannot_be_named_away() -> None:
    async with stage(via=True, forwarded_for=True, request_id="make") as (up, tap):
        path = up.on(answers())
        client = await tap.client()
        raw = request(
            "POST", path, "X-Request-Id: theirs", "X-Forwarded-For: 9.9.9.9", "Via: 1.1 other",
            "Connection: Host, x-request-ID", "connection: Via,X-FORWARDED-FOR", body=b"{}",
        )  # fmt: skip
        assert (await client.ask(raw)).status == 200
        head = up.call(path).head
        assert head.get("host") == b"127.0.0.1:%d" % up.port
        assert (head.get("via"), head.get("x-forwarded-for")) == (b"1.1 llmtap", b"127.0.0.1")
        made = head.get("x-request-id")
        assert made is not None and made != b"theirs"


@scene
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
@scene
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
@scene
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
