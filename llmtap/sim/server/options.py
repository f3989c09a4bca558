"""What can be set about the simulated engine's server. A request may ask for most of it, for itself, by
header.

An option NAME of an answer is the header `x-sim-NAME` with dashes for underscores: `x-sim-output-hold: 8`.
Times there may also be plain milliseconds under a name that ends in `-ms`: `x-sim-ttft-ms: 200`.
`llmtap sim serve --keys` lists all of them.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.sim.model_options import (
    PREDICTORS,
    ModelOptions,
    Serving,
    ServingSetup,
    read_model_options,
    read_serving,
)
from llmtap.sim.schedulers.registry import CONDITIONS, SCHEDULERS, options_read
from llmtap.units import Duration, format_ns, read_special

__all__ = [
    "CHOICES_MAX", "TOKENS_MAX", "EngineOptions", "FaultKind", "FaultOptions", "GuardrailOptions", "Key",
    "PacingOptions", "RefusalKind", "SimOptions", "check_effects", "for_request", "keys", "load_engine",
    "load_options", "options_looked_at",
]  # fmt: skip


_OF_WHOLE_RUNS: Final = frozenset(
    {"request_sla", "window", "tokens", "failed", "percentile", "bins", "edges"}
)
"""How a run is summed up, and what needs to know all of its requests beforehand."""


def options_looked_at(scheduler: str, readings: ModelOptions, serving: Serving) -> frozenset[str]:
    """Those that change what a server does, while the others are as they are."""
    found = options_read(scheduler, readings, serving) - _OF_WHOLE_RUNS
    # It is the controller's of a dynamic batch, and else only of the summary.
    return found if "eps" in found else found - {"token_sla"}


def check_effects(
    scheduler: str, places: Mapping[str, str], readings: ModelOptions, serving: Serving
) -> None:
    """Raises ConfigError where an option that was given, at its place, has no effect."""
    known = options_looked_at(scheduler, readings, serving)
    for name, place in places.items():
        if name in known:
            continue
        ever = SCHEDULERS[scheduler].reads - _OF_WHOLE_RUNS
        if name in ever and name in CONDITIONS:
            raise ConfigError(place, "has no effect", f"not while {CONDITIONS[name][0]} is what it is")
        raise ConfigError(
            place, f"has no effect on {scheduler}", f"these have: {', '.join(sorted(known)) or 'none'}"
        )


MS: Final = 1_000_000
HEADER: Final = "x-sim-"
FIXED: Final = "fixed"
"""In place of a scheduler's name: no engine, but a fixed schedule."""
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
"""The option that says how often each fault comes."""
Rate = Annotated[float, Meta(ge=0, le=1)]
S = TypeVar("S", bound=Struct)


class PacingOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an answer leaves: what is put together, what is waited for."""

    tokens_per_chunk: Annotated[int, Meta(ge=1, description="Tokens in one event.")] = 1
    coalesce: Annotated[
        Duration, Meta(description="Events are collected for so long and leave in one write; 0: none waits.")
    ] = Duration(0)
    jitter: Annotated[
        float, Meta(ge=0, le=3, description="Sigma of the lognormal factor on every gap; its mean is 1.")
    ] = 0.0
    keepalive: Annotated[
        Duration, Meta(description="After so long in silence a comment (or ping) is sent; 0: never.")
    ] = Duration(0)


class GuardrailOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters before and behind the engine, and what they refuse."""

    input_filter: Annotated[Duration, Meta(description="What the filter of the prompt takes.")] = Duration(0)
    input_beside: Annotated[
        bool, Meta(description="The engine works beside the input filter, and its tokens wait for it.")
    ] = False
    output_hold: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["all"],
        Meta(description="Tokens the output filter holds and lets go together; `all`: the answer."),
    ] = 0
    output_filter: Annotated[
        Duration, Meta(description="What the output filter takes for each piece that it lets go.")
    ] = Duration(0)
    refusal: Annotated[
        RefusalKind,
        Meta(description="How is refused: content_filter, field, text, or error (400 and no answer)."),
    ] = "content_filter"
    refusal_rate: Annotated[Rate, Meta(description="Share of requests refused.")] = 0.0
    block_after: Annotated[int, Meta(ge=0, description="Tokens before an answer is blocked midway.")] = 8
    block_rate: Annotated[Rate, Meta(description="Share of answers blocked midway.")] = 0.0

    @property
    def wait_ns(self) -> int:
        """How long the engine waits for the filter of the prompt."""
        return 0 if self.input_beside else self.input_filter


class FaultOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong, and how often. One fault per request at most."""

    fault_after: Annotated[int, Meta(ge=0, description="Tokens before a fault in the stream.")] = 5
    stall: Annotated[Duration, Meta(description="How long a stall lasts.")] = Duration(2_000 * MS)
    slow: Annotated[
        Duration,
        Meta(description="How long a slow first byte takes, head and all; what was due is sent with it."),
    ] = Duration(2_000 * MS)
    retry_after: Annotated[Duration, Meta(description="Retry-After of 429 and 503, in whole seconds.")] = (
        Duration(1_000 * MS)
    )
    stall_rate: Annotated[Rate, Meta(description="Share of answers that stop for a while.")] = 0.0
    reset_rate: Annotated[Rate, Meta(description="Share of connections reset midway.")] = 0.0
    truncate_rate: Annotated[Rate, Meta(description="Share closed in the middle of an event.")] = 0.0
    unfinished_rate: Annotated[
        Rate, Meta(description="Share that end well for HTTP, without a finish reason or end marker.")
    ] = 0.0
    error_rate: Annotated[Rate, Meta(description="Share with an error event midway.")] = 0.0
    busy_rate: Annotated[Rate, Meta(description="Share of requests answered 429.")] = 0.0
    unavailable_rate: Annotated[Rate, Meta(description="Share of requests answered 503.")] = 0.0
    slow_rate: Annotated[Rate, Meta(description="Share with a slow first byte.")] = 0.0

    def rates(self) -> tuple[tuple[FaultKind, float], ...]:
        """Each fault with its share."""
        return tuple((kind, getattr(self, name)) for kind, name in _RATES.items())

    def __post_init__(self) -> None:
        if sum(rate for _, rate in self.rates()) > 1 + 1e-9:
            raise ValueError("the rates of all faults together are more than 1")


class SimOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The schedule of every answer and what happens to it, unless its request says otherwise."""

    ttft: Annotated[Duration, Meta(description="From the request to the first token.")] = Duration(150 * MS)
    itl: Annotated[Duration, Meta(description="Between tokens.")] = Duration(20 * MS)
    tokens: Annotated[
        int, Meta(description="Tokens per answer, unless max_tokens is less.", ge=1, le=TOKENS_MAX)
    ] = 40
    spread: Annotated[
        float, Meta(description="TTFT and ITL of each answer vary by up to this share.", ge=0, le=0.9)
    ] = 0.0
    seed: Annotated[int, Meta(description="Of all that is drawn, and of the text.")] = 0
    model: Annotated[str, Meta(description="Name of the model that is served.")] = "sim"
    dialect: Annotated[
        Literal["openai", "vllm"],
        Meta(description="Whose chat and completions; vLLM's have its fields, and usage on each chunk."),
    ] = "openai"
    pacing: PacingOptions = PacingOptions()
    guardrails: GuardrailOptions = GuardrailOptions()
    faults: FaultOptions = FaultOptions()


_TABLES: Final[dict[str, type[Struct]]] = {
    "pacing": PacingOptions, "guardrails": GuardrailOptions, "faults": FaultOptions,
}  # fmt: skip
_OWN: Final = ("ttft", "itl", "tokens", "spread", "dialect")
"""Options outside tables that a request may set; the others are the server's."""
_SCHEDULE: Final = ("ttft", "itl", "spread", "jitter")
"""What makes a fixed schedule."""
_CERTAIN: Final = {"refusal": "refusal_rate", "block_after": "block_rate"}
"""By header: who names one of these wants it to happen."""


class Key(NamedTuple):
    """An option, as people are told of it."""

    key: str
    """As the command line has it: `pacing.jitter`."""
    default: str
    header: str
    """By which a request asks for it; empty where it cannot."""
    meaning: str


def keys() -> list[Key]:
    """Every key; and at the end a header that is none."""
    fault = Key("", "", f"{HEADER}fault", f"This fault, for certain: {', '.join(_RATES)}.")
    return [*_described(SimOptions, ""), fault]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine behind all answers."""

    scheduler: str
    setup: ServingSetup
    servers: int = 1

    @property
    def iterates(self) -> bool:
        """It composes anew at every iteration."""
        return SCHEDULERS[self.scheduler].iterates

    @property
    def tokens_max(self) -> int | None:
        """Of a prompt and its answer together: what the KV memory holds. Whole batches don't ask."""
        serving = self.setup.serving
        return serving.kv_tokens // serving.block * serving.block if self.iterates else None

    @property
    def block_tokens(self) -> int:
        """Of the blocks that prompts may share; 0 where they share none."""
        serving = self.setup.serving
        return serving.block if self.iterates and serving.prefix_cache else 0


def load_engine(
    scheduler: str,
    values: Mapping[str, str],
    *,
    serving: Mapping[str, str],
    readings: Mapping[str, str],
    predictor: str | None = None,
    servers: int = 1,
    places: Mapping[str, str] | None = None,
) -> EngineOptions | None:
    """The engine by the name of its scheduler; None for the fixed schedule.

    `values` are the server's options as given, of which an engine has no use for some, and `places` says
    where; `serving` and `readings` are those of the engine. Raises ConfigError, which names the option.
    """
    if scheduler == FIXED:
        for option, given in (("--serving", serving), ("--reading", readings), ("--predictor", predictor)):
            if given:
                raise ConfigError(option, "belongs to an engine", "choose one with --scheduler")
        if servers != 1:
            raise ConfigError("--servers", "belongs to an engine", "choose one with --scheduler")
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
    serving = {name.replace("-", "_"): text for name, text in serving.items()}
    readings = {name.replace("-", "_"): text for name, text in readings.items()}
    try:
        served = read_serving(serving)
    except ValueError as exc:
        raise ConfigError("--serving", str(exc), "llmtap sim serve --servings lists them") from None
    own: dict[str, str] = {}
    if predictor is not None:
        if predictor not in PREDICTORS:
            raise ConfigError("--predictor", f"{predictor!r} is none of {', '.join(PREDICTORS)}")
        if "predictor" in readings:
            raise ConfigError("--predictor", "is given by --reading predictor, too")
        own["predictor"] = predictor
    try:
        read = read_model_options({**readings, **own})
    except ValueError as exc:
        raise ConfigError("--reading", str(exc), "llmtap sim run --readings lists them") from None
    if read.predictor == "shuffled":
        raise ConfigError("--predictor", "shuffled needs to know all requests, and here they come one by one")
    if scheduler == "multi_bin_dynamic" and not read.bin_edges:
        raise ConfigError(
            "--reading", "bin_edges is missing: bins of equal mass need to know all requests",
            "such as --reading bin_edges=1,30,117",
        )  # fmt: skip
    given = {name: f"--serving {name}" for name in serving}
    given |= {name: f"--reading {name}" for name in readings} | dict.fromkeys(own, "--predictor")
    check_effects(scheduler, given, read, served)
    options = EngineOptions(scheduler, ServingSetup(readings=read, serving=served), servers)
    if options.iterates and servers != 1:
        raise ConfigError("--servers", f"{scheduler} is one server; whole batches may have several")
    return options


def _described(kind: type[Struct], prefix: str) -> Iterator[Key]:
    for field in msgspec.structs.fields(kind):
        name = field.name
        if name in _TABLES and not prefix:
            yield from _described(_TABLES[name], f"{name}.")
            continue
        what = msgspec.inspect.type_info(field.type)
        meaning = (getattr(what, "extra_json_schema", None) or {}).get("description", "")
        choices = _choices(what)
        if choices and not all(choice in meaning for choice in choices):
            meaning = f"{meaning.removesuffix('.')} ({' | '.join(choices)})."
        default = field.default
        shown = format_ns(default).replace(" ", "") if isinstance(default, Duration) else str(default).lower()
        header = HEADER + name.replace("_", "-") if prefix or name in _OWN else ""
        if header and isinstance(default, Duration):
            header += "[-ms]"
        yield Key(prefix + name, shown, header, meaning)


def _choices(what: msgspec.inspect.Type) -> list[str]:
    """The words that a value may be."""
    if isinstance(what, msgspec.inspect.Metadata):
        return _choices(what.type)
    if isinstance(what, msgspec.inspect.UnionType):
        return [word for one in what.types for word in _choices(one)]
    return [str(value) for value in what.values] if isinstance(what, msgspec.inspect.LiteralType) else []


def _wanted(what: msgspec.inspect.Type) -> str:
    """What a value may be, in words."""
    match what:
        case msgspec.inspect.Metadata():
            return _wanted(what.type)
        case msgspec.inspect.UnionType():
            return " or ".join(map(_wanted, what.types))
        case msgspec.inspect.LiteralType():
            return ("one of " if len(what.values) > 1 else "") + ", ".join(_choices(what))
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            whole = "a whole number" if isinstance(what, msgspec.inspect.IntType) else "a number"
            if what.ge is not None and what.le is not None:
                return f"{whole} from {what.ge:g} to {what.le:g}"
            return whole if what.ge is None else f"{whole} of at least {what.ge:g}"
    return "a text"


def _check(kind: type[Struct], name: str, value: str, place: str) -> None:
    """Raises ConfigError, which says what the field may be, where a text does not fit it."""
    wanted = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
    try:
        msgspec.convert(value, wanted, strict=False, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        what = msgspec.inspect.type_info(wanted)
        inner = what.type if isinstance(what, msgspec.inspect.Metadata) else what
        # Of a type of our own the message is ours, and says it all.
        own = isinstance(inner, msgspec.inspect.CustomType)
        raise ConfigError(place, str(exc) if own else f"expected {_wanted(what)}, got {value!r}") from None


def load_options(values: Mapping[str, str], places: Mapping[str, str] | None = None) -> SimOptions:
    """Options from texts by key (`{"ttft": "200ms", "pacing.jitter": "0.3"}`).

    `places` says how each was given (`--ttft`). Raises ConfigError, which names that, or the key.
    """
    places = places or {}
    known = [one.key for one in keys() if one.key]
    tree: dict[str, Any] = {}
    for key, value in values.items():
        place = places.get(key, key)
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else "llmtap sim serve --keys lists them"
            raise ConfigError(place, f"there is no key {key!r}", hint)
        table, _, name = key.rpartition(".")
        _check(_TABLES[table] if table else SimOptions, name, value, place)
        (tree.setdefault(table, {}) if table else tree)[name] = value
    try:
        return msgspec.convert(tree, SimOptions, strict=False, dec_hook=read_special)
    except msgspec.ValidationError as exc:  # each fits, and not all of them together
        together = [places.get(key, key) for key in values if key.startswith("faults.")]
        raise ConfigError(", ".join(together), str(exc).partition(" - at ")[0]) from None


def for_request(options: SimOptions, headers: Mapping[str, str], *, fixed: bool = True) -> SimOptions:
    """The options of one request: the server's, and what its headers say.

    A request that asks for a time gets just that, without spread; where the schedule is not `fixed` but an
    engine's it cannot.

    Raises ValueError for what is unknown or does not fit.
    """
    asked = [(name, value) for name, value in headers.items() if name.lower().startswith(HEADER)]
    if not asked:
        return options
    own: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
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
        table = next((t for t, kind in _TABLES.items() if name in kind.__struct_fields__), None)
        if table is None and name not in _OWN:
            raise ValueError(f"there is no header {header}")
        try:
            _check(SimOptions if table is None else _TABLES[table], name, value, header)
        except ConfigError as exc:
            raise ValueError(str(exc)) from None
        (own if table is None else tables.setdefault(table, {}))[name] = value
    for name, rate in _CERTAIN.items():
        if name in tables.get("guardrails", {}):
            tables["guardrails"].setdefault(rate, 1.0)
    if own.keys() & {"ttft", "itl"}:
        own.setdefault("spread", 0.0)
    try:
        changed = {t: _changed(getattr(options, t), values) for t, values in tables.items()}
        return _changed(options, {**own, **changed})
    except msgspec.ValidationError as exc:  # each fits, and not all of them together
        raise ValueError(f"{', '.join(header for header, _ in asked)}: {exc}") from None


def _changed(options: S, values: dict[str, Any]) -> S:
    fields = {name: getattr(options, name) for name in options.__struct_fields__}
    return msgspec.convert({**fields, **values}, type(options), strict=False, dec_hook=read_special)
