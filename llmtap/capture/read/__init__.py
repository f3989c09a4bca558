"""Read captures: rows or Exchanges, what is missing, statistics. Also plain files with compression."""
