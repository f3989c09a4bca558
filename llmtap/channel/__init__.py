"""The frames and the bounded channel that carry what the relay saw to the meter."""
