"""Local data sets as workloads: ShareGPT-shaped conversations, and source files as in The Stack.

`read_sharegpt` and `read_stack` read a file into a `DataSet` (pairs of prompt and answer); `RecordedDataset`
makes it a workload with requests and prompts. `registry.py` and `ietf.py` call them. Items are shuffled by
the seed, and repeat if more are wanted than there are. Of a source file, each function is a pair: the text
before its body (the last PROMPT_TOKENS_MAX tokens) is the prompt, the body the answer.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from llmtap.capture.read.streams import opened
from llmtap.errors import ConfigError
from llmtap.traces.bodies import messages_of, read_object
from llmtap.traces.format import FormatError
from llmtap.traces.formats import sharegpt
from llmtap.traces.text import read_lines
from llmtap.workload.composed import PlannedWorkload, description
from llmtap.workload.lengths import Lengths, described, drawn, lengths_told
from llmtap.workload.plan import ConversationScript, PlannedTurn, Sharing, Speaker, WorkloadPlan, assemble
from llmtap.workload.programs import LANGUAGES
from llmtap.workload.prompts.prompt import ElasticSource
from llmtap.workload.prompts.prose import fitted_text, prose
from llmtap.workload.prompts.text import count_tokens

Pair = tuple[str, str]
"""Question and answer."""
SUBSET: Final = (
    "the items shuffled by random.Random('SEED/subset'), the first of them; from the first again where"
    " more are asked for than there are"
)
_SAMPLED: Final = 500
"""Pairs whose lengths are described at most: a second of counting whole source files."""
_TOKENS_MAX: Final = 32_768
"""A conversation ends before a longer prompt."""


class DataSet(Protocol):
    """Items of one pair, or of several for conversations."""

    @property
    def items(self) -> Sequence[range]:
        """Pair numbers of each item."""
        ...

    def pair(self, number: int) -> Pair: ...

    def context(self, number: int, tokens: int, seed: int) -> str:
        """Return a shared context of exactly `tokens`."""
        ...

    @property
    def about(self) -> Mapping[str, Any]:
        """File, sha256, version, preprocessing with its effects, content (IETF draft, 4.3.3)."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedDataset(PlannedWorkload):
    """A workload of a data set's texts."""

    name: str
    data: DataSet
    content: Mapping[str, Any]
    output: Lengths | None = None
    """None: the answers' lengths."""
    sharing: Sharing | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    input: None = None

    @property
    def converses(self) -> bool:
        return any(len(item) > 1 for item in self.data.items)

    def describe(self) -> Mapping[str, object]:
        without = ", without context and history" if self.sharing else ""
        told, message, answer = self._lengths()
        made = {**answer, "of": f"the answer, {told}"} if self.output is None else described(self.output)
        members: dict[str, Any] = {
            "data": {**self.data.about, "subset": SUBSET},
            "generation": "the data's texts, untouched; contexts and lengths that are not the data's:"
            " random.Random, one generator for each column, seeded with SEED/COLUMN",
        }
        if self.sharing:
            members["sharing"] = self.sharing.describe()
        if self.converses:
            members["conversations"] = {
                "turns": "the data's", "think": "none: the data has no times",
                "prompt": "history and new message, both as in the data", "tokens_max": _TOKENS_MAX,
            }  # fmt: skip
        given = {**message, "of": f"the message{without}, {told}"}
        return description(self.name, given, made, self.content, **members, **self.about)

    def _lengths(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Return which pairs are described, and the lengths of messages and answers."""
        numbers = [number for item in self.data.items for number in item]
        step = math.ceil(len(numbers) / _SAMPLED)
        pairs = [self.data.pair(number) for number in numbers[::step]]
        message, answer = (
            lengths_told([max(1, count_tokens(text)) for text in texts]) for texts in zip(*pairs, strict=True)
        )
        return "of all pairs" if step == 1 else f"of one in {step:,} pairs", message, answer

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        return assemble(
            self._turns(seed), count, seed, sharing=self.sharing, converses=self.converses,
            tokens_max=_TOKENS_MAX if self.converses else None,
        )  # fmt: skip

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        return Speaker(plan, _AsRecorded(self.data, plan, seed))

    def _turns(self, seed: int) -> Iterator[PlannedTurn]:
        items = self.data.items
        made = Random(f"{seed}/output")
        order = Random(f"{seed}/subset").sample(range(len(items)), len(items))
        while True:
            for item in order:
                for number in items[item]:
                    message, answer = map(count_tokens, self.data.pair(number))
                    output = answer if self.output is None else drawn(self.output, made)
                    yield PlannedTurn(message, max(1, output), number == items[item].start, place=number)


@dataclass(frozen=True, slots=True)
class _AsRecorded(ConversationScript):
    data: DataSet
    plan: WorkloadPlan
    seed: int

    def message(self, row: int, tokens: int) -> str:
        text = self.data.pair(self.plan.places[row])[0]
        if tokens == self.plan.messages[row]:
            return text
        more = max(0, tokens - self.plan.messages[row])
        return fitted_text(text, tokens, more=" " + prose(more, f"{self.seed}/{row}"))

    def answer(self, row: int, tokens: int) -> str:
        text = self.data.pair(self.plan.places[row])[1]
        return fitted_text(text, tokens, more=" " + prose(tokens, f"{self.seed}/{row}/answer"))

    def context(self, number: int, tokens: int) -> str:
        return self.data.context(number, tokens, self.seed)


@contextmanager
def reading(path: Path, place: str) -> Iterator[BinaryIO]:
    """Open the file, decompressed. Raises ConfigError of the place."""
    try:
        with opened(str(path), 1, None) as file:
            yield file.stream
    except FormatError as exc:
        raise ConfigError(place, f"{path}: {exc}") from None
    except (OSError, EOFError) as exc:
        raise ConfigError(place, f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from None


def file_described(path: Path) -> dict[str, Any]:
    """Return name and sha256 of a file."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


SHAREGPT_CONTENT: Final = {"kind": "data", "domain": "conversation", "language": "the data's"}
_VERSION: Final = "the file's sha256; A.3.1 asks for vicuna_cleaned of 2023-04-12"


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """Conversations."""

    pairs: list[Pair]
    items: Sequence[range]
    about: Mapping[str, Any] = field(default_factory=dict)

    def pair(self, number: int) -> Pair:
        return self.pairs[number]

    def context(self, number: int, tokens: int, seed: int) -> str:
        """Return a generated system prompt: the data has none that all share."""
        return prose(tokens, f"{seed}/context/{number}")


def read_sharegpt(path: Path, place: str, *, whole: bool = False) -> ShareGpt:
    """Read first questions, or `whole` conversations. Raises ConfigError of the place."""
    pairs: list[Pair] = []
    items: list[range] = []
    with reading(path, place) as file:
        source = sharegpt.FORMAT.read(file)
        empty = 0
        # A conversation's rows come together, its first one as turn 0.
        for turn, asked, answer in _rows(source.batches):
            if turn == 0:
                items.append(range(len(pairs), len(pairs)))
            if turn and not whole:
                continue
            if not asked.strip() or not answer.strip():
                empty += 1
                continue
            pairs.append((asked, answer))
            items[-1] = range(items[-1].start, len(pairs))
        found = len(items)
        items = [item for item in items if item]
    if not items:
        raise ConfigError(place, f"{path} has no conversation with a question and an answer")
    notes = [*source.notes, *([f"{empty:,} turns have no text, and were left out"] if empty else [])]
    about = {
        **file_described(path),
        "dataset": "ShareGPT-shaped",
        "version": _VERSION,
        "preprocessing": "conversations with one assistant turn or more; "
        + (
            "each answer is a request, with the turns before it as history"
            if whole
            else "what was asked before the first answer is the prompt, that answer's length the output"
        )
        + "; texts untouched",
        "conversations": found,
        "kept": len(items),
        "notes": notes,
    }
    return ShareGpt(pairs, items, about)


def _rows(batches: Iterator[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield turn, new question, and answer."""
    said = 0
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("turn", "request_body", "response_text"))
        for turn, body, answer in zip(*columns, strict=True):
            messages = messages_of(read_object(body, "conversation")) or []
            new = messages if turn == 0 else messages[said:]
            said = len(messages) + 1
            yield turn, "\n\n".join(text for role, text in new if role != "assistant"), answer


STACK_CONTENT: Final = {"kind": "data", "domain": "code", "language": list(LANGUAGES)}
PROMPT_TOKENS_MAX: Final = 1_024
"""Limit of the text before a function's body; a longer signature is kept whole."""
_SHORT: Final = {
    "py": "python", "js": "javascript", "ts": "typescript", "tsx": "typescript", "jsx": "javascript",
}  # fmt: skip

_PYTHON: Final = re.compile(
    r"^([ \t]*)(?:async[ \t]+)?def[ \t]+\w+[ \t]*\([^)]*\)[^:\n]*:[ \t]*\n"
    r'(?:[ \t]+(?:"""(?:(?!""")[\s\S])*"""|\'\'\'(?:(?!\'\'\')[\s\S])*\'\'\')[ \t]*\n)?',
    re.MULTILINE,
)
"""Signature and docstring."""
_SCRIPT: Final = re.compile(
    r"^([ \t]*)(?:export[ \t]+)?(?:default[ \t]+)?(?:async[ \t]+)?"
    r"(?:function\b[^{;\n]*|"
    r"(?:const|let|var)[ \t]+\w+[^=\n]*=[ \t]*(?:async[ \t]*)?\([^)]*\)[^={\n]*=>[ \t]*)\{[ \t]*\n",
    re.MULTILINE,
)


class _File(msgspec.Struct):
    content: str
    language: str | None = None
    lang: str | None = None


_decode: Final = msgspec.json.Decoder(_File).decode


@dataclass(frozen=True, slots=True)
class Stack:
    """Functions of source files."""

    files: list[str]
    places: list[tuple[int, int, int]]
    """File, start and end of each function's body."""
    items: Sequence[range]
    about: Mapping[str, Any] = field(default_factory=dict)

    def pair(self, number: int) -> Pair:
        file, begin, end = self.places[number]
        text = self.files[file]
        return _last_lines(text[:begin]), text[begin:end]

    def context(self, number: int, tokens: int, seed: int) -> str:
        """Return the start of a file chosen by the seed, and of following files until it is long enough."""
        order = Random(f"{seed}/context files").sample(range(len(self.files)), len(self.files))
        text, k = "", number
        while count_tokens(text) <= tokens and k < number + len(order):
            text += self.files[order[k % len(order)]] + "\n"
            k += 1
        # Too few files for K contexts of other texts: a first line of its own tells them apart.
        head = f"# context {number}\n" if number >= len(order) else ""
        return fitted_text(head + text, tokens, "#")


def read_stack(path: Path, place: str) -> Stack:
    """Read all Python, JavaScript and TypeScript functions of a file. Raises ConfigError of the place."""
    files: list[str] = []
    places: list[tuple[int, int, int]] = []
    seen = other = bare = 0
    with reading(path, place) as lines:
        for number, line in read_lines(lines):
            try:
                given = _decode(line)
            except (ValueError, RecursionError) as exc:
                raise FormatError(f"line {number}: {exc}") from None
            seen += 1
            language = (given.language or given.lang or "").lower()
            language = _SHORT.get(language, language)
            if language and language not in LANGUAGES:
                other += 1
                continue
            text = given.content.replace("\r\n", "\n")
            found = list(functions(text, language))
            if not found:
                bare += 1
                continue
            places += [(len(files), begin, end) for begin, end in found]
            files.append(text)
    if not files:
        raise ConfigError(place, f"{path} has no function in {', '.join(LANGUAGES)}")
    told = ((other, "files are in other languages"), (bare, "files have no function"))
    about = {
        **file_described(path),
        "dataset": "Stack-shaped",
        "version": "the file's sha256; A.4.1 names The Stack without a version",
        "preprocessing": "function-level completions: the prompt is a function's file up to its signature"
        f" (and docstring), the last whole lines of it that fit into {PROMPT_TOKENS_MAX:,} tokens;"
        " its body is the completion; CRLF became LF",
        "files": seen,
        "functions": len(places),
        "notes": [f"{n:,} {what}, and were left out" for n, what in told if n],
    }
    return Stack(files, places, [range(i, i + 1) for i in range(len(places))], about)


def functions(text: str, language: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of function bodies; `language` "": unknown."""
    if language in ("python", ""):
        for found in _PYTHON.finditer(text):
            if end := _end_of_block(text, found.end(), len(found[1].expandtabs())):
                yield found.end(), end
    if language != "python":
        for found in _SCRIPT.finditer(text):
            close = re.compile(rf"^{found[1]}\}}", re.MULTILINE).search(text, found.end())
            if close is not None and text[found.end() : close.start()].strip():
                yield found.end(), close.end()


def _end_of_block(text: str, begin: int, indent: int) -> int | None:
    """Return the end of the last line with deeper indentation; None if there is none."""
    end, at = None, begin
    while at < len(text):
        stop = text.find("\n", at) + 1 or len(text)
        line = text[at:stop].expandtabs()
        if line.strip():
            if len(line) - len(line.lstrip()) <= indent:
                break
            end = at + len(text[at:stop].rstrip("\n"))
        at = stop
    return end


def _last_lines(text: str) -> str:
    """Return as many whole lines from the end as fit into PROMPT_TOKENS_MAX; at least one."""
    lines = text.splitlines(keepends=True)
    kept, tokens = len(lines), 0
    while kept:
        # White space at the ends of two lines may become one piece: the sum is never less than the whole.
        tokens += count_tokens(lines[kept - 1])
        if tokens > PROMPT_TOKENS_MAX and kept < len(lines):
            break
        kept -= 1
    return "".join(lines[kept:])
