"""Pairs the exchanges of two vantages, one on each side of a gateway, and measures what the gateway did.

`matching.py` finds the exchanges that belong together, with evidence; `attempts.py` tells the attempt whose
text was delivered from retries, fallbacks and side calls; `alignment.py` compares texts by lengths and
hashes; `figures.py` computes the figures of a pair, and `summary.py` (`pair_captures`) those of all pairs as
JSON. `clock.py` brings both vantages to one clock. No IO, and no clock is read.
"""
