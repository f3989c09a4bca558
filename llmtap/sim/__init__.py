"""The simulated engine: schedulers in virtual time, and a gateway whose every token is due at a known time."""
