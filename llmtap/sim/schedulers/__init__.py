"""Schedulers of the simulated engine: they decide which requests each server processes next."""
