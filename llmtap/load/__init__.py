"""Load: requests sent on time, and what became of them."""
