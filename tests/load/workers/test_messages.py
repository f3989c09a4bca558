"""Messages arrive as they were sent, however the pipe cuts them."""

import select
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.load.http import SenderOptions
from llmtap.load.run import StopErrors
from llmtap.load.workers.worker_handle import (
    Done,
    Frames,
    Progress,
    WorkerReady,
    WorkerScript,
    WorkerSetup,
    frame,
)
from llmtap.units import NEVER, Duration, decode_special, encode_special

MESSAGES: list[WorkerReady | Progress | Done] = [
    WorkerReady(3),
    Progress(1, 2, 3, 4, 5, 6, 1.5, None, 2.5, None, 0.0, 7, 8, "too many errors"),
    Progress(0, 0, 0, 0, 0, 0, None, None, None, None, None),
    Done(b"\x00tally" * 30_000, None, 1, 2, 3, 4, 5, 6, 7, True),
    Done(b"", "somebody stopped it", 0, 0, 0, 0, 0, 0, 0, False, "No space left on device"),
]
WHOLE = b"".join(frame(message) for message in MESSAGES)


def heard(pieces: list[bytes]) -> list[WorkerReady | Progress | Done]:
    frames = Frames()
    return [message for piece in pieces for message in frames.feed(piece)]


def test_whole_and_in_pieces_of_one_byte() -> None:
    assert heard([WHOLE]) == MESSAGES
    small = b"".join(frame(message) for message in MESSAGES[:3])
    assert heard([small[i : i + 1] for i in range(len(small))]) == MESSAGES[:3]
    assert heard([b"", WHOLE, b""]) == MESSAGES


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    assert heard([WHOLE[a:b] for a, b in pairwise(edges)]) == MESSAGES


@pytest.mark.parametrize("cut", [1, 3, 4, 5, -1])
def test_a_message_that_was_cut_is_none(cut: int) -> None:
    assert heard([frame(MESSAGES[1])[:cut]]) == []


def test_progress_fits_into_a_pipe_at_once() -> None:
    """Else it could be written in part, where nobody reads (pipe(7))."""
    most = Progress(
        *[NEVER] * 6, *[1.7e308] * 5, NEVER, NEVER, "1048576 of the latest 1048576 answers failed"
    )
    assert len(frame(most)) < select.PIPE_BUF


def test_a_setup_travels() -> None:
    setup = WorkerSetup(
        sender=SenderOptions(retries=1, timeout=Duration(5), model="m"), url="http://a",
        endpoint="completions", headers=[("Authorization", "Bearer \u00e9")], script_fd=3, bodies_fd=4,
        spill_fd=None, slots=2, limit_in_flight=9, stop_errors=StopErrors(0.5, 10), slo="ttft<1",
    )  # fmt: skip
    line = msgspec.json.encode(setup, enc_hook=encode_special)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=WorkerSetup, dec_hook=decode_special) == setup


def test_a_script_travels() -> None:
    script = WorkerScript(b"r", b"a", b"f", b"t", ["x", ""], b"b", b"e")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(script), type=WorkerScript) == script
