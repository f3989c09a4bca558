"""Folders of tests/data that several tests read."""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
CORPUS = DATA / "dialects"
ORACLE = DATA / "oracle"
TRACES = DATA / "traces"
