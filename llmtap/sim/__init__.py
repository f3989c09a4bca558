"""The simulated engine: schedulers in virtual time, and a server that sends tokens at computed times."""
