"""`llmtap sim`: the simulated engine as a server, and schedulers in virtual time.

Defines `sim serve` (`sim/server`), `sim run` (`sim/sweep`) and `sim tokenizer`, which writes the engine's
tokenizer. `sim_sweep.py` converts the options of `sim run`, runs the sweep and shows its progress.

Long because the options of its commands stand in their signatures.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtap.cli.main import app
from llmtap.cli.shared import (
    FAILED,
    Alpha,
    IdleCost,
    Json,
    Outputs,
    ReaderGrace,
    ReaderSpeed,
    SourceFormat,
    Stopped,
    argument,
    flag,
    json_text,
    need_capture,
    option,
    print_table,
    read_pairs,
    reader_of,
    stoppable,
)
from llmtap.errors import ConfigError

if TYPE_CHECKING:
    from llmtap.sim.sweep.runner import SweepRunner

sim = typer.Typer(
    no_args_is_help=True,
    help="Run the simulated engine as a server, or simulate schedulers in virtual time.",
)
app.add_typer(sim, name="sim", short_help="Run the simulated engine, or simulate schedulers.")

_SERVE_EPILOG = """Examples:

  llmtap sim serve --listen 127.0.0.1:8000 --ttft 200ms --itl 15ms

  llmtap sim serve --set pacing.jitter=0.3 --set pacing.tokens_per_chunk=4 --truth truth.jsonl

  llmtap sim serve --set guardrails.output_hold=16 --set faults.stall_rate=0.01

  llmtap sim serve --scheduler continuous_batching --serving seqs_max=64 --serving prefix_cache=true

  llmtap sim serve --grpc 127.0.0.1:8001

  llmtap sim serve --scheduler multi_bin_dynamic --reading bin_edges=1,30,117 --servers 2

Iteration-level schedulers form a new batch for each token; the others serve whole batches, as in the
multi-bin batching paper.

Request headers override most keys, for example x-sim-itl-ms: 5, x-sim-output-hold: all, x-sim-fault: reset;
--keys shows the header of each key. Any model name is accepted; tools and tool_choice are ignored.

Endpoints: /v1/chat/completions /v1/completions /v1/responses (also a WebSocket) /v1/realtime (a WebSocket)
/v1/models /v1/messages /api/chat /api/generate /metrics /health /sim/truth?since=N"""


@sim.command(short_help="Serve simulated tokens with the APIs of OpenAI and others.", epilog=_SERVE_EPILOG)
def serve(
    listen: Annotated[str, option(None, "HOST:PORT to listen on.")] = "127.0.0.1:8000",
    grpc: Annotated[
        str | None,
        option("HOST:PORT", "HOST:PORT for the gRPC services of vLLM and SGLang (default: none)."),
    ] = None,
    grpc_certificate: Annotated[
        Path | None, option("FILE", "PEM file with the TLS certificate for --grpc (default: no TLS).")
    ] = None,
    grpc_key: Annotated[
        Path | None, option("FILE", "PEM file with the private key of --grpc-certificate.")
    ] = None,
    ttft: Annotated[
        str | None, option(None, "Time from a request to its first token; default 150ms.")
    ] = None,
    itl: Annotated[str | None, option(None, "Time between tokens; default 20ms.")] = None,
    tokens: Annotated[
        int | None,
        option(
            None,
            "Tokens per response; at most max_tokens, and exactly max_tokens with ignore_eos. Default 40.",
        ),
    ] = None,
    spread: Annotated[
        float | None,
        option(
            None,
            "Maximum relative variation of TTFT and ITL between responses, such as 0.3 for +-30 %; default "
            "0.",
        ),
    ] = None,
    seed: Annotated[int | None, option(None, "Random seed; default 0.")] = None,
    dialect: Annotated[
        str | None, option(None, "Dialect of the API: openai or vllm; default openai.")
    ] = None,
    scheduler: Annotated[
        str,
        option(
            None,
            "Scheduler of the engine; `llmtap sim run --readings` lists them. fixed: tokens at the times of "
            "--ttft and --itl, without a scheduler. multi_bin_dynamic requires --reading bin_edges=...",
        ),
    ] = "fixed",
    serving: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Option of an iteration-level scheduler; `llmtap sim run --readings` lists these options. May be "
            "repeated.",
        ),
    ] = None,
    reading: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Interpretation of a detail that the multi-bin batching paper leaves open; may be repeated. For "
            "example, bin_edges=1,30,117 sets the lower edge of each bin of multi_bin_dynamic. `llmtap sim "
            "run --readings` lists the details and their values.",
        ),
    ] = None,
    servers: Annotated[
        int,
        option(
            None,
            "Number of simulated servers with one GPU each, for schedulers of whole batches.",
            min=1,
            max=10_000,
        ),
    ] = 1,
    truth: Annotated[
        Path | None,
        option(
            None,
            "File to which the planned and the actual send times of the tokens are appended, one JSON line "
            "for each request.",
        ),
    ] = None,
    assign: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Value of any key that --keys lists, for example pacing.jitter=0.3; may be repeated.",
            "--set",
        ),
    ] = None,
    list_keys: Annotated[
        bool, flag("--keys", "List every key with its default and its request header.")
    ] = False,
) -> None:
    """Serve the APIs of OpenAI, Anthropic and Ollama with simulated tokens at known times."""
    from llmtap.sim.server.options import load_engine, load_options

    if list_keys:
        _list_keys()
        return
    flags = {
        "ttft": ttft, "itl": itl, "tokens": tokens, "spread": spread, "seed": seed, "dialect": dialect,
    }  # fmt: skip
    values = {key: str(value) for key, value in flags.items() if value is not None}
    places = {key: f"--{key}" for key in values}
    for key, value in read_pairs("--set", assign, once=True).items():
        if key in values:
            raise ConfigError(places[key], f"cannot be combined with --set {key}")
        values[key], places[key] = value, f"--set {key}"
    options = load_options(values, places)
    engine = load_engine(
        scheduler, values, serving=read_pairs("--serving", serving, "NAME=VALUE", once=True),
        readings=read_pairs("--reading", reading, "NAME=VALUE", once=True), servers=servers, places=places,
    )  # fmt: skip

    import gc

    import uvloop
    from aiohttp import web

    from llmtap.net.listener import bind, is_free, parse_address
    from llmtap.sim.server.server import SimServer

    with _listening("--listen", listen):
        sock = bind(*parse_address(listen, "--listen"), shared=False)
    if grpc is not None:
        with _listening("--grpc", grpc):
            grpc_host, grpc_port = parse_address(grpc, "--grpc")
            is_free(grpc_host, grpc_port)
    try:
        server = SimServer(options, engine=engine, truth_file=truth)
    except OSError as exc:
        raise ConfigError("--truth", f"cannot write {truth}: {exc.strerror}") from None
    if grpc is not None:
        server.serve_grpc(grpc_host, grpc_port, _pem_pair(grpc_certificate, grpc_key))
    bound = sock.getsockname()

    def tell() -> None:
        print(f"llmtap sim: http://{bound[0]}:{bound[1]}/v1/chat/completions", flush=True)
        if grpc is not None:
            scheme = "grpc" if grpc_certificate is None else "grpcs"
            print(f"llmtap sim: {scheme}://{grpc_host or '[::]'}:{server.grpc_port}", flush=True)

    async def drain(_app: web.Application) -> None:
        print("llmtap sim: stopping; streams may end within 60 s, a second signal cuts them", flush=True)

    server.app.on_shutdown.append(drain)
    logging.getLogger("aiohttp.server").addFilter(_shorten_malformed)
    # What is loaded now stays; looking through it again and again would make streams late.
    # Answers leave no cycles behind, so there is little to find.
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1_000)
    web.run_app(
        server.app,
        sock=sock,
        loop=uvloop.new_event_loop(),
        access_log=None,
        handle_signals=True,
        handler_cancellation=True,  # who leaves gives back what the engine holds for him
        print=lambda *_: tell(),
    )


def _shorten_malformed(record: logging.LogRecord) -> bool:
    """Replace the traceback of a request that is not HTTP/1.1, for example HTTP/2, by one line."""
    from aiohttp.http_exceptions import HttpProcessingError

    if record.exc_info and isinstance(error := record.exc_info[1], HttpProcessingError):
        record.msg, record.args, record.exc_info = "event=malformed_request answer=%d", (error.code,), None
    return True


def _pem_pair(certificate: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """Return the contents of certificate and key; None without TLS. Raises ConfigError."""
    from llmtap.net.tls import server_context

    if certificate is None or key is None:
        if certificate is key:
            return None
        raise ConfigError("--grpc-key", "--grpc-certificate and --grpc-key go together")
    server_context(str(certificate), str(key), "--grpc-")
    return certificate.read_bytes(), key.read_bytes()


@contextmanager
def _listening(option_name: str, address: str) -> Iterator[None]:
    """Name the option of an address that is in use."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(option_name, f"cannot listen on {address}: {exc.strerror}") from None


def _list_keys() -> None:
    from llmtap.sim.server.options import Key, keys

    for row in (Key("key", "default", "request header", "meaning"), *keys()):
        print(f"{row.key or '-':26}  {row.default or '-':15}  {row.header or '-':25}  {row.meaning}")
    print("\nA duration in a header is text such as 5ms, or milliseconds if the header name ends in -ms.")


@sim.command(
    short_help="Write the tokenizer of `sim serve` as a tokenizer.json.",
    epilog="Example:\n\n  llmtap sim tokenizer tokenizer.json",
)
def tokenizer(
    file: Annotated[Path, argument("FILE", "Output file; - is stdout.")],
) -> None:
    """Write the tokenizer of `sim serve` as a tokenizer.json of Hugging Face's `tokenizers`."""
    import json

    from llmtap.workload.prompts.text import tokenizer_json

    text = json.dumps(tokenizer_json(), ensure_ascii=False)
    if str(file) == "-":
        print(text)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(str(file), f"cannot be written: {exc.strerror}") from None


_RUN_EPILOG = """TRACE is a file in any format of `llmtap convert --list`, a capture, or a synthetic workload
(--presets lists them). A latency model of a GPU calculates how long each batch takes. Default: the model of
the multi-bin batching paper. With --latency, the model is fitted to your data.

Iteration-level schedulers, such as continuous_batching, form a new batch for each token. The schedulers of
the multi-bin batching paper serve whole batches. The paper leaves several details open, and the ranking of
schedulers depends on them; --readings lists the details and their values.

Every combination of the given values is run. The runs are distributed over processes, or over a Ray cluster.

Examples:

  llmtap sim run trace.csv --scheduler static_fifo,dynamic_no_bins,multi_bin_dynamic --scale 100

  llmtap sim run trace.csv --scale 1,10,100 --servers 1,2,4 --vary bins=1,2,4,8 --results runs.jsonl

  llmtap sim run trace.csv --preset grid --requests 10000 --html grid.html

  llmtap sim run chat --scheduler continuous_batching,chunked_prefill --rate 1,2,4 --slo "ttft:1s"

  llmtap sim run trace.csv --preset methods --results runs.jsonl --ray local"""


@sim.command(short_help="Simulate a trace with several schedulers in virtual time.", epilog=_RUN_EPILOG)
def run(
    trace: Annotated[str, argument("TRACE", "Trace, capture or workload to simulate.")] = "",
    source_format: SourceFormat = None,
    scheduler: Annotated[
        str | None,
        option(
            "NAME,...",
            "Schedulers; --readings lists them (default: static_fifo, dynamic_no_bins and "
            "multi_bin_dynamic, the three of the multi-bin batching paper).",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        option("X,...", "Factors that multiply the arrival rate; default 1."),
    ] = None,
    rate: Annotated[
        str | None,
        option(
            "RPS,...", "Mean arrival rates in requests/s to scale the trace to, as an alternative to --scale."
        ),
    ] = None,
    requests: Annotated[
        str | None,
        option("N,...", "Numbers of requests: the first N rows of the trace, repeated if it is shorter."),
    ] = None,
    servers: Annotated[
        str | None, option("N,...", "Numbers of simulated servers with one GPU each; default 1.")
    ] = None,
    bins: Annotated[
        str | None,
        option(
            "K|EDGE,...",
            "Number of output-length bins, for example 4, or the lower edge of each bin in tokens, for "
            "example 0,64,256; default 8.",
        ),
    ] = None,
    eps: Annotated[
        str | None,
        option(
            None,
            "Tolerance around the SLA per token; default 5ms. While the time per token is within it, a "
            "scheduler that adapts the batch size keeps the size. --reading token_sla sets the SLA.",
        ),
    ] = None,
    predictor: Annotated[
        str | None,
        option(
            "perfect|prompt|noisy|shuffled",
            "Predictor of output lengths. perfect: the true length. prompt: 1.5 x (prompt tokens)^0.7. "
            "noisy: as prompt, with about 10 % random noise. shuffled: the true lengths in random order. "
            "Default: perfect.",
        ),
    ] = None,
    reading: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Interpretation of a detail that the multi-bin batching paper leaves open; --readings lists the "
            "details and their values. May be repeated.",
        ),
    ] = None,
    serving: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Option of the iteration-level schedulers; --readings lists these options. May be repeated.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        option(
            "NAME=V,V,...",
            "Several values of one setting: bins, or an option of --reading or --serving. The separator is a "
            "comma, or | if a value contains a comma. May be repeated.",
        ),
    ] = None,
    readings: Annotated[
        bool, flag("--readings", "List the schedulers and the options of --reading and --serving.")
    ] = False,
    preset: Annotated[
        str | None,
        option(
            "NAME",
            "Predefined sweep; --presets lists them. An option on the command line replaces the preset's "
            "values of that option.",
        ),
    ] = None,
    presets: Annotated[bool, flag("--presets", "List the presets and workloads.")] = False,
    latency: Annotated[
        str | None,
        option(
            "CSV|CAPTURE",
            "Data to fit the latency model to: CSV with batch_size, "
            "max_seq_len and mean_latency_sec, or a capture.",
        ),
    ] = None,
    fit_chunk: Annotated[
        int | None,
        option(
            "TOKENS",
            "Chunk size of chunked prefill on the server where the CAPTURE of --latency was recorded.",
            min=1,
        ),
    ] = None,
    capacity: Annotated[
        float | None,
        option(
            "SHARE",
            "Search for the highest request rate at which at most SHARE of the requests exceed a limit (see "
            "--capacity-by), for example 0.01.",
        ),
    ] = None,
    capacity_by: Annotated[
        str,
        option(
            "LIMIT,...",
            "Limits that --capacity uses: request (--reading request_sla, default 20s), token (--reading "
            "token_sla, default 10ms) or slo (those of --slo). Each limit gets its own "
            "search.",
        ),
    ] = "request",
    slo: Annotated[
        str | None,
        option(
            "BOUNDS",
            "Limits that a request must meet to count as goodput, for example 'ttft:1s tbc_max:200ms'. "
            "Other names: ttft_any, ttfb, tpot, e2e, user_idle, tbc_p99, jitter.",
        ),
    ] = None,
    reader_speed: ReaderSpeed = None,
    alpha: Alpha = None,
    idle_cost: IdleCost = None,
    reader_grace: ReaderGrace = None,
    capture: Annotated[str | None, option("DIR", "Folder for a capture of each run's exchanges.")] = None,
    seed: Annotated[
        str | None, option("N,...", "Random seeds of predictors and workloads; default 42.")
    ] = None,
    results: Annotated[
        Path | None,
        option("FILE", "File to append each result to; runs that it already contains are skipped."),
    ] = None,
    jobs: Annotated[int | None, option("N", "Number of processes (default: number of CPUs).", min=1)] = None,
    ray: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Ray cluster that runs the simulations: auto (a cluster that already runs on this host), "
            "HOST:6379, ray://HOST:10001, or local (a new cluster on this host).",
        ),
    ] = None,
    table: Annotated[
        Path | None, option("FILE", "Table with one row per run; the file name ends in .csv or .parquet.")
    ] = None,
    json: Json = None,
    html: Annotated[str | None, option("FILE", "File for an HTML report with curves; - is stdout.")] = None,
) -> None:
    """Simulate a trace with several schedulers in virtual time, and compare them."""
    from llmtap.cli.sim_sweep import show_presets, show_readings

    if readings or presets:
        (show_readings if readings else show_presets)()
        return
    if not trace:
        raise ConfigError("TRACE", "is missing", "llmtap sim run --help")
    from llmtap.cli.sim_sweep import (
        AxesRead,
        models_fitted,
        names_in,
        objectives_text,
        preset_named,
        run_sweep,
        scheduler_names,
    )
    from llmtap.sim.sweep.sweep import CAPACITY_BY, SUFFIXES, write_runs

    given = AxesRead()
    given.schedulers(scheduler)
    if scale is not None and rate is not None:
        raise ConfigError("--rate", "cannot be combined with --scale")
    for name, text in (("scale", scale), ("rate", rate)):
        given.numbers(name, text, float)
    for name, text in (("requests", requests), ("servers", servers), ("seed", seed)):
        given.numbers(name, text, int)
    if capacity is not None and not 0 <= capacity < 1:
        raise ConfigError("--capacity", f"expected a share from 0 to below 1, got {capacity:g}")
    bounds = names_in(capacity_by, "--capacity-by", "bound", CAPACITY_BY)
    if table is not None and table.suffix not in SUFFIXES:
        raise ConfigError("--table", f"{table} ends neither in .csv nor in .parquet")
    given.settings(reading or [], "--reading")
    edges_or_bins = "bin_edges" if bins and "," in bins else "bins"
    for name, text, flag_name in (
        (edges_or_bins, bins, "--bins"), ("eps", eps, "--eps"), ("predictor", predictor, "--predictor")
    ):  # fmt: skip
        if text is not None:
            given.settings([f"{name}={text}"], flag_name)
    given.settings(serving or [], "--serving")
    given.settings(vary or [], "--vary")
    named = preset_named(preset)
    axes = given.whole(named, preset or "")
    common = models_fitted(latency, fit_chunk, scheduler_names(axes, named)) | {
        "objectives": objectives_text(slo, named), "capacity": capacity, "capacity_by": bounds,
        "capture": capture, "follow": None if named is None else named.follow,
        "reader": reader_of(reader_speed, alpha, idle_cost, reader_grace),
    }  # fmt: skip
    if ray is not None and ray != "local" and jobs is not None:
        raise ConfigError("--jobs", "cannot be combined with --ray")
    if capacity is not None and "slo" in bounds and not common["objectives"]:
        raise ConfigError("--capacity-by", "slo needs objectives", "such as --slo ttft:1s")
    outputs = Outputs(json=json, html=html)
    if capture is not None:
        if ray in (None, "local"):
            need_capture(capture)
        elif "://" not in capture and not Path(capture).is_absolute():
            raise ConfigError(
                "--capture", f"each node of --ray has a folder {capture} of its own",
                "a URL, or an absolute path of a folder that all nodes share",
            )  # fmt: skip
    sla = named is not None or capacity is not None or bool(axes.keys() & {"request_sla", "token_sla", "eps"})
    swept = any(len(values) > 1 for name, values in axes.items() if name != "scheduler")
    loud = swept or named is not None or results is not None
    sweepers: list[SweepRunner] = []
    try:
        with stoppable():
            told, notes, failed = run_sweep(
                trace, source_format, axes, named, common, results=results, workers=jobs, ray=ray, loud=loud,
                sweepers=sweepers,
            )  # fmt: skip
            if not told:  # a page of nothing cannot be made
                outputs.files.pop("--html", None)
                outputs.stdout = None if outputs.stdout == "--html" else outputs.stdout
            if table is not None:
                write_runs(table, told)
            texts = {"--json": lambda: json_text(told), "--html": lambda: _page(told, sla=sla)}
            outputs.tell(texts, lambda: _show(told, notes, sla=sla))
    except Stopped as exc:
        done = sum(len(sweeper.attempts) for sweeper in sweepers)
        kept = f"are in {results}: the same command continues from there"
        where = "are complete, and none is kept without --results FILE" if results is None else kept
        print(f"llmtap: stopped; {done:,} runs {where}", file=sys.stderr)
        raise typer.Exit(exc.code) from None
    if failed:
        raise typer.Exit(FAILED)


def _page(told: list[dict[str, Any]], *, sla: bool) -> str:
    from llmtap.report.sweep_page import sweep_html

    return sweep_html(told, sla=sla)


def _show(told: list[dict[str, Any]], notes: list[str], *, sla: bool) -> None:
    from llmtap.report.sweep import sweep_lines, sweep_table

    if told:
        print_table(sweep_table(told, sla=sla))
        for line in sweep_lines(told, sla=sla):
            print(line)
    for note in notes:
        print(f"note: {note}")
