"""Exchanges kept: a spool that survives kills, Parquet files, what privacy allows, other people's formats."""
