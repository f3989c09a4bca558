"""Path of an exchange in the meter: frames, assembled and measured, then windows, recent list, capture."""
