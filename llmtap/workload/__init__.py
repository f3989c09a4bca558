"""Workloads: requests with their times and prompts, which are generated, or come from data sets or traces."""
