"""Load generator: sends requests on a schedule, from several processes, and records an Exchange of each."""
