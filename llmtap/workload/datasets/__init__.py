"""Workloads of people's own data: files that lie here, of a known shape. Nothing is fetched."""
