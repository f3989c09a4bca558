"""One module per trace format: what it can hold, and how it is read and written."""
