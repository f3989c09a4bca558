"""Tests of llmtap, a package so that no installed `tests` stands in the way of the processes they start."""
