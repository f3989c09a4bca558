"""Makes a tiny language model with a tokenizer of its own, out of nothing but a seed.

Two layers of Qwen2, hidden size 64, random weights, a byte-level BPE of 2,000 entries trained on a text this
script composes, a ChatML template. It knows nothing and says nonsense, but it says it token by token, through
the same tokenizer, engine and HTTP server as a real one, and that is what a tap has to live with.

Runs in the engine's environment: `python tiny_model.py FOLDER`. The same seed gives the same files.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 20
VOCABULARY = 2_000
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Syllables make enough different words for BPE to find its 2,000 entries; the sentences carry what a real
# vocabulary has as well: upper case, digits, punctuation, accents, and letters of two, three and four bytes.
SYLLABLES = """
    ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo yu za bra cle dri flo gru ster ing ion
""".split()  # noqa: SIM905
SENTENCES = [
    "system user assistant: You are a helpful assistant.",
    "The tap stands between the client and the gateway, and forwards every byte untouched.",
    "Größenwahn, naïveté, piñata, smørrebrød, žluťoučký kůň; 你好世界。こんにちは 🙂 🚀",
    'def f(x: int) -> dict:\n    return {"x": x, "y": [1, 2, 3.14], "z": None}\n',
]


def corpus(seed: int) -> list[str]:
    """Lines of invented words with plain sentences between them."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(3_000)]
    invented = [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(4_000)]
    return invented + SENTENCES * 50


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text goes in, and the same text comes out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(SEED), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Random weights, drawn wide enough that the best token wins clearly: greedy answers then repeat exactly,
    whatever else is in the engine's batch."""
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2_048,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config.do_sample = False
    # With the head's rows of the special tokens at nothing, an answer ends where max_tokens says.
    with torch.no_grad():
        for token in SPECIALS:
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)].zero_()
    return model


def main(folder: Path) -> None:
    tokenizer = train_tokenizer()
    if len(tokenizer) != VOCABULARY:
        sys.exit(f"tiny_model: the vocabulary has {len(tokenizer)} entries, not {VOCABULARY}")
    model = make_model(tokenizer)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder}: {parameters:,} parameters, vocabulary {len(tokenizer)}, seed {SEED}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
