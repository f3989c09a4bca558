"""The data plane: accepts, forwards and timestamps, and understands nothing of the body."""
