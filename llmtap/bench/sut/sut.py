"""What a bench file declares: the server to send to, and facts of the system under test.

Source: IETF draft, 4.1, 4.4, 4.6 to 4.8.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = ["BenchTarget", "Guardrails", "Hardware", "Sut", "SutClock", "SutTokenizer", "TargetArm"]


Boundary = Literal["model engine", "application gateway", "compound system"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accelerators, and what they cost (`[sut.hardware]`)."""

    accelerator: Annotated[str | None, Meta(description="type, such as H100 SXM; `none` without one")] = None
    count: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="how many")] = None
    memory: Annotated[str | None, Meta(description="of each, such as 80 GB")] = None
    cpu: Annotated[str | None, Meta(description="of the host")] = None
    price_per_hour: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="of all of it together")
    ] = None
    currency: Annotated[str, Meta(description="of the price")] = "USD"


class SutTokenizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are counted (IETF 4.4)."""

    name: Annotated[str | None, Meta(description="name and version")] = None
    vocabulary: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="size")] = None
    source: Annotated[str | None, Meta(description="where it comes from: a model id, a tiktoken name")] = None
    counting: Annotated[
        Literal["native", "reference"], Meta(description="4.4.2: option A (native) or B (reference)")
    ] = "native"
    special: Annotated[str | None, Meta(description="BOS/EOS: included in counts or excluded")] = None
    system_prompt: Annotated[str | None, Meta(description="its tokens: counted apart or included")] = None
    tools: Annotated[str | None, Meta(description="tokens that tool calls are formatted with")] = None


class Guardrails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Safety systems (IETF 4.8.1)."""

    input_filter: Annotated[bool | None, Meta(description="prompts are filtered")] = None
    output_filter: Annotated[bool | None, Meta(description="answers are filtered")] = None
    names: Annotated[list[str], Meta(description="of the systems, where known")] = []


class SutClock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the load generator stands (IETF 4.7)."""

    placement: Annotated[
        Literal["same machine", "remote"] | None, Meta(description="load generator and SUT")
    ] = None
    synchronization: Annotated[str | None, Meta(description="method, when remote: NTP, PTP")] = None
    accuracy: Annotated[str | None, Meta(description="estimated, when remote: 2ms")] = None


class Sut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The system under test (`[sut]`). None is what nobody has said yet."""

    boundary: Annotated[Boundary | None, Meta(description="what is measured (4.1)")] = None
    model: Annotated[str | None, Meta(description="name, version, quantization")] = None
    software: Annotated[str | None, Meta(description="engine or gateway, and version")] = None
    protocol: Annotated[str | None, Meta(description="SSE, WebSocket or gRPC (4.6.1)")] = None
    chunking: Annotated[
        Literal["one token per chunk", "several tokens per chunk"] | None,
        Meta(description="as it is known; what was seen is reported beside it (4.6.2)"),
    ] = None
    prefix_cache: Annotated[bool | None, Meta(description="on or off")] = None
    max_batch: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="requests that run at a time, where known")
    ] = None
    hardware: Hardware = Hardware()
    tokenizer: SutTokenizer = SutTokenizer()
    guardrails: Guardrails = Guardrails()
    clock: SutClock = SutClock()
    notes: Annotated[list[str], Meta(description="anything else a reader should know")] = []
    start: Annotated[
        list[str],
        Meta(description="command that starts the server; its model load is measured (4.5.3)"),
    ] = []


class TargetArm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration of the SUT, as an overlay on the target: what differs (`[arms.NAME]`)."""

    about: Annotated[str, Meta(description="what it is, for the report")] = ""
    url: Annotated[str | None, Meta(description="another address")] = None
    headers: Annotated[dict[str, str], Meta(description="fields of each request, besides the target's")] = {}
    body: Annotated[
        dict[str, msgspec.Raw], Meta(description="members of each body, besides the target's")
    ] = {}
    apply: Annotated[
        list[str], Meta(description="a command that switches the SUT over; run before the arm's load")
    ] = []

    @property
    def switches(self) -> bool:
        """It is another state of the server, not only another request: arms can't alternate by request."""
        return bool(self.apply)


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to send, and as whom (`[target]`). Keys are not written here: `key_env` names their variable."""

    url: Annotated[str, Meta(description="http://host:port[/prefix]")]
    endpoint: Annotated[
        Literal["", "chat.completions", "completions", "responses"],
        Meta(
            description="of its API; where none is said chat.completions with a tokenizer, else completions,"
            " which takes prompts of token ids"
        ),
    ] = ""
    model: Annotated[str | None, Meta(description="its name; default: the one that the server lists")] = None
    server: Annotated[
        Literal["auto", "openai", "vllm", "sglang"], Meta(description="whose fields it knows")
    ] = "auto"
    tokenizer: Annotated[
        str | None, Meta(description="folder, file or tiktoken:NAME, by which prompts get their length")
    ] = None
    headers: Annotated[dict[str, str], Meta(description="fields of each request")] = {}
    body: Annotated[dict[str, msgspec.Raw], Meta(description="members of each body")] = {}
    key_env: Annotated[str | None, Meta(description="variable with the API key")] = None
    ca: Annotated[str | None, Meta(description="trust this CA (PEM)")] = None
    metrics: Annotated[str | None, Meta(description="URL of the server's metrics, or none")] = None
    processes: Annotated[int, Meta(ge=1, le=256, description="sending processes")] = 1

    @property
    def counting(self) -> dict[str, Any]:
        """How prompts are counted, as arguments of `make_load`."""
        return {"tokenizer": self.tokenizer, "chat": self.endpoint == "chat.completions"}

    def __post_init__(self) -> None:
        if not self.endpoint:
            endpoint = "completions" if self.tokenizer is None else "chat.completions"
            msgspec.structs.force_setattr(self, "endpoint", endpoint)
