"""Capture of exchanges (request and response) in Parquet files: crash-safe writing, privacy, reading."""
