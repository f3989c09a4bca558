"""A session of OpenAI's Realtime over WebSocket, text only: any number of responses, one after another.

aiohttp opens the session, reads its messages and answers pings; what is due is written straight onto the
connection by a `ResponseSender`, as frames that stand between whole ones of aiohttp's.

What the client's headers ask for (`x-sim-*`) holds for every response of the session. A request has the id of
its `response.create` event, or, where that has none, of its response. Mishaps: who is turned away gets an
`error` event and no response; `reset` and `truncate` end the session as they end a stream, and `unfinished`
closes it in the middle of a response, in order.
"""

import asyncio
from typing import Any, Final

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from llmtap.sim.server.endpoints import openai_error
from llmtap.sim.server.reception import BUSY, FILTERED, Reception, ServerJob
from llmtap.sim.server.sender import ResponseSender
from llmtap.sim.server.shapes.openai_realtime import (
    ClientEvent,
    Events,
    Item,
    OpenAIRealtimeShape,
    RealtimeSettings,
    read_event,
)
from llmtap.sim.server.shapes.shape import Answer, BadRequest, SimulatedRequest

__all__ = ["PATH", "SimulatedRealtimeSession"]

PATH: Final = "/v1/realtime"
_MESSAGE_BYTES_MAX: Final = 64 << 20
"""As long as the body of a request may be."""
_ITEMS_MAX: Final = 10_000
"""Of a conversation; a client that says more is told so."""
_AUDIO: Final = ("input_audio_buffer.", "output_audio_buffer.")


class SimulatedRealtimeSession:
    """One connection of a client."""

    def __init__(self, reception: Reception, request: web.Request, number: int) -> None:
        """`number`: of the session, for its id."""
        self._reception = reception
        self._id = f"sess_sim{number}"
        self._request = request
        self._model = request.query.get("model", reception.options.model)
        self._events = Events()
        self._settings = RealtimeSettings()
        self._items: list[Item] = []
        self._socket = web.WebSocketResponse(
            compress=False, protocols=("realtime",), max_msg_size=_MESSAGE_BYTES_MAX
        )
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        """Of the newest response."""
        self._sender: ResponseSender | None = None
        self._cancelled = False

    async def run(self) -> web.StreamResponse:
        """The whole session."""
        socket = self._socket
        if not socket.can_prepare(self._request).ok:
            error = openai_error(426, "upgrade_required", f"{PATH} is for a WebSocket")
            return web.json_response(error, status=426, headers={"Upgrade": "websocket"})
        await socket.prepare(self._request)
        self._transport = self._request.transport
        self._put("session.created", session=self._session())
        try:
            while (message := await socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                await self._hear(message.data, self._reception.clock.mono_ns())
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        return socket

    async def close(self) -> None:
        """The server goes away."""
        await self._socket.close(code=WSCloseCode.GOING_AWAY)

    def _put(self, kind: str, **fields: Any) -> None:
        self._write(self._events.event(kind, **fields))

    def _refuse(self, kind: str, code: str, message: str, about: str | None) -> None:
        self._write(self._events.error(kind, code, message, about))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _session(self) -> dict[str, Any]:
        return {
            "type": "realtime", "object": "realtime.session", "id": self._id,
            "model": self._model, "output_modalities": ["text"],
            "instructions": self._settings.instructions or "",
            "max_output_tokens": self._settings.max_output_tokens or "inf",
        }  # fmt: skip

    async def _hear(self, data: str | bytes, now_ns: int) -> None:
        event = ClientEvent("")
        try:
            if isinstance(data, bytes):
                raise BadRequest("an event is a text message")
            event = read_event(data)
            match event.type:
                case "session.update":
                    self._update(event.session or RealtimeSettings())
                    self._put("session.updated", session=self._session())
                case "conversation.item.create":
                    self._add(event.item)
                case "response.create":
                    await self._create(event, now_ns)
                case "response.cancel":
                    self._cancel()
                case kind if kind.startswith(_AUDIO):
                    raise BadRequest(f"{kind}: this engine does not hear")
                case kind:
                    raise BadRequest(f"there is no event {kind!r} for a client to send")
        except ValueError as exc:
            self._refuse("invalid_request_error", "invalid_value", str(exc), event.event_id)

    def _update(self, new: RealtimeSettings) -> None:
        self._settings = _over(self._settings, new)

    def _add(self, item: Item | None) -> None:
        if item is None:
            raise BadRequest("item: there is none")
        if len(self._items) >= _ITEMS_MAX:
            raise BadRequest(f"a conversation has at most {_ITEMS_MAX} items")
        previous = self._items[-1].id if self._items else None
        if item.id is None:
            item.id = f"item_user{len(self._items) + 1}"
        self._items.append(item)
        shown = {**msgspec.to_builtins(item), "type": item.type, "object": "realtime.item", "role": item.role}
        shown["status"] = "completed"
        for kind in ("added", "done"):
            self._put(f"conversation.item.{kind}", previous_item_id=previous, item=shown)

    def _cancel(self) -> None:
        if self._task is None or self._sender is None or self._sender.done.done():
            raise BadRequest("there is no response to cancel")
        self._cancelled = True
        self._task.cancel()

    async def _create(self, event: ClientEvent, now_ns: int) -> None:
        task, sender = self._task, self._sender
        if task is not None and not task.done():
            if sender is None or not sender.done.done():
                raise BadRequest("the session has a response under way; one at a time")
            await asyncio.wait((task,))  # it has sent all
            now_ns = self._reception.clock.mono_ns()
        wanted = _over(self._settings, event.response or RealtimeSettings())
        items = self._items if wanted.input is None else wanted.input
        limit = wanted.max_output_tokens
        asked = SimulatedRequest(
            model=self._model, stream=True,
            prompts=("\n".join(filter(None, (wanted.instructions, *(item.text for item in items)))),),
            max_tokens=limit if isinstance(limit, int) else None, min_tokens=wanted.min_tokens or 0,
            ignore_eos=bool(wanted.ignore_eos), seed=wanted.seed, include_usage=True,
        )  # fmt: skip
        conversation = None if wanted.conversation == "none" else "conv_sim"

        def shape_of(answer: Answer) -> OpenAIRealtimeShape:
            return OpenAIRealtimeShape(answer, self._events, conversation)

        job = self._reception.take(
            asked, shape_of, path=PATH, headers=self._request.headers, accepted_ns=now_ns,
            request_id=event.event_id,
        )  # fmt: skip
        if job.door is None:
            self._reception.ask(job)  # at once: the engine may be further when a task runs
        task = asyncio.create_task(self._respond(job, event.event_id, conversation is not None))
        # Not at its own end: one that is cancelled before it has begun never gets there.
        task.add_done_callback(lambda _: self._reception.end(job))
        self._task = task

    async def _respond(self, job: ServerJob, about: str | None, remembered: bool) -> None:
        reception = self._reception
        assert isinstance(job.shape, OpenAIRealtimeShape)
        try:
            if (status := job.door) is not None:
                if status == 400:
                    await reception.filtered(job)
                self._turn_away(job, status, about)
                return
            await self._stream(job, about)
            if remembered and job.shape.said:
                said = [{"type": "output_text", "text": job.shape.said}]
                self._items.append(Item(id=job.shape.item_id, role="assistant", content=said))
            if job.truth.outcome == "unfinished":
                await self._socket.close()
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            self._cancelled = False
            self._write(job.shape.cancelled())

    async def _stream(self, job: ServerJob, about: str | None) -> None:
        sender = self._sender = self._reception.sender(job)
        try:
            if not await self._reception.begins(job, sender):
                self._turn_away(job, 503, about)
            elif self._transport is not None:
                sender.start(self._transport, framed=False)
                await asyncio.shield(sender.done)
        finally:
            sender.abandon("cancelled" if self._cancelled else None)
            self._sender = None

    def _turn_away(self, job: ServerJob, status: int, about: str | None) -> None:
        job.turned_away(status)
        code, message = BUSY.get(status, ("content_filter", FILTERED))
        self._refuse(openai_error(status, code, message)["error"]["type"], code, message, about)


def _over(before: RealtimeSettings, new: RealtimeSettings) -> RealtimeSettings:
    """The settings with those that are new in place of those before."""
    fields = {name: getattr(new, name) for name in new.__struct_fields__}
    changed = {name: value for name, value in fields.items() if value is not None}
    return msgspec.structs.replace(before, **changed)
