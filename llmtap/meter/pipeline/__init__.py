"""From frames to finished exchanges, and to windows, captures, exports and live views."""
