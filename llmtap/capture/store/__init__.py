"""Write a capture: rows, spool (crash-safe file), Parquet files, folders and object stores."""
