"""Schedulers of the simulated engine: whole batches (`batching.py`) and iterating ones (`iterating.py`)."""
