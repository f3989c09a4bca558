"""Simulation in virtual time: single runs, grids of runs, their captures, and fits of the latency models."""
