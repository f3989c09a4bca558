"""Simulation in virtual time: from a trace to figures, captures and sweeps."""
