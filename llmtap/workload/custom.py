"""Load a user's workload from a TOML file as a `Composed` workload; `config/workload.toml` shows every key.

`registry.py` calls `load_workload` for a name that is a TOML file. Errors name key and file, with the nearest
known key. Relative paths start at the file's folder.
"""

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from llmtap.errors import ConfigError
from llmtap.units import read_special
from llmtap.user_files import decode_json, read_toml
from llmtap.workload.arrivals import OWN_RATES, parse_arrivals
from llmtap.workload.composed import REQUEST, Composed, RandomIds
from llmtap.workload.lengths import Empirical, Fixed, Lengths, LogNormal, Normal, Percentiles, UniformLengths
from llmtap.workload.plan import Conversations, Sharing, ThinkExponential, ThinkFixed, ThinkLogNormal
from llmtap.workload.programs import Code
from llmtap.workload.prompts.prompt import CL100K_IDS
from llmtap.workload.prompts.prose import Document, FileText, ProseWords, ProseWriter

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["words", "code", "document", "ids", "file"] = "words"
    file: str = ""
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=1 << 31)] = CL100K_IDS
    """For `ids`: upper bound."""


class _Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    stop: list[str] | None = None
    ignore_eos: bool | None = None
    extra: dict[str, Any] = {}


class WorkloadFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: _Tokens | Lengths
    output: _Tokens | Lengths
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = ""
    """Default: the file's name."""
    about: str = ""
    content: _Content = _Content()
    sharing: Sharing | None = None
    conversations: Conversations | None = None
    request: _Asked = _Asked()
    arrivals: str = ""
    """Arrivals unless the run states others; the rate is the run's."""


_DISTRIBUTIONS: Final = (Fixed, UniformLengths, Normal, LogNormal, Percentiles, Empirical)
_THINKS: Final = (ThinkFixed, ThinkExponential, ThinkLogNormal)


def load_workload(path: Path) -> Composed:
    """Load the workload of a file. Raises ConfigError whose place is `key in FILE`."""
    tables = read_toml(path)
    try:
        told = msgspec.convert(tables, WorkloadFile, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        raise _wrong(str(exc), tables, path) from None
    if told.arrivals:
        _check_arrivals(told.arrivals, path)
    folder = path.parent
    sharing, talk = told.sharing, told.conversations
    if sharing is not None:
        tokens = _resolved(sharing.tokens, "sharing.tokens", path)
        sharing = msgspec.structs.replace(sharing, tokens=tokens)
    if talk is not None:
        talk = msgspec.structs.replace(talk, turns=_resolved(talk.turns, "conversations.turns", path))
    request = {k: v for k, v in msgspec.to_builtins(told.request).items() if v is not None and k != "extra"}
    about = {
        "about": told.about or f"the workload of {path.name}",
        "source": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "request": {**REQUEST, **request, **told.request.extra},
        **({"arrivals": told.arrivals} if told.arrivals else {}),
    }
    return Composed(
        told.name or path.stem, _resolved(told.input, "input", path), _resolved(told.output, "output", path),
        _content(told.content, folder, path), sharing=sharing, conversations=talk, about=about,
    )  # fmt: skip


def _check_arrivals(text: str, path: Path) -> None:
    named = text.partition(":")[0].strip() in OWN_RATES
    parse_arrivals(text, rate_rps=None if named else 1.0, seed=0, place=f"arrivals in {path}")


def _content(told: _Content, folder: Path, path: Path) -> ProseWriter | RandomIds:
    if bool(told.file) != (told.kind == "file"):
        raise ConfigError(
            f"content.file in {path}",
            "is not given" if told.kind == "file" else f"has no use where content.kind is {told.kind!r}",
            'content.kind = "file" takes the text of content.file',
        )
    match told.kind:
        case "words":
            return ProseWords()
        case "code":
            return Code()
        case "document":
            return Document()
        case "ids":
            return RandomIds(told.vocabulary)
        case "file":
            return FileText(folder / told.file, f"content.file in {path}")


# ---------------------------------------------------------------- empirical lengths


def _resolved(lengths: int | Lengths, key: str, path: Path) -> Lengths:
    if isinstance(lengths, int):
        return Fixed(tokens=lengths)
    if not isinstance(lengths, Empirical) or not lengths.file:
        return lengths
    place = f"{key}.file in {path}"
    file = path.parent / lengths.file
    try:
        data = file.read_bytes()
    except OSError as exc:
        raise ConfigError(place, f"{file} cannot be read: {exc.strerror}") from None
    try:
        values = _numbers(data.decode(), lengths.column)
        if not values:
            raise ValueError("has no values")
        return msgspec.convert(
            {
                "distribution": "empirical", "values": values, "file": file.name, "column": lengths.column,
                "sha256": hashlib.sha256(data).hexdigest(), "min": lengths.min, "max": lengths.max,
            },
            Empirical,
        )  # fmt: skip
    except (msgspec.ValidationError, ValueError) as exc:
        raise ConfigError(place, f"{file}: {exc}") from None


def _numbers(text: str, column: str) -> list[int]:
    """Raises ValueError naming the line."""
    if column:
        import csv

        rows = csv.DictReader(text.splitlines())
        if column not in (rows.fieldnames or ()):
            raise ValueError(f"has no column {column!r}, but {', '.join(rows.fieldnames or ()) or 'none'}")
        return _whole((rows.line_num, row[column] or "") for row in rows)
    if text.lstrip().startswith("["):
        return decode_json(text, list[int])
    return _whole((n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip())


def _whole(lines: Iterable[tuple[int, str]]) -> list[int]:
    out = []
    for n, text in lines:
        try:
            out.append(int(text))
        except ValueError:
            raise ValueError(f"line {n}: expected a whole number, got {text.strip()[:40]!r}") from None
    return out


# ---------------------------------------------------------------- what is wrong


def _wrong(text: str, tables: Mapping[str, Any], path: Path) -> ConfigError:
    """Convert msgspec's message (`problem - at `$.key``)."""
    problem, _, at = text.partition(" - at `$")
    key = at.rstrip("`").lstrip(".")
    hint = None
    if (unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem)) is not None:
        near = difflib.get_close_matches(unknown[1], _fields_at(key, tables), 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"keys: {', '.join(_fields_at(key, tables))}"
        key, problem = ".".join(filter(None, (key, unknown[1]))), "there is no such key"
    elif (missing := re.fullmatch(r"Object missing required field `(.*)`", problem)) is not None:
        hint = _tags(key) if missing[1] == "distribution" else None
        key, problem = ".".join(filter(None, (key, missing[1]))), "is not given"
    elif key.endswith(".distribution"):
        hint = _tags(key.removesuffix(".distribution"))
    elif key == "content.kind":
        hint = "one of words, code, document, ids, file"
    return ConfigError(f"{key} in {path}" if key else str(path), problem, hint)


def _tags(key: str) -> str:
    kinds = _THINKS if key == "conversations.think" else _DISTRIBUTIONS
    return "one of " + ", ".join(str(kind.__struct_config__.tag) for kind in kinds)


def _fields_at(key: str, tables: Mapping[str, Any]) -> list[str]:
    """Return the keys allowed at a place."""
    structs: dict[str, type[msgspec.Struct]] = {
        "": WorkloadFile, "content": _Content, "sharing": Sharing, "conversations": Conversations,
        "request": _Asked,
    }  # fmt: skip
    if key in structs:
        return list(structs[key].__struct_fields__)
    told: Any = tables
    for name in key.split("."):
        told = told.get(name) if isinstance(told, dict) else None
    tag = told.get("distribution") if isinstance(told, dict) else None
    kinds = _THINKS if key == "conversations.think" else _DISTRIBUTIONS
    fields = next((kind.__struct_fields__ for kind in kinds if kind.__struct_config__.tag == tag), ())
    return ["distribution", *(name for name in fields if name != "sha256")]
