"""Privacy of a capture: block hashes of prompts, sessions, redaction."""
