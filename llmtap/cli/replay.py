"""`llmtap replay`: a trace, a capture or a workload sent to a server, on time."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from llmtap.cli.main import app
from llmtap.cli.report import tell_replay, write_beside
from llmtap.cli.shared import (
    FAILED,
    AnswerTimeout,
    ApiKeyEnv,
    BodyFields,
    CaFile,
    Headers,
    Heard,
    Json,
    ModelName,
    Outputs,
    Seed,
    SourceFormat,
    Stopped,
    argument,
    flag,
    need_capture,
    need_warmup,
    option,
    option_duration,
    stoppable,
)
from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S, Duration

if TYPE_CHECKING:
    from llmtap.cli.progress import ReplayLines
    from llmtap.load.replay.perform import Replay

__all__ = ["replay"]

EPILOG = """TRACE is anything that `llmtap convert --list` reads, a capture, or a workload (--workloads lists
them). Requests leave at their times, whatever became of the others (an open loop), unless --closed says how
many there may be at once. How late they left is told with every figure.

Examples:

  llmtap replay captures/ --target http://127.0.0.1:8000 --speed 2 --json result.json

  llmtap replay azure.csv --target http://127.0.0.1:8000 --rate 10 --requests 1000 --slo "ttft:500ms"

  llmtap replay conversation --target http://127.0.0.1:8000 --rate 4 --arrivals gamma:cv=2

  llmtap replay synthetic-uniform --target http://127.0.0.1:8000 --closed 32 --tokenizer models/mine

Exit codes: 0 ok; 1 the figures are not to be believed, or some requests failed (the report says which); 2 a
wrong option; 130 stopped by Ctrl-C, 143 by SIGTERM: once to send no more, twice to cut the answers under way;
the report so far is written.

Keys come from the environment (OPENAI_API_KEY, or --api-key-env) or a file (--header-file), and are in no
result."""

RETRY_WAIT: Final = "30s"
_ENDPOINTS: Final = {
    "chat": "chat.completions", "chat.completions": "chat.completions", "completions": "completions",
    "responses": "responses",
}  # fmt: skip


@app.command(short_help="Send a trace or a workload to a server, and measure.", epilog=EPILOG)
def replay(
    trace: Annotated[str, argument("TRACE", "What to send.")] = "",
    target: Annotated[
        str, option("URL", "Where to: http://host:port[/prefix], ws:// (Realtime) or grpc://.")
    ] = "",
    source_format: SourceFormat = None,
    requests: Annotated[
        int | None,
        option(
            "N", "The first N rows; a shorter trace is repeated. Of a workload 1,000.", min=1, max=100_000_000
        ),
    ] = None,
    window: Annotated[
        str | None, option("FROM[+FOR]", "Rows of that time of the trace, such as 10m+5m.")
    ] = None,
    share: Annotated[float | None, option("SHARE", "So many of the conversations, such as 0.1.")] = None,
    speed: Annotated[float | None, option("X", "X times as fast: bursts stay bursts.")] = None,
    rate: Annotated[
        float | None, option("RPS", "The same, by the mean rate; of conversations, their first turns'.")
    ] = None,
    arrivals: Annotated[
        str | None,
        option(
            "PROCESS",
            "poisson, uniform, gamma:cv=2, onoff:..., ramp:..., steps:..., diurnal:..., at-once; instead of "
            "the trace's own times. A workload has poisson.",
        ),
    ] = None,
    closed: Annotated[
        int | None, option("N", "Closed loop: N at a time, starting together.", min=1, max=100_000)
    ] = None,
    as_recorded: Annotated[
        bool,
        flag("--as-recorded", "Send a conversation's later turns at their recorded times, without waiting."),
    ] = False,
    duration: Annotated[str | None, option("TIME", "Send nothing after so long.")] = None,
    drain: Annotated[
        str | None,
        option(
            "TIME",
            "Answers may come for so long after the last request; else they are cut. Default: --timeout.",
        ),
    ] = None,
    endpoint: Annotated[str, option("chat|completions|responses", "What is asked.")] = "chat",
    model: ModelName = None,
    server: Annotated[
        str, option("auto|openai|vllm|sglang", "Whose fields may be sent (ignore_eos).")
    ] = "auto",
    tokenizer: Annotated[
        str | None,
        option(
            "FOLDER|FILE|tiktoken:NAME",
            "Prompts get their exact length by it: a model's folder (through its chat template), a "
            "tokenizer.json. Default: llmtap's own, which only `llmtap sim serve` has.",
        ),
    ] = None,
    header: Headers = None,
    header_file: Annotated[Path | None, option("FILE", "The same, a line each; for what is secret.")] = None,
    api_key_env: ApiKeyEnv = None,
    tenant_header: Annotated[str | None, option("NAME", "Send each row's tenant in this header.")] = None,
    body_field: BodyFields = None,
    no_stream: Annotated[bool, flag("--no-stream", "Ask for answers in one piece.")] = False,
    warmup: Annotated[
        str,
        option(
            "auto|none|N",
            "Before measuring: 100 requests and 10,000 tokens, then until latency is stable (IETF 4.5); "
            "none (a cold start), or N requests. As long as the first ones of the load, in other words.",
        ),
    ] = "none",
    processes: Annotated[int, option("N", "Sending processes; one schedule.", min=1, max=256)] = 1,
    ray: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Run them on that Ray cluster: auto, HOST:6379, ray://HOST:10001, or local. Prompts and keys "
            "travel over it.",
        ),
    ] = None,
    realtime: Annotated[bool, flag("--realtime", "Ask for real-time priority for them (root).")] = False,
    fresh: Annotated[bool, flag("--fresh", "A new connection for each request; default: kept.")] = False,
    timeout: AnswerTimeout = "10m",
    connect_timeout: Annotated[str, option("TIME", "For a connection.")] = "10s",
    retries: Annotated[int, option("N", "After refusals; counted. Default: none.", min=0, max=100)] = 0,
    retry_wait: Annotated[str, option("TIME", "A Retry-After above it is not waited for.")] = RETRY_WAIT,
    stop_errors: Annotated[
        str | None, option("SHARE[/N]", "Stop when so many of the latest N (100) failed: 50%.")
    ] = None,
    limit_in_flight: Annotated[
        int | None,
        option("N", "What is due while N are under way is skipped and counted; never delayed.", min=1),
    ] = None,
    no_request_ids: Annotated[bool, flag("--no-request-ids", "Send no X-Request-Id.")] = False,
    ca: CaFile = None,
    insecure: Annotated[bool, flag("--insecure", "Don't verify the certificate.")] = False,
    slo: Annotated[str | None, option("BOUNDS", "Goodput counts by: 'ttft:500ms tpot:50ms'.")] = None,
    metrics: Annotated[
        str | None,
        option(
            "URL|none",
            "The server's metrics. Default: its /metrics, asked for once where it has none. What is asked "
            "beside the load has the User-Agent llmtap-replay/VERSION.",
        ),
    ] = None,
    capture: Annotated[
        str | None, option("DIR", "Write the exchanges as a capture, and beside them the result.")
    ] = None,
    seed: Seed = 42,
    json: Json = None,
    html: Annotated[str | None, option("FILE", "Write a page with figures and charts; - is stdout.")] = None,
    markdown: Annotated[str | None, option("FILE", "Write the report as Markdown; - is stdout.")] = None,
    list_workloads: Annotated[bool, flag("--workloads", "List the workloads.")] = False,
) -> None:
    """Send a trace, a capture or a workload to a server, and measure the answers."""
    if list_workloads:
        _show_workloads()
        return
    if not trace:
        raise ConfigError("TRACE", "is missing", "llmtap replay --help")
    if not target:
        raise ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")
    if endpoint not in _ENDPOINTS:
        raise ConfigError("--endpoint", f"{endpoint!r} is none of chat, completions, responses")
    if server not in ("auto", "openai", "vllm", "sglang"):
        raise ConfigError("--server", f"{server!r} is none of auto, openai, vllm, sglang")
    outputs = Outputs(json=json, html=html, markdown=markdown)
    for name, number in (("--speed", speed), ("--rate", rate)):
        if number is not None and not 0 < number <= 1e6:
            raise ConfigError(name, f"expected a number above 0, at most 1e6, got {number:g}")
    if limit_in_flight is not None and closed is not None:
        raise ConfigError("--limit-in-flight", "only an open loop has one", "leave out --closed")
    need_warmup(warmup)
    from llmtap.cli.progress import watching_replay
    from llmtap.load.bodies import BodyOptions, parse_body_fields
    from llmtap.load.replay.options import ReplayOptions, protocol_of, read_headers, refuse_meaningless
    from llmtap.load.replay.perform import Replay
    from llmtap.load.replay.perform import ReplayStopped as NothingMeasured
    from llmtap.load.replay.plan import ReplayQuestion, make_plan
    from llmtap.load.run import parse_stop_errors
    from llmtap.metrics.objectives import Objectives

    if slo is not None:
        Objectives.parse(slo, "--slo")
    refuse_meaningless(
        target,
        {
            "--endpoint": endpoint != "chat", "--body-field": bool(body_field), "--no-stream": no_stream,
            "--fresh": fresh, "--retries": retries > 0, "--retry-wait": retry_wait != RETRY_WAIT,
            "--server": server != "auto", "--ca": ca is not None, "--insecure": insecure,
        },
    )  # fmt: skip
    named = _ENDPOINTS[endpoint]
    timeout_ns = option_duration("--timeout", timeout)
    from_ns, for_ns = _window(window)
    options = ReplayOptions(
        target=target, endpoint=named, model=model,
        headers=read_headers(header or [], header_file, api_key_env), tenant_header=tenant_header, ca=ca,
        insecure=insecure, closed=closed, processes=processes, ray=ray, realtime=realtime, fresh=fresh,
        timeout=timeout_ns, connect_timeout=option_duration("--connect-timeout", connect_timeout),
        duration=None if duration is None else option_duration("--duration", duration),
        drain=Duration(timeout_ns + NS_PER_S) if drain is None else option_duration("--drain", drain),
        retries=retries, retry_wait=option_duration("--retry-wait", retry_wait), warmup=warmup,
        limit_in_flight=limit_in_flight, request_ids="" if no_request_ids else "llmtap",
        stop_errors=None if stop_errors is None else parse_stop_errors(stop_errors),
        slo=slo, capture=capture, scrape=metrics,
    )  # fmt: skip
    body = BodyOptions(
        endpoint=named, server=server, model=model, stream=not no_stream,  # type: ignore[arg-type]
        temperature=0.0, fields=parse_body_fields(body_field or []),
    )  # fmt: skip
    if capture is not None:
        need_capture(capture)
    try:
        with stoppable() as heard:
            with watching_replay() as audience:
                plan = make_plan(
                    ReplayQuestion(
                        source=trace, source_format=source_format, requests=requests, rate_rps=rate,
                        speed=speed, arrivals=arrivals, window_from_ns=from_ns, window_for_ns=for_ns,
                        share=share, closed=closed is not None, as_recorded=as_recorded, tokenizer=tokenizer,
                        chat=named == "chat.completions" and protocol_of(target) == "http", seed=seed,
                    ),
                    audience.reading,
                )  # fmt: skip
                one = Replay(plan, options, body, audience)
                result = asyncio.run(_run(one, audience, heard))
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


async def _run(one: "Replay", audience: "ReplayLines", heard: Heard) -> dict[str, Any]:
    from llmtap.cli.progress import Answering

    heard.instead = Answering(one, audience, asyncio.get_running_loop())
    return await one.run()


def _window(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    begin, plus, length = text.partition("+")
    return option_duration("--window", begin), option_duration("--window", length) if plus else None


def _show_workloads() -> None:
    from llmtap.workload.registry import workloads

    for name, about in workloads().items():
        print(f"{name:24} {about}")
