"""A load to a target without the endpoint ends after its first answers, with status, path and option."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.exo.mode import ExoBench, ExoGrid, ExoOptions
from llmtap.bench.run.session import OpenLoop, make_load
from llmtap.errors import ConfigError
from llmtap.load.endpoint_check import FIRST
from llmtap.load.options import BodyOptions, ScheduleOptions
from llmtap.load.replay.plan import make_plan
from tests.bench.support import Silent, session_to
from tests.load.replay.support import replayed
from tests.load.replay.test_recorded import bursts
from tests.support.servers.peer import play

MODELS = b'{"data":[{"id":"m","owned_by":"vllm"}]}'


@asynccontextmanager
async def chat_only(status: int = 404, answer_at: int | None = None) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that answers POST with a status, but chat completions, and the request `answer_at`, with a
    stream. Yields its URL and the paths of the POSTs."""
    paths: list[str] = []
    refusal = b"HTTP/1.1 %d Error\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" % status

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                if method != b"POST":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
                    continue
                paths.append(path.decode())
                known = path == b"/v1/chat/completions" or len(paths) - 1 == answer_at
                writer.write(bursts(4, 1) if known and status != 401 else refusal)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", paths
    finally:
        server.close()
        await asyncio.sleep(0)


def refused(endpoint: str, *, status: int = 404, warmup: str = "none") -> tuple[ConfigError, int]:
    """The error of a replay of 200 requests at 20/s, and the number of requests that the server got."""

    async def work() -> tuple[ConfigError, int]:
        plan = make_plan(ScheduleOptions(source="conversation", requests=200, rate=20.0, seed=1))
        async with chat_only(status) as (url, paths):
            with pytest.raises(ConfigError) as caught:
                await replayed(
                    plan,
                    url,
                    endpoint=endpoint,
                    warmup=warmup,
                    scrape="none",
                    body=BodyOptions(endpoint=endpoint, temperature=0.0),  # type: ignore[arg-type]
                )
            return caught.value, len(paths)

    found: tuple[ConfigError, int] = play(work(), limit_s=120)
    return found


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_replay_to_a_server_without_the_endpoint_stops_at_its_first_answers(status: int) -> None:
    error, sent = refused("completions", status=status)
    assert error.place == "--endpoint"
    assert str(status) in error.problem and "/v1/completions" in error.problem
    assert FIRST <= sent <= FIRST + 12, "those of the time until the load stopped"


def test_a_replay_without_the_key_names_the_option_for_it() -> None:
    error, _ = refused("chat.completions", status=401)
    assert error.place == "--api-key-env"
    assert "401" in error.problem and "/v1/chat/completions" in error.problem


def test_the_first_request_of_a_warm_up_is_enough() -> None:
    error, sent = refused("completions", warmup="auto")
    assert (error.place, sent) == ("--endpoint", 1)


def test_one_good_answer_among_the_first_lets_the_load_go_on() -> None:
    async def work() -> tuple[dict[str, Any], int]:
        plan = make_plan(ScheduleOptions(source="conversation", requests=20, rate=100.0, seed=1))
        async with chat_only(answer_at=FIRST - 1) as (url, paths):
            body = BodyOptions(endpoint="completions", temperature=0.0)
            result = await replayed(plan, url, endpoint="completions", scrape="none", body=body)
            return result, len(paths)

    result, sent = play(work(), limit_s=120)
    assert sent == 20
    assert result["error_statuses"] == {"404": 19}


def test_a_bench_names_the_endpoint_and_sends_one_request(tmp_path: Path) -> None:
    async def work() -> tuple[ConfigError, int]:
        async with chat_only() as (url, paths):
            session = session_to(url, tmp_path, warmup="auto", target={"endpoint": "completions"})
            load = make_load("synthetic-uniform", seed=1, open_loop=OpenLoop(50.0), requests=50)
            with pytest.raises(ConfigError) as caught:
                await session.measure("load", load)
            return caught.value, len(paths)

    error, sent = play(work(), limit_s=120)
    assert (error.place, sent) == ("--endpoint", 1)
    assert "404" in error.problem and "/v1/completions" in error.problem


def test_bench_exo_names_its_own_option() -> None:
    async def work() -> ConfigError:
        async with chat_only(status=401) as (url, _):
            with pytest.raises(ConfigError) as caught:
                grid = ExoGrid(pp=[16], tg=[4], repeat=9)
                await ExoBench(ExoOptions(target=url, server="vllm"), grid, Silent()).run()
            return caught.value

    error = play(work(), limit_s=120)
    assert error.place == "--api-key-env"
    assert "401" in error.problem
