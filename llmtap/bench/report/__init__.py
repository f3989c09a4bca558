"""Reports of benchmarks: JSON, minimum and full text, and comparison of systems."""
