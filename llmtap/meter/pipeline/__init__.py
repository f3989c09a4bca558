"""From frames to windows, captures, exports and live views."""
