"""Hook of mkdocs that generates the reference pages: options, commands, admin API.

Each build generates them from the option structs, the commands and the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, get_origin

import msgspec
from msgspec import NODEFAULT

from llmtap.bench.compliance.judge import COMPARISON
from llmtap.bench.run.test import TESTS, test_named
from llmtap.cli.main import root_command
from llmtap.config import ALL_TABLES
from llmtap.errors import ExitCode
from llmtap.meter.admin.openapi import openapi_document
from llmtap.options.fields import Option, choices_of, is_struct, options_of, parts_of, value_text
from llmtap.sim.model_options import ModelOptions, Serving
from llmtap.sim.server.options import keys
from llmtap.units import Bytes, Duration, encode_special

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_OPTIONS: Final = """\
# Options

Generated from the program. Flags override the environment, which overrides the file of `--config`, which
overrides the defaults. A key `relay.idle_timeout` is `idle_timeout` in the file's table `[relay]`, the
variable `LLMTAP_RELAY_IDLE_TIMEOUT`, and `--set relay.idle_timeout=...`. Durations are seconds or text with a
unit (`0.5`, `"500ms"`, `"2m"`), sizes are bytes or text with a unit (`"64KiB"`).
In the environment and in `--set`, tables are written in JSON. Lists are written in JSON or, if they are plain
words, with commas.

`LLMTAP_NATIVE=0` is not a key: it selects Python in place of the
compiled code (`llmtap --version` shows which one runs).

"""
_COMMANDS: Final = """\
# Commands

Generated from the program, with the texts of `--help`.

## Exit codes

"""
_API: Final = """\
# Admin API

Generated from the [OpenAPI document](openapi.json), which the admin port serves at `/api/v1/openapi.json`.
Durations are in seconds. Null means unknown or not applicable. If `meter.admin_token` is set, all paths
except the dashboard's page, `/healthz` and `/readyz` require `Authorization: Bearer TOKEN`.
Requests that a browser sends for a page of another origin are refused with 403.

"""
_TYPES: Final = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Duration: "duration",
    Bytes: "size",
    list: "list",
    tuple: "list",
    dict: "table",
}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Cells are Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def plain(text: str) -> str:
    """Escape text of the program for Markdown, except in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*_\[\]])", r"\\\1", parts[i]).replace("<", "&lt;").replace("|", "&#124;")
    return "".join(parts)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


# ---------------------------------------------------------------- options


def options_page() -> str:
    """Every key of the configuration, of the simulated engine, and of the tests of `llmtap bench`."""
    out = [_OPTIONS]
    for name, kind in ALL_TABLES.items():
        rows = [
            [code(option.name), _kind(option.kind), _default(option), plain(option.meaning)]
            for option in options_of(kind)
        ]
        out.append(f"## [{name}]\n\n{table(['key', 'kind', 'default', 'meaning'], rows)}")
    out.append("## llmtap sim serve\n\nBy `--set KEY=VALUE`, or by a header of a single request.\n\n")
    told = ([code(one.key), code(one.default), code(one.header), plain(one.meaning)] for one in keys())
    out.append(table(["key", "default", "header", "meaning"], told))
    out.append("### An engine that iterates\n\n`--serving NAME=VALUE`, also of `llmtap sim run`.\n\n")
    out.append(_named(Serving))
    choices = "`--reading NAME=VALUE`: open choices of the multi-bin batching paper."
    out.append(f"### An engine of whole batches\n\n{choices}\n\n")
    out.append(_named(ModelOptions))
    out.append("## llmtap bench\n\nBy `--set NAME=VALUE`, or in `[tests.TEST]` of the bench file.\n\n")
    for name in TESTS:
        test = test_named(name)
        out.append(f"### {name}\n\n{plain(test.title)} (IETF {test.section}).\n\n")
        out.append(_named(test.params))
    return "".join(out)


def _named(kind: type[msgspec.Struct]) -> str:
    rows = (
        [code(option.name), code(option.default_text or ""), plain(option.meaning_with_choices)]
        for option in options_of(kind)
    )
    return table(["name", "default", "meaning"], rows)


def _kind(kind: Any) -> str:
    """Return the type of a value in words."""
    if choices := choices_of(kind):
        return ", ".join(map(code, choices))
    kinds = ("table" if is_struct(part) else _TYPES[get_origin(part) or part] for part in parts_of(kind))
    return " or ".join(dict.fromkeys(kinds))


def _default(option: Option) -> str:
    """Return the default as a configuration file has it; empty for None."""
    value = option.default
    if value is NODEFAULT:
        return "required"
    if isinstance(value, Duration | Bytes):
        return code(value_text(value))
    return "" if value is None else code(msgspec.json.encode(value, enc_hook=encode_special).decode())


# ---------------------------------------------------------------- commands


def commands_page() -> str:
    """Every command, with its arguments, options and examples."""
    out = [_COMMANDS, table(["code", "meaning"], ([str(code), code.meaning] for code in ExitCode))]
    told: dict[str, str] = {}
    for name, command, context in _leaves(root_command(), "llmtap", None):
        usage = " ".join(command.get_usage(context).split()).removeprefix("Usage: ")
        out.append(f"## {name}\n\n{plain(command.help or '')}\n\n```text\n{usage}\n```\n\n")
        records = filter(None, (one.get_help_record(context) for one in command.params))
        rest = table(["argument or option", "meaning"], ([code(what), plain(help)] for what, help in records))
        if command.epilog:
            rest += f"```text\n{command.epilog.strip()}\n```\n\n"
        first = told.setdefault(rest, name)
        if first != name:  # the tests of `llmtap bench` have the same options
            rest = f"Options are those of [{first}](#{first.replace(' ', '-')}).\n\n"
        out.append(rest if command.params else "")
    return "".join(out)


def _leaves(command: Any, name: str, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each command without subcommands: full name, command, and context."""
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent)
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command, context
        return
    for word, one in inner.items():
        yield from _leaves(one, f"{name} {word}", context)


# ---------------------------------------------------------------- the admin API


def api_page() -> str:
    """Return the page of all paths of the admin port and the schemas of their answers."""
    described = openapi_document()
    out = [_API]
    for path, methods in described["paths"].items():
        for method, one in methods.items():
            out.append(f"## {method.upper()} {plain(path)}\n\n{plain(one['summary'])}\n\n")
            asked = [
                [code(p["name"]), p["in"], _shape(p["schema"]), plain(p["description"])]
                for p in one.get("parameters", ())
            ]
            if asked:
                out.append(table(["parameter", "in", "value", "meaning"], asked))
            for body in one.get("requestBody", {}).get("content", {}).values():
                out.append("Body, as JSON:\n\n")
                out.append(table(["name", "value", "meaning"], _properties(body["schema"], "")))
            answers = (
                [status, plain(about["description"]), _contents(about)]
                for status, about in one["responses"].items()
            )
            out.append(table(["status", "when", "content"], answers))
    out.append("## Schemas\n\n")
    for name, schema in described["components"]["schemas"].items():
        out.append(f"### {name}\n\n{plain(schema.get('description', ''))}\n\n")
        out.append(table(["name", "value", "meaning"], _properties(schema, "")))
    return "".join(out)


def _contents(about: dict[str, Any]) -> str:
    shown = []
    for kind, content in about.get("content", {}).items():
        shape = _shape(content["schema"])
        shown.append(f"{code(kind)}: {shape}" if shape.startswith("[") else code(kind))
    return ", ".join(shown)


def _properties(schema: dict[str, Any], prefix: str) -> Iterator[list[str]]:
    """Yield a row for each property, nested ones included; equal properties of an object share a row."""
    for name, one in schema["properties"].items():
        inner = one.get("properties", {})
        alike = len(inner) > 1 and len({msgspec.json.encode(value) for value in inner.values()}) == 1
        shown = _shape(one)
        if alike:
            shown = f"object of {', '.join(map(code, inner))}: each {_shape(next(iter(inner.values())))}"
        left_out = "" if name in schema.get("required", ()) else " (optional)"
        yield [code(prefix + name), shown, plain(one.get("description", "")) + left_out]
        if inner and not alike:
            yield from _properties(one, f"{prefix}{name}.")


def _shape(schema: dict[str, Any]) -> str:
    """Return the type of a JSON value in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_shape, schema["anyOf"]))
    kind = schema["type"]
    if "enum" in schema:
        return ", ".join(code(str(one)) for one in schema["enum"])
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and "items" in schema:
        return f"list of {_shape(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object: for each name {_shape(schema['additionalProperties'])}"
    return str(kind)


# ---------------------------------------------------------------- compliance

REQUIREMENTS_BEGIN: Final = "<!-- generated: requirements (make golden) -->\n"
REQUIREMENTS_END: Final = "<!-- end of the generated table -->\n"


def with_requirements(page: str) -> str:
    """Return the page `docs/compliance.md` with the table of requirements between its marks."""
    before, _, rest = page.partition(REQUIREMENTS_BEGIN)
    after = rest.partition(REQUIREMENTS_END)[2]
    return f"{before}{REQUIREMENTS_BEGIN}\n{requirements_table()}{REQUIREMENTS_END}{after}"


def requirements_table() -> str:
    """Every requirement of the draft, with the module of its check and the module of its cases."""
    cases = {True: "test_judge.py", False: "test_requirements.py"}
    rows = [
        [
            one.id,
            one.level,
            plain(one.says),
            code(f"llmtap/bench/compliance/{module}.py"),
            code(f"tests/bench/compliance/{cases[one.subject == COMPARISON]}"),
        ]
        for module in ("preparation", "procedures", "judge")
        for one in import_module(f"llmtap.bench.compliance.{module}").ROWS
    ]
    return table(["id", "level", "requirement", "check", "test"], rows)


# ---------------------------------------------------------------- mkdocs


def _openapi() -> str:
    return msgspec.json.format(msgspec.json.encode(openapi_document())).decode()


PAGES: Final = {
    "reference/options.md": options_page,
    "reference/cli.md": commands_page,
    "reference/api.md": api_page,
    "reference/openapi.json": _openapi,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it has found its own files."""
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files
