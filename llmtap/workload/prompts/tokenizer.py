"""Tokenizers, chat templates, and counters of the tokens of whole prompts.

`open_tokenizer` and `load_counter` take the text of `--tokenizer`: `tiktoken:NAME`, a `tokenizer.json`, a
model's folder, or `sim` for the tokenizer of the simulated engine (`text.py`). With a model's folder, a
`TokenCounter` counts a `Prompt` as the server does, with chat template or special tokens; otherwise it counts
only the texts. All files are local, nothing is downloaded. The extra `tokenizers` installs the packages.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from llmtap.capture.tokenizer import TIKTOKEN_PREFIX, Encode, open_tiktoken, open_tokenizer_file
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S
from llmtap.user_files import decode_json, read_file
from llmtap.workload.prompts import text as own
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import COMMON, Words

CONFIG_BYTES_MAX: Final = 16 << 20
"""Maximum size of tokenizer_config.json and of a chat template."""
OWN: Final = "sim"
"""Name of the tokenizer of the simulated engine."""
_FOLDER_HINT: Final = "give the folder of the model as its publisher stores it"
WORDS_MIN: Final = 16
"""Minimum number of words of one token each: with fewer, texts would be too similar."""
_CANDIDATES_MAX: Final = 4_000
_plain_word = re.compile(r"[a-z]{2,9}").fullmatch


class Tokenizer(Protocol):
    """Cuts texts into tokens, without adding special tokens of a model."""

    @property
    def name(self) -> str:
        """Name as results show it."""
        ...

    @property
    def specials(self) -> int:
        """Number of special tokens that a server adds to the text of a completion."""
        ...

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        ...

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens; None: this tokenizer has none."""
        ...

    def vocabulary(self) -> Sequence[str]:
        """Plain lower-case words of the vocabulary in the order of their ids; empty if unknown."""
        ...


def open_tokenizer(text: str, place: str) -> Tokenizer:
    """Open a tokenizer by name or path. Raises ConfigError naming `place`."""
    if text == OWN:
        return OwnTokenizer()
    if text.startswith(TIKTOKEN_PREFIX):
        return _Tiktoken(text, open_tiktoken(text.removeprefix(TIKTOKEN_PREFIX), place))
    path = Path(text)
    return _HuggingFace(path / "tokenizer.json" if path.is_dir() else path, place)


class OwnTokenizer:
    """llmtap's own tokenizer, which needs no file."""

    name = OWN
    specials = 0

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [own.count_tokens(text) for text in texts]

    def encode(self, text: str) -> Sequence[int]:
        return own.token_ids(text)

    def decode(self, ids: Sequence[int]) -> str | None:
        return None

    def vocabulary(self) -> Sequence[str]:
        return ()


class _Tiktoken:
    """Tokenizer of the package tiktoken."""

    specials = 0

    def __init__(self, name: str, encoding: Any) -> None:
        self.name = name
        self.encode: Encode = encoding.encode_ordinary
        self._encoding = encoding

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [len(self.encode(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str | None:
        text: str = self._encoding.decode(ids)
        return text

    def vocabulary(self) -> Sequence[str]:
        return _plain_words(token.decode("latin-1") for token in self._encoding.token_byte_values())


class _HuggingFace:
    """Tokenizer of a tokenizer.json."""

    def __init__(self, path: Path, place: str) -> None:
        self.name = str(path)
        self._tokenizer = open_tokenizer_file(path, place)
        self.specials = int(self._tokenizer.num_special_tokens_to_add(False))
        """Number of special tokens that the model's server adds to a prompt."""
        # Prefer `encode_batch_fast`, which exists since `tokenizers` 0.20.1: it computes no offsets, which
        # saves a third of the time.
        self._encode_all: Any = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        """Encodes many texts in one call."""

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [len(encoding) for encoding in self._encode_all(list(texts), add_special_tokens=False)]

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str | None:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def vocabulary(self) -> Sequence[str]:
        ids: dict[str, int] = self._tokenizer.get_vocab()
        return _plain_words(sorted(ids, key=ids.__getitem__))


def _plain_words(tokens: Any) -> list[str]:
    """Return the words of a vocabulary, without the character that stands for a leading space."""
    bare = (token.lstrip(" \u0120\u2581") for token in tokens)
    return list(dict.fromkeys(word for word in bare if _plain_word(word)))[:_CANDIDATES_MAX]


def fitting_words(tokenizer: Tokenizer) -> Words:
    """Return words that are one token each at any position: the common words, or words of the vocabulary.

    If there are too few such words, return the common words.
    """
    common = list(dict.fromkeys(COMMON.table))
    if tokenizer.counts([" ".join(common), *common]) == [len(common)] + [1] * len(common):
        return COMMON
    words = _single_token_words(tokenizer, [*common, *tokenizer.vocabulary()], " ")
    if len(words) >= WORDS_MIN:
        return Words.from_words(words)
    letters = _single_token_words(tokenizer, list("abcdefghijklmnopqrstuvwxyz0123456789"), "")
    if len(letters) >= WORDS_MIN:
        return Words.from_words(letters, "")
    return COMMON


def _single_token_words(tokenizer: Tokenizer, words: Sequence[str], separator: str) -> list[str]:
    """Return the words that are one token both alone and in a sequence."""
    words = list(dict.fromkeys(words))
    in_a_row = tokenizer.counts([separator.join([word] * 8) for word in words])
    counts = zip(words, tokenizer.counts(words), in_a_row, strict=True)
    return [word for word, one, eight in counts if (one, eight) == (1, 8)]


def cut_text(tokenizer: Tokenizer, text: str, tokens: int) -> tuple[str, int]:
    """Return the beginning of a text with at most `tokens` tokens, and its length in tokens.

    If the cut text has another count than expected (a character was split), neighbouring sizes are tried.
    """
    ids = tokenizer.encode(text)
    if len(ids) <= tokens:
        return text, len(ids)
    best = ("", 0)
    for size in sorted(range(max(0, tokens - 8), tokens + 4), key=lambda size: abs(size - tokens)):
        cut = tokenizer.decode(ids[:size])
        if cut is None:
            raise ValueError(f"the tokenizer {tokenizer.name} cannot decode tokens: use another tokenizer")
        cut = cut.rstrip("\ufffd")
        if not text.startswith(cut):
            continue
        count = tokenizer.counts([cut])[0]
        if count == tokens:
            return cut, count
        if best[1] < count < tokens:
            best = (cut, count)
    return best


class ChatTemplate:
    """Renders prompts as a model's server does, by its Jinja template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], place: str, *, now_ns: int | None = None
    ) -> None:
        """`special_tokens`: texts of special tokens by name, such as `bos_token`. `now_ns`: date for
        templates that use the current date. Raises ConfigError if the template is invalid."""
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        now = datetime.fromtimestamp((SystemClock.wall_ns() if now_ns is None else now_ns) // NS_PER_S, UTC)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = now.strftime
        self._place = place
        self._template_error = jinja2.TemplateError
        self._token_texts = dict(special_tokens)
        """Texts of the model's special tokens, which the template can use."""
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(place, f"the chat template is not valid Jinja: {exc}", _FOLDER_HINT) from None

    @classmethod
    def load(cls, folder: Path, place: str) -> "ChatTemplate":
        """Load the template of a model's folder. Raises ConfigError naming `place`."""
        file = folder / "tokenizer_config.json"
        try:
            config = decode_json(read_file(file, place, CONFIG_BYTES_MAX)) if file.is_file() else {}
        except ValueError as exc:
            raise ConfigError(place, f"{file} is not valid JSON: {exc}", _FOLDER_HINT) from None
        if not isinstance(config, dict):
            raise ConfigError(place, f"{file} is not a JSON object", _FOLDER_HINT)
        alone = folder / "chat_template.jinja"
        try:
            text = read_file(alone, place, CONFIG_BYTES_MAX).decode() if alone.is_file() else None
        except UnicodeError:
            raise ConfigError(place, f"{alone} is not UTF-8", "save the file as UTF-8") from None
        source = _default_template(config.get("chat_template")) if text is None else text
        if source is None:
            raise ConfigError(
                place,
                f"{folder} has no chat template",
                "give the tokenizer.json itself to count plain text, or a folder with chat_template.jinja",
            )
        special = {
            name: text
            for name, value in config.items()
            if name.endswith("_token")
            and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
        }
        return cls(source, special, place)

    def render(self, prompt: Prompt) -> str:
        """Return the text that the server tokenizes. Raises ConfigError if the template refuses it."""
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages += [{"role": role, "content": text_} for role, text_ in prompt.history]
        messages.append({"role": "user", "content": prompt.text})
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._token_texts
            )
        except self._template_error as exc:
            hint = "use a workload without system messages, or another template"
            raise ConfigError(self._place, f"the chat template refuses the prompt: {exc}", hint) from None


def _default_template(template: Any) -> str | None:
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # This replaces Jinja's filter, which writes HTML entities: models were not trained on these.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


CHAT_TEMPLATE: Final = "chat template"
MODEL: Final = "model tokenizer"
REFERENCE: Final = "reference tokenizer"
_SAMPLE: Final = bytes(range(0, 256, 16))


def as_text(prompt: Prompt) -> str:
    """Join the parts of a prompt without roles, for completions and for counts by a reference tokenizer."""
    texts = (prompt.system, *(text for _, text in prompt.history), prompt.text)
    return "\n\n".join(text for text in texts if text)


class TokenCounter:
    """Counts the tokens of whole prompts, in the text that `render` returns for them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Callable[[Prompt], str] = as_text,
        *,
        method: str = REFERENCE,
        specials: int = 0,
    ) -> None:
        """`specials`: number of tokens that the server adds. `method`: method of counting, for reports."""
        self.method = method
        """Method of counting, for reports."""
        self.tokenizer = tokenizer
        self.words = fitting_words(tokenizer)
        self._render = render
        """Returns the text that the server makes of a prompt."""
        self._specials = specials
        """Number of special tokens that the server adds to a prompt."""

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        counts = self.tokenizer.counts([self._render(prompt) for prompt in prompts])
        return [len(p.ids) or n + self._specials for p, n in zip(prompts, counts, strict=True)]

    def overhead(self, like: Prompt) -> tuple[int, int]:
        """Return the tokens before and after the user's text, if the other parts are those of `like`."""
        sample = self.words.text(_SAMPLE)
        rendered = self._render(Prompt(text=sample, system=like.system, history=like.history))
        head, separator, _ = rendered.rpartition(sample)
        if not separator:
            whole, text = self.tokenizer.counts([rendered, sample])
            return self._specials + max(0, whole - text), 0
        # Count the head alone, and the head with the sample: the text before the sample can change how the
        # first word of the sample is cut into tokens; the text after the sample cannot.
        whole, until, before = self.tokenizer.counts([rendered, head + sample, head])
        return self._specials + before, whole - until


def load_counter(text: str, *, chat: bool, place: str) -> TokenCounter:
    """Load the counter for `tiktoken:NAME`, `sim`, a tokenizer.json or a model's folder.

    Only a folder has a chat template and special tokens. Raises ConfigError naming `place`.
    """
    tokenizer = open_tokenizer(text, place)
    if not isinstance(tokenizer, _HuggingFace) or not Path(text).is_dir():
        return TokenCounter(tokenizer)
    if chat:
        return TokenCounter(tokenizer, ChatTemplate.load(Path(text), place).render, method=CHAT_TEMPLATE)
    return TokenCounter(tokenizer, method=MODEL, specials=tokenizer.specials)
