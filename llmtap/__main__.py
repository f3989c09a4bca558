"""Entry point of `python -m llmtap`: the `llmtap` command."""

from llmtap.cli.__main__ import main

if __name__ == "__main__":
    main()
