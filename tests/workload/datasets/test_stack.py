"""A function's prompt ends with its signature, its completion is its body: both the file's own text."""

import json
from pathlib import Path

import pytest

from llmtap.errors import ConfigError
from llmtap.workload.datasets import PROMPT_TOKENS_MAX, functions, read_stack
from llmtap.workload.ietf import code_completion_of
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.registry import workload_named

PYTHON = '''import os


def first(a, b=(1, 2)) -> int:
    """Adds.

    Twice."""
    if a:
        return b

    return a


class Thing:
    async def second(
        self,
        x,
    ):
        return x  # done

    value = 3


def third(): pass
'''
SCRIPT = """import x from "y";

export async function load(url) {
  if (url) {
    return await fetch(url);
  }
  return null;
}

const add = (a, b) => {
  return a + b;
};

function empty() {
}
"""
TYPED = """export const sum = (a: number, b: number): number => {
  return a + b;
};
"""


def bodies(text: str, language: str) -> list[tuple[str, str]]:
    return [(text[:begin].splitlines()[-1], text[begin:end]) for begin, end in functions(text, language)]


def test_functions_of_python() -> None:
    assert bodies(PYTHON, "python") == [
        ("    Twice.\"\"\"", "    if a:\n        return b\n\n    return a"),
        ("    ):", "        return x  # done"),
    ]  # fmt: skip


def test_functions_of_javascript_and_typescript() -> None:
    load = "  if (url) {\n    return await fetch(url);\n  }\n  return null;\n}"
    assert bodies(SCRIPT, "javascript") == [
        ("export async function load(url) {", load),
        ("const add = (a, b) => {", "  return a + b;\n}"),
    ]
    typed = "export const sum = (a: number, b: number): number => {"
    assert bodies(TYPED, "typescript") == [(typed, "  return a + b;\n}")]
    assert len(bodies(PYTHON, "")) == 2, "a language that nobody told"
    assert len(bodies(SCRIPT, "")) == 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.jsonl"
    long = "".join(f"value_{i} = {i}\n" for i in range(1_000)) + "\n\ndef last(x):\n    return x\n"
    rows = [
        {"content": PYTHON, "language": "Python"},
        {"content": SCRIPT, "lang": "js"},
        {"content": TYPED.replace("\n", "\r\n")},
        {"content": long, "language": "Python"},
        {"content": "fn main() {}", "language": "Rust"},
        {"content": "x = 1", "language": "Python"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_file_is_its_functions(file: Path) -> None:
    data = read_stack(file, "--workload")
    told = data.describe()
    assert (told["files"], told["functions"]) == (6, 6)
    assert told["notes"] == [
        "1 files are in other languages, and were left out",
        "1 files have no function, and were left out",
    ]
    prompts = [data.pair(number)[0] for number in range(6)]
    assert prompts[0] == PYTHON[: PYTHON.index("    if a:")]
    assert prompts[4] == TYPED.splitlines(keepends=True)[0], "CRLF became LF"
    assert prompts[5].endswith("\n\ndef last(x):\n")
    assert 0.9 * PROMPT_TOKENS_MAX < count_tokens(prompts[5]) <= PROMPT_TOKENS_MAX


def test_prompts_are_the_files_texts(file: Path) -> None:
    workload = workload_named(f"stack:{file}", "")
    requests = workload.requests(6, 3)
    prompts = workload.prompts(requests, 3)
    data = read_stack(file, "")
    pairs = dict(data.pair(number) for number in range(6))
    for row in range(6):
        text = prompts.prompt(row).text
        assert (requests.input[row], requests.output[row]) == (count_tokens(text), count_tokens(pairs[text]))


def test_the_reference_workload_shares_contexts_of_the_files(file: Path) -> None:
    workload = code_completion_of(file, "--workload")
    plan = workload.plan(60, 3)
    requests = workload.requests(60, 3)
    prompts = workload.prompts(requests, 3)
    systems = {}
    for row in range(60):
        prompt = prompts.prompt(row)
        assert count_tokens(prompt.system) + count_tokens(prompt.text) == requests.input[row]
        systems.setdefault(plan.contexts[row], set()).add(prompt.system)
    assert systems.pop(-1) == {""}
    assert all(len(said) == 1 for said in systems.values())
    texts = [said.pop() for said in systems.values()]
    assert len(set(texts)) == len(texts) >= 5, "four files, and yet no two contexts are the same"
    assert workload.describe()["output"]["mu"] == 4.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no function in python, javascript, typescript"),
        ('{"content": "x = 1"}', "has no function"),
        ('{"content": "x"}\n{"text": 1}', "line 2: Object missing required field `content`"),
        ("def f():", "line 1: JSON is malformed"),
    ],
)
def test_what_is_no_such_file_is_told(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_stack(path, "--workload")
    assert caught.value.place == "--workload"
