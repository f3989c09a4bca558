"""Local data sets as workloads: conversations in the format of ShareGPT, and source files as in The Stack.

`read_sharegpt` and `read_the_stack` read a file into a `DataSet` (pairs of prompt and answer).
`RecordedDataset` makes it a workload with requests and prompts, for `ietf.py`. Pairs are shuffled by the
seed, and repeat if there are fewer than requested. From a conversation, the first question and its answer are
a pair. From a source file, each function is a pair: the text before its body (the last PROMPT_TOKENS_MAX
tokens) is the prompt, the body is the answer.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Final

import msgspec

from llmtap.capture.read.streams import open_input
from llmtap.errors import ConfigError
from llmtap.traces.bodies import messages_of, read_object
from llmtap.traces.format import FormatError
from llmtap.traces.formats import sharegpt
from llmtap.traces.text import read_lines
from llmtap.workload.lengths import Lengths, describe_lengths, draw_length, recorded_lengths
from llmtap.workload.plan import (
    ConversationPrompts,
    ConversationScript,
    PlannedTurn,
    PlannedWorkload,
    Sharing,
    WorkloadPlan,
    assemble_plan,
    workload_description,
)
from llmtap.workload.prompts.prompt import ElasticSource
from llmtap.workload.prompts.prose import LANGUAGES, fitted_text, prose
from llmtap.workload.prompts.text import count_tokens

Pair = tuple[str, str]
"""Prompt and answer."""
SUBSET: Final = (
    "the items shuffled by random.Random('SEED/subset'), the first of them; from the first again where"
    " more are requested than there are"
)
_FILE_HINT: Final = "give the unchanged file of the data set"
_SAMPLED_PAIRS_MAX: Final = 500
"""Maximum number of pairs whose lengths are described: counting source files takes a second."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Pairs of prompt and answer: `pair(number)` returns one of `count` pairs."""

    count: int
    pair: Callable[[int], Pair]
    """Returns the prompt and answer with a number."""
    context: Callable[[int, int, int], str]
    """Function `(number, tokens, seed)` that returns the shared context `number`, of exactly this length."""
    content: Mapping[str, Any]
    about: Mapping[str, Any]
    """Description: file, sha256, version, and preprocessing with its effects (IETF draft, 4.3.3)."""


@dataclass(frozen=True, slots=True)
class RecordedDataset(PlannedWorkload):
    """A workload with the texts of a data set."""

    name: str
    data: DataSet
    sharing: Sharing | None
    """Shared beginnings of prompts; None: none."""
    output: Lengths | None = None
    """Lengths of the outputs; None: those of the recorded answers."""
    about: Mapping[str, Any] = field(default_factory=dict)
    input: None = None

    def describe(self) -> Mapping[str, object]:
        step = math.ceil(self.data.count / _SAMPLED_PAIRS_MAX)
        pairs = [self.data.pair(number) for number in range(0, self.data.count, step)]
        message, answer = (
            recorded_lengths([max(1, count_tokens(text)) for text in texts])
            for texts in zip(*pairs, strict=True)
        )
        sample = "of all pairs" if step == 1 else f"of one in {step:,} pairs"
        inputs = {**message, "of": f"the message, without context and history, {sample}"}
        outputs = (
            {**answer, "of": f"the answer, {sample}"}
            if self.output is None
            else describe_lengths(self.output)
        )
        members: dict[str, Any] = {
            "data": {**self.data.about, "subset": SUBSET},
            "generation": "the data's texts, untouched; contexts and lengths that are not the data's:"
            " random.Random, one generator for each column, seeded with SEED/COLUMN",
            "sharing": None if self.sharing is None else self.sharing.describe(),
        }
        return workload_description(self.name, inputs, outputs, self.data.content, **members, **self.about)

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        return assemble_plan(self._draw_turns(seed), count, seed, sharing=self.sharing)

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        return ConversationPrompts(plan, _RecordedScript(self.data, plan, seed))

    def _draw_turns(self, seed: int) -> Iterator[PlannedTurn]:
        random = Random(f"{seed}/output")
        order = Random(f"{seed}/subset").sample(range(self.data.count), self.data.count)
        while True:
            for number in order:
                message, answer = map(count_tokens, self.data.pair(number))
                output = answer if self.output is None else draw_length(self.output, random)
                yield PlannedTurn(message, max(1, output), pair_number=number)


@dataclass(frozen=True, slots=True)
class _RecordedScript(ConversationScript):
    """Texts of a data set."""

    data: DataSet
    plan: WorkloadPlan
    seed: int

    def message(self, row: int, tokens: int) -> str:
        text = self.data.pair(self.plan.pair_numbers[row])[0]
        if tokens == self.plan.messages[row]:
            return text
        more = max(0, tokens - self.plan.messages[row])
        return fitted_text(text, tokens, more=" " + prose(more, f"{self.seed}/{row}"))

    def answer(self, row: int, tokens: int) -> str:
        raise NotImplementedError  # No prompt has a history: each row is the first of its conversation.

    def context(self, number: int, tokens: int) -> str:
        return self.data.context(number, tokens, self.seed)


@contextmanager
def open_data_file(path: Path, place: str) -> Iterator[BinaryIO]:
    """Open the file and decompress it. Raises ConfigError naming `place`."""
    try:
        with open_input(str(path), 1, None) as file:
            yield file.stream
    except FormatError as exc:
        raise ConfigError(place, f"{path}: {exc}", _FILE_HINT) from None
    except (OSError, EOFError) as exc:
        problem = f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}"
        raise ConfigError(place, problem, "check the path and its permissions") from None


def describe_file(path: Path) -> dict[str, Any]:
    """Return the name and the sha256 of a file as JSON."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_sharegpt(path: Path, place: str) -> DataSet:
    """Read the first question and answer of each conversation. Raises ConfigError naming `place`."""
    pairs: list[Pair] = []
    with open_data_file(path, place) as file:
        source = sharegpt.FORMAT.read(file)
        conversations = empty = 0
        for batch in source.batches:
            columns = (batch.column(name).to_pylist() for name in ("turn", "request_body", "response_text"))
            for turn, body, answer in zip(*columns, strict=True):
                if turn:
                    continue
                conversations += 1
                messages = messages_of(read_object(body, "conversation")) or []
                question = "\n\n".join(text for role, text in messages if role != "assistant")
                if question.strip() and answer.strip():
                    pairs.append((question, answer))
                else:
                    empty += 1
    if not pairs:
        raise ConfigError(place, f"{path} has no conversation with a question and an answer", _FILE_HINT)
    notes = [*source.notes, *([f"{empty:,} turns have no text, and were left out"] if empty else [])]
    about = {
        **describe_file(path),
        "dataset": "ShareGPT-shaped",
        "version": "the file's sha256; A.3.1 asks for vicuna_cleaned of 2023-04-12",
        "preprocessing": "conversations with one assistant turn or more; what was asked before the first"
        " answer is the prompt, that answer's length the output; texts untouched",
        "conversations": conversations,
        "kept": len(pairs),
        "notes": notes,
    }
    content = {"kind": "data", "domain": "conversation", "language": "the data's"}
    # Generate the shared system prompts, because the data set has no shared texts.
    return DataSet(
        len(pairs),
        pairs.__getitem__,
        lambda n, tokens, seed: prose(tokens, f"{seed}/context/{n}"),
        content,
        about,
    )


LONG_TOKENS: Final = 1_600
"""Mean length of the concatenated prompts (smooth goodput paper, 5.1)."""


def read_long_sharegpt(path: Path, place: str) -> DataSet:
    """Read the pairs of `read_sharegpt`, and concatenate them to prompts of LONG_TOKENS on average.

    A prompt has questions and answers in the order of the file, and ends with a question, whose answer is the
    output. A prompt ends where the total length of all prompts so far is nearest to LONG_TOKENS times their
    number. Raises ConfigError naming `place`.
    """
    data = read_sharegpt(path, place)
    pairs = [data.pair(number) for number in range(data.count)]
    lengths = [(count_tokens(question), count_tokens(answer)) for question, answer in pairs]
    ends = _ends_of_prompts(lengths)
    if not ends:
        problem = f"{path}: all conversations together have fewer than {LONG_TOKENS:,} tokens"
        raise ConfigError(place, problem, "give the whole file of the data set")
    begins = [0, *ends[:-1]]

    def pair(number: int) -> Pair:
        *history, (question, answer) = pairs[begins[number] : ends[number]]
        return "\n\n".join([*(text for turn in history for text in turn), question]), answer

    about = {
        **data.about,
        "version": "the file's sha256; the smooth goodput paper names Sharegpt_gpt4 without a version",
        "preprocessing": f"{data.about['preprocessing']}; then consecutive pairs concatenated with"
        f" blank lines to prompts of {LONG_TOKENS:,} tokens on average, each ending with a question, whose"
        " answer's length is the output",
        "prompts": len(ends),
    }
    return DataSet(len(ends), pair, data.context, data.content, about)


def _ends_of_prompts(lengths: Sequence[tuple[int, int]]) -> list[int]:
    """Return the index after the last pair of each prompt. Pairs left at the end make no prompt."""
    ends: list[int] = []
    before = history = 0
    for number, (question, answer) in enumerate(lengths):
        wanted = LONG_TOKENS * (len(ends) + 1)
        total = before + history + question
        following = lengths[number + 1][0] + answer if number + 1 < len(lengths) else None
        if total >= wanted or (following is not None and total + following - wanted > wanted - total):
            ends.append(number + 1)
            before, history = total, 0
        else:
            history += question + answer
    return ends


PROMPT_TOKENS_MAX: Final = 1_024
"""Maximum length of the text before the body of a function. A longer signature is not cut."""
_LANGUAGE_BY_SUFFIX: Final = {
    "py": "python",
    "js": "javascript",
    "ts": "typescript",
    "tsx": "typescript",
    "jsx": "javascript",
}

_PYTHON_SIGNATURE: Final = re.compile(
    r"^([ \t]*)(?:async[ \t]+)?def[ \t]+\w+[ \t]*\([^)]*\)[^:\n]*:[ \t]*\n"
    r'(?:[ \t]+(?:"""(?:(?!""")[\s\S])*"""|\'\'\'(?:(?!\'\'\')[\s\S])*\'\'\')[ \t]*\n)?',
    re.MULTILINE,
)
"""Pattern of the signature of a Python function, with its docstring."""
_SCRIPT_SIGNATURE: Final = re.compile(
    r"^([ \t]*)(?:export[ \t]+)?(?:default[ \t]+)?(?:async[ \t]+)?"
    r"(?:function\b[^{;\n]*|"
    r"(?:const|let|var)[ \t]+\w+[^=\n]*=[ \t]*(?:async[ \t]*)?\([^)]*\)[^={\n]*=>[ \t]*)\{[ \t]*\n",
    re.MULTILINE,
)


class _SourceFile(msgspec.Struct):
    """One row of a data set of source code."""

    content: str
    language: str | None = None
    lang: str | None = None
    """Name of the language in data sets without the column `language`."""


_decode: Final = msgspec.json.Decoder(_SourceFile).decode


def read_the_stack(path: Path, place: str) -> DataSet:
    """Read all Python, JavaScript and TypeScript functions of a file. Raises ConfigError naming `place`."""
    files: list[str] = []
    places: list[tuple[int, int, int]] = []  # File, start and end of each function's body.
    total = other = bare = 0
    with open_data_file(path, place) as lines:
        for number, line in read_lines(lines):
            try:
                record = _decode(line)
            except (ValueError, RecursionError) as exc:
                raise FormatError(f"line {number}: {exc}; expected an object with a text `content`") from None
            total += 1
            language = (record.language or record.lang or "").lower()
            language = _LANGUAGE_BY_SUFFIX.get(language, language)
            if language and language not in LANGUAGES:
                other += 1
                continue
            text = record.content.replace("\r\n", "\n")
            bodies = list(function_bodies(text, language))
            if not bodies:
                bare += 1
                continue
            places += [(len(files), begin, end) for begin, end in bodies]
            files.append(text)
    if not files:
        raise ConfigError(place, f"{path} has no function in {', '.join(LANGUAGES)}", _FILE_HINT)
    omissions = ((other, "files are in other languages"), (bare, "files have no function"))
    about = {
        **describe_file(path),
        "dataset": "Stack-shaped",
        "version": "the file's sha256; A.4.1 names The Stack without a version",
        "preprocessing": "function-level completions: the prompt is a function's file up to its signature"
        f" (and docstring), the last whole lines of it that fit into {PROMPT_TOKENS_MAX:,} tokens;"
        " its body is the completion; CRLF became LF",
        "files": total,
        "functions": len(places),
        "notes": [f"{n:,} {what}, and were left out" for n, what in omissions if n],
    }

    def pair(number: int) -> Pair:
        file, begin, end = places[number]
        return _last_lines(files[file][:begin]), files[file][begin:end]

    def context(number: int, tokens: int, seed: int) -> str:
        """Return the start of a file chosen by the seed; if it is too short, further files follow."""
        order = Random(f"{seed}/context files").sample(range(len(files)), len(files))
        text, k = "", number
        while count_tokens(text) <= tokens and k < number + len(order):
            text += files[order[k % len(order)]] + "\n"
            k += 1
        # If there are fewer files than contexts, add a first line, so that the contexts differ.
        head = f"# context {number}\n" if number >= len(order) else ""
        return fitted_text(head + text, tokens, "#")

    content = {"kind": "data", "domain": "code", "language": list(LANGUAGES)}
    return DataSet(len(places), pair, context, content, about)


def function_bodies(text: str, language: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each function body. `language`: "" if it is unknown."""
    if language in ("python", ""):
        for match in _PYTHON_SIGNATURE.finditer(text):
            if end := _end_of_block(text, match.end(), len(match[1].expandtabs())):
                yield match.end(), end
    if language != "python":
        for match in _SCRIPT_SIGNATURE.finditer(text):
            close = re.compile(rf"^{match[1]}\}}", re.MULTILINE).search(text, match.end())
            if close is not None and text[match.end() : close.start()].strip():
                yield match.end(), close.end()


def _end_of_block(text: str, begin: int, indent: int) -> int | None:
    """Return the end of the last line that is indented more than `indent`; None if there is no such line."""
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
    """Return the last lines of a text that fit into PROMPT_TOKENS_MAX, and at least the last line."""
    lines = text.splitlines(keepends=True)
    first, tokens = len(lines), 0
    while first:
        # Count each line separately. In the joined text, white space of two lines can be one token, so the
        # sum of the counts is an upper bound.
        tokens += count_tokens(lines[first - 1])
        if tokens > PROMPT_TOKENS_MAX and first < len(lines):
            break
        first -= 1
    return "".join(lines[first:])
