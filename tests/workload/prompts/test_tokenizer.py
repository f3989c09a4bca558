"""Each tokenizer counts as its package does, and gets words of one token each."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.workload.prompts.text import COMMON
from llmtap.workload.prompts.tokenizer import OwnTokenizer, Tokenizer, cut_text, fitting_words, open_tokenizer
from tests.support.model_folder import model_folder, ours_in_tiktoken

pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
tiktoken = pytest.importorskip("tiktoken", reason="the extra `tokenizers` is not installed")

TEXTS = ["", "a", "the water ran", "bacedi lomu", "naïve 你好 🙂", "x" * 100, "<|im_start|>user"]


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


def test_tiktoken_counts_and_gives_text_back(encoding: str) -> None:
    tokenizer = open_tokenizer(encoding, "--tokenizer")
    judge = tiktoken.get_encoding("ours")
    assert tokenizer.counts(TEXTS) == [len(judge.encode_ordinary(text)) for text in TEXTS]
    assert tokenizer.decode(tokenizer.encode("the water ran")) == "the water ran"
    assert {"water", "ran"} <= set(tokenizer.vocabulary())
    assert fitting_words(tokenizer) is COMMON


def test_the_common_words_do_for_our_own() -> None:
    assert fitting_words(OwnTokenizer()) is COMMON
    assert OwnTokenizer().decode([1]) is None


def test_a_tokenizer_of_other_words_gets_some_of_its_own(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder), "--tokenizer")
    words = fitting_words(tokenizer)
    assert words.exact
    assert words.distinct >= 64
    assert words != COMMON
    for key in (bytes(range(256)), bytes(range(255, -1, -1)), bytes([7, 3] * 100)):
        assert tokenizer.counts([words.text(key)]) == [len(key)]


class _Letters(OwnTokenizer):
    """A token a letter, spaces too."""

    def counts(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        return [len(text) for text in texts]


class _Pairs(OwnTokenizer):
    """Nothing is one token."""

    def counts(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        return [2 * len(text) for text in texts]


def test_where_letters_are_tokens_texts_are_letters() -> None:
    words = fitting_words(_Letters())
    assert (words.exact, words.separator, words.distinct) == (True, "", 32)
    assert len(words.text(bytes(256))) == 256


def test_where_nothing_is_one_token_it_is_said() -> None:
    words = fitting_words(_Pairs())
    assert not words.exact
    assert words.table == COMMON.table


@pytest.mark.parametrize("text", ["tiktoken:klingon", "/nowhere/tokenizer.json"])
def test_what_is_not_there_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--tokenizer: "):
        open_tokenizer(text, "--tokenizer")


@given(st.text(alphabet="bacedi lomu.,\n漢🙂é", max_size=80), st.integers(0, 40))
def test_a_cut_text_begins_the_text_and_has_what_it_says(folder: Path, text: str, tokens: int) -> None:
    tokenizer = _cached(folder)
    cut, count = cut_text(tokenizer, text, tokens)
    assert text.startswith(cut)
    assert tokenizer.counts([cut]) == [count]
    assert count <= tokens
    if len(tokenizer.encode(text)) <= tokens:
        assert cut == text


def test_plain_words_are_cut_exactly(folder: Path) -> None:
    tokenizer = _cached(folder)
    text = fitting_words(tokenizer).text(bytes(range(256)))
    assert [cut_text(tokenizer, text, n)[1] for n in range(257)] == list(range(257))


_opened: dict[Path, Tokenizer] = {}


def _cached(folder: Path) -> Tokenizer:
    if folder not in _opened:
        _opened[folder] = open_tokenizer(str(folder), "--tokenizer")
    return _opened[folder]
