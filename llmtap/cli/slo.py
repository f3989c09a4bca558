"""`llmtap slo`: the objectives of the configuration, for other people's alerting."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

__all__ = ["generate"]

slo = typer.Typer(no_args_is_help=True, help="Objectives: rules and specifications for alerting.")
app.add_typer(slo, name="slo")

EPILOG = """Examples:

  llmtap slo generate --config config/slo.toml --out llmtap-rules.yaml; promtool check rules llmtap-rules.yaml

  llmtap slo generate --config config/slo.toml --job serving/llmtap --runbooks https://wiki.example/llmtap

  llmtap slo generate --config config/slo.toml --format sloth --out slo.yaml; sloth generate -i slo.yaml

Alarms that can never ring at a class's target are left out, and told on stderr."""


class RuleFormat(StrEnum):
    """What is written."""

    PROMETHEUS = "prometheus"
    SLOTH = "sloth"
    OPENSLO = "openslo"


@slo.command(epilog=EPILOG)
def generate(
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with [slo.NAME] tables, as the proxy reads it.", envvar="LLMTAP_CONFIG"),
    ] = None,
    written: Annotated[
        RuleFormat,
        typer.Option("--format", help="Rules for Prometheus, or a specification for another tool."),
    ] = RuleFormat.PROMETHEUS,
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
    from llmtap.meter.slo import SloClass
    from llmtap.slo import openslo, prometheus, sloth
    from llmtap.slo.rules import missing, promises

    prometheus.check_job(job)
    settings = load_settings(config, os.environ, {})
    if not settings.slo:
        if config is None:
            raise ConfigError("--config", "is missing: no file tells objectives", "config/slo.toml shows how")
        raise ConfigError(str(config), "has no objectives ([slo.NAME])", "config/slo.toml shows how")
    asked = promises(SloClass.of(name, options) for name, options in settings.slo.items())
    render = {
        RuleFormat.PROMETHEUS: prometheus.render,
        RuleFormat.SLOTH: sloth.render,
        RuleFormat.OPENSLO: openslo.render,
    }[written]
    text = render(asked, job, runbooks)
    for promise in asked:
        for told in missing(promise):
            print(f"llmtap: warning: {told}", file=sys.stderr)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError("--out", f"cannot write {out}: {exc.strerror}") from None
