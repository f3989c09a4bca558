"""vLLM's and SGLang's engine services, by grpc.aio as anybody would use it: channel, stub, metadata."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import grpc
import grpc.aio
import pytest

from llmtap.protocol.vllm_grpc import METHOD, GrpcChunk, GrpcRequest, GrpcUsage, read_chunk, write_request
from llmtap.sim.model_options import ServingSetup, read_serving
from llmtap.sim.server.options import EngineOptions, SimOptions
from llmtap.sim.server.reception import REFUSAL
from llmtap.workload.prompts.text import count_tokens
from tests.support.servers.sim_grpc import GrpcEngine, grpc_engine
from tests.support.waiting import wait_until

Stub = Any


@asynccontextmanager
async def stub_of(e: GrpcEngine) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(e.address) as channel:
        yield channel.unary_stream(METHOD, request_serializer=write_request, response_deserializer=read_chunk)


async def answer(stub: Stub, request: GrpcRequest, **metadata: str) -> list[GrpcChunk]:
    pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return [chunk async for chunk in stub(request, metadata=pairs, timeout=100)]


@pytest.mark.parametrize(
    ("query", "metadata", "tokens", "finish"),
    [
        ({"max_tokens": 2}, {}, 2, "length"),
        ({"max_tokens": 50, "min_tokens": 8}, {}, 8, "stop"),
        ({"max_tokens": 50, "ignore_eos": True}, {}, 50, "length"),
        ({"token_ids": (3, 1, 4, 1)}, {}, 5, "stop"),
        ({}, {"x_sim_tokens": "9", "x_sim_tokens_per_chunk": "4"}, 9, "stop"),
        ({}, {"x_sim_output_hold": "all"}, 5, "stop"),
        ({}, {"x_sim_refusal": "content_filter"}, 0, "content_filter"),
        ({}, {"x_sim_refusal": "text"}, count_tokens(REFUSAL), "stop"),
        ({}, {"x_sim_block_after": "3"}, 3, "content_filter"),
        ({}, {"x_sim_fault": "stall", "x_sim_stall_ms": "5"}, 5, "stop"),
    ],
)
async def test_how_many_tokens_and_how_it_ends(
    query: dict[str, Any], metadata: dict[str, str], tokens: int, finish: str
) -> None:
    async with grpc_engine() as e, stub_of(e) as stub:
        chunks = await answer(stub, GrpcRequest(text="hi", **query), **metadata)
        (truth,) = await e.truths()
    assert chunks[-1].usage == GrpcUsage(4 if "token_ids" in query else 1, tokens)
    assert sum(len(chunk.token_ids) for chunk in chunks) == tokens == len(truth.sent_ns[0])
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [finish] == truth.finish


@pytest.mark.parametrize(
    ("metadata", "code", "outcome", "tokens"),
    [
        ({"x_sim_fault": "429"}, grpc.StatusCode.RESOURCE_EXHAUSTED, "429", 0),
        ({"x_sim_fault": "503"}, grpc.StatusCode.UNAVAILABLE, "503", 0),
        ({"x_sim_refusal": "error"}, grpc.StatusCode.PERMISSION_DENIED, "refused", 0),
        ({"x_sim_itl": "soon"}, grpc.StatusCode.INVALID_ARGUMENT, None, 0),
        ({"x_sim_fault": "error", "x_sim_fault_after": "3"}, grpc.StatusCode.INTERNAL, "error", 3),
        ({"x_sim_fault": "reset", "x_sim_fault_after": "3"}, grpc.StatusCode.UNAVAILABLE, "reset", 3),
        ({"x_sim_fault": "truncate", "x_sim_fault_after": "3"}, grpc.StatusCode.DATA_LOSS, "truncate", 3),
    ],
)
async def test_what_goes_wrong_is_told_by_the_status(
    metadata: dict[str, str], code: grpc.StatusCode, outcome: str | None, tokens: int
) -> None:
    async with grpc_engine() as e, stub_of(e) as stub:
        pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        seen = 0
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for chunk in stub(GrpcRequest(text="hi"), metadata=pairs, timeout=100):
                seen += len(chunk.token_ids)
        truths = await e.truths(1 if outcome else 0)
    assert raised.value.code() is code
    assert seen == tokens
    assert [truth.outcome for truth in truths] == ([outcome] if outcome else [])
    if outcome in ("429", "503"):
        assert dict(raised.value.trailing_metadata())["retry-after"] == "1"
    if outcome is None:
        assert "x-sim-itl" in (raised.value.details() or "")


@pytest.mark.parametrize(
    ("module", "name", "limit"),
    [("vllm_engine", "VllmEngine", "max_tokens"), ("sglang_scheduler", "SglangScheduler", "max_new_tokens")],
)
async def test_the_packages_own_client_gets_an_answer(module: str, name: str, limit: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package is generated for an older protobuf
        pb = import_module(f"smg_grpc_proto.generated.{module}_pb2")
        services = import_module(f"smg_grpc_proto.generated.{module}_pb2_grpc")
    params = pb.SamplingParams(**{limit: 3})
    request = pb.GenerateRequest(request_id="mine", sampling_params=params, stream=True)
    request.tokenized.input_ids.extend((3, 1, 4, 1))
    async with grpc_engine() as e, grpc.aio.insecure_channel(e.address) as channel:
        stub = getattr(services, f"{name}Stub")(channel)
        *chunks, last = [message async for message in stub.Generate(request, timeout=100)]
        (truth,) = await e.truths()
    assert [len(message.chunk.token_ids) for message in chunks] == [1, 1, 1]
    done = last.complete
    assert (done.finish_reason, done.prompt_tokens, done.completion_tokens) == ("length", 4, 3)
    assert truth.id == "mine" == getattr(last, "request_id", "mine")
    # The path is the one at which the package's servicer would be called.
    server = grpc.aio.server()
    found: list[Any] = []
    server.add_generic_rpc_handlers = found.extend
    getattr(services, f"add_{name}Servicer_to_server")(getattr(services, f"{name}Servicer")(), server)
    assert found[0].service_name() == truth.path.split("/")[1]


async def test_who_is_given_up_before_a_token_is_told_to_come_back() -> None:
    late = {"give_up": "late", "ttft": "20ms", "tbt": "100s"}
    serving = read_serving({"seqs_max": "1", "kv_tokens": "60000", **late})
    behind = EngineOptions("continuous_batching", ServingSetup(serving=serving))
    async with grpc_engine(SimOptions(tokens=50_000), behind) as e, stub_of(e) as stub:
        staying = asyncio.create_task(answer(stub, GrpcRequest(text="hi")))
        running = b'num_requests_running{engine="0",model_name="sim"} 1.0\n'
        await wait_until(lambda: running in e.server.gauges.text())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await answer(stub, GrpcRequest(text="hi"))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [truth.outcome for truth in await e.truths()] == ["given_up"]
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
