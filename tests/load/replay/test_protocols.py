"""Replays over Realtime and gRPC, as over HTTP; and options that mean nothing there are refused by name."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import llmtap
from llmtap.cli.main import main
from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyOptions
from llmtap.load.replay.options import ReplayOptions, http_beside, maker_for, notes_of, refuse_meaningless
from llmtap.load.replay.perform import Replay
from llmtap.load.replay.plan import ReplayQuestion, make_plan
from llmtap.load.workers.worker_handle import Progress
from llmtap.sim.server.options import SimOptions
from llmtap.units import NS_PER_S, Duration
from tests.support.live_proxy import port_free
from tests.support.peer import play, scene, wait_until
from tests.support.sim_engine import engine
from tests.support.sim_grpc import grpc_engine

MS = 1_000_000
N = 20
SIM = SimOptions(ttft=Duration(25 * MS), itl=Duration(4 * MS))


class Silent:
    """Nobody watches."""

    def preparing(self, done: int, of: int) -> None: ...

    def warming(self, how: str) -> None: ...

    def sending(self, progress: Progress, planned: int) -> None: ...

    def comparing(self, done: int, of: int | None) -> None: ...

    def writing(self, done: int, of: int) -> None: ...


@asynccontextmanager
async def serving(spoken: str) -> AsyncIterator[tuple[str, Any]]:
    """A target's URL, and the books of its server."""
    if spoken == "grpc":
        async with grpc_engine(SIM) as g:
            yield f"grpc://{g.address}", g.server.reception.truths
    else:
        async with engine(SIM) as e:
            yield e.url.replace("http", "ws"), e.server.reception.truths


async def replayed(url: str, workload: str = "synthetic-skewed", **more: Any) -> dict[str, Any]:
    plan = make_plan(ReplayQuestion(source=workload, requests=N, rate_rps=60.0, chat=False))
    second, minute = Duration(NS_PER_S), Duration(60 * NS_PER_S)
    options = ReplayOptions(target=url, timeout=minute, connect_timeout=minute, retry_wait=second, **more)
    return await Replay(plan, options, BodyOptions(temperature=0.0), Silent()).run()


@pytest.mark.parametrize(
    ("spoken", "workload"),
    [("ws", "conversation"), ("grpc", "synthetic-skewed"), ("grpc", "synthetic-uniform")],
)
def test_a_replay_of_twenty_requests(spoken: str, workload: str, tmp_path: Path) -> None:
    async def work() -> tuple[dict[str, Any], list[Any]]:
        async with serving(spoken) as (url, log):
            found = await replayed(url, workload, capture=str(tmp_path), slo="ttft:1s")
            await wait_until(lambda: len(log.since(0)["truths"]) == N)
            return found, log.since(0)["truths"]

    result, truths = play(work(), 200)
    assert (result["load"]["sent"], result["load"]["unsent"], result["outcomes"]) == (N, 0, {"complete": N})
    assert result["dispatch_lateness"]["n"] == N
    assert result["sender"]["clock"] == ("mono" if spoken == "grpc" else "kernel")
    assert result["plan"]["body"]["endpoint"] == ("grpc" if spoken == "grpc" else "realtime")
    lengths = result["lengths"]
    assert lengths["output_wanted"]
    assert (lengths["output_told"], lengths["output_exact"]) == (N, N)
    assert lengths["input_told"] == N
    if workload == "synthetic-uniform":
        assert lengths["input_exact"] == N, "its ids are what was asked"
    scrape = result["system"]["series"]["about"]["scrape"] if "about" in result["system"]["series"] else {}
    if spoken == "grpc" and scrape:
        assert scrape["scrapes"] == 0, "nobody asks gRPC for metrics"
    # By the server's own books, row for row.
    books = {truth.id: truth for truth in truths}
    rows = llmtap.read(tmp_path).table().to_pylist()
    assert len(rows) == len(books) == N
    for row in rows:
        truth = books[row["request_id"]]
        assert row["output_tokens"] == len(truth.sent_ns[0])
        assert row["input_tokens"] == truth.prompt_tokens
        # No TTFT is shorter than the server's, but for what the exchange says it is uncertain of, and the
        # microseconds to which a capture rounds.
        true_us = (truth.sent_ns[0][0] - truth.accepted_ns) / 1e3
        assert row["first_content_us"] - row["submit_us"] >= true_us - row["uncertainty_us"] - 2


@scene
async def test_a_warm_up_and_a_closed_loop_go_the_same_way() -> None:
    async with serving("grpc") as (url, _):
        result = await replayed(url, "synthetic-uniform", closed=4, warmup="5")
    assert result["outcomes"] == {"complete": N}
    assert result["warmup"]["requests"] == 5
    assert result["load"]["mode"] == "closed"


@pytest.mark.parametrize("scheme", ["ws", "grpc"])
@scene
async def test_nobody_there_is_said_before_anything_is_prepared(scheme: str) -> None:
    port = port_free()
    with pytest.raises(ConfigError, match=f"--target: {scheme}://127.0.0.1:{port} cannot be reached"):
        await replayed(f"{scheme}://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("target", "args", "option"),
    [
        ("grpc://h:1", ["--endpoint", "responses"], "--endpoint"),
        ("ws://h:1", ["--endpoint", "completions"], "--endpoint"),
        ("ws://h:1", ["--body-field", "top_p=0.9"], "--body-field"),
        ("grpc://h:1", ["--fresh"], "--fresh"),
        ("wss://h:1", ["--retries", "1"], "--retries"),
        ("grpc://h:1", ["--retry-wait", "5s"], "--retry-wait"),
        ("ws://h:1", ["--no-stream"], "--no-stream"),
        ("grpc://h:1", ["--server", "vllm"], "--server"),
        ("grpc://h:1", ["--ca", "x.pem"], "--ca"),
        ("grpc://h:1", ["--insecure"], "--insecure"),
    ],
)
def test_what_means_nothing_there_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    args: list[str],
    option: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["llmtap", "replay", "synthetic-uniform", "--target", target, *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = f"llmtap: {option}: has no meaning for {target.partition(':')[0]}://"
    assert capsys.readouterr().err.startswith(said)


def test_over_http_all_have_a_meaning() -> None:
    refuse_meaningless("http://h:1", dict.fromkeys(("--endpoint", "--fresh", "--ca"), True))
    refuse_meaningless("wss://h:1", {"--ca": True, "--server": True, "--retries": False})


@pytest.mark.parametrize(
    ("target", "beside"),
    [
        ("http://h:1/v1", "http://h:1/v1"), ("ws://h:1/v1/realtime?model=m", "http://h:1"),
        ("wss://h", "https://h"), ("grpc://h:1", None),
    ],
)  # fmt: skip
def test_http_beside(target: str, beside: str | None) -> None:
    assert http_beside(target) == beside


@pytest.mark.parametrize(
    ("target", "server", "exact"),
    [("grpc://h:1", "auto", True), ("ws://h:1", "auto", False), ("ws://h:1", "vllm", True)],
)
def test_exact_lengths_where_the_server_knows_how(target: str, server: Any, exact: bool) -> None:
    assert maker_for(target, BodyOptions(server=server), None).output_exact is exact


def test_whose_stamps_have_more_before_them_than_they_tell() -> None:
    (note,) = notes_of("grpc://127.0.0.1:8001")
    assert note.startswith("gRPC's own threads stand between the wire and our stamps")
    assert notes_of("http://127.0.0.1:8000") == notes_of("wss://host/v1/realtime") == []
