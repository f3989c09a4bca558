"""Running of benchmark tests: sessions, loads, measurements, results folders."""
