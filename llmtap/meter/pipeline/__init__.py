"""From frames to windows, capture, exports and live views."""
