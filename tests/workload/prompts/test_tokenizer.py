"""Each tokenizer counts as its package does, and gets words of one token each."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import COMMON
from llmtap.workload.prompts.tokenizer import (
    ChatTemplate,
    OwnTokenizer,
    cut_text,
    fitting_words,
    load_counter,
    open_tokenizer,
)
from tests.support.workloads.model_folder import CHATML, model_folder, ours_in_tiktoken

pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
tiktoken = pytest.importorskip("tiktoken", reason="the extra `tokenizers` is not installed")

TEXTS = ["", "a", "the water ran", "bacedi lomu", "naïve 你好 🙂", "x" * 100, "<|im_start|>user"]


opened = cache(lambda folder: open_tokenizer(str(folder), "--tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> str:
    tiktoken.list_encoding_names()
    constructors = tiktoken.registry.ENCODING_CONSTRUCTORS
    monkeypatch.setitem(constructors, "ours", lambda: ours_in_tiktoken("ours"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    return "tiktoken:ours"


def test_a_folder_and_its_file_are_the_same_tokenizer(folder: Path) -> None:
    by_folder, by_file = (open_tokenizer(str(p), "--tokenizer") for p in (folder, folder / "tokenizer.json"))
    assert by_folder.counts(TEXTS) == by_file.counts(TEXTS)
    assert by_folder.counts(TEXTS) == [len(by_file.encode(text)) for text in TEXTS]
    assert [by_folder.decode(by_folder.encode(text)) for text in TEXTS] == TEXTS


def test_a_file_that_cuts_texts_for_training_counts_all_of_them(folder: Path, tmp_path: Path) -> None:
    cutting = open_tokenizer(str(model_folder(tmp_path / "cutting", truncated=True)), "--tokenizer")
    assert cutting.counts(TEXTS) == open_tokenizer(str(folder), "--tokenizer").counts(TEXTS)


@pytest.mark.parametrize("name", ["sim", "tiktoken:tiny"])
def test_a_folder_with_the_name_of_a_tokenizer_is_not_read(
    name: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = name if name == "sim" else encoding
    Path(named).mkdir()
    counter = load_counter(named, chat=True, place="--tokenizer")
    assert counter.tokenizer.name == open_tokenizer(named, "--tokenizer").name


def test_tiktoken_counts_and_gives_text_back(encoding: str) -> None:
    tokenizer = open_tokenizer(encoding, "--tokenizer")
    judge = tiktoken.get_encoding("ours")
    assert tokenizer.counts(TEXTS) == [len(judge.encode_ordinary(text)) for text in TEXTS]
    assert tokenizer.decode(tokenizer.encode("the water ran")) == "the water ran"
    assert {"water", "ran"} <= set(tokenizer.vocabulary())
    assert fitting_words(tokenizer) is COMMON


def test_a_tokenizer_of_other_words_gets_some_of_its_own(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder), "--tokenizer")
    words = fitting_words(tokenizer)
    assert len(set(words.table)) >= 64
    assert words != COMMON
    for key in (bytes(range(256)), bytes(range(255, -1, -1)), bytes([7, 3] * 100)):
        assert tokenizer.counts([words.text(key)]) == [len(key)]


class _Characters(OwnTokenizer):
    def counts(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        return [len(text) for text in texts]


def test_a_tokenizer_of_characters_gets_letters_in_a_row() -> None:
    words = fitting_words(_Characters())
    assert len(words.text(bytes(range(100)))) == 100


class _Pairs(OwnTokenizer):
    """Nothing is one token."""

    def counts(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        return [2 * len(text) for text in texts]


def test_where_nothing_is_one_token_the_common_words_are_used() -> None:
    assert fitting_words(_Pairs()) is COMMON


@pytest.mark.parametrize("text", ["tiktoken:klingon", "/nowhere/tokenizer.json"])
def test_what_is_not_there_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--tokenizer: "):
        open_tokenizer(text, "--tokenizer")


@given(st.text(alphabet="bacedi lomu.,\n漢🙂é", max_size=80), st.integers(0, 40))
def test_a_cut_text_begins_the_text_and_has_what_it_says(folder: Path, text: str, tokens: int) -> None:
    tokenizer = opened(folder)
    cut, count = cut_text(tokenizer, text, tokens)
    assert text.startswith(cut)
    assert tokenizer.counts([cut]) == [count]
    assert count <= tokens
    if len(tokenizer.encode(text)) <= tokens:
        assert cut == text


ASKED = Prompt(text="the river", system="be brief", history=(("user", "hello"), ("assistant", "yes")))
DAY_NS = 1_700_000_000_000_000_000  # 2023-11-14


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "--tokenizer", now_ns=DAY_NS)


def test_chatml_is_rendered_as_transformers_does() -> None:
    """The text is what `apply_chat_template(..., tokenize=False)` of Transformers 5.23 gave for CHATML."""
    assert template(CHATML).render(ASKED) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nthe river<|im_end|>\n<|im_start|>assistant\n"
    )


CASES = {
    "special tokens": ("{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}", "<s>the river</s>"),
    "block trimming": ("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}", "x\n"),
    "loop controls": ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
    "tojson leaves letters alone": ("{{ {'a': '<ü>'} | tojson }}", '{"a": "<ü>"}'),
    "the date": ("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023"),
    "no tools": ("{% if tools is none %}none{% endif %}", "none"),
}


@pytest.mark.parametrize("name", CASES)
def test_templates_have_what_transformers_gives_them(name: str) -> None:
    source, rendered = CASES[name]
    assert template(source).render(ASKED) == rendered


def test_a_template_that_refuses_is_a_sentence() -> None:
    made = template("{{ raise_exception('no system role') if messages[0].role == 'system' }}ok")
    assert made.render(Prompt(text="x")) == "ok"
    with pytest.raises(
        ConfigError, match=r"^--tokenizer: the chat template refuses the prompt: no system role"
    ):
        made.render(ASKED)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ cycler.__init__.__globals__.os }}", "refuses"),
        ("{% for", "is not valid Jinja"),
    ],
)
def test_a_template_cannot_leave_its_sandbox_and_is_jinja(source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--tokenizer: the chat template {problem}"):
        template(source).render(ASKED)


def loaded(folder: Path, config: object, file: str | None = None) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    return ChatTemplate.load(folder, "--tokenizer")


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


@pytest.mark.parametrize(
    ("config", "file", "rendered"),
    [
        ({"chat_template": "config {{ bos_token }}", "bos_token": "<b>"}, None, "config <b>"),
        ({"chat_template": "config", "bos_token": {"content": "<b>"}}, "file {{ bos_token }}", "file <b>"),
        ({"chat_template": NAMED}, None, "d"),
    ],
)
def test_the_folder_says_which_template(
    tmp_path: Path, config: object, file: str | None, rendered: str
) -> None:
    assert loaded(tmp_path, config, file).render(Prompt(text="x")) == rendered


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "has no chat template"),
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ({"chat_template": [{"name": "rag", "template": "r"}]}, "has no chat template"),
    ],
)
def test_a_folder_without_one_is_named(tmp_path: Path, config: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--tokenizer: .*{problem}"):
        loaded(tmp_path, config)
