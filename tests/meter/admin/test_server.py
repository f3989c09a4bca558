"""Admin port: guard, origin checks, TLS, answers."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hdrh.histogram import HdrHistogram
from prometheus_client.parser import text_string_to_metric_families

import llmtap
from llmtap.capture.options import CaptureOptions
from llmtap.capture.schema import CaptureInfo
from llmtap.channel.experiment import switch_word
from llmtap.channel.frames import Hello
from llmtap.clock import SystemClock
from llmtap.exchange.outcome import Outcome
from llmtap.meter.pipeline.recorder import Recorder
from tests.meter.admin.serving import Client, S, admin_port, pipeline
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.streams import streamed


async def get(client: Client, path: str, **about: Any) -> tuple[int, Any]:
    async with client.get(path, **about) as answer:
        assert answer.content_type == "application/json"
        return answer.status, json.loads(await answer.read())


async def test_health_is_the_process_and_readiness_is_a_relay_that_speaks() -> None:
    async with admin_port() as (tally, client):
        assert (await client.get("/healthz")).status == 200
        assert (await client.get("/readyz")).status == 503
        tally.relays.join(Hello(relay="r0", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0))
        tally.on_status("r0", relay_status())
        assert (await client.get("/readyz")).status == 200
        tally.clock.advance(60 * S)  # type: ignore[attr-defined]
        assert (await client.get("/readyz")).status == 503
        assert (await client.get("/healthz")).status == 200


async def test_metrics_come_as_text_openmetrics_and_zipped() -> None:
    async with admin_port() as (tally, client):
        tally.on_end(streamed(100, 140))
        async with client.get("/metrics", headers={"Accept-Encoding": "identity"}) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            plain = await answer.read()
        names = {family.name for family in text_string_to_metric_families(plain.decode())}
        assert "llmtap_time_to_first_token_seconds" in names
        accept = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "identity"}
        async with client.get("/metrics", headers=accept) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert (await answer.read()).endswith(b"# EOF\n")
        async with client.get(
            "/metrics", headers={"Accept-Encoding": "gzip"}, auto_decompress=False
        ) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert b"llmtap_time_to_first_token_seconds" in gzip.decompress(await answer.read())


@pytest.mark.parametrize(
    ("vantages", "after"),
    [(["middleware"], 2), (["relay"], None), (["middleware", "relay"], None), ([], None)],
)
async def test_tokens_after_a_disconnect_are_known_to_the_middleware_alone(
    vantages: list[str], after: int | None
) -> None:
    async with admin_port() as (tally, client):
        for name in vantages:
            hello = Hello(relay=name, pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0, vantage=name)
            tally.relays.join(hello)
        x = streamed(100, 140, 180)
        x.outcome = Outcome.CLIENT_CANCELLED
        x.timeline.delivered_ns = x.timeline.arrival_ns + S // 8
        tally.on_end(x)
        _, out = await get(client, "/api/v1/summary?window=all")
        parts = (out, out["by"]["tenant"]["default"])
        assert [part["tokens"]["after_cancel"] for part in parts] == [after, after]


async def test_the_histograms_of_series_can_be_merged_by_the_library() -> None:
    decode = HdrHistogram.decode

    async with admin_port() as (tally, client):
        for tenant, times in (("a", (100, 140, 180)), ("b", (300, 340))):
            x = streamed(*times)
            x.tenant = tenant
            tally.on_end(x)
        status, result = await get(client, "/api/v1/histograms?window=all")
        assert (status, result["unit"], [one["tenant"] for one in result["series"]]) == (
            200,
            "ns",
            ["a", "b"],
        )
        merged, other = (decode(one["histograms"]["tbc"].encode()) for one in result["series"])
        merged.add(other)
        assert merged.get_total_count() == 3
        assert merged.get_max_value() == pytest.approx(40_000_000, rel=0.002)
        assert (await get(client, "/api/v1/histograms?by=x"))[0] == 400


PATH = "/api/v1/experiment"


async def post(client: Client, data: bytes = b'{"enabled": true}', **headers: str) -> tuple[int, Any]:
    named = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    async with client.post(PATH, data=data, headers=named) as answer:
        assert answer.content_type == "application/json"
        return answer.status, json.loads(await answer.read())


async def test_a_capture_is_flushed_on_demand(tmp_path: Path) -> None:
    async with admin_port() as (tally, client):
        async with client.post("/api/v1/capture/flush", data={"a": "b"}) as answer:
            error = (await answer.json())["error"]["message"]
        assert answer.status == 415
        assert error.endswith("without a body, got content of type application/x-www-form-urlencoded")
        async with client.post("/api/v1/capture/flush") as answer:
            assert answer.status == 409
        options = CaptureOptions(to=str(tmp_path))
        info = CaptureInfo(capture="c", level=options.level, block_size=16, block_unit="bytes")
        recorder = Recorder(options, SystemClock(), info, salt=bytes(32))
        tally.attach_recorder(recorder)
        recorder.start()
        tally.on_end(streamed(100, 140))
        async with client.post("/api/v1/capture/flush") as answer:
            state = await answer.json()
        assert (answer.status, state["exchanges"], state["waiting"], state["files_waiting"]) == (200, 1, 0, 0)
        files = llmtap.read(tmp_path).files
        assert [(file.rows, file.spool) for file in files] == [(1, False)]
        recorder.close(60)


async def test_what_runs_can_be_read_and_switched() -> None:
    experiment = an_experiment(enabled=False)

    async with admin_port(pipeline(experiment)) as (tally, client):
        words: list[int] = []
        tally.experiments.join(0, words.append)
        x = streamed(100, 140)
        x.arm, x.unit = "control", "ab"
        tally.on_end(x)
        async with client.get(PATH) as answer:
            out = await answer.json()
        assert (out["name"], out["state"], out["enabled"]) == ("test", "off", False)
        assert out["arms"]["control"]["metrics"]["ttft"]["mean"] == 0.1
        status, out = await post(client)
        assert (status, out["state"], out["switched_by"]) == (200, "running", "api")
        assert (await post(client, b'{"enabled": false}'))[1]["state"] == "off"
        assert words == [switch_word(experiment.id, on) for on in (False, True, False)]


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        ({"Content_Type": "text/plain"}, b'{"enabled": true}', 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, b"enabled=true", 415),
        ({}, b"", 400),
        ({}, b"[]", 400),
        ({}, b'{"enabled": "yes"}', 400),
        ({}, b'{"enabled": true, "name": "x"}', 400),
        ({}, b'{"enabled": true}' + b" " * 5_000, 413),
    ],
)
async def test_who_may_not_switch_is_told_so_and_nothing_changes(
    headers: dict[str, str], data: bytes, status: int
) -> None:
    async with admin_port(pipeline(an_experiment(enabled=False))) as (tally, client):
        found, out = await post(client, data, **headers)
        assert found == status
        assert out["error"]["message"]
        assert tally.experiments.state == "off"
