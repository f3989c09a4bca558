"""Load generator: sends requests on a schedule and records an Exchange of each."""
