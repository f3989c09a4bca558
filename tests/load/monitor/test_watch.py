"""Metrics of each kind of server have our names; scrapes are repeated, stamped, and counted if they fail."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

import llmtap.net.server_metrics as module
from llmtap.clock import SystemClock
from llmtap.load.monitor.watch import ServerScraper
from llmtap.net.server_metrics import SERIES, read_metrics
from tests.support.servers.peer import wait_until

QUICK_NS = 10_000_000
PATIENT_NS = 300_000_000
"""The last scrape waits no longer than a period: this long where it must not fail."""

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a/b \\"c\\""} 8.0
vllm:num_requests_waiting{engine="0",model_name="a/b \\"c\\""} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 480.0
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 480.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:generation_tokens_total{engine="0",model_name="m"} 77.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 5.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.5
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9.0
"""
VLLM_SAYS = {
    "ttft_seconds": 0.5,
    "running": 8,
    "waiting": 3,
    "kv_use": 0.25,
    "prefix_queries": 1_000,
    "prefix_hits": 480,
    "preemptions": 2,
    "prompt_tokens": 1_500_000,
    "generation_tokens": 77,
}
OLD_VLLM = """\
vllm:num_requests_running{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 10.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 4.0
"""
ENGINES = """\
vllm:num_requests_running{engine="0",model_name="m"} 8.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.9
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.3
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 12.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.28
sglang:num_retracted_reqs{model_name="m"} 1.0
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 6.0
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
sglang:cached_tokens_total{cache_source="device",model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 11.0
sglang:cache_hit_rate{model_name="m"} 0.0075
"""
SGLANG_SAYS = {
    "running": 12,
    "waiting": 5,
    "kv_use": 0.28,
    "prefix_queries": 8_128_902,
    "prefix_hits": 111,
    "preemptions": 6,
    "prompt_tokens": 8_128_902,
    "generation_tokens": 7_557_572,
}
RANKS = """\
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m",pp_rank="0",tp_rank="2"} 4.0
"""
PRIORITIES = """\
sglang:num_queue_reqs{model_name="m",priority=""} 3.0
sglang:num_queue_reqs{model_name="m",priority="1"} 2.0
sglang:num_queue_reqs{model_name="m",priority="5"} 1.0
"""
NOT_FINITE = """\
vllm:kv_cache_usage_perc NaN
vllm:num_requests_running +Inf
vllm:num_requests_waiting 1
"""
TGI = """\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 4
tgi_batch_current_max_tokens 4096
tgi_queue_size 7
tgi_request_generated_tokens_bucket{le="1"} 0
tgi_request_generated_tokens_sum 8123
tgi_request_generated_tokens_count 44
tgi_request_input_length_sum 900
"""
TIMES = """\
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 3.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 7.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 9.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 2.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 100.0
vllm:time_per_output_token_seconds_sum{engine="0",model_name="m"} 99.0
"""
PARTS = """\
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 1.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.5
vllm:request_queue_time_seconds_sum{engine="1",model_name="m"} 0.5
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 2.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 0.25
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 2.0
"""
SGLANG_PARTS = """\
sglang:queue_time_seconds_sum{model_name="m",tp_rank="0"} 2.0
sglang:queue_time_seconds_count{model_name="m",tp_rank="0"} 2.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="request_process",tp_rank="0"} 9.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="prefill_forward",tp_rank="0"} 0.25
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="request_process",tp_rank="0"} 9.0
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="prefill_forward",tp_rank="0"} 2.0
"""
PARTS_SAYS = {"queue_seconds": 2, "queue_values": 2, "prefill_seconds": 0.25, "prefill_values": 2}
OTHER_STAGE = 'sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="request_process"} 9.0'
OLD_TIMES_SAYS = {"ttft_seconds": 3.5, "ttft_values": 7}
TIMES_SAYS = {**OLD_TIMES_SAYS, "itl_seconds": 2, "itl_values": 100}
LLM_D = """\
# TYPE llm_d_epp_request_ttft_seconds histogram
llm_d_epp_request_ttft_seconds_sum{fairness_id="a",model_name="m",priority="0",streaming="true"} 1.5
llm_d_epp_request_ttft_seconds_sum{fairness_id="b",model_name="m",priority="0",streaming="false"} 1.0
llm_d_epp_request_ttft_seconds_count{fairness_id="a",model_name="m",priority="0",streaming="true"} 4.0
llm_d_epp_request_streaming_itl_seconds_sum{fairness_id="a",model_name="m"} 2.0
llm_d_epp_request_streaming_itl_seconds_count{fairness_id="a",model_name="m"} 40.0
llm_d_epp_average_kv_cache_utilization{name="pool"} 0.5
llm_d_epp_request_input_tokens_sum{fairness_id="a",model_name="m"} 800.0
llm_d_epp_request_output_tokens_sum{fairness_id="a",model_name="m"} 44.0
"""
LLM_D_SAYS = {
    "ttft_seconds": 2.5,
    "ttft_values": 4,
    "itl_seconds": 2,
    "itl_values": 40,
    "kv_use": 0.5,
    "prompt_tokens": 800,
    "generation_tokens": 44,
}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PARTS, PARTS_SAYS),
        (SGLANG_PARTS, PARTS_SAYS),
        (OTHER_STAGE, {}),
        (TIMES, TIMES_SAYS),
        (TIMES.replace("vllm:inter_token_latency", "x"), {**OLD_TIMES_SAYS, "itl_seconds": 99}),
        (LLM_D, LLM_D_SAYS),
        (VLLM, VLLM_SAYS),
        (OLD_VLLM, {"running": 1, "kv_use": 0.5, "prefix_queries": 10, "prefix_hits": 4}),
        (ENGINES, {"running": 12, "kv_use": pytest.approx(0.6)}),
        (SGLANG, SGLANG_SAYS),
        (RANKS, {"running": 7}),
        (PRIORITIES, {"waiting": 3}),
        (TGI, {"running": 4, "waiting": 7, "generation_tokens": 8_123, "prompt_tokens": 900}),
        (NOT_FINITE, {"waiting": 1}),
        ("vllm:num_requests_running -1\nvllm:num_requests_waiting 1\n", {"waiting": 1}),
        ("vllm:num_requests_running 2 1395066363000", {"running": 2}),
        ("vllm:num_requests_running 2\r\nvllm:num_requests_waiting 1\r\n", {"running": 2, "waiting": 1}),
        ("<html><body>404</body></html>", {}),
    ],
    ids=[
        "parts",
        "sglang's parts",
        "other stage",
        "times",
        "former times",
        "llm-d",
        "vllm",
        "old vllm",
        "two engines",
        "sglang",
        "ranks",
        "priorities",
        "tgi",
        "not finite",
        "negative",
        "timestamp",
        "crlf",
        "page",
    ],
)
def test_each_server_s_names_are_ours(text: str, says: dict[str, float]) -> None:
    assert read_metrics(text.encode()) == says
    assert says.keys() <= SERIES.keys()


@pytest.mark.parametrize(
    "text",
    [
        b"vllm:num_requests_running{",
        b"vllm:num_requests_running many",
        b"vllm:num_requests_running \xff",
        b'vllm:num_requests_running{engine=, ="0",modea} l_name="a"} 3.0',
    ],
)
def test_a_line_that_cannot_be_read_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_metrics(text)


@given(st.binary(max_size=60), st.sampled_from([b"", b"vllm:num_requests_running", b'tgi_queue_size{a="b"}']))
def test_nothing_that_a_server_says_is_more_than_an_error(junk: bytes, before: bytes) -> None:
    try:
        assert read_metrics(before + junk).keys() <= SERIES.keys()
    except ValueError:
        pass


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server whose `/metrics` is answered so; its URL."""
    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/metrics"
    finally:
        await runner.cleanup()


async def test_a_server_is_scraped_again_and_again_and_once_more_at_the_end() -> None:
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.Response(text=f"vllm:num_requests_running {len(asked)}\n")

    async with serving(answer) as url:
        scraper = ServerScraper(url, SystemClock(), period_ns=PATIENT_NS, headers={"X-Key": "secret"})
        began_ns = SystemClock().mono_ns()
        scraper.start()
        await wait_until(lambda: len(scraper.columns) > 3)
        closing_ns = SystemClock().mono_ns()
        await scraper.close()
    told = scraper.columns.samples(0)
    n = len(told.t)
    assert told.series["running"].values[-1] == len(asked), "the last one is that of the end"
    times_ns = scraper.columns.times_ns()
    assert began_ns <= times_ns[0] and times_ns[-2] <= closing_ns <= times_ns[-1] <= SystemClock().mono_ns()
    assert all(took > 0 for took in told.took)
    report = scraper.report()
    assert (report.scrapes, report.failed, report.failures) == (n, 0, {})
    assert {request.headers["X-Key"] for request in asked} == {"secret"}
    assert "secret" not in str(report) + str(told)
    assert len({request.transport for request in asked}) == 1, "one connection, kept"


async def test_a_scrape_is_stamped_with_its_middle_and_says_how_long_it_took() -> None:
    served_ns: list[tuple[int, int, int]] = []
    mono_ns = SystemClock().mono_ns

    async def answer(request: web.Request) -> web.Response:
        began_ns = mono_ns()
        await asyncio.sleep(0.03)
        middle_ns = mono_ns()
        await asyncio.sleep(0.03)
        served_ns.append((began_ns, middle_ns, mono_ns()))
        return web.Response(text=VLLM)

    async with serving(answer) as url:
        scraper = ServerScraper(url, SystemClock(), period_ns=QUICK_NS, timeout_ns=10**10)
        scraper.start()
        await wait_until(lambda: len(scraper.columns) > 1)
        await scraper.close()
    told = scraper.columns.samples(0)
    for served, t_ns, took in zip(served_ns, scraper.columns.times_ns(), told.took, strict=False):
        began_ns, middle_ns, ended_ns = served
        assert took * 1e9 >= ended_ns - began_ns
        assert abs(middle_ns - t_ns) <= took * 1e9 / 2
    # 60 ms each, one due every 10 ms; and the end waits for no more than a period.
    assert scraper.report().skipped >= 5
    assert scraper.report().failures == {"no answer in time": 1}
    assert {name: spec.values[0] for name, spec in told.series.items()} == VLLM_SAYS


def says(text: str, code: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, status=code)

    return answer


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(20)
    return web.Response()


async def leaves(request: web.Request) -> web.Response:
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says("", 503), "status 503, expected 200"),
        (says("<html>"), "the page has no metric of vLLM, SGLang, TGI or llm-d"),
        (says("vllm:num_requests_running {{{"), "not Prometheus' text"),
        (says(VLLM * 40), "the answer is longer than 0 MiB, the maximum: check the URL"),
        (hangs, "no answer in time"),
        (leaves, "server disconnected"),
    ],
)
async def test_a_scrape_that_fails_is_counted_and_told(answer: Answer, reason: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BODY_BYTES_MAX", 50_000)
        async with serving(answer) as url:
            timeout_ns = 200_000_000 if answer is hangs else 60_000_000_000
            scraper = ServerScraper(url, SystemClock(), period_ns=QUICK_NS, timeout_ns=timeout_ns)
            scraper.start()
            await wait_until(lambda: scraper.report().failed > 1)
            await scraper.close()
    report = scraper.report()
    late = report.failures.pop("no answer in time", 0) if reason != "no answer in time" else 0
    assert late <= 1, "the last one waits no longer than a period"
    assert report.failures == {reason: report.failed - late}
    assert report.scrapes == report.failed >= 3
    assert len(scraper.columns) == 0


@pytest.mark.parametrize("answer", [says("", 404), says("up 1\n")])
async def test_who_guesses_asks_once_where_there_are_no_metrics(answer: Answer) -> None:
    asked: list[str] = []

    async def counted(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers["User-Agent"])
        return await answer(request)

    async with serving(counted) as url:
        headers = {"User-Agent": "me/1"}
        scraper = ServerScraper(
            f"{url}?key=secret", SystemClock(), period_ns=QUICK_NS, optional=True, headers=headers
        )
        scraper.start()
        await wait_until(lambda: scraper.report().gave_up)
        await asyncio.sleep(5 * QUICK_NS / 1e9)
        await scraper.close()
    report = scraper.report()
    assert asked == ["me/1"], "and not once more at the end"
    assert (report.scrapes, report.failed, report.url) == (1, 1, url)
