"""Write exchanges: spool, Parquet files, object stores."""
