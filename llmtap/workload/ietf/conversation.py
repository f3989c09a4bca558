"""Conversation: chats, half of which share a system prompt of 200 tokens (seed 000, 4.3.2.3 and A.3).

The draft's data set is not part of this project. Without a file, lengths pass through the percentiles that
A.3.2 documents; with one, messages and answers are the file's, and the documented figures are a check of it.
"""

from pathlib import Path
from typing import Any, Final

from llmtap.workload.claims import Claim
from llmtap.workload.composed import Composed
from llmtap.workload.datasets.recorded import RecordedDataset
from llmtap.workload.datasets.sharegpt import CONTENT, read_sharegpt
from llmtap.workload.lengths import Percentiles
from llmtap.workload.sharing import Sharing

__all__ = ["CLAIMS", "CONVERSATION", "conversation_of"]

_SHARING: Final = Sharing(fraction=0.5, tokens=200)
_INPUT: Final = Percentiles(points=((50, 156), (95, 892), (99, 2_134)), max=8_192)
_OUTPUT: Final = Percentiles(points=((50, 234), (95, 789), (99, 1_567)), max=4_096)
CLAIMS: Final = (
    Claim("message", "p50", 156, "A.3.2"),
    Claim("message", "p95", 892, "A.3.2"),
    Claim("message", "p99", 2_134, "A.3.2"),
    Claim("output", "p50", 234, "A.3.2"),
    Claim("output", "p95", 789, "A.3.2"),
    Claim("output", "p99", 1_567, "A.3.2"),
    Claim("sharing", "share", 0.5, "4.3.2.3"),
    Claim("context", "min", 200, "4.3.2.3"),
)
_SYSTEM_PROMPT: Final = {
    "section": "A.3.2, 4.3.2.3", "says": "nothing on whether input tokens include the system prompt",
    "here": "they do not: more than half of the documented lengths are below its 200 tokens",
}  # fmt: skip
_ABOUT: Final[dict[str, Any]] = {"source": "seed 000, 4.3.2.3 and A.3"}

CONVERSATION: Final = Composed(
    "conversation", _INPUT, _OUTPUT, sharing=_SHARING, claims=CLAIMS,
    about=_ABOUT | {
        "about": "chats with A.3.2's percentiles of lengths; half share a system prompt of 200 tokens",
        "deviations": [
            {
                "section": "A.3.1", "says": "ShareGPT, vicuna_cleaned subset of 2023-04-12",
                "here": "without a file of it, lengths have the percentiles of A.3.2 and texts are words"
                " without meaning; conversation:FILE takes a file's",
            },
            {
                "section": "A.3.2", "says": "P50, P95 and P99",
                "here": "the quantile function passes through all three; between them, and beyond, the"
                " length's logarithm is linear in the normal score: one lognormal through P50 and P95 misses"
                " P99. At most 8,192 tokens of input and 4,096 of output",
            },
            _SYSTEM_PROMPT,
        ],
    },
)  # fmt: skip


def conversation_of(path: Path, place: str) -> RecordedDataset:
    """The same with messages and answers of a ShareGPT-shaped file. Raises ConfigError of the place."""
    return RecordedDataset(
        "conversation", read_sharegpt(path, place), CONTENT, sharing=_SHARING, claims=CLAIMS,
        about=_ABOUT | {
            "about": f"chats of {path.name}; half share a system prompt of 200 tokens",
            "deviations": [_SYSTEM_PROMPT],
        },
    )  # fmt: skip
