"""Options of a load: `LoadPlan`, passed from the command line to the sending processes.

Its parts decide which requests are sent and when (`ScheduleOptions`), what their bodies are (`BodyOptions`),
where they go (`TargetOptions`), how they are sent (`SendingOptions`), and what is measured and written
(`MeasuringOptions`). A field with a description is a flag of `llmtap replay`; the program sets the other
fields. The constructors raise ConfigError naming the flag.
"""

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.load.own_dialects import read_dialects
from llmtap.load.stop_conditions import StopConditions, parse_stop_when
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT
from llmtap.options.fields import opt
from llmtap.options.values import is_http_url, read_text
from llmtap.protocol.dialects.table.declaration import DialectTable
from llmtap.units import NS_PER_S, Duration, format_ns
from llmtap.user_files import read_file

Endpoint = Literal["chat.completions", "completions", "responses"]
Server = Literal["auto", "openai", "vllm", "sglang"]
Rate = Annotated[float, Meta(gt=0, le=1e6)]
ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    "chat": "chat.completions",
    "chat.completions": "chat.completions",
    "completions": "completions",
    "responses": "responses",
}
"""Endpoint by the value of `--endpoint`."""
CA_BYTES_MAX: Final = 16 << 20
"""Maximum size of the file of `--ca`; all CAs of a system take less than 1 MB."""


class Window(NamedTuple):
    """Part of a trace: start and length in ns. Without a length it extends to the end of the trace."""

    from_ns: int = 0
    for_ns: int | None = None
    """Length; None: to the end of the trace."""

    @property
    def is_part(self) -> bool:
        return bool(self.from_ns) or self.for_ns is not None


def _read_window(text: str) -> Window:
    """Read the part of a trace to replay, such as `10m+5m`."""
    begin, plus, length = text.partition("+")
    try:
        return Window(read_text(Duration, begin), read_text(Duration, length) if plus else None)
    except ValueError as exc:
        raise ConfigError("--window", str(exc), "such as 10m+5m (start and length)") from None


def _read_endpoint(name: str) -> Endpoint:
    if name not in ENDPOINTS:
        raise ConfigError("--endpoint", f"expected one of chat, completions, responses, got {name!r}")
    return ENDPOINTS[name]


def validate_warmup(text: str) -> str:
    """Return the unchanged value of `--warmup`. Raises ConfigError if it is not valid."""
    number = text.isascii() and text.isdigit() and 0 < int(text) < 10**6
    if text not in ("auto", "none") and not number:
        raise ConfigError("--warmup", f"expected auto, none or 1 to 999,999 requests, got {text!r}")
    return text


LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Members of a body that limit the output, which `--body-field` can set."""


def parse_body_fields(texts: Sequence[str]) -> dict[str, msgspec.Raw]:
    """Parse `NAME=JSON` texts. Raises ConfigError for bad JSON, a duplicate, or a field of another option."""
    from llmtap.workload.plan import SET_BY

    fields: dict[str, msgspec.Raw] = {}
    place = "--body-field"
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(place, f"expected NAME=JSON, got {text!r}", "such as top_p=0.9")
        if name in SET_BY and name not in LIMIT_FIELDS:
            raise ConfigError(
                place, f"{name!r} cannot be set by {place}, because {SET_BY[name]} sets it", "leave it out"
            )
        if name in fields:
            raise ConfigError(place, f"the field {name!r} is given twice", "give each field once")
        try:
            decoded = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            raise ConfigError(
                place,
                f"the value of {name!r} is not JSON",
                f"""write a text with quotes of its own: '{name}="text"'""",
            ) from None
        fields[name] = msgspec.Raw(msgspec.json.encode(decoded))
    return fields


def _read_dialects(files: Sequence[str]) -> tuple[DialectTable, ...]:
    return tuple(table for file in files for table in read_dialects(Path(file)))


SourceFormat = Annotated[
    str | None,
    opt(
        "Format of the trace, from `llmtap convert --list` (default: detected from its content).",
        "NAME",
        "--from",
    ),
]
CaFile = Annotated[str | None, opt("PEM file of the CA to trust instead of the system's CAs.", "FILE")]
ModelName = Annotated[
    str | None, opt("Model name (default: the model that the server lists, if it lists exactly one).", "NAME")
]
Tokenizer = Annotated[
    str | None,
    opt(
        "Tokenizer for exact prompt lengths: model folder (its chat template is applied), "
        "tokenizer.json or tiktoken name. Default: the tokenizer of `llmtap sim serve`; with another "
        "server, it gives only approximate lengths.",
        "FOLDER|FILE|tiktoken:NAME",
    ),
]
BodyFields = Annotated[
    dict[str, msgspec.Raw],
    opt(
        "Field to add to every request body, for example top_p=0.9; may be repeated.",
        "NAME=JSON",
        "--body-field",
        parse=parse_body_fields,
    ),
]
OwnDialects = Annotated[
    tuple[DialectTable, ...],
    opt(
        "TOML file with tables of dialects, as in the configuration ([dialects.NAME]); may be repeated.",
        "FILE",
        "--dialect",
        parse=_read_dialects,
    ),
]
Seed = Annotated[int, opt("Random seed.", "N", ge=0)]
AnswerTimeout = Annotated[Duration, opt("Maximum duration of a complete response.", "TIME")]


class ScheduleOptions(Struct, frozen=True, kw_only=True):
    """Options that decide which requests are sent, and when."""

    source: Annotated[str, opt("Trace, capture or workload to send.", "TRACE", argument=True)] = ""
    source_format: SourceFormat = None
    requests: Annotated[
        Annotated[int, Meta(ge=1, le=100_000_000)] | None,
        opt(
            "Number of requests: the first N rows of the trace, repeated if it is shorter (default for a "
            "workload: 1,000).",
            "N",
        ),
    ] = None
    window: Annotated[
        Window,
        opt(
            "Part of the trace to send: start and length, for example 10m+5m (default length: to the end).",
            "FROM[+FOR]",
            parse=_read_window,
        ),
    ] = Window()
    share: Annotated[
        float | None, opt("Fraction of the trace to send, such as 0.1; conversations stay whole.", "SHARE")
    ] = None
    speed: Annotated[
        Rate | None, opt("Factor by which the trace is sent faster; all gaps shrink by the same factor.", "X")
    ] = None
    rate: Annotated[
        Rate | None,
        opt(
            "Mean request rate to scale the trace to. For conversations, this is the rate of new "
            "conversations.",
            "RPS",
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        opt(
            "Arrival process that replaces the times of the trace: poisson, uniform, at-once, gamma:cv=2, "
            "onoff:on=2s,off=8s, ramp:from=1,to=50,over=60s, steps:10x30s,20x30s or "
            "diurnal:amplitude=0.8,period=24h. Rates are in requests/s. A workload has "
            "poisson arrivals by default.",
            "PROCESS",
        ),
    ] = None
    closed: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        opt(
            "Number of requests in flight (closed loop): N requests are sent at the start, then one for each "
            "response that ends.",
            "N",
        ),
    ] = None
    duration: Annotated[
        Duration | None, opt("Maximum duration of sending; later requests are not sent.", "TIME")
    ] = None
    drain: Annotated[
        Duration | None,
        opt(
            "Maximum time to wait for outstanding responses after the last request (default: --timeout).",
            "TIME",
        ),
    ] = None
    """None: no limit except the time-out of each request."""
    seed: Seed = 42

    def __post_init__(self) -> None:
        if self.duration is not None and self.duration <= 0:
            raise ConfigError("--duration", f"expected a time above 0, got {format_ns(self.duration)}")
        if self.drain is not None and self.drain < 0:
            raise ConfigError("--drain", f"cannot be below 0, got {format_ns(self.drain)}", "such as 30s")


class TargetOptions(Struct, frozen=True, kw_only=True):
    """Options of the target, to which requests are sent."""

    url: Annotated[
        str,
        opt(
            "URL of the server: http://host:port[/prefix], ws://host:port[/v1/responses] or grpc://.",
            "URL",
            "--target",
        ),
    ] = ""
    path: str | None = None
    """Path of the requests; None: the path of the endpoint."""
    headers: list[tuple[str, str]] = []
    """Header fields of every request. They can contain API keys, so no result shows them."""
    tenant_header: Annotated[
        str | None, opt("Header field in which the tenant of each row is sent.", "NAME")
    ] = None
    label_header: Annotated[
        str | None,
        opt(
            "Header field in which the label of each row is sent, such as x-llmtap-label for a target behind "
            "llmtap, which removes it (default: labels are not sent).",
            "NAME",
        ),
    ] = None
    ca: CaFile = None
    insecure: Annotated[bool, opt("Do not verify the server's certificate.")] = False

    def __post_init__(self) -> None:
        from llmtap.load.sending import check_fields

        check_fields([(name.encode(), value.encode()) for name, value in self.headers])
        if self.tenant_header is not None:
            # Check only the name (RFC 9110 5.1: a token). `check_tenants` checks the values.
            check_fields([(self.tenant_header.encode(), b"")], "--tenant-header")
        if self.label_header is not None:
            check_fields([(self.label_header.encode(), b"")], "--label-header")
        if self.ca is not None:
            _check_ca(self.ca)

    def check_tenants(self, tenants: Sequence[str]) -> None:
        """Raise ConfigError for a tenant that cannot be the value of `tenant_header`."""
        from llmtap.load.sending import check_fields

        if self.tenant_header is not None:
            name = self.tenant_header.encode()
            check_fields([(name, tenant.encode()) for tenant in set(tenants)], "--tenant-header")

    def tls(self) -> ssl.SSLContext | None:
        from llmtap.net.tls import client_context

        is_default = self.ca is None and not self.insecure
        return None if is_default else client_context(self.ca, not self.insecure)


class BodyOptions(Struct, frozen=True, kw_only=True):
    """Options of the request bodies: endpoint, model, fields and prompt lengths."""

    endpoint: Annotated[
        Endpoint,
        opt(
            "API endpoint (a recorded request of a trace is sent to its own path).",
            "chat|completions|responses",
            parse=_read_endpoint,
            shown="chat",
        ),
    ] = "chat.completions"
    model: ModelName = None
    """Model of the requests. None: bodies of a trace keep their model, and generated bodies have none."""
    server: Annotated[
        Server,
        opt(
            "Server type; decides which vendor-specific fields (ignore_eos) are sent.",
            "auto|openai|vllm|sglang",
        ),
    ] = "auto"
    """Type of the server; `auto` becomes `openai` if the type cannot be detected."""
    tokenizer: Tokenizer = None
    """Tokenizer of the prompts. It also counts the tokens of answers without usage, except with Ray: the
    other hosts possibly do not have its files."""
    fields: BodyFields = {}
    """Fields of every body; they override those that llmtap sets. Their values can be secret."""
    stream: Annotated[
        bool | None,
        opt(
            "Request responses with or without streaming (default: recorded requests of a trace are sent as "
            "recorded, all others with streaming).",
            None,
            "--stream/--no-stream",
        ),
    ] = None
    replace_model: bool = True
    """Whether `model` also replaces the model of recorded requests, and of prompts that name one."""
    exact_output: bool = True
    """Whether to request exactly the planned number of output tokens, by ignore_eos where it is accepted."""
    min_tokens: bool = False
    """Whether to also send min_tokens, which prevents an early end by a stop string but slows the server."""
    temperature: float | None = None
    settings: dict[str, Any] = {}
    """Fields that the workload sets in generated bodies (`[request]`)."""

    @property
    def streams(self) -> bool:
        """Whether generated bodies request a streamed response."""
        return self.stream is not False

    def with_settings(self, settings: Mapping[str, Any]) -> "BodyOptions":
        """Return these options with the `[request]` settings of a workload; `fields` still override them."""
        values = {name: value for name, value in settings.items() if value is not None}
        exact = self.exact_output and values.get("ignore_eos") is not False
        # Do not send ignore_eos=false, the default: some servers refuse unknown fields.
        if values.get("ignore_eos") is False:
            del values["ignore_eos"]
        temperature = values.pop("temperature", self.temperature)
        return msgspec.structs.replace(
            self, temperature=temperature, exact_output=exact, settings=self.settings | values
        )


class SendingOptions(Struct, frozen=True, kw_only=True):
    """Options that decide how requests are sent, and when a load ends early."""

    warmup: Annotated[
        str,
        opt(
            "Warm-up before the measurement. auto: at least 100 requests and 10,000 output tokens, "
            "then until latency is stable. N: N requests. none: cold start. Warm-up "
            "requests have the lengths of the first requests of the load, with different text.",
            "auto|none|N",
            parse=validate_warmup,
            shown="none",
        ),
    ] = "none"
    processes: Annotated[
        int, opt("Number of sending processes; they share one schedule.", "N", ge=1, le=256)
    ] = 1
    ray: Annotated[
        str | None,
        opt(
            "Ray cluster that runs the sending processes: auto (a cluster that already runs on this host), "
            "HOST:6379, ray://HOST:10001, or local (a new cluster on this host). Prompts and API keys are "
            "sent to the cluster.",
            "ADDRESS",
        ),
    ] = None
    fresh: Annotated[
        bool, opt("Open a new connection for each request (default: connections are reused).")
    ] = False
    timeout: AnswerTimeout = Duration(600 * NS_PER_S)
    """Maximum time of each attempt, from dispatch to the last byte of the answer."""
    connect_timeout: Annotated[Duration, opt("Maximum time to open a connection.", "TIME")] = Duration(
        10 * NS_PER_S
    )
    retries: Annotated[
        int,
        opt(
            "Maximum number of retries of a request. A request is retried after status 429 or 503, after a "
            "refused connection, and after a connection that was closed without a response. The report shows "
            "the number of retries, and the bounds ttft and e2e of --slo count from the scheduled time.",
            "N",
            ge=0,
            le=100,
        ),
    ] = 0
    stop_when: Annotated[
        StopConditions,
        opt(
            "Conditions that end the replay early, with its report. error_rate>SHARE: more than SHARE of the "
            "latest 100 requests failed. saturated: the number of requests that wait for their first token "
            "grows without end. For example 'error_rate>10% saturated'.",
            "CONDITIONS",
            parse=parse_stop_when,
        ),
    ] = StopConditions()
    stop_errors: Annotated[
        str | None, opt("Earlier name of --stop-when 'error_rate>SHARE'.", "SHARE", hidden=True)
    ] = None
    dialects: OwnDialects = ()
    """Dialects that the user declares, in addition to the built-in ones."""
    clock: str = "kernel"
    """Source of receive times: `kernel` (the kernel's timestamps) or `mono` (read by the process)."""
    connections: int | None = None
    """Number of connections opened before the start; None: estimated from the plan."""
    request_ids: str = "llmtap"
    """Prefix of each X-Request-Id; a hyphen and the row number follow it."""
    texts: bool = False
    """Whether the exchanges of a sending process contain the texts of answers; a capture never has them."""

    def __post_init__(self) -> None:
        for flag, ns in (("--timeout", self.timeout), ("--connect-timeout", self.connect_timeout)):
            if ns <= 0:
                raise ConfigError(flag, f"expected a time above 0, got {format_ns(ns)}")
        if self.stop_errors is not None:
            if self.stop_when != StopConditions():
                raise ConfigError(
                    "--stop-errors", "cannot be combined with --stop-when", "use only --stop-when"
                )
            stop_when = parse_stop_when(f"error_rate>{self.stop_errors.strip()}")
            msgspec.structs.force_setattr(self, "stop_when", stop_when)
            msgspec.structs.force_setattr(self, "stop_errors", None)


class MeasuringOptions(Struct, frozen=True, kw_only=True):
    """Options that decide what is measured and written."""

    scrape: Annotated[
        str | None,
        opt(
            "URL of the server's metrics, or none (default: /metrics of the server, if available).",
            "URL|none",
            "--metrics",
        ),
    ] = None
    capture: Annotated[
        str | None, opt("Folder for a capture of the exchanges; the result is stored beside it.", "DIR")
    ] = None
    csv: Annotated[
        str | None,
        opt(
            "CSV file with a row for each request, with every column of a capture. The figures are in "
            "NAME.figures.csv beside it, with a row for each.",
            "FILE",
        ),
    ] = None
    slo: str | None = None
    percentiles: dict[str, float] = {}
    """Further percentiles of each metric, by name."""
    reader: Benefit = DEFAULT_BENEFIT
    """Reading speed and benefit function of the user, for the metrics that depend on a reader."""

    def __post_init__(self) -> None:
        if self.scrape is not None and self.scrape != "none":
            _check_metrics(self.scrape)


class LoadPlan(Struct, frozen=True, kw_only=True):
    """Options of one load, in five groups."""

    schedule: ScheduleOptions = ScheduleOptions()
    target: TargetOptions = TargetOptions()
    bodies: BodyOptions = BodyOptions()
    sending: SendingOptions = SendingOptions()
    measuring: MeasuringOptions = MeasuringOptions()

    @classmethod
    def of(cls, **fields: Any) -> "LoadPlan":
        """Return a load with these fields. Each field is set in the group that declares it."""
        parts: dict[str, Any] = {}
        for part in msgspec.structs.fields(cls):
            names = [name for name in part.type.__struct_fields__ if name in fields]
            parts[part.name] = part.type(**{name: fields.pop(name) for name in names})
        assert not fields, f"no group of LoadPlan has {', '.join(fields)}"
        return cls(**parts)

    def __post_init__(self) -> None:
        from llmtap.load.sending import protocol_of

        closed = self.schedule.closed is not None
        if self.sending.stop_when.saturated and (closed or protocol_of(self.target.url) != "http"):
            why = "a closed loop has no queue that grows" if closed else "it needs an HTTP target"
            raise ConfigError(
                "--stop-when", f"the condition 'saturated' cannot be used: {why}", "leave out saturated"
            )


def _check_ca(place: str) -> None:
    """Raise ConfigError for an unusable `--ca`, also for an http:// target: a missing file is a mistake."""
    from llmtap.net.tls import client_context

    read_file(Path(place), "--ca", CA_BYTES_MAX)
    try:
        client_context(place, True)
    except ConfigError:
        hint = "give the path of a PEM file with the certificates of the CAs"
        raise ConfigError("--ca", f"{place} contains no certificate in PEM format", hint) from None


def _check_metrics(url: str) -> None:
    if not is_http_url(url):
        hint = "such as http://127.0.0.1:8000/metrics, or none"
        raise ConfigError("--metrics", f"expected the URL of a metrics page, got {url!r}", hint)
