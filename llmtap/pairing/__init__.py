"""Pairs the exchanges of two vantages, one on each side of a gateway, and measures what the gateway did.

`matching.py` finds the exchanges that belong together, with evidence, and `live.py` does so while exchanges
end. `attempts.py` separates the attempt whose text was delivered from retries, fallbacks and side calls.
`alignment.py` compares texts by lengths and hashes. `figures.py` computes the figures of one pair,
`summary.py` (`pair_captures`) the summary of all pairs as JSON. `clock.py` converts the times of both
vantages to one clock. The package does no IO and reads no clock.
"""
