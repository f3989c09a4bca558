"""How many tokens texts have, by Hugging Face's `tokenizers` and the file of `llmtap sim tokenizer`.

    python token_counts.py TOKENIZER_JSON < TEXTS > COUNTS

Texts and counts are JSON lists. Runs in the gateway's environment, which has the package.
"""

import json
import sys

from tokenizers import Tokenizer

if __name__ == "__main__":
    tokenizer = Tokenizer.from_file(sys.argv[1])
    json.dump([len(tokenizer.encode(text).ids) for text in json.load(sys.stdin)], sys.stdout)
