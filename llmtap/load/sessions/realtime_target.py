"""A server of OpenAI's Realtime over WebSocket, asked one response after another.

A request is one message, `response.create` with its own input and outside of any conversation, so that a
session can be used again and again and nothing of one request is in the next. Its last byte is T_submit (IETF
seed 000, B.1.1): connecting, upgrading and the server's greeting come before, and count as lateness of the
dispatch only by what they make it wait for. What comes down is fed to the tap's own Observer.

Sessions are kept by tenant, since a tenant is named by a header of the upgrade. As many are opened as there
are requests under way.
"""

import asyncio
import base64
import os
import ssl
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.load.lateness import Lateness
from llmtap.load.sessions.realtime_session import OpeningFailed, RealtimeAnswer, RealtimeSession
from llmtap.net.pool import Origin, Pool, parse_origin
from llmtap.net.stream import keep_stamps_on
from llmtap.protocol.websocket import frame
from llmtap.units import NS_PER_S
from llmtap.workload.prompts.prompt import Prompt

__all__ = ["RealtimeTarget", "parse_realtime"]

PATH: Final = "/v1/realtime"
TIMEOUT_NS: Final = 600 * NS_PER_S
"""From dispatch to the end of the answer, as for HTTP."""
CONNECT_TIMEOUT_NS: Final = 10 * NS_PER_S
SWEEP_S: Final = 0.1

mono_ns = SystemClock.mono_ns
_encode = msgspec.json.Encoder().encode


class RealtimeTarget:
    """Asks it; to be made and used within one running loop, and closed."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        tenant_header: str | None = None,
        exact_output: bool = False,
        clock: str = "kernel",
        timeout_ns: int = TIMEOUT_NS,
        connect_timeout_ns: int = CONNECT_TIMEOUT_NS,
        tls: ssl.SSLContext | None = None,
        name: str = "load",
        place: str = "--target",
    ) -> None:
        """The target of `ws://host:port[/path][?model=NAME]`; the path is OpenAI's where there is none.

        `headers` go with the upgrade and nowhere else: they may be secret. `exact_output` also sends
        `ignore_eos` and `min_tokens`, which only some servers know. Raises ConfigError that names `place`.
        """
        origin, path, named = parse_realtime(url, place)
        self.model = model or named
        if origin.tls and tls is None:
            raise ConfigError(place, "wss needs a TLS context")
        kernel = clock == "kernel" and not origin.tls
        self.clock = "kernel" if kernel else "mono"
        query = f"?{urlencode({'model': self.model})}" if self.model else ""
        self._path = (path + query).encode()
        self._authority = origin.authority
        self._headers = list(headers)
        self._tenant_header = None if tenant_header is None else tenant_header.encode()
        self._exact = exact_output
        self._timeout_ns = timeout_ns
        self._name = name
        self._seq = 0
        loop = asyncio.get_running_loop()
        self.lateness = Lateness(loop, kernel=kernel)
        self._stamped = keep_stamps_on() if kernel else None
        self._pool = Pool(
            loop, origin, self.lateness.timebase, clock=self.clock, idle_max=0, idle_ns=0,
            connect_ns=connect_timeout_ns, tls=tls, server_name=None,
        )  # fmt: skip
        self._idle: dict[str | None, list[RealtimeSession]] = {}
        self._sessions: set[RealtimeSession] = set()
        self._under_way: dict[str, tuple[RealtimeSession, RealtimeAnswer]] = {}
        self.connects = 0
        """Sessions that were begun."""
        self.reuses = 0
        """Requests on one that had served another before."""
        self._timer = loop.call_later(SWEEP_S, self._sweep)

    async def open(self, sessions: int, tenant: str | None = None) -> int:
        """Open so many sessions beforehand; how many of this tenant are idle then."""
        idle = self._idle.setdefault(tenant, [])
        fresh = [self._new(tenant) for _ in range(sessions - len(idle))]
        done = await asyncio.gather(*(one.open() for one in fresh), return_exceptions=True)
        for one, failed in zip(fresh, done, strict=True):
            if failed is None:
                self._give_back(one)
            else:
                one.drop()  # each request will find out for itself, and say so
        return len(idle)

    async def ask(
        self,
        *,
        scheduled_ns: int | None,
        prompt: Prompt,
        output_tokens: int,
        tenant: str | None,
        request_id: str | None = None,
    ) -> Exchange:
        """One request now, and its Exchange when it is over.

        Raises ConfigError for a prompt that is no text.
        """
        self._seq += 1
        seq, request_id = self._seq, request_id or f"{self._name}-{self._seq}"
        message = self._message(prompt, output_tokens, request_id)
        data = frame(message, key=os.urandom(4))
        began_ns = mono_ns()
        session = self._take(tenant)
        fresh = session is None
        if session is None:
            session = self._new(tenant)
        else:
            self.reuses += session.used
            session.send(data)
        observer = Observer(
            self._name, seq, began_ns, self.lateness.timebase.anchor.to_wall_ns(began_ns),
            session.upgrade, self.clock,
        )  # fmt: skip
        observer.request_end(began_ns)
        answer = RealtimeAnswer(observer, request_id)
        self._under_way[request_id] = (session, answer)
        try:
            async with asyncio.timeout(self._timeout_ns / NS_PER_S):
                if fresh:
                    await session.open()
                    session.send(data)
                session.listen(answer)
                await asyncio.shield(answer.done)
        except OpeningFailed as exc:
            answer.fail(exc.outcome, str(exc))
            answer.status = exc.status
        except TimeoutError:
            what = "connection" if answer.submit_ns is None else "end of the answer"
            answer.fail(Outcome.UPSTREAM_TIMEOUT, f"no {what} in time")
        finally:
            del self._under_way[request_id]
            if session.reusable:
                self._give_back(session)
            else:
                session.drop()
        x = self._finished(answer, began_ns, tenant, len(data) + (len(session.upgrade) if fresh else 0))
        if scheduled_ns is not None:
            x.scheduled_ns, x.dispatch_late_ns = scheduled_ns, began_ns - scheduled_ns
        return x

    def cancel(self, request_id: str) -> None:
        """It ends in a moment, as cancelled; nothing where it has ended."""
        if request_id in self._under_way:
            session, answer = self._under_way[request_id]
            answer.fail(Outcome.CLIENT_CANCELLED, "the run was over")
            session.call_off()

    async def close(self) -> None:
        """Leave every session; what is under way ends as cancelled."""
        for session in list(self._sessions):
            session.leave()
        self._timer.cancel()
        self._pool.close()
        self.lateness.close()
        if self._stamped is not None:
            self._stamped.close()

    def _sweep(self) -> None:
        now_ns = mono_ns()
        for session in list(self._sessions):
            session.look_again(now_ns)
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _finished(
        self, answer: RealtimeAnswer, began_ns: int, tenant: str | None, request_bytes: int
    ) -> Exchange:
        x = answer.observer.finish(
            None, answer.outcome.value, answer.status, answer.error, 0, self.lateness.worst_since(began_ns),
            request_bytes, answer.response_bytes,
        )  # fmt: skip
        if answer.refused is not None and x.outcome is Outcome.COMPLETE:
            x.outcome = Outcome.UPSTREAM_ERROR
            x.error = f"upstream sent an error in its answer ({answer.refused})"
        x.uncertainty_ns = max(x.uncertainty_ns, answer.submit_width_ns)
        x.request_id, x.anchor = answer.request_id, self.lateness.timebase.steps
        x.model = self.model or x.response_model
        x.tenant = tenant or x.tenant
        # The tunnel is no answer to the request that opened it; this exchange is the answer to our message.
        x.stream = True
        x.timeline.head_ns = None
        if x.tokens.output is None:
            chunks = sum(flags & OUTPUT > 0 for flags in x.timeline.events.flags)
            if chunks:
                x.tokens.output, x.tokens.source = chunks, TokenSource.CHUNKS
        return x

    def _take(self, tenant: str | None) -> RealtimeSession | None:
        idle = self._idle.get(tenant, [])
        while idle:
            session = idle.pop()
            if session.reusable and session.is_alive():
                return session
            session.drop()
        return None

    def _give_back(self, session: RealtimeSession) -> None:
        self._idle.setdefault(session.tenant, []).append(session)

    def _new(self, tenant: str | None) -> RealtimeSession:
        key = base64.b64encode(os.urandom(16))
        lines = [
            b"GET " + self._path + b" HTTP/1.1", b"Host: " + self._authority, b"Upgrade: websocket",
            b"Connection: Upgrade", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: " + key,
        ]  # fmt: skip
        lines += [name + b": " + value for name, value in self._headers]
        if self._tenant_header is not None and tenant is not None:
            lines.append(self._tenant_header + b": " + tenant.encode())
        self.connects += 1
        session = RealtimeSession(self._pool, b"\r\n".join((*lines, b"", b"")), key, tenant, self._sessions)
        self._sessions.add(session)
        return session

    def _message(self, prompt: Prompt, output_tokens: int, request_id: str) -> bytes:
        if prompt.ids:
            raise ConfigError("--target", "Realtime takes text, and the workload prescribes tokens")
        said = [*prompt.history, *((("user", prompt.text),) if prompt.text else ())]
        response: dict[str, Any] = {
            "conversation": "none", "output_modalities": ["text"], "input": _items(said),
            "max_output_tokens": max(1, output_tokens),
        }  # fmt: skip
        if prompt.system:
            response["instructions"] = prompt.system
        if self._exact:
            response |= {"ignore_eos": True, "min_tokens": max(1, output_tokens)}
        return _encode({"type": "response.create", "event_id": request_id, "response": response})


def parse_realtime(url: str, place: str = "--target") -> tuple[Origin, str, str | None]:
    """Where a server of `ws://host:port[/path][?model=NAME]` is, the path, and the model that is named.

    Raises ConfigError that names `place`.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ConfigError(place, f"{url!r} is no URL of a WebSocket", "write it like ws://127.0.0.1:8000")
    scheme = "https" if parts.scheme == "wss" else "http"
    origin = parse_origin(urlunsplit((scheme, parts.netloc, "", "", "")), place)
    return origin, parts.path.rstrip("/") or PATH, next(iter(parse_qs(parts.query).get("model", ())), None)


def _items(said: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {
            "type": "message", "role": role,
            "content": [{"type": "output_text" if role == "assistant" else "input_text", "text": text}],
        }
        for role, text in said
    ]  # fmt: skip
