"""Options of the simulated server: of its answers (`SimOptions`) and of its engine (`EngineOptions`).

`load_options` and `load_engine` read and check the texts of the command line;
`for_request` applies the headers of one request, which may override most options of answers.

An option NAME of an answer is the header `x-sim-NAME` with dashes for underscores: `x-sim-output-hold: 8`.
Times there may also be plain milliseconds under a name that ends in `-ms`: `x-sim-ttft-ms: 200`.
`llmtap sim serve --keys` lists all of them (`keys`).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.settings import choices_of, read_value
from llmtap.sim.model_options import (
    ServingSetup,
    doc,
    read_model_options,
    read_serving,
)
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.units import Duration, format_ns

_OF_WHOLE_RUNS: Final = frozenset(
    {"request_sla", "window", "tokens", "failed", "same_instant", "tie", "percentile", "bins", "edges"}
)
"""Options of summaries, and options that need all requests beforehand."""


MS: Final = 1_000_000
HEADER: Final = "x-sim-"
FIXED: Final = "fixed"
"""Instead of a scheduler's name: a fixed schedule without an engine."""
TOKENS_MAX: Final = 131_072
"""Of one answer: the longest context that common models have."""
CHOICES_MAX: Final = 128
"""As many answers to one request as OpenAI gives."""

RefusalKind = Literal["content_filter", "field", "text", "error"]
FaultKind = Literal["stall", "reset", "truncate", "unfinished", "error", "429", "503", "slow"]
_RATES: Final[dict[FaultKind, str]] = {
    "stall": "stall_rate", "reset": "reset_rate", "truncate": "truncate_rate",
    "unfinished": "unfinished_rate", "error": "error_rate", "429": "busy_rate", "503": "unavailable_rate",
    "slow": "slow_rate",
}  # fmt: skip
"""The option with the rate of each fault."""
Rate = Annotated[float, Meta(ge=0, le=1)]


class PacingOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens_per_chunk: Annotated[int, doc("Tokens per event.", ge=1)] = 1
    coalesce: Annotated[
        Duration, doc("Interval in which events are collected and sent in one write; 0: each event at once.")
    ] = Duration(0)
    jitter: Annotated[
        float, doc("Sigma of the lognormal factor on every gap between tokens; its mean is 1.", ge=0, le=3)
    ] = 0.0
    keepalive: Annotated[
        Duration, doc("Time without an event after which a comment (or ping) is sent; 0: never.")
    ] = Duration(0)


class GuardrailOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters before and behind the engine, and refusals."""

    input_filter: Annotated[Duration, doc("Duration of the input filter.")] = Duration(0)
    output_hold: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["all"],
        doc("Tokens that the output filter holds and releases together; `all`: the complete response."),
    ] = 0
    output_filter: Annotated[
        Duration, doc("Duration of the output filter for each released group of tokens.")
    ] = Duration(0)
    refusal: Annotated[
        RefusalKind, doc("Form of a refusal: content_filter, field, text, or error (status 400).")
    ] = "content_filter"
    refusal_rate: Annotated[Rate, doc("Fraction of requests that are refused.")] = 0.0
    block_after: Annotated[int, doc("Tokens before a response is blocked midway.", ge=0)] = 8
    block_rate: Annotated[Rate, doc("Fraction of responses that are blocked midway.")] = 0.0


class FaultOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults and their rates. At most one fault per request."""

    fault_after: Annotated[int, doc("Tokens before a fault in the stream.", ge=0)] = 5
    stall: Annotated[Duration, doc("Duration of a stall.")] = Duration(2_000 * MS)
    slow: Annotated[
        Duration,
        doc("Delay of a slow response, including its head; tokens due in the meantime are sent with it."),
    ] = Duration(2_000 * MS)
    stall_rate: Annotated[Rate, doc("Fraction of responses with a stall.")] = 0.0
    reset_rate: Annotated[Rate, doc("Fraction of responses whose connection is reset midway.")] = 0.0
    truncate_rate: Annotated[
        Rate, doc("Fraction of responses whose connection is closed within an event.")
    ] = 0.0
    unfinished_rate: Annotated[
        Rate, doc("Fraction of responses that are complete in HTTP, without a finish reason or end marker.")
    ] = 0.0
    error_rate: Annotated[Rate, doc("Fraction of responses with an error event midway.")] = 0.0
    busy_rate: Annotated[Rate, doc("Fraction of requests answered with 429.")] = 0.0
    unavailable_rate: Annotated[Rate, doc("Fraction of requests answered with 503.")] = 0.0
    slow_rate: Annotated[Rate, doc("Fraction of responses with a slow first byte.")] = 0.0

    def rates(self) -> list[tuple[FaultKind, float]]:
        return [(kind, getattr(self, name)) for kind, name in _RATES.items()]

    def __post_init__(self) -> None:
        if sum(rate for _, rate in self.rates()) > 1 + 1e-9:
            raise ValueError("the rates of all faults together are more than 1")


class SimOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of all answers, unless a request overrides them."""

    ttft: Annotated[Duration, doc("Time from the request to the first token.")] = Duration(150 * MS)
    itl: Annotated[Duration, doc("Time between tokens.")] = Duration(20 * MS)
    tokens: Annotated[int, doc("Tokens per response, unless max_tokens is less.", ge=1, le=TOKENS_MAX)] = 40
    spread: Annotated[
        float, doc("Maximum relative variation of TTFT and ITL between responses.", ge=0, le=0.9)
    ] = 0.0
    seed: Annotated[int, doc("Random seed, also of the generated text.")] = 0
    model: Annotated[str, doc("Name of the served model.")] = "sim"
    dialect: Annotated[
        Literal["openai", "vllm"],
        doc("Dialect of chat and completions; vllm: with vLLM's fields, and usage in each chunk."),
    ] = "openai"
    pacing: PacingOptions = PacingOptions()
    guardrails: GuardrailOptions = GuardrailOptions()
    faults: FaultOptions = FaultOptions()


_TABLES: Final[dict[str, type[Struct]]] = {
    "pacing": PacingOptions, "guardrails": GuardrailOptions, "faults": FaultOptions,
}  # fmt: skip
_OWN: Final = ("ttft", "itl", "tokens", "spread", "dialect")
"""Options outside tables that a request may set."""
_SCHEDULE: Final = ("ttft", "itl", "spread", "jitter")
"""Options of a fixed schedule."""
_CERTAIN: Final = {"refusal": "refusal_rate", "block_after": "block_rate"}
"""A header with one of these options sets its rate to 1."""


class Key(NamedTuple):
    key: str
    """On the command line, such as `pacing.jitter`."""
    default: str
    header: str
    """Header of a request that sets it; empty if there is none."""
    meaning: str


_FIELDS: Final = {
    f"{table}.{field.name}".lstrip("."): (table, field)
    for table in ("", *_TABLES)
    for field in msgspec.structs.fields(_TABLES.get(table, SimOptions))
    if field.name not in _TABLES
}
"""Table and field of each key."""
_BY_HEADER: Final = {
    field.name: (table, field) for table, field in _FIELDS.values() if table or field.name in _OWN
}


def keys() -> list[Key]:
    """Return all keys, and at the end the header `x-sim-fault`, which is no key."""
    found = []
    for key, (_, field) in _FIELDS.items():
        what = msgspec.inspect.type_info(field.type)
        meaning = (getattr(what, "extra_json_schema", None) or {}).get("description", "")
        choices = choices_of(field.type)
        if choices and not all(choice in meaning for choice in choices):
            meaning = f"{meaning.removesuffix('.')} ({' | '.join(choices)})."
        is_time = isinstance(field.default, Duration)
        shown = format_ns(field.default).replace(" ", "") if is_time else str(field.default).lower()
        header = HEADER + field.name.replace("_", "-") + "[-ms]" * is_time
        found.append(Key(key, shown, header if field.name in _BY_HEADER else "", meaning))
    fault = f"Fault to inject into this request: {', '.join(_RATES)}."
    return [*found, Key("", "", f"{HEADER}fault", fault)]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine behind all answers."""

    scheduler: str
    setup: ServingSetup
    servers: int = 1

    @property
    def iterates(self) -> bool:
        return SCHEDULERS[self.scheduler].iterates

    @property
    def tokens_max(self) -> int | None:
        """Of a prompt and its answer together: the KV memory. Whole batches have no limit."""
        serving = self.setup.serving
        return serving.kv_tokens // serving.block * serving.block if self.iterates else None

    @property
    def block_tokens(self) -> int:
        """Of the blocks that prompts may share; 0 without a prefix cache."""
        serving = self.setup.serving
        return serving.block if self.iterates and serving.prefix_cache else 0


def load_engine(
    scheduler: str,
    values: Mapping[str, str],
    *,
    serving: Mapping[str, str],
    readings: Mapping[str, str],
    servers: int = 1,
    places: Mapping[str, str] | None = None,
) -> EngineOptions | None:
    """Return the engine with this scheduler; None for the fixed schedule.

    `values` are the server's options as given, some of which an engine does not take, and `places` says where
    they were given. Raises ConfigError, which names the option.
    """
    if scheduler == FIXED:
        for option, given in (("--serving", serving), ("--reading", readings), ("--servers", servers != 1)):
            if given:
                raise ConfigError(option, "belongs to an engine", "choose one with --scheduler")
        return None
    if scheduler not in SCHEDULERS:
        known = (FIXED, *SCHEDULERS)
        near = difflib.get_close_matches(scheduler, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ConfigError("--scheduler", f"no scheduler is called {scheduler!r}", hint)
    for key in values:
        if key.rpartition(".")[2] in _SCHEDULE:
            raise ConfigError(
                (places or {}).get(key, key),
                f"belongs to --scheduler {FIXED}: {scheduler} decides when tokens are made",
            )
    kind = SCHEDULERS[scheduler]
    settings: list[Any] = []
    for option, given, read, listed in (
        ("--serving", serving, read_serving, "llmtap sim run --readings"),
        ("--reading", readings, read_model_options, "llmtap sim run --readings"),
    ):
        named = {name.replace("-", "_"): text for name, text in given.items()}
        try:
            settings.append(read(named))
        except ValueError as exc:
            raise ConfigError(option, str(exc), f"{listed} lists them") from None
        for name in named.keys() - (kind.reads - _OF_WHOLE_RUNS):
            raise ConfigError(f"{option} {name}", f"has no effect on {scheduler}")
    served, chosen = settings
    if chosen.predictor == "shuffled":
        raise ConfigError("--reading", "predictor=shuffled needs all requests, and here they come one by one")
    if scheduler == "multi_bin_dynamic" and not chosen.bin_edges:
        raise ConfigError(
            "--reading", "bin_edges is missing: bins of equal mass need to know all requests",
            "such as --reading bin_edges=1,30,117",
        )  # fmt: skip
    if kind.iterates and servers != 1:
        raise ConfigError("--servers", f"{scheduler} is one server; whole batches may have several")
    return EngineOptions(scheduler, ServingSetup(readings=chosen, serving=served), servers)


def load_options(values: Mapping[str, str], places: Mapping[str, str] | None = None) -> SimOptions:
    """Return options from texts by key (`{"ttft": "200ms", "pacing.jitter": "0.3"}`).

    `places` says how each was given (`--ttft`). Raises ConfigError, which names that, or the key.
    """
    places = places or {}
    tree: dict[str, dict[str, Any]] = {table: {} for table in ("", *_TABLES)}
    for key, value in values.items():
        place = places.get(key, key)
        if key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else "llmtap sim serve --keys lists them"
            raise ConfigError(place, f"there is no key {key!r}", hint)
        table, field = _FIELDS[key]
        try:
            tree[table][field.name] = read_value(field.type, value)
        except ValueError as exc:
            raise ConfigError(place, str(exc)) from None
    own = tree.pop("")
    try:
        own |= {table: kind(**tree[table]) for table, kind in _TABLES.items()}
        return SimOptions(**own)
    except ValueError as exc:  # each is valid, but not all of them together
        together = [places.get(key, key) for key in values if key.startswith("faults.")]
        raise ConfigError(", ".join(together), str(exc)) from None


def for_request(options: SimOptions, headers: Mapping[str, str], *, fixed: bool = True) -> SimOptions:
    """Return the options of one request: the server's, with those of its headers.

    A request that asks for a time gets exactly that, without spread. With an engine, not a `fixed` schedule,
    it cannot ask for one. Raises ValueError for unknown headers and invalid values.
    """
    asked = [(name, value) for name, value in headers.items() if name.lower().startswith(HEADER)]
    if not asked:
        return options
    tables: dict[str, dict[str, Any]] = {}
    own = tables.setdefault("", {})
    for header, value in asked:
        name = header.lower().removeprefix(HEADER).replace("-", "_")
        if name.endswith("_ms"):
            name, value = name.removesuffix("_ms"), f"{value}ms"
        if not fixed and name in _SCHEDULE:
            raise ValueError(f"{header}: here an engine decides when tokens are made, no fixed schedule")
        if name == "fault":
            if value not in _RATES:
                raise ValueError(f"{header}: there is no fault {value!r}; there are {', '.join(_RATES)}")
            none = dict.fromkeys(_RATES.values(), 0.0)
            tables.setdefault("faults", {}).update(none, **{_RATES[value]: 1.0})
            continue
        if name not in _BY_HEADER:
            raise ValueError(f"there is no header {header}")
        table, field = _BY_HEADER[name]
        try:
            tables.setdefault(table, {})[name] = read_value(field.type, value)
        except ValueError as exc:
            raise ValueError(f"{header}: {exc}") from None
    for name, rate in _CERTAIN.items():
        if name in tables.get("guardrails", {}):
            tables["guardrails"].setdefault(rate, 1.0)
    if own.keys() & {"ttft", "itl"}:
        own.setdefault("spread", 0.0)
    del tables[""]
    change = msgspec.structs.replace
    try:
        changed = {t: change(getattr(options, t), **values) for t, values in tables.items()}
    except ValueError as exc:  # each is valid, but not all of them together
        raise ValueError(f"{', '.join(header for header, _ in asked)}: {exc}") from None
    return change(options, **own, **changed)
