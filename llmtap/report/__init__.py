"""A Summary for people: terminal tables."""
