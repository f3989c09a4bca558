"""`llmtap slo`: Prometheus rules for the objectives of the configuration."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

__all__ = ["generate"]

slo_app = typer.Typer(no_args_is_help=True, help="Objectives: rules for alerting.")
app.add_typer(slo_app, name="slo")

EPILOG = """Examples:

  llmtap slo generate --config config/slo.toml --out llmtap-rules.yaml; promtool check rules llmtap-rules.yaml

  llmtap slo generate --config config/slo.toml --job serving/llmtap --runbooks https://wiki.example/llmtap

Alarms that can never ring at a class's target are left out, and told on stderr."""


@slo_app.command(epilog=EPILOG)
def generate(
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with [slo.NAME] tables, as the proxy reads it.", envvar="LLMTAP_CONFIG"),
    ] = None,
    written: Annotated[
        str, typer.Option("--format", metavar="NAME", help="Format of the rules: prometheus.", hidden=True)
    ] = "prometheus",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there; default: standard output.")
    ] = None,
    job: Annotated[
        str, typer.Option(metavar="NAME", help="What Prometheus calls the scrape job.")
    ] = "llmtap",
    runbooks: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Where the pages of deploy/runbooks/ are served; each alert links its own, URL/ALERT.md, "
            "or what the URL says with {alert} in it.",
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
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError("--out", f"cannot write {out}: {exc.strerror}") from None
