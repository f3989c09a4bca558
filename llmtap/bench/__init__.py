"""The benchmarking tests of IETF seed 000, their statistics, and what they may claim."""
