from pathlib import Path

import pytest

from llmtap.errors import ConfigError
from llmtap.top.options import TopOptions, read_token


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({"admin": "127.0.0.1:9464"}, "--admin"),
        ({"admin": "ftp://host"}, "--admin"),
        ({"admin": "http://host:0"}, "--admin"),
        ({"admin": "http://[::1"}, "--admin"),
        ({"admin": "http://host:99999"}, "--admin"),
        ({"admin": "http://user:secret@host"}, "--admin"),
        ({"admin": "http://host/?token=secret"}, "--admin"),
        ({"window": "2m"}, "--window"),
        ({"interval": "soon"}, "--interval"),
        ({"interval": "1ms"}, "--interval"),
        ({"ca": "/no/such/file"}, "--ca"),
    ],
)
def test_what_cannot_be_is_named_and_no_secret_told(told: dict[str, str], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TopOptions(**told)  # type: ignore[arg-type]
    assert caught.value.place == place
    assert "secret" not in str(caught.value)


def test_a_path_before_the_api_is_kept_without_its_slash() -> None:
    assert TopOptions(admin="https://host/tap/").url == "https://host/tap"


@pytest.mark.parametrize(
    ("admin", "token", "clear"),
    [
        ("http://127.0.0.1:9464", "t", False), ("http://localhost", "t", False),
        ("http://[::1]:1", "t", False),
        ("http://tap.example.com", "t", True), ("http://tap.example.com", None, False),
        ("https://tap.example.com", "t", False),
    ],
)  # fmt: skip
def test_a_token_in_clear_text_is_known(admin: str, token: str | None, clear: bool) -> None:
    assert TopOptions(admin=admin, token=token).in_clear() is clear


def test_the_token_is_the_variables_or_the_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    environ = {"LLMTAP_ADMIN_TOKEN": " usual ", "OTHER": "other"}
    assert read_token({}) is None
    assert read_token(environ) == "usual"
    assert read_token(environ, name="OTHER") == "other"
    assert read_token(environ, name="OTHER", file=file) == "from-file"


def test_a_token_that_is_none_is_refused_without_telling_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"two\nlines")
    for environ, name, path, place in (
        ({}, "MINE", None, "--token-env"),
        ({"LLMTAP_ADMIN_TOKEN": "sécret"}, None, None, "--token-env"),
        ({}, None, file, "--token-file"),
        ({}, None, tmp_path / "none", "--token-file"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_token(environ, name=name, file=path)
        assert caught.value.place == place
        assert "cret" not in str(caught.value)
        assert "lines" not in caught.value.problem
