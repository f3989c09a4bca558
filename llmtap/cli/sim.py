"""`llmtap sim`: the simulated engine as a server.

Defines `sim serve` (`sim/server`) and `sim tokenizer`, which writes the engine's tokenizer. `sim run` is in
`sim_run.py`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.shared import read_pairs
from llmtap.errors import ConfigError
from llmtap.options.fields import opt

sim = typer.Typer(
    no_args_is_help=True, help="Run the simulated engine as a server, or simulate schedulers in virtual time."
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
    """Options for the addresses of the server."""

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
    """Options for the content and the times of answers."""

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
    """Options for the simulated engine that generates the answers."""

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
    engine_options: _EngineOptions,
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
    for key, value in read_pairs("--set", answers.assign, unique=True).items():
        if key in values:
            raise ConfigError(places[key], f"cannot be combined with --set {key}", "use only one of them")
        values[key], places[key] = value, f"--set {key}"
    options = load_options(values, places)
    engine = load_engine(
        engine_options.scheduler,
        values,
        serving=read_pairs("--serving", engine_options.serving, "NAME=VALUE", unique=True),
        readings=read_pairs("--reading", engine_options.reading, "NAME=VALUE", unique=True),
        servers=engine_options.servers,
        places=places,
    )

    import gc

    import uvloop
    from aiohttp import web

    from llmtap.net.listener import bind, check_free, parse_address
    from llmtap.sim.server.server import SimServer

    with _name_option("--listen", listening.listen):
        sock = bind(*parse_address(listening.listen, "--listen"), shared=False)
    if listening.grpc is not None:
        with _name_option("--grpc", listening.grpc):
            grpc_host, grpc_port = parse_address(listening.grpc, "--grpc")
            check_free(grpc_host, grpc_port)
    try:
        server = SimServer(options, engine=engine, truth_file=truth)
    except OSError as exc:
        raise ConfigError("--truth", f"cannot write {truth}: {exc.strerror}", "name another file") from None
    if listening.grpc is not None:
        server.serve_grpc(grpc_host, grpc_port, _pem_pair(listening.grpc_certificate, listening.grpc_key))
    bound = sock.getsockname()

    def announce() -> None:
        print(f"llmtap sim: http://{bound[0]}:{bound[1]}/v1/chat/completions", flush=True)
        if listening.grpc is not None:
            scheme = "grpc" if listening.grpc_certificate is None else "grpcs"
            print(f"llmtap sim: {scheme}://{grpc_host or '[::]'}:{server.grpc_port}", flush=True)

    async def announce_stop(_app: web.Application) -> None:
        print("llmtap sim: stopping; streams have 60 s to end, a second signal closes them", flush=True)

    server.app.on_shutdown.append(announce_stop)
    logging.getLogger("aiohttp.server").addFilter(_shorten_malformed)
    # A long garbage collection would delay the tokens of all streams. So exclude all objects that exist now,
    # and collect rarely: answers leave no reference cycles, so there is little to collect.
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1_000)
    web.run_app(
        server.app,
        sock=sock,
        loop=uvloop.new_event_loop(),
        access_log=None,
        handle_signals=True,
        handler_cancellation=True,  # If a client disconnects, free its slot and memory in the engine.
        print=lambda *_: announce(),
    )


def _shorten_malformed(record: logging.LogRecord) -> bool:
    """Replace the traceback of a request that is not HTTP/1.1, for example HTTP/2, by one line."""
    from aiohttp.http_exceptions import HttpProcessingError

    if record.exc_info and isinstance(error := record.exc_info[1], HttpProcessingError):
        record.msg, record.args, record.exc_info = "event=malformed_request answer=%d", (error.code,), None
    return True


def _pem_pair(certificate: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """Return the contents of the PEM files; None if neither file is given. Raises ConfigError."""
    from llmtap.net.tls import server_context

    if certificate is None or key is None:
        if certificate is key:
            return None
        present, missing = ("key", "certificate") if certificate is None else ("certificate", "key")
        raise ConfigError(
            f"--grpc-{present}", f"is given, but --grpc-{missing} is missing", "for TLS, give both of them"
        )
    server_context(str(certificate), str(key), "--grpc-")
    return certificate.read_bytes(), key.read_bytes()


@contextmanager
def _name_option(option_name: str, address: str) -> Iterator[None]:
    """Convert an OSError of an address that cannot be used to a ConfigError that names its option."""
    try:
        yield
    except OSError as exc:
        problem = f"cannot listen on {address}: {exc.strerror}"
        raise ConfigError(option_name, problem, "choose another port, or an address of this host") from None


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
def tokenizer(file: Annotated[Path, opt("Output file; - is stdout.", "FILE", argument=True)]) -> None:
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
        raise ConfigError(str(file), f"cannot be written: {exc.strerror}", "name another file") from None
