"""Transport of observations from vantage to meter: frames, the bounded channel, experiment assignment."""
