"""Capture files of every kind, whole and damaged."""

import io
import random
import struct
from collections.abc import Iterator

import pytest

from llmtap.vantage.passive.connection import ConnectionTable
from llmtap.vantage.passive.file_vantage import PacketFile, PcapError, is_packet_file
from llmtap.vantage.passive.segments import network_offset, parse_segment
from tests.vantage.passive.wire import ASK, COMPLETE, PORT, Sink, Wire

T0_NS = 1_700_000_000_000_000_000
ETHERNET = b"\0" * 12 + b"\x08\x00"
VLAN = b"\0" * 12 + b"\x81\x00\x00\x07\x08\x00"
LINKS = {
    "ethernet": (1, ETHERNET),
    "vlan": (1, VLAN),
    "two vlans": (1, VLAN[:12] + b"\x88\xa8\x00\x05" + VLAN[12:]),
    "raw": (101, b""),
    "bsd loopback": (0, b"\2\0\0\0"),
    "cooked": (113, b"\0" * 14 + b"\x08\x00"),
    "cooked 2": (276, b"\x08\x00" + b"\0" * 18),
}


def pcap(packets: list[tuple[int, bytes]], order: str = "<", unit_ns: int = 1, link: int = 101) -> bytes:
    magic = 0xA1B23C4D if unit_ns == 1 else 0xA1B2C3D4
    head = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 262_144, link)
    return head + b"".join(
        struct.pack(order + "IIII", t // 10**9, t % 10**9 // unit_ns, len(p), len(p)) + p for t, p in packets
    )


NANOSECONDS = struct.pack("<HHB3xHH", 9, 1, 9, 0, 0)


def pcapng(
    packets: list[tuple[int, bytes]], order: str = "<", options: bytes = NANOSECONDS, link: int = 101
) -> bytes:
    """Every packet is on the second of two interfaces; `options` tells the clock's unit."""

    def block(kind: int, body: bytes) -> bytes:
        body += b"\0" * (-len(body) % 4)
        length = struct.pack(order + "I", len(body) + 12)
        return struct.pack(order + "I", kind) + length + body + length

    out = block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))
    out += block(1, struct.pack(order + "HHI", 1, 0, 0))
    out += block(1, struct.pack(order + "HHI", link, 0, 0) + options)
    out += block(5, bytes(12))  # interface statistics: passed over
    for t, p in packets:
        out += block(6, struct.pack(order + "IIIII", 1, t >> 32, t & 0xFFFFFFFF, len(p), len(p)) + p)
    return out


def resolution(order: str, value: int) -> bytes:
    return struct.pack(order + "HHB3x", 9, 1, value) + struct.pack(order + "HH", 0, 0)


def conversation() -> list[tuple[int, bytes]]:
    packets: list[tuple[int, bytes]] = []
    wire = Wire(packets)
    wire.connect()
    wire.up(ASK)
    wire.answer()
    return [(T0_NS + t, p) for t, p in packets]


def measured(data: bytes, sink: Sink | None = None) -> Sink:
    sink = Sink() if sink is None else sink
    table = ConnectionTable(sink, [PORT])
    for t_ns, link, frame in PacketFile(io.BytesIO(data)):
        at = network_offset(link, frame)
        if at >= 0:
            table.add_packet(frame, at, len(frame), t_ns)
    return sink


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["ns", "us", "pcapng"])
def test_every_format_gives_the_same(order: str, kind: str) -> None:
    packets = conversation()
    if kind == "pcapng":
        data = pcapng(packets, order, resolution(order, 9))
    else:
        data = pcap(packets, order, 1 if kind == "ns" else 1_000)
    assert is_packet_file(data)
    sink = measured(data)
    assert sink.said() == [COMPLETE]
    assert sink.done[0].timeline.first_token_ns == packets[5][0]


@pytest.mark.parametrize("link", LINKS)
def test_link_types(link: str) -> None:
    number, head = LINKS[link]
    packets = [(t, head + p) for t, p in conversation()]
    assert measured(pcap(packets, link=number)).said() == [COMPLETE]


def test_clock_of_an_interface_in_powers_of_two_with_an_offset() -> None:
    options = struct.pack("<HHq", 14, 8, 1_700_000_000) + resolution("<", 0x80 | 10)
    ((t_ns, link, frame),) = PacketFile(io.BytesIO(pcapng([(1_024 * 5 + 512, b"x")], "<", options)))
    assert (t_ns, link, frame) == (T0_NS + 5_500_000_000, 101, b"x")


@pytest.mark.parametrize("make", [pcap, pcapng])
def test_file_that_was_cut_off_ends_with_its_last_whole_packet(make: object) -> None:
    data = make(conversation())  # type: ignore[operator]
    file = PacketFile(io.BytesIO(data[:-5]))
    assert len(list(file)) == len(conversation()) - 1 and file.truncated


class Slow(io.BytesIO):
    """A pipe gives what it has."""

    def read(self, n: int | None = -1) -> bytes:
        return super().read(min(n or 1, 3))


def test_pipe() -> None:
    assert len(list(PacketFile(Slow(pcap(conversation()))))) == len(conversation())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\3\4 no capture", b"\n\r\r\n", pcap([])[:10], b"\n\r\r\n\x10\0\0\0\x4d\x3c\x2b\x1a" + bytes(4)],
)
def test_what_is_no_capture_is_refused_or_empty(data: bytes) -> None:
    try:
        assert list(PacketFile(io.BytesIO(data))) == []
    except PcapError as exc:
        assert str(exc)


def mutations(data: bytes, n: int) -> Iterator[bytes]:
    rng = random.Random(3)
    for _ in range(n):
        out = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            at = rng.randrange(len(out))
            match rng.randrange(3):
                case 0:
                    out[at] = rng.randrange(256)
                case 1:
                    del out[at : at + rng.randrange(1, 40)]
                case 2:
                    out[at:at] = rng.randbytes(rng.randrange(1, 40))
        yield bytes(out)


@pytest.mark.parametrize("make", [pcap, pcapng])
def test_damaged_files_raise_nothing_else(make: object) -> None:
    for data in mutations(make(conversation()), 400):  # type: ignore[operator]
        sink = Sink()
        try:
            measured(data, sink)
        except PcapError:
            pass
        assert sink.ledger.opened == sink.ledger.measured + len(sink.ledger.live) + sum(sink.dropped.values())


def test_ip_and_tcp_options_extension_headers_and_fragments() -> None:
    wire = Wire([], v6=False)
    packet = wire.make(0, b"data")
    flow, *_ = parse_segment(packet, 0, len(packet)) or (b"",)
    with_options = bytes([0x47]) + packet[1:20] + b"\x01" * 8 + packet[20:]
    with_options = with_options[:2] + struct.pack("!H", len(with_options)) + with_options[4:]
    segment = parse_segment(with_options, 0, len(with_options))
    assert segment is not None and segment[0] == flow
    assert with_options[segment[5] : segment[6]] == b"data"
    six = Wire([], v6=True).make(0, b"data")
    extended = six[:6] + b"\x00" + six[7:40] + b"\x06\x00" + b"\x01\x04\0\0\0\0" + six[40:]
    extended = extended[:4] + struct.pack("!H", len(extended) - 40) + extended[6:]
    segment = parse_segment(extended, 0, len(extended))
    assert segment is not None and extended[segment[5] : segment[6]] == b"data"
    fragment = packet[:6] + b"\x20\x00" + packet[8:]
    udp = packet[:9] + b"\x11" + packet[10:]
    for other in (fragment, udp, packet[:30], b"\x60" + bytes(70), b""):
        assert parse_segment(other, 0, len(other)) is None
