"""A TOML file says what a workload is; what is wrong with it is told by key and file."""

from pathlib import Path

import pytest

from llmtap.errors import ConfigError
from llmtap.workload.custom import load_workload
from llmtap.workload.lengths import Empirical
from llmtap.workload.prompts.text import count_tokens

EXAMPLE = Path(__file__).parents[2] / "config" / "workload.toml"
LEAST = "input = 100\noutput = 20\n"
A = "output = 1\ninput = {distribution = "


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text)
    return file


def test_the_example_is_a_workload() -> None:
    workload = load_workload(EXAMPLE)
    told = workload.describe()
    assert told["name"] == "support-chat"
    assert told["arrivals"] == "gamma:cv=2"
    assert told["request"] == {"temperature": 0.7, "max_tokens": "output", "stop": None}
    requests = workload.requests(300, 1)
    assert any(before >= 0 for before in requests.after)
    assert requests.blocks
    prompt = workload.prompts(requests, 1).prompt(7)
    said = (prompt.system, prompt.text, *(text for _, text in prompt.history))
    assert sum(map(count_tokens, said)) == requests.input[7]


@pytest.mark.parametrize(
    "told",
    [
        line.strip("# ").partition("   #")[0]
        for line in EXAMPLE.read_text().splitlines()
        if line.strip().startswith("#   { distribution")
    ],
)
def test_each_distribution_of_the_example_loads(tmp_path: Path, told: str) -> None:
    (tmp_path / "lengths.csv").write_text("time,input_tokens\n1,20\n2,40\n")
    workload = load_workload(written(tmp_path, f"input = {told}\noutput = 5\n"))
    assert min(workload.requests(50, 1).input) >= 1


@pytest.mark.parametrize(
    ("name", "content", "more"),
    [
        ("n.txt", "3\n\n5\n 9 \n", ""),
        ("n.json", "[5, 3, 9]", ""),
        ("n.csv", "a,tokens\nx,3\ny,5\nz,9\n", ', column = "tokens"'),
    ],
)
def test_lengths_come_from_files(tmp_path: Path, name: str, content: str, more: str) -> None:
    (tmp_path / name).write_text(content)
    text = f'input = {{ distribution = "empirical", file = "{name}"{more}, min = 4 }}\noutput = 1\n'
    workload = load_workload(written(tmp_path, text))
    assert isinstance(workload.input, Empirical)
    assert workload.input.values == (3, 5, 9)
    assert set(workload.requests(200, 1).input) == {4, 5, 9}
    assert len(workload.describe()["input"]["sha256"]) == 64  # type: ignore[index]


def test_contents_are_of_their_kind(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It was a long day.\n" * 50)
    for kind, more in (("words", ""), ("code", ""), ("document", ""), ("file", 'file = "book.txt"')):
        workload = load_workload(written(tmp_path, f'{LEAST}[content]\nkind = "{kind}"\n{more}\n'))
        requests = workload.requests(3, 1)
        assert count_tokens(workload.prompts(requests, 1).prompt(2).text) == 100
        assert workload.describe()["content"]["kind"] == kind  # type: ignore[index]
    workload = load_workload(written(tmp_path, f'{LEAST}[content]\nkind = "ids"\nvocabulary = 50\n'))
    ids = workload.prompts(workload.requests(3, 1), 1).prompt(2).ids
    assert len(ids) == 100
    assert max(ids) < 50


@pytest.mark.parametrize(
    ("text", "place", "problem", "hint"),
    [
        ("input = 3", "output", "is not given", None),
        (LEAST + "inptu = 3", "inptu", "there is no such key", "did you mean 'input'?"),
        (LEAST + "zzz = 3", "zzz", "there is no such key", "keys: input, output, name, about"),
        ("input = {}\noutput = 1", "input.distribution", "is not given", "one of fixed, uniform, normal"),
        (A + '"fixed", tokns = 1}', "input.tokns", "no such key", "did you mean 'tokens'?"),
        (A + '"uniform", min = 5, max = 3}', "input", "min 5 is more than max 3", None),
        ('input = 1\noutput = {distribution = "lognormal", mu = 1.0}', "output", "mu and sigma, or", None),
        (LEAST + "[sharing]\nfraction = 0.5", "sharing.tokens", "is not given", None),
        (
            LEAST + '[conversations]\nturns = 3\nthink = {distribution = "exponential", mean = "8 potatoes"}',
            "conversations.think.mean", "expected a duration", None,
        ),
        (LEAST + '[content]\nkind = "poem"', "content.kind", "Invalid", "one of words, code"),
        (LEAST + '[content]\nkind = "file"', "content.file", "is not given", "takes the text"),
        (LEAST + '[content]\nfile = "x"', "content.file", "has no use where content.kind is 'words'", None),
        (LEAST + '[content]\nkind = "file"\nfile = "none.txt"', "content.file", "cannot be read", None),
        (LEAST + 'arrivals = "poison"', "arrivals", "'poison'", "did you mean poisson"),
        (A + '"empirical", file = "none"}', "input.file", "cannot be read", None),
        (A + '"empirical", file = "bad.txt"}', "input.file", "line 2: expected a whole", None),
        (A + '"empirical", file = "empty.txt"}', "input.file", "has no values", None),
        (
            A + '"empirical", file = "bad.txt", column = "tokens"}',
            "input.file", "has no column 'tokens', but 1", None,
        ),
        ("input = ", "", "is not TOML", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_key(
    tmp_path: Path, text: str, place: str, problem: str, hint: str | None
) -> None:
    (tmp_path / "bad.txt").write_text("1\ntwo\n")
    (tmp_path / "empty.txt").write_text("\n")
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_workload(file)
    assert caught.value.place == (f"{place} in {file}" if place else str(file))
    assert problem in caught.value.problem
    assert hint is None or hint in (caught.value.hint or "")
