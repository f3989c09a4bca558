"""Code-Completion: most requests share one of ten repository contexts (seed 000, 4.3.2.4 and A.4)."""

from pathlib import Path
from typing import Any, Final

from llmtap.workload.claims import Claim
from llmtap.workload.composed import Composed
from llmtap.workload.datasets.recorded import RecordedDataset
from llmtap.workload.datasets.stack import CONTENT, read_stack
from llmtap.workload.lengths import LogNormal, Percentiles, UniformLengths
from llmtap.workload.programs import Code
from llmtap.workload.sharing import Sharing

__all__ = ["CLAIMS", "CODE_COMPLETION", "DOCUMENTED", "code_completion_of"]

_SHARING: Final = Sharing(fraction=0.8, tokens=UniformLengths(min=512, max=1_024), contexts=10, zipf=1.5)
_INPUT: Final = Percentiles(
    points=((5, 76), (25, 577.75), (50, 1_452.5), (75, 2_692), (90, 5_025), (95, 7_375.35), (99, 7_436)),
    min=3, max=7_437,
)  # fmt: skip
"""What production code completion is said to be like: Azure's LLM inference trace 2023, code."""
_OUTPUT: Final = LogNormal(mu=4.0, sigma=1.5, max=2_048)
DOCUMENTED: Final = (
    Claim("output", "p50", None, "4.3.2.4: exp(mu)"),
    Claim("output", "p95", None, "4.3.2.4"),
    Claim("output", "mean", None, "4.3.2.4"),
    Claim("sharing", "share", 0.8, "A.4.2"),
    Claim("context", "min", None, "A.4.2: at least 512"),
    Claim("context", "max", None, "A.4.2: at most 1,024"),
    Claim("context", "share 1", None, "A.4.2: Zipf, s=1.5"),
    Claim("context", "share 2", None, "A.4.2: Zipf, s=1.5"),
    Claim("context", "share 10", None, "A.4.2: Zipf, s=1.5"),
)
CLAIMS: Final = (
    *(
        Claim("message", f"p{percent:g}", tokens, "Azure code trace 2023")
        for percent, tokens in _INPUT.points
    ),
    *DOCUMENTED,
)
_DEVIATIONS: Final = (
    {
        "section": "4.3.2.4", "says": "output lognormal(4.0, 1.5) without bounds",
        "here": "at least 1 and at most 2,048 tokens, the cap of 4.3.2.2: it cuts 0.8 % of them",
    },
    {
        "section": "A.4.2", "says": "nothing on whether the prefix is part of the input length",
        "here": "its tokens come on top of the message's",
    },
)  # fmt: skip
_ABOUT: Final[dict[str, Any]] = {"source": "seed 000, 4.3.2.4 and A.4"}

CODE_COMPLETION: Final = Composed(
    "code-completion", _INPUT, _OUTPUT, Code(), sharing=_SHARING, claims=CLAIMS,
    about=_ABOUT | {
        "about": "code to complete; 80 % share one of 10 contexts of 512 to 1,024 tokens, Zipf s=1.5",
        "deviations": [
            {
                "section": "A.4.1",
                "says": "The Stack (Python, JavaScript, TypeScript), function-level completions",
                "here": "without a file of it, lengths have the percentiles of the code part of Azure's LLM"
                " inference trace 2023 (its first 6,000 rows; CC-BY-4.0, Patel et al., Splitwise, ISCA 2024),"
                " and texts are generated functions in these languages; code-completion:FILE takes a file's",
            },
            *_DEVIATIONS,
        ],
    },
)  # fmt: skip


def code_completion_of(path: Path, place: str) -> RecordedDataset:
    """The same with functions and contexts of a Stack-shaped file. Raises ConfigError of the place."""
    return RecordedDataset(
        "code-completion", read_stack(path, place), CONTENT, _OUTPUT, _SHARING, DOCUMENTED,
        about=_ABOUT | {
            "about": f"functions of {path.name} to complete; 80 % share one of 10 contexts, Zipf s=1.5",
            "deviations": [
                {
                    "section": "A.4.1", "says": "function-level completions",
                    "here": "the output's length is 4.3.2.4's lognormal, and not that of the function's body",
                },
                *_DEVIATIONS,
            ],
        },
    )  # fmt: skip
