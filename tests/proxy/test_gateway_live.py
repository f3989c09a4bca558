"""A proxy on both sides of a gateway of our own: pairs and figures while it runs, and the gateway's notes."""

import asyncio
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import pytest

import llmtap
from llmtap.exchange.exchange import BACK, FRONT
from tests.support.servers.gateway import LOST_TOKENS, TOKENS, Gateway, Passage, Plan
from tests.support.servers.live_proxy import LiveProxy, live_proxy, port_free
from tests.support.servers.peer import play
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import upstream
from tests.support.waiting import wait_until

pytestmark = pytest.mark.realtime

PAIRED_S = 60.0
ROUNDS = ((1, True), (50, True), (200, True), (200, False))
"""Concurrent streams, and whether the gateway forwards their ids."""


async def run(folder: Path) -> tuple[Gateway, list[dict[str, Any]], dict[str, Any], str]:
    """Return the notes of the gateway, all exchanges, the pairs, and the metrics."""
    gateway = Gateway(port_free())
    settings = ("tenants.max=1000", "meter.exchanges_kept=5000", f"capture.to={folder}")
    async with upstream() as engine, upstream() as between:
        gateway.serve(engine, between)
        pair = (f"pair.upstream={engine.url}", f"pair.listen=127.0.0.1:{gateway.port}")
        async with live_proxy(between.url, *pair, *settings) as proxy:
            for streams, gateway.keeps_ids in ROUNDS:
                numbers = range(len(gateway.passages), len(gateway.passages) + streams)
                asked = [gateway.ask(proxy.listen, n, prompt_of(n)) for n in numbers]
                await asyncio.gather(*asked)
            await paired(proxy)
            exchanges = await all_exchanges(proxy)
            pairs = await proxy.told("/api/v1/pairs?limit=1000")
            metrics = await scrape(proxy)
        assert not engine.errors and not between.errors
    return gateway, exchanges, pairs, metrics


def prompt_of(number: int) -> str:
    """A fifth of the prompts are equal."""
    return "the common question" if number % 5 == 0 else f"question {number}"


async def paired(proxy: LiveProxy) -> None:
    async def done() -> bool:
        pairs = await proxy.told("/api/v1/pairs")
        streams = await proxy.told("/api/v1/streams")
        ended = sum(n for n, _ in ROUNDS)
        return bool(pairs and streams and pairs["counts"]["front"] == ended and not pairs["waiting"])

    await wait_until(done, PAIRED_S)


async def all_exchanges(proxy: LiveProxy) -> list[dict[str, Any]]:
    exchanges: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = await proxy.told(f"/api/v1/exchanges?limit=1000{cursor}")
        exchanges += page["exchanges"]
        if page["next"] is None:
            return exchanges
        cursor = f"&next={page['next']}"


async def scrape(proxy: LiveProxy) -> str:
    client = await RawClient.connect(proxy.admin)
    answer = await client.ask(request("GET", "/metrics", "Connection: close", host="localhost"))
    client.close()
    return answer.data.decode()


@pytest.fixture(scope="module")
def result(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Gateway, list[dict[str, Any]], dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("capture")
    return *play(run(folder)), folder


def test_no_pair_is_wrong_and_ids_pair_all(result: Any) -> None:
    _, exchanges, pairs, _, _ = result
    fronts = {x["id"]: x for x in exchanges if x["side"] == FRONT}
    backs = [x for x in exchanges if x["side"] == BACK]
    in_pairs = [x for x in backs if x["pair"] is not None]
    assert all(fronts[x["pair"]["id"]]["tenant"] == x["tenant"] for x in in_pairs)
    with_ids = sum(n for n, keeps_ids in ROUNDS if keeps_ids)
    first = [x for x in backs if int(x["tenant"]) < with_ids]
    assert {x["pair"] and x["pair"]["evidence"][0] for x in first} == {"request_id"}
    rest = [x for x in backs if int(x["tenant"]) >= with_ids and x["pair"] is not None]
    assert {x["pair"]["evidence"][0] for x in rest} <= {"prompt", "text"}
    assert len(in_pairs) >= 0.999 * len(backs)
    assert pairs["counts"]["back"] == len(backs)
    assert pairs["counts"]["front"] == len(fronts) == sum(n for n, _ in ROUNDS)


def test_figures_lie_between_the_notes_of_the_gateway_and_of_its_neighbours(result: Any) -> None:
    gateway, exchanges, _, _, _ = result
    checked = 0
    for x in exchanges:
        if x["side"] == FRONT and x["pair"] is not None:
            number = int(x["tenant"])
            check(x["pair"]["figures"], Plan(number), gateway.passages[number])
            checked += 1
    assert checked >= 0.999 * len(gateway.passages)


def check(figures: dict[str, Any], plan: Plan, p: Passage) -> None:
    """Each figure is within its range of a time that contains the gateway's own, and is contained in that
    of engine and client, which are outside of both relays."""

    def expect(name: str, low: float, high: float, scale: float = 1e9) -> None:
        (figure,) = figures[name]
        fits = figure["low"] * scale <= high and figure["high"] * scale >= low
        assert fits, (name, plan, figure, low, high)

    expect("request", p.sent_ns[0] - p.read_ns, p.arrived_ns[0] - p.asked_ns)
    inside = (p.wrote_ns[0] - p.read_ns) - (p.had_ns[0] - p.sent_ns[-1])
    outside = (p.got_ns[0] - p.asked_ns) - (p.generated_ns[0] - p.arrived_ns[-1])
    expect("ttft", inside, outside)
    expect("first_token", p.wrote_ns[0] - p.had_ns[0], p.got_ns[0] - p.generated_ns[0])
    own = [wrote - had for had, wrote in zip(p.had_ns, p.wrote_ns, strict=True)]
    around = [got - made for made, got in zip(p.generated_ns, p.got_ns, strict=False)]
    if not plan.changes:
        expect("token", median(own), median(around))
        expect("token_hold_max", max(own), max(around))
        last = plan.group - 1
        # A gateway that is held up has more tokens when it writes the first one: its block is longer.
        held = max(last, sum(t <= p.got_ns[0] for t in p.generated_ns) - 1)
        expect("block_wait", p.generated_ns[last] - p.had_ns[0], p.had_ns[held] - p.generated_ns[0])
        expect("block_check", p.wrote_ns[0] - p.had_ns[held], p.got_ns[last] - p.generated_ns[last])
        begins = range(0, len(p.wrote_ns), plan.group)
        had = [sum(t <= p.wrote_ns[begin] for t in p.had_ns) - begin for begin in begins]
        made = [sum(t <= p.got_ns[begin] for t in p.generated_ns) - begin for begin in begins]
        expect("tokens_held", max(had), max(made), 1)
    expect("tokens_per_event_back", 1, 1, 1)
    if not plan.changes and plan.tokens == TOKENS:
        per_event = TOKENS / -(-TOKENS // plan.group)
        expect("tokens_per_event_front", per_event, per_event, 1)
    lost = (LOST_TOKENS if plan.fails else 0) + TOKENS - plan.tokens
    assert [one["value"] for one in figures.get("tokens_undelivered", [])] == ([lost] if lost else [])
    assert ("retries" in figures) == plan.fails
    if plan.fails:
        expect("retries", p.sent_ns[1] - p.arrived_ns[0], p.arrived_ns[1] - p.sent_ns[0])


def test_texts_and_attempts_are_those_of_the_plan(result: Any) -> None:
    _, exchanges, pairs, _, _ = result
    numbers = {x["id"]: int(x["tenant"]) for x in exchanges}
    for pair in pairs["recent"]:
        plan = Plan(numbers[pair["front"]])
        assert [back["role"] for back in pair["back"]] == ["retry"] * plan.fails + ["delivered"]
        texts = "changed" if plan.changes else "equal" if plan.tokens == TOKENS else "cut"
        assert pair["text"] == texts
    assert len(pairs["recent"]) == pairs["counts"]["pairs"]


def test_metrics_count_each_request_once_and_each_pair(result: Any) -> None:
    _, _, pairs, metrics, _ = result
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    n_pairs, n = pairs["counts"]["pairs"], sum(n for n, _ in ROUNDS)
    fronts = [k for k in values if k.startswith("llmtap_pair_exchanges_total{") and 'side="front"' in k]
    assert sum(float(values[k]) for k in fronts) == n
    assert float(values['llmtap_pair_held_tokens_count{model="m"}']) >= 0.9 * n_pairs
    assert float(values['llmtap_pair_first_token_seconds_count{model="m"}']) == n_pairs
    exchanged = [float(v) for k, v in values.items() if k.startswith("llmtap_exchanges_total{")]
    assert sum(exchanged) == n


def test_the_capture_has_both_sides_and_no_hashes_of_texts(result: Any) -> None:
    _, exchanges, _, _, folder = result
    known = {x["id"]: (x["side"], x["pair"] and x["pair"]["id"]) for x in exchanges}
    captured = {x.id: (x.side, x.pair_id) for x in llmtap.read(folder).exchanges()}
    assert captured == known
    rows = pq.read_table(folder, columns=["event_chars", "text_blocks"])
    assert rows.column("event_chars").null_count == rows.column("text_blocks").null_count == len(rows)
