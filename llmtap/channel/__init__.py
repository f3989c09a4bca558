"""Transport of observations from a relay to the meter: frames, the bounded channel, experiment assignment."""
