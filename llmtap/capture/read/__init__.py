"""Read captures: rows or Exchanges, missing exchanges, statistics. Also read and write compressed files."""
