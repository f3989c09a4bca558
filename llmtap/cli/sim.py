"""`llmtap sim`: the simulated engine as a server, and schedulers in virtual time.

Defines `sim serve` (`sim/server`), `sim run` (`sim/sweep`) and `sim tokenizer`, which writes the engine's
tokenizer. `sim_sweep.py` converts the options of `sim run`, runs the sweep and shows its progress.

The module is long because it declares the options of three commands.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import Meta, Struct

from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import Goodput, Json, ReaderOptions, Require
from llmtap.cli.shared import (
    Outputs,
    SeveralValues,
    Stopped,
    exit_codes,
    json_text,
    need_capture,
    print_line,
    print_message,
    print_rich,
    print_table,
    read_pairs,
    stoppable,
)
from llmtap.errors import ConfigError, ExitCode
from llmtap.load.options import SourceFormat
from llmtap.options.fields import flags_given, opt

if TYPE_CHECKING:
    from llmtap.report.sweep_figures import SweepFigure
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
/v1/models /v1/messages /api/chat /api/generate /bench/chat/completions (as exo) /metrics /health
/sim/truth?since=N"""


class _ListenOptions(Struct, frozen=True, kw_only=True):
    """Addresses of the server."""

    listen: Annotated[str, opt("HOST:PORT to listen on.")] = "127.0.0.1:8000"
    grpc: Annotated[
        str | None, opt("HOST:PORT for the gRPC services of vLLM and SGLang (default: none).", "HOST:PORT")
    ] = None
    grpc_certificate: Annotated[
        Path | None, opt("PEM file with the TLS certificate for --grpc (default: no TLS).", "FILE")
    ] = None
    grpc_key: Annotated[Path | None, opt("PEM file with the private key of --grpc-certificate.", "FILE")] = (
        None
    )


class _AnswerOptions(Struct, frozen=True, kw_only=True):
    """Answers, by flag or key."""

    ttft: Annotated[str | None, opt("Time from a request to its first token; default 150ms.")] = None
    itl: Annotated[str | None, opt("Time between tokens; default 20ms.")] = None
    tokens: Annotated[
        int | None,
        opt("Tokens per response; at most max_tokens, and exactly max_tokens with ignore_eos. Default 40."),
    ] = None
    spread: Annotated[
        float | None,
        opt(
            "Maximum relative variation of TTFT and ITL between responses, such as 0.3 for +-30 %; default 0."
        ),
    ] = None
    seed: Annotated[int | None, opt("Random seed; default 0.")] = None
    dialect: Annotated[str | None, opt("Dialect of the API: openai or vllm; default openai.")] = None
    assign: Annotated[
        list[str] | None,
        opt(
            "Value of any key that --keys lists, for example pacing.jitter=0.3; may be repeated.",
            "KEY=VALUE",
            "--set",
        ),
    ] = None


class _EngineOptions(Struct, frozen=True, kw_only=True):
    """The engine behind the answers."""

    scheduler: Annotated[
        str,
        opt(
            "Scheduler of the engine; `llmtap sim run --readings` lists them. fixed: tokens at the times of "
            "--ttft and --itl, without a scheduler. multi_bin_dynamic requires --reading bin_edges=..."
        ),
    ] = "fixed"
    serving: Annotated[
        list[str] | None,
        opt(
            "Option of an iteration-level scheduler; `llmtap sim run --readings` lists these options. May be "
            "repeated.",
            "NAME=VALUE",
        ),
    ] = None
    reading: Annotated[
        list[str] | None,
        opt(
            "Interpretation of a detail that the multi-bin batching paper leaves open; may be repeated. For "
            "example, bin_edges=1,30,117 sets the lower edge of each bin of multi_bin_dynamic. `llmtap sim "
            "run --readings` lists the details and their values.",
            "NAME=VALUE",
        ),
    ] = None
    servers: Annotated[
        int,
        opt(
            "Number of simulated servers with one GPU each, for schedulers of whole batches.", ge=1, le=10_000
        ),
    ] = 1


@command(sim, short_help="Serve simulated tokens with the APIs of OpenAI and others.", epilog=_SERVE_EPILOG)
def serve(
    listening: _ListenOptions,
    answers: _AnswerOptions,
    chosen: _EngineOptions,
    truth: Annotated[
        Path | None,
        opt(
            "File to which the planned and the actual send times of the tokens are appended, one JSON line "
            "for each request."
        ),
    ] = None,
    list_keys: Annotated[
        bool, opt("List every key with its default and its request header.", None, "--keys")
    ] = False,
) -> None:
    """Serve the APIs of OpenAI, Anthropic and Ollama with simulated tokens at known times."""
    from llmtap.sim.server.options import load_engine, load_options

    if list_keys:
        _list_keys()
        return
    flags = msgspec.structs.asdict(answers)
    values = {key: str(value) for key, value in flags.items() if value is not None and key != "assign"}
    places = {key: f"--{key}" for key in values}
    for key, value in read_pairs("--set", answers.assign, once=True).items():
        if key in values:
            raise ConfigError(places[key], f"cannot be combined with --set {key}")
        values[key], places[key] = value, f"--set {key}"
    options = load_options(values, places)
    engine = load_engine(
        chosen.scheduler,
        values,
        serving=read_pairs("--serving", chosen.serving, "NAME=VALUE", once=True),
        readings=read_pairs("--reading", chosen.reading, "NAME=VALUE", once=True),
        servers=chosen.servers,
        places=places,
    )

    import gc

    import uvloop
    from aiohttp import web

    from llmtap.net.listener import bind, is_free, parse_address
    from llmtap.sim.server.server import SimServer

    with _naming_option("--listen", listening.listen):
        sock = bind(*parse_address(listening.listen, "--listen"), shared=False)
    if listening.grpc is not None:
        with _naming_option("--grpc", listening.grpc):
            grpc_host, grpc_port = parse_address(listening.grpc, "--grpc")
            is_free(grpc_host, grpc_port)
    try:
        server = SimServer(options, engine=engine, truth_file=truth)
    except OSError as exc:
        raise ConfigError("--truth", f"cannot write {truth}: {exc.strerror}") from None
    if listening.grpc is not None:
        server.serve_grpc(grpc_host, grpc_port, _pem_pair(listening.grpc_certificate, listening.grpc_key))
    bound = sock.getsockname()

    def tell() -> None:
        print(f"llmtap sim: http://{bound[0]}:{bound[1]}/v1/chat/completions", flush=True)
        if listening.grpc is not None:
            scheme = "grpc" if listening.grpc_certificate is None else "grpcs"
            print(f"llmtap sim: {scheme}://{grpc_host or '[::]'}:{server.grpc_port}", flush=True)

    async def drain(_app: web.Application) -> None:
        print("llmtap sim: stopping; streams may end within 60 s, a second signal cuts them", flush=True)

    server.app.on_shutdown.append(drain)
    logging.getLogger("aiohttp.server").addFilter(_shorten_malformed)
    # Exclude all objects that exist now from garbage collection, and collect rarely: a long collection would
    # make streams late. Answers leave no reference cycles, so there is little to collect.
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1_000)
    web.run_app(
        server.app,
        sock=sock,
        loop=uvloop.new_event_loop(),
        access_log=None,
        handle_signals=True,
        handler_cancellation=True,  # Free what the engine holds for a client that leaves.
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
        given, missing = ("key", "certificate") if certificate is None else ("certificate", "key")
        raise ConfigError(
            f"--grpc-{given}", f"is given, but --grpc-{missing} is missing", "for TLS, give both of them"
        )
    server_context(str(certificate), str(key), "--grpc-")
    return certificate.read_bytes(), key.read_bytes()


@contextmanager
def _naming_option(option_name: str, address: str) -> Iterator[None]:
    """Convert an OSError to a ConfigError naming the option, for an address that cannot be used."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(option_name, f"cannot listen on {address}: {exc.strerror}") from None


def _list_keys() -> None:
    from llmtap.sim.server.options import Key, keys

    for row in (Key("key", "default", "request header", "meaning"), *keys()):
        print(f"{row.key or '-':26}  {row.default or '-':15}  {row.header or '-':25}  {row.meaning}")
    print("\nA duration in a header is text such as 5ms, or milliseconds if the header name ends in -ms.")


@command(
    sim,
    short_help="Write the tokenizer of `sim serve` as a tokenizer.json.",
    epilog="Example:\n\n  llmtap sim tokenizer tokenizer.json",
)
def tokenizer(
    file: Annotated[Path, opt("Output file; - is stdout.", "FILE", argument=True)],
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

  llmtap sim run bursty --preset defaults

  llmtap sim run trace.csv --preset grid --requests 10000 --html grid.html

  llmtap sim run chat --scheduler continuous_batching,chunked_prefill --rate 1,2,4 --slo "ttft:1s"

  llmtap sim run trace.csv --preset methods --results runs.jsonl --ray local

"""


class _TraceOptions(Struct, frozen=True, kw_only=True):
    """The trace, and the lists of the command."""

    trace: Annotated[str, opt("Trace, capture or workload to simulate.", "TRACE", argument=True)] = ""
    source_format: SourceFormat = None
    readings: Annotated[bool, opt("List the schedulers and the options of --reading and --serving.")] = False
    presets: Annotated[bool, opt("List the presets and workloads.")] = False


class _AxisOptions(Struct, frozen=True, kw_only=True):
    """Values of the sweep."""

    scheduler: Annotated[
        str | None,
        opt(
            "Schedulers; --readings lists them (default: static_fifo, dynamic_no_bins and "
            "multi_bin_dynamic, the three of the multi-bin batching paper).",
            "NAME,...",
        ),
    ] = None
    scale: Annotated[str | None, opt("Factors that multiply the arrival rate; default 1.", "X,...")] = None
    rate: Annotated[
        str | None,
        opt(
            "Mean arrival rates in requests/s to scale the trace to, as an alternative to --scale.", "RPS,..."
        ),
    ] = None
    requests: Annotated[
        str | None,
        opt("Numbers of requests: the first N rows of the trace, repeated if it is shorter.", "N,..."),
    ] = None
    servers: Annotated[
        str | None, opt("Numbers of simulated servers with one GPU each; default 1.", "N,...")
    ] = None
    router: Annotated[
        str | None,
        opt(
            "Routers in front of several servers of an iteration-level scheduler. round-robin: in turn. "
            "least-loaded: to the server with the fewest open requests. prefix-aware: to the server that got "
            "the longest beginning of the prompt before, unless it has 32 open requests more than another. "
            "Default: round-robin.",
            "NAME,...",
        ),
    ] = None
    bins: Annotated[
        str | None,
        opt(
            "Number of output-length bins, for example 4, or the lower edge of each bin in tokens, for "
            "example 0,64,256; default 8.",
            "K|EDGE,...",
        ),
    ] = None
    eps: Annotated[
        str | None,
        opt(
            "Tolerance around the SLA per token; default 5ms. While the time per token is within it, a "
            "scheduler that adapts the batch size keeps the size. --reading token_sla sets the SLA."
        ),
    ] = None
    predictor: Annotated[
        str | None,
        opt(
            "Predictor of output lengths. perfect: the true length. prompt: 1.5 x (prompt tokens)^0.7. "
            "noisy: as prompt, with about 10 % random noise. shuffled: the true lengths in random order. "
            "Default: perfect.",
            "perfect|prompt|noisy|shuffled",
        ),
    ] = None
    reading: Annotated[
        list[str] | None,
        opt(
            "Interpretation of a detail that the multi-bin batching paper leaves open; --readings lists the "
            "details and their values. May be repeated.",
            "NAME=VALUE",
        ),
    ] = None
    serving: Annotated[
        list[str] | None,
        opt(
            "Option of the iteration-level schedulers; --readings lists these options. May be repeated.",
            "NAME=VALUE",
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        opt(
            "Several values of one setting: bins, or an option of --reading or --serving. The separator is a "
            "comma, or | if a value contains a comma. May be repeated.",
            "NAME=V,V,...",
        ),
    ] = None
    preset: Annotated[
        str | None,
        opt(
            "Predefined sweep, for example defaults: the multi-bin batching paper's own run, with 4 GPUs, 4 "
            "bins and 10 times the rate among others. --presets lists them. An option on the command line "
            "replaces the preset's values of that option.",
            "NAME",
        ),
    ] = None
    seed: Annotated[str | None, opt("Random seeds of predictors and workloads; default 42.", "N,...")] = None


class _FitOptions(Struct, frozen=True, kw_only=True):
    """Data to fit the latency model to."""

    latency: Annotated[
        str | None,
        opt(
            "Data to fit the latency model to: CSV with batch_size, "
            "max_seq_len and mean_latency_sec, or a capture.",
            "CSV|CAPTURE",
        ),
    ] = None
    fit_chunk: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        opt(
            "Chunk size of chunked prefill on the server where the CAPTURE of --latency was recorded.",
            "TOKENS",
        ),
    ] = None
    fit_kv_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        opt(
            "Number of KV cache blocks of the server where the CAPTURE of --latency was recorded (vLLM: "
            "num_gpu_blocks), each of --serving block tokens. The fit then knows which requests waited for "
            "memory, and the simulation has the same memory unless --serving kv_tokens sets another.",
            "N",
        ),
    ] = None
    latency_from: Annotated[
        str | None,
        opt(
            "Format of the CAPTURE of --latency, from `llmtap convert --list` (default: detected from its "
            "content).",
            "NAME",
        ),
    ] = None


class _CapacityOptions(Struct, frozen=True, kw_only=True):
    """Limits."""

    capacity: Annotated[
        float | None,
        opt(
            "Search for the highest request rate at which at most SHARE of the requests exceed a limit (see "
            "--capacity-by), for example 0.01.",
            "SHARE",
        ),
    ] = None
    capacity_by: Annotated[
        str | None,
        opt(
            "Limits that --capacity uses: request (--reading request_sla, default 20s), token (--reading "
            "token_sla, default 10ms) or slo (those of --slo). Each limit gets its own "
            "search. Default: request.",
            "LIMIT,...",
        ),
    ] = None
    slo: Annotated[
        str | None,
        opt(
            "Limits that a request must meet to count as goodput, for example 'ttft:1s tbc_max:200ms'. "
            "Other names: ttft_any, ttfb, tpot, e2e, user_idle, tbc_p99, jitter.",
            "BOUNDS",
        ),
    ] = None
    goodput: Goodput = None
    require: Require = None


class _RunOptions(Struct, frozen=True, kw_only=True):
    """How the runs are made, and where results go."""

    capture: Annotated[str | None, opt("Folder for a capture of each run's exchanges.", "DIR")] = None
    results: Annotated[
        Path | None, opt("File to append each result to; runs that it already contains are skipped.", "FILE")
    ] = None
    jobs: Annotated[
        Annotated[int, Meta(ge=1)] | None, opt("Number of processes (default: number of CPUs).", "N")
    ] = None
    ray: Annotated[
        str | None,
        opt(
            "Ray cluster that runs the simulations: auto (a cluster that already runs on this host), "
            "HOST:6379, ray://HOST:10001, or local (a new cluster on this host).",
            "ADDRESS",
        ),
    ] = None
    table: Annotated[
        Path | None, opt("Table with one row per run; the file name ends in .csv or .parquet.", "FILE")
    ] = None
    json: Json = None
    html: Annotated[str | None, opt("File for an HTML report with curves; - is stdout.", "FILE")] = None


@command(
    sim,
    cls=SeveralValues,
    short_help="Simulate a trace with several schedulers in virtual time.",
    epilog=_RUN_EPILOG + exit_codes(),
)
def run(
    work: _TraceOptions,
    axes: _AxisOptions,
    fit: _FitOptions,
    goals: _CapacityOptions,
    runs: _RunOptions,
    reader: ReaderOptions,
) -> None:
    """Simulate a trace with several schedulers in virtual time, and compare them."""
    from llmtap.cli.sim_sweep import show_presets, show_readings

    if work.readings or work.presets:
        (show_readings if work.readings else show_presets)()
        return
    from llmtap.cli.sim_sweep import (
        AxesRead,
        models_fitted,
        names_in,
        objectives_text,
        preset_named,
        run_sweep,
        scheduler_names,
    )
    from llmtap.gates.requirements import Requirements, exit_code
    from llmtap.report.sweep import run_labels
    from llmtap.report.sweep_figures import figure_of
    from llmtap.sim.sweep.sweep import CAPACITY_BY, SUFFIXES, write_runs

    named = preset_named(axes.preset)
    trace = work.trace or (named.trace if named is not None else "")
    if not trace:
        raise ConfigError("TRACE", "is missing", "`llmtap sim run --help` shows the arguments")
    given = AxesRead()
    given.schedulers(axes.scheduler)
    given.routers(axes.router)
    if axes.scale is not None and axes.rate is not None:
        raise ConfigError("--rate", "cannot be combined with --scale")
    for name, text in (("scale", axes.scale), ("rate", axes.rate)):
        given.numbers(name, text, float)
    for name, text in (("requests", axes.requests), ("servers", axes.servers), ("seed", axes.seed)):
        given.numbers(name, text, int)
    if goals.capacity is not None and not 0 <= goals.capacity < 1:
        raise ConfigError("--capacity", f"expected a share from 0 to below 1, got {goals.capacity:g}")
    if goals.capacity is None and goals.capacity_by is not None:
        raise ConfigError("--capacity-by", "requires --capacity", "such as --capacity 0.01")
    bounds = names_in(goals.capacity_by or "request", "--capacity-by", "bound", CAPACITY_BY)
    if runs.table is not None and runs.table.suffix not in SUFFIXES:
        raise ConfigError("--table", f"{runs.table} ends neither in .csv nor in .parquet")
    given.settings(axes.reading or [], "--reading")
    edges_or_bins = "bin_edges" if axes.bins and "," in axes.bins else "bins"
    for name, text, flag_name in (
        (edges_or_bins, axes.bins, "--bins"),
        ("eps", axes.eps, "--eps"),
        ("predictor", axes.predictor, "--predictor"),
    ):
        if text is not None:
            given.settings([f"{name}={text}"], flag_name)
    given.settings(axes.serving or [], "--serving")
    given.settings(axes.vary or [], "--vary")
    whole = given.whole(named, axes.preset or "")
    memory = None if fit.fit_kv_blocks is None else given.kv_memory(whole, fit.fit_kv_blocks)
    fitted = models_fitted(
        fit.latency,
        scheduler_names(whole, named),
        source_format=fit.latency_from,
        chunk=fit.fit_chunk,
        memory=memory,
    )
    common = (fitted or named.model() if named is not None else fitted) | {
        "objectives": objectives_text(goals.slo, named, goals.goodput),
        "capacity": goals.capacity,
        "capacity_by": bounds,
        "capture": runs.capture,
        "follow": None if named is None else named.follow,
        "reader": reader.benefit(),
    }
    if flags_given(reader):
        # Measure the runs, because smooth goodput needs token times, and runs of whole batches have none
        # otherwise.
        common["measure"] = True
    requirements = Requirements.parse(goals.require)
    requirements.check_objectives(common["objectives"])
    if runs.ray is not None and runs.ray != "local" and runs.jobs is not None:
        raise ConfigError(
            "--jobs",
            f"cannot be combined with --ray {runs.ray}: the cluster has its own number of CPUs",
            "leave out --jobs",
        )
    if goals.capacity is not None and "slo" in bounds and not common["objectives"]:
        raise ConfigError("--capacity-by", "the value slo needs objectives", "such as --slo ttft:1s")
    outputs = Outputs(json=runs.json, html=runs.html)
    if runs.capture is not None:
        if runs.ray in (None, "local"):
            need_capture(runs.capture)
        elif "://" not in runs.capture and not Path(runs.capture).is_absolute():
            raise ConfigError(
                "--capture", f"{runs.capture} is a different folder on each node of --ray",
                "give a URL, or the absolute path of a folder that all nodes share",
            )  # fmt: skip
    sla = (
        named is not None
        or goals.capacity is not None
        or bool(whole.keys() & {"request_sla", "token_sla", "eps"})
    )
    swept = any(len(values) > 1 for name, values in whole.items() if name != "scheduler")
    loud = swept or named is not None or runs.results is not None
    sweepers: list[SweepRunner] = []
    try:
        with stoppable():
            results, notes, failed = run_sweep(
                trace,
                work.source_format,
                whole,
                named,
                common,
                results=runs.results,
                workers=runs.jobs,
                ray=runs.ray,
                loud=loud,
                sweepers=sweepers,
            )
            labels = run_labels(results) if results else ()
            rows = [
                row
                for label, one in zip(labels, results, strict=True)
                for row in requirements.add_to(one, label)
            ]
            if not results:  # A page needs at least one result.
                outputs.files.pop("--html", None)
                outputs.stdout = None if outputs.stdout == "--html" else outputs.stdout
            if runs.table is not None:
                write_runs(runs.table, results)
            figure = figure_of(axes.preset, results)
            texts = {
                "--json": lambda: json_text(results),
                "--html": lambda: _page_html(results, sla=sla, figure=figure),
            }
            outputs.tell(texts, lambda: _show(results, notes, sla=sla, figure=figure))
    except Stopped as exc:
        done = sum(len(sweeper.attempts) for sweeper in sweepers)
        kept = f"are in {runs.results}: the same command continues from there"
        where = "are complete, and none is kept without --results FILE" if runs.results is None else kept
        print_message(f"stopped; {done:,} runs {where}")
        raise typer.Exit(exc.code) from None
    code = (
        ExitCode.of_run(failed=failed)
        or exit_code(None, rows)
        or ExitCode.of_run(not_valid=not (fitted.get("fit") or {}).get("valid", True))
    )
    if code:
        raise typer.Exit(code)


def _page_html(runs: list[dict[str, Any]], *, sla: bool, figure: "SweepFigure | None") -> str:
    from llmtap.report.sweep_page import sweep_html

    return sweep_html(runs, sla=sla, figure=figure)


def _show(runs: list[dict[str, Any]], notes: list[str], *, sla: bool, figure: "SweepFigure | None") -> None:
    from llmtap.report.gates import requirements_blocks
    from llmtap.report.render import terminal
    from llmtap.report.sweep import sweep_lines, sweep_table

    if figure is not None:
        print_table(figure.table(runs))
        print_line("")
    if runs:
        print_table(sweep_table(runs, sla=sla))
        for line in sweep_lines(runs, sla=sla):
            print_line(line)
    for note in notes:
        print_line(f"note: {note}")
    if rows := [row for one in runs for row in one.get("requirements", ())]:
        print_rich(terminal(requirements_blocks(rows)))
