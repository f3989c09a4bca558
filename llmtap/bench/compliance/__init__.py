"""Requirements of the IETF draft (`requirements.csv`), and the check of a report against each of them."""
