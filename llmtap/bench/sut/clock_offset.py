"""Read the offset of this machine's clock from its NTP server, and an estimate of its accuracy.

`read_clock_offset` asks chrony, ntpd and systemd-timesyncd by their programs, then the kernel (`adjtimex`),
and returns the first answer of a synchronised clock. It needs no privileges and changes nothing. It cannot
read the clocks of other machines.

Accuracy is an estimate of the largest error: the offset plus the possible error of the path to the NTP server
(root dispersion and half of the root delay of chrony; half of the delay and the jitter of ntpd; the root
distance of timesyncd; the largest error of the kernel).

Sources: IETF draft, 4.7.2 and B.3.1; chronyc(1), "tracking"; ntpq(8), "peers"; timedatectl(1),
"timesync-status"; adjtimex(2).
"""

import asyncio
import ctypes
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

TIMEOUT_S: Final = 2.0
"""Time after which a program is killed, because it probably waits for a daemon that does not answer."""
_STA_UNSYNC: Final = 0x0040
_STA_NANO: Final = 0x2000
_TIME_ERROR: Final = 5
_UNITS: Final[Mapping[str, float]] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER: Final = re.compile(r"\d+\.\d+")
_SPAN: Final = re.compile(r"([+-]?)((?:[\d.]+(?:us|ms|s|min|h) ?)+)")
_PART: Final = re.compile(r"([\d.]+)(us|ms|s|min|h)")


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON of a report: offset of the load generator's clock. All times are in seconds."""

    source: str
    """Program or system call that reported the offset."""
    server: str | None
    """Address of the NTP server, if the source reports it."""
    offset: float
    """This machine's clock minus the reference clock, in seconds."""
    accuracy: float
    """Estimate of the largest error of this machine's clock, in seconds."""

    @property
    def method(self) -> str:
        return f"NTP ({self.source})"

    @property
    def text(self) -> str:
        """The offset as text: `+0.123 ms from 192.0.2.1 by chronyc, accurate to 1.2 ms`."""
        server = f" from {self.server}" if self.server else ""
        shown = f"{self.offset * 1e3:+.3f} ms{server} by {self.source}"
        return f"{shown}, accurate to {self.accuracy * 1e3:.3g} ms"


NOT_KNOWN: Final = "not known: neither chronyc, ntpq, timedatectl nor adjtimex reports a synchronised clock"


async def read_clock_offset() -> ClockOffset | None:
    """Return the offset of this machine's clock, or None if no source reports a synchronised clock."""
    for command, parse in _PROGRAMS.items():
        output = await _output_of(*command)
        if output is not None and (offset := parse(output)) is not None:
            return offset
    return _read_kernel_offset()


async def _output_of(*command: str) -> str | None:
    """Return the output of a program; None if it does not exist, fails or takes longer than `TIMEOUT_S`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin", "LC_ALL": "C"},
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    return output.decode(errors="replace") if process.returncode == 0 else None


def parse_chronyc(output: str) -> ClockOffset | None:
    """Parse the output of `chronyc -n tracking`: lines with a name and a value. None if not synchronised."""
    lines = _values_by_name(output)
    values = [_NUMBER.match(lines.get(name, "")) for name in ("System time", "Root delay", "Root dispersion")]
    if None in values or lines.get("Leap status") == "Not synchronised":
        return None
    offset, delay, dispersion = (float(value[0]) for value in values if value is not None)
    server = re.search(r"\((.+)\)", lines.get("Reference ID", ""))
    return ClockOffset(
        source="chronyc",
        server=server and server[1],
        offset=-offset if "slow of NTP time" in lines["System time"] else offset,
        accuracy=offset + dispersion + delay / 2,
    )


def _values_by_name(output: str) -> dict[str, str]:
    """Return the values of lines such as `Root delay      : 0.005 seconds` by their names."""
    pairs = (line.split(":", 1) for line in output.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def parse_ntpq(output: str) -> ClockOffset | None:
    """Parse the output of `ntpq -pn`: only the line of the server in use, which begins with `*` or `o`."""
    for line in output.splitlines():
        cells = line[1:].split()
        if line[:1] in ("*", "o") and len(cells) >= 10:
            try:
                delay, offset, jitter = (float(cell) / 1e3 for cell in cells[7:10])
            except ValueError:
                continue
            # ntpd reports the server's time minus this clock, so the offset has the opposite sign.
            return ClockOffset(
                source="ntpq", server=cells[0], offset=-offset, accuracy=abs(offset) + delay / 2 + jitter
            )
    return None


def parse_timedatectl(output: str) -> ClockOffset | None:
    """Parse the output of `timedatectl timesync-status`. None if the NTP server has not answered yet."""
    lines = _values_by_name(output)
    offset, distance = (_span_s(lines.get(name, "")) for name in ("Offset", "Root distance"))
    if offset is None or distance is None:
        return None
    server = lines.get("Server", "").split(" ")[0] or None
    # timesyncd reports the server's time minus this clock, so the offset has the opposite sign.
    return ClockOffset(source="timedatectl", server=server, offset=-offset, accuracy=abs(offset) + distance)


def _span_s(text: str) -> float | None:
    """Return the seconds of a systemd time span such as `-1.286ms`, `0` or `1s 20ms (max: 5s)` (1.02 s)."""
    if text.partition(" ")[0] == "0":
        return 0.0
    match = _SPAN.match(text)
    if match is None:
        return None
    try:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(match[2]))
    except ValueError:
        return None
    return -seconds if match[1] == "-" else seconds


_PROGRAMS: Final[Mapping[tuple[str, ...], Callable[[str], ClockOffset | None]]] = {
    ("chronyc", "-n", "tracking"): parse_chronyc,
    ("ntpq", "-pn"): parse_ntpq,
    ("timedatectl", "timesync-status"): parse_timedatectl,
}


class Timex(ctypes.Structure):
    """`struct timex` of Linux: the fields up to `status`, which this module reads, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def kernel_offset(state: int, timex: Timex) -> ClockOffset | None:
    """Return the offset from a call of `adjtimex`, which returned `state`; None if not synchronised."""
    if state < 0 or state == _TIME_ERROR or timex.status & _STA_UNSYNC:
        return None
    # `timex.offset` is the correction that the kernel still has to make; the clock's offset is its negative.
    offset = -timex.offset * (1e-9 if timex.status & _STA_NANO else 1e-6)
    return ClockOffset(source="adjtimex", server=None, offset=offset, accuracy=timex.maxerror * 1e-6)


def _read_kernel_offset() -> ClockOffset | None:
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None  # Only Linux has `adjtimex`.
    timex = Timex()  # `modes` is 0: the kernel only returns its values, which needs no privilege.
    return kernel_offset(adjtimex(ctypes.byref(timex)), timex)
