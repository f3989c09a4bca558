"""Load: for now the small closed-loop client of the demo."""
