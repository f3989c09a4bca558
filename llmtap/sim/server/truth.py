"""Truth log of the simulated server: times at which each token was made, due and sent, to check measurements.

`sender.py` adds the send times of streams, and `server.py` those of other answers; `reception.py` adds the
`Truth` of a finished request. The log has the newest requests in memory, for `GET /sim/truth` and the
self-test. If a file is given, all requests are appended to it as JSON lines. All times are ns of the
monotonic clock; the anchor converts them to wall-clock time.
"""

import itertools
import logging
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.clock import Clock, WallAnchor

TRUTHS_MAX: Final = 10_000
"""Maximum number of requests in memory; the oldest are removed."""
TOKENS_MAX: Final = 1_000_000
"""Maximum number of tokens whose times are in memory (100 bytes each); the oldest requests are removed."""
PAGE_TRUTHS_MAX: Final = 1_000
"""Maximum number of requests in one page of `GET /sim/truth`; `next` leads to the next page."""

log = logging.getLogger(__name__)


class Submitted(msgspec.Struct, kw_only=True):
    """One choice of a request, as submitted to the engine."""

    choice: int
    """Index of the choice in the answer."""
    number: int
    """Number in the engine, in the order of arrival; -1 if the choice did not arrive there."""
    arrival_ns: int
    """Planned arrival at the engine, after the input filter."""
    input: int
    """Number of prompt tokens."""
    output: int
    """Number of tokens that the engine had to make; `predicted` is their predicted number."""
    predicted: int
    """Predicted number of output tokens."""
    cached: int | None = None
    """Number of prompt tokens found in the prefix cache; None: no cache, or no token was made."""


class Truth(msgspec.Struct, kw_only=True):
    """Log entry of one request. A nested list has a list for each choice, with an item for each token."""

    seq: int = 0
    """Number in the log, in the order in which requests ended; the first is 1."""
    id: str
    """Id that the response names."""
    path: str
    model: str
    stream: bool
    accepted_ns: int
    """Time at which the request was read completely: the start of its schedule."""
    prompt_tokens: int
    made_ns: list[list[int]]
    """Time at which the engine made each token, before filters and buffers."""
    due_ns: list[list[int]]
    """Scheduled send time of each token; `sent_ns`: actual send time."""
    sent_ns: list[list[int]]
    """Send time of each token."""
    ended_ns: int = 0
    """Time at which the answer ended."""
    outcome: str = "client_left"
    """Way in which the request ended: complete, refused (by a guardrail or the model), blocked (by the output
    filter), given_up (by the scheduler), cancelled (by the client, on a connection that stays open), cut (the
    server was stopped), client_left (the client disconnected before the end), or the name of the fault."""
    status: int = 200
    finish: list[str | None] = []
    """Finish reason of each choice; None if its end was not sent."""
    late_ns_max: int = 0
    """Longest time between the scheduled and the actual time of a write."""
    submitted: list[Submitted] = []
    """Choices that were submitted to the engine; empty with a fixed schedule."""


class TruthAnchor(msgspec.Struct, frozen=True):
    """The same moment on the monotonic clock and the wall clock. Both were read within `width_ns`."""

    mono_ns: int
    wall_ns: int
    width_ns: int
    """Largest distance between the readings of both clocks."""


class TruthPage(msgspec.Struct, frozen=True):
    """Answer to `GET /sim/truth`."""

    anchor: TruthAnchor
    next: int
    """Value of `since` that returns the next page: the `seq` of the last request of this page."""
    truths: list[Truth]


class TruthLog:
    """Log of the newest requests in memory, and of all requests in a file, if one is given."""

    def __init__(self, clock: Clock, file: Path | None = None) -> None:
        self.anchor = WallAnchor.sample(clock)
        """Both clocks at one moment, to convert times."""
        self.send_times: OrderedDict[str, list[int]] = OrderedDict()
        """Send times of the tokens of each request, by request id; the oldest request is first."""
        self._truths: deque[Truth] = deque()
        self._tokens = 0
        """Number of tokens of the requests in `_truths`."""
        self._last_seq = 0
        """Number of the newest entry, by which a reader continues."""
        self._file: BinaryIO | None = None
        if file is not None:
            self._file = file.open("ab")
            self._append_line({"anchor": self._anchor()})

    def begin(self, request_id: str) -> list[int]:
        """Add a request, and return the list to which its sender must append the send times of tokens."""
        stamps: list[int] = []
        self.send_times[request_id] = stamps
        if len(self.send_times) > TRUTHS_MAX:
            self.send_times.popitem(last=False)
        return stamps

    def end(self, truth: Truth) -> None:
        """Add a finished request to the log. Remove the oldest requests if the log is full."""
        self._last_seq += 1
        truth.seq = self._last_seq
        if len(self._truths) >= TRUTHS_MAX:
            self._tokens -= _token_count(self._truths.popleft())
        self._truths.append(truth)
        self._tokens += _token_count(truth)
        while self._tokens > TOKENS_MAX and len(self._truths) > 1:
            oldest = self._truths.popleft()
            self._tokens -= _token_count(oldest)
            self.send_times.pop(oldest.id, None)
        if self._file is not None:
            self._append_line(truth)

    def page_since(self, seq: int) -> TruthPage:
        """Return the oldest requests with numbers above `seq`, at most PAGE_TRUTHS_MAX."""
        page = list(itertools.islice((truth for truth in self._truths if truth.seq > seq), PAGE_TRUTHS_MAX))
        return TruthPage(self._anchor(), page[-1].seq if page else seq, page)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _anchor(self) -> TruthAnchor:
        anchor = self.anchor
        return TruthAnchor(anchor.mono_ns, anchor.wall_ns, anchor.width_ns)

    def _append_line(self, line: Any) -> None:
        assert self._file is not None
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as exc:
            log.warning("event=truth_lost file=%r error=%r", self._file.name, str(exc))
            self.close()


def _token_count(truth: Truth) -> int:
    return sum(map(len, truth.made_ns))
