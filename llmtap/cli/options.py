"""How commands declare options, and the options that several commands share."""

from typing import Annotated, Any

import typer

__all__ = [
    "AdminAddress",
    "AnswerTimeout",
    "ApiKeyEnv",
    "BodyFields",
    "CaFile",
    "CaptureTo",
    "CheckOnly",
    "Headers",
    "Json",
    "ModelName",
    "Seed",
    "SourceFormat",
    "argument",
    "flag",
    "option",
]


def option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    """Declare an option with a value. `metavar` is what the help shows for the value; None: its type."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(name: str, text: str, **more: Any) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=text, **more)


def argument(metavar: str, text: str) -> Any:
    """Declare an argument."""
    return typer.Argument(metavar=metavar, help=text)


AdminAddress = Annotated[
    str | None, option(None, "HOST:PORT for /metrics; default 127.0.0.1:9464. [meter.admin]")
]
CaptureTo = Annotated[
    str | None,
    option("DIR|URL", "Keep every exchange here, as Parquet, without its text: folder or URL. [capture.to]"),
]
CheckOnly = Annotated[bool, flag("--check", "Check the configuration and start nothing.")]
CaFile = Annotated[str | None, option("FILE", "Trust this CA (PEM) instead of the system's.")]
SourceFormat = Annotated[
    str | None, option("NAME", "Format of TRACE, where its content does not tell.", "--from")
]
ModelName = Annotated[str | None, option("NAME", "Default: the one the server lists, if it is one.")]
Headers = Annotated[list[str] | None, option("'NAME: VALUE'", "Of each request; may be repeated.")]
ApiKeyEnv = Annotated[str | None, option("NAME", "Variable with the key. Default: OPENAI_API_KEY.")]
BodyFields = Annotated[list[str] | None, option("NAME=JSON", "Into each body; may be repeated: top_p=0.9")]
AnswerTimeout = Annotated[str, option("TIME", "For a whole answer.")]
Seed = Annotated[int, option("N", "Of all that is drawn.", min=0)]
Json = Annotated[str | None, option("FILE", "Write the result; - is stdout.")]
