"""What a capture keeps of prompts: block hashes, sessions, redaction."""
