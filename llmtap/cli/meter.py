"""`llmtap meter`: a meter on its own, for apps that carry the middleware."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmtap.cli.main import app
from llmtap.cli.proxy import capture_places, read_assignments

__all__ = ["meter"]

EPILOG = """Examples:

  llmtap meter --listen-socket /run/llmtap/tap.sock

  llmtap meter --listen-socket ./tap.sock --admin 127.0.0.1:9464 --capture ./capture

In the app: app.add_middleware(LlmtapMiddleware, socket="/run/llmtap/tap.sock"). Any number of processes of
this user may deliver to one socket. SIGTERM ends it at once: the apps go on, and count what passes then."""


@app.command(short_help="Measure apps that have the middleware.", epilog=EPILOG)
def meter(
    listen_socket: Annotated[
        str | None,
        typer.Option(help="Path of the unix socket that apps deliver to. [meter.socket]", metavar="PATH"),
    ] = None,
    admin: Annotated[
        str | None, typer.Option(help="HOST:PORT for /metrics; default 127.0.0.1:9464. [meter.admin]")
    ] = None,
    capture: Annotated[
        str | None,
        typer.Option(
            help="Keep every exchange here, as Parquet, without its text: folder or URL. [capture.to]",
            metavar="DIR|URL",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file; `llmtap proxy --keys` lists every key.", envvar="LLMTAP_CONFIG"),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key, such as meter.window=5m."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration and start nothing.")
    ] = False,
) -> None:
    """Measure what apps with the middleware tell: the tap without a proxy in front."""
    from llmtap.config import fingerprint, load_settings
    from llmtap.supervisor.alone import check_alone, run_meter

    flags: dict[str, Any] = {"meter.socket": listen_socket, "meter.admin": admin, "capture.to": capture}
    flags |= read_assignments(assign or ())
    settings = load_settings(config, os.environ, flags)
    if check:
        check_alone(settings)
        print(f"ok (config {fingerprint(settings)})")
        return
    scheme = "https" if settings.meter.admin_tls_certificate else "http"

    def announce(path: str, address: str) -> None:
        line = f"llmtap: meter at {path}   metrics: {scheme}://{address}/metrics"
        if settings.capture.to is not None:
            line += f"   capture: {capture_places(settings.capture)[0]} ({settings.capture.level})"
        print(line, file=sys.stderr, flush=True)

    run_meter(settings, announce)
