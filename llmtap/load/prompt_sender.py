"""Load sender for targets that take prompts instead of HTTP bodies: WebSocket (Responses, Realtime) and gRPC.

`PromptMaker` encodes prompts before the run, as `load/bodies.py` does for HTTP. `PromptSender` replaces the
sender of `load/http.py`: each request is a task that ends with an Exchange and can be cancelled by the id of
the request. The target (`websocket.py`, `grpc_target.py`) builds the message from the prompt and sends it.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.load.bodies import Decode, output_control
from llmtap.load.sending import WEBSOCKET, DeferredWork, Spoken, check_fields, parse_target, protocol_of
from llmtap.load.workers.worker_handle import WorkerSetup
from llmtap.units import NS_PER_S
from llmtap.workload.prompts.prompt import Prompt

if TYPE_CHECKING:
    from llmtap.load.grpc_target import GrpcTarget
    from llmtap.load.websocket import WebSocketTarget

_ID: Final = b"X-Request-Id"


class _PreparedPrompt(msgspec.Struct, array_like=True):
    """A prompt as stored in the file of bodies."""

    text: str
    ids: tuple[int, ...]
    system: str
    history: tuple[tuple[str, str], ...]
    """Role and text of each earlier message."""
    output: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_PreparedPrompt).decode


class PromptMaker:
    """Makes request bodies for WebSocket and gRPC targets: each body is an encoded prompt."""

    def __init__(
        self, protocol: Spoken, *, model: str | None, exact_output: bool, decode: Decode | None = None
    ) -> None:
        """`decode` converts prompts of token ids to text if the target accepts only text."""
        self._protocol = protocol
        self._model = model
        self._decode = decode
        self.output_exact = exact_output
        """Whether requests demand exactly the planned number of tokens."""

    def describe(self, *, made: bool = True, streamed: bool = True) -> dict[str, object]:
        """Return the fields of the requests as JSON, like `BodyMaker.describe`.

        `made` and `streamed` have no effect: all bodies are generated, and all answers are streamed.
        """
        limit = "max_output_tokens" if self._protocol in WEBSOCKET else "max_tokens"
        return {
            "endpoint": self._protocol,
            "model": self._model,
            "stream": True,
            "ignore_eos": self.output_exact,
            "min_tokens": self.output_exact and self._protocol != "responses",
            "settings": {},
            "fields": [],
            "output_control": output_control(limit, ignores_end=self.output_exact, stops=False),
        }

    def body(self, prompt: Prompt, output: int) -> bytes:
        """Encode a request for `output` tokens, and for 1 token if `output` is 0.

        Raises ConfigError for a prompt of token ids if the target does not accept them.
        """
        text, ids = prompt.text, tuple(prompt.ids)
        if ids and self._protocol in WEBSOCKET:
            decoded_text = None if self._decode is None else self._decode(ids)
            if decoded_text is None:
                raise ConfigError(
                    "--target",
                    "the prompts are token ids, which a WebSocket target does not accept",
                    "set --tokenizer to the tokenizer of these ids",
                )
            text, ids = decoded_text, ()
        return _encode(_PreparedPrompt(text, ids, prompt.system, prompt.history, max(1, output)))

    def destination(self, body: bytes, path: str) -> str:
        return ""

    def adapt_recorded(self, body: bytes, path: str = "") -> bytes:
        raise ConfigError(
            "--target",
            "the trace has HTTP request bodies, which need an HTTP target",
            "use a target with http:// or https://",
        )


class PromptCall:
    """One request in flight, with the methods of `http.Call`."""

    __slots__ = ("_cancel", "row")
    has_token = False
    """Always False: the sender does not see tokens before the end of the answer."""

    def __init__(self, row: int, cancel: Callable[[], object]) -> None:
        self.row = row
        self._cancel = cancel
        """Function that cancels the request."""

    def cancel(self, reason: str) -> None:
        self._cancel()


_Done = Callable[[PromptCall, Exchange], None]


class PromptSender:
    """Sends prompts to one target from one event loop. Call `aclose` when done."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: "WebSocketTarget | GrpcTarget",
        *,
        name: str,
        connect_timeout_ns: int = 10 * NS_PER_S,
    ) -> None:
        self.loop = loop
        self.lateness = target.lateness
        self.deferred = DeferredWork(loop)
        """Work that is delayed while requests are due."""
        self._target = target
        self._name = name
        """Name of the sending process, a part of the requests' ids."""
        self._connect_timeout_s = connect_timeout_ns / NS_PER_S
        self.calls: dict[PromptCall, asyncio.Task[None]] = {}
        """By request in flight: its task."""
        self.sent = 0
        """Number of requests so far."""
        self.retries: Counter[str] = Counter()

    @property
    def connects(self) -> int:
        return self._target.connects

    @property
    def reuses(self) -> int:
        return self._target.reuses

    def send(
        self,
        body: bytes,
        done: "_Done",
        *,
        row: int = 0,
        scheduled_ns: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        path: bytes = b"",
        on_answer: object = None,
    ) -> PromptCall:
        """Send a request, as `LoadSender.send` does.

        Of `headers` only the request id is used; `path` is ignored; `on_answer` is never called.
        """
        self.sent += 1
        request_id = dict(headers).get(_ID, f"{self._name}-{self.sent}".encode()).decode()
        p = _decode(body)
        prompt = Prompt(p.text, p.ids, p.system, p.history)
        # Delay a cancellation until the task has taken its first step, in which the target registers the id.
        request = PromptCall(row, lambda: self.loop.call_soon(self._target.cancel, request_id))
        task = self.calls[request] = self.loop.create_task(
            self._send_prompt(request, done, prompt, p.output, scheduled_ns, request_id)
        )
        task.add_done_callback(self._exit_on_internal_error)
        return request

    async def open(self, connections: int) -> int:
        if not connections:
            return 0
        try:
            return await asyncio.wait_for(self._target.open(connections), self._connect_timeout_s)
        except TimeoutError:
            return 0  # Requests will connect again, and report the error.

    def stop_retrying(self) -> None: ...

    async def aclose(self) -> None:
        """Cancel all requests, each of which still reports its Exchange, and close the target."""
        for request in list(self.calls):
            request.cancel("")
        await asyncio.gather(*self.calls.values(), return_exceptions=True)
        await self._target.close()

    async def _send_prompt(
        self, request: PromptCall, done: "Callable[[PromptCall, Exchange], None]", *args: Any
    ) -> None:
        x = await self._target.send_prompt(*args)
        del self.calls[request]
        done(request, x)

    def _exit_on_internal_error(self, task: "asyncio.Task[None]") -> None:
        """End the process if the task failed with an internal error: its request would never be reported."""
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.loop.call_exception_handler({"message": "a request could not be sent", "exception": exc})
            raise SystemExit(1)


def check_target(setup: WorkerSetup) -> bool:
    """Check the target; return whether it uses TLS. Raises ConfigError naming `--target` or `--header`."""
    headers, url = setup.headers, setup.load.target.url
    match protocol_of(url):
        case "http":
            return parse_target(url, setup.endpoint, headers).origin.tls
        case "responses" | "realtime":
            from llmtap.load.websocket import parse_websocket_url

            check_fields(headers)
            return parse_websocket_url(url)[0].tls
        case "grpc":
            from llmtap.load.grpc_target import metadata_of, parse_grpc

            check_fields(headers)
            metadata_of(headers)
            return parse_grpc(url)[1]


def make_prompt_sender(
    loop: asyncio.AbstractEventLoop, setup: WorkerSetup, tls: ssl.SSLContext | None
) -> PromptSender:
    """Return the sender for the protocol of the target. Raises ConfigError naming `--target`."""
    options, bodies, url = setup.load.sending, setup.load.bodies, setup.load.target.url
    common: dict[str, Any] = {
        "headers": setup.headers,
        "exact_output": setup.exact_output,
        "name": setup.name,
    }
    make_sender = partial(PromptSender, loop, name=setup.name, connect_timeout_ns=options.connect_timeout)
    if protocol_of(url) in WEBSOCKET:
        from llmtap.load.websocket import WebSocketTarget

        return make_sender(WebSocketTarget(url, options, bodies, tls=tls, **common))
    # Import grpc_target only if it is needed: its import takes 33 ms and 14 MB.
    from llmtap.load.grpc_target import GrpcTarget

    return make_sender(GrpcTarget(url, options, bodies, ca=setup.load.target.ca, **common))
