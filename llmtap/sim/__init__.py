"""The simulated engine; for now a tiny server with an exact schedule, for the demo and the tests."""
