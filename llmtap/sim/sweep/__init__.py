"""The wind tunnel: runs in virtual time, from a trace to figures, captures and sweeps."""
