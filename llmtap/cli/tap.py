"""Commands `llmtap proxy`, `llmtap meter` (measure live traffic), `llmtap top`, `slo generate`, `key-hash`.

The commands read the configuration (`config.py`) and start the processes (`supervisor/`), the terminal view
(`top/`), or the generation of alert rules (`export/rules.py`). `llmtap watch` is in `watch.py`, and uses
`announce` of this module.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from llmtap import native
from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import ConfigFile, Json, SettingsOptions, TokenOptions
from llmtap.cli.shared import need_extra, print_json, print_line, print_message, write_output
from llmtap.errors import ConfigError
from llmtap.options.fields import opt

if TYPE_CHECKING:
    from llmtap.capture.options import CaptureOptions
    from llmtap.config import Settings
    from llmtap.top.client import TopOptions


_PROXY_EPILOG = """Examples:

  llmtap proxy --upstream http://127.0.0.1:8000

  llmtap proxy --upstream https://api.example.com --listen 0.0.0.0:8080 --workers 4

  llmtap proxy --upstream http://127.0.0.1:8000 --capture ./capture; llmtap report ./capture

  llmtap proxy --config /etc/llmtap.toml --set relay.idle_timeout=120s

SIGTERM stops the proxy, SIGHUP reloads the configuration, and SIGUSR2 switches to a newly installed version.
After each of these signals, running streams have up to relay.drain_timeout to finish, and are then closed.
During a reload or a switch, no connection is refused."""


class _ProxyOptions(Struct, frozen=True, kw_only=True):
    """Options of this command, in addition to those of the configuration."""

    upstream: Annotated[str | None, opt("URL of the gateway.", key="relay.upstream")] = None
    listen: Annotated[
        str | None, opt("HOST:PORT that clients connect to; default 127.0.0.1:8080.", key="relay.listen")
    ] = None
    workers: Annotated[int | None, opt("Number of relay processes; default 1.", key="relay.workers")] = None
    list_keys: Annotated[bool, opt("List every key of the configuration.", None, "--keys")] = False


@command(app, short_help="Measure a gateway with a proxy in front of it.", epilog=_PROXY_EPILOG)
def proxy(options: _ProxyOptions, configuration: SettingsOptions) -> None:
    """Forward requests and responses with unchanged bodies, and timestamp every chunk of a response."""
    from llmtap.config import fingerprint, help_by_key, load_settings

    if options.list_keys:
        for key, text in help_by_key().items():
            print(f"{key:32} {text}")
        return
    check, loaded = configuration.check, configuration.read(options)
    settings = loaded.settings
    import asyncio

    from llmtap.export.rules import missing_alarms
    from llmtap.log import set_up
    from llmtap.metrics.slo import SloClass
    from llmtap.supervisor.checks import problems_of, warnings_of
    from llmtap.supervisor.handover import take_handover
    from llmtap.supervisor.supervisor import Supervisor

    # With `--check`, it is no mistake if a running proxy uses the capture folder: it can be the proxy that
    # this program will replace (`parent`), or any proxy if a user runs `--check` (`in_use`).
    parent = take_handover(os.environ, os.getppid()) if check else None
    in_use = check and parent is None
    supervisor = None if parent is None else parent.pid
    loaded.settings_or_raise(problems_of(settings, supervisor, in_use=in_use))
    warnings = list(warnings_of(settings))
    if check:
        print(f"ok (config {fingerprint(settings)})")
        for name, slo in settings.slo.items():
            warnings += missing_alarms(SloClass.of(name, slo).with_tickets())
        for warning in warnings:
            print_line(f"warning: {warning}")
        for name, slo in settings.slo.items():
            if slo.parsed_objectives.streams_only:
                print(f"slo.{name}: judges streams only; an e2e limit also judges answers in one piece")
        if settings.capture.to is not None:
            to, spool = capture_places(settings.capture)
            print_line(f"capture: {to} (level {settings.capture.level})\nspool: {spool}")
        return
    for warning in warnings:
        print_message(f"warning: {warning}")
    set_up(settings.log)
    scheme = "https" if settings.relay.tls_certificate else "http"

    def reload_settings() -> "Settings":
        return load_settings(configuration.config, os.environ, configuration.key_values(options))

    def on_started(listen: str, admin: str) -> None:
        first_line = f"{scheme}://{listen} -> {settings.relay.upstream}"
        if settings.pair.upstream:
            first_line += f"   back: http://{settings.pair.listen} -> {settings.pair.upstream}"
        announce(first_line, admin, settings)

    raise typer.Exit(asyncio.run(Supervisor(settings, reload_settings, on_started).run()))


def announce(first_line: str, admin: str, settings: "Settings") -> None:
    """Print the first line of `proxy`, `meter` or `watch`, and a note if the compiled code is missing."""
    scheme = "https" if settings.meter.admin_tls_certificate else "http"
    line = f"{first_line}   metrics: {scheme}://{admin}/metrics"
    if settings.capture.to is not None:
        line += f"   capture: {capture_places(settings.capture)[0]} ({settings.capture.level})"
    print_message(line)
    if note := native.missing_build():
        print_message(f"note: {note}")


def capture_places(options: "CaptureOptions") -> tuple[str, str]:
    """Return the folder or URL of the capture and its spool folder, as texts without secrets."""
    from llmtap.capture.store.parquet import place_of
    from llmtap.capture.store.store import spool_folder

    assert options.to is not None
    return place_of(options.to).name, str(spool_folder(options))


_METER_EPILOG = """Examples:

  llmtap meter --listen-socket /run/llmtap/tap.sock

  llmtap meter --listen-socket ./tap.sock --admin 127.0.0.1:9464 --capture ./capture

In the application: app.add_middleware(LlmtapMiddleware, socket="/run/llmtap/tap.sock"). Only
processes of the user who runs the meter may connect to the socket; their number is not limited. SIGTERM stops
the meter at once: the applications continue, and count the exchanges that are not measured."""


class _MeterOptions(Struct, frozen=True, kw_only=True):
    """Options of this command, in addition to those of the configuration."""

    listen_socket: Annotated[
        str | None, opt("Path of the Unix socket that applications connect to.", "PATH", key="meter.socket")
    ] = None


@command(app, short_help="Measure applications that use the middleware.", epilog=_METER_EPILOG)
def meter(options: _MeterOptions, configuration: SettingsOptions) -> None:
    """Measure applications with the llmtap middleware, without a proxy."""
    from llmtap.config import fingerprint
    from llmtap.supervisor.alone import alone_problems, run_meter

    loaded = configuration.read(options)
    settings = loaded.settings_or_raise(alone_problems(loaded.settings, in_use=configuration.check))
    if configuration.check:
        print(f"ok (config {fingerprint(settings)})")
        return
    run_meter(settings, lambda path, admin: announce(f"meter at {path}", admin, settings))


slo_app = typer.Typer(no_args_is_help=True, help="Generate alerting rules from objectives.")
app.add_typer(slo_app, name="slo")

_SLO_EPILOG = """Examples:

  llmtap slo generate --config config/slo.toml --out llmtap-rules.yaml; promtool check rules llmtap-rules.yaml

  llmtap slo generate --config config/slo.toml --out llmtap-rules.yaml --inhibitions llmtap-inhibitions.yaml

  llmtap slo generate --config config/slo.toml --job serving/llmtap --runbooks https://wiki.example/llmtap

If the target of an objective is low, the burn rate of a built-in alert can be impossible to reach, even when
all exchanges are bad. Such an alert is left out, with a message on stderr. If such a
burn rate is set in the configuration, the command fails."""


@command(slo_app, epilog=_SLO_EPILOG)
def generate(
    config: Annotated[
        Path | None,
        opt("TOML configuration file with [slo.NAME] tables, as for `llmtap proxy`.", envvar="LLMTAP_CONFIG"),
    ] = None,
    out: Annotated[Path | None, opt("Output file (default: standard output).", "FILE")] = None,
    inhibitions: Annotated[
        Path | None,
        opt("Output file of inhibition rules for Alertmanager, so that one cause sends one page.", "FILE"),
    ] = None,
    job: Annotated[str, opt("Name of the scrape job in Prometheus.", "NAME")] = "llmtap",
    runbooks: Annotated[
        str,
        opt(
            "Base URL of the pages in deploy/runbooks/. Each alert links to URL/ALERT.md; if the URL "
            "contains {alert}, the alert name replaces it. The default is a path in llmtap's repository.",
            "URL",
        ),
    ] = "deploy/runbooks",
) -> None:
    """Write recording rules and alerts for the configured objectives."""
    from llmtap.config import load_settings
    from llmtap.export.rules import check_job, inhibition_rules, missing_alarms, render
    from llmtap.metrics.slo import SloClass

    check_job(job)
    settings = load_settings(config, os.environ, {})
    if not settings.slo:
        if config is None:
            raise ConfigError(
                "--config", "is missing: no objectives are configured", "config/slo.toml is an example"
            )
        raise ConfigError(str(config), "has no objectives ([slo.NAME])", "config/slo.toml is an example")
    classes = [SloClass.of(name, options).with_tickets() for name, options in settings.slo.items()]
    for slo in classes:
        for warning in missing_alarms(slo):
            print_message(f"warning: {warning}")
    text = render(classes, job, runbooks)
    if inhibitions is not None:
        write_output("--inhibitions", inhibitions, inhibition_rules(job).removesuffix("\n"))
    if out is None:
        sys.stdout.write(text)
    else:
        write_output("--out", out, text.removesuffix("\n"))


_KEY_HASH_EPILOG = """Examples:

  llmtap key-hash --config llmtap.toml <keys.txt

  printf %s "$OPENAI_API_KEY" | llmtap key-hash --config llmtap.toml

Keys are read from stdin, one per line; a terminal asks for one key and does not show it. The hash depends on
tenants.salt, or on the machine id of the host: run the command where the proxy runs."""


@command(app, short_help="Show the tenant's name of an API key.", epilog=_KEY_HASH_EPILOG)
def key_hash(config: ConfigFile = None) -> None:
    """Show the hash of an API key, as `names` in [tenants] expects it, and the tenant's name if it is set."""
    from getpass import getpass

    from llmtap.config import load_settings
    from llmtap.meter.tenants import Tenants, host_salt, without_bearer

    options = load_settings(config, os.environ, {}).tenants
    salt = options.salt or host_salt()
    if salt is None:
        raise ConfigError(
            "tenants.salt",
            "is not set, and this host has no /etc/machine-id, so each start has other hashes",
            "set tenants.salt, for example with LLMTAP_TENANTS_SALT",
        )
    if not any(rule.api_key for rule in options.rules):
        print_message("warning: no rule of [tenants] reads API keys; add { api_key = true } to tenants.rules")
    tenants = Tenants(options, salt)
    lines = [getpass("API key: ")] if sys.stdin.isatty() else sys.stdin.read().splitlines()
    keys = list(filter(None, map(str.strip, lines)))
    if not keys:
        hint = 'such as: printf %s "$OPENAI_API_KEY" | llmtap key-hash'
        raise ConfigError("stdin", "contains no API key", hint)
    for key in keys:
        name = tenants.name_of_key(without_bearer(key.encode()))
        print_line(f"{name}  {options.names[name]}" if name in options.names else name)


_TOP_EPILOG = """\
Keyboard: 1 to 9 or tab: select a view; s and S: sort; /: filter; w: change the window; p: pause; enter: show
the events of an exchange; ?: list all keys; q: quit.

An admin port that is not on loopback requires a token. The token is read from $LLMTAP_ADMIN_TOKEN, from the
variable named by --token-env, or from --token-file. An option or a URL cannot contain the token itself.

Examples:

  llmtap top

  llmtap top --admin https://tap.example.com:9464 --window 5m

  llmtap top --once --json > tap.json

Without a terminal, or with --once, one screen is printed as plain tables.

Exit codes: 0 the metrics were printed, or the user quit (q, Ctrl-C); 1 the admin port stopped responding
during --once; 2 invalid option, or at the start the admin port was not reachable, rejected the token, or
belongs to another service."""


@command(app, short_help="Show a running llmtap in the terminal.", epilog=_TOP_EPILOG)
def top(
    *,
    admin: Annotated[str, opt("URL of the admin port, http or https.", "URL")] = "http://127.0.0.1:9464",
    token: TokenOptions,
    window: Annotated[str, opt("Rolling window of the metrics.", "10s|1m|5m|1h|all")] = "1m",
    interval: Annotated[str, opt("Pause between two updates.", "TIME")] = "1s",
    once: Annotated[bool, opt("Print one screen as plain tables.")] = False,
    json: Json = None,
) -> None:
    """Show the tenants, models, experiments, live streams, exchanges and state of a running llmtap."""
    options = token.connection(admin, window=window, interval=interval)
    if options.is_unencrypted():
        print_message("warning: the token is sent unencrypted; to encrypt it, use an https URL for --admin")
    if once or json is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print_screen(options, json=json)
    else:
        _run_view(options)


def _print_screen(options: "TopOptions", *, json: str | None) -> None:
    from llmtap.top.plain import fetch_documents, print_once

    data = fetch_documents(options)
    if json is not None:
        print_json({"admin": options.url, "summary": data.summary, **data.details}, json)
    else:
        print_once(options.url, data, terminal=sys.stdout.isatty())


def _run_view(options: "TopOptions") -> None:
    need_extra("llmtap top", "textual", "top", "; `llmtap top --once` does not need it")
    from llmtap.top.plain import fetch_documents

    fetch_documents(options)  # Check the address before the full-screen view, which would hide the error.
    from llmtap.top.app import TopApp

    TopApp(options).run()
