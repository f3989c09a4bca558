"""Run the tests of the draft: sessions, loads, measurements, results folders."""
