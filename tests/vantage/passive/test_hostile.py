"""Packets made to harm: linear time, bounded memory, exact accounts, nothing wrong measured."""

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.vantage.passive.connection import ConnectionTable
from llmtap.vantage.passive.segments import (
    ACK,
    EARLY_BYTES_MAX,
    EARLY_SEGMENTS_MAX,
    FIN,
    RST,
    SYN,
    EarlyBytes,
    LostSyncError,
    TcpDirection,
)
from tests.vantage.passive.wire import ANSWER, ASK, COMPLETE, PORT, Sink, Wire, counted


def direction(early: EarlyBytes | None = None) -> TcpDirection:
    way = TcpDirection(early or EarlyBytes(), is_up=True)
    way.begin(0)
    return way


TEXT = bytes(range(200))


@given(st.lists(st.tuples(st.integers(0, 199), st.integers(1, 60)), max_size=40), st.integers(0, 0xFFFFFFFF))
def test_segments_of_one_text_in_any_order_give_its_beginning(
    cuts: list[tuple[int, int]], first: int
) -> None:
    """Invariant: what is returned is the text from its start to the first byte that no segment brought."""
    way = direction()
    way.begin(first)
    out = b""
    for at, n in cuts:
        for piece, _, _ in way.add((first + at) & 0xFFFFFFFF, ACK, TEXT[at : at + n], 0):
            out += piece
    brought = {i for at, n in cuts for i in range(at, min(200, at + n))}
    end = next((i for i in range(201) if i not in brought), 200)
    assert out == TEXT[:end] and way.next_seq == (first + end) & 0xFFFFFFFF


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.integers(-80, 300),
            st.integers(0, 90),
            st.sampled_from((ACK, ACK, FIN | ACK, RST, SYN)),
            st.booleans(),
            st.integers(0, 1),
        ),
        max_size=60,
    )
)
@settings(max_examples=300)
def test_any_segments_keep_the_accounts_exact(script: list[tuple[int, int, int, int, bool, int]]) -> None:
    """Invariant: each exchange is measured once or dropped once, and a complete one has all its events."""
    sink = Sink()
    table = ConnectionTable(sink, [PORT])
    wire = Wire(table)
    wire.at = [10_000, 20_000]
    wire.connect()
    texts = (ASK * 3, ANSWER * 3)
    for side, at, n, flags, true, window in script:
        at = max(at, 0) if true else at
        data = texts[side][max(at, 0) : max(at, 0) + n] if true else b"\xff" * n
        wire.pass_(wire.make(side, data, flags, seq=(10_001, 20_001)[side] + at, window=window))
    for side, text in enumerate(texts):
        wire.pass_(wire.make(side, text, seq=(10_001, 20_001)[side]))
    table.close(wire.t_ns)
    assert not sink.ledger.unsettled and not len(table)
    for outcome, _, events in sink.said():
        assert events == COMPLETE[2] or outcome != "complete"


@pytest.mark.parametrize("size", [1, 2_000])
def test_early_segments_have_bounds(size: int) -> None:
    way = direction()
    kept = 0
    with pytest.raises(LostSyncError):
        for i in range(1, 5_000):
            way.add(i * size, ACK, b"x" * size, 0)
            kept = i
    assert kept == EARLY_SEGMENTS_MAX if size == 1 else kept <= EARLY_BYTES_MAX // size


def test_all_connections_share_a_bound_that_is_given_back() -> None:
    early = EarlyBytes(bytes_max=10_000)
    ways = [direction(early) for _ in range(30)]
    with pytest.raises(LostSyncError):
        for way in ways:
            way.add(5, ACK, b"x" * 500, 0)
    for way in ways:
        way.forget()
    assert early.bytes_now == 0


def test_syn_flood_has_bounded_memory_and_leaves_real_connections_alone() -> None:
    sink = Sink()
    table = ConnectionTable(sink, [PORT], connections_max=2_000)
    real = Wire(table, client_port=1)
    real.connect()
    real.up(ASK)
    flood = Wire([], v6=False)
    syn = bytearray(flood.make(0, flags=SYN, seq=7))
    tracemalloc.start()
    try:
        for i in range(10_000):
            struct.pack_into("!I", syn, 12, i)  # the source address
            table.add_packet(bytes(syn), 0, len(syn), real.t_ns)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(table) == 2_000 and counted(table) == {"followed": 1}
    assert peak < 8 << 20
    real.answer()
    assert sink.said() == [COMPLETE]


def test_full_table_of_asking_connections_counts_what_it_does_not_follow() -> None:
    sink = Sink()
    table = ConnectionTable(sink, [PORT], connections_max=3)
    wires = [Wire(table, client_port=10_000 + i) for i in range(5)]
    for wire in wires:
        wire.up(ASK)
    for wire in wires:
        wire.answer()
    assert sink.said() == [COMPLETE] * 3 and counted(table) == {"joined": 3, "overflow": 2 * 8}


def test_wild_acknowledgements_and_windows_are_told_as_missing_bytes_once() -> None:
    sink = Sink()
    table = ConnectionTable(sink, [PORT])
    wire = Wire(table)
    wire.connect()
    wire.up(ASK)
    wire.at[1] = (wire.at[1] + 1_000_000) & 0xFFFFFFFF
    for _ in range(10):
        wire.up(window=0)
    assert table.counts.missing_bytes == 1_000_000 and sink.dropped == {"packets_lost": 1}
