"""The noun: an Exchange, and the sans-IO observer that builds one from stamped bytes."""
