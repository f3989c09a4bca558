"""Experiments on the data plane: which arm a request gets, and what that changes on its way.

While no experiment runs, connections make plain Flows and nothing here is called. While one runs they make
ArmedFlows. These deal the request to an arm once, as soon as its unit is known: from the head where that is
enough, otherwise when the body is complete, which until then is held back, up to `body_bytes`. A request
without a conversation or tenant to be found is a unit of its own. Only POSTs and WebSockets take part: what
lists models or asks for health is no traffic of the model.

An arm's change that cannot be made (a compressed body, say) is not made; the request goes as it came, stays
in its arm, and says so: leaving it out would compare other requests than those that were dealt. Only a body
that finds no room (`held_bytes`) leaves the comparison: it goes the control arm's way, and is counted there.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from llmtap.channel.experiment import NO_ROOM, Assigner, Experiment, request_unit
from llmtap.channel.frames import Assigned, Closing, FrameKind
from llmtap.clock import SystemClock
from llmtap.exchange.bounds import Budget
from llmtap.protocol.http1 import (
    NO_TRAILERS,
    BodyScanner,
    ChunkedScanner,
    Framing,
    Headers,
    RequestHead,
    scanner_for,
)
from llmtap.vantage.relay.flow import Flow
from llmtap.vantage.relay.flow_http10 import FlowToHttp10
from llmtap.vantage.relay.heads import request_lines
from llmtap.vantage.relay.rewrite import body_with, headers_with_length, set_fields
from llmtap.vantage.relay.route import Route
from llmtap.vantage.relay.unit import named_unit, opening_unit

if TYPE_CHECKING:
    from llmtap.net.stream import Stream
    from llmtap.vantage.relay.connection import ClientConnection
    from llmtap.vantage.relay.relay import Relay

__all__ = ["ArmPlan", "ArmedFlow", "ArmedFlowToHttp10", "Assignment", "ExperimentRouter"]

NONE, LENGTH, CHUNKED, _ = Framing
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_DIGESTS: Final = frozenset(
    {b"content-digest", b"content-md5", b"digest", b"repr-digest", b"x-amz-content-sha256"}
)
"""Fields that vouch for the body's bytes (RFC 9530 and its elders): with another body they would lie."""

_encode = msgspec.json.Encoder().encode
wall_ns = SystemClock.wall_ns


class ArmPlan:
    """What one arm does to a request."""

    __slots__ = ("body", "headers", "name", "route", "what")

    def __init__(
        self, name: str, what: str | None, route: Route, headers: Headers, body: dict[str, msgspec.Raw]
    ) -> None:
        self.name = name
        self.what = what
        """For the Exchange's `route`; None: nothing is changed."""
        self.route = route
        self.headers = headers
        self.body = body


class Assignment:
    """One request's place in the experiment."""

    __slots__ = ("excluded", "plan", "unit")

    def __init__(self, plan: ArmPlan, unit: str, excluded: str | None = None) -> None:
        self.plan = plan
        self.unit = unit
        self.excluded = excluded

    def sign(self, closing: Closing) -> None:
        """Put it into the exchange's last frame."""
        closing.arm = self.plan.name
        closing.unit = self.unit
        closing.excluded = self.excluded
        if self.excluded is None:
            closing.route = self.plan.what


class ExperimentRouter:
    """The experiment in one relay: who gets which arm.

    Args:
        routes: by arm's name, where it goes when it has an upstream of its own.
        short: called for each body that finds no room among the held ones.

    Attributes:
        room: what all held bodies may take together.
    """

    def __init__(
        self,
        experiment: Experiment,
        relay: str,
        default: Route,
        routes: dict[str, Route],
        short: Callable[[], None],
    ) -> None:
        self.experiment = experiment
        self.room = Budget(experiment.held_bytes, short)
        self._relay = relay
        arms = experiment.arms
        self._assigner = Assigner(experiment.key, experiment.name, [arm.weight for arm in arms])
        self._plans: list[ArmPlan] = []
        for arm in arms:
            if experiment.aa:
                self._plans.append(ArmPlan(arm.name, None, default, [], {}))
                continue
            fields = [(n.encode(), v.encode("latin-1")) for n, v in arm.headers.items()]
            body = {name: msgspec.Raw(_encode(value)) for name, value in arm.body.items()}
            self._plans.append(ArmPlan(arm.name, arm.route, routes.get(arm.name, default), fields, body))
        self._control = next(plan for plan in self._plans if plan.name == experiment.control)
        self.refused_trailers = NO_TRAILERS | {n.lower() for plan in self._plans for n, _ in plan.headers}
        """Fields that no request of the experiment may have as trailers, whatever its arm: a recipient that
        merged trailers into the head would not read the arm's value."""
        self.over = False
        """Its end has come; what was on is off for good."""

    def running(self) -> bool:
        """False from its end on."""
        if not self.over and self.experiment.over(wall_ns()):
            self.over = True
        return not self.over

    def unit_of_head(self, head: RequestHead) -> bytes | None:
        """The unit that the head names, or None where it names none."""
        e = self.experiment
        if e.unit == "request":
            return None
        return named_unit(head.headers, e.tenant_headers if e.unit == "tenant" else e.conversation_headers)

    def unit_of_body(self, head: RequestHead, body: bytes) -> bytes | None:
        """The conversation that the body continues, or None where there is no telling."""
        return opening_unit(body, named_unit(head.headers, self.experiment.tenant_headers) or b"")

    def deal(self, unit: bytes | None, seq: int) -> tuple[Assignment, bytes]:
        """The arm of a unit, or of request `seq` by itself, and the frame's data that tells of it."""
        place, public = self._assigner.assign(request_unit(self._relay, seq) if unit is None else unit)
        plan = self._plans[place]
        single = unit is None and self.experiment.unit != "request"
        return Assignment(plan, public), _encode(Assigned(arm=plan.name, unit=public, single=single))

    def leave_out(self, seq: int) -> Assignment:
        """Return the control arm for request `seq`, which is excluded for want of room."""
        _, public = self._assigner.assign(request_unit(self._relay, seq))
        return Assignment(self._control, public, NO_ROOM)


class _Armed(Flow):
    """What a Flow does more while an experiment runs. The two below put it before each kind of Flow."""

    __slots__ = ()

    def start(self, head: RequestHead, data: bytes, head_end: int, arrival_ns: int, t_ns: int) -> bytes:
        relay = self._relay
        split = relay.split
        assert split is not None
        if head.method != b"POST" and (head.upgrade or b"").lower() != b"websocket":
            return super().start(head, data, head_end, arrival_ns, t_ns)
        if not split.running():
            relay.switch_experiment(False)
            return super().start(head, data, head_end, arrival_ns, t_ns)
        unit = split.unit_of_head(head)
        hindrance = _hindrance(head, split.experiment.body_bytes)
        if unit is None and split.experiment.unit == "conversation" and hindrance is None:
            return self._hold(head, data, head_end, arrival_ns, t_ns)
        self._dealt, self._note = split.deal(unit, self._tap.ledger.opened + 1)
        plan = self._dealt.plan
        self._route = plan.route
        if plan.body:
            if hindrance is None:
                return self._hold(head, data, head_end, arrival_ns, t_ns)
            self._dealt.excluded = hindrance
        if plan.headers:
            set_fields(head, plan.headers)
        return super().start(head, data, head_end, arrival_ns, t_ns)

    def _scanner_of(self, head: RequestHead) -> BodyScanner:
        split = self._relay.split
        assert split is not None
        if self._dealt is None and self._withheld is None:
            return super()._scanner_of(head)  # no part of the experiment
        return scanner_for(head.framing, head.length, refused_trailers=split.refused_trailers)

    def _hold(self, head: RequestHead, data: bytes, head_end: int, arrival_ns: int, t_ns: int) -> bytes:
        """Keep the request back until it has been read to its end, or far enough."""
        self._withheld = head
        self._method = head.method
        self._keep_client = head.keep_alive
        self.arrival_ns = arrival_ns
        self.last_ns = t_ns
        self._relay.flows.add(self)
        self.seq, self.tapped = self._tap.open(arrival_ns, data[:head_end], arm=self._note)
        self.request_bytes = head_end
        self._request_scanner = self._scanner_of(head)
        if len(data) == head_end:
            return b""
        self._held, rest = self._scan_request(data[head_end:], t_ns)
        if self.over:
            return b""
        self._release()
        return rest

    def request_data(self, data: bytes, t_ns: int) -> bytes:
        rest = super().request_data(data, t_ns)
        if self._withheld is not None and not self.over:
            self._release()
        return rest

    def _release(self) -> None:
        """Deal the held request, once enough of it is there or no room is left, and send it on."""
        head, held, split = self._withheld, self._held, self._relay.split
        assert head is not None and split is not None
        body, hindrance = b"", None
        if self._request_end_ns:
            body, hindrance = _whole_body(head, held)
        elif len(held) > split.experiment.body_bytes:
            hindrance = "too_long"
        elif self._take_room(split, len(held)):
            return
        else:
            hindrance = NO_ROOM
        self._withheld, self._held = None, b""
        dealt = self._dealt
        if hindrance == NO_ROOM:
            self._dealt = dealt = split.leave_out(self.seq)
        elif dealt is None:
            unit = split.unit_of_body(head, body) if hindrance is None else None
            dealt, note = split.deal(unit, self.seq)
            self._dealt = dealt
            if self.tapped:
                self.tapped = self._tap.offer(FrameKind.ARM, self.seq, self.last_ns, 0, note)
        plan = dealt.plan
        if plan.headers:
            set_fields(head, plan.headers)
        elif plan.body:
            changed = body_with(body, plan.body) if hindrance is None else None
            if changed is not None:
                head.headers = headers_with_length(head.headers, len(changed))
                held = changed
            else:
                dealt.excluded = hindrance or "not_json"
        self._route = route = plan.route
        lines = request_lines(
            head,
            prefix=route.origin.prefix,
            authority=route.authority,
            upgrade=False,
            extra=self._extra_fields(head) if self._relay.adds_fields else [],
        )
        self._upstream = route.pool.take(self)
        self._reused = self._upstream is not None
        if self._reused:
            self._send_up(lines + held)
        else:
            self._connect_for(lines + held)

    # Room is given back once the upstream's socket has taken the body, or the exchange is over.

    def _take_room(self, split: ExperimentRouter, held: int) -> bool:
        """Take room for a body of which `held` bytes are here; False: there is none."""
        if not split.room.take(held - self._room):
            return False
        self._room = held
        return True

    def _give_room(self) -> None:
        if self._room:
            assert self._relay.split is not None
            self._relay.split.room.give(self._room)
            self._room = 0

    def _send_up(self, data: bytes) -> None:
        super()._send_up(data)
        if self._upstream is not None and not self._upstream.pending:
            self._give_room()

    def on_drained(self) -> None:
        super().on_drained()
        self._give_room()

    def _finish(self, *, cut: bool = False) -> None:
        self._give_room()
        super()._finish(cut=cut)


class ArmedFlow(_Armed):
    """A Flow that takes part in an experiment."""

    __slots__ = ()

    def __init__(self, relay: "Relay", client: "ClientConnection", stream: "Stream") -> None:
        super().__init__(relay, client, stream)
        self._withheld = None
        self._room = 0


class ArmedFlowToHttp10(_Armed, FlowToHttp10):
    """The same for a client that speaks HTTP/1.0."""

    __slots__ = ()

    def __init__(self, relay: "Relay", client: "ClientConnection", stream: "Stream") -> None:
        super().__init__(relay, client, stream)
        self._withheld = None
        self._room = 0


def _hindrance(head: RequestHead, bytes_max: int) -> str | None:
    """Why this request's body can be neither read nor changed, as far as its head tells; None: it can."""
    if head.framing is NONE:
        return "no_body"
    if head.framing is LENGTH and head.length > bytes_max:
        return "too_long"
    if head.expects_continue:
        return "expect_continue"  # held back, it would wait for the upstream's word for ever
    for name, _ in head.headers:
        lower = name.lower()
        if lower == b"content-encoding":
            return "encoded"
        if lower in _DIGESTS:
            return "digest"
    return None


def _whole_body(head: RequestHead, held: bytes) -> tuple[bytes, str | None]:
    """The body without its framing, or what hinders."""
    if head.framing is not CHUNKED:
        return held, None
    if not held.endswith(_LAST_CHUNK):
        return b"", "trailers"
    pieces: list[bytes] = []
    ChunkedScanner().feed(held, pieces)
    return b"".join(pieces), None
