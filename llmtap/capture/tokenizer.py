"""Counting tokens ourselves, where neither the provider nor the stream tells: optional, and local.

Nothing is fetched: a `tokenizer.json` is read from a path, and tiktoken's encodings from the folder that
TIKTOKEN_CACHE_DIR names. The packages come with the extra `tokenizers` and are imported only when asked for.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from llmtap.errors import ConfigError, install_hint

__all__ = ["Encode", "load_tokenizer"]

Encode = Callable[[str], Sequence[int]]
"""The ids of the tokens of a text."""

_TIKTOKEN: Final = "tiktoken:"
_INSTALL: Final = install_hint("tokenizers")


def load_tokenizer(text: str, place: str = "meter.tokenizer") -> Encode:
    """A function that cuts a text into tokens. `text` is `tiktoken:NAME` or a path to a tokenizer.json.

    Raises:
        ConfigError: for a package, an encoding or a file that is not there; it names `place`.
    """
    if text.startswith(_TIKTOKEN):
        return _tiktoken(text.removeprefix(_TIKTOKEN), place)
    return _tokenizers(Path(text), place)


def _tiktoken(name: str, place: str) -> Encode:
    try:
        import tiktoken
        import tiktoken.load
    except ImportError:
        raise ConfigError(place, "the package tiktoken is not installed", _INSTALL) from None
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(sorted(tiktoken.list_encoding_names()))
        raise ConfigError(place, f"tiktoken has no encoding {name!r}", f"it has {known}")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", "")
    read_file = tiktoken.load.read_file

    def refuse(blobpath: str) -> bytes:
        cached = hashlib.sha1(blobpath.encode()).hexdigest()  # as tiktoken names its files
        raise ConfigError(
            place, f"the encoding {name} is not on this machine, and nothing is fetched",
            f"put {blobpath} as {cached} into the folder that TIKTOKEN_CACHE_DIR names ({folder or 'unset'})",
        )  # fmt: skip

    tiktoken.load.read_file = refuse
    try:
        encoding = tiktoken.get_encoding(name)
    finally:
        tiktoken.load.read_file = read_file
    encode: Encode = encoding.encode_ordinary
    return encode


def _tokenizers(path: Path, place: str) -> Encode:
    if not path.is_file():
        raise ConfigError(place, f"there is no file {path}", "tiktoken:NAME, or the path of a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(place, "the package tokenizers is not installed", _INSTALL) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the package raises a bare Exception
        raise ConfigError(place, f"{path} is no tokenizer.json: {exc}") from None
    # A file may ask for both, and then says nothing of how long a text is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
