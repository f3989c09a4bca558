"""Options of the meter (`[meter]`), tenant rules (`[tenants]`), token prices (`[cost]`) and pairs (`[pair]`).

The structs check their values, and have the descriptions that flags, configuration and reference show.
`config.py` reads the values, and `setup.py` carries them to the meter process.
"""

import re
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import chain
from typing import Annotated, Final

from msgspec import Meta, Struct

from llmtap.errors import ConfigError, errors_of_check, raise_all
from llmtap.exchange.bounds import BOUNDS
from llmtap.exchange.interventions import TEXT_PATTERNS, RefusalSigns, TextPattern
from llmtap.export.buckets import check_edges
from llmtap.metrics.cost import Price
from llmtap.metrics.deadlines import ALPHA, READER_NS_PER_TOKEN, Benefit
from llmtap.metrics.idle_cost import check_idle_cost
from llmtap.net.listener import parse_address
from llmtap.options.fields import opt
from llmtap.options.values import is_http_url
from llmtap.units import NS_PER_S, Duration, short_repr

WINDOWS: Final = {"10s": 10 * NS_PER_S, "1m": 60 * NS_PER_S, "5m": 300 * NS_PER_S, "1h": 3_600 * NS_PER_S}
TENANT_CHARS_MAX: Final = BOUNDS["tenant"].chars
BUILT_IN_PATTERNS: Final = "default"
"""Word in `refusal_patterns` that stands for all built-in patterns (`exchange/interventions.py`)."""
TRACE_ID: Final = "{trace_id}"
"""Placeholder in `trace_url`, in whose place the trace id of an exchange is inserted."""
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class MeterOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the meter (`[meter]`). Raises ConfigError for invalid values."""

    admin: Annotated[
        str,
        opt("Address of the admin port (metrics, health, API); no token is required on loopback."),
    ] = "127.0.0.1:9464"
    socket: Annotated[
        str | None,
        opt("Path of the socket for relays and middleware; none: a private socket, without middleware."),
    ] = None
    state: Annotated[
        str | None,
        opt(
            "Folder of the state that outlives a restart (windows, burn rates, experiment); "
            "none: it outlives reloads, upgrades and crashes of the meter, but not the proxy."
        ),
    ] = None
    admin_token: Annotated[
        str | None,
        opt("Bearer token of the admin port; required if it is not on loopback."),
    ] = None
    admin_tls_certificate: Annotated[
        str | None,
        opt("PEM file with the TLS certificate of the admin port; required if it is not on loopback."),
    ] = None
    admin_tls_key: Annotated[str | None, opt("PEM file with the private key of admin_tls_certificate.")] = (
        None
    )
    admin_plaintext: Annotated[
        bool,
        opt("Allow an admin port without TLS outside loopback, for networks that encrypt (service mesh)."),
    ] = False
    window: Annotated[Duration, opt("Default rolling window of the summary: 10s, 1m, 5m or 1h.")] = Duration(
        60 * NS_PER_S
    )
    exchanges_kept: Annotated[
        int,
        opt("Number of recent exchanges kept in memory for the API, with their events.", ge=0),
    ] = 1_000
    models_max: Annotated[
        int,
        opt("Maximum number of models with their own series; the rest is counted as `other`.", ge=1),
    ] = 100
    series_max: Annotated[
        int,
        opt("Maximum number of series (tenant, model, arm); above it the model is `other`.", ge=1),
    ] = 2_000
    trace_url: Annotated[
        str | None,
        opt(
            "Address of a trace in your tracing system, with `{trace_id}` in the place of "
            "the id: exchanges with a `traceparent` link to it."
        ),
    ] = None
    native_histograms: Annotated[
        bool,
        opt("Count for Prometheus native histograms, and offer the protobuf format, too."),
    ] = False
    uncertainty_limit: Annotated[
        Duration,
        opt(
            "Maximum timestamp uncertainty; exchanges above it are "
            "marked `uncertain` (`certain=1` excludes them)."
        ),
    ] = Duration(10_000_000)
    silence_threshold: Annotated[
        Duration,
        opt("Time without a token from which a running stream is reported as silent."),
    ] = Duration(5 * NS_PER_S)
    refusal_patterns: Annotated[
        tuple[str, ...],
        opt(
            "Regular expressions that match refusals; `default` is the built-in list, [] disables the check."
        ),
    ] = (BUILT_IN_PATTERNS,)
    refusal_errors: Annotated[
        tuple[str, ...],
        opt("Types or codes of errors by which a guardrail refuses requests, such as `policy_violation`."),
    ] = ()
    tokenizer: Annotated[
        str | None,
        opt("Local tokenizer for responses without token counts: `tiktoken:NAME` or a tokenizer.json."),
    ] = None
    request_objectives: Annotated[
        bool,
        opt("Accept objectives in request headers: x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms."),
    ] = True
    label_tenants: Annotated[
        tuple[str, ...] | None,
        opt(
            "Tenants whose request label (x-llmtap-label) counts (default: all; []: none). "
            "Labels of others are counted as `not-accepted`."
        ),
    ] = None
    judge_inferred: Annotated[
        bool,
        opt(
            "Judge answers of no known dialect by objectives of tokens too, with the times that "
            "were inferred from their structure."
        ),
    ] = False
    alpha: Annotated[
        float, opt("Smooth goodput: penalty in tokens per second of user idle latency.", ge=0)
    ] = ALPHA
    reader_tokens_per_second: Annotated[
        float, opt("Reading speed for user idle latency and smooth goodput.", gt=0, le=1e6)
    ] = 1e9 / READER_NS_PER_TOKEN
    idle_cost: Annotated[
        str,
        opt(
            "Cost of idle latency in smooth goodput (f): `seconds`, `tokens` that could have "
            "been read, `percent` of the answer's tokens, or an expression of l (s), V (s per token) and n "
            "(output tokens), such as 100 * l / (l + V * n)."
        ),
    ] = "seconds"
    upstream_metrics: Annotated[
        str | None,
        opt(
            "URL of the metrics of the upstream (vLLM, SGLang, TGI), "
            "read every 5 s; none: not read. For example http://127.0.0.1:8000/metrics."
        ),
    ] = None
    buckets: Annotated[
        dict[str, tuple[float, ...]],
        opt(
            "Upper edges of the histograms on /metrics in seconds, by kind: `ttft`, `gap` "
            "or `duration`; others keep theirs."
        ),
    ] = {}
    reader_grace_tokens: Annotated[
        int,
        opt("Tokens whose reading time is added to every deadline; 1: equation 4 as printed.", ge=0),
    ] = 0

    def __post_init__(self) -> None:
        host, _ = parse_address(self.admin, "meter.admin")
        if self.window not in WINDOWS.values():
            raise ConfigError(
                "meter.window",
                f"there is no window of {self.window / NS_PER_S:g} s",
                f"expected one of {', '.join(WINDOWS)}",
            )
        if self.silence_threshold <= 0:
            raise ConfigError("meter.silence_threshold", "expected a time longer than 0", "such as 5s")
        raise_all(self._access_problems(open_to_others=not is_loopback(host)))
        if self.admin_token is not None and not (self.admin_token.isascii() and self.admin_token.strip()):
            raise ConfigError(
                "meter.admin_token",
                "expected visible ASCII characters only, and at least one",
                "such as the output of openssl rand -hex 24",
            )
        check_idle_cost(self.idle_cost, "meter.idle_cost")
        _check_url("upstream_metrics", self.upstream_metrics, "http://127.0.0.1:8000/metrics")
        _check_url("trace_url", self.trace_url, "https://jaeger.example/trace/{trace_id}")
        if self.trace_url is not None and TRACE_ID not in self.trace_url:
            raise ConfigError(
                "meter.trace_url",
                f"expected a URL that contains {TRACE_ID}",
                "such as https://jaeger.example/trace/{trace_id}",
            )
        for kind, edges in self.buckets.items():
            check_edges(kind, edges, f"meter.buckets.{kind}")
        patterns = (
            errors_of_check(_check_pattern, pattern, f"meter.refusal_patterns[{i}]")
            for i, pattern in enumerate(self.refusal_patterns)
            if pattern != BUILT_IN_PATTERNS
        )
        raise_all(chain.from_iterable(patterns))

    def _access_problems(self, *, open_to_others: bool) -> Iterator[ConfigError]:
        if self.admin_token is None and open_to_others:
            yield ConfigError(
                "meter.admin_token",
                f"required because the admin address {self.admin} can be reached from other machines",
                "set a long random token, or bind to 127.0.0.1",
            )
        if bool(self.admin_tls_certificate) != bool(self.admin_tls_key):
            given, missing = ("certificate", "key") if self.admin_tls_certificate else ("key", "certificate")
            yield ConfigError(
                f"meter.admin_tls_{given}",
                f"is set, but meter.admin_tls_{missing} is missing",
                "set both for TLS, or neither",
            )
        if not (self.admin_tls_certificate or self.admin_plaintext) and open_to_others:
            yield ConfigError(
                "meter.admin_tls_certificate",
                f"required because {self.admin} can be reached from other machines: TLS hides the token",
                "set also meter.admin_tls_key; or, if the network encrypts, set meter.admin_plaintext = true",
            )

    @property
    def refusal_signs(self) -> RefusalSigns:
        """Signs by which refusals are recognised. `default` in the patterns adds the built-in ones."""
        patterns: list[TextPattern] = []
        for pattern in self.refusal_patterns:
            patterns += (
                TEXT_PATTERNS
                if pattern == BUILT_IN_PATTERNS
                else [TextPattern(re.compile(pattern, re.IGNORECASE))]
            )
        return RefusalSigns(tuple(patterns), frozenset(map(str.lower, self.refusal_errors)))

    @property
    def benefit(self) -> Benefit:
        """Settings of the assumed reader: smooth goodput is the benefit of answers for this reader."""
        return Benefit.at_speed(
            self.reader_tokens_per_second, self.alpha, self.idle_cost, self.reader_grace_tokens
        )

    @property
    def window_name(self) -> str:
        """Name of the default window, a key of WINDOWS."""
        return next(name for name, window_ns in WINDOWS.items() if window_ns == self.window)


class TenantRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rule that gives a request its tenant: exactly one of `header`, `api_key`, `body` and `path` is set."""

    header: Annotated[str | None, opt("Header field whose value is the tenant.")] = None
    api_key: Annotated[
        bool,
        opt("Use the API key in Authorization, X-Api-Key or Api-Key, shown as `key-` and 8 hex digits."),
    ] = False
    body: Annotated[
        str | None,
        opt("Field of the JSON body whose value is the tenant, as a path: `user` or `metadata.team`."),
    ] = None
    path: Annotated[
        str | None,
        opt("Regular expression for the start of the path; its first group is the tenant."),
    ] = None
    name: Annotated[
        str | None,
        opt("Fixed tenant name, independent of the value (for `path` without a group)."),
    ] = None
    hashed: Annotated[bool, opt("Show a keyed hash instead of the value, for personal data.")] = False


class TenantOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the table `[tenants]`."""

    rules: Annotated[
        tuple[TenantRule, ...],
        opt("Rules in order; the first one that finds a value sets the tenant (else: `default`)."),
    ] = (TenantRule(header="x-llm-d-inference-fairness-id"),)
    names: Annotated[
        dict[str, str],
        opt("Display names: maps the value that a rule finds (for example a hash) to a tenant."),
    ] = {}
    max: Annotated[
        int,
        opt("Maximum number of distinct tenants; later tenants are permanently counted as `other`.", ge=1),
    ] = 1_000
    salt: Annotated[
        str | None,
        opt("Key of the hashes (default: derived from /etc/machine-id, else random at each start)."),
    ] = None

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        for i, rule in enumerate(self.rules):
            yield from _rule_problems(rule, f"tenants.rules[{i}]")
        if self.salt is not None and not self.salt:
            yield ConfigError(
                "tenants.salt",
                "is empty",
                "set a random text (openssl rand -hex 16), or leave out tenants.salt",
            )
        for value, name in self.names.items():
            if not name.strip() or not name.isprintable() or len(name) > TENANT_CHARS_MAX:
                yield ConfigError(
                    f"tenants.names.{value}",
                    f"expected 1 to {TENANT_CHARS_MAX} printable characters, got {short_repr(name)}",
                    "write another name",
                )


class CostOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the table `[cost]`."""

    gpus: Annotated[int, opt("Number of GPUs behind the gateway, billed whether busy or idle.", ge=0)] = 0
    gpu_hour: Annotated[float, opt("Price of one GPU per hour.", ge=0)] = 0.0
    input_million: Annotated[float, opt("Price of a million input tokens.", ge=0)] = 0.0
    output_million: Annotated[float, opt("Price of a million output tokens.", ge=0)] = 0.0
    currency: Annotated[str, opt("Name of the currency of all prices; amounts are not converted.")] = "USD"

    @property
    def price(self) -> Price | None:
        """Prices for summaries; None if all are 0."""
        if not (self.gpus or self.input_million or self.output_million):
            return None
        return Price(self.gpus, self.gpu_hour, self.input_million, self.output_million, self.currency)


class PairOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a second relay between a gateway and its engines (`[pair]`). `[relay]` is in front of the
    gateway, and the meter pairs the exchanges of both."""

    upstream: Annotated[
        str,
        Meta(
            description="URL of the engine behind the gateway; starts a second relay, between the two, and "
            "pairs the exchanges of both. With `llmtap watch`, watch.ports are then those of the gateway."
        ),
    ] = ""
    listen: Annotated[str, Meta(description="HOST:PORT that the gateway sends its requests to.")] = (
        "127.0.0.1:8081"
    )
    workers: Annotated[
        int, Meta(ge=1, le=256, description="Number of relay processes between gateway and engine.")
    ] = 1
    back_ports: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65_535)], ...],
        Meta(
            description="Those of watch.ports on which the engines listen; the gateway listens on the "
            "others. `llmtap watch` then pairs the exchanges of both. If these are all, it starts a relay in "
            "front of the gateway."
        ),
    ] = ()
    exchanges_max: Annotated[
        int,
        Meta(ge=100, description="Maximum number of ended exchanges that wait in memory for their partners."),
    ] = 10_000
    pairs_kept: Annotated[
        int, Meta(ge=1, description="Number of recent pairs of which the API shows the figures.")
    ] = 1_000


def _rule_problems(rule: TenantRule, place: str) -> Iterator[ConfigError]:
    keys = [key for key in ("header", "api_key", "body", "path") if getattr(rule, key)]
    if len(keys) != 1:
        yield ConfigError(
            place,
            f"expected exactly one of header, api_key, body and path, got {' and '.join(keys) or 'none'}",
            "write a rule for each of these keys",
        )
    if rule.header is not None and not _HEADER.fullmatch(rule.header):
        problem = f"{rule.header!r} is not a valid name of a header field"
        yield ConfigError(f"{place}.header", problem, "such as X-Team")
    if rule.body is not None and not all(rule.body.split(".")):
        yield ConfigError(f"{place}.body", f"{rule.body!r} is not a path of names", "such as metadata.team")
    if rule.path is not None:
        mistakes = list(errors_of_check(_check_pattern, rule.path, f"{place}.path"))
        yield from mistakes
        if not mistakes and not re.compile(rule.path).groups and rule.name is None:
            yield ConfigError(
                f"{place}.path",
                f"{rule.path!r} has no group, from which the name of the tenant is read",
                "add a group, such as /teams/([^/]+)/, or give the rule a name",
            )


def _check_url(name: str, url: str | None, example: str) -> None:
    if url is not None and not is_http_url(url):
        # Do not show the URL, because it can contain a key.
        raise ConfigError(f"meter.{name}", "expected a URL with http:// or https://", f"such as {example}")


def _check_pattern(text: str, place: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as exc:
        hint = "use the syntax of the module re of Python"
        raise ConfigError(place, f"{text!r} is not a regular expression: {exc}", hint) from None


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a host name, which can resolve to another address later
        return False
