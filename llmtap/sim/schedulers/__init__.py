"""Schedulers of the simulated engine, one file each."""
