"""All demands of seed 000 in its order, and the key words in it that demand nothing of a benchmark."""

from collections.abc import Mapping
from typing import Final

from llmtap.bench.compliance import (
    clocks,
    comparison,
    conduct,
    guardrails,
    latency,
    load_generator,
    rates,
    states,
    streaming,
    tokens,
    warmup,
    workloads,
)
from llmtap.bench.compliance.requirement import Requirement

__all__ = ["EXCLUDED", "REQUIREMENTS", "order_of"]

_READING: Final = "asks the reader to consult the terminology document: no test satisfies or breaks it"
_WORDS: Final = "lists the key words"
_STATUS: Final = "defines what compliance is: it is carried out in matrix.py"
EXCLUDED: Final[Mapping[str, str]] = {
    "Abstract-1": _READING,
    "1-1": _READING,
    **{f"2-{n}": _WORDS for n in range(1, 12)},
    **{f"2-{n}": _STATUS for n in range(12, 17)},
}
"""Key words of the draft that are no demand, by section and place, and why."""


def order_of(id: str) -> tuple[list[int], bool, int, str]:
    """Where the draft has it; what has no key word comes after what has one."""
    section, _, own = id.rpartition("-")
    procedure = own.startswith("p")
    digits = own.lstrip("p").rstrip("abcdefghijklmnopqrstuvwxyz")
    return [int(part) for part in section.split(".")], procedure, int(digits), own


REQUIREMENTS: Final[tuple[Requirement, ...]] = tuple(
    sorted(
        (
            row
            for room in (
                load_generator, workloads, tokens, warmup, streaming, clocks, guardrails, latency, rates,
                states, comparison, conduct,
            )
            for row in room.ROWS
        ),
        key=lambda row: order_of(row.id),
    )
)  # fmt: skip
