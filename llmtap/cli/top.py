"""`llmtap top`: a tap watched from a terminal, over its admin port."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from llmtap.top.options import TopOptions

__all__ = ["top"]

EPILOG = """Keys: 1 to 7 or tab for the views, s and S to sort, / to filter, w for the window, p to pause,
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


@app.command(short_help="Watch a tap in the terminal.", epilog=EPILOG)
def top(
    admin: Annotated[
        str, typer.Option(metavar="URL", help="The tap's admin port, http or https.")
    ] = "http://127.0.0.1:9464",
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with the token. Default: LLMTAP_ADMIN_TOKEN.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token, instead.")
    ] = None,
    ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Trust this CA (PEM) instead of the system's.")
    ] = None,
    window: Annotated[str, typer.Option(metavar="10s|1m|5m|1h|all", help="What figures are of.")] = "1m",
    interval: Annotated[
        str, typer.Option(metavar="TIME", help="Between an answer and the next question.")
    ] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Print one screen as plain tables.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, as the tap told it.")] = False,
) -> None:
    """Watch a tap: tenants, models, arms, live streams, exchanges event by event, and the tap itself."""
    from llmtap.top.options import TopOptions, read_token

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
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(documents)).decode())
    else:
        print_once(documents, terminal=sys.stdout.isatty())


def _watch(options: "TopOptions") -> None:
    from importlib.util import find_spec

    if find_spec("textual") is None:
        raise ConfigError("llmtap top", "needs textual", f"{install_hint('top')}; --once does without")
    from llmtap.top.plain import fetched

    fetched(options)  # what is wrong from the start is told here, and not on a screen that closes at once
    from llmtap.top.app import TopApp

    TopApp(options).run()
