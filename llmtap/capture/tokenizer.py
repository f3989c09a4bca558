"""Load a local tokenizer: a function from text to token ids (optional, `meter.tokenizer`).

The meter cuts prompts into blocks of tokens with it, and counts tokens if neither the provider's usage nor
the stream reports their number. `workload/prompts/tokenizer.py` opens the same files. Nothing is downloaded:
a `tokenizer.json` is read from a path, and the encodings of tiktoken from the folder in TIKTOKEN_CACHE_DIR.
The packages come with the extra `tokenizers`, and are imported only if a tokenizer is configured.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from llmtap.errors import ConfigError, install_hint

Encode = Callable[[str], Sequence[int]]
"""Function that returns the token ids of a text."""

TIKTOKEN_PREFIX: Final = "tiktoken:"
_INSTALL_HINT: Final = install_hint("tokenizers")


def load_tokenizer(text: str, place: str = "meter.tokenizer") -> Encode:
    """Return a function that cuts a text into tokens. `text`: `tiktoken:NAME` or a path to a tokenizer.json.

    Raises ConfigError, which names the option `place`, for a missing package, encoding or file.
    """
    if text.startswith(TIKTOKEN_PREFIX):
        encode: Encode = open_tiktoken(text.removeprefix(TIKTOKEN_PREFIX), place).encode_ordinary
        return encode
    tokenizer = open_tokenizer_file(Path(text), place)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def open_tiktoken(name: str, place: str) -> Any:
    """Return an encoding of the package tiktoken. Raises ConfigError, which names the option `place`."""
    try:
        import tiktoken
        import tiktoken.load
    except ImportError:
        raise ConfigError(place, "the package tiktoken is not installed", _INSTALL_HINT) from None
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(sorted(tiktoken.list_encoding_names()))
        raise ConfigError(
            place, f"tiktoken has no encoding {name!r}", f"the encodings of tiktoken are {known}"
        )
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", "")
    read_file = tiktoken.load.read_file

    def refuse_download(blobpath: str) -> bytes:
        cached = hashlib.sha1(blobpath.encode()).hexdigest()  # The name that tiktoken gives to a cached file.
        raise ConfigError(
            place,
            f"the encoding {name!r} is not on this machine, and llmtap downloads nothing",
            f"store {blobpath} as {cached} in the folder of TIKTOKEN_CACHE_DIR ({folder or 'not set'})",
        )

    tiktoken.load.read_file = refuse_download
    try:
        return tiktoken.get_encoding(name)
    finally:
        tiktoken.load.read_file = read_file


def open_tokenizer_file(path: Path, place: str) -> Any:
    """Return a `tokenizers.Tokenizer` that does not change texts. Raises ConfigError, which names `place`."""
    if not path.is_file():
        raise ConfigError(
            place, f"there is no file {path}", "give tiktoken:NAME, or the path of a tokenizer.json"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(place, "the package tokenizers is not installed", _INSTALL_HINT) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # The package tokenizers raises no narrower class than Exception.
        hint = "give the tokenizer.json that belongs to the model"
        raise ConfigError(place, f"{path} is not a valid tokenizer.json: {exc}", hint) from None
    # A tokenizer.json can request truncation or padding for training. Both would change the number of tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
