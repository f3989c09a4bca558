"""Clients of model APIs that took the admin port for the proxy's."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from llmtap.channel.frames import Hello
from llmtap.clock import ManualClock
from llmtap.meter.admin.lost_clients import is_for_models
from llmtap.meter.admin.openapi import ROUTES
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline


def asked(
    path: str, *, token: str | None = None, listen: str = "http://127.0.0.1:8080", **headers: str
) -> tuple[int, Any, Any]:
    """Status, header fields and JSON of the answer to a POST."""

    async def run() -> tuple[int, Any, Any]:
        pipeline = ExchangePipeline(MeterOptions(), ManualClock())
        pipeline.relays.join(
            Hello(relay="r", pid=1, clock="mono", listen=listen, anchor_mono_ns=0, anchor_wall_ns=0)
        )
        app = admin_app(pipeline, token)
        async with (
            TestClient(TestServer(app)) as client,
            client.post(path, data=b"{}", headers=headers) as answer,
        ):
            return answer.status, answer.headers, json.loads(await answer.read())

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/chat/completions", "/api/chat"])
def test_a_lost_client_gets_an_error_in_openais_form_with_the_proxys_address(path: str) -> None:
    status, headers, body = asked(path)
    assert (status, headers["X-Llmtap-Error"]) == (404, "admin_port")
    error = body["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "admin_port")
    assert "http://127.0.0.1:8080" in error["message"]


def test_the_address_of_all_interfaces_becomes_the_host_that_the_client_used() -> None:
    *_, body = asked("/v1/models", listen="http://0.0.0.0:8080", Host="localhost:9464")
    assert "http://localhost:8080" in body["error"]["message"]


def test_a_stranger_learns_what_the_port_is_and_not_where_the_proxy_is() -> None:
    """Such a client sends the key of another server, which must not become a question for a token."""
    for more in ({"token": "secret"}, {"Host": "evil.example:9464"}):
        status, _, body = asked("/v1/models", **more)
        assert (status, body["error"]["code"]) == (404, "admin_port")
        assert "8080" not in body["error"]["message"]


def test_no_path_of_the_admin_port_is_taken_for_one_of_a_model() -> None:
    assert not [route.path for route in ROUTES if is_for_models(route.path)]
