"""A model of a given shape that knows nothing: its config, and a tokenizer as large as its vocabulary.

No weights: engines that can fill a shape at random (vLLM's `--load-format dummy`) need none, and what a
token costs does not depend on what it says. Every id of the tokenizer decodes to a word or a byte, so that
each token of an answer is text that a client can see.
"""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHATML: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SHAPES: Final[dict[str, dict[str, int | float]]] = {
    # Qwen2-7B: the figures of its published config.json.
    "qwen2-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
    },
    # Qwen2-1.5B: the same; loads in a fifth of the time.
    "qwen2-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    # For trying the scripts where there is no GPU.
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    },
}


def make_model(folder: Path, shape: str) -> Path:
    """The folder, with `config.json` and the files of a tokenizer in it; the same for the same shape."""
    folder.mkdir(parents=True, exist_ok=True)
    size = SHAPES[shape]
    specials = {name: i for i, name in enumerate(SPECIALS)}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": specials["<|im_end|>"],
        "pad_token_id": specials["<|endoftext|>"],
        **size,
    }
    _write(folder / "config.json", config)
    _tokenizer(int(size["vocab_size"])).save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": size["max_position_embeddings"],
    }
    _write(folder / "tokenizer_config.json", told)
    # Weights say nothing, so neither would an end that they draw: answers end where they are told to.
    _write(folder / "generation_config.json", {"do_sample": True, "temperature": 1.0})
    return folder


def _tokenizer(size: int) -> Tokenizer:
    """Bytes for what is read, as many words beside them as the vocabulary has room for."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIALS, *letters]
    names += [f"Ġw{i:06d}" for i in range(size - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def _write(file: Path, told: dict[str, object]) -> None:
    file.write_text(json.dumps(told, indent=1) + "\n")
