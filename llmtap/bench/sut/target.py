"""Where a test's requests go, and the configurations of it that a test compares."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["BenchTarget", "TargetArm"]


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

    def __post_init__(self) -> None:
        if not self.endpoint:
            endpoint = "completions" if self.tokenizer is None else "chat.completions"
            msgspec.structs.force_setattr(self, "endpoint", endpoint)
