"""Outputs of the programs that know the NTP offset, as their manuals show them, and the kernel's answer."""

import asyncio
import ctypes
import sys
from collections.abc import Mapping

import pytest

from llmtap.bench.sut import clock_offset
from llmtap.bench.sut.clock_offset import (
    ClockOffset,
    Timex,
    kernel_offset,
    parse_chronyc,
    parse_ntpq,
    parse_timedatectl,
    read_clock_offset,
)

CHRONYC = """\
Reference ID    : CB00710F (203.0.113.15)
Stratum         : 3
Ref time (UTC)  : Fri Jan 27 09:49:17 2017
System time     : 0.000006523 seconds {} of NTP time
Last offset     : -0.000006747 seconds
RMS offset      : 0.000035822 seconds
Frequency       : 3.225 ppm slow
Residual freq   : -0.000 ppm
Skew            : 0.129 ppm
Root delay      : 0.013639022 seconds
Root dispersion : 0.001100737 seconds
Update interval : 64.2 seconds
Leap status     : {}
"""
NTPQ = """\
     remote           refid      st t when poll reach   delay   offset  jitter
==============================================================================
+192.0.2.7       198.51.100.1     2 u   18   64  377    9.100    1.200   0.300
*192.0.2.1       .GPS.            1 u   33   64  377    0.512   -0.123   0.045
"""
TIMESYNC = """\
       Server: 192.0.2.4 (ntp.example.org)
Poll interval: 34min 8s (min: 32s; max 34min 8s)
         Leap: normal
      Version: 4
      Stratum: 2
    Reference: 11FD227B
    Precision: 1us (-25)
Root distance: 816us (max: 5s)
       Offset: {}
        Delay: 31.300ms
       Jitter: 1.500ms
 Packet count: 132
    Frequency: -4.336ppm
"""


@pytest.mark.parametrize(("word", "sign"), [("slow", -1), ("fast", 1)])
def test_chrony_has_the_offset_and_the_distance_to_its_server(word: str, sign: int) -> None:
    offset = parse_chronyc(CHRONYC.format(word, "Normal"))
    assert offset is not None
    assert (offset.source, offset.server, offset.offset) == ("chronyc", "203.0.113.15", sign * 6.523e-6)
    assert offset.accuracy == pytest.approx(0.000006523 + 0.001100737 + 0.013639022 / 2)
    assert parse_chronyc(CHRONYC.format(word, "Not synchronised")) is None


def test_ntpd_has_a_line_for_each_peer_and_a_star_for_its_server() -> None:
    offset = parse_ntpq(NTPQ)
    assert offset is not None
    assert (offset.source, offset.server) == ("ntpq", "192.0.2.1")
    # ntpd has server minus clock.
    assert offset.offset == pytest.approx(0.000123)
    assert offset.accuracy == pytest.approx((0.123 + 0.512 / 2 + 0.045) / 1e3)
    assert parse_ntpq(NTPQ.replace("*", " ")) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("-1.286ms", 0.001286), ("+7.493693s", -7.493693), ("+1s 20ms", -1.02), ("-41us", 41e-6), ("0", 0.0)],
)
def test_timesyncd_has_time_spans(text: str, seconds: float) -> None:
    offset = parse_timedatectl(TIMESYNC.format(text))
    assert offset is not None
    assert (offset.source, offset.server) == ("timedatectl", "192.0.2.4")
    assert offset.offset == pytest.approx(seconds)
    assert offset.accuracy == pytest.approx(abs(seconds) + 0.000816)


@pytest.mark.parametrize("parse", [parse_chronyc, parse_ntpq, parse_timedatectl])
@pytest.mark.parametrize(
    "output", ["", "506 Cannot talk to daemon", "a: b", "*1 2 3 4 5 6 7 x y z", "Offset: n/a"]
)
def test_what_is_no_answer_is_not_known(parse: object, output: str) -> None:
    assert callable(parse)
    assert parse(output) is None


@pytest.mark.parametrize(
    ("state", "fields", "offset"),
    [
        (0, {"offset": -250, "maxerror": 1_500}, 250e-6),
        (0, {"offset": 4_000, "maxerror": 1_500, "status": 0x2001}, -4e-6),
        (5, {"offset": 0, "maxerror": 16_000_000}, None),
        (0, {"offset": 0, "maxerror": 16_000_000, "status": 0x40}, None),
        (-1, {}, None),
    ],
)
def test_the_kernel_has_microseconds_or_nanoseconds(
    state: int, fields: Mapping[str, int], offset: float | None
) -> None:
    result = kernel_offset(state, Timex(**fields))
    assert (result and result.offset) == (offset and pytest.approx(offset))
    assert result is None or result.accuracy == pytest.approx(0.0015)


@pytest.mark.skipif(
    sys.platform != "linux" or ctypes.sizeof(ctypes.c_long) != 8, reason="the layout of Linux"
)
def test_the_structure_has_the_kernels_layout() -> None:
    places = {name: getattr(Timex, name).offset for name in ("offset", "maxerror", "esterror", "status")}
    assert places == {"offset": 8, "maxerror": 24, "esterror": 32, "status": 40}
    assert ctypes.sizeof(Timex) >= 208


def test_the_first_source_that_is_synchronised_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {"chronyc": CHRONYC.format("slow", "Not synchronised"), "ntpq": NTPQ}

    async def output_of(*command: str) -> str | None:
        return outputs.get(command[0])

    kernel = ClockOffset(source="adjtimex", server=None, offset=0.0, accuracy=0.001)
    monkeypatch.setattr(clock_offset, "_output_of", output_of)
    monkeypatch.setattr(clock_offset, "_read_kernel_offset", lambda: kernel)
    offset = asyncio.run(read_clock_offset())
    assert offset is not None
    assert offset.text == "+0.123 ms from 192.0.2.1 by ntpq, accurate to 0.424 ms"
    outputs.clear()
    assert asyncio.run(read_clock_offset()) == kernel


def test_a_program_that_is_missing_fails_or_hangs_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_offset, "TIMEOUT_S", 0.2)
    output_of = clock_offset._output_of
    assert asyncio.run(output_of("no-such-program-of-llmtap")) is None
    assert asyncio.run(output_of("sh", "-c", "echo x; exit 1")) is None
    assert asyncio.run(output_of("sleep", "60")) is None
    assert asyncio.run(output_of("echo", "x")) == "x\n"
