"""Reference workloads of the IETF draft (4.3.2 and appendix A), each as a `Workload` for `registry.py`.

If the section and the appendix differ, the workloads follow the appendix, except `long-context-uniform`.
`describe()["deviations"]` lists all differences from the draft. Without a file of the draft's data sets,
texts are generated, and lengths follow the documented percentiles (for inputs of code completion: those of
Azure's trace of 2023).

The synthetic workloads draw each request's input length, output length and ids from one `random.Random(seed)`
(appendix A.1.4). So a row needs all rows before it, and prompts are fast to make only in ascending order.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from llmtap.workload import datasets
from llmtap.workload.lengths import Empirical, Fixed, LogNormal, Percentiles, UniformLengths, describe_lengths
from llmtap.workload.plan import (
    NO_CONTEXT,
    TOKENIZER,
    ComposedWorkload,
    RandomIds,
    Sharing,
    WorkloadPlan,
    check_rows,
    workload_description,
)
from llmtap.workload.prompts.prompt import CL100K_IDS, ElasticSource, Fit, Prompt, random_ids, skip_ids
from llmtap.workload.prompts.prose import Code, Document
from llmtap.workload.public_data import PUBLISHED
from llmtap.workload.requests import Requests

_SHARING: Final = Sharing(fraction=0.8, tokens=UniformLengths(min=512, max=1_024), contexts=10, zipf=1.5)
_INPUT: Final = Percentiles(
    points=((5, 76), (25, 577.75), (50, 1_452.5), (75, 2_692), (90, 5_025), (95, 7_375.35), (99, 7_436)),
    min=3,
    max=7_437,
)
"""Input lengths of code completion, from Azure's LLM inference trace 2023 (code)."""
_OUTPUT: Final = LogNormal(mu=4.0, sigma=1.5, max=2_048)


def _deviation_document(section: str, requirement: str, used: str) -> dict[str, str]:
    return {"section": section, "says": requirement, "here": used}


_DEVIATIONS: Final = (
    _deviation_document(
        "4.3.2.4",
        "output lognormal(4.0, 1.5) without bounds",
        "at least 1 and at most 2,048 tokens, the cap of 4.3.2.2, which limits 0.8 % of the lengths",
    ),
    _deviation_document(
        "A.4.2",
        "no rule whether the prefix is part of the input length",
        "the tokens of the prefix are added to those of the message",
    ),
)
_ABOUT: Final[dict[str, object]] = {"source": "IETF draft, 4.3.2.4 and A.4"}
_CODE_STAND_IN: Final = PUBLISHED["code-completion"].stand_in_text(
    "generated functions in these languages and the percentiles of lengths of the code part of Azure's LLM"
    " inference trace 2023 (its first 6,000 rows; CC-BY-4.0, Patel et al., Splitwise, ISCA 2024)"
)

CODE_COMPLETION: Final = ComposedWorkload(
    "code-completion",
    _INPUT,
    _OUTPUT,
    Code(),
    sharing=_SHARING,
    about=_ABOUT
    | {
        "stand_in": _CODE_STAND_IN,
        "about": "code to complete; 80 % share one of 10 contexts of 512 to 1,024 tokens, Zipf s=1.5",
        "deviations": [
            _deviation_document(
                "A.4.1",
                "The Stack (Python, JavaScript, TypeScript), function-level completions",
                _CODE_STAND_IN,
            ),
            *_DEVIATIONS,
        ],
    },
)


def code_completion_of(path: Path, place: str) -> datasets.RecordedDataset:
    """Return the workload with code of a file in The Stack's format. Raises ConfigError naming `place`."""
    return datasets.RecordedDataset(
        "code-completion",
        datasets.read_the_stack(path, place),
        _SHARING,
        _OUTPUT,
        about=_ABOUT
        | {
            "about": f"functions of {path.name} to complete; 80 % share one of 10 contexts, Zipf s=1.5",
            "deviations": [
                _deviation_document(
                    "A.4.1",
                    "function-level completions",
                    "the output length is the lognormal of 4.3.2.4, not the length of the function",
                ),
                *_DEVIATIONS,
            ],
        },
    )


_CHAT_SHARING: Final = Sharing(fraction=0.5, tokens=200)
_CHAT_INPUT: Final = Percentiles(points=((50, 156), (95, 892), (99, 2_134)), max=8_192)
_CHAT_OUTPUT: Final = Percentiles(points=((50, 234), (95, 789), (99, 1_567)), max=4_096)
_SYSTEM_PROMPT: Final = _deviation_document(
    "A.3.2, 4.3.2.3",
    "no rule whether input tokens include the system prompt",
    "they do not, because more than half of the documented lengths are below its 200 tokens",
)
_CHAT_ABOUT: Final[dict[str, object]] = {"source": "IETF draft, 4.3.2.3 and A.3"}
_CHAT_STAND_IN: Final = PUBLISHED["conversation"].stand_in_text(
    "random words and the percentiles of lengths of A.3.2"
)

CONVERSATION: Final = ComposedWorkload(
    "conversation",
    _CHAT_INPUT,
    _CHAT_OUTPUT,
    sharing=_CHAT_SHARING,
    about=_CHAT_ABOUT
    | {
        "stand_in": _CHAT_STAND_IN,
        "about": "chats with A.3.2's percentiles of lengths; half share a system prompt of 200 tokens",
        "deviations": [
            _deviation_document("A.3.1", "ShareGPT, vicuna_cleaned subset of 2023-04-12", _CHAT_STAND_IN),
            _deviation_document(
                "A.3.2",
                "P50, P95 and P99",
                "the quantile function has all three values. Between and beyond them, the logarithm of the"
                " length is linear in the normal score, because one lognormal through P50 and P95 has another"
                " P99. Limits: 8,192 input tokens and 4,096 output tokens",
            ),
            _SYSTEM_PROMPT,
        ],
    },
)


def conversation_of(path: Path, place: str) -> datasets.RecordedDataset:
    """Return the workload with texts of a file in ShareGPT's format. Raises ConfigError naming `place`."""
    return datasets.RecordedDataset(
        "conversation",
        datasets.read_sharegpt(path, place),
        _CHAT_SHARING,
        about=_CHAT_ABOUT
        | {
            "about": f"chats of {path.name}; half share a system prompt of 200 tokens",
            "deviations": [_SYSTEM_PROMPT],
        },
    )


def long_conversation_of(path: Path, place: str) -> datasets.RecordedDataset:
    """Return the long conversations of the smooth goodput paper, 5.1, with texts of a ShareGPT-shaped file.

    Raises ConfigError naming `place`.
    """
    return datasets.RecordedDataset(
        "long-conversation",
        datasets.read_long_sharegpt(path, place),
        None,
        about={
            "source": "smooth goodput paper (001), 5.1",
            "about": f"chats of {path.name}, concatenated to prompts of {datasets.LONG_TOKENS:,} tokens on"
            " average",
        },
    )


TARGETS: Final = (8_192, 16_384, 32_768, 65_536, 131_072)
_QUESTION: Final = _deviation_document(
    "A.5.1",
    "document of the target length minus 100 tokens, question of ~100 tokens",
    "the question has 100 tokens in the default tokenizer, with the blank line before it. With another"
    " tokenizer, the document has the tokens that the question leaves",
)


def _long_context(
    name: str, lengths: Empirical | UniformLengths, about: dict[str, object]
) -> ComposedWorkload:
    about = {"source": "IETF draft, 4.3.2.5 and A.5"} | about
    return ComposedWorkload(name, lengths, Fixed(tokens=256), Document(), about=about)


LONG_CONTEXT: Final = _long_context(
    "long-context",
    Empirical(values=TARGETS),
    {
        "about": "documents of 8,192 to 131,072 tokens with a question, output of 256 (A.5)",
        "deviations": [
            _deviation_document(
                "4.3.2.5",
                "input Uniform(8192, 32768)",
                "the five target lengths of A.5.1 with equal probability; long-context-uniform has the"
                " uniform distribution",
            ),
            _QUESTION,
        ],
    },
)
LONG_CONTEXT_UNIFORM: Final = _long_context(
    "long-context-uniform",
    UniformLengths(min=8_192, max=32_768),
    {
        "about": "the same with inputs uniform between 8,192 and 32,768 tokens (4.3.2.5)",
        "deviations": [
            _deviation_document(
                "A.5.1", "uniform over five target lengths up to 131,072", "Uniform(8192, 32768) of 4.3.2.5"
            ),
            _QUESTION,
        ],
    },
)


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Workload of random token ids. One random generator draws all lengths and ids."""

    name: str
    input: UniformLengths | LogNormal
    output: UniformLengths | LogNormal
    lengths: Callable[[Random], tuple[int, int]]
    """Function that draws the input length and the output length of a request."""
    about: Mapping[str, Any]
    sharing: None = None

    def describe(self) -> Mapping[str, object]:
        members = {
            "tokenizer": {
                **TOKENIZER,
                "name": "none: token ids",
                "source": "ids of cl100k_base, special ones left out",
                "vocabulary": CL100K_IDS,
            },
            "generation": "A.1.4: one random.Random(seed); per request input length, output length, then the"
            " ids by randint(0, 100255)",
            **self.about,
        }
        input_description = {**describe_lengths(self.input), "of": "the prompt"}
        return workload_description(
            self.name, input_description, describe_lengths(self.output), RandomIds().describe(), **members
        )

    def requests(self, count: int, seed: int) -> Requests:
        requests = Requests()
        for input_tokens, output_tokens in islice(self.draw_lengths(seed), count):
            requests.arrival_ns.append(0)
            requests.input.append(input_tokens)
            requests.output.append(output_tokens)
        return requests

    def draw_lengths(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield input and output length of each row, endlessly."""
        random = Random(seed)
        while True:
            input_tokens, output_tokens = self.lengths(random)
            yield input_tokens, output_tokens
            skip_ids(random, input_tokens)

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        requests = self.requests(count, seed)
        return WorkloadPlan(requests, requests.input[:], array("q", [NO_CONTEXT]) * count)

    def prompts(self, requests: Requests, seed: int) -> ElasticSource:
        """Return the source of the prompts of `requests`.

        These must be the first rows of `self.requests(count, seed)`; otherwise ValueError is raised.
        """
        # Compare only the first rows: they are enough to detect another seed or workload.
        first = range(min(len(requests), 64))
        check_rows(self.requests(len(first), seed), requests.select_rows(first))
        return _SequentialPrompts(self.lengths, seed)


class _SequentialPrompts:
    """Prompts in the order of the rows. For a row before the latest one, the generator restarts at row 0."""

    def __init__(self, lengths: Callable[[Random], tuple[int, int]], seed: int) -> None:
        self._lengths, self._seed = lengths, seed
        self._random, self._next_row = Random(seed), 0
        """Generator of the ids, and the row for which it makes the next ones."""

    def prompt(self, row: int) -> Prompt:
        if row < self._next_row:
            self._random, self._next_row = Random(self._seed), 0
        while self._next_row < row:
            skip_ids(self._random, self._lengths(self._random)[0])
            self._next_row += 1
        input_tokens, _ = self._lengths(self._random)
        self._next_row += 1
        return Prompt(ids=random_ids(self._random, input_tokens))

    def resized_prompt(self, row: int, tokens: int) -> Prompt:
        return self.prompt(row)

    def with_fit(self, fit: Fit) -> "_SequentialPrompts":
        return self


_UNIFORM_INPUT: Final = UniformLengths(min=128, max=512)
_UNIFORM_OUTPUT: Final = UniformLengths(min=64, max=256)
_SKEWED_INPUT: Final = LogNormal(mu=5.5, sigma=1.0, min=32, max=4_096)
_SKEWED_OUTPUT: Final = LogNormal(mu=4.5, sigma=1.2, min=16, max=2_048)


def _uniform_pair(random: Random) -> tuple[int, int]:
    """Return random input and output lengths."""
    return random.randint(128, 512), random.randint(64, 256)


def _skewed_pair(random: Random) -> tuple[int, int]:
    """Return random input and output lengths with a long tail."""
    input_tokens, output_tokens = random.lognormvariate(5.5, 1.0), random.lognormvariate(4.5, 1.2)
    return max(32, min(4_096, round(input_tokens))), max(16, min(2_048, round(output_tokens)))


UNIFORM: Final = SyntheticWorkload(
    "synthetic-uniform",
    _UNIFORM_INPUT,
    _UNIFORM_OUTPUT,
    _uniform_pair,
    {
        "about": "random tokens, lengths uniform: a controlled baseline",
        "source": "IETF draft, 4.3.2.1 and A.1",
        "deviations": [],
    },
)
SKEWED: Final = SyntheticWorkload(
    "synthetic-skewed",
    _SKEWED_INPUT,
    _SKEWED_OUTPUT,
    _skewed_pair,
    {
        "about": "random tokens, lengths lognormal: scheduling with high variance of lengths",
        "source": "IETF draft, 4.3.2.2 and A.2",
        "deviations": [
            _deviation_document(
                "A.2",
                "no generation method",
                "the method of A.1.4, with rounded values of lognormvariate for the two lengths",
            ),
            _deviation_document(
                "4.3.2.2", "upper limits, but no lower limits", "also the lower limits 32 and 16 of A.2"
            ),
            _deviation_document(
                "A.2.1",
                "mean ~405",
                "the mean is 403.4 before the limits and 399.6 after them: a length beyond a limit is set to"
                " the limit, not drawn again",
            ),
        ],
    },
)
