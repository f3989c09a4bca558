"""Parts that all load senders use: the target, deferred work, and the lateness of the event loop.

The senders are `http.py` and `prompt_sender.py`; `run.py` calls them. `parse_target` checks the URL, endpoint
and header fields of `--target` and `--header`, and returns a `LoadTarget`, which writes the head of each
request. `DeferredWork` defers parsing and does it in short slices, because sending and reading must be on
time. With kernel timestamps and many streams, it lets the loop sleep for up to 1 ms, so that one read gets
several pieces. `Lateness` measures how long a byte has possibly waited before it was read.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import SplitResult, urlsplit

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.net.lag import make_lag_meter
from llmtap.net.pacing import Pacer
from llmtap.net.pool import Origin, parse_origin
from llmtap.net.stream import KERNEL_FLOOR_NS, Timebase
from llmtap.protocol.http1 import Headers
from llmtap.units import NS_PER_S
from llmtap.workload.prompts.tokenizer import open_tokenizer

SLICE_NS: Final = 200_000
"""Longest slice of deferred work; then the loop reads its sockets. A piece of work takes about 100 us."""
WAITING_MAX: Final = 8_192
"""Maximum number of deferred pieces of work, about 10 KB each; further pieces are done at once."""
GATHER_NS: Final = 1_000_000
"""Longest sleep of the loop to gather data."""
WAKING_NS: Final = 100_000
"""Reserve for a sleep that ends too late: the sleep ends this time before the next request is due."""
BEHIND_NS: Final = 2 * GATHER_NS
READS_MIN: Final = 2_000
READS_OF_STREAM_MAX: Final = 100
"""With more reads per second and stream, the loop does not sleep: it would read several pieces of one stream
together, and these would share one timestamp."""

mono_ns = SystemClock.mono_ns


ANSWER_BYTES_MAX: Final = 256 << 20
"""Maximum size of an answer: a million tokens of 250 bytes each. `protocol/encoding.py` has the same limit
for a decoded body."""
TOO_LONG: Final = f"the answer is longer than {ANSWER_BYTES_MAX >> 20} MiB"


class DeferredWork:
    """Deferred work of one loop. Urgent pieces come first; otherwise the order of `add` is kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, gathers: bool = False) -> None:
        """`gathers`: the loop is allowed to sleep to gather data, because timestamps come from the kernel."""
        self._loop = loop
        self._may_gather = gathers
        """Whether the loop may sleep to read data of many sockets in one turn."""
        self._is_gathering = False
        """Whether the loop sleeps, so that one turn reads data of many sockets."""
        self._read_count = 0
        """Number of reads since then."""
        self._rate_measured_ns = mono_ns()
        """Time of the latest measurement of the rate of reads."""
        self._urgent_work: deque[Callable[[], None]] = deque()
        """Work that precedes all other."""
        self._waiting_work: deque[Callable[[], None]] = deque()
        self._turn_is_scheduled = False
        """Whether the event loop will call `_schedule_turn`."""
        self._is_behind = False
        """Whether the last read was late, so that other sockets probably have data too."""
        self.pacer: Pacer | None = None
        """Pacer of the run, so that neither work nor sleep delays a request that is due."""

    def add(self, work: Callable[[], None], *, urgent: bool = False) -> None:
        if urgent:
            self._urgent_work.append(work)
        else:
            self._waiting_work.append(work)
            if len(self._waiting_work) > WAITING_MAX:
                self._waiting_work.popleft()()
        self._request_turn()

    def is_behind(self, t_ns: int) -> bool:
        """Return whether data that arrived at `t_ns` must be parsed later, because other data waits."""
        self._read_count += 1
        if mono_ns() - t_ns > BEHIND_NS:
            self._is_behind = True
        return self._is_behind

    def after_read(self) -> None:
        """Plan a sleep to gather more data, if useful, and send the requests that are due. Call this after
        each read."""
        if self._is_gathering and not self._turn_is_scheduled:
            self._request_turn()
        if self.pacer is not None:
            self.pacer.catch_up()

    def judge(self, streams: int) -> None:
        """Decide from the recent read rate whether the loop sleeps to gather data."""
        now_ns = mono_ns()
        rate = self._read_count * NS_PER_S / max(1, now_ns - self._rate_measured_ns)
        self._read_count, self._rate_measured_ns = 0, now_ns
        self._is_gathering = self._may_gather and READS_MIN <= rate <= READS_OF_STREAM_MAX * streams

    def finish(self) -> None:
        """Do all deferred work now."""
        urgent, waiting = self._urgent_work, self._waiting_work
        while urgent or waiting:
            (urgent or waiting).popleft()()

    def _request_turn(self) -> None:
        """Ask the event loop for a turn of deferred work."""
        if not self._turn_is_scheduled:
            self._turn_is_scheduled = True
            self._loop.call_soon(self._schedule_turn)

    def _schedule_turn(self) -> None:
        """Run deferred work now, or after the next reads if data waits in sockets."""
        self._turn_is_scheduled = False
        if self._urgent_work or self._waiting_work:
            if self._is_behind:
                self._is_behind = False
                self._request_turn()
            else:
                self._run_slice()
        elif self._is_gathering:
            self._sleep()

    def _run_slice(self) -> None:
        """Run deferred work until the slice of time has passed or a request is due."""
        urgent, waiting, pacer = self._urgent_work, self._waiting_work, self.pacer
        end_ns = mono_ns() + SLICE_NS
        while urgent or waiting:
            (urgent or waiting).popleft()()
            if pacer is not None:
                pacer.catch_up()
            if mono_ns() >= end_ns:
                break
        if urgent or waiting:
            self._request_turn()  # Continue in the loop's next iteration, after it has read its sockets.

    def _sleep(self) -> None:
        """Sleep shortly, so that one turn reads data of many sockets."""
        wait_ns = GATHER_NS
        if self.pacer is not None:
            wait_ns = min(wait_ns, self.pacer.next_ns - mono_ns() - WAKING_NS)
        if wait_ns > 0:
            time.sleep(wait_ns / NS_PER_S)  # No request is due within this time.


PROBE_NS: Final = 2_000_000
GRAIN_NS: Final = 1_100_000
"""Resolution of the loop's timers: a probe that is later than this counts as late."""
PROBES_MAX: Final = 1_000
"""Number of latest probes whose times are kept: those of 2 s."""
CALLS: Final = 5
"""Number of probes from one call of `each` to the next: 10 ms."""
CHECKS: Final = 25
"""Number of probes from one reading of the wall clock to the next: 50 ms."""


class Lateness:
    """Lateness of one event loop, measured by a timer until `close`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, kernel: bool, each: Callable[[int], None] | None = None
    ) -> None:
        """`kernel`: connections have kernel timestamps. `each`: function called every 10 ms with the time."""
        self._loop = loop
        self._kernel = kernel
        """Whether reads have timestamps of the kernel, so the loop's delay matters less."""
        self._on_interval = each
        floor_ns, turns = (KERNEL_FLOOR_NS, 1) if kernel else (GRAIN_NS, 2)
        self.meter = make_lag_meter(floor_ns, blind_ns=PROBE_NS + GRAIN_NS, turns=turns)
        """Largest delays lately, to bound the error of timestamps."""
        self.timebase = Timebase(SystemClock(), self.meter)
        self._probe_count = 0
        self._probe_times_ns: deque[int] = deque(maxlen=PROBES_MAX)
        """Times of the latest probes."""
        self._start()

    def worst_since(self, t_ns: int) -> int:
        """Return the longest time that a byte can have waited unread since `t_ns`."""
        now_ns = mono_ns()
        # After a stall, the loop reads its sockets before its timers run. The next probe is then overdue but
        # has not recorded the stall, so record it here.
        late_ns = now_ns - self._due_ns - GRAIN_NS
        if late_ns > 0:
            self.meter.note(now_ns, late_ns)
        return self.meter.worst_since(t_ns)

    def longest_wait(self, since_ns: int, t_ns: int) -> int:
        """Return the longest time between the arrival of a byte and `t_ns`, the timestamp of its read.

        The byte arrived after `since_ns`. Between two probes the loop reads all its sockets, so the byte also
        arrived after the second to last probe before `t_ns`.
        """
        turns = (probe_ns for probe_ns in reversed(self._probe_times_ns) if probe_ns <= t_ns)
        next(turns, None)
        return min(self.worst_since(since_ns), t_ns - next(turns, since_ns))

    def error_since(self, t_ns: int) -> int:
        """Return the largest error, since `t_ns`, of the timestamp of an event that is the last one in its
        read.

        A kernel timestamp has only the error of the clock conversion: the time of the read does not matter.
        """
        return self.timebase.error_since(t_ns) if self._kernel else self.worst_since(t_ns)

    def close(self) -> None:
        self._timer.cancel()

    def _start(self) -> None:
        self._due_ns = mono_ns() + PROBE_NS
        self._timer = self._loop.call_later(PROBE_NS / 1e9, self._probe)

    def _probe(self) -> None:
        """Note how late this call is, and set the next one."""
        now_ns = mono_ns()
        late_ns = now_ns - self._due_ns
        if not self._kernel or late_ns > GRAIN_NS:
            self.meter.note(now_ns, max(0, late_ns - GRAIN_NS))
        self._probe_count += 1
        self._probe_times_ns.append(now_ns)
        if self._probe_count % CHECKS == 0:
            self.timebase.resample()
        if self._on_interval is not None and self._probe_count % CALLS == 0:
            self._on_interval(now_ns)
        self._start()


TEXTS_KEPT: Final = 1 << 16
"""Number of texts whose token count is cached: most events repeat one of a few thousand words."""


def token_counter(tokenizer: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text. Raises ConfigError naming `--tokenizer`."""
    encode = open_tokenizer(tokenizer, "--tokenizer").encode
    return lru_cache(TEXTS_KEPT)(lambda text: len(encode(text)))


Spoken = Literal["http", "responses", "realtime", "grpc"]
WEBSOCKET: Final = ("responses", "realtime")

PATHS: Final = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
_TOKEN: Final = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_OURS: Final = frozenset({b"host", b"content-length", b"content-type", b"transfer-encoding", b"connection"})


def split_url(url: str, place: str = "--target") -> SplitResult:
    """Return the parts of a URL. Raises ConfigError with `place` if it is no URL or its port is invalid."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is no port
    except ValueError as exc:
        raise ConfigError(place, f"{url!r} is not a URL: {exc}", "such as http://127.0.0.1:8000") from None
    return parts


def protocol_of(url: str) -> Spoken:
    """Return the protocol of a target. A WebSocket is Realtime unless its path ends in `/responses`.

    Raises ConfigError if the target is no URL.
    """
    parts = split_url(url)
    match parts.scheme.lower():
        case "ws" | "wss":
            return "responses" if parts.path.rstrip("/").endswith("/responses") else "realtime"
        case "grpc" | "grpcs":
            return "grpc"
    return "http"


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Server to which requests are sent."""

    origin: Origin
    path: bytes
    headers: Headers = field(default_factory=list)
    """Fields in addition to Host, Content-Type and Content-Length. They can contain keys, so they are sent
    only to the target and never shown."""

    def head(
        self,
        body_bytes: int,
        extra: Sequence[tuple[bytes, bytes]] = (),
        *,
        close: bool = False,
        path: bytes = b"",
    ) -> bytes:
        """Return the head of a request. `path`: a result of `path_at`; b"" for the target's own path."""
        lines = [
            b"POST " + self.origin.prefix + (path or self.path) + b" HTTP/1.1",
            b"Host: " + self.origin.authority,
            b"Content-Type: application/json",
            b"Content-Length: %d" % body_bytes,
        ]
        lines += [name + b": " + value for name, value in (*self.headers, *extra)]
        if close:
            lines.append(b"Connection: close")
        lines.append(b"\r\n")
        return b"\r\n".join(lines)


def parse_target(url: str, endpoint: str, headers: Headers) -> LoadTarget:
    """Parse `http://host:port[/prefix]`. `endpoint`: a key of PATHS, or a path.

    If the prefix ends in /v1, the /v1 of the endpoint's path is not added again. Raises ConfigError naming
    `--target` or `--header`.
    """
    origin = parse_origin(url, "--target")
    path = endpoint if endpoint.startswith("/") else PATHS[endpoint]
    check_fields(headers)
    return LoadTarget(origin, path_at(origin, path), headers)


def path_at(origin: Origin, path: str) -> bytes:
    """Return the path to append to the prefix of the target's URL.

    If `path` begins with the whole prefix, or with `/v1` and the prefix ends in it, this part is removed: the
    prefix has it already.
    """
    prefix = origin.prefix.decode()
    for begin in (prefix, "/v1" if prefix.endswith("/v1") else ""):
        if begin and path.startswith(begin + "/"):
            return path.removeprefix(begin).encode()
    return path.encode()


def check_fields(headers: Headers, place: str = "--header") -> None:
    """Raise ConfigError naming `place` if a field cannot be sent; the message never contains its value."""
    for name, value in headers:
        if not name or not _TOKEN.issuperset(name):
            raise ConfigError(
                place, "the name of a header is not valid", "use only letters, digits and hyphens"
            )
        if name.lower() in _OURS:
            raise ConfigError(place, f"llmtap itself sets the header {name.decode()!r}", "leave it out")
        if any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in value):
            problem = f"the value of the header {name.decode()!r} has control characters"
            raise ConfigError(place, problem, "use only printable characters")


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, which can be secret."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}" + (
        f":{parts.port}{parts.path}" if parts.port else parts.path
    )
