"""A tokenizer out of nothing but a seed, for clients that want one: `tiny_tokenizer.py FOLDER`.

A byte-level BPE of 2,000 entries, trained on invented words; any environment with transformers can make it.
The words that `sse_server` says are a token each: who counts an answer's tokens comes to the server's number.
"""

from __future__ import annotations

import random
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEED = 6
VOCABULARY = 2_000
ANSWER_TOKENS_MAX = 1_000
SYLLABLES = """
    ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo yu za bra cle dri flo gru ster
""".split()  # noqa: SIM905
TURNS = (
    "{% for message in messages %}"
    "<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def main(folder: str) -> None:
    rng = random.Random(SEED)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(3_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(rng.choices(words, k=12)) for _ in range(4_000)), trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=TURNS,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )
    whole.add_tokens([f" word{i}" for i in range(ANSWER_TOKENS_MAX)])
    whole.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
