"""A model's folder as far as prompts need it: a tokenizer and a chat template, made here and now.

The tokenizer is what Qwen2 and many others have: a byte-level BPE, trained on a text of invented words, so
that plain English words are several tokens each, and special tokens of ChatML.
"""

import json
import random
from pathlib import Path
from typing import Any

from llmtap.workload.prompts.text import PATTERN, VOCABULARY

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SYLLABLES = """
    ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo yu za bra cle dri flo gru ster
""".split()  # noqa: SIM905


def tokenizer_of_its_own() -> Any:
    """Trained on words of its own: the same at each call."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chance = random.Random(20)
    words = ["".join(chance.choices(_SYLLABLES, k=chance.randint(1, 3))) for _ in range(1_500)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1_500,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    lines = [" ".join(chance.choices(words, k=12)) + "." for _ in range(1_500)]
    tokenizer.train_from_iterator([*lines, *(word for word in words)], trainer)
    return tokenizer


def model_folder(folder: Path, *, truncated: bool = False) -> Path:
    """The folder, with the template in its configuration."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizer_of_its_own()
    if truncated:
        tokenizer.enable_truncation(max_length=16)
        tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "pad_token": {"content": "<|endoftext|>", "lstrip": False},
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ours_in_tiktoken(name: str) -> dict[str, Any]:
    """The project's own vocabulary as an encoding of tiktoken, which pairs in another order."""
    letters = _byte_of_letter()
    ranks = {bytes(letters[c] for c in spelt): i for spelt, i in VOCABULARY.items()}
    return {"name": name, "pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": {}}


def _byte_of_letter() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found: dict[str, int] = {}
    for code in range(0x800):
        if 0xD800 <= code <= 0xDFFF:
            continue
        [(spelt, _)] = split.pre_tokenize_str(chr(code))
        found.update(zip(spelt, chr(code).encode(), strict=True))
    # Bytes that no text of two has stand for themselves or, where they cannot be printed, far behind.
    for letter in {c for spelt in VOCABULARY for c in spelt} - set(found):
        found[letter] = ord(letter)
    return found
