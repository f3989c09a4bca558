"""Ids of blocks are numbered by first use, made larger where that can be, counted where it cannot."""

import pytest

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.block_ids import BlockIds
from llmtap.traces.format import TraceWritten, batch_of


def of(
    blocks: list[list[int] | None], tokens: list[int], size: int, unit: str, kind: str
) -> tuple[list[list[int] | None], TraceWritten]:
    made = BlockIds(CaptureInfo(blocks=kind), 512)
    n = len(blocks)
    columns = {"blocks": blocks, "input_tokens": tokens, "block_size": [size] * n, "block_unit": [unit] * n}
    return made.of(batch_of(n, columns)), reported(made)


def reported(made: BlockIds) -> TraceWritten:
    written = TraceWritten()
    made.report(written)
    return written


def test_salted_hashes_are_numbered_by_first_use_over_all_batches() -> None:
    made = BlockIds(CaptureInfo(blocks="salted"), 512)
    columns = {"block_size": [512, 512], "block_unit": ["tokens", "tokens"], "input_tokens": [1_000, 600]}
    assert made.of(batch_of(2, {"blocks": [[-9, 7], [-9, 5]], **columns})) == [[0, 1], [0, 2]]
    assert made.of(batch_of(2, {"blocks": [[7, 5], None], **columns})) == [[1, 2], None]
    assert reported(made).notes == ["1 rows have no prefix blocks, and are written without them"]


@pytest.mark.parametrize(
    ("size", "unit", "blocks", "tokens", "found", "changed"),
    [
        (512, "tokens", [[-9, 7]], [600], [[-9, 7]], None),
        (256, "tokens", [[1, 2, 3], [1, 2, 3, 4]], [600, 1024], [[2, 3], [2, 4]], "2 rows had smaller"),
        (256, "tokens", [[]], [0], [[]], "1 rows had smaller blocks: of their ids every n-th, and the last"),
        (
            2048,
            "bytes",
            [[1, 2]],
            [600],
            [[1, 2]],
            "blocks of 2,048 bytes go out as ids of 512 tokens: 0 rows",
        ),
        (
            2048,
            "bytes",
            [[1, 2, 3]],
            [600],
            [[1, 2, 3]],
            "1 rows have another number of ids than ceil(input_length / 512); with meter.tokenizer set",
        ),
        (1024, "tokens", [[1]], [600], [[1]], "blocks of 1,024 tokens go out as ids of 512 tokens: 1 rows"),
    ],
)
def test_other_sizes_are_made_larger_or_left(
    size: int,
    unit: str,
    blocks: list[list[int] | None],
    tokens: list[int],
    found: list[list[int]],
    changed: str | None,
) -> None:
    made, told = of(blocks, tokens, size, unit, "trace")
    assert made == found
    assert told.notes == []
    if changed is None:
        assert told.changed == {}
    else:
        assert changed in told.changed["prefix blocks"]


def test_a_rule_that_is_broken_is_counted() -> None:
    _, told = of([[1], [1, 2], []], [1024, 600, 5], 512, "tokens", "trace")
    assert told.notes == ["2 rows have another number of ids than ceil(input_length / 512)"]
    assert told.changed == {}, "they came like this"
