"""`llmtap proxy`: the tap itself."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

if TYPE_CHECKING:
    from llmtap.capture.options import CaptureOptions

__all__ = ["capture_places", "proxy", "read_assignments"]

EPILOG = """Examples:

  llmtap proxy --upstream http://127.0.0.1:8000

  llmtap proxy --upstream https://api.example.com --listen 0.0.0.0:8080 --workers 4

  llmtap proxy --upstream http://127.0.0.1:8000 --capture ./capture; llmtap report ./capture

  llmtap proxy --config /etc/llmtap.toml --set relay.idle_timeout=120s

SIGTERM drains the streams under way, SIGHUP reads the configuration again without losing a connection, and
SIGUSR2, after an upgrade, goes on as the program that is on disk now, without losing one either."""


@app.command(short_help="Put the tap in front of a gateway.", epilog=EPILOG)
def proxy(
    upstream: Annotated[str | None, typer.Option(help="URL of the gateway. [relay.upstream]")] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for clients; default 127.0.0.1:8080. [relay.listen]")
    ] = None,
    admin: Annotated[
        str | None, typer.Option(help="HOST:PORT for /metrics; default 127.0.0.1:9464. [meter.admin]")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Relay processes; default 1. [relay.workers]")] = None,
    capture: Annotated[
        str | None,
        typer.Option(
            help="Keep every exchange here, as Parquet, without its text: folder or URL. [capture.to]",
            metavar="DIR|URL",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file; see config/llmtap.toml for every key.", envvar="LLMTAP_CONFIG"),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key, such as relay.clock=mono."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration and start nothing.")
    ] = False,
    list_keys: Annotated[bool, typer.Option("--keys", help="List every key of the configuration.")] = False,
) -> None:
    """Put the tap in front of a gateway: clients notice nothing, every token is timed."""
    from llmtap.config import Settings, fingerprint, keys, load_settings

    if list_keys:
        for key, text in keys().items():
            print(f"{key:32} {text}")
        return
    flags: dict[str, Any] = {
        "relay.upstream": upstream,
        "relay.listen": listen,
        "meter.admin": admin,
        "relay.workers": workers,
        "capture.to": capture,
        **read_assignments(assign or ()),
    }

    def load() -> Settings:
        return load_settings(config, os.environ, flags)

    settings = load()
    import asyncio

    from llmtap.export.rules.prometheus import missing_alarms
    from llmtap.log import set_up
    from llmtap.metrics.slo import SloClass
    from llmtap.supervisor.checks import check_settings
    from llmtap.supervisor.handover import take_handover
    from llmtap.supervisor.supervisor import Supervisor

    if check:
        # A proxy that is to become this program asks whether it can.
        asking = take_handover(os.environ, os.getppid())
        check_settings(settings, None if asking is None else asking.pid)
        print(f"ok (config {fingerprint(settings)})")
        for name, options in settings.slo.items():
            for told in missing_alarms(SloClass.of(name, options).with_tickets()):
                print(f"warning: {told}")
        if settings.capture.to is not None:
            to, spool = capture_places(settings.capture)
            print(f"capture: {to} (level {settings.capture.level})\nspool: {spool}")
        return
    check_settings(settings)
    set_up(settings.log)
    scheme = "https" if settings.relay.tls_certificate else "http"
    admin_scheme = "https" if settings.meter.admin_tls_certificate else "http"

    def announce(listen: str, admin: str) -> None:
        line = f"llmtap: {scheme}://{listen} -> {settings.relay.upstream}"
        line += f"   metrics: {admin_scheme}://{admin}/metrics"
        if settings.capture.to is not None:
            line += f"   capture: {capture_places(settings.capture)[0]} ({settings.capture.level})"
        print(line, file=sys.stderr, flush=True)

    raise typer.Exit(asyncio.run(Supervisor(settings, load, announce).run()))


def capture_places(options: "CaptureOptions") -> tuple[str, str]:
    """Where files go and where spools lie, for people: without secrets."""
    from llmtap.capture.store.places import open_place
    from llmtap.capture.store.store import spool_folder

    assert options.to is not None
    return open_place(options.to).name, str(spool_folder(options))


def read_assignments(assign: Iterable[str]) -> dict[str, str]:
    """The keys and values of `--set`. Raises ConfigError."""
    flags = {}
    for item in assign:
        key, sep, value = item.partition("=")
        if not sep:
            raise ConfigError("--set", f"expected KEY=VALUE, got {item!r}")
        flags[key.strip()] = value.strip()
    return flags
