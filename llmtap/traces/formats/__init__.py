"""One file per trace format: what it can hold, how it is read and written."""
