"""One file per command; thin."""
