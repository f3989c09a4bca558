"""A short run of each fuzz target. `python -m tests.native.fuzz` is the full one."""

from random import Random

import pytest

from llmtap import native
from llmtap.net.stream import CompiledStream, PlainStream
from tests.native.fuzz import fuzz
from tests.native.passages import Passages
from tests.native.targets import TARGETS, Framing

INPUTS = 10_000
FEWER = {"passages": 1_000}
"""A passage has sockets, and costs a hundred times as much as a parsed text."""


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
