"""Write a bench file with the detected facts of a server, and comments for missing declarations.

Input: what `detect.py` found. Output: the TOML text of `llmtap bench init` (`starter_text`), and the
declarations that are still open. A declaration is required if, without it, a MUST is not met or cannot be
judged by the requirements' checks (`bench/compliance`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, get_args, get_origin

import msgspec
from msgspec.inspect import Metadata, type_info

from llmtap.bench.compliance.evidence import MUSTS, Report, Requirement
from llmtap.bench.compliance.judge import COMPARISON, REQUIREMENTS
from llmtap.bench.run.test import TESTS
from llmtap.bench.sut.detect import Detected
from llmtap.bench.sut.sut import BenchTarget, Guardrails, Hardware, Sut, SutClock, SutTokenizer

SUT: Final = "sut."


def demanded(known: Mapping[str, Any], examples: Mapping[str, Any], url: str) -> dict[str, list[Requirement]]:
    """Return the MUSTs that bind each unknown key of the SUT; unknown values are taken from `examples`."""
    whole = {key: value for key, value in {**examples, **known}.items() if key.startswith(SUT)}
    musts = [one for one in REQUIREMENTS if one.level in MUSTS and one.subject != COMPARISON]
    met = _met(musts, whole, url)
    found = {}
    for key in whole:
        if key in known:
            continue
        rest = {name: value for name, value in whole.items() if name != key}
        lost = [one for one in met if one.check(_report(rest, url)).status in ("not met", "cannot tell")]
        if lost:
            found[key] = lost
    return found


def _met(musts: Iterable[Requirement], values: Mapping[str, Any], url: str) -> list[Requirement]:
    report = _report(values, url)
    return [one for one in musts if one.check(report).status == "met"]


def _report(values: Mapping[str, Any], url: str) -> Report:
    sut: dict[str, Any] = {}
    for key, value in values.items():
        *tables, name = key.removeprefix(SUT).split(".")
        at = sut
        for table in tables:
            at = at.setdefault(table, {})
        at[name] = value
    return {"sut": msgspec.to_builtins(msgspec.convert(sut, Sut)), "target": {"url": url}}


ASKED_BY: Final = {
    "sut.boundary": "4.1", "sut.model": "5.1.2.3", "sut.software": "C.1", "sut.protocol": "4.6.2",
    "sut.chunking": "4.6.2", "sut.prefix_cache": "5.1.2.3", "sut.max_batch": "5.2.4.2", "sut.notes": "C.2",
    "sut.hardware": "5.1.2.3", "sut.hardware.price_per_hour": "6.2", "sut.hardware.currency": "6.2",
    "sut.tokenizer": "4.4.1", "sut.tokenizer.counting": "4.4.2", "sut.tokenizer.special": "4.4.3",
    "sut.tokenizer.system_prompt": "4.4.3", "sut.tokenizer.tools": "4.4.3", "sut.guardrails": "4.8.1",
    "sut.clock": "4.7", "sut.start": "4.5.3",
}  # fmt: skip
"""Sections of the IETF draft, by key or table."""
_EXAMPLES: Final = {
    "sut.boundary": "model engine", "sut.model": "Qwen2-7B-Instruct, bf16", "sut.software": "vLLM 0.9.1",
    "sut.protocol": "SSE", "sut.chunking": "one token per chunk", "sut.prefix_cache": True,
    "sut.max_batch": 256, "sut.notes": ["behind nginx"],
    "sut.start": ["vllm", "serve", "NAME"], "sut.hardware.accelerator": "H100 SXM",
    "sut.hardware.count": 1, "sut.hardware.memory": "80 GB", "sut.hardware.cpu": "2 x EPYC 9554",
    "sut.hardware.price_per_hour": 2.5, "sut.hardware.currency": "USD",
    "sut.tokenizer.name": "Qwen2 tokenizer",
    "sut.tokenizer.vocabulary": 151_936, "sut.tokenizer.source": "Qwen/Qwen2-7B-Instruct",
    "sut.tokenizer.counting": "native", "sut.tokenizer.special": "excluded",
    "sut.tokenizer.system_prompt": "included", "sut.tokenizer.tools": "no tools are used",
    "sut.guardrails.input_filter": False, "sut.guardrails.output_filter": False,
    "sut.guardrails.names": ["Llama Guard 3"], "sut.clock.placement": "remote",
    "sut.clock.synchronization": "NTP (chrony)", "sut.clock.accuracy": "2ms", "target.model": "NAME",
    "target.server": "vllm", "target.tokenizer": "models/qwen2", "target.headers": {"x-team": "perf"},
    "target.body": {"top_p": 1.0}, "target.key_env": "OPENAI_API_KEY", "target.ca": "ca.pem",
    "target.metrics": "http://127.0.0.1:8000/metrics", "target.processes": 1,
    "target.endpoint": "chat.completions",
}  # fmt: skip
"""Examples of values in comments; a test reads each of them."""
_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "target": BenchTarget, "sut": Sut, "sut.hardware": Hardware, "sut.tokenizer": SutTokenizer,
    "sut.guardrails": Guardrails, "sut.clock": SutClock,
}  # fmt: skip
_WIDTH: Final = 110
_ARMS: Final = """
# Configurations of the server that tests compare, each as what differs from [target]: another `url`,
# `headers`, members of the `body`, or a command that switches the server over (`apply`). `llmtap bench list`
# says which test wants which.
#
# [arms.NAME]
# about = "what it is, for the report"
# headers = { x-cache = "off" }
# apply = ["./switch.sh", "cache-off"]

# Setup parameters that are to differ from the tests' own: `llmtap bench list TEST` has them all. Tests:
# {tests}
#
# [tests.ttft]
# requests = 10000
"""


def starter_text(detected: Detected) -> str:
    """Return the bench file; unknown declarations are comments."""
    lines = [
        "# Bench file, written by `llmtap bench init`. Comments name the source of detected values.",
        "# Unknown declarations are comments, with the section of the IETF draft that requires them.",
        "# A report without a declaration that is marked MUST does not comply.",
    ]
    lines += [line for note in detected.notes for line in _comment(f"Noted: {note}.")]
    wanted = open_declarations(detected)
    for table, kind in _TABLES.items():
        lines += ["", f"[{table}]"]
        lines += _table(table, kind, detected, wanted)
    tests = ", ".join(TESTS)
    return "\n".join(lines) + "\n" + _ARMS.replace("{tests}", tests)


def open_declarations(detected: Detected) -> dict[str, str]:
    """Return the undetected keys that the draft demands, with `MUST (4.4.1)` and the tests concerned."""
    known = {key: fact.value for key, fact in detected.facts.items()}
    told = {}
    for key, musts in demanded(known, _EXAMPLES, detected.url).items():
        sections = ", ".join(dict.fromkeys(one.section for one in musts))
        only = (
            ""
            if not all(one.binds for one in musts)
            else " of " + ", ".join(dict.fromkeys(test for one in musts for test in one.binds))
        )
        told[key] = f"MUST ({sections}{only})"
    return told


def _table(
    table: str, kind: type[msgspec.Struct], detected: Detected, wanted: Mapping[str, str]
) -> Iterator[str]:
    for one in msgspec.structs.fields(kind):
        key = f"{table}.{one.name}"
        if key in _TABLES:
            continue
        meaning = _meaning(one.type)
        fact = detected.facts.get(key)
        if key == "target.url":
            yield f"url = {_toml(detected.url)}"
            continue
        if fact is not None:
            yield f"{one.name} = {_toml(fact.value)}  # {fact.how}"
            continue
        asked = ASKED_BY.get(key) or ASKED_BY.get(table)
        yield from _comment(meaning + (f" ({asked})" if asked else ""))
        if key in detected.hints:
            yield from _comment(f"found: {detected.hints[key]}")
        mark = "" if table == "target" else f"  # {wanted.get(key, 'optional')}"
        yield f"# {one.name} = {_toml(_EXAMPLES[key])}{mark}"


def _meaning(kind: Any) -> str:
    info = type_info(kind)
    assert isinstance(info, Metadata)
    assert info.extra_json_schema is not None
    said: str = info.extra_json_schema["description"]
    inner = get_args(kind)[0]
    choices = [
        c for one in (inner, *get_args(inner)) if "Literal" in str(get_origin(one)) for c in get_args(one)
    ]
    return said + (f": {' | '.join(filter(None, choices))}" if choices else "")


def _comment(text: str) -> Iterator[str]:
    line = "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH and line != "#":
            yield line
            line = "#"
        line += f" {word}"
    yield line


def _toml(value: Any) -> str:
    """Format a value as TOML. JSON strings are TOML basic strings except for one character."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(held)}" for name, held in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(held) for held in value) + "]"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
