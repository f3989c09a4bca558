"""What really happened: for each request the schedule, and when each token was sent.

This is what a measurement is held against. All stamps are ns of the monotonic clock; the anchor makes dates
of them. Kept are the newest requests, and all of them in a file of JSON lines if one is named.
"""

import itertools
import logging
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.clock import Clock, WallAnchor

__all__ = ["Submitted", "Truth", "TruthLog"]

TRUTHS_MAX: Final = 10_000
"""Answers that are remembered."""
TOKENS_MAX: Final = 1_000_000
"""Tokens whose times are remembered, some 100 bytes each."""
PAGE_MAX: Final = 1_000
"""Requests told in one answer."""

log = logging.getLogger(__name__)


class Submitted(msgspec.Struct, kw_only=True):
    """One choice of a request, as the engine was asked for it: all that its schedule depends on, besides the
    others."""

    choice: int
    number: int
    """In the order in which requests arrived at the engine; -1 where it did not come so far."""
    arrival_ns: int
    """When it arrived there, or would have: after the input filter, unless that works beside the engine."""
    input: int
    output: int
    """Tokens of the prompt, and those that the engine was to make."""
    predicted: int
    cached: int | None = None
    """Tokens of the prompt that the prefix cache had; None where there is none, or no token came of it."""


class Truth(msgspec.Struct, kw_only=True):
    """One request. Lists hold one item per token, and one such list per choice."""

    seq: int = 0
    """In the order in which the requests ended, from 1."""
    id: str
    path: str
    model: str
    stream: bool
    accepted_ns: int
    """The request was whole; every schedule counts from here."""
    prompt_tokens: int
    made_ns: list[list[int]]
    """When the engine's schedule had each token ready, filters and buffers not counted. An engine behind an
    input filter begins later, and so these are later too."""
    due_ns: list[list[int]]
    """When each was to be sent."""
    sent_ns: list[list[int]]
    """Just before it was written."""
    ended_ns: int = 0
    outcome: str = "client_left"
    """complete, refused (by a guardrail or the model), blocked, turned_away (the scheduler had no room for it
    when it came), given_up (the scheduler had taken it), cancelled (by the client, on a connection that
    stays), cut (the server was stopped), the name of the fault; client_left until the end is reached."""
    status: int = 200
    """Of HTTP; what another protocol says of it, as HTTP would."""
    finish: list[str | None] = []
    """How each choice ended; None where its end was not sent."""
    late_ns_max: int = 0
    """The worst of sent - due."""
    submitted: list[Submitted] = []
    """What an engine was asked for; nothing where the schedule was fixed."""


class TruthLog:
    """Remembers, and writes down."""

    def __init__(self, clock: Clock, file: Path | None = None) -> None:
        self.anchor = WallAnchor.sample(clock)
        self.sent: OrderedDict[str, list[int]] = OrderedDict()
        """By request id: when each token was written, as long as it is remembered."""
        self._ended: deque[Truth] = deque()
        self._tokens = 0
        self._seq = 0
        self._file: BinaryIO | None = None
        if file is not None:
            self._file = file.open("ab")
            self._put({"anchor": self._anchor()})

    def begin(self, request_id: str) -> list[int]:
        """The list for the send times of a request under way."""
        stamps: list[int] = []
        self.sent[request_id] = stamps
        if len(self.sent) > TRUTHS_MAX:
            self.sent.popitem(last=False)
        return stamps

    def end(self, truth: Truth) -> None:
        """A request has ended."""
        self._seq += 1
        truth.seq = self._seq
        if len(self._ended) >= TRUTHS_MAX:
            self._tokens -= _tokens(self._ended.popleft())
        self._ended.append(truth)
        self._tokens += _tokens(truth)
        while self._tokens > TOKENS_MAX and len(self._ended) > 1:
            oldest = self._ended.popleft()
            self._tokens -= _tokens(oldest)
            self.sent.pop(oldest.id, None)
        if self._file is not None:
            self._put(truth)

    def since(self, seq: int) -> dict[str, Any]:
        """Requests that ended after number `seq`, oldest first, a page of them, and where to go on."""
        found = list(itertools.islice((truth for truth in self._ended if truth.seq > seq), PAGE_MAX))
        return {"anchor": self._anchor(), "next": found[-1].seq if found else seq, "truths": found}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _anchor(self) -> dict[str, int]:
        return {
            "mono_ns": self.anchor.mono_ns,
            "wall_ns": self.anchor.wall_ns,
            "width_ns": self.anchor.width_ns,
        }

    def _put(self, line: Any) -> None:
        assert self._file is not None
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as exc:
            log.warning("event=truth_lost error=%r", str(exc))
            self.close()


def _tokens(truth: Truth) -> int:
    return sum(map(len, truth.made_ns))
