"""The data plane: accepts, forwards and timestamps; does not parse bodies."""
