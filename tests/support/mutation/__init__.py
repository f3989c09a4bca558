"""Break the code that a row of docs/compliance.md cites, and run the test that the row cites: `claims.py`."""
