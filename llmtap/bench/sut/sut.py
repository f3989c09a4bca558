"""The bench file: target server, declarations of the system under test (SUT), and parameters of the tests.

    [target]      server to which requests are sent
    [sut]         description of the SUT, with [sut.hardware], [sut.tokenizer], [sut.guardrails], [sut.clock]
    [arms.NAME]   a configuration of the SUT that a test compares with another
    [tests.NAME]  setup parameters of a test

The structs have the keys of these tables, except those of `[tests.NAME]`, which are in the tests' modules.
`llmtap bench` calls `load_bench` with the file and its flags and gets a `BenchFile`. Priority: flags, the
file, `--quick`, the test's defaults. An unknown key or a wrong value is a ConfigError. `without_secrets` and
`params_document` return target, arms and parameters as JSON for reports. Source: IETF draft, 4.1, 4.4, 4.6 to
4.8.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from llmtap.bench.run.test import TESTS, BenchTest, test_named
from llmtap.errors import ConfigError, raise_all
from llmtap.load.sending import shown_url, split_url
from llmtap.options.fields import opt
from llmtap.options.tables import OptionTables
from llmtap.units import encode_seconds
from llmtap.user_files import read_toml

Boundary = Literal["model engine", "application gateway", "compound system"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Accelerators of the SUT, and their price (`[sut.hardware]`)."""

    accelerator: Annotated[str | None, opt("type, such as H100 SXM, or none (5.1.2.3)")] = None
    count: Annotated[Annotated[int, Meta(ge=0)] | None, opt("number of accelerators")] = None
    memory: Annotated[str | None, opt("memory of each, such as 80 GB")] = None
    cpu: Annotated[str | None, opt("CPU of the host")] = None
    price_per_hour: Annotated[
        Annotated[float, Meta(gt=0)] | None, opt("price of all hardware per hour (6.2)")
    ] = None
    currency: Annotated[str, opt("currency of the price")] = "USD"


class SutTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """Tokenizer that the declared token counts refer to (`[sut.tokenizer]`; IETF draft, 4.4)."""

    name: Annotated[str | None, opt("name and version of the tokenizer (4.4.1)")] = None
    vocabulary: Annotated[Annotated[int, Meta(ge=1)] | None, opt("vocabulary size")] = None
    source: Annotated[str | None, opt("source: a model id, a tiktoken name")] = None
    counting: Annotated[
        Literal["native", "reference"], opt("counting of tokens (4.4.2): option A (native) or B (reference)")
    ] = "native"
    special: Annotated[str | None, opt("BOS/EOS: included or excluded (4.4.3)")] = None
    system_prompt: Annotated[str | None, opt("its tokens: separate or included (4.4.3)")] = None
    tools: Annotated[str | None, opt("formatting tokens of tool calls (4.4.3)")] = None


class Guardrails(msgspec.Struct, frozen=True, kw_only=True):
    """Filters and other safety systems of the SUT (`[sut.guardrails]`; IETF draft, 4.8.1)."""

    input_filter: Annotated[bool | None, opt("whether prompts are filtered (4.8.1)")] = None
    output_filter: Annotated[bool | None, opt("whether responses are filtered (4.8.1)")] = None
    names: Annotated[list[str], opt("names of the safety systems, if known")] = []


class SutClock(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of the load generator, and clock synchronisation (`[sut.clock]`; IETF draft, 4.7)."""

    placement: Annotated[
        Literal["same machine", "remote"] | None, opt("place of load generator and SUT (4.7)")
    ] = None
    synchronization: Annotated[str | None, opt("method, if remote: NTP, PTP")] = None
    accuracy: Annotated[str | None, opt("estimated accuracy, if remote: 2ms")] = None


class Sut(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the system under test (`[sut]`). A field is None if it is not declared.

    This struct and its members ignore unknown fields, because they also read results of newer versions.
    Unknown keys of a bench file are refused by `OptionTables`.
    """

    boundary: Annotated[Boundary | None, opt("boundary of the SUT (4.1)")] = None
    model: Annotated[str | None, opt("name, version, quantization of the model (5.1.2.3)")] = None
    software: Annotated[str | None, opt("engine or gateway, and version (C.1)")] = None
    protocol: Annotated[str | None, opt("SSE, WebSocket or gRPC (4.6.1)")] = None
    chunking: Annotated[
        Literal["one token per chunk", "several tokens per chunk"] | None,
        opt("tokens per chunk; the observed number is reported, too (4.6.2)"),
    ] = None
    prefix_cache: Annotated[bool | None, opt("whether the prefix cache is on (5.1.2.3)")] = None
    max_batch: Annotated[
        Annotated[int, Meta(ge=1)] | None, opt("maximum number of running requests (5.2.4.2)")
    ] = None
    hardware: Hardware = Hardware()
    tokenizer: SutTokenizer = SutTokenizer()
    guardrails: Guardrails = Guardrails()
    clock: SutClock = SutClock()
    notes: Annotated[list[str], opt("further remarks for the reader")] = []
    start: Annotated[
        list[str], opt("command that starts the server; its model load is measured (4.5.3)")
    ] = []


class TargetArm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the SUT to compare: its differences from the target (`[arms.NAME]`)."""

    about: Annotated[str, opt("description for the report")] = ""
    url: Annotated[str | None, opt("another URL")] = None
    headers: Annotated[dict[str, str], opt("additional header fields of each request", secret=True)] = {}
    body: Annotated[dict[str, msgspec.Raw], opt("additional members of each body", secret=True)] = {}
    apply: Annotated[list[str], opt("command that switches the SUT; run before the arm's load")] = []

    @property
    def has_switch(self) -> bool:
        """Whether a command switches the server to this arm. Then requests cannot alternate between arms."""
        return bool(self.apply)


class TokenCounting(msgspec.Struct, frozen=True):
    """How the tokens of prompts are counted."""

    tokenizer: str | None = None
    """Name or path of the tokenizer; None: llmtap's own tokenizer of words."""
    chat: bool = True
    """Whether the tokens of the tokenizer's chat template are also counted."""


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Target server (`[target]`). The API key is in the environment variable that `key_env` names."""

    url: Annotated[str, opt("http://host:port[/prefix]")]
    endpoint: Annotated[
        Literal["", "chat.completions", "completions", "responses"],
        opt(
            "API endpoint; default: chat.completions with a tokenizer, else completions,"
            " which accepts token ids as prompts"
        ),
    ] = ""
    model: Annotated[str | None, opt("model name; default: the server's only model")] = None
    server: Annotated[
        Literal["auto", "openai", "vllm", "sglang"], opt("server type, for vendor-specific fields")
    ] = "auto"
    tokenizer: Annotated[str | None, opt("tokenizer of the prompts: folder, file or tiktoken:NAME")] = None
    headers: Annotated[dict[str, str], opt("header fields of each request", secret=True)] = {}
    body: Annotated[dict[str, msgspec.Raw], opt("members of each body", secret=True)] = {}
    key_env: Annotated[str | None, opt("environment variable of the API key")] = None
    ca: Annotated[str | None, opt("file with the trusted CA (PEM)")] = None
    metrics: Annotated[str | None, opt("URL of the server's metrics, or none")] = None
    processes: Annotated[int, opt("number of sending processes", ge=1, le=256)] = 1

    @property
    def counting(self) -> TokenCounting:
        return TokenCounting(self.tokenizer, self.endpoint == "chat.completions")

    def __post_init__(self) -> None:
        split_url(self.url, "target.url")
        if not self.endpoint:
            endpoint = "completions" if self.tokenizer is None else "chat.completions"
            msgspec.structs.force_setattr(self, "endpoint", endpoint)


S = TypeVar("S", bound=msgspec.Struct)
FLAG: Final = "--set"
HIDDEN: Final = "(not shown)"


class _TestParams(Mapping[str, type[msgspec.Struct]]):
    """Setup parameters of each test by name; the module of a test is imported on demand."""

    def __getitem__(self, name: str) -> type[msgspec.Struct]:
        if name not in TESTS:
            raise KeyError(name)
        return test_named(name).params

    def __iter__(self) -> Iterator[str]:
        return iter(TESTS)

    def __len__(self) -> int:
        return len(TESTS)


class _Arms(Mapping[str, type[TargetArm]]):
    """By name of an arm that a test uses: the struct of its keys. Modules of tests are imported on demand."""

    def __getitem__(self, name: str) -> type[TargetArm]:
        if name not in iter(self):
            raise KeyError(name)
        return TargetArm

    def __iter__(self) -> Iterator[str]:
        tests = [test_named(name) for name in TESTS]
        return iter(dict.fromkeys(arm for test in tests for arm in (*test.arms, *test.arms_any)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


_SCHEMA: Final[Mapping[str, Any]] = {
    "target": BenchTarget,
    "sut": Sut,
    "arms": _Arms(),
    "tests": _TestParams(),
}
_SECRET_FIELD: Final = re.compile(r"auth|cookie|api-?key|token|secret|passw|credential", re.IGNORECASE)
_SECRET_MEMBER: Final = re.compile(
    r"api_?key|secret|passw|credential|authorization|access_token", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFile:
    """Content of a bench file, changed by the flags of the command."""

    target: BenchTarget
    sut: Sut = field(default_factory=Sut)
    arms: Mapping[str, TargetArm] = field(default_factory=dict)
    tests: Mapping[str, msgspec.Struct] = field(default_factory=dict)
    names_set: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By test: names of the parameters that the user set; all other parameters have their defaults."""

    def params_of(self, test: BenchTest[S], *, quick: bool) -> S:
        """Return the parameters of a test: the values that the user set, and defaults for all others."""
        defaults = test.params(**test.quick) if quick else test.params()
        user_values = {
            name: getattr(self.tests[test.name], name) for name in self.names_set.get(test.name, ())
        }
        return msgspec.structs.replace(defaults, **user_values)


def load_bench(
    file: Path | None, *, target: str | None = None, sets: Sequence[str] = (), tests: Sequence[str] = ()
) -> BenchFile:
    """Read the bench file, and apply the flags. Raises ConfigError that names the key and where it was set.

    `sets`: values of `--set`. `NAME=VALUE` sets a parameter in each of `tests` that has it, `TEST.NAME=VALUE`
    in one test. Other keys set values of other tables of the file, such as `sut.hardware.count=8`.
    """
    tables = OptionTables(_SCHEMA, strict=True)
    if file is not None:
        tables.put_file(file, read_toml(file, "--config"))
    if target is not None:
        tables.put("target.url", target, "--target")
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(
                FLAG, f"expected NAME=VALUE, got {item!r}", "`llmtap bench list` shows the parameters"
            )
        for path in _keys_set_by(key.strip(), tests):
            tables.put(path, text.strip(), f"{FLAG} {key}")
    if "url" not in tables.values.get("target", {}):
        tables.put("target.url", "", "")
        tables.mistakes.add([ConfigError("--target", "is missing", "such as --target http://127.0.0.1:8000")])
    read = tables.read()
    raise_all(tables.mistakes.errors)
    names_set = {name: frozenset(tables.values[f"tests.{name}"]) for name in read["tests"]}
    return BenchFile(**read, names_set=names_set)


def without_secrets(kind: BenchTarget | TargetArm) -> dict[str, Any]:
    """Return a target or an arm as JSON, without the values of secrets and without passwords in URLs."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kind))
    for table, secret in (("headers", _SECRET_FIELD), ("body", _SECRET_MEMBER)):
        document[table] = {
            name: HIDDEN if secret.search(name) else value for name, value in document[table].items()
        }
    for name in ("url", "metrics"):
        if "://" in str(document.get(name)):  # `metrics` can also be the word "none".
            document[name] = shown_url(document[name])
    return document


def params_document(params: msgspec.Struct) -> dict[str, Any]:
    """Return the parameters of a test as JSON, with durations in seconds."""
    document: dict[str, Any] = msgspec.to_builtins(params, enc_hook=encode_seconds)
    return document


def _keys_set_by(key: str, tests: Sequence[str]) -> list[str]:
    """Return the keys of the bench file that `--set KEY=VALUE` sets.

    The name `rate`, for example, means this parameter of each of `tests` that has it.
    """
    first, dot, rest = key.partition(".")
    test = first.replace("_", "-")
    if dot and test in TESTS:
        return [f"tests.{test}.{rest}"]
    if dot and first in _SCHEMA:
        return [key]
    name = first.replace("-", "_")
    having = [test for test in tests if name in test_named(test).params.__struct_fields__]
    return [f"tests.{test}.{key}" for test in having or tests[:1]]
