"""`llmtap sim`: the simulated engine."""

from typing import Annotated

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

__all__ = ["serve"]

sim = typer.Typer(no_args_is_help=True, help="The simulated engine.")
app.add_typer(sim, name="sim")


@sim.command(epilog="Example:\n\n  llmtap sim serve --listen 127.0.0.1:8000 --ttft 200ms --itl 15ms")
def serve(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "127.0.0.1:8000",
    ttft: Annotated[str, typer.Option(help="From a request to its first token.")] = "150ms",
    itl: Annotated[str, typer.Option(help="Between tokens.")] = "20ms",
    tokens: Annotated[int, typer.Option(help="Tokens per answer, unless max_tokens is less.", min=1)] = 40,
    spread: Annotated[float, typer.Option(help="Share by which each answer varies.", min=0, max=0.9)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the spread.")] = 0,
) -> None:
    """An OpenAI-compatible gateway whose every token is due at a known moment."""
    import uvloop
    from aiohttp import web

    from llmtap.net.listener import bind, parse_address
    from llmtap.sim.options import SimOptions
    from llmtap.sim.server import SimServer
    from llmtap.units import Duration, parse_duration_ns

    try:
        host, port = parse_address(listen)
        options = SimOptions(
            ttft=Duration(parse_duration_ns(ttft)),
            itl=Duration(parse_duration_ns(itl)),
            tokens=tokens,
            spread=spread,
            seed=seed,
        )
        sock = bind(host, port, shared=False)
    except ValueError as exc:
        raise ConfigError("command line", str(exc)) from None
    except OSError as exc:
        raise ConfigError("--listen", f"cannot listen on {listen}: {exc.strerror}") from None
    server = SimServer(options)
    bound = sock.getsockname()
    web.run_app(
        server.app,
        sock=sock,
        loop=uvloop.new_event_loop(),
        access_log=None,
        handle_signals=True,
        print=lambda *_: print(f"llmtap sim: http://{bound[0]}:{bound[1]}/v1/chat/completions", flush=True),
    )
