"""Assign requests to the arms of an experiment, and make the changes of each arm.

A POST or WebSocket is assigned as soon as its unit (request, conversation or tenant) is known: from the head,
or from the complete body, which is held back up to `body_bytes`. A request without a conversation or tenant
is a unit of its own.

A request that cannot be changed, such as one with a compressed body, is forwarded unmodified, stays in its
arm and is marked as excluded. When held bodies need more room than `held_bytes`, the request that has held
the longest goes to the control arm: unfinished bodies do not keep others out. No other module changes the
body of a request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from llmtap.channel.experiment import NO_ROOM, OWN_HEADER, Assigner, Experiment, request_unit
from llmtap.channel.frames import Assigned, Closing
from llmtap.clock import SystemClock
from llmtap.exchange.bounds import Budget
from llmtap.net.pool import Route
from llmtap.protocol.http1 import (
    NO_TRAILERS,
    ChunkedScanner,
    Framing,
    Headers,
    RequestHead,
    sole_value,
    spelling_key,
)

_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_DIGESTS: Final = frozenset(
    {b"content-digest", b"content-md5", b"digest", b"repr-digest", b"x-amz-content-sha256"}
)
"""Header fields with a digest of the body (RFC 9530 and its predecessors)."""
_ABSENT: Final = msgspec.Raw()
_EMPTY_VALUES: Final = frozenset({b"", b'""', b"[]", b"null"})

_encode = msgspec.json.Encoder().encode
wall_ns = SystemClock.wall_ns


@dataclass(slots=True)
class _Plan:
    """Changes that one arm makes to a request."""

    name: str
    change_text: str | None
    """Description of the change, for the Exchange's `route`; None: nothing is changed."""
    route: Route
    headers: Headers = field(default_factory=list)
    body: dict[str, msgspec.Raw] = field(default_factory=dict)
    foreign_fields: frozenset[bytes] = frozenset()
    """Names (`spelling_key`) of header fields that only other arms set."""


class Assignment:
    """Assignment of one request to an arm.

    `holds`: the body must be read before the request is sent (`settle`). `note`: data of the ARM frame.
    `on_room_lost` is called when another body takes the memory of this one: `settle` then returns the body.
    """

    __slots__ = (
        "_held", "_lost_room", "_own_header", "_plan", "_router", "_unit", "excluded", "head", "holds",
        "note", "on_room_lost",
    )  # fmt: skip

    def __init__(self, router: "ExperimentRouter", head: RequestHead) -> None:
        self._router = router
        self._lost_room = False
        self._own_header = False
        self.on_room_lost: Callable[[], None] | None = None
        self.head = head
        self._plan: _Plan | None = None
        self._unit = ""
        self._held = 0
        self.excluded: str | None = None
        self.holds = False
        self.note: bytes | None = None

    @property
    def route(self) -> Route:
        """Route of the request, once its arm is known."""
        assert self._plan is not None
        return self._plan.route

    @property
    def refused_trailers(self) -> frozenset[bytes]:
        return self._router.refused_trailers

    def assign_by_head(self, seq: int) -> None:
        """Assign request `seq` and change its head, if the head is sufficient; otherwise hold the body."""
        e, head = self._router.experiment, self.head
        unit = None
        if e.unit != "request":
            unit = named_unit(
                head.headers, e.tenant_headers if e.unit == "tenant" else e.conversation_headers
            )
        hindrance = _unchangeable_reason(head, e.body_bytes)
        if unit is None and e.unit == "conversation" and hindrance is None:
            self.holds = True
            return
        plan = self._assign(unit, seq)
        if plan.body:
            self.excluded = hindrance
            self.holds = hindrance is None
        if plan.headers and not self.holds:
            set_fields(head, plan.headers)

    def settle(self, held: bytes, seq: int, *, complete: bool) -> bytes | None:
        """Return the body to send in place of the held one, and change `head` for it; None: read more of the
        body first."""
        router, head = self._router, self.head
        body, hindrance = b"", None
        if complete:
            body, hindrance = _whole_body(head, held)
        elif len(held) > router.experiment.body_bytes:
            hindrance = "too_long"
        elif not self._lost_room and router.take_room(self, len(held) - self._held):
            self._held = len(held)
            return None
        else:
            hindrance = NO_ROOM
        self.holds = False
        plan = self._plan
        if hindrance == NO_ROOM:
            plan = self._plan = router.control
            self._unit = router.unit_of(None, seq)[1]
            self.excluded = NO_ROOM
            self._clean(plan)
        elif plan is None:
            unit = None
            if hindrance is None:
                sender = named_unit(head.headers, router.experiment.tenant_headers)
                unit = opening_unit(body, sender or b"")
            plan = self._assign(unit, seq)
        if plan.headers:
            set_fields(head, plan.headers)
        elif plan.body:
            changed = body_with(body, plan.body) if hindrance is None else None
            if changed is not None:
                head.headers = headers_with_length(head.headers, len(changed))
                return changed
            self.excluded = hindrance or "not_json"
        return held

    def _assign(self, unit: bytes | None, seq: int) -> _Plan:
        """Assign a unit, or request `seq` by itself."""
        router = self._router
        place, self._unit = router.unit_of(unit, seq)
        self._plan = plan = router.plans[place]
        single = unit is None and router.experiment.unit != "request"
        own_headers = self._clean(plan)
        self.note = _encode(Assigned(arm=plan.name, unit=self._unit, single=single, own_headers=own_headers))
        return plan

    def _clean(self, plan: _Plan) -> bool:
        """Return whether the client itself sent a header field of another arm; remove it if configured."""
        if not plan.foreign_fields:
            return False
        headers = [field for field in self.head.headers if spelling_key(field[0]) not in plan.foreign_fields]
        if len(headers) == len(self.head.headers):
            return False
        if self._router.experiment.strip_headers:
            self.head.headers = headers
        else:
            self._own_header = True
        return True

    def give_room(self) -> None:
        """Release the memory of the held body, which is sent or dropped."""
        if self._held:
            self._router.give_room(self, self._held)
            self._held = 0

    def lose_room(self) -> None:
        """Give up the room for another body."""
        self.give_room()
        self._lost_room = True
        if self.on_room_lost is not None:
            self.on_room_lost()

    def add_to_closing(self, closing: Closing) -> None:
        """Add the assignment, if there is one, to the last frame of the exchange."""
        if self._plan is not None:
            closing.arm = self._plan.name
            closing.unit = self._unit
            closing.excluded = self.excluded
            if self.excluded is None:
                closing.route = self._plan.change_text
                closing.excluded = OWN_HEADER if self._own_header else None


class ExperimentRouter:
    """The experiment in one relay: which request gets which arm.

    `routes`: route of each arm with an upstream of its own. `on_shortage` is called for a body that finds no
    room.
    `room`: bytes left for held bodies.
    """

    def __init__(
        self,
        experiment: Experiment,
        relay: str,
        default: Route,
        routes: Mapping[str, Route],
        on_shortage: Callable[[], None],
    ) -> None:
        assert experiment.key is not None
        self.experiment = experiment
        self.is_on = False
        self.room = Budget(experiment.held_bytes, on_shortage)
        self._on_shortage = on_shortage
        self._holders: dict[Assignment, None] = {}  # assignments that take room, the oldest first
        self._over = False
        self._relay = relay
        stages = [experiment.at_stage(i) for i in range(max(1, len(experiment.stages)))]
        self._assigners = [
            Assigner(experiment.key, experiment.name, [arm.weight for arm in stage.arms]) for stage in stages
        ]
        self.stage = 0
        """Stage of the schedule, whose shares apply from the next request on."""
        self.plans: list[_Plan] = []
        for arm in experiment.arms:
            if experiment.aa:
                self.plans.append(_Plan(arm.name, None, default))
                continue
            fields = [(n.encode(), v.encode("latin-1")) for n, v in arm.headers.items()]
            body = {name: msgspec.Raw(_encode(value)) for name, value in arm.body.items()}
            self.plans.append(_Plan(arm.name, arm.route, routes.get(arm.name, default), fields, body))
        set_by_arms = {spelling_key(name) for plan in self.plans for name, _ in plan.headers}
        for plan in self.plans:
            plan.foreign_fields = frozenset(set_by_arms - {spelling_key(name) for name, _ in plan.headers})
        self.control = next(plan for plan in self.plans if plan.name == experiment.control)
        self.refused_trailers = NO_TRAILERS | set_by_arms
        """Fields that no request of the experiment may have as trailers, whatever its arm: a recipient that
        merged trailers into the head would not read the arm's value."""

    def switch(self, is_on: bool) -> bool:
        """Start or stop assigning requests, from the next one on. After the end of the experiment, no request
        is assigned. Return `is_on`."""
        self._over = self._over or self.experiment.has_ended(wall_ns())
        self.is_on = is_on and not self._over
        return self.is_on

    def assign(self, head: RequestHead, seq: int) -> Assignment | None:
        """Return the assignment of request `seq`; None if it does not take part in the experiment."""
        if not self.is_on or (head.method != b"POST" and (head.upgrade or b"").lower() != b"websocket"):
            return None
        if not self.switch(True):  # the experiment has reached its end
            return None
        assignment = Assignment(self, head)
        assignment.assign_by_head(seq)
        return assignment

    def take_room(self, assignment: Assignment, n: int) -> bool:
        """Take memory for `n` more bytes of a held body. If there is not enough, older holders lose theirs,
        the oldest first. Return False if it still is not enough."""
        while n > self.room.free_bytes:
            oldest = next(iter(self._holders), assignment)
            if oldest is assignment:
                break
            self._on_shortage()
            oldest.lose_room()
        if not self.room.take(n):
            return False
        self._holders[assignment] = None
        return True

    def give_room(self, assignment: Assignment, n: int) -> None:
        del self._holders[assignment]
        self.room.give(n)

    def unit_of(self, unit: bytes | None, seq: int) -> tuple[int, str]:
        """Return the arm's place, and the public id, of a unit, or of request `seq` by itself."""
        return self._assigners[self.stage].assign(request_unit(self._relay, seq) if unit is None else unit)


def _unchangeable_reason(head: RequestHead, bytes_max: int) -> str | None:
    """Return the reason why the body of this request cannot be read or changed, if the head shows such a
    reason."""
    if head.framing is Framing.NONE:
        return "no_body"
    if head.framing is Framing.LENGTH and head.length > bytes_max:
        return "too_long"
    if head.expects_continue:
        return "expect_continue"  # the client would wait for a 100 while the request is held: a deadlock
    for name, _ in head.headers:
        lower = name.lower()
        if lower == b"content-encoding":
            return "encoded"
        if lower in _DIGESTS:
            return "digest"
    return None


def _whole_body(head: RequestHead, held: bytes) -> tuple[bytes, str | None]:
    """Return the body without its framing, or the reason why there is none."""
    if head.framing is not Framing.CHUNKED:
        return held, None
    if not held.endswith(_LAST_CHUNK):
        return b"", "trailers"
    pieces: list[bytes] = []
    ChunkedScanner().feed(held, pieces)
    return b"".join(pieces), None


# ---------------------------------------------------------------- units


class _Body(msgspec.Struct):
    """Fields in which the known dialects keep a conversation, as raw JSON."""

    messages: list[msgspec.Raw] = []
    system: msgspec.Raw = _ABSENT
    """System prompt in Anthropic Messages."""
    instructions: msgspec.Raw = _ABSENT
    """System prompt in OpenAI Responses, which has the conversation in the next field."""
    input: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT


class _Message(msgspec.Struct):
    role: Any = None
    content: msgspec.Raw = _ABSENT


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def named_unit(headers: Headers, names: Sequence[str]) -> bytes | None:
    """Return name and value of the first of these fields (lower case) that the request has, or None. A field
    whose lines differ is skipped.

    A unit is bytes that go into a keyed hash and nowhere else.
    """
    for name in names:
        value = sole_value(headers, name.encode())
        if value:
            return name.encode() + b"\0" + value
    return None


def opening_unit(body: bytes, sender: bytes) -> bytes | None:
    """Return the opening of the conversation in this JSON body, or None if it has none.

    It is the sender, the system prompt and the first message of the user, which later requests repeat.
    """
    try:
        request = _decode_body(body)
        messages = request.messages
        if not messages and bytes(request.input).lstrip().startswith(b"["):
            messages = _decode_items(request.input)
        parts = [sender, bytes(request.system), bytes(request.instructions)]
        if not messages:
            opening = bytes(request.input) or bytes(request.prompt)
            return None if opening in _EMPTY_VALUES else b"\0".join([*parts, opening])
        for raw in messages:
            message = _decode_message(raw)
            parts.append(bytes(message.content))
            if message.role == "user":
                return b"\0".join(parts)
    except (ValueError, RecursionError):
        pass
    return None


# ---------------------------------------------------------------- changes


def set_fields(head: RequestHead, fields: Headers) -> None:
    """Set these header fields: each replaces all fields of its name, also those spelt with `_`, and is put at
    the end.

    A client cannot remove one by naming it in Connection: that removes only the client's own fields, earlier.
    """
    names = {spelling_key(name) for name, _ in fields}
    head.headers = [(n, v) for n, v in head.headers if spelling_key(n) not in names] + fields


def headers_with_length(headers: Headers, length: int) -> Headers:
    """Return the headers of a message whose body has become `length` bytes in one piece.

    RFC 9112 6.2: Content-Length replaces the field that framed the body before. A Trailer field is removed,
    because no trailers follow.
    """
    out: Headers = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length":
            out.append((name, b"%d" % length))
        elif lower == b"transfer-encoding":
            out.append((b"Content-Length", b"%d" % length))
        elif lower != b"trailer":
            out.append((name, value))
    return out


def body_with(body: bytes, fields: Mapping[str, msgspec.Raw]) -> bytes | None:
    """Return the JSON object in `body` with these fields set, or None if `body` is not a JSON object.

    Known fields keep their place, new ones follow; white space between top-level fields is lost, and of a
    field that came twice the last value counts, as for most readers (RFC 8259 4).
    """
    try:
        members = _decode_fields(body)
    except (ValueError, RecursionError):
        return None
    members.update(fields)
    return msgspec.json.encode(members)
