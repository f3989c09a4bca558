"""Rebuild Exchanges from the frames of one relay, with one Observer for each open exchange (`Assembler`).

`receiver.py` (or `meter/process.py`) calls `work` with each batch of frames; opened and finished exchanges go
to a `Sink`, the pipeline. Long frames are processed in slices, between which the event loop gets a turn. An
exchange whose frames cause an error is discarded and counted; the others continue. Exchanges that were open
when a relay died end as `tap_error`, with the data received until then.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol

import msgspec

from llmtap.channel.frames import Anchored, Assigned, Closing, Frame, FrameKind, Hello, PythonFrameBatch
from llmtap.channel.status import RelayStatus
from llmtap.counts import RELAY
from llmtap.exchange.bounds import bounded
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome
from llmtap.exchange.session import SESSION_ENDPOINTS, Session
from llmtap.meter.pipeline.cooperative_yield import CooperativeYield
from llmtap.meter.relays import DEATHS, Reckoning
from llmtap.net.lag import make_lag_meter

# Kinds of frames as plain ints: comparing with an IntEnum's member takes ten times as long, for every frame.
_K: Final = FrameKind
_OPEN, _REQUEST_DATA, _REQUEST_END, _SUBMIT, _RESPONSE_HEAD, _RESPONSE_DATA, _RESPONSE_END = map(
    int,
    (
        _K.OPEN,
        _K.REQUEST_DATA,
        _K.REQUEST_END,
        _K.SUBMIT,
        _K.RESPONSE_HEAD,
        _K.RESPONSE_DATA,
        _K.RESPONSE_END,
    ),
)
_UPGRADED, _TUNNEL_UP, _TUNNEL_DOWN, _CLOSE, _DROP, _STATUS, _ANSWER, _SENT, _ARM, _ANCHOR, _HELD = map(
    int,
    (
        _K.UPGRADED,
        _K.TUNNEL_UP,
        _K.TUNNEL_DOWN,
        _K.CLOSE,
        _K.DROP,
        _K.STATUS,
        _K.ANSWER,
        _K.SENT,
        _K.ARM,
        _K.ANCHOR,
        _K.HELD,
    ),
)
_RESPONSE_AT_ONCE: Final = int(_K.RESPONSE_AT_ONCE)
_BODY: Final = (_RESPONSE_DATA, _RESPONSE_AT_ONCE)
_LAST: Final = (_CLOSE, _DROP)
_SLICED: Final = (_ANSWER, _TUNNEL_UP, _TUNNEL_DOWN)
_END: Final = object()

ANCHORS_MAX: Final = 4
"""Maximum number of clock anchors kept. A request needs an older one if the wall clock was set while its head
was received."""
LAG_FLOOR_NS: Final = 11_000_000
"""Minimum uncertainty of an exchange whose relay died without reporting its lag: relays check their lag every
10 ms with a timer whose resolution is 1 ms, so a smaller lag is possibly not noticed."""
CPU_FREE_NS: Final = 5_000_000
"""CPU time that is not charged to an exchange at each reading of the clock, because the measured time can
include other frames."""
CPU_PER_BYTE_NS: Final = 1_000
"""CPU time per byte of a frame that is not charged to its exchange. Token streams take 20 to 250 ns."""
CPU_MAX_NS: Final = 1_000_000_000
"""If parsing an exchange takes more CPU time than this, and more than CPU_SHARE of its duration, the rest of
its response is not parsed."""
CPU_SHARE: Final = 1 / 50
"""Maximum share of CPU time in the duration of an exchange. CPU_MAX_NS alone would be too little for an
exchange of hours, which is also charged with garbage collections."""
_TUNNEL_SLICE_BYTES: Final = 1 << 10
"""Bytes of a tunnel that are processed at once. It is small: decompressed, it can be 250 times as many."""
_TOO_COSTLY: Final = "its parsing took too much CPU time"

_closing_decoder: Final = msgspec.json.Decoder(Closing)
_anchor_decoder: Final = msgspec.json.Decoder(Anchored)
_assignment_decoder: Final = msgspec.json.Decoder(Assigned)
_status_decoder: Final = msgspec.json.Decoder(RelayStatus)


class Sink(Protocol):
    """Receiver of the exchanges and events of one relay."""

    def observe(
        self, relay: str, seq: int, arrival_ns: int, arrival_wall_ns: int, head: bytes, clock: str
    ) -> Observer:
        """Return the builder of a new exchange."""
        ...

    def on_open(self) -> None:
        """Count a new exchange."""
        ...

    def on_discard(self, n: int = 1) -> None:
        """Count exchanges that were opened but will not be measured."""
        ...

    def on_end(self, x: Exchange) -> None:
        """Take an ended exchange."""
        ...

    def on_assignment(self, arm: Assigned) -> None:
        """Count a request that was assigned to an arm of the experiment."""
        ...

    def on_status(self, relay: str, status: RelayStatus) -> None:
        """Take the counts that a relay reports regularly."""
        ...

    def on_error(self, kind: str, error: BaseException | str) -> None:
        """Count and log an error of the meter itself."""
        ...


class _Anchor(NamedTuple):
    """Readings of both clocks at one moment, valid for times after `since_ns`. `steps`: how often the wall
    clock was set before."""

    mono_ns: int
    wall_ns: int
    since_ns: int
    """Monotonic time from which the two readings can be compared."""
    steps: int
    """How often the wall clock was set before."""


class Assembler:
    """Builds the exchanges of one relay connection from its frames, and passes complete ones to the sink."""

    def __init__(self, hello: Hello, sink: Sink) -> None:
        self._hello = hello
        self._sink = sink
        self._open_exchanges: dict[int, Observer] = {}
        """By number in the relay: builder of an exchange."""
        first = _Anchor(hello.anchor_mono_ns, hello.anchor_wall_ns, 0, hello.anchor_steps)
        self._anchors = deque([first], ANCHORS_MAX)
        """Latest readings of both clocks, to convert monotonic times of frames to wall time."""
        self._steps: dict[int, int] = {}
        """By exchange: number of clock steps (`Exchange.anchor`), if it is not that of the first anchor."""
        self._cpu_ns: dict[int, int] = {}
        """By open exchange: CPU time above the allowance for its bytes (CPU_PER_BYTE_NS)."""
        self._arms: dict[int, Assigned] = {}
        """By open exchange: the arm of the experiment that the relay assigned."""
        self._heads: dict[int, bytes] = {}
        """By open exchange: head of its request, which an upgrade to a WebSocket session needs."""
        self._sessions: dict[int, Session] = {}
        """By exchange that was upgraded: session in its tunnel, whose answers are exchanges of their own."""
        self._lag = make_lag_meter(LAG_FLOOR_NS)
        """Largest delays of the relay's event loop lately; they bound the uncertainty of timestamps."""
        self.reckoning = Reckoning()
        """Number of requests that the relay has opened and dropped, in case it dies without a last status."""

    def __len__(self) -> int:
        """Number of open exchanges, including tunnels and the responses in them."""
        return len(self._open_exchanges) + sum(len(session.observers) for session in self._sessions.values())

    def running_exchanges(self) -> list[tuple[Observer, str | None]]:
        """Return the observers of open exchanges, newest first, each with its arm."""
        arms, sessions = {seq: a.arm for seq, a in self._arms.items()}, self._sessions
        running: list[tuple[Observer, str | None]] = []
        for seq, observer in reversed(self._open_exchanges.items()):
            session = sessions.get(seq)
            own = [observer] if session is None or not session.began else reversed(session.observers)
            running += [(open_one, arms.get(seq)) for open_one in own]
        return running

    def unrecognised(self, frames: PythonFrameBatch) -> Iterator[Frame]:
        """Return the frames of a batch for `digest`, without token events that compiled code processed."""
        return frames.unrecognised(self._open_exchanges)

    def digest(self, frames: Iterable[Frame]) -> None:
        """Process the frames of a batch, in order, without interruption."""
        for _ in self.work(frames):
            pass

    def work(self, frames: Iterable[Frame], turns: "CooperativeYield | None" = None) -> Iterator[None]:
        """Process the frames of a batch, in order. Never raises for their content.

        Yields when `turns` reports that the event loop must run; `turns` also measures the CPU time of
        slices. Until the iterator ends, no other frames of this relay may be processed.
        """
        live = self._open_exchanges
        for frame in frames:
            if turns is not None and turns.loop_is_due:
                yield
            kind, seq, t_ns, extra_ns, data = frame
            try:
                if kind in _BODY:
                    # Ignore frames of an exchange that was discarded, here and below.
                    observer = live.get(seq)
                    if observer is not None:
                        slices = observer.response_slices(
                            data, t_ns, extra_ns, at_once=kind == _RESPONSE_AT_ONCE
                        )
                        if slices:
                            yield from self._slice(slices, frame, turns)
                elif kind == _OPEN:
                    self._open_exchange(seq, t_ns, extra_ns, data)
                elif kind == _SENT:
                    self._open_exchange(seq, t_ns, t_ns, data)
                    live[seq].on_submit(extra_ns, extra_ns - t_ns)
                elif kind == _STATUS:
                    self._take_status(_status_decoder.decode(data))
                else:
                    if kind in _LAST:
                        self.reckoning.count_settled(dropped=kind == _DROP)
                    if kind in _SLICED and seq in live:
                        yield from self._slice(self._read_sliced(live[seq], frame), frame, turns)
                    elif seq in live:
                        self._pass_to_observer(live[seq], kind, seq, t_ns, extra_ns, data)
                    elif kind == _ANCHOR:
                        self._set_anchor(t_ns, extra_ns, _anchor_decoder.decode(data))
            except Exception as error:  # an error must not affect other exchanges
                self._sink.on_error(type(error).__name__, error)
                self._forget(seq)

    def _slice(
        self, slices: Iterable[None], frame: Frame, turns: "CooperativeYield | None"
    ) -> Iterator[None]:
        """Process a frame slice by slice, and charge its exchange with the CPU time of the slices."""
        if turns is None:
            for _ in slices:
                pass
            return
        allowed_ns, used_ns, charged_ns = CPU_PER_BYTE_NS * len(frame[4]), 0, 0
        steps, done = iter(slices), False
        while not done:
            since_ns = turns.cpu_ns()
            done = next(steps, _END) is _END
            used_ns += turns.cpu_ns() - since_ns
            if used_ns > allowed_ns + charged_ns:
                self._charge_cpu_time(frame, used_ns - allowed_ns - charged_ns)
                charged_ns = used_ns - allowed_ns
            turns.pause()
            if turns.loop_is_due:
                yield
        turns.restart()

    def charge(self, frame: Frame, cpu_ns: int) -> None:
        """Charge a frame's exchange with CPU time, and stop parsing its response if it used too much.

        No input should take more than linear time; this limits the damage if one does.
        """
        self._charge_cpu_time(frame, cpu_ns - CPU_FREE_NS - CPU_PER_BYTE_NS * len(frame[4]))

    def _charge_cpu_time(self, frame: Frame, over_ns: int) -> None:
        """Add CPU time to an exchange, and no longer parse an exchange that takes too much."""
        _, seq, t_ns, _, _ = frame
        observer = self._open_exchanges.get(seq)
        if over_ns <= 0 or observer is None:
            return
        used_ns = self._cpu_ns[seq] = self._cpu_ns.get(seq, 0) + over_ns
        lasted_ns = max(0, t_ns - observer.exchange.timeline.arrival_ns)
        if used_ns > CPU_MAX_NS + CPU_SHARE * lasted_ns and observer.give_up(_TOO_COSTLY):
            if seq in self._sessions:
                self._sessions[seq].give_up(_TOO_COSTLY)
            self._sink.on_error("parse_cpu", f"exchange {observer.exchange.id}: {_TOO_COSTLY}")

    def discard(self) -> None:
        """Discard all open exchanges: the relay is alive, and itself counts those without acknowledgement."""
        self._sink.on_discard(len(self._open_exchanges))
        for observer in self._open_exchanges.values():
            observer.abandon()
        for session in self._sessions.values():
            session.abandon()
        for table in (
            self._open_exchanges,
            self._arms,
            self._steps,
            self._cpu_ns,
            self._heads,
            self._sessions,
        ):
            table.clear()

    def lose(self) -> None:
        """End all open exchanges as `tap_error`, because the relay died."""
        reason = DEATHS[self._hello.vantage or RELAY]
        for seq, observer in list(self._open_exchanges.items()):
            try:
                if self._close_session(seq, None, Outcome.TAP_ERROR, reason, LAG_FLOOR_NS):
                    self._forget(seq)
                    continue
                exchange = observer.finish(
                    delivered_ns=None,
                    outcome=Outcome.TAP_ERROR,
                    status=None,
                    error=reason,
                    paused_ns=0,
                    lag_ns=LAG_FLOOR_NS,
                    request_bytes=0,
                    response_bytes=0,
                )
                exchange.uncertainty_ns = self._lag.worst_since(exchange.timeline.arrival_ns)
                # The relay is gone, and a token could have followed: so give no reason for a missing one.
                exchange.no_token_reason = None
                self._end(seq, exchange)
            except Exception as error:
                self._sink.on_error(type(error).__name__, error)
                self._forget(seq)

    def _take_status(self, status: RelayStatus) -> None:
        self._lag.note(status.t_ns, status.lag_ns_max)
        self.reckoning.update(status)
        self._sink.on_status(self._hello.relay, status)

    def _set_anchor(self, mono_ns: int, wall_ns: int, about: Anchored) -> None:
        self._anchors.append(_Anchor(mono_ns, wall_ns, about.since_ns, about.steps))

    def _anchor_at(self, t_ns: int) -> _Anchor:
        """Return the newest anchor that is valid at `t_ns`, or the oldest anchor if none is."""
        return next((a for a in reversed(self._anchors) if t_ns > a.since_ns), self._anchors[0])

    def _open_exchange(self, seq: int, t_ns: int, whole_ns: int, data: bytes) -> None:
        """Begin an exchange. `whole_ns`: end of the request if `data` is the whole request, else 0."""
        head, body = _split_message(data) if whole_ns else (data, b"")
        self.reckoning.count_opened(seq)
        self._forget(seq)
        observer, steps = self._make_observer(seq, t_ns, head)
        self._open_exchanges[seq] = observer
        if steps:
            self._steps[seq] = steps
        if b"pgrade" in head and observer.exchange.endpoint in SESSION_ENDPOINTS:
            self._heads[seq] = head
        if whole_ns:
            if body:
                observer.request_data(body, whole_ns)
            observer.request_end(whole_ns)

    def _make_observer(self, seq: int, t_ns: int, head: bytes) -> tuple[Observer, int]:
        """Return the observer of a new exchange, and the number of clock steps before it."""
        hello = self._hello
        anchor = self._anchors[-1]
        if t_ns <= anchor.since_ns:
            anchor = self._anchor_at(t_ns)
        wall_ns = anchor.wall_ns + t_ns - anchor.mono_ns
        # Count the exchange first: after an error, `on_discard` subtracts one.
        self._sink.on_open()
        try:
            return self._sink.observe(hello.relay, seq, t_ns, wall_ns, head, hello.clock), anchor.steps
        except Exception:
            self._sink.on_discard()
            raise

    def _upgrade(self, seq: int, observer: Observer, t_ns: int) -> None:
        """Begin a session if the exchange became a WebSocket of a known API."""
        observer.on_upgrade(t_ns)
        head, endpoint = self._heads.pop(seq, None), observer.exchange.endpoint
        if head is None or endpoint is None:
            return
        part = 0

        def observe(began_ns: int) -> Observer:
            nonlocal part
            response, steps = self._make_observer(seq, began_ns, head)
            x = response.exchange
            part += 1
            x.part, x.anchor = part, steps
            if (assignment := self._arms.get(seq)) is not None:
                x.arm, x.unit = assignment.arm, assignment.unit
            return response

        share = observer.make_share()
        self._sessions[seq] = Session(
            endpoint, observe, self._sink.on_end, self._sink.on_discard, share, deflates=observer.deflates
        )

    def _read_sliced(self, observer: Observer, frame: Frame) -> Iterator[None]:
        """Read a large frame in slices, so that the event loop can run in between."""
        kind, seq, t_ns, extra_ns, data = frame
        if kind == _ANSWER:
            head, body = _split_message(data)
            observer.response_head(head, t_ns, extra_ns)
            if body:
                yield from observer.response_slices(body, t_ns, extra_ns)
            observer.response_end(t_ns)
            return
        for at in range(0, len(data), _TUNNEL_SLICE_BYTES):
            if at:
                yield
            part = data[at : at + _TUNNEL_SLICE_BYTES]
            self._pass_tunnel(observer, kind, seq, t_ns, extra_ns, part, continues=at > 0)

    def _pass_tunnel(
        self,
        observer: Observer,
        kind: int,
        seq: int,
        t_ns: int,
        extra_ns: int,
        data: bytes,
        *,
        continues: bool,
    ) -> None:
        """Give data of a tunnel to its session or, without one, to the observer."""
        up = kind == _TUNNEL_UP
        session = self._sessions.get(seq)
        if session is not None:
            (session.client_data if up else session.server_data)(data, t_ns, extra_ns)
            if session.broken is not None and not session.lost:
                session.give_up(session.broken)
                observer.give_up(session.broken)
                self._sink.on_error("websocket", f"exchange {observer.exchange.id}: {session.broken}")
            if session.began:
                return
        up_data, down_data = (data, None) if up else (None, data)
        observer.tunnel(up_data, down_data, t_ns, extra_ns, continues=continues)

    def _close_session(
        self, seq: int, delivered_ns: int | None, outcome: str, error: str | None, lag_ns: int
    ) -> bool:
        """End the responses of a session. Return whether it had any: they are reported, not the tunnel."""
        session = self._sessions.pop(seq, None)
        if session is None or not session.began:
            return False
        session.close(delivered_ns, outcome, error, lag_ns)
        return True

    def _pass_to_observer(
        self, observer: Observer, kind: int, seq: int, t_ns: int, extra_ns: int, data: bytes
    ) -> None:
        """Call the method of the observer that belongs to a kind of frame."""
        if kind == _REQUEST_DATA:
            observer.request_data(data, t_ns)
        elif kind == _REQUEST_END:
            observer.request_end(t_ns)
        elif kind == _SUBMIT:
            observer.on_submit(t_ns, extra_ns)
        elif kind == _RESPONSE_HEAD:
            observer.response_head(data, t_ns, extra_ns)
        elif kind == _RESPONSE_END:
            observer.response_end(t_ns)
        elif kind == _CLOSE:
            self._close(seq, t_ns, data)
        elif kind == _DROP:
            self._forget(seq)
        elif kind == _HELD:
            observer.on_hold(t_ns - extra_ns, t_ns)
        elif kind == _UPGRADED:
            self._upgrade(seq, observer, t_ns)
        elif kind == _ARM:
            assignment = _assignment_decoder.decode(data)
            assignment.arm, assignment.unit = bounded("arm", assignment.arm), bounded("unit", assignment.unit)
            self._arms[seq] = assignment
            self._sink.on_assignment(assignment)
        # Other kinds are ignored: interim heads, and kinds that only a newer relay sends.

    def _close(self, seq: int, t_ns: int, data: bytes) -> None:
        """End an exchange with the values that the relay sends at its end."""
        closing = _closing_decoder.decode(data)
        if self._close_session(seq, t_ns or None, closing.outcome, closing.error, closing.lag_ns):
            self._forget(seq)
            return
        observer = self._open_exchanges[seq]
        x = observer.exchange
        x.resent, x.added.connect_ns = closing.retries, closing.connect_ns
        x.timeline.connected_ns, x.timeline.send_wait_ns = closing.connected_ns, closing.send_wait_ns
        if closing.arm is not None:
            x.arm, x.route, x.unit, x.excluded = closing.arm, closing.route, closing.unit, closing.excluded
        exchange = observer.finish(
            delivered_ns=t_ns or None,
            outcome=closing.outcome,
            status=closing.status,
            error=closing.error,
            paused_ns=closing.paused_ns,
            lag_ns=closing.lag_ns,
            request_bytes=closing.request_bytes,
            response_bytes=closing.response_bytes,
            stall_ns=closing.stall_ns,
        )
        self._end(seq, exchange)

    def _end(self, seq: int, exchange: Exchange) -> None:
        """Pass a complete exchange to the sink."""
        exchange.anchor = self._steps.pop(seq, 0)
        self._arms.pop(seq, None)
        self._cpu_ns.pop(seq, None)
        self._heads.pop(seq, None)
        self._sessions.pop(seq, None)
        del self._open_exchanges[seq]
        self._sink.on_end(exchange)

    def _forget(self, seq: int) -> None:
        """Remove all data of an exchange whose number is used again."""
        self._steps.pop(seq, None)
        self._arms.pop(seq, None)
        self._cpu_ns.pop(seq, None)
        self._heads.pop(seq, None)
        session = self._sessions.pop(seq, None)
        if session is not None:
            session.abandon()
        observer = self._open_exchanges.pop(seq, None)
        if observer is not None:
            observer.abandon()
            self._sink.on_discard()


def _split_message(message: bytes) -> tuple[bytes, bytes]:
    end = message.find(b"\r\n\r\n") + 4
    return message[:end], message[end:]
