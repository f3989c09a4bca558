"""Truth log of the simulated server: when each token was made, due and sent, to check measurements.

`sender.py` (for answers that are not streamed, `server.py`) adds the send times, and `reception.py` adds the
finished request (`Truth`). The log keeps the newest requests for `GET /sim/truth` and the self-test, and
appends all requests as JSON lines to a file if one is named. All times are ns of the monotonic clock; the
anchor converts them to wall-clock time.
"""

import itertools
import logging
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.clock import Clock, WallAnchor

TRUTHS_MAX: Final = 10_000
TOKENS_MAX: Final = 1_000_000
"""Maximum number of tokens of which the times are kept in memory, about 100 bytes each."""
PAGE_TRUTHS_MAX: Final = 1_000
"""Maximum number of truths in one answer."""

log = logging.getLogger(__name__)


class Submitted(msgspec.Struct, kw_only=True):
    """One choice of a request as submitted to the engine."""

    choice: int
    number: int
    """Number in the engine, in the order of arrival; -1 if the request did not arrive there."""
    arrival_ns: int
    """Planned arrival at the engine, after the input filter."""
    input: int
    output: int
    """Number of tokens that the engine had to make; `input` is the number of prompt tokens."""
    predicted: int
    cached: int | None = None
    """Prompt tokens found in the prefix cache; None: no cache, or no token was made."""


class Truth(msgspec.Struct, kw_only=True):
    """Log entry of one request. A nested list has a list for each choice, with an item for each token."""

    seq: int = 0
    id: str
    path: str
    model: str
    stream: bool
    accepted_ns: int
    """Time at which the request was read completely: the start of its schedule."""
    prompt_tokens: int
    made_ns: list[list[int]]
    """Time at which the engine made each token, before filters and buffers."""
    due_ns: list[list[int]]
    sent_ns: list[list[int]]
    ended_ns: int = 0
    outcome: str = "client_left"
    """How the request ended: complete, refused (by a guardrail or the model), blocked (by the output filter),
    given_up (by the scheduler), cancelled (by the client, on a connection that stays open), cut (the server
    was stopped), client_left (the client disconnected before the end), or the name of the fault."""
    status: int = 200
    finish: list[str | None] = []
    """Finish reason of each choice; None if its end was not sent."""
    late_ns_max: int = 0
    submitted: list[Submitted] = []


class TruthAnchor(msgspec.Struct, frozen=True):
    """A time on both clocks; they were read within `width_ns`."""

    mono_ns: int
    wall_ns: int
    width_ns: int


class TruthPage(msgspec.Struct, frozen=True):
    anchor: TruthAnchor
    next: int
    """Number after which the next page begins."""
    truths: list[Truth]


class TruthLog:
    """Newest requests in memory; all requests in a file, if one is named."""

    def __init__(self, clock: Clock, file: Path | None = None) -> None:
        self.anchor = WallAnchor.sample(clock)
        self.sent: OrderedDict[str, list[int]] = OrderedDict()
        self._ended: deque[Truth] = deque()
        self._tokens = 0
        self._seq = 0
        self._file: BinaryIO | None = None
        if file is not None:
            self._file = file.open("ab")
            self._put({"anchor": self._anchor()})

    def begin(self, request_id: str) -> list[int]:
        """Return the list for the send times of a new request."""
        stamps: list[int] = []
        self.sent[request_id] = stamps
        if len(self.sent) > TRUTHS_MAX:
            self.sent.popitem(last=False)
        return stamps

    def end(self, truth: Truth) -> None:
        self._seq += 1
        truth.seq = self._seq
        if len(self._ended) >= TRUTHS_MAX:
            self._tokens -= _token_count(self._ended.popleft())
        self._ended.append(truth)
        self._tokens += _token_count(truth)
        while self._tokens > TOKENS_MAX and len(self._ended) > 1:
            oldest = self._ended.popleft()
            self._tokens -= _token_count(oldest)
            self.sent.pop(oldest.id, None)
        if self._file is not None:
            self._put(truth)

    def page_since(self, seq: int) -> TruthPage:
        """Return a page of requests that ended after number `seq`, oldest first, and the next `seq`."""
        page = list(itertools.islice((truth for truth in self._ended if truth.seq > seq), PAGE_TRUTHS_MAX))
        return TruthPage(self._anchor(), page[-1].seq if page else seq, page)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _anchor(self) -> TruthAnchor:
        anchor = self.anchor
        return TruthAnchor(anchor.mono_ns, anchor.wall_ns, anchor.width_ns)

    def _put(self, line: Any) -> None:
        assert self._file is not None
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as exc:
            log.warning("event=truth_lost error=%r", str(exc))
            self.close()


def _token_count(truth: Truth) -> int:
    return sum(map(len, truth.made_ns))
