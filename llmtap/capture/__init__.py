"""Capture of exchanges in Parquet files: crash-safe writing, privacy, and reading."""
