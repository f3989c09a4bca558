"""Assign requests to the arms of an experiment, and make the changes of each arm.

A POST or WebSocket is assigned as soon as its unit (request, conversation or tenant) is known: from the head,
or from the complete body, which is held back up to `body_bytes`. A request without a conversation or tenant
is a unit of its own.

A request that cannot be changed, such as one with a compressed body, is forwarded unmodified, stays in its
arm and is marked as excluded. When held bodies need more memory than `held_bytes`, the request that has been
held the longest goes to the control arm, so that unfinished bodies do not block later requests. No other
module changes the body of a request.
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
"""Header fields with a digest of the body (RFC 9530 and its predecessors). Such a body is not changed."""
_ABSENT: Final = msgspec.Raw()  # value of a field that a JSON body does not have
_EMPTY_VALUES: Final = frozenset({b"", b'""', b"[]", b"null"})  # JSON values that begin no conversation

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
    """Assignment of one request to an arm."""

    __slots__ = (
        "_client_set_field",
        "_held_bytes",
        "_lost_memory",
        "_plan",
        "_router",
        "_unit",
        "arm_data",
        "excluded",
        "head",
        "holds_body",
        "on_memory_lost",
    )

    def __init__(self, router: "ExperimentRouter", head: RequestHead) -> None:
        self._router = router
        self._lost_memory = False
        """Whether the held body was given up to make room for later requests."""
        self._client_set_field = False  # whether the client sent a header field of another arm
        self.on_memory_lost: Callable[[], None] | None = None
        """Called when another body takes the memory of this one; it must call `settle`."""
        self.head = head
        """Request head, with the changes of the arm."""
        self._plan: _Plan | None = None
        """Changes of the assigned arm; None while the arm is unknown."""
        self._unit = ""
        """Identifier of the request's conversation or tenant."""
        self._held_bytes = 0
        """Size of the body that waits for its end."""
        self.excluded: str | None = None
        """Reason for the exclusion from the experiment's result; None: not excluded."""
        self.holds_body = False
        """Whether the body must be read before the request is sent (`settle`)."""
        self.arm_data: bytes | None = None
        """Content of the ARM frame that reports the arm to the meter; None while it is unknown."""

    @property
    def route(self) -> Route:
        """Route of the request, once its arm is known."""
        assert self._plan is not None
        return self._plan.route

    @property
    def refused_trailers(self) -> frozenset[bytes]:
        return self._router.refused_trailers

    def assign_by_head(self, seq: int) -> None:
        """Assign request `seq` and change its head, if the head suffices; otherwise, hold the body for it."""
        experiment, head = self._router.experiment, self.head
        unit = None
        if experiment.unit == "tenant":
            unit = named_unit(head.headers, experiment.tenant_headers)
        elif experiment.unit == "conversation":
            unit = named_unit(head.headers, experiment.conversation_headers)
        hindrance = _unchangeable_reason(head, experiment.body_bytes)
        if unit is None and experiment.unit == "conversation" and hindrance is None:
            self.holds_body = True
            return
        plan = self._assign(unit, seq)
        if plan.body:
            self.excluded = hindrance
            self.holds_body = hindrance is None
        if plan.headers and not self.holds_body:
            set_fields(head, plan.headers)

    def settle(self, held: bytes, seq: int, *, complete: bool) -> bytes | None:
        """Return the body to send in place of `held`, the bytes read so far, and change `head` for it. Return
        None if more of the body must be read first."""
        router, head = self._router, self.head
        body, hindrance = b"", None
        if complete:
            body, hindrance = _whole_body(head, held)
        elif len(held) > router.experiment.body_bytes:
            hindrance = "too_long"
        elif not self._lost_memory and router.take_memory(self, len(held) - self._held_bytes):
            self._held_bytes = len(held)
            return None
        else:
            hindrance = NO_ROOM
        self.holds_body = False
        plan = self._plan
        if hindrance == NO_ROOM:
            plan = self._plan = router.control
            self._unit = router.unit_of(None, seq)[1]
            self.excluded = NO_ROOM
            self._remove_foreign_fields(plan)
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
        """Assign a unit to its arm, and return the changes. `unit` None: request `seq` is its own unit."""
        router = self._router
        index, self._unit = router.unit_of(unit, seq)
        self._plan = plan = router.plans[index]
        single = unit is None and router.experiment.unit != "request"
        own_headers = self._remove_foreign_fields(plan)
        assigned = Assigned(arm=plan.name, unit=self._unit, single=single, own_headers=own_headers)
        self.arm_data = _encode(assigned)
        return plan

    def _remove_foreign_fields(self, plan: _Plan) -> bool:
        """Return whether the client sent a header field that only other arms set. If the option
        `strip_headers` is on, remove the field."""
        if not plan.foreign_fields:
            return False
        headers = [field for field in self.head.headers if spelling_key(field[0]) not in plan.foreign_fields]
        if len(headers) == len(self.head.headers):
            return False
        if self._router.experiment.strip_headers:
            self.head.headers = headers
        else:
            self._client_set_field = True
        return True

    def release_memory(self) -> None:
        """Release the memory of the held body, because it is sent or dropped now."""
        if self._held_bytes:
            self._router.release_memory(self, self._held_bytes)
            self._held_bytes = 0

    def lose_memory(self) -> None:
        """Release the memory of the held body, because another body needs it."""
        self.release_memory()
        self._lost_memory = True
        if self.on_memory_lost is not None:
            self.on_memory_lost()

    def add_to_closing(self, closing: Closing) -> None:
        """Add the assignment, if there is one, to `closing`, the data of the exchange's CLOSE frame."""
        if self._plan is not None:
            closing.arm = self._plan.name
            closing.unit = self._unit
            closing.excluded = self.excluded
            if self.excluded is None:
                closing.route = self._plan.change_text
                closing.excluded = OWN_HEADER if self._client_set_field else None


class ExperimentRouter:
    """Assignment of the requests of one relay to the arms of an experiment.

    Args:
        default: route of the arms without an upstream of their own.
        routes: route of each arm with an upstream of its own.
        on_shortage: called for each held body that gets no memory, or loses its memory to another body.
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
        """Whether requests are assigned to arms now."""
        self.held_budget = Budget(experiment.held_bytes, on_shortage)
        """Memory limit of all held bodies together."""
        self._on_shortage = on_shortage
        """Called when a new request needs the memory of one that is held."""
        self._holders: dict[Assignment, None] = {}  # assignments with a held body, the oldest first
        self._has_ended = False
        """Whether the experiment's end time has passed."""
        self._relay = relay
        stages = [experiment.at_stage(i) for i in range(max(1, len(experiment.stages)))]
        self._assigners = [
            Assigner(experiment.key, experiment.name, [arm.weight for arm in stage.arms]) for stage in stages
        ]
        """For each stage of the experiment: assigns units to arms."""
        self.stage = 0
        """Index of the present stage of the schedule, whose shares apply to each new request."""
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
        """Arm that gets requests which are not assigned."""
        self.refused_trailers = NO_TRAILERS | set_by_arms
        """Fields that no request of the experiment can have as trailers, whatever its arm: a server that
        merges trailers into the head would use them in place of the arm's value."""

    def switch(self, is_on: bool) -> bool:
        """Start or stop assigning new requests. After the end of the experiment, none is assigned. Return
        whether requests are assigned now."""
        self._has_ended = self._has_ended or self.experiment.has_ended(wall_ns())
        self.is_on = is_on and not self._has_ended
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

    def take_memory(self, assignment: Assignment, n: int) -> bool:
        """Take memory for `n` more bytes of a held body. If too little is free, bodies that were held earlier
        lose their memory, the oldest first. Return False if this does not suffice."""
        while n > self.held_budget.free_bytes:
            oldest = next(iter(self._holders), assignment)
            if oldest is assignment:
                break  # no body was held earlier than this one, so none gives way
            self._on_shortage()
            oldest.lose_memory()
        if not self.held_budget.take(n):
            return False
        self._holders[assignment] = None
        return True

    def release_memory(self, assignment: Assignment, n: int) -> None:
        del self._holders[assignment]
        self.held_budget.give(n)

    def unit_of(self, unit: bytes | None, seq: int) -> tuple[int, str]:
        """Return the arm's index and the public id of a unit. `unit` None: request `seq` is its own unit."""
        return self._assigners[self.stage].assign(request_unit(self._relay, seq) if unit is None else unit)


def _unchangeable_reason(head: RequestHead, bytes_max: int) -> str | None:
    """Return the reason why the body cannot be read or changed, as far as the head shows it; else None."""
    if head.framing is Framing.NONE:
        return "no_body"
    if head.framing is Framing.LENGTH and head.length > bytes_max:
        return "too_long"
    if head.expects_continue:
        return "expect_continue"  # avoid a deadlock: the client waits for a 100, the relay for the body
    for name, _ in head.headers:
        lower = name.lower()
        if lower == b"content-encoding":
            return "encoded"
        if lower in _DIGESTS:
            return "digest"
    return None


def _whole_body(head: RequestHead, held: bytes) -> tuple[bytes, str | None]:
    """Return the body without its framing, and the reason why it cannot be read (then b"") or None."""
    if head.framing is not Framing.CHUNKED:
        return held, None
    if not held.endswith(_LAST_CHUNK):
        return b"", "trailers"
    pieces: list[bytes] = []
    ChunkedScanner().feed(held, pieces)
    return b"".join(pieces), None


# ---------------------------------------------------------------- units of assignment


class _Body(msgspec.Struct):
    """Fields of a request body in which the known dialects have the conversation, as raw JSON."""

    messages: list[msgspec.Raw] = []
    system: msgspec.Raw = _ABSENT
    """System prompt in Anthropic Messages."""
    instructions: msgspec.Raw = _ABSENT
    """System prompt in OpenAI Responses, which has the conversation in the next field."""
    input: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT


class _Message(msgspec.Struct):
    """A message of a conversation, as raw JSON."""

    role: Any = None
    content: msgspec.Raw = _ABSENT


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def named_unit(headers: Headers, names: Sequence[str]) -> bytes | None:
    """Return as unit the name and value of the first header field of `names` (lower case) that the request
    has; None if it has none of them. A field that occurs with several values is skipped.

    A unit can be a secret, such as an API key: it is used only as the input of a keyed hash.
    """
    for name in names:
        value = sole_value(headers, name.encode())
        if value:
            return name.encode() + b"\0" + value
    return None


def opening_unit(body: bytes, sender: bytes) -> bytes | None:
    """Return the unit of the conversation in this JSON body, or None if the body has no conversation.

    The unit is the opening of the conversation, which later requests of the conversation repeat: the sender,
    the system prompt, and all messages up to the first one of the user.
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


# ---------------------------------------------------------------- changes of heads and bodies


def set_fields(head: RequestHead, fields: Headers) -> None:
    """Add these header fields at the end. Each replaces all fields with its name, also those that are spelt
    with `_` in place of `-`.

    A client cannot remove such a field by naming it in Connection: the fields that Connection names have been
    removed before.
    """
    names = {spelling_key(name) for name, _ in fields}
    head.headers = [(n, v) for n, v in head.headers if spelling_key(n) not in names] + fields


def headers_with_length(headers: Headers, length: int) -> Headers:
    """Return the header fields of a message after its body was replaced by `length` bytes without chunks.

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

    Existing fields keep their place, and new ones follow. White space between top-level fields is lost. If a
    field occurs twice, its last value counts, as in most parsers (RFC 8259 4).
    """
    try:
        members = _decode_fields(body)
    except (ValueError, RecursionError):
        return None
    members.update(fields)
    return msgspec.json.encode(members)
