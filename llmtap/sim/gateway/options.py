"""What can be set about the simulated engine's server. A request may ask for most of it, for itself, by
header.

An option NAME of an answer is the header `x-sim-NAME` with dashes for underscores: `x-sim-output-hold: 8`.
Times there may also be plain milliseconds under a name that ends in `-ms`: `x-sim-ttft-ms: 200`.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.sim.predictors import PREDICTORS
from llmtap.sim.readings import read_settings
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.serving import Setup, read_serving
from llmtap.units import Duration, read_special

__all__ = [
    "CHOICES_MAX", "TOKENS_MAX", "EngineOptions", "FaultKind", "FaultOptions", "GuardrailOptions",
    "PacingOptions", "RefusalKind", "SimOptions", "for_request", "keys", "load_engine", "load_options",
]  # fmt: skip

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
        int | Literal["all"],
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

    def __post_init__(self) -> None:
        if isinstance(self.output_hold, int) and self.output_hold < 0:
            raise ValueError("output_hold is a number of tokens, or `all`")


class FaultOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong, and how often. One fault per request at most."""

    fault_after: Annotated[int, Meta(ge=0, description="Tokens before a fault in the stream.")] = 5
    stall: Annotated[Duration, Meta(description="How long a stall lasts.")] = Duration(2_000 * MS)
    slow: Annotated[Duration, Meta(description="How long a slow first byte takes, head and all.")] = Duration(
        2_000 * MS
    )
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


def keys() -> dict[str, str]:
    """Every key as the command line has it (`pacing.jitter`), with its help."""
    return dict(_described(SimOptions, ""))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine behind all answers."""

    scheduler: str
    setup: Setup
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
) -> EngineOptions | None:
    """The engine by the name of its scheduler; None for the fixed schedule.

    `values` are the server's options as given, of which an engine has no use for some; `serving` and
    `readings` are those of the engine. Raises ConfigError, which names the option.
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
                key, f"belongs to --scheduler {FIXED}: {scheduler} decides when tokens are made"
            )
    try:
        served = read_serving(dict(serving))
    except ValueError as exc:
        raise ConfigError("--serving", str(exc), "llmtap sim serve --servings lists them") from None
    own: dict[str, str] = {}
    if predictor is not None:
        if predictor not in PREDICTORS:
            raise ConfigError("--predictor", f"{predictor!r} is none of {', '.join(PREDICTORS)}")
        own["predictor"] = predictor
    try:
        read = read_settings({**readings, **own})
    except ValueError as exc:
        raise ConfigError("--reading", str(exc), "llmtap sim run --readings lists them") from None
    if read.predictor == "shuffled":
        raise ConfigError("--predictor", "shuffled needs to know all requests, and here they come one by one")
    if scheduler == "multi_bin_dynamic" and not read.bin_edges:
        raise ConfigError(
            "--reading", "bin_edges is missing: bins of equal mass need to know all requests",
            "such as --reading bin_edges=1,30,117",
        )  # fmt: skip
    options = EngineOptions(scheduler, Setup(readings=read, serving=served), servers)
    if options.iterates and servers != 1:
        raise ConfigError("--servers", f"{scheduler} is one server; whole batches may have several")
    return options


def _described(kind: type[Struct], prefix: str) -> Iterator[tuple[str, str]]:
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        if field.name in _TABLES and not prefix:
            yield from _described(_TABLES[field.name], f"{field.name}.")
        else:
            schema = getattr(field.type, "extra_json_schema", None) or {}
            yield f"{prefix}{field.name}", schema.get("description", "")


def load_options(values: Mapping[str, str]) -> SimOptions:
    """Options from texts by key (`{"ttft": "200ms", "pacing.jitter": "0.3"}`).

    Raises ConfigError, which names the key.
    """
    known = keys()
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else "list them with --keys"
            raise ConfigError("command line", f"there is no key {key!r}", hint)
        table, _, name = key.rpartition(".")
        (tree.setdefault(table, {}) if table else tree)[name] = value
    try:
        return msgspec.convert(tree, SimOptions, strict=False, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        m = re.search(r"`\$\.?([a-z_.]*)`", str(exc))
        problem = re.sub(r"\s*- at `.*`$", "", str(exc))
        raise ConfigError(m[1] if m and m[1] else "command line", problem) from None


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
        elif name in _OWN:
            own[name] = value
        else:
            table = next((t for t, kind in _TABLES.items() if name in kind.__struct_fields__), None)
            if table is None:
                raise ValueError(f"there is no header {header}")
            tables.setdefault(table, {})[name] = value
    for name, rate in _CERTAIN.items():
        if name in tables.get("guardrails", {}):
            tables["guardrails"].setdefault(rate, 1.0)
    if own.keys() & {"ttft", "itl"}:
        own.setdefault("spread", 0.0)
    try:
        changed = {t: _changed(getattr(options, t), values) for t, values in tables.items()}
        return _changed(options, {**own, **changed})
    except msgspec.ValidationError as exc:
        raise ValueError(f"{HEADER}*: {exc}") from None


def _changed(options: S, values: dict[str, Any]) -> S:
    fields = {name: getattr(options, name) for name in options.__struct_fields__}
    return msgspec.convert({**fields, **values}, type(options), strict=False, dec_hook=read_special)
