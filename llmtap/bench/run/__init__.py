"""Runs of benchmark tests: order and resumption, sessions that send loads, measurements, results folders."""
