"""`llmtap inspect --draft` and `--fixture`: make a dialect's table, or a fixture, from a saved answer."""

import json
import re
import sys
from pathlib import Path
from typing import Final

import msgspec

from llmtap.cli.shared import write_output
from llmtap.errors import ConfigError
from llmtap.exchange.fixture import Fixture, fixture_of, make_fixture, saved_of
from llmtap.exchange.saved import Explained, Saved, events_of
from llmtap.protocol.dialects.table.declaration import DialectTable
from llmtap.protocol.structure import Structure, draft_table

_VALUES_MAX: Final = 10_000_000
"""Maximum number of JSON values of a file that are analysed; this number takes some seconds."""
_FIXTURE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


def read_fixture(file: str, data: bytes) -> tuple[Fixture, Saved] | None:
    """Return a fixture and its answer if `data` is the JSON of a fixture; else None. Raises ConfigError."""
    try:
        fixture = fixture_of(json.loads(data))
    except msgspec.ValidationError as exc:
        hint = "write a new fixture with llmtap inspect FILE --fixture NAME"
        raise ConfigError(file, f"is a malformed fixture: {exc}", hint) from None
    except (ValueError, RecursionError):
        return None
    if fixture is None:
        return None
    try:
        body = (Path(file).parent / Path(fixture.body_file).name).read_bytes()
    except OSError as exc:
        hint = "store the body in the folder of the fixture"
        raise ConfigError(f"body.file in {file}", f"cannot be read: {exc.strerror}", hint) from None
    return fixture, saved_of(fixture, body)


def write_draft(
    name: str, saved: Saved, explained: Explained, source: str, out: str | None, *, text: bool
) -> None:
    """Write a draft of a dialect's table, derived from the events of the answer. Raises ConfigError."""
    DialectTable(name=name, source=source, end="none", plain_text="content")  # Check the name.
    place = Path(source).name
    events = events_of(saved).events
    structure = Structure(events, _VALUES_MAX, of_model=True)
    for event in events:
        structure.add(event)
    table = draft_table(structure, events, name, place, text=text)
    if table is None:
        raise ConfigError(
            source,
            f"no generated text was found in {len(events):,} events",
            "write the table by hand: `llmtap inspect FILE` shows the events, ADDING.md all keys",
        )
    head = (
        f"# Draft of a dialect: what {len(events):,} events of {place} suggest. `check` marks guesses.",
        f"# Test: llmtap inspect {source} --dialect FILE. Use: add it to the configuration, then reload.",
    )
    dialect = explained.exchange.dialect
    if dialect is not None:
        print(f"llmtap: note: {source} needs no table: llmtap knows its dialect {dialect}", file=sys.stderr)
    text_out = "\n".join((*head, "", table))
    if out is None:
        print(text_out)
    else:
        write_output("--out", Path(out), text_out)
        print(f"llmtap: wrote {out}", file=sys.stderr)


def write_fixture(
    name: str, saved: Saved, explained: Explained, source: str, out: str | None, known: Fixture | None
) -> None:
    """Write the fixture `NAME.sse` (the answer) and `NAME.json` (its description). Raises ConfigError.

    `known`: fixture from which the answer was read. If its name is `name`, write only `NAME.json`.
    """
    if not _FIXTURE_NAME.fullmatch(name):
        raise ConfigError(
            "--fixture",
            f"{name!r} is not a valid name for the files of a fixture",
            "use only letters, digits, `_`, `-` and `.`",
        )
    folder = Path(out or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = f"cannot create the folder {folder}: {exc.strerror}"
        raise ConfigError("--out", problem, "use --out with a folder that you may write to") from None
    body, description = folder / f"{name}.sse", folder / f"{name}.json"
    is_same = known is not None and known.name == name
    for place in () if is_same else (body, description):
        if place.exists():
            raise ConfigError(
                "--fixture", f"{place} exists already", "choose another name, or another folder with --out"
            )
    made = make_fixture(name, saved, explained, Path(source).name, known if is_same else None)
    try:
        if not is_same:
            body.write_bytes(saved.body)
    except OSError as exc:
        problem = f"cannot write {body}: {exc.strerror}"
        raise ConfigError("--fixture", problem, "use --out with a folder that you may write to") from None
    write_output("--fixture", description, json.dumps(msgspec.to_builtins(made), indent=1))
    print(f"llmtap: wrote {description}" + ("" if is_same else f" and {body}"), file=sys.stderr)
