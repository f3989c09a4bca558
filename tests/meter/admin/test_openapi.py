"""Document and application agree: every route is in it, and every answer is as it says, name by name."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from llmtap.channel.frames import Hello
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.exchange.saved import explain, read_saved
from llmtap.meter.admin.openapi import ROUTES, openapi_document
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.slo import SloOptions
from tests.meter.admin.serving import Client, admin_port, pipeline
from tests.support.traffic.corpus import NAMES, Recorded
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.streams import streamed

GOLD = SloOptions(objectives="ttft:200ms tpot:50ms", target=0.95, tenants=("t1",))


def strict(schema: Any) -> Any:
    """The schema with a door at every object: a name that it does not know is an error."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema:
        out.setdefault("additionalProperties", False)
    return out


def complaints(value: Any, schema: dict[str, Any]) -> list[str]:
    whole = strict({**schema, "components": openapi_document()["components"]})
    found = Draft202012Validator(whole).iter_errors(value)
    return sorted(f"{'.'.join(map(str, e.absolute_path))}: {e.message[:300]}" for e in found)


def fits(value: Any, name: str) -> None:
    assert complaints(value, {"$ref": f"#/components/schemas/{name}"}) == []


def fill(tally: ExchangePipeline) -> None:
    """A relay, streams that ended in several ways, and one that never reached an upstream."""
    about = {"pid": 1, "clock": "mono", "anchor_mono_ns": 0, "anchor_wall_ns": 0}
    tally.relays.join(Hello(relay="r0", implementation="python", implementation_reason="x", **about))
    tally.relays.join(Hello(relay="r1", **about))
    tally.on_status("r0", relay_status())
    for seq, outcome in enumerate(Outcome, 1):
        tally.on_open()
        tally.on_end(streamed(100, 140, 180, seq=seq, outcome=outcome, tenant=f"t{seq % 2}", tokens=seq % 3))
    tally.on_open()
    bare = streamed(100)
    tally.on_end(
        Exchange(relay="r", seq=99, arrival_wall_ns=0, timeline=bare.timeline, outcome=Outcome.REJECTED)
    )


def test_the_document_is_openapi_with_valid_schemas_and_references() -> None:
    result = openapi_document(token=True)
    assert result["openapi"] == "3.1.0"
    schemas = result["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    references = set(references_in(result))
    assert references == {f"#/components/schemas/{name}" for name in schemas} - {
        # Told in words, because an event stream has no schema.
        "#/components/schemas/LiveSummary",
        "#/components/schemas/Missed",
    }
    names = [operation["operationId"] for path in result["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names)) == len(ROUTES)
    json.dumps(result)


def references_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for item in value.values() for found in references_in(item)]
    return [found for item in value for found in references_in(item)] if isinstance(value, list) else []


async def test_every_route_is_in_the_document_and_nothing_else() -> None:
    async with admin_port(pipeline(slos={"gold": GOLD})) as (_, client):
        assert client.app is not None
        served = {
            (route.method.lower(), route.resource.canonical)
            for route in client.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        assert served == {(route.method, route.path) for route in ROUTES}
        async with client.get("/api/v1/openapi.json") as answer:
            assert await answer.json() == json.loads(json.dumps(openapi_document()))


async def test_real_answers_are_as_the_document_says() -> None:
    async with admin_port(pipeline(slos={"gold": GOLD})) as (tally, client):
        for filled in (False, True):
            if filled:
                fill(tally)
            result = await answer_of(client, "/api/v1/exchanges?events=1")
            assert len(result["exchanges"]) == filled * (len(Outcome) + 1)
            fits(result, "Exchanges")
            fits(await answer_of(client, "/api/v1/exchanges?limit=2"), "Exchanges")
            fits(await answer_of(client, "/api/v1/summary"), "Summary")
            fits(await answer_of(client, "/api/v1/summary?window=all&by=tenant,class&certain=1"), "Summary")
            fits(await answer_of(client, "/api/v1/summary?by=none"), "Summary")
            fits(await answer_of(client, "/api/v1/experiment"), "Experiment")
            fits(await answer_of(client, "/api/v1/exchanges?limit=0", 400), "Error")
            fits(await answer_of(client, "/api/v1/summary?window=x", 400), "Error")
            fits(await answer_of(client, "/nowhere", 404), "Error")


async def answer_of(client: Client, path: str, status: int = 200) -> Any:
    async with client.get(path) as answer:
        assert answer.status == status
        return await answer.json()


async def test_exchanges_of_every_dialect_are_as_the_document_says() -> None:
    async with admin_port(pipeline(slos={"gold": GOLD})) as (tally, client):
        for name in NAMES:
            recorded = Recorded(name)
            tally.on_open()
            tally.on_end(explain(read_saved(recorded.wire, path=recorded.doc["request"]["path"])).exchange)
        result = await answer_of(client, "/api/v1/exchanges?events=1&limit=1000")
        wrong = [
            (name, complaint)
            for name, x in zip(reversed(NAMES), result["exchanges"], strict=True)
            for complaint in complaints(x, {"$ref": "#/components/schemas/Exchange"})
        ]
        assert wrong == []
        fits(await answer_of(client, "/api/v1/summary"), "Summary")
