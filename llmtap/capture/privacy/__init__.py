"""Privacy of a capture: block hashes of prompts, sessions, coarse sizes and times, redaction."""
