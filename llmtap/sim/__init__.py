"""The simulated inference engine: its schedulers, sweeps in virtual time, and a server in real time."""
