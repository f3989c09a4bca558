"""`llmtap sim`: the simulated engine."""

from pathlib import Path
from typing import Annotated

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

__all__ = ["serve", "tokenizer"]

sim = typer.Typer(no_args_is_help=True, help="The simulated engine.")
app.add_typer(sim, name="sim")

SERVE_EPILOG = """Examples:

  llmtap sim serve --listen 127.0.0.1:8000 --ttft 200ms --itl 15ms

  llmtap sim serve --jitter 0.3 --tokens-per-chunk 4 --truth truth.jsonl

  llmtap sim serve --set guardrails.output_hold=16 --set faults.stall_rate=0.01

  llmtap sim serve --scheduler continuous_batching --serving seqs_max=64 --serving prefix_cache=true

  llmtap sim serve --grpc 127.0.0.1:8001

  llmtap sim serve --scheduler multi_bin_dynamic --reading bin_edges=1,30,117 --servers 2

A request may set most of this for itself: x-sim-itl-ms: 5, x-sim-output-hold: all, x-sim-fault: reset; --keys
has the header of each key.
Endpoints: /v1/chat/completions /v1/completions /v1/responses /v1/models /v1/messages /api/chat /api/generate
/v1/realtime (a WebSocket) /metrics /health /sim/truth?since=N"""


@sim.command(epilog=SERVE_EPILOG)
def serve(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "127.0.0.1:8000",
    grpc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve llmtap.inference.v1 over gRPC there, too."),
    ] = None,
    ttft: Annotated[
        str | None, typer.Option(help="From a request to its first token; default 150ms.")
    ] = None,
    itl: Annotated[str | None, typer.Option(help="Between tokens; default 20ms.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per answer, unless max_tokens is less; default 40.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="Share by which each answer varies; default 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all that is drawn; default 0.")] = None,
    dialect: Annotated[str | None, typer.Option(help="openai or vllm; default openai.")] = None,
    tokens_per_chunk: Annotated[
        int | None, typer.Option(help="Tokens in one event; default 1. [pacing.tokens_per_chunk]")
    ] = None,
    jitter: Annotated[
        float | None, typer.Option(help="Sigma of a lognormal factor on every gap. [pacing.jitter]")
    ] = None,
    scheduler: Annotated[
        str,
        typer.Option(
            help="What decides when tokens are made: a fixed schedule, or an engine with this; --servings "
            "lists them. multi_bin_dynamic needs --reading bin_edges=..."
        ),
    ] = "fixed",
    serving: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of an engine that iterates; may be repeated."),
    ] = None,
    servings: Annotated[
        bool, typer.Option("--servings", help="List these, and what they mean; and the schedulers.")
    ] = False,
    reading: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Of an engine that serves whole batches (seed 004), such as bin_edges=1,30,117: the lower "
            "edge of each bin of multi_bin_dynamic. `llmtap sim run --readings` lists them.",
        ),
    ] = None,
    predictor: Annotated[
        str | None, typer.Option(metavar="perfect|prompt|noisy", help="Of output lengths, for the engine.")
    ] = None,
    servers: Annotated[int, typer.Option(help="How many GPUs serve whole batches.", min=1, max=10_000)] = 1,
    truth: Annotated[
        Path | None, typer.Option(help="Append the schedule and send times of every request, as JSON lines.")
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key, such as pacing.jitter=0.3."),
    ] = None,
    list_keys: Annotated[
        bool, typer.Option("--keys", help="List every key, its default, and its header.")
    ] = False,
) -> None:
    """A gateway as OpenAI, Anthropic and Ollama have one, whose every token is due at a known moment."""
    from llmtap.sim.server.options import load_engine, load_options

    if list_keys:
        _list_keys()
        return
    if servings:
        _list_servings()
        return
    flags = {
        "ttft": ttft, "itl": itl, "tokens": tokens, "spread": spread, "seed": seed, "dialect": dialect,
        "pacing.tokens_per_chunk": tokens_per_chunk, "pacing.jitter": jitter,
    }  # fmt: skip
    values = {key: str(value) for key, value in flags.items() if value is not None}
    places = {key: "--" + key.rpartition(".")[2].replace("_", "-") for key in values}
    for key, value in _pairs("--set", "KEY=VALUE", assign).items():
        if key in values:
            raise ConfigError(places[key], f"is given by --set {key}, too", "one of the two")
        values[key], places[key] = value, f"--set {key}"
    options = load_options(values, places)
    engine = load_engine(
        scheduler, values, serving=_pairs("--serving", "NAME=VALUE", serving),
        readings=_pairs("--reading", "NAME=VALUE", reading), predictor=predictor, servers=servers,
        places=places,
    )  # fmt: skip

    import gc

    import uvloop
    from aiohttp import web

    from llmtap.net.listener import bind, is_free, parse_address
    from llmtap.sim.server.server import SimServer

    try:
        host, port = parse_address(listen)
        sock = bind(host, port, shared=False)
    except ValueError as exc:
        raise ConfigError("--listen", str(exc)) from None
    except OSError as exc:
        raise ConfigError("--listen", f"cannot listen on {listen}: {exc.strerror}") from None
    if grpc is not None:
        try:
            grpc_host, grpc_port = parse_address(grpc)
            is_free(grpc_host, grpc_port)
        except ValueError as exc:
            raise ConfigError("--grpc", str(exc)) from None
        except OSError as exc:
            raise ConfigError("--grpc", f"cannot listen on {grpc}: {exc.strerror}") from None
    try:
        server = SimServer(options, engine=engine, truth_file=truth)
    except OSError as exc:
        raise ConfigError("--truth", f"cannot write {truth}: {exc.strerror}") from None
    if grpc is not None:
        server.serve_grpc(grpc_host, grpc_port)
    bound = sock.getsockname()

    def tell() -> None:
        print(f"llmtap sim: http://{bound[0]}:{bound[1]}/v1/chat/completions", flush=True)
        if grpc is not None:
            print(f"llmtap sim: grpc://{grpc_host or '[::]'}:{server.grpc_port}", flush=True)

    async def drain(_app: web.Application) -> None:
        print("llmtap sim: stopping; streams may end within 60 s, a second signal cuts them", flush=True)

    server.app.on_shutdown.append(drain)
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


def _pairs(option: str, form: str, items: list[str] | None) -> dict[str, str]:
    pairs = {}
    for item in items or ():
        key, sep, value = item.partition("=")
        if not sep:
            raise ConfigError(option, f"expected {form}, got {item!r}")
        key = key.strip()
        if key in pairs:
            raise ConfigError(f"{option} {key}", "is given twice")
        pairs[key] = value.strip()
    return pairs


def _list_keys() -> None:
    from llmtap.sim.server.options import Key, keys

    for row in (Key("key", "default", "header of a request", "meaning"), *keys()):
        print(f"{row.key or '-':26}  {row.default or '-':15}  {row.header or '-':25}  {row.meaning}")
    print("\nA time by its header is a text such as 5ms; with -ms at its end, a number of milliseconds.")


def _list_servings() -> None:
    from llmtap.sim.model_options import explain_serving
    from llmtap.sim.schedulers.registry import SCHEDULERS

    for name, default, text in explain_serving():
        print(f"{name:14} {default:10} {text}")
    iterating = (name for name, kind in SCHEDULERS.items() if kind.iterates)
    batching = (name for name, kind in SCHEDULERS.items() if not kind.iterates)
    print(f"\nschedulers that iterate: {', '.join(iterating)}\nof whole batches: {', '.join(batching)}")


@sim.command(epilog="Example:\n\n  llmtap sim tokenizer tokenizer.json")
def tokenizer(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; - for stdout.")],
) -> None:
    """Write the tokenizer by which `sim serve` counts, as a tokenizer.json of Hugging Face's `tokenizers`."""
    import json

    from llmtap.workload.prompts.words import tokenizer_json

    text = json.dumps(tokenizer_json(), ensure_ascii=False)
    if str(file) == "-":
        print(text)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(str(file), f"cannot be written: {exc.strerror}") from None
