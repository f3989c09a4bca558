"""exo-bench mode (seed 003)."""
