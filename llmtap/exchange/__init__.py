"""The Exchange, and the sans-IO observer that builds one from timestamped bytes."""
