"""A short run of each fuzz target. `python -m tests.native.fuzz` is the full one."""

from random import Random

import pytest

from llmtap import native
from llmtap.net.pool import Pool
from llmtap.net.stream import CompiledStream, PlainStream
from llmtap.net.tls import TlsStream
from llmtap.protocol import encoding
from llmtap.vantage.relay.flow import Flow
from tests.native.codings import Codings
from tests.native.fuzz import fuzz
from tests.native.passages import Passages
from tests.native.targets import TARGETS, Framing
from tests.native.tls_reuse import ANSWERS, BETWEEN, TlsReuse

INPUTS = 10_000
FEWER = {"passages": 1_000, "codings": 5_000, "tls_reuse": 1_000}
"""A passage has sockets, an encrypted connection a handshake; they cost a hundred times as much as a text."""


@pytest.mark.parametrize("name", TARGETS)
def test_no_implementation_differs_from_the_oracle(name: str) -> None:
    fuzz(name, FEWER.get(name, INPUTS), seed=1)


def test_a_wrong_implementation_is_found() -> None:
    def without_the_end(reads: list[bytes]) -> tuple[str, bytes]:
        state, payload = Framing.implementations[0](reads)
        return state, payload[:-1] if payload.endswith(b"\r") else payload

    target = Framing(Random(3))
    target.implementations = (without_the_end,)
    with pytest.raises(AssertionError, match="instead of"):
        for _ in range(INPUTS):
            target.check(target.case())


def test_passages_meet_every_fault() -> None:
    target = Passages(Random(2))
    for _ in range(500):
        target.check(target.case())
    for what in ("slow", "drain", "gone", "lost", "dropped", "paused", "over", "not measured"):
        assert target.seen[what] > 20, what


@pytest.mark.skipif(native.compiled is None, reason=f"the compiled path does not run: {native.REASON}")
def test_a_wrong_passage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not take is kept, but for its first byte."""
    monkeypatch.setattr(CompiledStream, "keep", lambda self, data: PlainStream.keep(self, data[1:]))
    with pytest.raises(AssertionError, match="instead of"):
        for seed in range(20):
            fuzz("passages", 200, seed)


def test_codings_meet_every_fault() -> None:
    target = Codings(Random(4))
    for _ in range(5_000):
        target.check(target.case())
    for what in ("whole", "broken", "too long", *(f"{number} layers" for number in range(1, 5))):
        assert target.seen[what] > 20, what


def _take_each_layer_alone(budget: encoding.DecodingBudget, size: int) -> None:
    budget.decoded_bytes += size
    if size > encoding.RATIO_FREE_BYTES:
        raise encoding.DecodeError("the body decodes to more than 250 times its size")


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (encoding.DecodingBudget, "add_decoded", _take_each_layer_alone),
        (encoding, "RATIO_FREE_BYTES", 1 << 20),
        (encoding, "PIECE_BYTES", 1 << 20),
        (encoding, "_GZIP_MAGIC", b"\x1f"),
    ],
)
def test_a_wrong_decoder_is_found(
    place: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, value)
    with pytest.raises(AssertionError):
        fuzz("codings", INPUTS, seed=5)


def test_connections_meet_every_fault() -> None:
    target = TlsReuse(Random(5))
    for _ in range(2_000):
        target.check(target.case())
    for answer in ANSWERS:
        assert target.seen[f"used again, {answer}"] > 5, answer
        assert target.seen[f"new, {answer}"] > 20, answer
    for between in BETWEEN:
        for how in ("read", "unread"):
            assert target.seen[f"{between}, {how}"] > 20, between


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (TlsStream, "is_alive", lambda stream: not stream.closed),
        (TlsStream, "received_bytes", 1),
        (Flow, "_drop_excess", lambda flow: None),
        (Pool, "take", lambda pool, handler: None),
    ],
)
def test_a_wrong_reuse_of_connections_is_found(
    place: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, value)
    with pytest.raises(AssertionError):
        fuzz("tls_reuse", 2_000, seed=6)
