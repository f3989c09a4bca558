"""System under test: bench file and its validation, detection, starter file, and start of the server."""
