"""Commands of `llmtap`: parse options, call the other packages, print results. `main.py` imports them all."""
