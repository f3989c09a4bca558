"""Capture live packets from a ring buffer that is shared with the kernel (packet(7), TPACKET_V3).

The supervisor opens the socket with CAP_NET_RAW (`open_ring`), and passes it to the watcher process, which
has no privileges and reads packets and their timestamps with `PacketRing`. Reading a packet needs no system
call. Packets begin with the IP header (SOCK_DGRAM), so link-layer headers and VLAN tags need no code. A
filter in the kernel passes TCP segments of the given ports that have data, begin or end a connection, or
close the receive window. `open_adapter_clock` makes the network card stamp packets.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from llmtap.errors import ConfigError

BLOCK_BYTES: Final = 128 << 10
"""Size of a block of the ring. It must hold the largest segment (64 KiB) with its headers."""
RING_BYTES_MIN: Final = 4 * BLOCK_BYTES
RETIRE_MS: Final = 50
"""Time in ms after which the kernel passes a block to this process even if it is not full."""
BLOCKS_PER_TURN: Final = 8
"""Maximum number of blocks that are read before the event loop continues."""
PORTS_MAX: Final = 64
"""Maximum number of ports, because jumps in the filter can skip at most 255 instructions."""
ANY: Final = "any"
LOOPBACK: Final = "lo"

_SOL_PACKET, _RX_RING, _STATISTICS, _VERSION, _TIMESTAMP, _IGNORE_OUTGOING = 263, 5, 6, 10, 17, 23
_SO_ATTACH_FILTER: Final = 26
_TPACKET_V3: Final = 2
_ETH_P_ALL: Final = 3
_FRAME_BYTES: Final = 2_048
_USER: Final = 1  # bit of a block's status: the kernel has filled the block
_BLOCK: Final = struct.Struct("=8xIII4xQ")
"""Fields of tpacket_block_desc: status, number of packets, offset of the first packet, sequence number."""
_STATUS: Final = struct.Struct("=I")
_PACKET: Final = struct.Struct("=IIIIIIHH")
"""Fields of tpacket3_hdr: offset of the next packet, time (s, ns), captured length, length, status, offset of
the link header, offset of the IP header."""
_FROM_ADAPTER: Final = 31
"""Number of the status bit that shows that the adapter, and not the kernel, stamped the packet."""
_STATISTICS_V3: Final = struct.Struct("=III")


def open_ring(interface: str, ports: Sequence[int], ring_bytes: int) -> socket.socket:
    """Return a packet socket of an interface (or `any`) with a ring of `ring_bytes` (RING_BYTES_MIN or more).

    Raises ConfigError without permission, for an unknown interface, and on other systems than Linux.
    """
    if not hasattr(socket, "AF_PACKET"):
        raise ConfigError("watch.interfaces", "needs Linux (AF_PACKET)", "read a file: --read FILE.pcap")
    # With protocol 0, a socket gets no packets until it is bound. For `any`, it is never bound.
    protocol = socket.htons(_ETH_P_ALL) if interface == ANY else 0
    try:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, protocol)
    except PermissionError:
        raise ConfigError(
            "watch.interfaces",
            f"no permission to read packets of {interface}",
            "run as root, or with the capability CAP_NET_RAW",
        ) from None
    try:
        sock.setblocking(False)
        sock.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
        _attach_filter(sock, port_filter(ports, skip_loopback_out=interface == ANY))
        blocks = ring_bytes // BLOCK_BYTES
        frames = BLOCK_BYTES // _FRAME_BYTES * blocks
        request = struct.pack("=7I", BLOCK_BYTES, blocks, _FRAME_BYTES, frames, RETIRE_MS, 0, 0)
        sock.setsockopt(_SOL_PACKET, _RX_RING, request)
        if interface == LOOPBACK:
            # Ignore outgoing packets: on loopback, each of them is also captured when it comes in.
            sock.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        if interface != ANY:
            sock.bind((interface, _ETH_P_ALL))
    except OSError as exc:
        sock.close()
        raise ConfigError(
            "watch.interfaces",
            f"cannot read packets of {interface!r}: {exc.strerror}",
            "`ip link` shows the names of the interfaces",
        ) from None
    return sock


class PacketRing:
    """The ring of a socket that `open_ring` opened. `fd` is readable while there are packets."""

    def __init__(self, sock: socket.socket, ring_bytes: int) -> None:
        self._sock = sock
        self.fd = sock.fileno()
        self._block_count = ring_bytes // BLOCK_BYTES
        self.buffer = mmap.mmap(self.fd, BLOCK_BYTES * self._block_count)
        self.packets = 0  # number of packets read
        """Number of packets so far."""
        self.lost = 0
        """Number of packets that matched the filter, but were lost because the ring was full."""
        self._next_block = self._first_block()
        """Index of the block that is read next."""

    def _first_block(self) -> int:
        """Return the index of the block to read first: the oldest full one, which an earlier process has not
        read, or else the one that the kernel is filling."""
        blocks = [_BLOCK.unpack_from(self.buffer, i * BLOCK_BYTES) for i in range(self._block_count)]
        full = [(seq, i) for i, (status, _, _, seq) in enumerate(blocks) if status & _USER]
        return min(full)[1] if full else max((seq, i) for i, (_, _, _, seq) in enumerate(blocks))[1]

    def take(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield `(stamp_ns, which, start, stop)` of each new packet.

        The packet is between `start` and `stop` in `buffer`, until the next one is requested. `which`: 0 for
        a timestamp of the wall clock, 1 for one of the adapter's clock.
        """
        buffer, unpack = self.buffer, _PACKET.unpack_from
        for _ in range(BLOCKS_PER_TURN):
            base = self._next_block * BLOCK_BYTES
            status, packets, offset, _ = _BLOCK.unpack_from(buffer, base)
            if not status & _USER:
                return
            at = base + offset
            for _ in range(packets):
                step, seconds, ns, captured, _, status, _, net = unpack(buffer, at)
                start = at + net
                yield seconds * 1_000_000_000 + ns, status >> _FROM_ADAPTER, start, start + captured
                at += step
            self.packets += packets
            _STATUS.pack_into(buffer, base + 8, 0)
            self._next_block = (self._next_block + 1) % self._block_count

    def count_new_losses(self) -> int:
        """Return the number of packets lost since the last call."""
        statistics = self._sock.getsockopt(_SOL_PACKET, _STATISTICS, _STATISTICS_V3.size)
        lost: int = _STATISTICS_V3.unpack(statistics)[1]
        self.lost += lost
        return lost

    def close(self) -> None:
        self.buffer.close()
        self._sock.close()


# ---------------------------------------------------------------- timestamps of the adapter

_SIOCETHTOOL, _SIOCSHWTSTAMP, _SIOCGHWTSTAMP, _GET_TS_INFO = 0x8946, 0x89B0, 0x89B1, 0x41
_TS_INFO: Final = struct.Struct("=IIiI12xI12x")
"""Fields of ethtool_ts_info: command, capabilities, number of the clock; modes of timestamps for sent packets
and filters for received packets, as bit sets."""
_CONFIG: Final = struct.Struct("=iii")
"""Fields of hwtstamp_config: flags, mode for sent packets, filter for received packets."""
_RAW_HARDWARE: Final = 1 << 6
_OFFERED: Final = _RAW_HARDWARE | 1 << 2
"""Capabilities that an adapter needs to stamp received packets by its own clock."""
_ALL_PACKETS: Final = 1


def open_adapter_clock(sock: socket.socket, interface: str) -> int:
    """Let the adapter stamp the packets that it receives; return a descriptor of its clock.

    Packets that it sends keep the kernel's timestamp. Raises ConfigError if the adapter cannot stamp packets.
    """
    info = ctypes.create_string_buffer(_TS_INFO.pack(_GET_TS_INFO, 0, -1, 0, 0), _TS_INFO.size)
    config = ctypes.create_string_buffer(_CONFIG.size)
    try:
        _interface_request(sock, interface, _SIOCETHTOOL, info)
        _, offers, number, _, filters = _TS_INFO.unpack(info.raw)
        if offers & _OFFERED != _OFFERED or number < 0 or not filters & 1 << _ALL_PACKETS:
            raise ConfigError(
                "watch.timestamps",
                f"the network adapter {interface} does not timestamp all received packets",
                "leave out --timestamps adapter; `ethtool -T` shows the timestamps of an interface",
            )
        _interface_request(sock, interface, _SIOCGHWTSTAMP, config)
        flags, sending, receiving = _CONFIG.unpack(config.raw)
        if receiving != _ALL_PACKETS:
            # Do not change the mode for sent packets, because PTP possibly uses it.
            config.raw = _CONFIG.pack(flags, sending, _ALL_PACKETS)
            _interface_request(sock, interface, _SIOCSHWTSTAMP, config)
        sock.setsockopt(_SOL_PACKET, _TIMESTAMP, _RAW_HARDWARE)
        return os.open(f"/dev/ptp{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(
            "watch.timestamps",
            f"cannot switch on the timestamps of {interface}: {exc.strerror}",
            "leave out --timestamps adapter, or run as root: the option needs CAP_NET_ADMIN and /dev/ptpN",
        ) from None


def _interface_request(
    sock: socket.socket, interface: str, request: int, data: ctypes.Array[ctypes.c_char]
) -> None:
    """Send the kernel a request about a network interface, with a buffer for the answer."""
    fcntl.ioctl(sock, request, struct.pack("16sP16x", interface.encode(), ctypes.addressof(data)))


# ---------------------------------------------------------------- the filter: classic BPF

_LD_H, _LD_B, _LD_H_X, _LD_B_X, _LDX_IMM, _LDX_IP = 0x28, 0x30, 0x48, 0x50, 0x01, 0xB1
_JEQ, _JEQ_X, _JSET, _ADD, _ADD_X = 0x15, 0x1D, 0x45, 0x04, 0x0C
_AND, _RSH, _TAX, _RET = 0x54, 0x74, 0x07, 0x06
_PACKET_TYPE, _HARDWARE_TYPE = 0xFFFFF004, 0xFFFFF01C
"""Offsets at which a filter reads data on a packet that are not in it (linux/filter.h)."""
_OUTGOING, _LOOPBACK_TYPE = 4, 772
_TAKE_ALL: Final = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]


def port_filter(ports: Sequence[int], *, skip_loopback_out: bool = False) -> list[Instruction]:
    """Return the instructions of the kernel's filter, as `(code, jump if true, jump if false, operand)`.

    `skip_loopback_out`: drop outgoing packets of loopback, because the same packets also come in.
    """
    program: list[tuple[str, int, str, str, int]] = []

    def add(code: int, k: int = 0, yes: str = "", no: str = "", label: str = "") -> None:
        program.append((label, code, yes, no, k))

    if skip_loopback_out:
        add(_LD_B, _PACKET_TYPE)
        add(_JEQ, _OUTGOING, "", "ip")
        add(_LD_H, _HARDWARE_TYPE)
        add(_JEQ, _LOOPBACK_TYPE, "drop", "")
    add(_LD_B, 0, label="ip")
    add(_AND, 0xF0)
    add(_JEQ, 0x40, "v4", "")
    add(_JEQ, 0x60, "", "drop")
    add(_LD_B, 6)
    add(_JEQ, 6, "", "drop")
    add(_LDX_IMM, 40)
    add(_JEQ, 6, "ports", "drop")  # always true after the check above, so an unconditional jump
    add(_LD_B, 9, label="v4")
    add(_JEQ, 6, "", "drop")
    add(_LD_H, 6)
    add(_JSET, 0x1FFF, "drop", "")
    add(_LDX_IP, 0)
    for number, offset in enumerate((0, 2)):
        add(_LD_H_X, offset, label="" if number else "ports")
        for port in ports:
            add(_JEQ, port, "tcp", "")
    add(_RET, 0, label="drop")
    add(_LD_B_X, 13, label="tcp")
    add(_JSET, 0x07, "take", "")  # FIN, SYN, RST
    add(_LD_H_X, 14)
    add(_JEQ, 0, "take", "")  # the receive window is closed
    add(_LD_B_X, 12)
    add(_AND, 0xF0)
    add(_RSH, 2)
    add(_ADD_X)
    add(_TAX)  # register X: length of the IP and TCP headers
    add(_LD_B, 0)
    add(_AND, 0xF0)
    add(_JEQ, 0x40, "length4", "")
    add(_LD_H, 4)
    add(_ADD, 40)
    add(_JEQ_X, 0, "empty", "take")
    add(_LD_H, 2, label="length4")
    add(_JEQ_X, 0, "empty", "take")
    add(_RET, 0, label="empty")
    add(_RET, _TAKE_ALL, label="take")
    places = {label: i for i, (label, *_) in enumerate(program) if label}
    return [
        (code, places[yes] - i - 1 if yes else 0, places[no] - i - 1 if no else 0, k)
        for i, (_, code, yes, no, k) in enumerate(program)
    ]


def _attach_filter(sock: socket.socket, program: Sequence[Instruction]) -> None:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    sock.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(buffer))
    )
