"""`llmtap replay` (send a trace, a capture or a workload to a server on time) and `llmtap selftest`.

Reads the options, runs a `Replay` (`load/replay`), adds the self-test, and writes and prints the result by
means of `cli/report.py`.
"""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from llmtap.cli.main import app
from llmtap.cli.report import tell_replay, write_beside
from llmtap.cli.shared import (
    FAILED,
    Alpha,
    AnswerTimeout,
    ApiKeyEnv,
    BodyFields,
    CaFile,
    Headers,
    Heard,
    IdleCost,
    Json,
    ModelName,
    NoSelftest,
    Outputs,
    Percentiles,
    ReaderGrace,
    ReaderSpeed,
    Seed,
    SeveralValues,
    Slo,
    SourceFormat,
    Stopped,
    VllmGoodput,
    argument,
    flag,
    json_text,
    need_capture,
    need_warmup,
    option,
    option_duration,
    print_rich,
    read_objectives,
    read_percentiles,
    reader_of,
    stoppable,
)
from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S, Duration

if TYPE_CHECKING:
    from llmtap.cli.progress import ProgressLines
    from llmtap.load.replay.perform import Replay

EPILOG = """TRACE is a file in any format of `llmtap convert --list`, a capture, or a workload (--workloads
lists them). Requests are sent at their scheduled times, independent of earlier responses (open loop), with
two exceptions: --closed sets a concurrency; and later turns of a conversation wait for the previous response.
The report always shows how late the requests were sent.

llmtap's own requests for metrics and for the list of models have the User-Agent llmtap-replay/VERSION.

Examples:

  llmtap replay captures/ --target http://127.0.0.1:8000 --speed 2 --json=result.json

  llmtap replay azure.csv --target http://127.0.0.1:8000 --rate 10 --requests 1000 --slo "ttft:500ms"

  llmtap replay conversation --target http://127.0.0.1:8000 --rate 4 --arrivals gamma:cv=2

  llmtap replay synthetic-uniform --target http://127.0.0.1:8000 --closed 32 --tokenizer models/mine

Exit codes: 0 ok; 1 the result is invalid, or some requests failed (the report says which); 2 invalid option;
130 stopped by Ctrl-C, 143 by SIGTERM. The first signal stops sending; the second cancels the responses in
flight. In both cases a report of the completed part is written.

API keys are read from the environment (OPENAI_API_KEY, or --api-key-env) or a file (--header-file), and are
never stored in a result."""

_ENDPOINTS: Final = {
    "chat": "chat.completions", "chat.completions": "chat.completions", "completions": "completions",
    "responses": "responses",
}  # fmt: skip


@app.command(
    short_help="Send a trace or a workload to a server, and measure the responses.", epilog=EPILOG,
    cls=SeveralValues,
)  # fmt: skip
def replay(
    trace: Annotated[str, argument("TRACE", "Trace, capture or workload to send.")] = "",
    target: Annotated[
        str,
        option(
            "URL", "URL of the server: http://host:port[/prefix], ws://host:port[/v1/responses] or grpc://."
        ),
    ] = "",
    source_format: SourceFormat = None,
    requests: Annotated[
        int | None,
        option(
            "N",
            "Number of requests: the first N rows of the trace, repeated "
            "if it is shorter (default for a workload: 1,000).",
            min=1,
            max=100_000_000,
        ),
    ] = None,
    window: Annotated[
        str | None,
        option(
            "FROM[+FOR]",
            "Part of the trace to send: start and length, for example 10m+5m (default length: to the end).",
        ),
    ] = None,
    share: Annotated[
        float | None, option("SHARE", "Fraction of the trace to send, such as 0.1; conversations stay whole.")
    ] = None,
    speed: Annotated[
        float | None,
        option("X", "Factor by which the trace is sent faster; all gaps shrink by the same factor."),
    ] = None,
    rate: Annotated[
        float | None,
        option(
            "RPS",
            "Mean request rate to scale the trace to. For conversations, this is the rate of new "
            "conversations.",
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        option(
            "PROCESS",
            "Arrival process that replaces the times of the trace: poisson, uniform, at-once, gamma:cv=2, "
            "onoff:on=2s,off=8s, ramp:from=1,to=50,over=60s, steps:10x30s,20x30s or "
            "diurnal:amplitude=0.8,period=24h. Rates are in requests/s. A workload has "
            "poisson arrivals by default.",
        ),
    ] = None,
    closed: Annotated[
        int | None,
        option(
            "N",
            "Number of requests in flight (closed loop): N requests are sent at the start, then one for each "
            "response that ends.",
            min=1,
            max=100_000,
        ),
    ] = None,
    duration: Annotated[
        str | None, option("TIME", "Maximum duration of sending; later requests are not sent.")
    ] = None,
    drain: Annotated[
        str | None,
        option(
            "TIME",
            "Maximum time to wait for outstanding responses after the last request (default: --timeout).",
        ),
    ] = None,
    endpoint: Annotated[str, option("chat|completions|responses", "API endpoint.")] = "chat",
    model: ModelName = None,
    server: Annotated[
        str,
        option(
            "auto|openai|vllm|sglang",
            "Server type; decides which vendor-specific fields (ignore_eos) are sent.",
        ),
    ] = "auto",
    tokenizer: Annotated[
        str | None,
        option(
            "FOLDER|FILE|tiktoken:NAME",
            "Tokenizer for exact prompt lengths: model folder (its chat template is applied), "
            "tokenizer.json or tiktoken name. Default: the tokenizer of `llmtap sim serve`; with another "
            "server, it gives only approximate lengths.",
        ),
    ] = None,
    header: Headers = None,
    header_file: Annotated[
        Path | None, option("FILE", "File with header fields, one 'NAME: VALUE' per line; for secrets.")
    ] = None,
    api_key_env: ApiKeyEnv = None,
    tenant_header: Annotated[
        str | None, option("NAME", "Header field in which the tenant of each row is sent.")
    ] = None,
    body_field: BodyFields = None,
    no_stream: Annotated[bool, flag("--no-stream", "Request responses without streaming.")] = False,
    warmup: Annotated[
        str,
        option(
            "auto|none|N",
            "Warm-up before the measurement. auto: at least 100 requests and 10,000 output tokens, "
            "then until latency is stable. N: N requests. none: cold start. Warm-up "
            "requests have the lengths of the first requests of the load, with different text.",
        ),
    ] = "none",
    processes: Annotated[
        int, option("N", "Number of sending processes; they share one schedule.", min=1, max=256)
    ] = 1,
    ray: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Ray cluster that runs the sending processes: auto (a cluster that already runs on this host), "
            "HOST:6379, ray://HOST:10001, or local (a new cluster on this host). Prompts and API keys are "
            "sent to the cluster.",
        ),
    ] = None,
    fresh: Annotated[
        bool, flag("--fresh", "Open a new connection for each request (default: connections are reused).")
    ] = False,
    timeout: AnswerTimeout = "10m",
    connect_timeout: Annotated[str, option("TIME", "Maximum time to open a connection.")] = "10s",
    retries: Annotated[
        int,
        option(
            "N",
            "Maximum number of retries of a request. A request is retried after status 429 or 503, after a "
            "refused connection, and after a connection that was closed without a response. The report shows "
            "the number of retries.",
            min=0,
            max=100,
        ),
    ] = 0,
    stop_errors: Annotated[
        str | None,
        option(
            "SHARE",
            "Limit of failures: the replay stops if more than SHARE of the latest 100 requests failed, for "
            "example 50%.",
        ),
    ] = None,
    ca: CaFile = None,
    insecure: Annotated[bool, flag("--insecure", "Do not verify the server's certificate.")] = False,
    slo: Slo = None,
    goodput: VllmGoodput = None,
    percentiles: Percentiles = None,
    metrics: Annotated[
        str | None,
        option(
            "URL|none",
            "URL of the server's metrics, or none (default: /metrics of the server, if available).",
        ),
    ] = None,
    reader_speed: ReaderSpeed = None,
    alpha: Alpha = None,
    idle_cost: IdleCost = None,
    reader_grace: ReaderGrace = None,
    capture: Annotated[
        str | None,
        option("DIR", "Folder for a capture of the exchanges; the result is stored in the same folder."),
    ] = None,
    seed: Seed = 42,
    json: Json = None,
    html: Annotated[str | None, option("FILE", "File for an HTML report with charts; - is stdout.")] = None,
    markdown: Annotated[str | None, option("FILE", "File for the report as Markdown; - is stdout.")] = None,
    no_selftest: NoSelftest = False,
    list_workloads: Annotated[bool, flag("--workloads", "List the workloads.")] = False,
) -> None:
    """Send a trace, a capture or a workload to a server, and measure the responses."""
    if list_workloads:
        _show_workloads()
        return
    if not trace:
        raise ConfigError("TRACE", "is missing", "llmtap replay --help")
    if not target:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")
    if endpoint not in _ENDPOINTS:
        raise ConfigError("--endpoint", f"expected one of chat, completions, responses, got {endpoint!r}")
    if server not in ("auto", "openai", "vllm", "sglang"):
        raise ConfigError("--server", f"expected one of auto, openai, vllm, sglang, got {server!r}")
    outputs = Outputs(json=json, html=html, markdown=markdown)
    for name, number in (("--speed", speed), ("--rate", rate)):
        if number is not None and not 0 < number <= 1e6:
            raise ConfigError(name, f"expected a number above 0, at most 1e6, got {number:g}")
    need_warmup(warmup)
    from llmtap.cli.progress import watching_progress
    from llmtap.load.bodies import BodyOptions, parse_body_fields
    from llmtap.load.replay.options import ReplayOptions, read_headers, refuse_meaningless
    from llmtap.load.replay.perform import Replay
    from llmtap.load.replay.perform import ReplayStopped as NothingMeasured
    from llmtap.load.replay.plan import ReplayQuestion, make_plan
    from llmtap.load.run import parse_stop_errors
    from llmtap.load.sending import protocol_of

    objectives = read_objectives(slo, goodput)
    refuse_meaningless(
        target,
        {
            "--endpoint": endpoint != "chat", "--body-field": bool(body_field), "--no-stream": no_stream,
            "--fresh": fresh, "--retries": retries > 0, "--tenant-header": tenant_header is not None,
            "--server": server != "auto", "--ca": ca is not None, "--insecure": insecure,
        },
    )  # fmt: skip
    named = _ENDPOINTS[endpoint]
    timeout_ns = option_duration("--timeout", timeout)
    from_ns, for_ns = _window(window)
    options = ReplayOptions(
        target=target, endpoint=named, model=model,
        headers=read_headers(header or [], header_file, api_key_env), tenant_header=tenant_header, ca=ca,
        insecure=insecure, closed=closed, processes=processes, ray=ray, fresh=fresh,
        timeout=timeout_ns, connect_timeout=option_duration("--connect-timeout", connect_timeout),
        duration=None if duration is None else option_duration("--duration", duration),
        drain=Duration(timeout_ns + NS_PER_S) if drain is None else option_duration("--drain", drain),
        retries=retries, warmup=warmup,
        stop_errors=None if stop_errors is None else parse_stop_errors(stop_errors),
        slo=objectives, percentiles=read_percentiles(percentiles),
        reader=reader_of(reader_speed, alpha, idle_cost, reader_grace), capture=capture, scrape=metrics,
    )  # fmt: skip
    body = BodyOptions(
        endpoint=named, server=server, model=model, stream=not no_stream,  # type: ignore[arg-type]
        temperature=0.0, fields=parse_body_fields(body_field or []),
    )  # fmt: skip
    if capture is not None:
        need_capture(capture)
    try:
        with stoppable() as heard:
            with watching_progress() as audience:
                plan = make_plan(
                    ReplayQuestion(
                        source=trace, source_format=source_format, requests=requests, rate_rps=rate,
                        speed=speed, arrivals=arrivals, window_from_ns=from_ns, window_for_ns=for_ns,
                        share=share, closed=closed is not None, tokenizer=tokenizer,
                        chat=named == "chat.completions" and protocol_of(target) == "http", seed=seed,
                    ),
                    audience.reading,
                )  # fmt: skip
                one = Replay(plan, options, body, audience)
                result = asyncio.run(_run(one, audience, heard, selftest=not no_selftest and ray is None))
            if capture is not None:
                write_beside(capture, result)
            tell_replay(outputs, result)
    except Stopped as exc:
        print("llmtap: stopped", file=sys.stderr)
        raise typer.Exit(exc.code) from None
    except NothingMeasured as exc:
        assert heard.code is not None
        print(f"llmtap: {exc}", file=sys.stderr)
        raise typer.Exit(heard.code) from None
    if heard.code is not None:
        raise typer.Exit(heard.code)
    if not result["verdict"]["valid"]:
        raise typer.Exit(FAILED)


async def _run(one: "Replay", audience: "ProgressLines", heard: Heard, *, selftest: bool) -> dict[str, Any]:
    from llmtap.bench.selftest import run_selftest, selftest_load
    from llmtap.cli.progress import Answering

    heard.instead = Answering(one, audience, asyncio.get_running_loop())
    result = await one.run()
    options = one.options
    load = selftest_load(result, options.target, processes=options.processes)
    if selftest and load is not None and not heard.numbers:
        result["selftest"] = await run_selftest(load)
    return result


@app.command(
    short_help="Measure how accurate llmtap's TTFT and ITL are on this host.",
    epilog="Example:\n\n  llmtap selftest --streams 64 --itl 10ms",
)
def selftest(
    streams: Annotated[int, option("N", "Number of concurrent streams.", min=1, max=10_000)] = 32,
    itl: Annotated[str, option("TIME", "Time between the tokens of a stream (varies by 30 %).")] = "20ms",
    duration: Annotated[
        str, option("TIME", "Approximate duration; each stream repeats responses of about 1 s.")
    ] = "3s",
    processes: Annotated[int, option("N", "Number of client processes.", min=1, max=256)] = 1,
    json: Json = None,
) -> None:
    """Measure how accurate llmtap's TTFT and ITL measurements are on this host.

    The command reads streams from an embedded server that logs its send times. The error is the difference
    between a measured time and the time in this log.
    """
    from llmtap.bench.selftest import SelftestLoad, run_selftest
    from llmtap.report.replay import render_selftest

    itl_ns, duration_ns = option_duration("--itl", itl), option_duration("--duration", duration)
    for name, ns, least in (("--itl", itl_ns, NS_PER_S // 1_000), ("--duration", duration_ns, 1)):
        if not least <= ns <= 60 * NS_PER_S:
            raise ConfigError(name, "expected a time from 1 ms to 60 s")
    outputs = Outputs(json=json)
    load = SelftestLoad(streams=streams, itl=itl_ns, duration=duration_ns, processes=processes)
    result = asyncio.run(run_selftest(load))
    outputs.tell({"--json": lambda: json_text(result)}, lambda: print_rich(render_selftest(result)))
    if result["unmatched"] == result["n"]:
        raise typer.Exit(FAILED)


def _window(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    begin, plus, length = text.partition("+")
    return option_duration("--window", begin), option_duration("--window", length) if plus else None


def _show_workloads() -> None:
    from llmtap.workload.registry import workloads

    for name, about in workloads().items():
        print(f"{name:24} {about}")
