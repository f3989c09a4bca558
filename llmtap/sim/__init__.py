"""The simulated engine: schedulers in virtual time, and a gateway whose tokens are due at known times."""
