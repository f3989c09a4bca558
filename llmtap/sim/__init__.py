"""The simulated engine: schedulers in virtual time, and a server whose tokens are due at known times."""
