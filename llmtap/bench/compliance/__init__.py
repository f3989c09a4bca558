"""Requirements of the IETF draft, and the check of a benchmark report against each of them."""
