"""The tap's commands: `llmtap proxy`, `llmtap meter`, `llmtap top`, and its objectives, `llmtap slo`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtap.cli.main import app
from llmtap.cli.shared import (
    AdminAddress,
    CaFile,
    CaptureTo,
    CheckOnly,
    flag,
    need_extra,
    option,
    print_json,
    read_pairs,
    write_output,
)
from llmtap.errors import ConfigError

if TYPE_CHECKING:
    from llmtap.capture.options import CaptureOptions
    from llmtap.config import Settings
    from llmtap.top.client import TopOptions

__all__ = ["capture_places", "generate", "meter", "proxy", "top"]


_PROXY_EPILOG = """Examples:

  llmtap proxy --upstream http://127.0.0.1:8000

  llmtap proxy --upstream https://api.example.com --listen 0.0.0.0:8080 --workers 4

  llmtap proxy --upstream http://127.0.0.1:8000 --capture ./capture; llmtap report ./capture

  llmtap proxy --config /etc/llmtap.toml --set relay.idle_timeout=120s

SIGTERM drains the streams under way, SIGHUP reads the configuration again without losing a connection, and
SIGUSR2, after an upgrade, goes on as the program that is on disk now, without losing one either."""


@app.command(short_help="Put the tap in front of a gateway.", epilog=_PROXY_EPILOG)
def proxy(
    upstream: Annotated[str | None, option(None, "URL of the gateway. [relay.upstream]")] = None,
    listen: Annotated[
        str | None, option(None, "HOST:PORT for clients; default 127.0.0.1:8080. [relay.listen]")
    ] = None,
    admin: AdminAddress = None,
    workers: Annotated[int | None, option(None, "Relay processes; default 1. [relay.workers]")] = None,
    capture: CaptureTo = None,
    config: Annotated[
        Path | None, option(None, "TOML file; see config/llmtap.toml for every key.", envvar="LLMTAP_CONFIG")
    ] = None,
    assign: Annotated[
        list[str] | None, option("KEY=VALUE", "Any key, such as relay.clock=mono.", "--set")
    ] = None,
    check: CheckOnly = False,
    list_keys: Annotated[bool, flag("--keys", "List every key of the configuration.")] = False,
) -> None:
    """Put the tap in front of a gateway: clients notice nothing, every token is timed."""
    from llmtap.config import fingerprint, keys, load_settings

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
        **read_pairs("--set", assign),
    }

    def load() -> "Settings":
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

    def announce(listen: str, admin: str) -> None:
        _announce(f"{scheme}://{listen} -> {settings.relay.upstream}", admin, settings)

    raise typer.Exit(asyncio.run(Supervisor(settings, load, announce).run()))


def _announce(what: str, admin: str, settings: "Settings") -> None:
    """Print the first line of a proxy or a meter."""
    scheme = "https" if settings.meter.admin_tls_certificate else "http"
    line = f"llmtap: {what}   metrics: {scheme}://{admin}/metrics"
    if settings.capture.to is not None:
        line += f"   capture: {capture_places(settings.capture)[0]} ({settings.capture.level})"
    print(line, file=sys.stderr, flush=True)


def capture_places(options: "CaptureOptions") -> tuple[str, str]:
    """Where files go and where spools lie, for people: without secrets."""
    from llmtap.capture.store.places import open_place
    from llmtap.capture.store.store import spool_folder

    assert options.to is not None
    return open_place(options.to).name, str(spool_folder(options))


_METER_EPILOG = """Examples:

  llmtap meter --listen-socket /run/llmtap/tap.sock

  llmtap meter --listen-socket ./tap.sock --admin 127.0.0.1:9464 --capture ./capture

In the app: app.add_middleware(LlmtapMiddleware, socket="/run/llmtap/tap.sock"). Any number of processes of
this user may deliver to one socket. SIGTERM ends it at once: the apps go on, and count what passes then."""


@app.command(short_help="Measure apps that have the middleware.", epilog=_METER_EPILOG)
def meter(
    listen_socket: Annotated[
        str | None, option("PATH", "Path of the unix socket that apps deliver to. [meter.socket]")
    ] = None,
    admin: AdminAddress = None,
    capture: CaptureTo = None,
    config: Annotated[
        Path | None, option(None, "TOML file; `llmtap proxy --keys` lists every key.", envvar="LLMTAP_CONFIG")
    ] = None,
    assign: Annotated[
        list[str] | None, option("KEY=VALUE", "Any key, such as meter.window=5m.", "--set")
    ] = None,
    check: CheckOnly = False,
) -> None:
    """Measure what apps with the middleware tell: the tap without a proxy in front."""
    from llmtap.config import fingerprint, load_settings
    from llmtap.supervisor.alone import check_alone, run_meter

    flags: dict[str, Any] = {"meter.socket": listen_socket, "meter.admin": admin, "capture.to": capture}
    flags |= read_pairs("--set", assign)
    settings = load_settings(config, os.environ, flags)
    if check:
        check_alone(settings)
        print(f"ok (config {fingerprint(settings)})")
        return
    run_meter(settings, lambda path, admin: _announce(f"meter at {path}", admin, settings))


slo_app = typer.Typer(no_args_is_help=True, help="Objectives: rules for alerting.")
app.add_typer(slo_app, name="slo")

_SLO_EPILOG = """Examples:

  llmtap slo generate --config config/slo.toml --out llmtap-rules.yaml; promtool check rules llmtap-rules.yaml

  llmtap slo generate --config config/slo.toml --job serving/llmtap --runbooks https://wiki.example/llmtap

Alarms that can never ring at a class's target are left out, and told on stderr."""


@slo_app.command(epilog=_SLO_EPILOG)
def generate(
    config: Annotated[
        Path | None,
        option(None, "TOML file with [slo.NAME] tables, as the proxy reads it.", envvar="LLMTAP_CONFIG"),
    ] = None,
    written: Annotated[
        str, option("NAME", "Format of the rules: prometheus.", "--format", hidden=True)
    ] = "prometheus",
    out: Annotated[Path | None, option("FILE", "Write there; default: standard output.")] = None,
    job: Annotated[str, option("NAME", "What Prometheus calls the scrape job.")] = "llmtap",
    runbooks: Annotated[
        str,
        option(
            "URL",
            "Where the pages of deploy/runbooks/ are served; each alert links its own, URL/ALERT.md, or "
            "what the URL says with {alert} in it.",
        ),
    ] = "deploy/runbooks",
) -> None:
    """Write recording rules and alerts for the objectives that the proxy judges by."""
    from llmtap.config import load_settings
    from llmtap.export.rules.prometheus import check_job, missing_alarms, render
    from llmtap.metrics.slo import SloClass

    if written != "prometheus":
        raise ConfigError(
            "--format", f"{written!r} cannot be written",
            "rules for Prometheus only; the formats sloth and openslo were removed",
        )  # fmt: skip
    check_job(job)
    settings = load_settings(config, os.environ, {})
    if not settings.slo:
        if config is None:
            raise ConfigError("--config", "is missing: no file tells objectives", "config/slo.toml shows how")
        raise ConfigError(str(config), "has no objectives ([slo.NAME])", "config/slo.toml shows how")
    classes = [SloClass.of(name, options).with_tickets() for name, options in settings.slo.items()]
    for slo in classes:
        for told in missing_alarms(slo):
            print(f"llmtap: warning: {told}", file=sys.stderr)
    text = render(classes, job, runbooks)
    if out is None:
        sys.stdout.write(text)
    else:
        write_output("--out", out, text.removesuffix("\n"))


_TOP_EPILOG = """\
Keys: 1 to 7 or tab for the views, s and S to sort, / to filter, w for the window, p to pause,
enter to look into an exchange, ended or under way, event by event, ? for all keys, q to leave.

A tap that is not on loopback asks for its token: it is taken from $LLMTAP_ADMIN_TOKEN, from the variable that
--token-env names, or from --token-file, and never from a flag or a URL.

Examples:

  llmtap top

  llmtap top --admin https://tap.example.com:9464 --window 5m

  llmtap top --once --json > tap.json

Without a terminal, or with --once, one screen is printed as plain tables.

Exit codes: 0 the figures were printed, or the screen was left (q, Ctrl-C); 1 the tap stopped answering while
--once asked; 2 a wrong option, or at the start the tap cannot be reached, refuses the token or is no tap."""


@app.command(short_help="Watch a tap in the terminal.", epilog=_TOP_EPILOG)
def top(
    admin: Annotated[str, option("URL", "The tap's admin port, http or https.")] = "http://127.0.0.1:9464",
    token_env: Annotated[
        str | None, option("NAME", "Variable with the token. Default: LLMTAP_ADMIN_TOKEN.")
    ] = None,
    token_file: Annotated[Path | None, option("FILE", "File with the token, instead.")] = None,
    ca: CaFile = None,
    window: Annotated[str, option("10s|1m|5m|1h|all", "What figures are of.")] = "1m",
    interval: Annotated[str, option("TIME", "Between an answer and the next question.")] = "1s",
    once: Annotated[bool, flag("--once", "Print one screen as plain tables.")] = False,
    as_json: Annotated[bool, flag("--json", "The same as JSON, as the tap told it.")] = False,
) -> None:
    """Watch a tap: tenants, models, arms, live streams, exchanges event by event, and the tap itself."""
    from llmtap.top.client import TopOptions, read_token

    options = TopOptions(
        admin=admin, token=read_token(name=token_env, file=token_file), ca=ca, window=window,
        interval=interval,
    )  # fmt: skip
    if options.in_clear():
        print("llmtap: the token travels in clear text: https keeps it to those two", file=sys.stderr)
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print(options, as_json=as_json)
    else:
        _watch(options)


def _print(options: "TopOptions", *, as_json: bool) -> None:
    from llmtap.top.plain import fetched, print_once

    documents = fetched(options)
    if as_json:
        print_json(documents)
    else:
        print_once(documents, terminal=sys.stdout.isatty())


def _watch(options: "TopOptions") -> None:
    need_extra("llmtap top", "textual", "top", "; --once does without")
    from llmtap.top.plain import fetched

    fetched(options)  # what is wrong from the start is told here, and not on a screen that closes at once
    from llmtap.top.app import TopApp

    TopApp(options).run()
