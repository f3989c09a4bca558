"""Reports of the bench: minimum and full report, comparison of systems."""
