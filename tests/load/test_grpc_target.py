"""Load over gRPC against the simulated engine on a real socket: exchanges as the engine's books have them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.load import grpc_target as module
from llmtap.load.grpc_target import GrpcTarget
from llmtap.load.options import BodyOptions, SendingOptions
from llmtap.metrics.latency import ttft_ns
from llmtap.protocol.vllm_grpc import METHOD, SERVICE, GrpcChunk, GrpcUsage, read_request, write_chunk
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.prompt import Prompt
from tests.support.servers.peer import play
from tests.support.servers.sim_grpc import GrpcEngine, grpc_engine
from tests.support.waiting import wait_until

MS = 1_000_000
TIMED = SimOptions(ttft=Duration(6 * MS), itl=Duration(3 * MS), tokens=8)


@asynccontextmanager
async def target_of(e: GrpcEngine, **sim: str) -> AsyncIterator[GrpcTarget]:
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in sim.items()]
    target = GrpcTarget(
        f"grpc://{e.address}", bodies=BodyOptions(model="m"), headers=headers, exact_output=True
    )
    try:
        yield target
    finally:
        await target.close()


async def ask(target: GrpcTarget, *, due: int | None = None, name: str = "load-1") -> Exchange:
    return await target.send_prompt(Prompt(text="hi"), 8, due, name)


async def serving(generate: Any) -> tuple[grpc.aio.Server, int]:
    """A server of that method, and its port."""
    server = grpc.aio.server()
    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def test_an_exchange_is_what_the_engine_did() -> None:
    async with grpc_engine(TIMED) as e, target_of(e) as target:
        await target.open()
        found = await asyncio.gather(*(ask(target, due=5, name=f"load-{i}") for i in range(3)))
        truths = {truth.id: truth for truth in await e.truths(3)}
    assert len(truths) == 3
    for x in found:
        truth = truths[x.request_id or ""]
        assert (x.outcome, x.status, x.error, x.stream) == (Outcome.COMPLETE, 200, None, True)
        assert (x.dialect, x.path, x.model, x.clock) == ("grpc", METHOD, "m", "mono")
        assert (x.tokens.input, x.tokens.output, x.tokens.source) == (1, 8, TokenSource.USAGE)
        assert (x.finish_reason, x.reads) == ("length", 9)
        t, log = x.timeline, x.timeline.events
        stamps = [at for at, flags in zip(log.t_ns, log.flags, strict=True) if flags & OUTPUT]
        assert list(log.tokens) == [1] * 8 + [-1]
        assert len(stamps) == len(truth.sent_ns[0]) == 8
        assert all(at >= sent for at, sent in zip(stamps, truth.sent_ns[0], strict=True))
        assert t.arrival_ns <= t.submit_ns and (ttft_ns(x.timeline) or 0) > 0
        assert t.first_content_ns == stamps[0] and t.last_token_ns == stamps[-1] < t.response_end_ns
        assert truth.accepted_ns >= t.arrival_ns
        assert x.scheduled_ns == 5 and x.dispatch_late_ns == t.arrival_ns - 5


def test_tls_is_verified_by_the_given_ca(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    pair = (issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes())

    async def asked(trusted: trustme.CA) -> Exchange:
        trusted.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        async with grpc_engine(TIMED, tls=pair) as e:
            target = GrpcTarget(f"grpcs://{e.address}", ca=str(tmp_path / "ca.pem"))
            try:
                return await ask(target)
            finally:
                await target.close()

    assert play(asked(ca)).outcome is Outcome.COMPLETE
    refused = play(asked(other))
    assert (refused.outcome, refused.tokens.output) == (Outcome.UPSTREAM_ERROR, None)


async def test_an_engine_that_gives_up_is_an_error() -> None:
    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield write_chunk(GrpcChunk((), "abort", GrpcUsage(0, 0)))

    server, port = await serving(generate)
    target = GrpcTarget(f"grpc://127.0.0.1:{port}")
    x = await ask(target)
    await target.close()
    await server.stop(None)
    assert (x.outcome, x.finish_reason, x.no_token_reason) == (Outcome.UPSTREAM_ERROR, "abort", "error")


async def test_headers_are_metadata() -> None:
    seen: list[dict[str, str]] = []
    ids: list[str] = []

    async def generate(request: bytes, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()))
        ids.append(read_request(request).request_id)

    server, port = await serving(generate)
    target = GrpcTarget(f"grpc://127.0.0.1:{port}", headers=[(b"Authorization", b"k")])
    x = await ask(target)
    await target.close()
    await server.stop(None)
    assert seen[0]["authorization"] == "k"
    assert ids == [x.request_id]
    assert (x.outcome, x.no_token_reason) == (Outcome.TRUNCATED, "error"), "it ended without a finish reason"


@pytest.mark.parametrize(
    ("headers", "outcome", "tokens", "says"),
    [
        ({"x_sim_fault": "429"}, Outcome.UPSTREAM_ERROR, None, "RESOURCE_EXHAUSTED in place of an answer"),
        ({"x_sim_refusal": "error"}, Outcome.REFUSED, None, ""),
        ({"x_sim_block_after": "3"}, Outcome.REFUSED, 3, ""),
        ({"x_sim_fault": "error", "x_sim_fault_after": "3"}, Outcome.UPSTREAM_ERROR, 3, "INTERNAL within"),
        ({"x_sim_fault": "reset", "x_sim_fault_after": "3"}, Outcome.UPSTREAM_RESET, 3, "UNAVAILABLE within"),
        ({"x_sim_fault": "truncate", "x_sim_fault_after": "3"}, Outcome.UPSTREAM_ERROR, 3, "DATA_LOSS"),
        ({"x_sim_fault": "unfinished", "x_sim_fault_after": "3"}, Outcome.TRUNCATED, 3, "finish reason"),
    ],
)
async def test_what_goes_wrong_is_an_outcome(
    headers: dict[str, str], outcome: Outcome, tokens: int | None, says: str
) -> None:
    async with grpc_engine() as e, target_of(e, **headers) as target:
        x = await ask(target)
    assert (x.outcome, x.tokens.output) == (outcome, tokens)
    assert says in (x.error or "")
    if outcome is Outcome.REFUSED:
        assert x.refusal["kind"] == ("output_guardrail" if tokens else "input_guardrail")
    assert (x.no_token_reason is None) is (tokens is not None)


async def test_a_time_out_and_a_close_end_what_is_under_way() -> None:
    async with grpc_engine(SimOptions(ttft=Duration(60_000 * MS))) as e:
        target = GrpcTarget(f"grpc://{e.address}", SendingOptions(timeout=Duration(100 * MS)))
        x = await ask(target)
        assert (x.outcome, x.error) == (Outcome.UPSTREAM_TIMEOUT, "the server did not end its answer in time")
        await target.close()
        target = GrpcTarget(f"grpc://{e.address}")
        one, two = (asyncio.create_task(ask(target, name=name)) for name in "ab")
        running = b'num_requests_running{engine="0",model_name="sim"} 2.0\n'
        await wait_until(lambda: running in e.server.gauges.text())
        two.cancel()
        with pytest.raises(asyncio.CancelledError):
            await two
        await target.close()
        x = await one
        assert (x.outcome, x.no_token_reason) == (Outcome.CLIENT_CANCELLED, "cancelled")
        assert {truth.outcome for truth in await e.truths(3)} == {"client_left"}


@pytest.mark.parametrize("url", ["grpc://h", "grpc://h:x", "grpc://h:1/path"])
async def test_a_url_that_does_not_fit_names_its_option(url: str) -> None:
    with pytest.raises(ConfigError, match="--target: "):
        GrpcTarget(url)


async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 20_000)
    cancelled = asyncio.Event()

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield write_chunk(GrpcChunk((7,) * 100))
        finally:
            cancelled.set()

    server, port = await serving(generate)
    target = GrpcTarget(f"grpc://127.0.0.1:{port}")
    x = await ask(target)
    await cancelled.wait()
    await target.close()
    await server.stop(None)
    problem = "invalid answer of the server: the answer has more than 20000 bytes: request fewer tokens"
    assert (x.outcome, x.error) == (Outcome.UPSTREAM_ERROR, problem)
    assert 20_000 < x.response_bytes < 21_000


@pytest.mark.parametrize("name", ["EVENTS_MAX", "TOKENS_MAX"])
async def test_what_is_kept_of_an_answer_has_a_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, 50)

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(200):
            yield write_chunk(GrpcChunk((7,)))
        yield write_chunk(GrpcChunk((), "stop", GrpcUsage(1, 200)))

    server, port = await serving(generate)
    target = GrpcTarget(f"grpc://127.0.0.1:{port}")
    x = await ask(target)
    await target.close()
    await server.stop(None)
    assert (x.outcome, x.reads) == (Outcome.COMPLETE, 201)
    assert x.tokens.output == 200
    log = x.timeline.events
    kept = len(log) if name == "EVENTS_MAX" else sum(tokens for tokens in log.tokens if tokens > 0)
    assert kept == 50


async def test_a_message_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGE_BYTES_MAX", 10_000)

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield write_chunk(GrpcChunk((7,) * 100))
        yield write_chunk(GrpcChunk((7,) * 20_000))

    server, port = await serving(generate)
    target = GrpcTarget(f"grpc://127.0.0.1:{port}")
    x = await ask(target)
    await target.close()
    await server.stop(None)
    assert (x.outcome, x.reads) == (Outcome.UPSTREAM_ERROR, 1)
    assert "RESOURCE_EXHAUSTED" in (x.error or "")
