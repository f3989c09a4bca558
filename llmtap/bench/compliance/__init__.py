"""Requirements of the IETF draft, and the judgement of reports by each of them."""
