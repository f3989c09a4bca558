"""What is to be asked, and when: arrivals, lengths, shared prefixes, conversations, texts of exact length."""
