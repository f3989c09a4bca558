"""What people asked is said as they said it, in an order by seed; what is not as documented is told."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.load.options import ScheduleOptions
from llmtap.load.replay.plan import make_plan
from llmtap.traces.registry import SNIFF_BYTES, detect
from llmtap.workload.datasets import (
    PROMPT_TOKENS_MAX,
    function_bodies,
    read_long_sharegpt,
    read_sharegpt,
    read_the_stack,
)
from llmtap.workload.ietf import code_completion_of
from llmtap.workload.prompts.prose import prose
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.registry import workload_named


def turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


TALKS: list[dict[str, Any]] = [
    {
        "id": "a",
        "conversations": [
            turn("system", "Be brief."),
            turn("human", "What is a river?"),
            turn("gpt", "Water that runs."),
            turn("human", "And a hill?"),
            turn("gpt", "Ground that is high."),
        ],
    },
    {"id": "b", "conversations": [turn("human", "Nobody answers this.")]},
    {"id": "c", "conversations": [turn("gpt", "I begin."), turn("human", "Go on."), turn("gpt", "No.")]},
    {
        "id": "d",
        "conversations": [turn("human", " "), turn("gpt", "?"), turn("human", "Ah."), turn("gpt", "!")],
    },
    *(
        {"id": f"e{i}", "conversations": [turn("human", f"Say {i}."), turn("gpt", f"{i}, then.")]}
        for i in range(30)
    ),
]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(TALKS))
    return path


def test_a_first_question_is_a_prompt_and_its_answer_a_length(talks: Path) -> None:
    data = read_sharegpt(talks, "--workload")
    assert data.pair(0) == ("Be brief.\n\nWhat is a river?", "Water that runs.")
    assert data.pair(1) == ("Go on.", "No."), "what the model said unasked is no question"
    assert data.count == 32
    result = data.about
    assert (result["conversations"], result["kept"]) == (33, 32)
    assert any("1 turns have no text" in note for note in result["notes"])
    assert any("have no answer" in note for note in result["notes"]), "the reader's own notes too"
    assert len(result["sha256"]) == 64


def test_prompts_are_the_datas_texts_and_lengths(talks: Path) -> None:
    workload = workload_named(f"conversation:{talks}", "--workload")
    requests = workload.requests(32, 5)
    data = read_sharegpt(talks, "")
    pairs = dict(map(data.pair, range(data.count)))
    prompts = [workload.prompts(requests, 5).prompt(row) for row in range(32)]
    texts = [prompt.text for prompt in prompts]
    assert sorted(texts) == sorted(pairs)
    assert list(requests.input) == [count_tokens(p.system) + count_tokens(p.text) for p in prompts]
    assert {count_tokens(p.system) for p in prompts} == {0, 200}
    assert list(requests.output) == [count_tokens(pairs[text]) for text in texts]
    assert texts != [workload.prompts(workload.requests(32, 6), 6).prompt(row).text for row in range(32)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "has no conversation with a question and an answer"),
        ('[{"conversations": 3}]', "conversation 0: conversations: expected array"),
        ("{}", "conversation 0: conversations: is missing"),
        ("3", "no JSON array"),
    ],
)
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_sharegpt(path, "--workload")
    assert caught.value.place == "--workload"


def test_json_lines_are_read_as_an_array_is(talks: Path, tmp_path: Path) -> None:
    """As Sharegpt_gpt4 is published."""
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in TALKS))
    assert detect(path.name, path.read_bytes()[:SNIFF_BYTES]).name == "sharegpt"
    data, same = read_sharegpt(path, ""), read_sharegpt(talks, "")
    assert data.count == same.count
    assert [*map(data.pair, range(data.count))] == [*map(same.pair, range(same.count))]
    path.write_text(json.dumps(TALKS[0]) + "\n{\n")
    with pytest.raises(ConfigError, match="line 2: is not valid JSON"):
        read_sharegpt(path, "")


def test_items_are_concatenated_to_1600_tokens_on_average(tmp_path: Path) -> None:
    random = Random(3)
    path = tmp_path / "sharegpt_gpt4.jsonl"
    items = [
        [prose(random.randint(5, 400), f"q{i}"), prose(random.choice((20, 150, 700)), f"a{i}")]
        for i in range(400)
    ]
    path.write_text(
        "".join(
            json.dumps({"conversations": [turn("human", question), turn("gpt", answer)]}) + "\n"
            for question, answer in items
        )
    )
    workload = workload_named(f"long-conversation:{path}", "--workload")
    data = read_long_sharegpt(path, "")
    pairs = [data.pair(number) for number in range(data.count)]
    # Each item is in one prompt, in the order of the file; the rest is too short for a prompt.
    parts = [part for question, answer in pairs for part in (*question.split("\n\n"), answer)]
    texts = [text for item in items for text in item]
    assert parts == texts[: len(parts)]
    assert sum(count_tokens(text) for text in texts[len(parts) :]) < 1_600
    requests = workload.requests(data.count, 5)
    assert 1_600 * 0.99 < sum(requests.input) / data.count < 1_600 * 1.01
    prompts = [workload.prompts(requests, 5).prompt(row) for row in range(data.count)]
    answers = dict(pairs)
    assert [count_tokens(answers[prompt.text]) for prompt in prompts] == list(requests.output)
    assert not any(prompt.system for prompt in prompts), "nothing is shared"
    result: Any = workload.describe()
    assert (result["name"], result["data"]["prompts"], result["sharing"]) == (
        "long-conversation",
        data.count,
        None,
    )


def test_too_few_items_are_refused(talks: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--workload: .* have fewer than 1,600 tokens"):
        workload_named(f"long-conversation:{talks}", "--workload")


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("conversation", "anon8231489123/ShareGPT_Vicuna_unfiltered"),
        ("code-completion", "bigcode/the-stack"),
        ("long-conversation", "shibing624/sharegpt_gpt4"),
    ],
)
def test_a_missing_file_is_named_with_the_place_of_its_data_set(name: str, hub: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload_named(f"{name}:missing.json", "--workload")
    assert "there is no file missing.json" in str(caught.value) and hub in str(caught.value.hint)
    if name == "long-conversation":
        with pytest.raises(ConfigError) as caught:
            workload_named(name, "--workload")
        assert hub in str(caught.value.hint)
    else:
        # The default run needs no file, and says so in one line.
        plan = make_plan(ScheduleOptions(source=name, requests=3, rate=1.0))
        (note,) = plan.notes
        workload: Any = plan.about["workload"]
        assert note == workload["stand_in"] and "\n" not in note
        assert hub in note and "stand-in" in note
        assert note in [one["here"] for one in workload["deviations"]]


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
    return [
        (text[:begin].splitlines()[-1], text[begin:end]) for begin, end in function_bodies(text, language)
    ]


def test_functions_of_each_language() -> None:
    python = [
        ('    Twice."""', "    if a:\n        return b\n\n    return a"),
        ("    ):", "        return x  # done"),
    ]
    load = "  if (url) {\n    return await fetch(url);\n  }\n  return null;\n}"
    script = [("export async function load(url) {", load), ("const add = (a, b) => {", "  return a + b;\n}")]
    typed = [("export const sum = (a: number, b: number): number => {", "  return a + b;\n}")]
    for text, language, found in (
        (PYTHON, "python", python),
        (SCRIPT, "javascript", script),
        (TYPED, "typescript", typed),
        (PYTHON, "", python),
        (SCRIPT, "", script),  # a language that nobody told
    ):
        assert bodies(text, language) == found


@pytest.fixture
def code(tmp_path: Path) -> Path:
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


def test_a_file_is_its_functions(code: Path) -> None:
    data = read_the_stack(code, "--workload")
    result = data.about
    assert (result["files"], result["functions"]) == (6, 6)
    assert result["notes"] == [
        "1 files are in other languages, and were left out",
        "1 files have no function, and were left out",
    ]
    prompts = [data.pair(number)[0] for number in range(6)]
    assert prompts[0] == PYTHON[: PYTHON.index("    if a:")]
    assert prompts[4] == TYPED.splitlines(keepends=True)[0], "CRLF became LF"
    assert prompts[5].endswith("\n\ndef last(x):\n")
    assert 0.9 * PROMPT_TOKENS_MAX < count_tokens(prompts[5]) <= PROMPT_TOKENS_MAX


def test_the_reference_workload_shares_contexts_of_the_files(code: Path) -> None:
    workload = code_completion_of(code, "--workload")
    plan = workload.plan(60, 3)
    requests = workload.requests(60, 3)
    prompts = workload.prompts(requests, 3)
    systems = {}
    for row in range(60):
        prompt = prompts.prompt(row)
        assert count_tokens(prompt.system) + count_tokens(prompt.text) == requests.input[row]
        systems.setdefault(plan.contexts[row], set()).add(prompt.system)
    assert systems.pop(-1) == {""}
    assert all(len(message) == 1 for message in systems.values())
    texts = [message.pop() for message in systems.values()]
    assert len(set(texts)) == len(texts) >= 5, "four files, and yet no two contexts are the same"
    assert workload.describe()["output"]["mu"] == 4.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no function in python, javascript, typescript"),
        ('{"content": "x"}\n{"text": 1}', "line 2: Object missing required field `content`"),
        ("def f():", "line 1: JSON is malformed"),
    ],
)
def test_a_file_without_functions_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_the_stack(path, "--workload")
    assert caught.value.place == "--workload"
