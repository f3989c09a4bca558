"""Structs of a bench file's tables: target server, system under test (SUT), and its configurations (arms).

They have the keys of `[target]`, `[sut]` with its subtables, and `[arms.NAME]`, with their types and
descriptions; `file.py` reads them. The parameters of `[tests.NAME]` are in the tests' own modules. Source:
IETF draft, 4.1, 4.4, 4.6 to 4.8.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Boundary = Literal["model engine", "application gateway", "compound system"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accelerators and their price (`[sut.hardware]`)."""

    accelerator: Annotated[str | None, Meta(description="type, such as H100 SXM, or none (5.1.2.3)")] = None
    count: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="number of accelerators")] = None
    memory: Annotated[str | None, Meta(description="memory of each, such as 80 GB")] = None
    cpu: Annotated[str | None, Meta(description="CPU of the host")] = None
    price_per_hour: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="price of all hardware per hour (6.2)")
    ] = None
    currency: Annotated[str, Meta(description="currency of the price")] = "USD"


class SutTokenizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are counted (IETF 4.4)."""

    name: Annotated[str | None, Meta(description="name and version of the tokenizer (4.4.1)")] = None
    vocabulary: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="vocabulary size")] = None
    source: Annotated[str | None, Meta(description="source: a model id, a tiktoken name")] = None
    counting: Annotated[
        Literal["native", "reference"],
        Meta(description="counting of tokens (4.4.2): option A (native) or B (reference)"),
    ] = "native"
    special: Annotated[str | None, Meta(description="BOS/EOS: included or excluded (4.4.3)")] = None
    system_prompt: Annotated[str | None, Meta(description="its tokens: separate or included (4.4.3)")] = None
    tools: Annotated[str | None, Meta(description="formatting tokens of tool calls (4.4.3)")] = None


class Guardrails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Safety systems (IETF 4.8.1)."""

    input_filter: Annotated[bool | None, Meta(description="whether prompts are filtered (4.8.1)")] = None
    output_filter: Annotated[bool | None, Meta(description="whether responses are filtered (4.8.1)")] = None
    names: Annotated[list[str], Meta(description="names of the safety systems, if known")] = []


class SutClock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement of the load generator, and clock synchronisation (IETF 4.7)."""

    placement: Annotated[
        Literal["same machine", "remote"] | None,
        Meta(description="place of load generator and SUT (4.7)"),
    ] = None
    synchronization: Annotated[str | None, Meta(description="method, if remote: NTP, PTP")] = None
    accuracy: Annotated[str | None, Meta(description="estimated accuracy, if remote: 2ms")] = None


class Sut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """System under test (`[sut]`). None: not declared."""

    boundary: Annotated[Boundary | None, Meta(description="boundary of the SUT (4.1)")] = None
    model: Annotated[str | None, Meta(description="name, version, quantization of the model (5.1.2.3)")] = (
        None
    )
    software: Annotated[str | None, Meta(description="engine or gateway, and version (C.1)")] = None
    protocol: Annotated[str | None, Meta(description="SSE, WebSocket or gRPC (4.6.1)")] = None
    chunking: Annotated[
        Literal["one token per chunk", "several tokens per chunk"] | None,
        Meta(description="tokens per chunk; the observed number is reported, too (4.6.2)"),
    ] = None
    prefix_cache: Annotated[bool | None, Meta(description="whether the prefix cache is on (5.1.2.3)")] = None
    max_batch: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="maximum number of running requests (5.2.4.2)"),
    ] = None
    hardware: Hardware = Hardware()
    tokenizer: SutTokenizer = SutTokenizer()
    guardrails: Guardrails = Guardrails()
    clock: SutClock = SutClock()
    notes: Annotated[list[str], Meta(description="further remarks for the reader")] = []
    start: Annotated[
        list[str],
        Meta(description="command that starts the server; its model load is measured (4.5.3)"),
    ] = []


class TargetArm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the SUT to compare: its differences from the target (`[arms.NAME]`)."""

    about: Annotated[str, Meta(description="description for the report")] = ""
    url: Annotated[str | None, Meta(description="another URL")] = None
    headers: Annotated[dict[str, str], Meta(description="additional header fields of each request")] = {}
    body: Annotated[dict[str, msgspec.Raw], Meta(description="additional members of each body")] = {}
    apply: Annotated[
        list[str], Meta(description="command that switches the SUT; run before the arm's load")
    ] = []

    @property
    def switches(self) -> bool:
        """Whether a command switches the server, so that arms cannot alternate by request."""
        return bool(self.apply)


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Target server (`[target]`). The API key is in the environment variable that `key_env` names."""

    url: Annotated[str, Meta(description="http://host:port[/prefix]")]
    endpoint: Annotated[
        Literal["", "chat.completions", "completions", "responses"],
        Meta(
            description="API endpoint; default: chat.completions with a tokenizer, else completions,"
            " which accepts token ids as prompts"
        ),
    ] = ""
    model: Annotated[str | None, Meta(description="model name; default: the server's only model")] = None
    server: Annotated[
        Literal["auto", "openai", "vllm", "sglang"],
        Meta(description="server type, for vendor-specific fields"),
    ] = "auto"
    tokenizer: Annotated[
        str | None, Meta(description="tokenizer of the prompts: folder, file or tiktoken:NAME")
    ] = None
    headers: Annotated[dict[str, str], Meta(description="header fields of each request")] = {}
    body: Annotated[dict[str, msgspec.Raw], Meta(description="members of each body")] = {}
    key_env: Annotated[str | None, Meta(description="environment variable of the API key")] = None
    ca: Annotated[str | None, Meta(description="file with the trusted CA (PEM)")] = None
    metrics: Annotated[str | None, Meta(description="URL of the server's metrics, or none")] = None
    processes: Annotated[int, Meta(ge=1, le=256, description="number of sending processes")] = 1

    @property
    def counting(self) -> dict[str, Any]:
        """Arguments of `make_load` that say how prompts are counted."""
        return {"tokenizer": self.tokenizer, "chat": self.endpoint == "chat.completions"}

    def __post_init__(self) -> None:
        if not self.endpoint:
            endpoint = "completions" if self.tokenizer is None else "chat.completions"
            msgspec.structs.force_setattr(self, "endpoint", endpoint)
