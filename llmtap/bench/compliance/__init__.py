"""What IETF seed 000 demands of a benchmark, sentence by sentence, and what a test's report shows of it."""
