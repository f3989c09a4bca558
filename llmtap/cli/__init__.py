"""Commands: one file per command; they parse options, call packages and render results."""
