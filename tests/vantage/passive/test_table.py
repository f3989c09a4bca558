"""Packets of all kinds of connections, and the exchanges that are measured from them."""

import random

import pytest

from llmtap.channel.frames import FrameKind
from llmtap.vantage.passive.connection import SILENT_NS, ConnectionTable, pack_addresses
from llmtap.vantage.passive.segments import ACK, FIN, RST, SYN
from tests.vantage.passive.wire import (
    ANSWER,
    ASK,
    COMPLETE,
    EVENTS,
    HEAD,
    LAST,
    PIECES,
    PORT,
    Sink,
    Wire,
    counted,
)

MS = 1_000_000


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture(params=[False, True], ids=["v4", "v6"])
def wire(sink: Sink, request: pytest.FixtureRequest) -> Wire:
    return Wire(ConnectionTable(sink, [PORT]), v6=request.param)


def table_of(wire: Wire) -> ConnectionTable:
    assert isinstance(wire.table, ConnectionTable)
    return wire.table


def test_exchanges_on_one_connection_have_the_times_of_their_packets(wire: Wire, sink: Sink) -> None:
    wire.connect()
    for _ in range(2):
        wire.exchange()
    wire.close()
    assert sink.said() == [COMPLETE] * 2
    t = sink.done[0].timeline
    assert t.arrival_ns == t.submit_ns and t.submit_ns is not None
    assert [ns - t.submit_ns for ns in t.events.t_ns] == [n * MS for n in (2, 3, 4, 5, 6, 7)]
    assert t.delivered_ns == t.response_end_ns == t.submit_ns + 7 * MS
    assert not len(table_of(wire)) and not sink.dropped and counted(table_of(wire)) == {"followed": 1}


def test_request_in_pieces_is_submitted_with_its_last_byte(wire: Wire, sink: Sink) -> None:
    wire.connect()
    for i in range(0, len(ASK), 20):
        wire.up(ASK[i : i + 20])
    submitted_ns = wire.t_ns
    wire.answer()
    assert sink.said() == [COMPLETE]
    t = sink.done[0].timeline
    assert t.submit_ns == t.request_end_ns == submitted_ns and t.arrival_ns == submitted_ns - 4 * MS


def test_requests_that_are_not_inference_are_not_measured(wire: Wire, sink: Sink) -> None:
    wire.connect()
    wire.up(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    wire.answer()
    wire.exchange()
    wire.up(b"POST /health/deep HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nfour")
    wire.close()
    assert sink.said() == [COMPLETE] and sink.ledger.opened == 1 and not sink.dropped


def test_connection_joined_in_the_middle(wire: Wire, sink: Sink) -> None:
    wire.down(EVENTS[0])  # of an exchange that began before
    wire.down(LAST)
    wire.exchange()
    assert sink.said() == [COMPLETE] and counted(table_of(wire)) == {"joined": 1}


def test_event_that_waited_for_another_one_has_the_later_time(wire: Wire, sink: Sink) -> None:
    wire.begin(HEAD)
    first, second = wire.make(1, EVENTS[0]), wire.make(1, EVENTS[1])
    wire.pass_(second, first)
    wire.down(LAST)
    times = sink.done[0].timeline.events.t_ns
    assert times[0] == times[1] == wire.t_ns - MS


@pytest.mark.parametrize("early", [False, True])
def test_contradicting_copies_are_never_measured(wire: Wire, sink: Sink, early: bool) -> None:
    wire.begin(HEAD)
    part = wire.make(1, EVENTS[0])
    seq = (wire.at[1] - len(EVENTS[0]) + 5) & 0xFFFFFFFF
    other = wire.make(1, b"x" * (len(EVENTS[0]) + 10), seq=seq)
    wire.pass_(*((other, part) if early else (part, other)))
    wire.down(LAST)
    assert sink.said() == [] and sink.dropped == {"contradicting": 1}


def test_keep_alive_probe_with_a_byte_of_garbage_changes_nothing(wire: Wire, sink: Sink) -> None:
    wire.begin(HEAD)
    wire.down(b"?", seq=(wire.at[1] - 1) & 0xFFFFFFFF)
    wire.down(*EVENTS, LAST)
    assert sink.said() == [COMPLETE]


def test_any_order_and_any_cut_gives_the_same(sink: Sink) -> None:
    rng = random.Random(7)
    for run in range(200):
        wire = Wire(ConnectionTable(sink, [PORT]), client_port=20_000 + run)
        wire.connect()
        ups = [wire.make(0, ASK[i : i + 20]) for i in range(0, len(ASK), 20)]
        rng.shuffle(ups)
        wire.pass_(*ups)
        cuts = sorted(rng.sample(range(1, len(ANSWER)), 9))
        downs = [wire.make(1, ANSWER[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ANSWER)], strict=True)]
        downs += rng.sample(downs, 3)
        rng.shuffle(downs)
        wire.pass_(*downs)
    assert sink.said() == [COMPLETE] * 200 and not sink.dropped


def test_hole_drops_its_exchange_and_no_other(wire: Wire, sink: Sink) -> None:
    wire.begin(HEAD)
    wire.make(1, EVENTS[0])  # it went past
    wire.down(EVENTS[1])
    wire.up()  # acknowledges everything: the client has what was missed
    wire.down(LAST)
    assert sink.dropped == {"packets_lost": 1}
    assert table_of(wire).counts.missing_bytes == len(EVENTS[0] + EVENTS[1])
    wire.exchange()
    assert sink.said() == [COMPLETE]


def test_hole_is_final_after_a_while_and_at_once_while_the_ring_overflows(wire: Wire, sink: Sink) -> None:
    table = table_of(wire)
    wire.connect()
    for n in range(2):
        wire.up(ASK)
        wire.down(HEAD)
        wire.make(1, EVENTS[0])
        if n:
            table.on_ring_loss(wire.t_ns, now=True)
        wire.down(EVENTS[1])
        if not n:
            table.sweep(wire.t_ns + 2_900 * MS)
            assert not sink.dropped
            table.sweep(wire.t_ns + 3_100 * MS)
        assert sink.dropped == {"packets_lost": n + 1}
    table.on_ring_loss(wire.t_ns, now=False)


def test_end_that_was_missed_is_noticed_at_the_next_request(wire: Wire, sink: Sink) -> None:
    wire.begin(HEAD)
    wire.make(1, LAST)
    wire.exchange()
    assert sink.dropped == {"packets_lost": 1} and sink.said() == [COMPLETE]


@pytest.mark.parametrize("how", ["rst", "fin", "fin, then rst one behind"])
def test_client_that_leaves(wire: Wire, sink: Sink, how: str) -> None:
    wire.begin(HEAD, EVENTS[0])
    if how == "rst":
        wire.up(flags=RST)
    else:
        wire.up(flags=FIN | ACK)
        wire.down(EVENTS[1])
        if how == "fin":
            wire.down(flags=FIN | ACK)
        else:
            wire.up(flags=RST, seq=(wire.at[0] - 1) & 0xFFFFFFFF)
    assert sink.said() == [("client_cancelled", 200, 1 if how == "rst" else 2)] and not len(table_of(wire))


def test_blind_reset_is_ignored(wire: Wire, sink: Sink) -> None:
    wire.begin(HEAD)
    wire.down(flags=RST, seq=(wire.at[1] - 500) & 0xFFFFFFFF)
    wire.down(*EVENTS, LAST)
    assert sink.said() == [COMPLETE]


def test_client_that_half_closes_gets_its_answer(wire: Wire, sink: Sink) -> None:
    wire.begin()
    wire.up(flags=FIN | ACK)
    wire.answer()
    assert sink.said() == [COMPLETE]


@pytest.mark.parametrize(
    ("answered", "flags", "outcome"),
    [
        (True, RST, "upstream_reset"),
        (True, FIN | ACK, "truncated"),
        (False, RST, "upstream_reset"),
        (False, FIN | ACK, "upstream_reset"),
    ],
)
def test_server_that_leaves(wire: Wire, sink: Sink, answered: bool, flags: int, outcome: str) -> None:
    wire.begin()
    if answered:
        wire.down(HEAD)
        wire.down(EVENTS[0])
    wire.down(flags=flags)
    assert sink.said() == [(outcome, 200 if answered else None, int(answered))]


def test_answer_that_ends_with_the_connection_after_an_interim_one(wire: Wire, sink: Sink) -> None:
    wire.connect()
    wire.up(b"POST /v1/x HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    wire.down(b"HTTP/1.1 100 Continue\r\n\r\n")
    wire.up(b"{}")
    wire.down(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: [DONE]\n\n")
    wire.down(flags=FIN | ACK)
    assert sink.said() == [("complete", 200, 1)]
    assert FrameKind.INTERIM in sink.kinds


def test_answer_before_the_end_of_its_request(wire: Wire, sink: Sink) -> None:
    wire.connect()
    wire.up(ASK[:-5])
    wire.down(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
    wire.up(ASK[-5:])
    wire.exchange()
    assert [x[:2] for x in sink.said()] == [("client_error", 413), ("complete", 200)]


def test_pipelined_requests(wire: Wire, sink: Sink) -> None:
    wire.connect()
    wire.up(ASK + ASK)
    wire.down(ANSWER + ANSWER[: -len(LAST)])
    wire.down(LAST)
    assert sink.said() == [COMPLETE] * 2


def test_ports_that_are_used_again(wire: Wire, sink: Sink) -> None:
    wire.begin(HEAD)
    wire.at = [5_000, 6_000]
    wire.begin(*PIECES)
    assert sink.dropped == {"packets_lost": 1} and sink.said() == [COMPLETE]


def test_zero_window_is_a_pause(wire: Wire, sink: Sink) -> None:
    wire.begin(HEAD, EVENTS[0])
    wire.up(window=0)
    closed_ns = wire.t_ns
    wire.t_ns += 500 * MS
    wire.up(window=0)
    wire.down(EVENTS[1])
    assert wire.t_ns == closed_ns + 502 * MS
    wire.down(LAST)
    assert sink.done[0].timeline.paused_ns == 502 * MS


def measured_times(sink: Sink) -> list[int]:
    """All times of the exchanges, each after the one before it in the exchange."""
    times = []
    for x in sink.done:
        t = x.timeline
        assert t.submit_ns is not None and t.response_end_ns is not None
        found = [t.arrival_ns, t.submit_ns, *t.events.t_ns, t.response_end_ns, t.delivered_ns]
        assert found == sorted(found)
        times += found
    return times


@pytest.mark.parametrize("place", range(len(PIECES)))
@pytest.mark.parametrize("back_ns", [1, MS, 5 * MS])
def test_packet_stamped_a_little_early_is_an_error_of_the_times(
    wire: Wire, sink: Sink, back_ns: int, place: int
) -> None:
    wire.begin(*PIECES[:place])
    wire.t_ns -= back_ns + MS  # the next packet is 1 ms later
    wire.down(*PIECES[place:])
    wire.t_ns += 10 * MS
    wire.exchange()
    assert sink.said() == [COMPLETE] * 2 and not sink.dropped
    assert measured_times(sink)
    assert [x.uncertainty_ns for x in sink.done] == [back_ns, 0]


def test_request_stamped_before_the_end_of_the_last_answer(wire: Wire, sink: Sink) -> None:
    wire.begin(*PIECES)
    wire.t_ns -= 3 * MS
    wire.exchange()
    assert sink.said() == [COMPLETE] * 2 and measured_times(sink)
    assert [x.uncertainty_ns for x in sink.done] == [0, 2 * MS]


def test_packets_with_equal_times(wire: Wire, sink: Sink) -> None:
    wire.connect()
    for packet in [wire.make(0, ASK), *(wire.make(1, piece) for piece in PIECES)]:
        wire.t_ns -= MS
        wire.pass_(packet)
    assert sink.said() == [COMPLETE] and len(set(measured_times(sink))) == 1
    assert sink.done[0].uncertainty_ns == 0


@pytest.mark.parametrize("back_ns", [11 * MS, 3_600_000 * MS])
def test_step_of_the_clock_drops_what_is_under_way(wire: Wire, sink: Sink, back_ns: int) -> None:
    wire.begin(*PIECES[:3])
    wire.t_ns += 4_000_000 * MS
    wire.down(PIECES[3])
    wire.t_ns -= back_ns + MS
    wire.down(*PIECES[4:])
    for _ in range(2):
        wire.exchange()
    assert sink.said() == [COMPLETE] * 2 and sink.dropped == {"clock_step": 1}
    assert measured_times(sink)
    assert sum(counted(table_of(wire)).values()) == 1


def test_step_that_a_pause_hides_is_seen_on_another_connection(sink: Sink) -> None:
    table = ConnectionTable(sink, [PORT])
    one, two = Wire(table), Wire(table, client_port=40_001)
    one.begin(*PIECES[:3])
    two.connect()
    two.t_ns = one.t_ns + 5_000 * MS
    two.exchange()
    two.t_ns -= 2_000 * MS
    two.exchange()
    one.t_ns += 4_000 * MS
    one.down(*PIECES[3:])
    assert sink.said() == [COMPLETE] * 2 and sink.dropped == {"clock_step": 1}


def test_tunnel(wire: Wire, sink: Sink) -> None:
    wire.connect()
    wire.up(
        b"GET /v1/realtime HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    text = b'{"type":"response.output_text.delta","delta":"hi"}'
    frame = bytes((0x81, len(text))) + text
    wire.down(
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n" + frame
    )
    wire.up(b"\x81\x80\0\0\0\0")
    wire.down(frame)
    wire.close()
    assert sink.said() == [("complete", 101, 2)] and not len(table_of(wire))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x16\x03\x01\x02\x00\x01", "encrypted"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "http2"),
        (b"SSH-2.0-OpenSSH\r\n", "not_http"),
        (b"\x00\x00\x00\x2a", "not_http"),
    ],
)
def test_what_is_not_http_1_is_counted_once(wire: Wire, sink: Sink, data: bytes, kind: str) -> None:
    wire.connect()
    wire.up(data)
    wire.down(b"\x16\x03\x03 and so on")
    wire.up(data)
    assert counted(table_of(wire)) == {kind: 1} and not sink.ledger.opened
    wire.at = [5_000, 6_000]
    wire.connect()  # the same ports again
    wire.exchange()
    assert sink.said() == [COMPLETE]
    wire.up(flags=FIN | ACK)
    wire.down(flags=FIN | ACK)
    assert not len(table_of(wire))


def test_encrypted_connection_that_is_joined(wire: Wire) -> None:
    wire.up(b"\x17\x03\x03\x00\x20" + bytes(32))
    wire.down(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert counted(table_of(wire)) == {"encrypted": 1}


def test_malformed_answer_drops_its_exchange(wire: Wire, sink: Sink) -> None:
    wire.begin()
    wire.down(b"SMTP 200\r\n\r\n")
    assert sink.dropped == {"not_understood": 1}


def test_segment_cut_by_a_short_snapshot(wire: Wire, sink: Sink) -> None:
    wire.begin()
    packet = wire.make(1, ANSWER)
    table_of(wire).add_packet(packet, 0, len(packet) - 30, wire.t_ns)
    assert sink.dropped == {"packets_cut": 1} and not sink.said()


def test_end_and_silence_are_accounted(wire: Wire, sink: Sink) -> None:
    table = table_of(wire)
    wire.begin()
    table.sweep(wire.t_ns + SILENT_NS + MS)
    assert sink.dropped == {"silent": 1} and not len(table)
    wire.up(ASK)
    table.close(wire.t_ns)
    assert sink.dropped == {"silent": 1, "watch_ended": 1} and not sink.said()


@pytest.mark.parametrize(("ports", "hosts"), [((), ()), ((PORT, 40_000), ("10.0.0.2",))])
def test_direction_where_the_port_does_not_tell(
    sink: Sink, ports: tuple[int, ...], hosts: tuple[str, ...]
) -> None:
    wire = Wire(ConnectionTable(sink, ports, pack_addresses(hosts)))
    wire.down(EVENTS[0])
    wire.exchange()
    assert sink.said() == [COMPLETE]


def test_other_ports_and_hosts_are_not_followed(sink: Sink) -> None:
    for table in (ConnectionTable(sink, [9_999]), ConnectionTable(sink, [PORT], pack_addresses(["fd00::9"]))):
        wire = Wire(table)
        wire.connect()
        wire.up(ASK)
        assert not len(table) and not counted(table)


@pytest.mark.parametrize(
    ("local", "side"),
    [
        (["10.0.0.1"], "client"),
        (["10.0.0.2"], "server"),
        (["10.0.0.1", "10.0.0.2"], "host"),
        (["::1"], "middle"),
    ],
)
def test_side(sink: Sink, local: list[str], side: str) -> None:
    table = ConnectionTable(sink, [PORT], local=pack_addresses(local))
    Wire(table).connect()
    assert table.sides == {side}


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_lost_no_exchange_is_wrong(sink: Sink, seed: int) -> None:
    """3 % random loss: every exchange is measured right, dropped, or was never seen at all."""
    rng = random.Random(seed)
    table = ConnectionTable(sink, [PORT])
    asked = lost = 0
    for n in range(20):
        wire = Wire(table, client_port=20_000 + n)
        script = [(0, b"", SYN), (1, b"", SYN | ACK), (0, b"", ACK)]
        for _ in range(6):
            asked += 1
            cut = rng.randrange(1, len(ASK))
            script += [(0, ASK[:cut], ACK), (0, ASK[cut:], ACK), (1, HEAD, ACK)]
            script += [(1, e, ACK) for e in EVENTS] + [(1, LAST[:9], ACK), (1, LAST[9:], ACK), (0, b"", ACK)]
        script += [(0, b"", FIN | ACK), (1, b"", FIN | ACK)]
        for side, data, flags in script:
            packet = wire.make(side, data, flags)
            if rng.random() < 0.03:
                lost += 1
            else:
                wire.pass_(packet)
    table.close(10**18)
    assert set(sink.said()) == {COMPLETE}
    assert lost and sink.dropped["packets_lost"] and asked // 2 < len(sink.done) < asked
    assert sink.ledger.opened <= asked and not sink.ledger.unsettled and not len(table)
