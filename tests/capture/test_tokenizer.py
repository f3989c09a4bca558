"""Tokenizers are optional and local: what is missing is said in one sentence, and nothing is fetched."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from llmtap.capture.tokenizer import load_tokenizer
from llmtap.errors import ConfigError, install_hint


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize(
    ("package", "text"), [("tiktoken", "tiktoken:cl100k_base"), ("tokenizers", __file__)]
)
def test_a_package_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, text: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=f"^meter.tokenizer: the package {package} is not installed"
    ) as told:
        load_tokenizer(text)
    assert told.value.hint == install_hint("tokenizers")


def test_a_file_that_is_not_there_or_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^meter\.tokenizer: there is no file .*none\.json"):
        load_tokenizer(str(tmp_path / "none.json"))
    if has("tokenizers"):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"is not a valid tokenizer\.json"):
            load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.skipif(not has("tokenizers"), reason="the extra `tokenizers` is not installed")
def test_a_tokenizer_json_counts(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    vocabulary = {"[UNK]": 0, "how": 1, "are": 2, "you": 3}
    file.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )
    encode = load_tokenizer(str(file))
    assert list(encode("how are they")) == [1, 2, 0]
    assert [len(encode(text)) for text in ("", "how", "how are you", "how are they")] == [0, 1, 3, 3]


@pytest.mark.skipif(not has("tiktoken"), reason="the extra `tokenizers` is not installed")
def test_an_encoding_that_is_not_there_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no encoding 'klingon'"):
        load_tokenizer("tiktoken:klingon")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="not on this machine, and llmtap downloads nothing"):
        load_tokenizer("tiktoken:cl100k_base")
