"""What people asked is said as they said it, in an order by seed; what is not as documented is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.workload.claims import check, notes
from llmtap.workload.datasets import read_sharegpt
from llmtap.workload.ietf import conversation_of
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.registry import workload_named


def turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


TALKS: list[dict[str, Any]] = [
    {
        "id": "a",
        "conversations": [
            turn("system", "Be brief."), turn("human", "What is a river?"), turn("gpt", "Water that runs."),
            turn("human", "And a hill?"), turn("gpt", "Ground that is high."),
        ],
    },
    {"id": "b", "conversations": [turn("human", "Nobody answers this.")]},
    {
        "id": "c",
        "conversations": [turn("gpt", "I begin."), turn("human", "Go on."), turn("gpt", "No.")],
    },
    {
        "id": "d",
        "conversations": [turn("human", " "), turn("gpt", "?"), turn("human", "Ah."), turn("gpt", "!")],
    },
    *(
        {"id": f"e{i}", "conversations": [turn("human", f"Say {i}."), turn("gpt", f"{i}, then.")]}
        for i in range(30)
    ),
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(TALKS))
    return path


def test_a_first_question_is_a_prompt_and_its_answer_a_length(file: Path) -> None:
    data = read_sharegpt(file, "--workload")
    assert data.pairs[0] == ("Be brief.\n\nWhat is a river?", "Water that runs.")
    assert data.pairs[1] == ("Go on.", "No."), "what the model said unasked is no question"
    assert len(data.items) == len(data.pairs) == 32
    told = data.describe()
    assert (told["conversations"], told["kept"]) == (33, 32)
    assert any("1 turns have no text" in note for note in told["notes"])
    assert any("have no answer" in note for note in told["notes"]), "the reader's own notes too"
    assert len(told["sha256"]) == 64


def test_prompts_are_the_datas_texts_and_lengths(file: Path) -> None:
    workload = workload_named(f"sharegpt:{file}", "--workload")
    requests = workload.requests(32, 5)
    prompts = workload.prompts(requests, 5)
    pairs = dict(read_sharegpt(file, "").pairs)
    texts = [prompts.prompt(row).text for row in range(32)]
    assert sorted(texts) == sorted(pairs)
    for row, text in enumerate(texts):
        assert requests.input[row] == count_tokens(text)
        assert requests.output[row] == count_tokens(pairs[text])
    assert texts != [workload.prompts(workload.requests(32, 6), 6).prompt(row).text for row in range(32)]


def test_more_requests_begin_as_fewer_do_and_begin_again_at_the_end(file: Path) -> None:
    workload = workload_named(f"sharegpt:{file}", "")
    few, many = workload.requests(10, 5), workload.requests(70, 5)
    assert few == many.taken(range(10))
    assert many.input[:32] == many.input[32:64]


def test_whole_conversations_have_their_history(file: Path) -> None:
    workload = workload_named(f"sharegpt-turns:{file}", "")
    requests = workload.requests(34, 5)
    assert len(requests) == 34
    prompts = workload.prompts(requests, 5)
    (later,) = (row for row, before in enumerate(requests.after) if before >= 0)
    prompt = prompts.prompt(later)
    assert prompt.text == "And a hill?"
    assert prompt.history == (("user", "Be brief.\n\nWhat is a river?"), ("assistant", "Water that runs."))
    said = (prompt.text, *(text for _, text in prompt.history))
    assert requests.input[later] == sum(map(count_tokens, said))
    assert set(requests.think_ns) == {0}
    texts = {prompts.prompt(row).text for row in range(34)}
    assert "Ah." in texts, "the turn after one that has no text is the conversation's first"


def test_the_reference_workload_takes_texts_from_the_file_and_shares_as_told(file: Path) -> None:
    workload = conversation_of(file, "--workload")
    plan = workload.plan(2_000, 1)
    assert sum(context >= 0 for context in plan.contexts) == pytest.approx(1_000, abs=4 * 500**0.5)
    assert plan.lengths == (200,)
    requests = workload.requests(20, 1)
    prompts = workload.prompts(requests, 1)
    for row in range(20):
        prompt = prompts.prompt(row)
        assert count_tokens(prompt.system) == (200 if workload.plan(20, 1).contexts[row] >= 0 else 0)
        assert count_tokens(prompt.system) + count_tokens(prompt.text) == requests.input[row]
    told = workload.describe()
    assert told["data"]["dataset"] == "ShareGPT-shaped"  # type: ignore[index]
    assert told["data"]["subset"]  # type: ignore[index]
    json.dumps(told)


def test_its_lengths_are_told_by_their_parameters_whatever_the_seed(file: Path) -> None:
    told = workload_named(f"sharegpt:{file}", "").describe()
    for side, (texts, of) in {"input": (0, "the message, of all pairs"), "output": (1, "the answer")}.items():
        lengths: Any = told[side]
        counted = [count_tokens(pair[texts]) for pair in read_sharegpt(file, "").pairs]
        assert (lengths["distribution"], lengths["unit"], lengths["n"]) == ("empirical", "tokens", 32)
        assert (lengths["min"], lengths["max"]) == (min(counted), max(counted))
        assert lengths["mean"] == pytest.approx(sum(counted) / 32, abs=0.05)
        assert lengths["of"].startswith(of)
    assert told["output"]["control"] == "max_tokens"  # type: ignore[index]


def test_of_many_pairs_some_in_even_steps_are_counted(tmp_path: Path) -> None:
    talks = [{"conversations": [turn("human", "Say" + " it" * i), turn("gpt", "No.")]} for i in range(1_001)]
    path = tmp_path / "many.json"
    path.write_text(json.dumps(talks))
    lengths: Any = workload_named(f"sharegpt:{path}", "").describe()["input"]
    assert (lengths["n"], lengths["of"]) == (334, "the message, of one in 3 pairs")
    assert lengths["max"] == count_tokens("Say" + " it" * 999)


def test_what_is_not_as_documented_is_a_note_and_no_error(file: Path) -> None:
    told = notes(check(conversation_of(file, ""), 1_000, 1))
    assert any(note.startswith("message p50:") and "documented 156 (A.3.2)" in note for note in told)
    assert not any("sharing" in note for note in told)


def test_a_text_may_be_made_longer_where_that_is_asked_for(file: Path) -> None:
    workload = workload_named(f"sharegpt:{file}", "")
    requests = workload.requests(5, 5)
    prompts: Any = workload.prompts(requests, 5)
    for row in range(5):
        text = prompts.prompt(row).text
        longer = prompts.sized(row, requests.input[row] + 40).text
        assert longer.startswith(text)
        assert count_tokens(longer) == requests.input[row] + 40


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "has no conversation with a question and an answer"),
        (json.dumps(TALKS[1:2]), "has no conversation with"),
        ('[{"conversations": 3}]', "conversation 0: Expected"),
        ("{}", "expected"),
        ('[{"conversations": []}', "cut off"),
    ],
)
def test_what_is_no_such_file_is_told(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_sharegpt(path, "--workload")
    assert caught.value.place == "--workload"
