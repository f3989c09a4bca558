"""Client of vLLM's engine service over gRPC, as a target of the load generator.

`prompt_sender.py` calls `send_prompt` with each prompt and gets an Exchange. gRPC exposes no sockets: a
message gets its timestamp when it reaches this process, and the delay of gRPC's own threads is not measured.
T_submit is the time at which gRPC accepted the request message; T_first is that of the first message with a
token (IETF draft, B.1.2).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import grpc.aio

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.exchange.bounds import bound
from llmtap.exchange.exchange import OUTPUT, Exchange, Timeline, Tokens
from llmtap.exchange.interventions import Interventions
from llmtap.exchange.observer import EVENTS_MAX
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.exchange.verdict import TOKENS_MAX, remove_implausible
from llmtap.load.options import BodyOptions, SendingOptions
from llmtap.load.sending import ANSWER_BYTES_MAX, Lateness
from llmtap.protocol.delta import Verdict
from llmtap.protocol.sse import EVENT_BYTES_MAX
from llmtap.protocol.verdicts import INPUT, finish_reason_verdict
from llmtap.protocol.vllm_grpc import METHOD, GrpcChunk, GrpcRequest, GrpcUsage, read_chunk, write_request
from llmtap.units import NS_PER_S
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.tokenizer import as_text

MESSAGE_BYTES_MAX: Final = EVENT_BYTES_MAX

_SENDING: Final = SendingOptions()
_BODIES: Final = BodyOptions()

mono_ns = SystemClock.mono_ns


class GrpcTarget:
    """Sends calls to one server. Create, use and close it within one running loop."""

    def __init__(
        self,
        url: str,
        options: SendingOptions = _SENDING,
        bodies: BodyOptions = _BODIES,
        *,
        ca: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        exact_output: bool = False,
        name: str = "load",
    ) -> None:
        """`url`: `grpc://host:port`, or `grpcs://` for TLS. `ca`: PEM file of trusted CAs.

        `headers` are sent as metadata. `exact_output`: request exactly the planned number of output tokens.
        Raises ConfigError naming `--target` or `--header`.
        """
        address, tls = parse_grpc(url)
        self._metadata = metadata_of(headers)
        """Header fields that are sent with each call."""
        self.model = bodies.model
        self._exact_output = exact_output
        """Whether to request exactly the planned number of tokens."""
        self._timeout_ns = options.timeout
        self._name = name
        """Name of the sending process, a part of the exchanges' ids."""
        self._request_count = 0
        """Number of requests so far."""
        self.lateness = Lateness(asyncio.get_running_loop(), kernel=False)
        channel_options = (
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
        )
        if tls:
            trusted = grpc.ssl_channel_credentials(None if ca is None else Path(ca).read_bytes())
            self._channel = grpc.aio.secure_channel(address, trusted, options=channel_options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options=channel_options)
        # The method takes one request message. Call it with a stream of requests: the bytes are the same, and
        # only such a call reports when gRPC has accepted the message.
        self._call = self._channel.stream_stream(METHOD)
        self._calls: dict[str, tuple[Any, _Answer]] = {}
        """By id of a request under way: its call and its answer."""
        self.connects = 0
        """Number of connections, at most 1: gRPC reconnects without a report."""
        self.reuses = 0
        """Number of requests that used an open connection: all except the first."""

    async def send_prompt(
        self, prompt: Prompt, output_tokens: int, scheduled_ns: int | None, request_id: str
    ) -> Exchange:
        """Send one request and return its Exchange, also if it fails. `scheduled_ns`: planned send time."""
        self._request_count += 1
        self.reuses += self._request_count > 1
        self.connects = 1
        output = max(1, output_tokens)
        message = write_request(
            GrpcRequest(
                request_id,
                text="" if prompt.ids else as_text(prompt),
                token_ids=prompt.ids,
                max_tokens=output,
                min_tokens=output if self._exact_output else 0,
                ignore_eos=self._exact_output,
            )
        )
        began_ns = mono_ns()
        answer = _Answer(
            Exchange(
                self._name,
                self._request_count,
                self.lateness.timebase.anchor.to_wall_ns(began_ns),
                Timeline(began_ns, request_end_ns=began_ns),
                method="POST",
                path=METHOD,
                endpoint="inference.generate",
                dialect="grpc",
                model=self.model,
                request_id=request_id,
                stream=True,
                scheduled_ns=scheduled_ns,
                request_bytes=len(message),
            )
        )
        call = self._call(metadata=self._metadata)
        self._calls[request_id] = call, answer
        try:
            async with asyncio.timeout(self._timeout_ns / NS_PER_S):
                await answer.run(call, message)
        except TimeoutError:
            answer.outcome = Outcome.UPSTREAM_TIMEOUT
            answer.error = "the server did not end its answer in time"
        finally:
            del self._calls[request_id]
            call.cancel()  # This has no effect if the call has ended already.
        x = answer.finish_exchange(self.lateness.worst_since(began_ns))
        if scheduled_ns is not None:
            x.dispatch_late_ns = began_ns - scheduled_ns
        x.anchor = self.lateness.timebase.steps
        return x

    async def open(self, connections: int = 1) -> int:
        await self._channel.channel_ready()
        self.connects = 1
        return 1

    def cancel(self, request_id: str) -> None:
        if request_id in self._calls:
            call, answer = self._calls[request_id]
            call.cancel()
            answer.cancel()

    async def close(self) -> None:
        for request_id in list(self._calls):
            self.cancel(request_id)
        await self._channel.close(None)
        self.lateness.close()


def parse_grpc(url: str) -> tuple[str, bool]:
    """Return the address of a `grpc://` or `grpcs://` URL, and whether it uses TLS. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as exc:
        raise ConfigError(
            "--target", f"{url!r} is not a URL: {exc}", "such as grpc://127.0.0.1:8001"
        ) from None
    if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or port is None or parts.path.strip("/"):
        raise ConfigError(
            "--target",
            f"expected grpc:// or grpcs:// with a host and a port, without a path, got {url!r}",
            "such as grpc://127.0.0.1:8001",
        )
    return parts.netloc, parts.scheme == "grpcs"


def metadata_of(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return header fields as gRPC metadata. Raises ConfigError for a field that is not ASCII."""
    for name, value in headers:
        if not (name.isascii() and value.isascii()):
            problem = f"the field {name.decode('latin-1')!r} has characters outside ASCII"
            raise ConfigError("--header", f"{problem}, which gRPC cannot send", "use only ASCII")
    # RFC 9113 8.2: field names are in lower case.
    return [(name.decode().lower(), value.decode()) for name, value in headers]


class _Answer:
    """One call and its answer."""

    def __init__(self, x: Exchange) -> None:
        """`x`: exchange into which the answer is read."""
        self._x = x
        self.outcome = Outcome.COMPLETE
        self.error: str | None = None
        self._usage: GrpcUsage | None = None
        """Token counts of the last message; None before it."""
        self._declared_tokens = 0
        """Number of output tokens that the chunks declared so far."""
        self._write_task: asyncio.Task[Any] | None = None
        """Task that writes the request; `cancel` ends it."""
        self._is_cancelled = False
        self._submit_width_ns = 0
        """Uncertainty of `submit_ns`: gRPC accepted the message at most this time earlier."""
        self._interventions = Interventions()

    def cancel(self) -> None:
        """Cancel the write of the request: a write that waits for a connection outlives the call."""
        if self._write_task is not None:
            self._write_task.cancel()
            self._is_cancelled = True

    async def run(self, call: Any, request: bytes) -> None:
        """Send the request and read the answer. A network error becomes the outcome and is not raised."""
        t = self._x.timeline
        try:
            self._write_task = asyncio.current_task()
            before_ns = mono_ns()
            await call.write(request)
            t.submit_ns = mono_ns()
            self._write_task = None
            self._submit_width_ns = t.submit_ns - before_ns
            await call.done_writing()
            while (message := await call.read()) is not grpc.aio.EOF:
                t_ns = mono_ns()
                self._add_chunk(read_chunk(message), len(message), t_ns)
            t.response_end_ns = mono_ns()
            code, details = await call.code(), await call.details()
        except ValueError as exc:
            self.outcome, self.error = Outcome.UPSTREAM_ERROR, f"invalid answer of the server: {exc}"
            return
        except grpc.aio.AioRpcError as exc:
            t.response_end_ns = mono_ns()
            code, details = exc.code(), exc.details()
        except (asyncio.InvalidStateError, grpc.aio.UsageError):  # The call ended before the write.
            code, details = await call.code(), await call.details()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_cancelled and task is not None:
                task.uncancel()
            if task is None or task.cancelling():
                raise  # The task itself was cancelled, not only the call.
            code, details = grpc.StatusCode.CANCELLED, None
        self._set_outcome(code, details or "")

    def _add_chunk(self, chunk: GrpcChunk, size: int, t_ns: int) -> None:
        x, t = self._x, self._x.timeline
        # vLLM's final message, which has the usage, repeats the tokens of the last chunk: count them once.
        count = 0 if chunk.usage is not None and self._declared_tokens else len(chunk.token_ids)
        # Keep no data per token beyond TOKENS_MAX, so that the memory of an exchange is bounded.
        tokens = count if self._declared_tokens + count <= TOKENS_MAX else 0
        x.reads += 1
        x.response_bytes += size
        if x.response_bytes > ANSWER_BYTES_MAX:
            raise ValueError(f"the answer has more than {ANSWER_BYTES_MAX} bytes: request fewer tokens")
        if t.first_byte_ns is None:
            t.first_byte_ns = t.first_any_ns = t_ns
        event_class, flags = EventClass.METADATA, 0
        if count:
            event_class, flags = EventClass.CONTENT, OUTPUT
            t.last_token_ns = t_ns
            if t.first_token_ns is None:
                t.first_token_ns = t.first_content_ns = t_ns
            self._declared_tokens += tokens
        elif chunk.usage is not None:
            event_class = EventClass.USAGE
        before = len(t.events)
        if before < EVENTS_MAX:
            t.events.add(t_ns, event_class, size, tokens or -1, flags)
        if chunk.finish_reason:
            x.finish_reason = chunk.finish_reason
            verdict = finish_reason_verdict(chunk.finish_reason)
            if verdict is not None:
                self._interventions.add(verdict, before, self._declared_tokens)
        self._usage = chunk.usage or self._usage

    def _set_outcome(self, code: grpc.StatusCode, details: str) -> None:
        """Set status, outcome and error from the status of the gRPC call."""
        x = self._x
        begun = x.timeline.first_byte_ns is not None
        match code:
            case grpc.StatusCode.OK:
                x.status = 200
                if x.finish_reason is None:
                    self.outcome = Outcome.TRUNCATED
                    self.error = "upstream ended the stream without a finish reason"
                elif x.finish_reason in ("abort", "error"):
                    self.outcome = Outcome.UPSTREAM_ERROR
                    self.error = f"upstream ended the answer with the finish reason {x.finish_reason}"
                return
            case grpc.StatusCode.CANCELLED:
                self.outcome, self.error = (
                    Outcome.CLIENT_CANCELLED,
                    "the run ended before the answer: see --drain",
                )
                return
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                self.outcome = Outcome.UPSTREAM_TIMEOUT
            case grpc.StatusCode.UNAVAILABLE if begun:
                self.outcome = Outcome.UPSTREAM_RESET
            case grpc.StatusCode.PERMISSION_DENIED if details.startswith("content_filter"):
                verdict = Verdict("grpc_status", INPUT, "blocked", "input", value="content_filter")
                self._interventions.add(verdict, 0, 0)
                return
            case _:
                self.outcome = Outcome.UPSTREAM_ERROR
        where = "within its answer" if begun else "in place of an answer"
        self.error = f"upstream sent the status {code.name} {where}"

    def finish_exchange(self, lag_ns: int) -> Exchange:
        x = self._x
        x.uncertainty_ns = x.ttft_uncertainty_ns = max(lag_ns, self._submit_width_ns)
        usage = self._usage
        if usage is not None:
            output = max(self._declared_tokens, usage.output_tokens)
            x.tokens = Tokens(usage.prompt_tokens, output, None, usage.cached_tokens, TokenSource.USAGE)
            x.usage = {
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": output,
                "cached_tokens": usage.cached_tokens,
            }
        elif self._declared_tokens:
            x.tokens = Tokens(output=self._declared_tokens, source=TokenSource.RUNNING_USAGE)
        remove_implausible(x)
        x.outcome, x.error = self.outcome, self.error
        self._interventions.judge(x)
        if x.outcome is Outcome.COMPLETE and x.refusal is not None and x.refusal["confidence"] != "low":
            x.outcome = Outcome.REFUSED
        if x.timeline.first_token_ns is None:
            why = {Outcome.COMPLETE: "only_metadata", Outcome.REFUSED: "guardrail"}
            x.no_token_reason = why.get(x.outcome, "error")
            if x.outcome is Outcome.CLIENT_CANCELLED:
                x.no_token_reason = "cancelled"
        bound(x)
        return x
