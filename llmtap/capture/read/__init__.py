"""Read captures: rows, streams, integrity, workload."""
