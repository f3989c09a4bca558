"""Long-Context: a document that fills the target length, and a question about it.

Source: seed 000, 4.3.2.5 and A.5, which differ in the lengths; the appendix's are the default.
"""

from typing import Any, Final

from llmtap.workload.claims import Claim
from llmtap.workload.composed import Composed
from llmtap.workload.lengths import Empirical, Fixed, UniformLengths
from llmtap.workload.prompts.prose import Document

__all__ = ["LONG_CONTEXT", "LONG_CONTEXT_UNIFORM", "TARGETS"]

TARGETS: Final = (8_192, 16_384, 32_768, 65_536, 131_072)
_OUTPUT_CLAIMS: Final = (
    Claim("output", "min", 256, "A.5.2"),
    Claim("output", "max", 256, "A.5.2"),
)
_QUESTION: Final = {
    "section": "A.5.1", "says": "document of the target length minus 100 tokens, question of ~100 tokens",
    "here": "the question has 100 tokens with the blank line before it, by the project's tokenizer; by"
    " another one the whole prompt has the target length, and the document what the question leaves",
}  # fmt: skip


def _long_context(
    name: str, given: Empirical | UniformLengths, claims: tuple[Claim, ...], about: dict[str, Any]
) -> Composed:
    about = {"source": "seed 000, 4.3.2.5 and A.5"} | about
    return Composed(name, given, Fixed(tokens=256), Document(), claims=claims + _OUTPUT_CLAIMS, about=about)


LONG_CONTEXT: Final = _long_context(
    "long-context", Empirical(values=TARGETS),
    (
        *(Claim("message", f"share {target}", 0.2, "A.5.1") for target in TARGETS),
        Claim("message", "mean", None, "A.5.1"),
    ),
    {
        "about": "documents of 8,192 to 131,072 tokens with a question, output of 256 (A.5)",
        "deviations": [
            {
                "section": "4.3.2.5", "says": "input Uniform(8192, 32768)",
                "here": "A.5.1's five target lengths, each as likely; long-context-uniform has the section's",
            },
            _QUESTION,
        ],
    },
)  # fmt: skip
LONG_CONTEXT_UNIFORM: Final = _long_context(
    "long-context-uniform", UniformLengths(min=8_192, max=32_768),
    (
        Claim("message", "mean", None, "4.3.2.5"),
        Claim("message", "p5", None, "4.3.2.5"),
        Claim("message", "p95", None, "4.3.2.5"),
    ),
    {
        "about": "the same with inputs uniform between 8,192 and 32,768 tokens (4.3.2.5)",
        "deviations": [
            {
                "section": "A.5.1", "says": "uniform over five target lengths up to 131,072",
                "here": "4.3.2.5's Uniform(8192, 32768)",
            },
            _QUESTION,
        ],
    },
)  # fmt: skip
