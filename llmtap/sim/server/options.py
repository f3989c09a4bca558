"""Options of the simulated server: for its answers (`SimOptions`) and for its engine (`EngineOptions`).

`load_options` and `load_engine` parse the texts of the command line; `for_request` applies the headers of one
request, which can override most options of its answer.

A request sets an option NAME of its answer by the header `x-sim-NAME`, with dashes instead of underscores:
`x-sim-output-hold: 8`. With the ending `-ms`, the value is a number of milliseconds without a unit:
`x-sim-ttft-ms: 200`. `llmtap sim serve --keys` lists all options with their headers (`keys`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from llmtap.errors import ConfigError, raise_all
from llmtap.options.fields import Option, opt, options_of
from llmtap.options.tables import OptionTables
from llmtap.options.values import nearest_hint, read_text
from llmtap.sim.model_options import ServingSetup, read_model_options, read_serving
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.units import Duration

_OF_WHOLE_RUNS: Final = frozenset(
    {"request_sla", "window", "tokens", "failed", "same_instant", "tie", "percentile", "bins", "edges"}
)
"""Scheduler options without effect in a server: they need a summary, or requests known in advance."""


MS: Final = 1_000_000
HEADER: Final = "x-sim-"
"""Prefix of the headers that set options of a request."""
FIXED: Final = "fixed"
"""Value of `--scheduler` for a fixed schedule without an engine."""
TOKENS_MAX: Final = 131_072
"""Maximum number of tokens of an answer: the context length of common models."""
CHOICES_MAX: Final = 128
"""Maximum number of choices (`n`) that a request can ask for, as in OpenAI's API."""

RefusalKind = Literal["content_filter", "field", "text", "error"]
FaultKind = Literal["stall", "reset", "truncate", "unfinished", "error", "429", "503", "slow"]
_RATES: Final[dict[FaultKind, str]] = {
    "stall": "stall_rate",
    "reset": "reset_rate",
    "truncate": "truncate_rate",
    "unfinished": "unfinished_rate",
    "error": "error_rate",
    "429": "busy_rate",
    "503": "unavailable_rate",
    "slow": "slow_rate",
}
"""For each fault, the option with its rate."""
Rate = Annotated[float, Meta(ge=0, le=1)]


class PacingOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the times at which tokens are written."""

    tokens_per_chunk: Annotated[int, opt("Tokens per event.", ge=1)] = 1
    coalesce: Annotated[
        Duration, opt("Interval in which events are collected and sent in one write; 0: each event at once.")
    ] = Duration(0)
    jitter: Annotated[
        float, opt("Sigma of the lognormal factor on every gap between tokens; its mean is 1.", ge=0, le=3)
    ] = 0.0
    keepalive: Annotated[
        Duration, opt("Time without an event after which a comment (or ping) is sent; 0: never.")
    ] = Duration(0)


class GuardrailOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters before and after the engine, and refusals."""

    input_filter: Annotated[Duration, opt("Duration of the input filter.")] = Duration(0)
    output_hold: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["all"],
        opt("Tokens that the output filter holds and releases together; `all`: the complete response."),
    ] = 0
    output_filter: Annotated[
        Duration, opt("Duration of the output filter for each released group of tokens.")
    ] = Duration(0)
    refusal: Annotated[
        RefusalKind, opt("Form of a refusal: content_filter, field, text, or error (status 400).")
    ] = "content_filter"
    refusal_rate: Annotated[Rate, opt("Fraction of requests that are refused.")] = 0.0
    block_after: Annotated[int, opt("Tokens before a response is blocked midway.", ge=0)] = 8
    block_rate: Annotated[Rate, opt("Fraction of responses that are blocked midway.")] = 0.0


class FaultOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults and their rates. A request has at most one of these faults."""

    fault_after: Annotated[int, opt("Tokens before a fault in the stream.", ge=0)] = 5
    stall: Annotated[Duration, opt("Duration of a stall.")] = Duration(2_000 * MS)
    slow: Annotated[
        Duration,
        opt("Delay of a slow response, including its head; tokens due in the meantime are sent with it."),
    ] = Duration(2_000 * MS)
    stall_rate: Annotated[Rate, opt("Fraction of responses with a stall.")] = 0.0
    reset_rate: Annotated[Rate, opt("Fraction of responses whose connection is reset midway.")] = 0.0
    truncate_rate: Annotated[
        Rate, opt("Fraction of responses whose connection is closed within an event.")
    ] = 0.0
    unfinished_rate: Annotated[
        Rate, opt("Fraction of responses that are complete in HTTP, without a finish reason or end marker.")
    ] = 0.0
    error_rate: Annotated[Rate, opt("Fraction of responses with an error event midway.")] = 0.0
    busy_rate: Annotated[Rate, opt("Fraction of requests answered with 429.")] = 0.0
    unavailable_rate: Annotated[Rate, opt("Fraction of requests answered with 503.")] = 0.0
    slow_rate: Annotated[Rate, opt("Fraction of responses with a slow first byte.")] = 0.0

    def rates(self) -> list[tuple[FaultKind, float]]:
        return [(kind, getattr(self, name)) for kind, name in _RATES.items()]

    def __post_init__(self) -> None:
        if sum(rate for _, rate in self.rates()) > 1 + 1e-9:
            total = sum(rate for _, rate in self.rates())
            raise ValueError(
                f"the rates of all faults add up to {total:g}, but must not be above 1: reduce one"
            )


class SimOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of all answers, unless a request overrides them."""

    ttft: Annotated[Duration, opt("Time from the request to the first token.")] = Duration(150 * MS)
    itl: Annotated[Duration, opt("Time between tokens.")] = Duration(20 * MS)
    tokens: Annotated[int, opt("Tokens per response, unless max_tokens is less.", ge=1, le=TOKENS_MAX)] = 40
    spread: Annotated[
        float, opt("Maximum relative variation of TTFT and ITL between responses.", ge=0, le=0.9)
    ] = 0.0
    seed: Annotated[int, opt("Random seed, also of the generated text.")] = 0
    model: Annotated[str, opt("Name of the served model.")] = "sim"
    dialect: Annotated[
        Literal["openai", "vllm"],
        opt("Dialect of chat and completions; vllm: with vLLM's fields, and usage in each chunk."),
    ] = "openai"
    pacing: PacingOptions = PacingOptions()
    guardrails: GuardrailOptions = GuardrailOptions()
    faults: FaultOptions = FaultOptions()


_TOP_LEVEL_NAMES: Final = ("ttft", "itl", "tokens", "spread", "dialect")
"""Options outside the tables (`pacing`, `guardrails`, `faults`) that the headers of a request can set."""
_SCHEDULE_NAMES: Final = ("ttft", "itl", "spread", "jitter")
"""Options that apply only to a fixed schedule."""
_RATE_NAMES: Final = {"refusal": "refusal_rate", "block_after": "block_rate"}
"""Options whose behaviour has a rate, with the option of the rate. A header that sets the option also sets
the rate to 1, because the request wants this behaviour."""


class Key(NamedTuple):
    """Description of an option, for `llmtap sim serve --keys`."""

    key: str
    """Name on the command line, such as `pacing.jitter`."""
    default: str
    header: str
    """Header of a request that sets the option; empty: no header can set it."""
    meaning: str


def _options_of(kind: type[Struct], table: str = "") -> Iterator[tuple[str, Option]]:
    for option in options_of(kind):
        if isinstance(option.default, Struct):
            yield from _options_of(option.kind, f"{option.name}.")
        else:
            yield f"{table}{option.name}", option


_OPTIONS: Final = dict(_options_of(SimOptions))
_BY_HEADER: Final = {
    option.name: (key.rpartition(".")[0], option)
    for key, option in _OPTIONS.items()
    if "." in key or option.name in _TOP_LEVEL_NAMES
}
"""Table and option for each NAME of a header `x-sim-NAME`."""


def keys() -> list[Key]:
    """Return the descriptions of all options, and of the header `x-sim-fault`, which has no option."""
    rows = []
    for key, option in _OPTIONS.items():
        header = HEADER + option.name.replace("_", "-") + "[-ms]" * isinstance(option.default, Duration)
        header = header if option.name in _BY_HEADER else ""
        rows.append(Key(key, option.default_text or "", header, option.meaning_with_choices))
    fault = f"Fault to inject into this request: {', '.join(_RATES)}."
    return [*rows, Key("", "", f"{HEADER}fault", fault)]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine that makes all answers."""

    scheduler: str
    setup: ServingSetup
    servers: int = 1

    @property
    def iterates(self) -> bool:
        return SCHEDULERS[self.scheduler].iterates

    @property
    def tokens_max(self) -> int | None:
        """Maximum number of tokens of a prompt and its answer: the whole blocks of the KV memory. None if the
        scheduler serves whole batches."""
        serving = self.setup.serving
        return serving.kv_tokens // serving.block * serving.block if self.iterates else None

    @property
    def block_tokens(self) -> int:
        """Number of tokens in the blocks that prompts can share; 0 without a prefix cache."""
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
    """Return the options of an engine with this scheduler; None for the fixed schedule.

    `values`: options of answers that the user set, to reject those that do not apply to an engine. `places`:
    by the name of an option, the flag that set it. Raises ConfigError naming the flag or option.
    """
    if scheduler == FIXED:
        for option, words in (("--serving", serving), ("--reading", readings), ("--servers", servers != 1)):
            if words:
                problem = f"has no effect with --scheduler {FIXED}, which has no engine"
                raise ConfigError(option, problem, "choose another scheduler")
        return None
    if scheduler not in SCHEDULERS:
        known = (FIXED, *SCHEDULERS)
        raise ConfigError(
            "--scheduler", f"no scheduler is called {scheduler!r}", nearest_hint(scheduler, known)
        )
    for key in values:
        if key.rpartition(".")[2] in _SCHEDULE_NAMES:
            place = (places or {}).get(key, key)
            raise ConfigError(
                place,
                f"has no effect with --scheduler {scheduler}, which decides when tokens are generated",
                f"leave out {place}, or --scheduler",
            )
    kind = SCHEDULERS[scheduler]
    settings: list[Any] = []
    for option, words, read, listed in (
        ("--serving", serving, read_serving, "llmtap sim run --readings"),
        ("--reading", readings, read_model_options, "llmtap sim run --readings"),
    ):
        named = {name.replace("-", "_"): text for name, text in words.items()}
        try:
            settings.append(read(named))
        except ValueError as exc:
            raise ConfigError(option, str(exc), f"`{listed}` lists the options") from None
        for name in named.keys() - (kind.options_read - _OF_WHOLE_RUNS):
            place = f"{option} {name}"
            raise ConfigError(place, f"has no effect with --scheduler {scheduler}", f"leave out {place}")
    served, chosen = settings
    if chosen.predictor == "shuffled":
        raise ConfigError(
            "--reading",
            "predictor=shuffled needs all requests in advance, which a server does not have",
            "choose another predictor",
        )
    if scheduler == "multi_bin_dynamic" and not chosen.bin_edges:
        raise ConfigError(
            "--reading",
            "bin_edges is missing: its default needs all requests in advance, which a server does not have",
            "such as --reading bin_edges=1,30,117",
        )
    if kind.iterates and servers != 1:
        raise ConfigError(
            "--servers",
            f"expected 1, got {servers}: a server with --scheduler {scheduler} has one engine only",
            "leave out --servers",
        )
    return EngineOptions(scheduler, ServingSetup(readings=chosen, serving=served), servers)


def load_options(values: Mapping[str, str], places: Mapping[str, str] | None = None) -> SimOptions:
    """Parse options, given as texts by key (`{"ttft": "200ms", "pacing.jitter": "0.3"}`).

    `places`: by key, the flag that set the option (`--ttft`). Raises ConfigError naming the flag or the key.
    """
    tables = OptionTables({"": SimOptions}, list_hint="llmtap sim serve --keys lists them")
    for key, value in values.items():
        tables.put(key, value, (places or {}).get(key, ""))
    options: SimOptions = tables.read()[""]
    raise_all(tables.mistakes.errors)
    return options


def for_request(options: SimOptions, headers: Mapping[str, str], *, fixed: bool = True) -> SimOptions:
    """Return the options of one request: the options of the server, overridden by the request's headers.

    Times set by a header are exact, without spread. Headers can set times only with a `fixed` schedule, not
    with an engine. Raises ValueError for an unknown header or an invalid value."""
    set_headers = [(name, value) for name, value in headers.items() if name.lower().startswith(HEADER)]
    if not set_headers:
        return options
    tables: dict[str, dict[str, Any]] = {}
    own_values = tables.setdefault("", {})
    for header, value in set_headers:
        name = header.lower().removeprefix(HEADER).replace("-", "_")
        if name.endswith("_ms"):
            name, value = name.removesuffix("_ms"), f"{value}ms"
        if not fixed and name in _SCHEDULE_NAMES:
            raise ValueError(
                f"{header}: has an effect only with --scheduler {FIXED}; here the scheduler decides the times"
            )
        if name == "fault":
            if value not in _RATES:
                raise ValueError(f"{header}: expected one of {', '.join(_RATES)}, got {value!r}")
            none = dict.fromkeys(_RATES.values(), 0.0)
            tables.setdefault("faults", {}).update(none, **{_RATES[value]: 1.0})
            continue
        if name not in _BY_HEADER:
            raise ValueError(f"unknown header {header}; `llmtap sim serve --keys` lists the headers")
        table, option = _BY_HEADER[name]
        try:
            tables.setdefault(table, {})[name] = read_text(option.kind, value)
        except ValueError as exc:
            raise ValueError(f"{header}: {exc}") from None
    for name, rate in _RATE_NAMES.items():
        if name in tables.get("guardrails", {}):
            tables["guardrails"].setdefault(rate, 1.0)
    if own_values.keys() & {"ttft", "itl"}:
        own_values.setdefault("spread", 0.0)
    del tables[""]
    change = msgspec.structs.replace
    try:
        changed = {t: change(getattr(options, t), **values) for t, values in tables.items()}
    except ValueError as exc:  # Each value is valid, but their combination is not.
        raise ValueError(f"{', '.join(header for header, _ in set_headers)}: {exc}") from None
    return change(options, **own_values, **changed)
