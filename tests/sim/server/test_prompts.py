"""Prompts as the engine sees them: their lengths, and blocks that are the same as far as prompts are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.server.reception import prefix_blocks, prompt_lengths
from llmtap.sim.server.shapes import SimulatedRequest
from llmtap.workload.prompts.text import count_tokens


@pytest.mark.parametrize(
    ("prompts", "tokens", "expected"),
    [
        (("hi",), None, [1]),
        (("hi", "hi you two"), None, [1, 3]),
        (("[1, 2, 3]",), 3, [3]),
        (("[1, 2, 3]", "[4, 5]"), 5, [3, 2]),
        ((), 0, []),
    ],
)
def test_lengths(prompts: tuple[str, ...], tokens: int | None, expected: list[int]) -> None:
    assert prompt_lengths(SimulatedRequest("m", True, prompts, tokens)) == expected


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 4, 16]))
def test_two_prompts_have_the_same_blocks_as_far_as_they_begin_alike(
    alike: int, one: int, other: int, size: int
) -> None:
    begins = " ".join(["same"] * alike)
    texts = [begins + " black" * one, begins + " white" * other]
    blocks = [prefix_blocks(text, size) for text in texts]
    for text, found in zip(texts, blocks, strict=True):
        assert len(found) == count_tokens(text) // size
        assert len(set(found)) == len(found), "each stands for all before it, too"
    shared = sum(a == b for a, b in zip(*blocks, strict=False))
    assert shared == alike // size
    assert blocks[0][:shared] == blocks[1][:shared]
