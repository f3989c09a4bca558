"""One module per trace format: what it can hold, how it is recognised, and how it is read and written."""
