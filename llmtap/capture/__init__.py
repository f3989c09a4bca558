"""Captures of exchanges: crash-safe spool, Parquet files, privacy, and the reader."""
